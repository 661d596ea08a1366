"""Compares two evaluations prompt by prompt: the difference, its standard error and Student's
interval.

They are paired by the prompts' contents, so their run, recipe, policy and row names do not matter.
Refused: evaluations of different scores or by different rewards, and evaluations without a prompt
in common.

    compare(store, store.open("a/evaluations@1"), store.open("b/evaluations@4"))
    compare_each(store, [(first, second), (first, third)])      # with Holm's correction
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from quiver.schemas.errors import ConfigError, LineageError, printable
from quiver.schemas.manifest import Manifest
from quiver.schemas.metrics import score_numbers
from quiver.stages.core.config import parse
from quiver.stages.core.lineage import pair_prompts
from quiver.stages.core.run.stage import is_made_alike, load_stage
from quiver.stages.core.store import Store, Version

from . import estimators
from .config import Config
from .stage import scores_by_group, threshold_of
from .statistics import CONFIDENCE, holm


def compare(store: Store, a: Version, b: Version) -> dict[str, Any]:
    """Compare evaluation `b` with evaluation `a`.

    Returns:
        a, b: reference, policy, score, stderr and n of each; `null`, answers left out; `limited`,
            cut answers, which count as `limited_score`
        difference: b − a of the score and of each pass@k that both measured, with stderr, n, the
            ends of a 95 % interval and the p-value
        confidence: 0.95
        better, worse, equal: number of prompts with a higher, lower or equal mean score in b
        only_a, only_b: prompts that only one of them has a score for
        notes: other differences between the two
    Raises:
        LineageError: they measured different scores, by different rewards, or have no prompt in
            common.
    """
    config_a, config_b = (
        parse(Config, version.manifest.config, str(version.ref)) for version in (a, b)
    )
    if config_a.score != config_b.score:
        raise LineageError(
            f"{a.ref} {b.ref}",
            f"measured {printable(config_a.score)} and {printable(config_b.score)}, which are "
            "different scores",
            next="evaluate both policies by recipes with the same evaluate.score",
        )
    if not are_scored_alike(store, a, b):
        named = [
            f"{score_numbers(each.manifest.metrics)['score']:.4f} of {policy_of(each)} is by "
            f"{reward_of(store, each)}"
            for each in (a, b)
        ]
        policies = dict.fromkeys(map(policy_of, (a, b)))
        measure = " and ".join(f"`quiver evaluate RECIPE --policy {each}`" for each in policies)
        raise LineageError(
            f"{a.ref} {b.ref}",
            f"two rewards have no difference: {', and '.join(named)}",
            next=f"measure both by one [reward]: {measure}",
        )
    names_a, names_b = pair_prompts(store, a, b)
    scores_a = {names_a[group]: scores for group, scores in scores_by_group(a.table()).items()}
    scores_b = {names_b[group]: scores for group, scores in scores_by_group(b.table()).items()}
    num_paired = len(scores_a.keys() & scores_b.keys())
    if not num_paired:
        raise LineageError(
            f"{a.ref} {b.ref}",
            "no prompt has a score in both",
            next="evaluate both policies by recipes with the same [data.held_out]",
        )
    means_a = estimators.group_means(scores_a)
    means_b = estimators.group_means(scores_b)
    changes = [means_b[name] - mean for name, mean in means_a.items() if name in means_b]
    # Each has its own threshold; if they differ, a note says so.
    difference = estimators.differences(
        scores_b,
        scores_a,
        [k for k in config_a.k if k in config_b.k],
        (threshold_of(config_b), threshold_of(config_a)),
    )
    return {
        "a": _summary(a),
        "b": _summary(b),
        "difference": difference,
        "confidence": CONFIDENCE,
        "better": sum(change > 0 for change in changes),
        "worse": sum(change < 0 for change in changes),
        "equal": changes.count(0),
        "only_a": len(scores_a) - num_paired,
        "only_b": len(scores_b) - num_paired,
        "notes": notes_on(store, a, b, config_a, config_b),
    }


def compare_each(store: Store, pairs: Sequence[tuple[Version, Version]]) -> dict[str, Any]:
    """Compare the evaluations of each pair.

    Returns `comparisons`, the answers of `compare`. In each, `difference.score` also has `p_holm`,
    its p-value corrected for the number of pairs, and `told_apart`: it is at most 0.05.
    """
    comparisons = [compare(store, *pair) for pair in pairs]
    scores = [answer["difference"]["score"] for answer in comparisons]
    for score, corrected in zip(scores, holm([score["p"] for score in scores]), strict=True):
        score["p_holm"] = corrected
        score["told_apart"] = corrected <= 1 - CONFIDENCE
    return {"confidence": CONFIDENCE, "comparisons": comparisons}


def are_scored_alike(store: Store, a: Version, b: Version) -> bool:
    """Return False if what two evaluations measured, a part or the whole reward, was scored in two
    ways. Corrections by a person (stage override) are no other way. Rewards whose manifest is gone
    count as alike, because their config cannot be read."""
    rewards = []
    for evaluation in (a, b):
        try:
            scored = _input(store, evaluation, "rewards")
            while scored.manifest.stage == "override":
                scored = _input(store, scored, "rewards")
        except LineageError:
            return True
        rewards.append(scored.manifest)
    if is_made_alike(*rewards):
        return True
    scorers = [
        _scorer(manifest, each.manifest.config["score"])
        for manifest, each in zip(rewards, (a, b), strict=True)
    ]
    return scorers[0] == scorers[1] is not None


def _scorer(rewards: Manifest, name: str) -> dict[str, Any] | None:
    """Return what decides the part `name`, whatever it weighs; None if no scorer has this name."""
    with suppress(ConfigError):  # of another version of Quiver
        key = parse(load_stage(rewards.stage).Config, rewards.config, rewards.ref).key()
        for scorer in chain(*(key.get(kind, ()) for kind in ("functions", "models", "servers"))):
            if scorer["name"] == name:
                return {**scorer, "weight": None}
    return None


def reward_of(store: Store, evaluation: Version) -> str:
    """Name the scorers behind an evaluation, and its rewards: `near (a.eval/rewards@4)`."""
    rewards = _input(store, evaluation, "rewards")
    scorers = ", ".join(map(printable, rewards.manifest.metrics.get("functions", ())))
    return f"{scorers} ({rewards.ref})" if scorers else str(rewards.ref)


def policy_of(evaluation: Version) -> str | None:
    """Return the reference of the policy that was measured."""
    policy = evaluation.manifest.model("policy")
    return policy.ref if policy else None


def _input(store: Store, version: Version, role: str) -> Version:
    return store.with_expired().open(version.manifest.require_input(role).ref)


def _summary(evaluation: Version) -> dict[str, Any]:
    return {
        "ref": str(evaluation.ref),
        "policy": policy_of(evaluation),
        **score_numbers(evaluation.manifest.metrics),
    }


def notes_on(store: Store, a: Version, b: Version, config_a: Config, config_b: Config) -> list[str]:
    """Return notes on what may explain the numbers, such as differences of the configs."""
    notes = []
    if a.ref == b.ref:
        notes.append("A and B are the same evaluation")
    if config_a.threshold != config_b.threshold:
        notes.append(
            f"a sample is correct from {config_a.threshold:g} in A, from {config_b.threshold:g} in "
            "B (evaluate.threshold)"
        )
    rules = [config.unscored for config in (config_a, config_b)]
    numbers = [version.manifest.metrics.get("limited_score") for version in (a, b)]
    if rules[0] != rules[1] or (None not in numbers and numbers[0] != numbers[1]):
        words = [
            rule if number is None else f"{rule} ({number:g})"
            for rule, number in zip(rules, numbers, strict=True)
        ]
        notes.append(
            f"an answer that a limit cut off before it was scored counts as {words[0]} in A, as "
            f"{words[1]} in B (evaluate.unscored)"
        )
    for role, section in (("rewards", "reward"), ("rollouts", "generate")):
        with suppress(LineageError):  # a missing version gives no note
            inputs = [_input(store, version, role) for version in (a, b)]
            if not is_made_alike(*(version.manifest for version in inputs)):
                notes.append(f"[{section}] differs: {inputs[0].ref} and {inputs[1].ref}")
    return notes
