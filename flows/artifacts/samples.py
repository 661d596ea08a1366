"""A few rows of a version for a page: read from its first shards alone, so that a flow never holds, or hashes, a whole dataset."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import LineageError
from schemas.manifest import Manifest
from stages.common.store import Store, Version

from .text import wrapped

MOST_BYTES = 12 * 1024 * 1024
ROWS = 10
_PROMPT_LIMIT, _PROMPT_WIDTH = 160, 40


def head(version: Version, columns: list[str]) -> pa.Table:
    """These columns of the first shards."""
    return version.head(columns, MOST_BYTES)


def row(table: pa.Table, index: int) -> dict[str, Any]:
    """One row as plain values. (`take` would first copy the whole column into one piece.)"""
    return table.slice(index, 1).to_pylist()[0]


def evenly(count: int) -> list[int]:
    """Up to `ROWS` positions of `count`, evenly spaced."""
    return sorted({index * count // ROWS for index in range(ROWS)}) if count else []


def positions(table: pa.Table, column: str, wanted: list[str]) -> dict[str, int]:
    """Where in `table` the wanted values of a column stand; those that do not are left out."""
    found = pc.index_in(table[column], value_set=pa.array(wanted, pa.string()))
    where = pc.indices_nonzero(pc.is_valid(found)).to_pylist()
    return {wanted[found[index].as_py()]: index for index in where}


def questions(store: Store, manifest: Manifest, groups: list[str]) -> dict[str, str]:
    """By group: the last message of its prompt, or the rendered prompt, quoted. Empty where the prompts are gone."""
    entry = manifest.input("prompts")
    try:
        prompts = head(store.open(entry.ref), ["group_id", "messages", "prompt_text"])
    except LineageError:
        return {}
    return {group: _question(row(prompts, at)) for group, at in positions(prompts, "group_id", groups).items()}


def _question(prompt: dict[str, Any]) -> str:
    text = prompt["messages"][-1]["content"] if prompt["messages"] else prompt["prompt_text"]
    return wrapped(text, _PROMPT_LIMIT, _PROMPT_WIDTH)


def among(shown: int, whole: int) -> str:
    """Which rows a view could choose from, where these are not all."""
    return "" if shown == whole else f" among the first {shown:,} of {whole:,}"
