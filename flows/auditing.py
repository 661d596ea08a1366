"""Look for reward hacking in a finished run: the training reward against a second reward, iteration
by iteration, on saved rollouts. `quiver audit RUN --with RECIPE`.

    with by_hand(recipe):
        answer = audit(store, "toy", by_reward(recipe.reward, store, "toy", 64), 20)
    answer = audit(store, "toy", by_versions(store, ["toy/rewards@9", "toy/rewards@10"]), 20)

The second reward is a recipe's [reward], or rewards versions that exist. A recipe scores some
prompts of each iteration, drawn once (stage `subset`), and these are ordinary versions of the run
`RUN.audit`: a second audit finds them. Optimizing an imperfect reward first raises the true one
too, and later lowers it (https://arxiv.org/abs/2210.10760). So the audit says from where on the
training reward has gained more than the second one. It says what the training reward pays for
beyond the second one: length (https://arxiv.org/abs/2404.04475), repetition, Markdown. It looks
back at what is saved, and warns of nothing early. The second reward may be wrong as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.manifest import Manifest
from quiver.stages.core.config import parse
from quiver.stages.core.lineage import open_input
from quiver.stages.core.store import Store, Version
from quiver.stages.evaluate import within_groups
from quiver.stages.evaluate.statistics import CONFIDENCE, holm, unpaired_difference
from quiver.stages.generate import subset
from quiver.stages.reward.functions import repetition
from quiver.stages.reward.stage import Config as RewardConfig

from .calls import perform
from .look.gather import Manifests, ends_of
from .look.shards import Shards
from .look.teaching import MARKDOWN, group_numbers, join_rewards, open_rewards, parts_of

NUM_ROWS = 20
"""Rows to read."""
_ROUNDING = 1e-6
"""A gap below this share of the largest reward is rounding, since rewards are float32."""
SURFACES = ("length", "repetition", "formatting")
"""What a reward may pay for beside quality: tokens, share of repeated 4-grams, Markdown marks."""
Judge = Callable[[Version], Version | None]
"""Returns the second reward's version for rollouts; None if there is none."""


def by_reward(reward: RewardConfig, store: Store, run: str, num_prompts: int) -> Judge:
    """Score a part of the rollouts with the [reward] of a recipe, inside of `by_hand(recipe)`."""
    config = parse(subset.Config, {"prompts": num_prompts}, "audit")

    def judge(rollouts: Version) -> Version | None:
        into = f"{run}.audit"
        try:
            part = perform("subset", config, {"rollouts": str(rollouts.ref)}, into=into).ref
        except LineageError:  # its prompts are gone, or it was imported without any
            return None
        label = f"a part of {rollouts.ref}"
        scored = perform("reward", reward, {"rollouts": part}, label=label, into=into)
        return store.open(scored.ref)

    return judge


@dataclass(frozen=True)
class Named:
    """A judge of rewards versions, by the content hash of the rollouts that they score."""

    versions: dict[str, Version]

    def __call__(self, rollouts: Version) -> Version | None:
        return self.versions.get(rollouts.manifest.content_hash)


def by_versions(store: Store, refs: Sequence[str]) -> Named:
    """Take the second reward from rewards versions, one for each rollouts version or a part of
    it. Raises ConfigError if two are of the same rollouts."""
    versions: dict[str, Version] = {}
    for ref in dict.fromkeys(refs):
        version = open_rewards(store, ref)
        scored = open_input(store, version, "rollouts").manifest
        whole = scored.require_input("rollouts") if scored.stage == "subset" else scored
        other = versions.setdefault(whole.content_hash, version)
        if other is not version:
            problem = f"scores {whole.ref}, as {other.ref} does"
            raise ConfigError(str(version.ref), problem, next="name one of the two")
    return Named(versions)


def audit(store: Store, run: str, judge: Judge, num_iterations: int) -> dict[str, Any]:
    """Compare the training reward of a run with a second reward, along its line of policies.

    Args:
        num_iterations: Most iterations to look at, evenly spaced; the first and the last are among
            them. If `judge` names versions, all of their iterations are looked at, and no others.

    Returns:
        run: its name
        iterations: one entry for each iteration, see `_entry`. All but the first also have a `gap`:
            how much more the training reward has gained since the first one than the second reward,
            each in its standard deviation over all rows. With `interval`; the p-value `p_holm`,
            corrected for the number of iterations; and `told_apart`: it is at most 0.05
        opens: the iteration from which on every gap is above 0 and told apart; None if there is
            none
        rows: those of the highest training reward and the lowest second reward
        left_out: iterations whose files expired, or without a second reward

    Raises LineageError if no iteration has both rewards, or if none was trained on the rollouts of
    a named version.
    """
    tables: dict[int, pa.Table] = {}
    left_out = []
    for number, trained in _chosen(store, run, judge, num_iterations):
        rounds = list(_scored_rows(store, trained, judge))
        if sum(map(len, rounds)):
            tables[number] = pa.concat_tables(rounds, promote_options="default")
        else:
            left_out.append(number)
    if not tables:
        problem = "no iteration has saved rollouts with both rewards"
        raise LineageError(f"run {run}", problem, next=f"quiver ls {run}")
    rows = pa.concat_tables(tables.values(), promote_options="default")
    # a reward that is the same everywhere has no unit, and adds nothing to a gap
    units = [rows[name].to_numpy().std() or 1.0 for name in ("training", "second")]
    entries = [{"iteration": number, **_entry(table)} for number, table in tables.items()]
    for entry, gap in zip(entries[1:], _gaps(list(tables.values()), rows, units), strict=True):
        entry.update(gap)
    opens = None
    for entry in reversed(entries[1:]):
        if not (entry["told_apart"] and entry["gap"] > 0):
            break
        opens = entry["iteration"]
    furthest = np.argsort(-_advances(rows, units), kind="stable")[:NUM_ROWS]
    return {
        "run": run,
        "iterations": entries,
        "opens": opens,
        "rows": rows.take(furthest).to_pylist(),
        "left_out": left_out,
    }


