"""Find the first policy of a line that is worse than an earlier one: `quiver bisect`.

    with by_hand(recipe):
        bisect(recipe, "toy/policy@0", "toy/policy@64")["first"]      # measures 8 policies

Each policy is measured by the ordinary evaluate stage, so a finished measurement is not repeated.
It is compared with the good one by the paired test of `quiver compare`. If it is not told apart, it
counts as good. So a decline that is smaller than the test can see is found too late, and the answer
says if the policy before the first worse one is told apart from it.

A bad policy is refused if it does not descend from the good one, or is not told apart from it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from quiver.schemas.errors import LineageError
from quiver.schemas.manifest import line_of
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
        steps: the comparisons with `good`, as `compare` returns them (it is A), in the order in
            which they were made, with the other `policy` and `is_worse`; first that of `bad`
        first, before: the first worse policy, and the one before it
        last_step: the comparison of these two
        gone: references of policies that expired, and were left out

    Raises:
        LineageError: `bad` does not descend from `good`, or is not told apart from it.
    """
    store = Store(recipe.store)
    named = [store.open(parse(name, recipe.run)) for name in (good, bad)]
    line = _between(store, *named)
    policies = [policy for policy in line if store.exists(parse(policy))]

    @cache
    def measured(number: int) -> Version:
        return store.open(rerun(recipe, "evaluate", {"policy": policies[number]}).ref)

    def compared(first: int, second: int) -> dict[str, Any]:
        answer = compare(store, measured(first), measured(second))
        score = answer["difference"]["score"]
        is_worse = score["score"] < 0 and score["p"] <= 1 - CONFIDENCE
        return {**answer, "policy": policies[second], "is_worse": is_worse}

    low, high = 0, len(policies) - 1
    steps = [compared(low, high)]
    if not steps[0]["is_worse"]:
        score = steps[0]["difference"]["score"]
        is_better = score["score"] > 0 and score["p"] <= 1 - CONFIDENCE
        verdict = "better" if is_better else "not told apart as worse"
        advice = "" if is_better else ", or measure on more held-out rows"
        raise LineageError(
            f"{policies[low]} {policies[high]}",
            f"the second is {verdict}: {score['score']:+.4f} over {score['n']} prompts, "
            f"p {score['p']:.2g}",
            next=f"name another policy as bad{advice}",
        )
    while high - low > 1:
        middle = (low + high) // 2
        steps.append(compared(0, middle))
        if steps[-1]["is_worse"]:
            high = middle
        else:
            low = middle
    return {
        "steps": steps,
        "first": policies[high],
        "before": policies[low],
        "last_step": compared(low, high),
        "gone": [policy for policy in line if policy not in policies],
    }


def _between(store: Store, good: Version, bad: Version) -> list[str]:
    """Return the policies from `good` to `bad`, both included. Raises LineageError if `bad` does
    not descend from `good`."""
    with_expired = store.with_expired()  # a manifest is enough
    line = []
    for manifest in line_of(bad.manifest, lambda ref: with_expired.open(ref).manifest):
        line.append(manifest.ref)
        if manifest.ref == str(good.ref) != str(bad.ref):
            return line[::-1]
    problem = f"does not descend from {good.ref}"
    raise LineageError(str(bad.ref), problem, next=f"quiver lineage {bad.ref}")
