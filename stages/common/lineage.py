"""Open a version's inputs, and check that they have the hash that its manifest names."""

from __future__ import annotations

from quiver.schemas.errors import LineageError
from quiver.schemas.refs import KINDS
from quiver.stages.common.store import Store, Version


def open_input(store: Store, version: Version, role: str) -> Version:
    """Return the version that `version` names as its input `role`.

    Raises LineageError if it names none, or if the input is missing, has other content, or has
    another kind than its role.
    """
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
