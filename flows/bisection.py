"""Find the first policy of a line that is worse than an earlier one: `quiver bisect`.

    with by_hand(recipe):
        bisect(recipe, "toy/policy@0", "toy/policy@64")["first"]      # measures 8 policies

Each policy is measured by the ordinary evaluate stage, so a finished measurement is not repeated.
It is compared with the good one by the paired test of `quiver compare`. If it is not told apart, it
counts as good. So a decline that is smaller than the test can see is found too late, and the answer
says if the policy before the first worse one is told apart from it.

Refused: a bad policy that does not descend from the good one, or is not told apart from it.
"""

from __future__ import annotations

from typing import Any

from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.manifest import line_of
from quiver.schemas.metrics import score_numbers
from quiver.schemas.refs import parse
from quiver.stages.core.store import Store, Version
from quiver.stages.evaluate.comparison import compare
from quiver.stages.evaluate.statistics import CONFIDENCE

from .recipe import Recipe
from .rerun import rerun


def bisect(recipe: Recipe, good: str, bad: str) -> dict[str, Any]:
    """Find the first policy from `good` to `bad` that is worse than `good`.

    Args:
        recipe: The recipe; its store, [data.held_out], [evaluate] and placement apply.
        good: Reference of a policy.
        bad: Reference of a policy that was trained from it, over any number of policies.

    Returns:
        good, bad: `policy`, and score, stderr and n of its evaluation
        between: number of policies between them that can be measured
        gone: references of those that expired
        steps: the measured policies in order, each with its `evaluation`, its `difference` to the
            good one (score, stderr, n, interval and p) and `is_worse`
        first, before: the first worse policy, and the one before it
        last_step: the comparison of these two, as in `steps`

    Raises:
        LineageError: `bad` does not descend from `good`, or is not told apart from it.
    """
    store = Store(recipe.store)
    named = [store.open(parse(name, recipe.run)) for name in (good, bad)]
    for version in named:
        if version.ref.kind != "policy":
            problem = "expected a version of policy"
            raise ConfigError(str(version.ref), problem, next=f"quiver ls {version.ref.run}")
    policies = _between(store, *named)
    evaluations: dict[str, Version] = {}

    def measured(policy: str) -> Version:
        if policy not in evaluations:
            outcome = rerun(recipe, "evaluate", {"policy": policy})
            evaluations[policy] = store.open(outcome.ref)
        return evaluations[policy]

    def compared(policy: str, other: str) -> dict[str, Any]:
        difference = compare(store, measured(other), measured(policy))["difference"]["score"]
        is_worse = difference["score"] < 0 and difference["p"] <= 1 - CONFIDENCE
        evaluation = str(measured(policy).ref)
        return {
            "policy": policy,
            "evaluation": evaluation,
            "difference": difference,
            "is_worse": is_worse,
        }

    there = [policy for policy in policies if store.exists(parse(policy))]
    low, high = 0, len(there) - 1
    steps = [compared(there[high], there[low])]
    if not steps[0]["is_worse"]:
        difference = steps[0]["difference"]
        raise LineageError(
            f"{there[low]} {there[high]}",
            f"the second is not told apart as worse: {difference['score']:+.4f} over "
            f"{difference['n']} prompts, p {difference['p']:.2g}",
            next="name another policy as bad, or measure on more held-out rows",
        )
    while high - low > 1:
        middle = (low + high) // 2
        steps.append(compared(there[middle], there[0]))
        if steps[-1]["is_worse"]:
            high = middle
        else:
            low = middle
    ends = {
        name: {"policy": policy, **score_numbers(measured(policy).manifest.metrics)}
        for name, policy in (("good", there[0]), ("bad", there[-1]))
    }
    return {
        **ends,
        "between": len(there) - 2,
        "gone": [policy for policy in policies if policy not in there],
        "steps": steps,
        "first": there[high],
        "before": there[low],
        "last_step": compared(there[high], there[low]),
    }


def _between(store: Store, good: Version, bad: Version) -> list[str]:
    """Return the policies from `good` to `bad`, both included. Raises LineageError if `bad` does
    not descend from `good`."""
    with_expired = store.with_expired()  # a manifest is enough
    line = []
    for manifest in line_of(bad.manifest, lambda ref: with_expired.open(ref).manifest):
        line.append(manifest.ref)
        if manifest.ref == str(good.ref) and manifest.ref != str(bad.ref):
            return line[::-1]
    raise LineageError(
        str(bad.ref), f"does not descend from {good.ref}", next=f"quiver lineage {bad.ref}"
    )
