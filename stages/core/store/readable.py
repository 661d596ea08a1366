"""Read as much of a damaged store as possible, for commands that list and show.

A stage that looks for finished work uses `Store` itself, which raises: work must not be repeated
just because its version cannot be read at the moment.
"""

from __future__ import annotations

from itertools import product

from quiver.schemas.errors import LineageError, QuiverError
from quiver.schemas.refs import KINDS, Ref, as_version
from quiver.stages.core.files import storage_errors

from . import marks
from .listing import EXPIRED, REMOVED, Summary
from .versions import Store, Version


def open_kept(store: Store, ref: str) -> tuple[Version, dict[str, str]]:
    """Open a version, also one of which only the manifest is kept.

    Returns:
        The version; and its mark, {"expired": when and why} or {"removed": when and why}, if its
        data are gone and no other version stands in for it.

    Raises CorruptError, or LineageError if there is no such manifest.
    """
    try:
        return store.open(ref), {}
    except LineageError:
        kept = as_version(ref)
        for name in (REMOVED, EXPIRED) if kept else ():
            mark = marks.read(store.storage, kept, name)
            if mark is not None and store.has_manifest(kept):
                version = store.version(kept)
                version.manifest  # noqa: B018  a torn manifest is found here, not later
                return version, {name: str(mark)}
        raise


def readable_entries(
    store: Store, run: str | None = None
) -> tuple[list[tuple[Ref, Summary]], list[QuiverError]]:
    """Return every visible version, readable or torn, and the errors of everything else.

    Returns:
        Versions by run, kind and number; and an error for each version, kind or tag that cannot be
        read.
    """
    entries: list[tuple[Ref, Summary]] = []
    errors: list[QuiverError] = []
    runs = [run] if run else store.runs()
    for name, kind in product(runs, KINDS):
        try:
            with storage_errors(f"{name}/{kind}"):
                entries += store.summaries(name, kind)
            continue
        except QuiverError as error:
            problem = error
        try:
            listing = store.listing(name, kind)
            numbers = listing.visible(expired=store.sees_expired)
        except OSError:  # also CorruptError
            errors.append(problem)
            continue
        for number in numbers:
            ref = Ref(name, kind, number)
            try:
                with storage_errors(ref):
                    entries.append((ref, listing.read(number)))
            except QuiverError as error:
                errors.append(error)
    for name in runs:
        try:
            with storage_errors(f"{name}/tags"):
                store.tag_names(name)
        except QuiverError as error:
            errors.append(error)
    return entries, errors
