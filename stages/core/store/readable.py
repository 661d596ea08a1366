"""Read as much of a damaged store as possible, for commands that list and show.

A stage that looks for finished work uses `Store` itself, which raises: work must not be repeated
just because its version cannot be read at the moment.
"""

from __future__ import annotations

from itertools import product

from quiver.schemas.errors import CorruptError, QuiverError
from quiver.schemas.refs import KINDS, Ref

from .index import IndexEntry
from .storage import storage_errors
from .versions import Store


def readable_entries(
    store: Store, run: str | None = None
) -> tuple[list[tuple[Ref, IndexEntry]], list[QuiverError]]:
    """Return every visible version, readable or torn, and the errors of everything else.

    Returns:
        Versions by run, kind and number; and an error for each version, kind or tag that cannot be
        read.
    """
    entries: list[tuple[Ref, IndexEntry]] = []
    errors: list[QuiverError] = []
    runs = [run] if run else store.runs()
    for name, kind in product(runs, KINDS):
        index = store.index(name, kind)
        try:
            with storage_errors(f"{name}/{kind}"):
                entries += [(Ref(name, kind, entry.number), entry) for entry in index.entries()]
            continue
        except OSError as error:  # CorruptError and ResourceError are OSErrors
            problem = error
        try:
            with storage_errors(f"{name}/{kind}"):
                numbers = index.numbers()
        except OSError:
            errors.append(problem)
            continue
        for number in numbers:
            ref = Ref(name, kind, number)
            try:
                with storage_errors(ref):
                    entries.append((ref, IndexEntry.of(store.version(ref).manifest, ())))
            except CorruptError as error:
                message = f"{error.code} {error.object}: {error.message}"
                entries.append((ref, IndexEntry("torn", number, error=message)))
            except QuiverError as error:
                errors.append(error)
    for name in runs:
        try:
            with storage_errors(f"{name}/tags"):
                store.tag_names(name)
        except QuiverError as error:
            errors.append(error)
    return entries, errors
