"""What a version was made of, opened, and held to the hash that its manifest names."""

from __future__ import annotations

from quiver.schemas.errors import LineageError
from quiver.stages.common.store import Store, Version


def open_input(store: Store, version: Version, role: str) -> Version:
    """The version that `version` names as its input `role`. LineageError where it names none, or
    that is not there, or is another."""
    entry = version.manifest.require_input(role)
    source = store.open(entry.ref)
    if source.manifest.content_hash != entry.content_hash:
        raise LineageError(
            str(source.ref),
            f"is not what {version.ref} was made of",
            next=f"quiver lineage {version.ref}",
        )
    return source
