"""Choose the source rows of a round: the next ones of seeded shuffles, or by a curriculum.

A curriculum prefers rows with the right difficulty, measured by earlier rewards.

    choose(rows=8, limit=4, seed=7, round=2)           # positions of the second four
    choose_rows(config, group_ids, rewards, store)     # positions, and how the curriculum chose
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from quiver.schemas.errors import ConfigError, LineageError, printable
from quiver.schemas.plain import bad_text
from quiver.stages.core.store import Store, Version

from .config import Config, Curriculum

log = logging.getLogger(__name__)
NEVER = "not asked"
WITHIN = "within"
OUTSIDE = "outside"
_ROUNDING = 1e-6
"""Largest distance of a mean from a bound that counts as equal to it; a share of large ones."""


def name_rows(config: Config, table: pa.Table) -> list[str]:
    """Return one unique name per row of the source `table`. Raises ConfigError."""
    num_rows = table.num_rows
    if config.group_id is None:
        digits = max(6, len(str(num_rows - 1)))
        return [f"{config.group_prefix}{row:0{digits}d}" for row in range(num_rows)]
    names: dict[str, int] = {}
    for row, cell in enumerate(table.column(config.group_id).to_pylist()):
        name = f"{config.group_prefix}{cell}"
        problem = bad_text(name)
        if cell in (None, ""):
            problem = "is empty"
        elif name in names:
            problem = f"is also in row {names[name] + 1}"
        if problem:
            raise ConfigError(
                f"source {printable(config.source)} row {row + 1}",
                f"group id {printable(repr(cell))} {problem}",
                next="make the group ids unique, or leave data.group_id out",
            )
        names[name] = row
    return list(names)


def choose(rows: int, limit: int | None, seed: int, round: int) -> list[int]:
    """Return the positions that a round takes: the next `limit` of successive seeded shuffles.

    An evaluation, round 0, takes the first ones, as round 1 does. No position is taken twice in a
    round.
    """
    if limit is None:
        return list(range(rows))
    size = min(limit, rows)
    start = _first_row(round, size)
    return _shuffled(rows, size, seed, start + size)[start:][:size]


def _first_row(round: int, size: int) -> int:
    """Return the number of rows that the rounds before took."""
    return max(round - 1, 0) * size


def _shuffled(rows: int, size: int, seed: int, length: int) -> list[int]:
    """Return at least `length` positions of successive shuffles, each of all rows.

    If a round of `size` rows spans two epochs, the second shuffle begins with rows that the round
    does not have yet. The generator is numpy's legacy one, whose stream is frozen: the
    same seed gives the same rows on every version.
    """
    order: list[int] = []
    for epoch in range(length // rows + 1):
        shuffle = np.random.RandomState([seed % 2**32, epoch]).permutation(rows).tolist()
        num_open = len(order) % size  # rows of a round that the previous epoch began
        if num_open:
            open_rows = set(order[-num_open:])
            completing = [row for row in shuffle if row not in open_rows][: size - num_open]
            shuffle = list(dict.fromkeys(completing + shuffle))
        order += shuffle
    return order


def choose_rows(
    config: Config, group_ids: Sequence[str], rewards: Sequence[Version], store: Store
) -> tuple[list[int], dict[str, int]]:
    """Choose the rows of the round of `config`.

    First come rows that none of the `rewards` has, in the order of `choose`, beginning with the
    rows it takes. Then come rows whose last mean reward is within the curriculum's bounds, then the
    others. Within both groups, rows that were not asked for the longest time come first. Rows that
    were dropped because they are too long come last of all: they were asked, and have no reward.

    Args:
        config: Limit, seed, round and curriculum.
        group_ids: Of all rows of the source.
        rewards: Measured by earlier iterations, oldest first.
        store: Store of the rewards' inputs.

    Returns:
        Positions of the chosen rows, and how many of them were not asked, within and outside the
        bounds; the counts are empty without a curriculum.

    Raises LineageError if the rewards belong to another source.
    """
    num_rows = len(group_ids)
    curriculum = config.curriculum
    if curriculum is None:
        chosen = choose(num_rows, config.limit, config.seed, config.round)
        return chosen[: config.first], {}
    measured: dict[str, tuple[str, float]] = {}
    for age, version in enumerate(rewards):
        for group in _dropped_groups(config, version, store):
            measured[group] = OUTSIDE, math.inf
        table = version.table(["group_id", "reward"])
        for row in table.group_by("group_id").aggregate([("reward", "mean")]).to_pylist():
            mean = row["reward_mean"]
            # A row without a score is neither too easy nor too hard.
            is_within = mean is None or _is_within(curriculum, mean)
            measured[row["group_id"]] = WITHIN if is_within else OUTSIDE, age
    size = min(config.limit, num_rows)
    start = _first_row(config.round, size)
    in_turn = dict.fromkeys(_shuffled(num_rows, size, config.seed, start + 2 * num_rows)[start:])
    judged = {row: measured.get(group_ids[row], (NEVER, 0)) for row in in_turn}
    places = (NEVER, WITHIN, OUTSIDE)
    order = sorted(in_turn, key=lambda row: (places.index(judged[row][0]), judged[row][1]))
    counts = Counter(judged[row][0] for row in order[:size])
    return order[:size][: config.first], {place: counts[place] for place in places}


def _is_within(curriculum: Curriculum, mean: float) -> bool:
    """True if a mean reward is within the bounds, but for the rounding of rewards to float32."""
    low, high = curriculum.low, curriculum.high
    return low <= mean <= high or any(
        math.isclose(mean, bound, rel_tol=_ROUNDING, abs_tol=_ROUNDING) for bound in (low, high)
    )


def open_rewards(config: Config, store: Store, refs: str | list[str] | None) -> dict[str, Version]:
    """Open the rewards for a curriculum, by role: `rewards`, `rewards.2`, …

    Raises ConfigError if rewards are given without a curriculum.
    """
    names = [refs] if isinstance(refs, str) else refs or []
    if names and config.curriculum is None:
        raise ConfigError(
            "data.curriculum",
            "rewards are given, and the recipe has no data.curriculum that would use them",
            next="add data.curriculum, or leave --rewards out",
        )
    return {
        f"rewards.{number}" if number > 1 else "rewards": store.open(name)
        for number, name in enumerate(names, 1)
    }


def _dropped_groups(config: Config, rewards: Version, store: Store) -> list[str]:
    """Return the groups that were too long to be asked in the iteration of `rewards`.

    They are read from manifests, since tables may have expired. Logs a warning if a manifest lists
    only the first ones.

    Raises LineageError if it belongs to another source, whose group ids mean other rows.
    """
    with_expired = store.with_expired()  # a manifest is enough
    manifest = rewards.manifest
    dropped: list[str] = []
    for role, metric in (("rollouts", "dropped"), ("prompts", "dropped_group_ids")):
        entry = manifest.input(role)
        if entry is None:
            break
        manifest = with_expired.open(entry.ref).manifest
        listed = manifest.metrics.get(metric, ())
        if len(listed) < (num_dropped := manifest.status.get("dropped", 0)):
            message = "%s: %d of %d dropped rows are listed; the others count as not asked"
            log.warning(message, manifest.ref, len(listed), num_dropped)
        dropped += listed
    names = ("source_sha256", "group_id", "group_prefix")
    expected = {name: getattr(config, name) for name in names}
    if {name: manifest.config.get(name) for name in names} != expected:
        raise LineageError(
            str(rewards.ref),
            f"measured rows of {manifest.config.get('source', 'no prompts that are known')}, not "
            f"the current rows of {config.source}",
            next="name rewards of the same rows, or none",
        )
    return dropped
