"""Read as much of a damaged store as possible, for commands that list and show.

A stage that looks for finished work uses `Store` itself, which raises: work must not be repeated
just because its version cannot be read at the moment.
"""

from __future__ import annotations

from itertools import product

from quiver.schemas.errors import QuiverError
from quiver.schemas.refs import KINDS, Ref
from quiver.stages.core.files import storage_errors

from .listing import Summary
from .versions import Store


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
            refs = list(store.refs(name, kind))
        except OSError:  # also CorruptError
            errors.append(problem)
            continue
        for ref in refs:
            try:
                with storage_errors(ref):
                    entries.append((ref, Summary.of(store.version(ref).manifest)))
            except QuiverError as error:
                errors.append(error)
    for name in runs:
        try:
            with storage_errors(f"{name}/tags"):
                store.tag_names(name)
        except QuiverError as error:
            errors.append(error)
    return entries, errors
