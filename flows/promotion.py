"""The decision on a policy for the tag: it must beat the policy in use by more than chance.

Both are measured on the same held-out prompts. A collapsed policy may still score better, since
rewards can be gamed. So a policy that moved further from the policy in use than [promotion] allows
is not promoted without a person. How far it moved is read from manifests and optimizer steps, which
costs nothing:

    moved(promotion, store, "arith/policy@2", "arith/policy@3", "arith/evaluations@6").beyond_limits
    # ["approx. KL 4.62 nats per token (promotion.max_kl 1)"]

A policy with a single optimizer step shows no KL or entropy change, since both are measured before
the step; then only the held-out answers count.

The tag moves by compare-and-swap. Its history (`quiver history`) keeps every decision and its
grounds, whether the tag moved or not. Nothing here runs a stage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from quiver.flows.look.gather import Manifests, metric
from quiver.flows.look.words import counted, number, unscored_of
from quiver.schemas.errors import ConflictError, LineageError
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store, tags
from quiver.stages.evaluate.estimators import Estimate, lower_bound
from quiver.stages.turns.statistics import truncated_share

_TOKENS = 0.1
"""Least mean length used in divisions, so that nothing is divided by 0."""


class Promotion(Config):
    """When the policy of a nightly run takes over the tag from the policy in use."""

    tag: str = "prod"
    """The tag: `run/policy@prod` is the policy in use. The first night gives it to policy@0. Each
    night starts from it."""
    margin: float = Field(default=0.01, ge=0)
    """Least improvement of the new policy, in units of `by`."""
    by: str = Field(default="score", pattern=r"^(score|pass@[1-9][0-9]*)$")
    """Quantity to compare: `score`, or e.g. `pass@4` if `evaluate.k` contains 4."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """Confidence required: the one-sided lower confidence bound of the difference, paired by
    prompt, must reach `margin`, and half its p-value must be at most 1 − confidence. 0.5: the
    difference itself must reach it, however uncertain it is."""
    max_kl: float | None = Field(default=1.0, ge=0)
    """Largest KL divergence, in nats per token, between a policy of the night and the policy that
    sampled for it (`approx_kl` of any optimizer step). A better policy beyond this limit or one of
    the next three waits for a person if `approval` is set, and is rejected otherwise. None: no
    limit."""
    max_entropy_drop: float | None = Field(default=1.0, ge=0)
    """Largest fall of the policy's entropy in a night, in nats per token, from the first optimizer
    step to the last. None: no limit."""
    max_truncated: float | None = Field(default=0.8, ge=0, le=1)
    """Largest share of held-out answers that a limit may cut off. Not applied if the policy in use
    exceeds it already. None: no limit."""
    max_length_change: float | None = Field(default=4.0, ge=1)
    """Largest factor by which the mean length of held-out answers may grow or shrink compared with
    the policy in use. None: no limit."""
    rollback: bool = False
    """First measure the policy in use against the one before it, on tonight's held-out rows. If the
    older one is better by the same rule, the tag returns to it."""
    approval: bool = False
    """Pause a better policy for a person's answer, on the Prefect server's pages or over its API.
    Needs a server of its own."""
    approval_seconds: float = Field(default=43200, ge=1)
    """Seconds to wait for the answer; after that the answer is no."""

    @field_validator("tag")
    @classmethod
    def _is_tag(cls, tag: str) -> str:
        return tags.check_name(tag)

    def check(self, ks: Collection[int]) -> None:
        """Raise ValueError if an evaluation with pass@k for these k does not measure `by`."""
        if self.by != "score" and int(self.by.removeprefix("pass@")) not in ks:
            raise ValueError(
                f"promotion.by is {self.by!r}, which evaluate.k = {list(ks)} does not measure: add "
                "it there"
            )


class Judgement(NamedTuple):
    """A judgement: if one policy is better than another, the reason in words, and the numbers."""

    better: bool
    why: str
    numbers: dict[str, Any]
    """by, difference {score, stderr, n}, p, bound, margin, confidence"""


def judge(promotion: Promotion, metrics: dict[str, Any]) -> Judgement:
    """Judge an evaluation with a baseline by the metrics of its manifest.

        better  ⇔  difference − t(confidence) · stderr ≥ margin, the difference is above 0, and
                   p / 2 ≤ 1 − confidence

    Differences that are all equal have no standard error, so p alone says how few they are.
    Raises LineageError if the metrics lack the difference.
    """
    k = promotion.by.partition("@")[2]
    difference = metrics.get("difference") or {}
    estimates = difference.get("pass@k", {}) if k else difference
    if (k or "score") not in estimates:
        problem = f"its metrics hold no difference of {promotion.by} to the policy in use"
        raise LineageError("evaluation", problem, next="quiver verify")
    estimate = Estimate(*(estimates[k or "score"][name] for name in Estimate._fields))
    p = estimates[k or "score"]["p"]
    bound = lower_bound(estimate, promotion.confidence)
    numbers = {
        "by": promotion.by,
        "difference": estimate._asdict(),
        "p": p,
        "bound": bound,
        "margin": promotion.margin,
        "confidence": promotion.confidence,
    }
    why = f"{promotion.by} {estimate.score:+.4f}"
    if bound is None:
        why += f" on one prompt, which has no standard error{_left_out(metrics)}"
        return Judgement(False, why, numbers)
    why += (
        f" ± {estimate.stderr:.4f} over {estimate.n} prompts; at least {bound:+.4f} with "
        f"confidence {promotion.confidence:g}, margin {promotion.margin:g}{_left_out(metrics)}"
    )
    is_above = bound >= promotion.margin and estimate.score > 0
    is_chance = p / 2 > 1 - promotion.confidence
    if is_above and is_chance:
        why += f"; so few prompts may differ by chance, p = {p:.2g}"
    return Judgement(is_above and not is_chance, why, numbers)


def _left_out(metrics: dict[str, Any]) -> str:
    """Return notes on prompts that the difference leaves out or scores by a rule; "" if there are
    none."""
    notes = []
    if metrics.get("unpaired"):
        prompts = counted(metrics["unpaired"], "prompt")
        notes.append(f"; {prompts} left out, scored on one side only")
    sides = {"candidate": metrics, "in use": metrics.get("baseline") or {}}
    notes += [f"; {name}:{unscored_of(side)}" for name, side in sides.items() if unscored_of(side)]
    return "".join(notes)


class Moved(NamedTuple):
    """Distance of a candidate from the policy in use."""

    beyond_limits: list[str]
    """One phrase for each number beyond its limit."""
    numbers: dict[str, Any]
    """Numbers: kl; entropy, truncated and mean_length before and after. None: not finite."""


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
    truncated = [truncated_share(version) if version else 0.0 for version in rollouts]
    lengths = [metric(version, "mean_completion_tokens") or 0.0 for version in rollouts]
    # A manifest stores null for a number that is not finite, which counts as infinitely far.
    kl = math.inf if None in kls else max(kls)
    drop = math.inf if None in entropy else entropy[0] - entropy[1]
    shortest, longest = sorted(max(length, _TOKENS) for length in lengths)
    is_new = truncated[0] <= (promotion.max_truncated or 0.0)
    beyond = {
        "max_kl": (kl, f"approx. KL {kl:.3g} nats per token"),
        "max_entropy_drop": (drop, "entropy {} → {} nats per token".format(*map(number, entropy))),
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


def entry_of(store: Store, run: str, promotion: Promotion, key: str) -> tags.Entry | None:
    """Return the entry with this key in the tag's history, or None if it is undecided."""
    return next((entry for entry in store.history(run, promotion.tag) if entry.key == key), None)


def decide(
    store: Store,
    run: str,
    promotion: Promotion,
    *,
    key: str,
    before: str,
    ref: str,
    why: str,
    about: dict[str, Any],
) -> tags.Entry:
    """Move the tag from `before` to `ref`, or record that it stays, and return the entry of `key`.

    The entry may come from another process. Raises ConflictError if the tag was moved since: the
    policy that was compared with is no longer in use.
    """
    try:
        store.tag(run, promotion.tag, ref, expected=before, why=why, key=key, about=about)
    except ConflictError as error:
        candidate = about.get("candidate", ref)
        error.state = f"the tag stays where it was moved to; {candidate} is still in the store."
        error.next = "start the same night again: it starts from the policy that is in use now"
        raise
    return entry_of(store, run, promotion, key)
