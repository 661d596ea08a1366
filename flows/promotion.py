"""Whether a policy takes the tag over: better than the one that bears it, on the same held-out
prompts, by more than chance.

A policy that has collapsed may score better all the same, since rewards can be gamed. So one that
moved further from the policy in use than [promotion] allows (`drift`) is not promoted without a
person.

The tag moves by compare-and-swap, and its journal (`quiver history`) keeps what was decided and on
what, whether it moved or not. Nothing here runs a stage.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from quiver.schemas.errors import ConflictError, LineageError
from quiver.stages.common.config import Config
from quiver.stages.common.store import Store, tags
from quiver.stages.evaluate.estimators import Estimate, lower_bound
from quiver.stages.report.words import counted, unscored_of


class Promotion(Config):
    """When the policy of a nightly run takes over the tag of the one in use."""

    tag: str = "prod"
    """The tag: `run/policy@prod` is the policy in use. The first night gives it to policy@0. Each
    night starts from it."""
    margin: float = Field(default=0.01, ge=0)
    """How much better the new policy must be, in units of `by`."""
    by: str = Field(default="score", pattern=r"^(score|pass@[1-9][0-9]*)$")
    """What is compared: `score`, or `pass@4` where `evaluate.k` has a 4."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """How sure it must be: the one-sided lower confidence bound of the difference, paired by
    prompt, must reach `margin`. 0.5: the difference itself must, however uncertain it is."""
    max_kl: float | None = Field(default=1.0, ge=0)
    """Most KL divergence, in nats a token, between a policy of the night and the one that sampled
    for it (`approx_kl` of any optimizer step). A better policy beyond this or one of the next three
    keys waits for a person with `approval`, and is rejected without. None: any."""
    max_entropy_drop: float | None = Field(default=1.0, ge=0)
    """Most that the policy's entropy may fall in a night, in nats a token, from the first optimizer
    step to the last. None: any."""
    max_truncated: float | None = Field(default=0.8, ge=0, le=1)
    """Largest share of held-out answers that a limit may cut off. Not applied if the policy in use
    exceeds it already. None: any."""
    max_length_change: float | None = Field(default=4.0, ge=1)
    """Largest factor by which the mean length of held-out answers may grow or shrink beside that of
    the policy in use. None: any."""
    rollback: bool = False
    """First measure the policy in use against the one before it, on tonight's held-out rows; where
    that one is better by the same rule, the tag goes back to it."""
    approval: bool = False
    """Pause a better policy for a person's answer, in the Prefect server's pages or over its API.
    Needs a server of its own."""
    approval_seconds: float = Field(default=43200, ge=1)
    """How long to wait for the answer; then the answer is no."""

    @field_validator("tag")
    @classmethod
    def _is_tag(cls, tag: str) -> str:
        return tags.check_name(tag)

    def check(self, ks: Collection[int]) -> None:
        """ValueError unless an evaluation that measures pass@k for these k tells what is
        compared."""
        if self.by != "score" and int(self.by.removeprefix("pass@")) not in ks:
            raise ValueError(
                f"promotion.by is {self.by!r}, which evaluate.k = {list(ks)} does not measure: add "
                "it there"
            )


class Judgement(NamedTuple):
    """Whether one policy is better than another, the difference, and both in words."""

    better: bool
    why: str
    numbers: dict[str, Any]
    """by, difference {score, stderr, n}, bound, margin, confidence"""


def judge(promotion: Promotion, metrics: dict[str, Any]) -> Judgement:
    """Judge an evaluation with a baseline by its manifest's metrics. LineageError.

    better  ⇔  difference − z(confidence) · stderr ≥ margin, and the difference is above 0
    """
    k = promotion.by.partition("@")[2]
    difference = metrics.get("difference") or {}
    estimates = difference.get("pass@k", {}) if k else difference
    if (k or "score") not in estimates:
        problem = f"its metrics hold no difference of {promotion.by} to the policy in use"
        raise LineageError("evaluation", problem, next="quiver verify")
    estimate = Estimate(*(estimates[k or "score"][name] for name in Estimate._fields))
    bound = lower_bound(estimate, promotion.confidence)
    numbers = {
        "by": promotion.by,
        "difference": estimate._asdict(),
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
    return Judgement(bound >= promotion.margin and estimate.score > 0, why, numbers)


def _left_out(metrics: dict[str, Any]) -> str:
    """What the difference leaves out, and what it counts by a rule; empty if there is nothing."""
    notes = []
    if metrics.get("unpaired"):
        prompts = counted(metrics["unpaired"], "prompt")
        notes.append(f"; {prompts} left out, scored on one side only")
    sides = {"candidate": metrics, "in use": metrics.get("baseline") or {}}
    notes += [f"; {name}:{unscored_of(side)}" for name, side in sides.items() if unscored_of(side)]
    return "".join(notes)


def entry_of(store: Store, run: str, promotion: Promotion, key: str) -> tags.Entry | None:
    """What the tag's journal says of `key`, where that is decided already."""
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
    """Move the tag from `before` to `ref`, or note that it stays; the entry of `key`, which may be
    another process's.

    ConflictError if somebody moved the tag since: what was compared with is no longer in use.
    """
    try:
        store.tag(run, promotion.tag, ref, expected=before, why=why, key=key, about=about)
    except ConflictError as error:
        raise ConflictError(
            error.object,
            error.message,
            state=f"the tag stays where it was moved to; {about.get('candidate', ref)} is still "
            "in the store.",
            next="start the same night again: it starts from the policy that is in use now",
        ) from None
    return entry_of(store, run, promotion, key)
