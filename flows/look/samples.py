"""Pick a few rows of a version to show to a person. Look here for the examples in a report.

Only the first shards are read, so a whole dataset is never held in memory or hashed. Rows are those
of `Joined.rows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from quiver.schemas.manifest import Manifest
from quiver.stages.core.store import Store, Version

from .joined import Selection, open_joined
from .paired import pair

MOST_BYTES = 12 * 1024 * 1024
ROWS = 10


class Samples(NamedTuple):
    """Up to `ROWS` rollouts of a version; from `best_and_worst`, up to `ROWS` of those with a
    reward."""

    rows: list[dict[str, Any]]
    candidates: int
    """Rollouts that they were chosen from."""
    rows_read: int

    def among(self, rows: int) -> str:
        """Return a phrase for how many rows were read; empty if all `rows` of the version were."""
        if self.rows_read == rows:
            return ""
        return f" among the first {self.rows_read:,} of {rows:,}"


def evenly(store: Store, rollouts: Version) -> Samples:
    """Return rollouts from the beginning to the end, evenly spaced."""
    joined = open_joined(store, rollouts.ref, MOST_BYTES)
    return Samples(joined.rows(_evenly_spaced(range(len(joined)))), len(joined), len(joined))


def best_and_worst(store: Store, rewards: Version) -> Samples:
    """Return rollouts, highest reward first: all if they are few, else the best `ROWS` / 2 and the
    worst `ROWS` / 2, from different prompts if there are enough.

    Raises LineageError if the rollouts are gone.
    """
    joined = open_joined(store, rewards.ref, MOST_BYTES)
    order = joined.order(Selection(sort="reward", descending=True))
    ranked = order[~np.isnan(joined.number("reward")[order])].tolist()
    chosen = ranked
    if len(ranked) > ROWS:
        group_ids = joined.rollouts.column("group_id").to_pylist()
        chosen = []
        seen: set[str] = set()
        for end in (ranked, ranked[::-1]):
            of_other_groups = []
            for position in end:
                if group_ids[position] not in seen and len(of_other_groups) < ROWS // 2:
                    seen.add(group_ids[position])
                    of_other_groups.append(position)
            repeated = [position for position in end if position not in of_other_groups]
            chosen += [*of_other_groups, *repeated][: ROWS // 2]
        chosen = [position for position in ranked if position in chosen]
    num_read = min(len(shards) for shards in (joined.rollouts, joined.shards["rewards"]))
    return Samples(joined.rows(chosen), len(ranked), num_read)


def groups(store: Store, rewards: Version) -> list[dict[str, Any]]:
    """Return up to `ROWS` prompts, evenly spaced from the highest mean reward to the lowest: rows
    of `Joined.groups`, each with the `rows` that have a reward, highest first. Raises LineageError
    if the rollouts are gone."""
    joined = open_joined(store, rewards.ref, MOST_BYTES)
    table = joined.groups().sort_by([("mean", "descending"), ("position", "ascending")])
    scored = [group for group in table.to_pylist() if group["mean"] is not None]
    chosen = _evenly_spaced(scored)
    for group in chosen:
        order = joined.order(Selection("reward", descending=True, group=group["group_id"]))
        group["rows"] = [row for row in joined.rows(order) if row.get("reward") is not None]
    return chosen


def before_and_after(
    store: Store, before: Manifest, after: Manifest
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the first answers to some held-out prompts, evenly spaced, from two evaluations: rows
    with a `score`. Raises LineageError if their rollouts are gone."""
    paired = pair(store, before.ref, after.ref, MOST_BYTES)
    first = paired.first.order(Selection(where="sample_index = 0"))
    chosen = _evenly_spaced(first[paired.places[first] >= 0].tolist())
    return list(zip(paired.first.rows(chosen), paired.partners(chosen), strict=True))


def _evenly_spaced(candidates: Any) -> list[Any]:
    """Return up to `ROWS` evenly spaced entries of a sequence."""
    count = len(candidates)
    places = sorted({index * count // ROWS for index in range(ROWS)}) if count else []
    return [candidates[place] for place in places]
