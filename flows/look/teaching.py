"""What rewards of the same rollouts would teach, from the saved answers alone: `quiver teach`.

    answer = teach(store, ["toy/rewards@1", "toy/rewards@2"])

A reward pulls the policy π to π* ∝ π exp(r / β). The saved answers to a prompt, weighted by exp(r /
β), stand for π* (`stages/evaluate/within_groups.py`). So the mean of any measure can be given
before and after: of each reward and its parts, the length, Markdown marks, and the share of cut
answers. The interval of a change is Student's over the prompts. No model is needed, and nothing is
written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.lineage import open_input
from quiver.stages.core.store import Store, Version
from quiver.stages.evaluate import within_groups
from quiver.stages.evaluate.statistics import paired_interval
from quiver.stages.turns.statistics import were_cut

from .joined import Joined
from .shards import Shards

MARKDOWN = r"(?m)^\s*(#{1,6} |[-*+] |\d+[.)] |>|```|\|)|\*\*"
"""Headings, list items, quotes, code fences, rows of tables, bold text."""
_EXAMPLES = 5
"""Rows named for each pair of rewards."""


def teach(store: Store, refs: Sequence[str], beta: float | None = None) -> dict[str, Any]:
    """Compare what rewards of the same rollouts would teach.

    Args:
        refs: Rewards versions.
        beta: Strength of the KL term, in units of reward; the smaller, the further the pull.
            Default: the reward's own standard deviation within the groups with contrast.

    Returns:
        rollouts, groups: the rollouts, and their number of prompts
        rewards: for each its `rewards`, `groups_with_contrast`, `beta`; the means of `samples` and
            `effective_samples` over the groups with contrast; and `measures`: `measure`, `now`,
            `then`, `change`, `interval`, `first_order`, and the number of prompts `n`
        opposed: for each pair `a`, `b`, the number of `rows` whose advantages have opposite signs,
            and `examples`: those of the largest product

    Raises:
        ConfigError: If a version is not of rewards, or `beta` is not positive.
        LineageError: If the rewards are of other rollouts, or one has no contrast in any group.
    """
    if beta is not None and not beta > 0:
        raise ConfigError("--beta", f"must be above 0, got {beta:g}", next="name a larger number")
    versions = [open_rewards(store, ref) for ref in refs]
    sources = [open_input(store, version, "rollouts") for version in versions]
    for version, source in zip(versions, sources, strict=True):
        if source.manifest.content_hash != sources[0].manifest.content_hash:
            raise LineageError(
                str(version.ref),
                f"scores {source.ref}, and {versions[0].ref} scores {sources[0].ref}",
                next=f"quiver reward RECIPE --rollouts {sources[0].ref}",
            )
    rollouts = Shards(sources[0])
    scored = [join_rewards(store, rollouts, version) for version in versions]
    groups = group_numbers(rollouts.column("group_id"))
    measures = _measures_of(scored)
    return {
        "rollouts": str(sources[0].ref),
        "groups": int(groups.max(initial=-1)) + 1,
        "rewards": [_lesson(joined, groups, measures, beta) for joined in scored],
        "opposed": [_opposed(a, b, groups) for a, b in combinations(scored, 2)],
    }


def open_rewards(store: Store, ref: str) -> Version:
    """Open a rewards version. Raises ConfigError if it is of another kind."""
    version = store.open(ref)
    if version.ref.kind != "rewards":
        problem = "expected a version of rewards"
        raise ConfigError(str(version.ref), problem, next=f"quiver ls {version.ref.run}")
    return version


def join_rewards(store: Store, rollouts: Shards, rewards: Version) -> Joined:
    """Join rewards with rollouts, which may be a part of the ones that they score."""
    return Joined(store, rewards.ref, {"rollouts": rollouts, "rewards": Shards(rewards)})


def group_numbers(group_ids: pa.ChunkedArray) -> np.ndarray:
    """Return the number of each row's group, from 0 in the order of the rows: [rows] int."""
    return group_ids.combine_chunks().dictionary_encode().indices.to_numpy()


def parts_of(joined: Joined) -> dict[str, np.ndarray]:
    """Return the parts of a reward, each as `part NAME`: [rows] float64."""
    names = [name for name in joined.numbers if name.startswith("part ")]
    return {name: joined.number(name) for name in names}


def _measures_of(scored: Sequence[Joined]) -> dict[str, np.ndarray]:
    """Return the measures by name: [rows] float64 each. A part that two rewards share is there
    once, unless its numbers differ; the only part of a reward is the reward."""
    measures = {f"reward of {joined.ref}": joined.number("reward") for joined in scored}
    for joined in scored:
        parts = parts_of(joined)
        for name, numbers in parts.items() if len(parts) > 1 else ():
            if not np.array_equal(measures.setdefault(name, numbers), numbers, equal_nan=True):
                measures[f"{name} of {joined.ref}"] = numbers
    cut = were_cut(scored[0].rollouts.version)
    measures["tokens"] = scored[0].number("tokens")
    marks = pc.count_substring_regex(scored[0].rollouts.column("completion_text"), MARKDOWN)
    measures["formatting"] = marks.to_numpy().astype(np.float64)
    measures["share cut"] = cut.to_numpy().astype(np.float64)
    return measures


def _lesson(
    joined: Joined, groups: np.ndarray, measures: Mapping[str, np.ndarray], beta: float | None
) -> dict[str, Any]:
    """Return what one reward pulls to. Raises LineageError if it pulls nowhere."""
    rewards = joined.number("reward")
    counts = within_groups.num_known(rewards, groups)
    is_meant = within_groups.has_contrast(rewards, groups)
    if not is_meant.any():
        problem = "all answers to a prompt have the same reward, for every prompt"
        if counts.max(initial=0) < 2:
            problem = "no prompt has two scored answers, so that there is nothing to compare"
        raise LineageError(str(joined.ref), problem, next=f"quiver view {joined.ref}")
    beta = beta or within_groups.spread(rewards, groups)
    weights = within_groups.tilted(rewards, groups, beta)
    effective = within_groups.effective_samples(weights, groups)
    rows = []
    for name, measure in measures.items():
        pulled = within_groups.pull(rewards, measure, groups, beta)
        if len(pulled.now):
            row = {field: float(numbers.mean()) for field, numbers in pulled._asdict().items()}
            row |= {"measure": name, "then": row["now"] + row["change"], "n": len(pulled.now)}
            rows.append(row | {"interval": paired_interval(pulled.change)})
    return {
        "rewards": str(joined.ref),
        "groups_with_contrast": int(is_meant.sum()),
        "beta": beta,
        "samples": float(counts[is_meant].mean()),
        "effective_samples": float(effective[is_meant].mean()),
        "measures": rows,
    }


def _opposed(a: Joined, b: Joined, groups: np.ndarray) -> dict[str, Any]:
    first, second = a.number("reward"), b.number("reward")
    strengths = within_groups.opposed(first, second, groups)
    num_rows = int((strengths > 0).sum())
    furthest = np.argsort(-strengths, kind="stable")[: min(_EXAMPLES, num_rows)]
    ids = a.rollouts.column("rollout_id").take(furthest).to_pylist()
    examples = [
        {"rollout_id": id, "a": float(first[row]), "b": float(second[row])}
        for id, row in zip(ids, furthest, strict=True)
    ]
    return {"a": str(a.ref), "b": str(b.ref), "rows": num_rows, "examples": examples}
