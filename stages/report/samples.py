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
_TEXTS = ["rollout_id", "group_id", "completion_text", "completion_ids", "finish_reason"]


class Samples(NamedTuple):
    """Up to `ROWS` rollouts of a version."""

    rows: list[dict[str, Any]]
    """Their columns; `prompt`, the last message or the rendered prompt (the group's id where the
    prompts are gone); and, where rewards were asked for, `reward` and `parts`."""
    candidates: int
    """How many they were chosen from."""
    rows_read: int

    def among(self, rows: int) -> str:
        """What they could be chosen from, where that is less than all `rows` of the version."""
        if self.rows_read == rows:
            return ""
        return f" among the first {self.rows_read:,} of {rows:,}"


class Compared(NamedTuple):
    """A held-out prompt, answered by two policies."""

    prompt: str
    before: str
    score_before: float | None
    after: str
    score_after: float | None


def evenly(store: Store, rollouts: Version) -> Samples:
    """Rollouts from the beginning to the end, evenly spaced."""
    texts = rollouts.head(_TEXTS, MOST_BYTES)
    rows = [_row(texts, index) for index in _evenly_spaced(len(texts))]
    _add_prompts(store, rollouts, rows)
    return Samples(rows, len(texts), len(texts))


def best_and_worst(store: Store, rewards: Version) -> Samples:
    """Rollouts by falling reward: all, or half of them from each end. LineageError: they are
    gone."""
    rollouts = store.open(rewards.manifest.require_input("rollouts").ref)
    texts = rollouts.head(_TEXTS, MOST_BYTES)
    scores = rewards.head(["rollout_id", "reward", "parts"], MOST_BYTES)
    # by id, never by position
    text_rows = pc.index_in(scores["rollout_id"], value_set=texts["rollout_id"].combine_chunks())
    values = scores["reward"].to_numpy()
    scored = np.flatnonzero(~np.isnan(values) & text_rows.is_valid().to_numpy())
    ranked = scored[np.argsort(-values[scored], kind="stable")].tolist()
    chosen = ranked if len(ranked) <= ROWS else ranked[: ROWS // 2] + ranked[-(ROWS // 2) :]
    rows = [_row(texts, text_rows[index].as_py()) | _row(scores, index) for index in chosen]
    _add_prompts(store, rollouts, rows)
    return Samples(rows, len(ranked), min(len(texts), len(scores)))


def before_and_after(store: Store, before: Manifest, after: Manifest) -> list[Compared]:
    """The first answers to some held-out prompts, evenly chosen, of two evaluations. LineageError:
    their rollouts are gone."""
    answers_before = _first_answers(store, before)
    answers_after = _first_answers(store, after)
    both = [group for group in answers_after if group in answers_before]
    chosen = [both[index] for index in _evenly_spaced(len(both))]
    prompts = _prompts(store, store.open(after.require_input("rollouts").ref), chosen)
    return [
        Compared(prompts.get(group, group), *answers_before[group], *answers_after[group])
        for group in chosen
    ]


def _add_prompts(store: Store, rollouts: Version, rows: list[dict[str, Any]]) -> None:
    prompts = _prompts(store, rollouts, [row["group_id"] for row in rows])
    for row in rows:
        row["prompt"] = prompts.get(row["group_id"], row["group_id"])


def _prompts(store: Store, rollouts: Version, groups: list[str]) -> dict[str, str]:
    """What these groups were asked; nothing where the prompts are gone."""
    columns = ["group_id", "messages", "prompt_text"]
    try:
        table = store.open(rollouts.manifest.require_input("prompts").ref).head(columns, MOST_BYTES)
    except LineageError:
        return {}
    matches = pc.is_in(table["group_id"], value_set=pa.array(groups, pa.string()))
    return {
        row["group_id"]: row["messages"][-1]["content"] if row["messages"] else row["prompt_text"]
        for row in table.filter(matches).to_pylist()
    }


def _first_answers(store: Store, evaluation: Manifest) -> dict[str, tuple[str, float | None]]:
    """By group the text and the score of its first sample."""
    rollouts = store.open(evaluation.require_input("rollouts").ref)
    texts = rollouts.head(["group_id", "sample_index", "completion_text"], MOST_BYTES)
    scores = store.open(evaluation.ref).head(["group_id", "sample_index", "score"], MOST_BYTES)
    first = pc.field("sample_index") == 0
    scores = {row["group_id"]: row["score"] for row in scores.filter(first).to_pylist()}
    return {
        row["group_id"]: (row["completion_text"], scores.get(row["group_id"]))
        for row in texts.filter(first).to_pylist()
    }


def _row(table: pa.Table, index: int) -> dict[str, Any]:
    """One row as plain values. (`take` would first copy the whole column into one piece.)"""
    return table.slice(index, 1).to_pylist()[0]


def _evenly_spaced(count: int) -> list[int]:
    """Up to `ROWS` positions of `count`."""
    return sorted({index * count // ROWS for index in range(ROWS)}) if count else []
