"""Pick a few rows of a version to show to a person. Look here for the examples in a report.

Only the first shards are read, so a whole dataset is never held in memory or hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import LineageError
from quiver.schemas.manifest import Manifest
from quiver.stages.common.lineage import open_input
from quiver.stages.common.store import Store, Version

from .episodes import told_of_turns
from .joined import told_of_prompt
from .shards import columns_of
from .thumbnails import MOST

MOST_BYTES = 12 * 1024 * 1024
ROWS = 10
_TEXTS = ["rollout_id", "group_id", "completion_text", "completion_ids", "finish_reason"]
_TURNS = ["turns", "end_reason"]


class Samples(NamedTuple):
    """Up to `ROWS` rollouts of a version; from `best_and_worst`, up to `ROWS` of those with a
    reward."""

    rows: list[dict[str, Any]]
    """Rollout columns plus `asked`, an `Asked`. With rewards, also `reward` and `parts`, and for
    rewards/2 `turn_rewards`. For rollouts/2, also `end_reason`, and `turns` as `told_of_turns`
    returns them."""
    candidates: int
    """Rollouts that they were chosen from."""
    rows_read: int

    def among(self, rows: int) -> str:
        """Return a phrase for how many rows were read; empty if all `rows` of the version were."""
        if self.rows_read == rows:
            return ""
        return f" among the first {self.rows_read:,} of {rows:,}"


class Asked(NamedTuple):
    """The question of a group."""

    prompt: str
    """The last message or the rendered prompt; the group's id if the prompts are gone."""
    reference: Any = None
    """None if the rows have no such column."""
    images: Sequence[dict[str, Any]] = ()


class Compared(NamedTuple):
    """A held-out prompt, answered by two policies."""

    asked: Asked
    before: dict[str, Any]
    """`completion_text` and `score`; for rollouts/2 also `turns` and `end_reason`."""
    after: dict[str, Any]


class Group(NamedTuple):
    """A prompt with its rollouts, highest reward first."""

    asked: Asked
    mean: float
    """Mean over the rollouts that have a reward."""
    rows: list[dict[str, Any]]


def evenly(store: Store, rollouts: Version) -> Samples:
    """Return rollouts from the beginning to the end, evenly spaced."""
    texts = rollouts.head(_there(rollouts, _TEXTS + _TURNS), MOST_BYTES)
    rows = [_row(texts, index) for index in _evenly_spaced(len(texts))]
    _add_prompts(store, rollouts, rows)
    return Samples(rows, len(texts), len(texts))