def _chosen(
    store: Store, run: str, judge: Judge, num_iterations: int
) -> Iterator[tuple[int, list[Manifest]]]:
    """Yield the number and the rewards of the iterations that `audit` looks at."""
    manifests = Manifests(store)
    newest = manifests.store.open(ends_of(store, run)[0]).manifest
    policies = list(manifests.line(newest))[::-1]
    places = [place for place, policy in enumerate(policies) if policy.stage == "optimize"]
    if isinstance(judge, Named):
        indices = _of_named(run, judge, [policies[place] for place in places])
    else:
        count = min(len(places), num_iterations)
        indices = np.linspace(0, len(places) - 1, count).round().astype(int).tolist()
    for index in indices:
        place = places[index]
        learned_from = {entry.ref for policy in policies[:place] for entry in policy.inputs}
        versions = manifests.made_of(policies[place], learned_from)
        yield index + 1, [each for each in versions if each.kind == "rewards"]


def _of_named(run: str, judge: Named, policies: Sequence[Manifest]) -> list[int]:
    """Return which of the policies first learned from the rollouts of the named versions. Raises
    LineageError if none did from those of one version."""
    first: dict[str, int] = {}
    for index, policy in enumerate(policies):
        for entry in policy.inputs:
            if entry.role.partition(".")[0] == "rollouts":
                first.setdefault(entry.content_hash, index)
    for content_hash, version in judge.versions.items():
        if content_hash not in first:
            raise LineageError(
                str(version.ref),
                f"scores {version.manifest.require_input('rollouts').ref}, which no iteration of "
                f"run {run} learned from",
                next=f"quiver ls {run}",
            )
    return sorted({first[content_hash] for content_hash in judge.versions})


def _scored_rows(store: Store, trained: Sequence[Manifest], judge: Judge) -> Iterator[pa.Table]:
    """Yield the rows of each round that have both rewards.

    Columns: ids and text, `rewards` and `second_rewards` (versions), `training` and `second`,
    `SURFACES`, and `part NAME` for each part of the training reward.
    """
    for manifest in trained:
        rollouts = None
        with suppress(LineageError):  # its files expired
            training = store.open(manifest.ref)
            rollouts = open_input(store, training, "rollouts")
        second = judge(rollouts) if rollouts else None
        if second is None:
            continue
        shards = Shards(open_input(store, second, "rollouts"))
        ours, theirs = (join_rewards(store, shards, each) for each in (training, second))
        texts = shards.column("completion_text")
        ids = shards.column("completion_ids").to_pylist()
        columns = {
            **{name: shards.column(name) for name in ("rollout_id", "group_id")},
            "completion_text": texts,
            "rewards": np.full(len(shards), str(training.ref)),
            "second_rewards": np.full(len(shards), str(second.ref)),
            "training": ours.number("reward"),
            "second": theirs.number("reward"),
            "length": ours.number("tokens"),
            "repetition": -np.array(repetition(ids)),
            "formatting": pc.count_substring_regex(texts, MARKDOWN).cast("float64"),
            **parts_of(ours),
        }
        is_scored = ~np.isnan(columns["training"] + columns["second"])
        yield pa.table(columns).filter(pa.array(is_scored))


def _entry(rows: pa.Table) -> dict[str, Any]:
    """Return the numbers of an iteration.

    rows: rows that have both rewards
    training, second: their means
    correlation: of both rewards, within prompts
    partial: of the training reward with each of `SURFACES` within prompts, given the second reward
    shares: share of each part in the training reward's variance within prompts
    """
    training, second = (rows[name].to_numpy() for name in ("training", "second"))
    groups = group_numbers(rows["group_id"])
    parts = [name for name in rows.column_names if name.startswith("part ")]
    columns = [rows[name].to_numpy() for name in parts]
    shares = within_groups.variance_shares(training, columns, groups)
    return {
        "rows": len(rows),
        "training": float(training.mean()),
        "second": float(second.mean()),
        "correlation": within_groups.correlation(training, second, groups),
        "partial": {
            name: within_groups.correlation(training, rows[name].to_numpy(), groups, second)
            for name in SURFACES
        },
        "shares": dict(zip(parts, shares, strict=True)),
    }


def _gaps(
    tables: Sequence[pa.Table], rows: pa.Table, units: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the fields about the gap of each iteration after the first."""
    largest = [np.abs(rows[name].to_numpy()).max() for name in ("training", "second")]
    least = _ROUNDING * (np.array(largest) / units).max()
    gains = [_gains(table, units) for table in tables]
    compared = [unpaired_difference(gains[0], later) for later in gains[1:]]
    corrected = holm([p if abs(gap) > least else 1.0 for gap, _, p in compared])
    return [
        {"gap": gap, "interval": interval, "p_holm": p, "told_apart": p <= 1 - CONFIDENCE}
        for (gap, interval, _), p in zip(compared, corrected, strict=True)
    ]


def _advances(rows: pa.Table, units: Sequence[float]) -> np.ndarray:
    """Return how far each row's training reward is above its second one, in their units. [rows]"""
    return rows["training"].to_numpy() / units[0] - rows["second"].to_numpy() / units[1]


def _gains(rows: pa.Table, units: Sequence[float]) -> np.ndarray:
    """Return the mean of `_advances` of each prompt. [prompts]"""
    groups = group_numbers(rows["group_id"])
    return np.bincount(groups, _advances(rows, units)) / np.bincount(groups)
