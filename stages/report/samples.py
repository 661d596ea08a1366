"""A few rows of a version for a person: read from its first shards alone, so that nobody holds, or
hashes, a whole dataset."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import LineageError
from quiver.schemas.manifest import Manifest
from quiver.stages.common.store import Store, Version

MOST_BYTES = 12 * 1024 * 1024
ROWS = 10


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
    """By group of these rollouts: the last message of its prompt, or the rendered prompt. Empty
    where the prompts are gone."""
    entry = manifest.input("prompts")
    try:
        prompts = head(store.open(entry.ref), ["group_id", "messages", "prompt_text"])
    except LineageError:
        return {}
    return {
        group: _question(row(prompts, at))
        for group, at in positions(prompts, "group_id", groups).items()
    }


def _question(prompt: dict[str, Any]) -> str:
    return prompt["messages"][-1]["content"] if prompt["messages"] else prompt["prompt_text"]


class Ranked(NamedTuple):
    """The rollouts of most and of least reward, as rows of two tables that belong together by
    `rollout_id`."""

    rewards: pa.Table
    texts: pa.Table
    places: list[tuple[int, int]]
    """Where the chosen ones stand in `rewards` and in `texts`, by falling reward: all, or half from
    each end."""
    known: int
    """How many have a reward."""


def best_and_worst(
    rewards: Version, sampled: Version, columns: list[str], count: int = ROWS
) -> Ranked:
    """Up to `count` rollouts of `sampled`, with these columns (`rollout_id` among them), ranked by
    `rewards`."""
    texts, paid = head(sampled, columns), head(rewards, ["rollout_id", "reward", "parts"])
    places = pc.index_in(
        paid["rollout_id"], value_set=texts["rollout_id"].combine_chunks()
    )  # by id, never by position
    values = paid["reward"].to_numpy()
    known = np.flatnonzero(~np.isnan(values) & places.is_valid().to_numpy())
    ranked = known[np.argsort(-values[known], kind="stable")].tolist()
    half = count // 2
    chosen = ranked if len(ranked) <= count else ranked[:half] + ranked[-half:]
    return Ranked(paid, texts, [(index, places[index].as_py()) for index in chosen], len(ranked))


def among(shown: int, whole: int) -> str:
    """Which rows a view could choose from, where these are not all."""
    return "" if shown == whole else f" among the first {shown:,} of {whole:,}"
