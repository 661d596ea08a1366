"""Shell completion for words that are not finished: references, runs, tags, keys.

A completer only reads, and offers nothing if it cannot. Of what it returns, typer offers the words
that begin as typed. `quiver --install-completion` makes the shell ask.
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
    from quiver.stages.core.store import Store

_MOST_VERSIONS = 50


def references(context: typer.Context, incomplete: str) -> list[str]:
    """Offer `arith/rollouts` while run or kind are typed, and then its versions.

    Versions are `arith/rollouts@latest`, the newest numbers, and tags.
    """
    offered = []
    for store, run, kind in _kinds(context):
        dataset = f"{run}/{kind}"
        numbers = store.numbers(run, kind)
        if not incomplete.startswith(dataset):
            offered += [dataset] * bool(numbers)
            continue
        newest = numbers[::-1][:_MOST_VERSIONS]
        offered += [f"{dataset}@{version}" for version in [*["latest"][: len(newest)], *newest]]
        offered += [tag for tag in tags(context) if tag.startswith(f"{dataset}@")]
    return offered


def datasets(context: typer.Context) -> list[str]:
    """Offer only `arith/rollouts`, to which versions are added."""
    return [f"{run}/{kind}" for store, run, kind in _kinds(context) if store.numbers(run, kind)]


def runs(context: typer.Context) -> list[str]:
    """Offer names of runs."""
    return list(dict.fromkeys(run for _, run, _ in _kinds(context)))


def runs_and_references(context: typer.Context, incomplete: str) -> list[str]:
    """Offer names of runs until a slash is typed, then the same as `references`."""
    return references(context, incomplete) if "/" in incomplete else runs(context)


def tags(context: typer.Context) -> list[str]:
    """Offer tags such as `arith/policy@prod`."""
    offered = []
    with suppress(QuiverError):
        for store, run, kind in _kinds(context):
            for name in store.tag_names(run):
                if (store.tagged(run, name) or "").startswith(f"{run}/{kind}@"):
                    offered.append(f"{run}/{kind}@{name}")
    return offered


def settings() -> list[str]:
    """Offer keys such as `optimize.learning_rate=`, for --set."""
    from quiver.flows import keys

    return [f"{key.name}=" for section in keys.sections() for key in section.keys]


def sections_and_keys() -> list[str]:
    """Offer sections and keys, such as `optimize` and `optimize.learning_rate`."""
    from quiver.flows import keys

    names = [section.name for section in keys.sections()]
    names += [key.name for section in keys.sections() for key in section.keys]
    return list(filter(None, dict.fromkeys(names)))


def _kinds(context: typer.Context) -> Iterator[tuple[Store, str, str]]:
    """Yield every run and kind of the store that the command will read, with the store.

    The store is guessed from the words before. Nothing is yielded if there is none, or if it cannot
    be read.
    """
    from quiver.schemas.refs import KINDS
    from quiver.stages.core.store import Store

    path = context.params.get("store") or os.environ.get("QUIVER_STORE")
    # After an option without a value yet, the words before it were not assigned.
    recipe = context.params.get("recipe") or next(iter(context.args), None)
    with suppress(QuiverError, OSError, ValueError):
        if recipe and not path and "recipe" in context.params:
            path = tomllib.loads(Path(recipe).read_text()).get("store")
        store = Store(path or default_store(), create=False)
        for run, kind in product(store.runs(), KINDS):
            yield store, run, kind
