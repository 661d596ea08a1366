"""Shell completion for words that are not finished: references, runs, tags, keys.

A completer only reads, and offers nothing if it cannot. `quiver --install-completion` makes the
shell ask.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quiver.schemas.errors import QuiverError

from .next_step import default_store

if TYPE_CHECKING:
    from quiver.stages.common.store import Store

_MOST_VERSIONS = 50


def references(context: typer.Context, incomplete: str) -> list[str]:
    """Offer `arith/rollouts` while run or kind are typed, and then its versions.

    Versions are `arith/rollouts@latest`, the newest numbers, and tags.
    """
    return _offered(context, incomplete, with_versions=True)


def datasets(context: typer.Context, incomplete: str) -> list[str]:
    """Offer only `arith/rollouts`, to which versions are added."""
    return _offered(context, incomplete, with_versions=False)


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """Offer names of runs."""
    return [run for run in _runs(_store(context)) if run.startswith(incomplete)]


def runs_and_references(context: typer.Context, incomplete: str) -> list[str]:
    """Offer names of runs until a slash is typed, then the same as `references`."""
    return (references if "/" in incomplete else runs)(context, incomplete)


def tags(context: typer.Context, incomplete: str) -> list[str]:
    """Offer tags such as `arith/policy@prod`."""
    offered = []
    with suppress(QuiverError):
        store = _store(context)
        for run in _runs(store):
            for name in store.tag_names(run):
                kind = (store.tagged(run, name) or "").rpartition("@")[0]
                offered.append(f"{kind}@{name}")
    return [name for name in offered if name.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """Offer keys such as `optimize.learning_rate=`, for --set."""
    return [f"{name}=" for name in _keys() if name.startswith(incomplete)]


def sections_and_keys(incomplete: str) -> list[str]:
    """Offer sections and keys, such as `optimize` and `optimize.learning_rate`."""
    from .. import keys

    names = [section.name for section in keys.sections() if section.name]
    return [name for name in dict.fromkeys([*names, *_keys()]) if name.startswith(incomplete)]


def _offered(context: typer.Context, incomplete: str, *, with_versions: bool) -> list[str]:
    from quiver.schemas.refs import KINDS

    offered: list[str] = []
    with suppress(QuiverError):
        store = _store(context)
        for run, kind in product(_runs(store), KINDS):
            dataset = f"{run}/{kind}"
            if with_versions and incomplete.startswith(dataset):
                offered += [f"{dataset}@{version}" for version in _versions(store, run, kind)]
            elif dataset.startswith(incomplete) and store.numbers(run, kind):
                offered.append(dataset)
    return [name for name in offered if name.startswith(incomplete)]


def _versions(store: Store, run: str, kind: str) -> list[str | int]:
    """Return the words that may follow `run/kind@`."""
    newest = store.numbers(run, kind)[::-1][:_MOST_VERSIONS]
    tag_names = [
        name
        for name in store.tag_names(run)
        if (store.tagged(run, name) or "").startswith(f"{run}/{kind}@")
    ]
    return [*(["latest"] if newest else []), *newest, *tag_names]


def _runs(store: Store | None) -> list[str]:
    return store.runs() if store else []


def _store(context: typer.Context) -> Store | None:
    """Return the store that the command will read, guessed from the words before; None if there is
    none."""
    from quiver.stages.common.store import Store

    path = context.params.get("store") or os.environ.get("QUIVER_STORE")
    # After an option without a value yet, the words before it were not assigned.
    recipe = context.params.get("recipe") or next(iter(context.args), None)
    with suppress(QuiverError, OSError, ValueError):
        if recipe and not path and "recipe" in context.params:
            path = tomllib.loads(Path(recipe).read_text()).get("store")
        return Store(path or default_store(), create=False)
    return None


def _keys() -> Iterator[str]:
    """Yield every key of a recipe, with its section."""
    from .. import keys

    for section in keys.sections():
        yield from (key.name for key in section.keys)
