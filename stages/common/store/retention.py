"""What leaves a store: versions that are deleted on purpose, and damaged ones that are put aside.

A version that is deleted is first written down as `expired` in its kind's ledger, then moved to
`.trash`, then deleted; its manifest and its number stay in the ledger. A damaged one is moved to
`STORE/.quarantine` and is not expired: what was made of it misses it until it is made again.
"""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from quiver.schemas.errors import ConfigError, ConflictError, QuiverError
from quiver.schemas.refs import Ref

from .storage import make_folder, storage_errors
from .versions import Store
from .writer import readers_at_work

_QUARANTINE = ".quarantine"


def users_of(store: Store, ref: Ref) -> tuple[list[str], list[str]]:
    """What refers to a version: tags of its run, and references of versions made of it. A torn tag
    or manifest is passed over; `verify` tells of it."""
    tags, versions = [], []
    for name in store.tag_names(ref.run):
        with suppress(QuiverError):
            if store.tagged(ref.run, name) == str(ref):
                tags.append(name)
    for other in store.refs():
        with suppress(QuiverError):
            manifest = store.version(other).manifest
            sources = {entry.ref for entry in (*manifest.inputs, *manifest.models)}
            if str(ref) in sources and other != ref:
                versions.append(str(other))
    return tags, versions


def remove(store: Store, ref: str | Ref, why: str = "") -> tuple[Ref, list[str]]:
    """Delete a version on purpose: its reference, and versions that were made of it.

    ConflictError where a tag points at it, or where a stage that reads it is at work.
    """
    target = store.resolve(ref)
    for name in store.tag_names(target.run):
        store.tagged(target.run, name)  # a torn tag may point at it
    tags, users = users_of(store, target)
    if tags:
        raise ConflictError(
            str(target),
            f"tag {tags[0]} points at it",
            next="point the tag at another version first",
        )
    readers = readers_at_work(store, target)
    if readers:
        raise ConflictError(
            str(target), f"{readers[0]} reads it", next="wait for it, then delete it"
        )
    with storage_errors(target):
        store.ledger(target.run, target.kind).expire(target.version, why)
        store.storage.delete_tree(target.folder)
    return target, users


def is_damaged(store: Store, ref: Ref) -> bool:
    """Whether a version's manifest or files are not what was written."""
    try:
        store.version(ref).verify()
    except QuiverError:
        return True
    return False


def quarantine(store: Store, ref: str | Ref) -> tuple[Ref, Path]:
    """Put a damaged version aside, byte for byte: its reference, and the folder where it is now.
    ConfigError where it is whole.

    Its number stays given. Whoever makes the same content again gets it.
    """
    target = store.resolve(ref)
    if not is_damaged(store, target):
        raise ConfigError(str(target), "is whole", next=f"quiver rm {target}")
    name = f"{target.run}-{target.kind}-{target.version}-{uuid.uuid4().hex[:8]}"
    folder = store.path / _QUARANTINE / name
    with storage_errors(target):
        store.ledger(target.run, target.kind).note_missing([target.version])
        make_folder(folder.parent)
        shutil.move(store.storage.path(target.folder), folder)
    return target, folder
