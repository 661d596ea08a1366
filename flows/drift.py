"""Drift of a candidate from the policy in use: signs of collapse even though the score rose.

    moved(promotion, store, "arith/policy@2", "arith/policy@3", "arith/evaluations@6").beyond_limits
    # ["approx. KL 4.62 nats a token (promotion.max_kl 1)"]

The numbers come from manifests of policies and evaluations and from the optimizer steps, so they
cost nothing. A policy with a single optimizer step shows no KL or entropy change, since both are
measured before the step; then only the held-out answers count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from quiver.schemas.manifest import Manifest
from quiver.stages.common.episodes import LIMITS
from quiver.stages.common.store import Store
from quiver.stages.report.gather import Manifests, metric
from quiver.stages.report.words import number

from .promotion import Promotion

_TOKENS = 0.1
"""Least mean length used in divisions, so that nothing is divided by 0."""


class Moved(NamedTuple):
    """Distance of a candidate from the policy in use."""

    beyond_limits: list[str]
    """One phrase for each number beyond its limit."""
    numbers: dict[str, Any]
    """Numbers: kl; entropy, truncated and mean_length before and after. None: not finite."""

    @property
    def in_words(self) -> str:
        """All of `beyond_limits` in one line."""
        return "; ".join(self.beyond_limits)


def moved(
    promotion: Promotion, store: Store, in_use: str, candidate: str, evaluation: str
) -> Moved:
    """Measure how far `candidate` moved from `in_use`, from manifests.

    `evaluation` measured the candidate, with the evaluation of the policy in use as its baseline.
    Nothing is sampled or scored.
    """
    manifests = Manifests(store)
    steps = list(_steps(manifests, in_use, candidate))
    measured = manifests.open(evaluation)
    sides = [manifests.input(measured, "baseline"), measured]
    rollouts = [manifests.input(side, "rollouts") for side in sides]
    kls = [step["approx_kl"] for step in steps] or [0.0]
    entropy = [step["entropy"] for step in (steps[0], steps[-1])] if steps else [0.0, 0.0]
    truncated = [_truncated_share(each) for each in rollouts]
    lengths = [metric(each, "mean_completion_tokens") or 0.0 for each in rollouts]
    # A manifest stores null for a number that is not finite, which counts as infinitely far.
    kl = math.inf if None in kls else max(kls)
    drop = math.inf if None in entropy else entropy[0] - entropy[1]
    shortest, longest = sorted(max(length, _TOKENS) for length in lengths)
    is_new = truncated[0] <= (promotion.max_truncated or 0.0)
    beyond = {
        "max_kl": (kl, f"approx. KL {kl:.3g} nats a token"),
        "max_entropy_drop": (drop, "entropy {} → {} nats a token".format(*map(number, entropy))),
        "max_truncated": (
            truncated[1] if is_new else 0.0,
            "{:.0%} → {:.0%} of the held-out answers cut off by a limit".format(*truncated),
        ),
        "max_length_change": (
            longest / shortest,
            "mean length {:.4g} → {:.4g} tokens".format(*lengths),
        ),
    }
    beyond_limits = []
    for key, (amount, words) in beyond.items():
        most = getattr(promotion, key)
        if most is not None and amount > most:
            beyond_limits.append(f"{words} (promotion.{key} {most:g})")
    numbers = {
        "kl": kl if math.isfinite(kl) else None,
        "entropy": entropy,
        "truncated": truncated,
        "mean_length": lengths,
    }
    return Moved(beyond_limits, numbers)


def _steps(manifests: Manifests, in_use: str, candidate: str) -> Iterator[dict[str, Any]]:
    """Yield `approx_kl` and `entropy` of each optimizer step since `in_use`, oldest first.

    Each policy's last step is yielded again from its manifest, which keeps it if the steps are
    deleted.
    """
    policies = manifests.line(manifests.open(candidate))
    since = list(takewhile(lambda policy: policy.ref != in_use, policies))
    for policy in reversed(since):
        yield from manifests.steps(policy)
        if {"approx_kl", "entropy"} <= policy.metrics.keys():
            yield policy.metrics


def _truncated_share(rollouts: Manifest | None) -> float:
    """Return the share of answers that a limit cut off; 0 if there are no answers."""
    if rollouts is None or not rollouts.rows:
        return 0.0
    ends = metric(rollouts, "end_reasons")
    if ends is None:
        return rollouts.status.get("length", 0) / rollouts.rows
    return sum(ends.get(reason, 0) for reason in LIMITS) / rollouts.rows