def best_and_worst(store: Store, rewards: Version) -> Samples:
    """Return rollouts, highest reward first: all if they are few, else the best `ROWS` / 2 and the
    worst `ROWS` / 2, from different prompts if there are enough.

    Raises LineageError if the rollouts are gone.
    """
    rollouts = open_input(store, rewards, "rollouts")
    ranked, row_at, rows_read = _ranked(rollouts, rewards)
    chosen = list(range(len(ranked)))
    if len(ranked) > ROWS:
        best = _of_different_groups(ranked, chosen, ROWS // 2, set())
        taken = {ranked[place] for place in best}
        worst = _of_different_groups(ranked, chosen[::-1], ROWS // 2, taken)
        chosen = sorted({*best, *worst})
    rows = [row_at(place) for place in chosen]
    _add_prompts(store, rollouts, rows)
    return Samples(rows, len(ranked), rows_read)


def groups(store: Store, rewards: Version) -> list[Group]:
    """Return up to `ROWS` prompts with all of their rollouts, evenly spaced from the highest mean
    reward to the lowest. Raises LineageError if the rollouts are gone."""
    rollouts = open_input(store, rewards, "rollouts")
    ranked, row_at, _ = _ranked(rollouts, rewards)
    places: dict[str, list[int]] = {}
    for place, group in enumerate(ranked):
        places.setdefault(group, []).append(place)
    rows = {group: [row_at(place) for place in places[group]] for group in places}
    means = {group: fmean(row["reward"] for row in rows[group]) for group in rows}
    in_order = sorted(means, key=means.__getitem__, reverse=True)
    chosen = [in_order[index] for index in _evenly_spaced(len(in_order))]
    told = _prompts(store, rollouts, chosen)
    return [Group(told.get(group, Asked(group)), means[group], rows[group]) for group in chosen]


def _ranked(
    rollouts: Version, rewards: Version
) -> tuple[list[str], Callable[[int], dict[str, Any]], int]:
    """Rank the rollouts that have a reward, the highest reward first.

    Returns:
        The group of each ranked rollout, a function that returns the row at a rank, and the number
        of rows that were read.
    """
    texts = rollouts.head(_there(rollouts, _TEXTS + _TURNS), MOST_BYTES)
    columns = _there(rewards, ["rollout_id", "reward", "parts", "turn_rewards"])
    scores = rewards.head(columns, MOST_BYTES)
    # by id, never by position
    text_rows = pc.index_in(scores["rollout_id"], value_set=texts["rollout_id"].combine_chunks())
    values = scores["reward"].to_numpy()
    scored = np.flatnonzero(~np.isnan(values) & text_rows.is_valid().to_numpy())
    ranked = scored[np.argsort(-values[scored], kind="stable")].tolist()
    group_ids = texts["group_id"].to_pylist()

    def row_at(place: int) -> dict[str, Any]:
        index = ranked[place]
        return _row(texts, text_rows[index].as_py()) | _row(scores, index)

    of_row = text_rows.to_pylist()
    return [group_ids[of_row[index]] for index in ranked], row_at, min(len(texts), len(scores))


def _of_different_groups(
    group_ids: list[str], places: list[int], count: int, taken: set[str]
) -> list[int]:
    """Return the first `count` of `places` whose groups differ and are not in `taken`. If too few
    differ, fill up with other places."""
    seen = set(taken)
    chosen = []
    for place in places:
        if group_ids[place] not in seen:
            seen.add(group_ids[place])
            chosen.append(place)
    others = [place for place in places if place not in set(chosen[:count])]
    return [*chosen[:count], *others[: max(0, count - len(chosen))]]


def _rollouts_of(store: Store, evaluation: Manifest) -> Version:
    """Open the rollouts of an evaluation. Raises LineageError if they are gone or are no
    rollouts."""
    return open_input(store, store.with_expired().open(evaluation.ref), "rollouts")


def before_and_after(store: Store, before: Manifest, after: Manifest) -> list[Compared]:
    """Return the first answers to some held-out prompts, evenly spaced, from two evaluations.
    Raises LineageError if their rollouts are gone."""
    answers_before = _first_answers(store, before)
    answers_after = _first_answers(store, after)
    both = [group for group in answers_after.places if group in answers_before.places]
    chosen = [both[index] for index in _evenly_spaced(len(both))]
    prompts = _prompts(store, _rollouts_of(store, after), chosen)
    return [
        Compared(
            prompts.get(group, Asked(group)), answers_before.of(group), answers_after.of(group)
        )
        for group in chosen
    ]


def _add_prompts(store: Store, rollouts: Version, rows: list[dict[str, Any]]) -> None:
    prompts = _prompts(store, rollouts, [row["group_id"] for row in rows])
    for row in rows:
        row["asked"] = prompts.get(row["group_id"], Asked(row["group_id"]))


def _prompts(store: Store, rollouts: Version, groups: list[str]) -> dict[str, Asked]:
    """Return the prompts of these groups; empty if the prompts are gone."""
    columns = ["group_id", "messages", "prompt_text", "columns", "images"]
    try:
        prompts = open_input(store, rollouts, "prompts")
        table = prompts.head(_there(prompts, columns), MOST_BYTES)
    except LineageError:
        return {}
    matches = pc.is_in(table["group_id"], value_set=pa.array(groups, pa.string()))
    told = {row["group_id"]: told_of_prompt(row) for row in table.filter(matches).to_pylist()}
    return {
        group: Asked(about["prompt"], about.get("reference"), about.get("images", ())[:MOST])
        for group, about in told.items()
    }


class _Answers(NamedTuple):
    """The first sample of each group."""

    texts: pa.Table
    places: dict[str, int]
    """Rows of `texts`, by group."""
    scores: dict[str, float | None]

    def of(self, group: str) -> dict[str, Any]:
        """Return the answer of a group, with its `score`."""
        return {**_row(self.texts, self.places[group]), "score": self.scores.get(group)}


def _first_answers(store: Store, evaluation: Manifest) -> _Answers:
    rollouts = _rollouts_of(store, evaluation)
    columns = ["group_id", "sample_index", "completion_text", *_TURNS]
    texts = rollouts.head(_there(rollouts, columns), MOST_BYTES)
    scores = store.open(evaluation.ref).head(["group_id", "sample_index", "score"], MOST_BYTES)
    first = pc.field("sample_index") == 0
    scores = {row["group_id"]: row["score"] for row in scores.filter(first).to_pylist()}
    texts = texts.filter(first)
    places = {group: place for place, group in enumerate(texts["group_id"].to_pylist())}
    return _Answers(texts, places, scores)


def _row(table: pa.Table, index: int) -> dict[str, Any]:
    """Return one row as plain values. (`take` would first copy the whole column into one piece.)"""
    row = table.slice(index, 1).to_pylist()[0]
    if "turns" in row:
        row["turns"] = told_of_turns(row["turns"])
    return row


def _there(version: Version, columns: list[str]) -> list[str]:
    """Return the `columns` that the version has."""
    return [name for name in columns if name in columns_of(version)]


def _evenly_spaced(count: int) -> list[int]:
    """Return up to `ROWS` evenly spaced positions below `count`."""
    return sorted({index * count // ROWS for index in range(ROWS)}) if count else []
