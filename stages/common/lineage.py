"""What a version was made of, opened, and held to the hash that its manifest names."""

from __future__ import annotations

from quiver.schemas.errors import LineageError
from quiver.schemas.refs import KINDS
from quiver.stages.common.store import Store, Version


def open_input(store: Store, version: Version, role: str) -> Version:
    """The version that `version` names as its input `role`. LineageError where it names none, or
    that is not there, or is another, or of another kind than the role is called."""
    entry = version.manifest.require_input(role)
    source = store.open(entry.ref)
    if role in KINDS and source.ref.kind != role:
        raise LineageError(
            str(version.ref), f"its {role} are {source.ref}", next=f"quiver lineage {version.ref}"
        )
    if source.manifest.content_hash != entry.content_hash:
        raise LineageError(
            str(source.ref),
            f"is not what {version.ref} was made of",
            next=f"quiver lineage {version.ref}",
        )
    return source
