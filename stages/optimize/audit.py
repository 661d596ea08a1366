"""The numeric audit: compares the trainer's logprobs of the saved tokens with the engine's.

Wrong weights, a wrong template, another temperature, raw instead of processed logprobs: each gives
finite losses and a policy that gets worse. Each also moves the mean gap between the trainer's and
the engine's logprobs far beyond what their numerics can differ. So they are compared before the
first update, and NumericError stops the training before any weight changes:

    rollouts                        number                           limit
    sampled without bias            mean |trainer − old|             audit.max_mean_gap
    truncated (top_p, top_k, …)     mean max(trainer − old, 0)       audit.max_mean_gap
    with penalties                  mean (trainer − old)             audit.max_mean_gap
    no prox logprobs, tight clip    mean |trainer − old|             a tenth of the clip bound

Means are over the sampled tokens. `trainer` are the trainer's logprobs under the weights that the
training starts from, `old` the engine's. If prox logprobs are given, the first three hold for them
as well. Rollouts of an older policy are stale: their trainer − old is only measured, and their prox
logprobs are held to the bound if they are of the policy that sampled.

A quantized engine samples from rounded weights, so its logprobs differ by more than bfloat16's. It
is held to the same bound, since a coarser policy is another policy. The report names the
quantization, and so does the error. Without prox logprobs there is a warning: the ratio
takes the rounding for a change of the policy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quiver.schemas.errors import NumericError
from quiver.stages.model.ragged import Ragged

from .batch import Batch
from .config import TIGHT_CLIP
from .losses import log_ratio
from .objective import Objective

_OF_SEQUENCES = {"sequence_clipped", "geometric_clipped"}
"""Surrogates with one ratio for each completion."""
log = logging.getLogger(__name__)


def audit(
    objective: Objective, batch: Batch, logprobs: Tensor, rows: Sequence[int]
) -> dict[str, Any]:
    """Measure the gap of rollouts `rows`, and raise NumericError if it is too large.

    Measured are the policy's `logprobs` [N] and, if given, the proximal logprobs; `_compare` states
    the limits. Rollouts of a policy older than the starting checkpoint are only measured, under
    `stale` if there are fresh rollouts too. If their proximal logprobs are of the policy that
    sampled, these are held to the limit.
    """
    fresh_rows = [row for row in rows if not batch.origins[row].is_stale]
    stale_rows = [row for row in rows if batch.origins[row].is_stale]
    report = _compare(objective, batch, logprobs, fresh_rows, "the trainer's logprobs")
    if batch.prox_logprobs is None and (rounding := _quantization(batch, rows)):
        log.warning(
            "the engine sampled with %s, and without proximal logprobs its rounding counts as a "
            "change of the policy in the ratio: set logprobs.prox = true",
            rounding,
        )
    if stale_rows:
        stale_report = {**_measure_rows(objective, batch, logprobs, stale_rows), "judged": None}
        report = {**report, "stale": stale_report} if report else stale_report
    if batch.prox_logprobs is None:
        if fresh_rows:  # the gap of stale rollouts is the policy's progress, not noise
            _require_clip_beyond_noise(report, objective.config.tightest_clip())
        return report
    own_rows = rows if objective.config.prox_of == "behaviour" else fresh_rows
    if own_rows:
        prox_logprobs = batch.prox_logprobs
        report["prox"] = _compare(objective, batch, prox_logprobs, own_rows, "proximal logprobs")
    return report


def _compare(
    objective: Objective, batch: Batch, logprobs: Tensor, rows: Sequence[int], name: str
) -> dict[str, Any]:
    """Measure rollouts that were sampled by the policy of `logprobs` [N]; messages call these
    logprobs `name`.

    Rollouts of biased sampling are measured separately, under `biased` if there are others too. The
    result is empty without rollouts.

    `judged` names the number that must be within `audit.max_mean_gap`. It is `mean_gap`. If
    sampling was truncated, it is `mean_excess`, since truncation raises the remaining tokens'
    probability. Under penalties it is −`kl_k1`, the mean of trainer − old. It estimates −KL, which
    is at most 0 with the right weights. Raises NumericError if it is not within.
    """
    limit = objective.config.audit.max_mean_gap
    unbiased_rows = [row for row in rows if not batch.origins[row].biases]
    biased_rows = [row for row in rows if batch.origins[row].biases]
    report: dict[str, Any] = {}
    if unbiased_rows:
        report = {**_measure_rows(objective, batch, logprobs, unbiased_rows), "judged": "mean_gap"}
        rounding = _quantization(batch, unbiased_rows)
        if rounding:
            report["quantization"] = rounding
        if not report["mean_gap"] <= limit:
            cause, next_step = _cause(objective, rounding)
            raise _too_far(
                f"{name} differ from the engine's by {report['mean_gap']:.4f} nats per token on "
                f"average (at most {report['max_gap']:.3f}), allowed is "
                f"optimize.audit.max_mean_gap = {limit}. The engine sampled {cause}",
                next_step,
            )
    if biased_rows:
        names = ", ".join(dict.fromkeys(batch.origins[row].biases for row in biased_rows))
        judged = "kl_k1" if "penalty" in names else "mean_excess"
        biased_report = {
            **_measure_rows(objective, batch, logprobs, biased_rows),
            "judged": judged,
            "biased_sampling": names,
        }
        excess = (
            biased_report["mean_excess"] if judged == "mean_excess" else -biased_report["kl_k1"]
        )
        if not excess <= limit:
            raise _too_far(
                f"{name} are above the engine's by {excess:.4f} nats per token on average, allowed "
                f"is optimize.audit.max_mean_gap = {limit}. Biased sampling ({names}) can only put "
                "them below: the engine sampled with other weights or another temperature, or "
                "reported raw logprobs"
            )
        report = {**report, "biased": biased_report} if report else biased_report
    return report


def _cause(objective: Objective, rounding: str) -> tuple[str, str]:
    """Return what may have caused a large gap, and what to do about it (empty: the usual), if the
    engine sampled with `rounding`."""
    cause = "with other weights or another temperature, or reported raw logprobs"
    if rounding:
        return (
            f"{cause}, or its rounding ({rounding}) is too coarse for this model",
            "sample once without it: if the gap is small then, take a finer quantization, or raise "
            "optimize.audit.max_mean_gap and let optimize.correction bound the weights",
        )
    if objective.config.has_nf4_base:
        return (
            f"{cause}, or with the base's exact weights, while the trainer has them in 4 bits",
            "start the run from the rounded base (policy.model = "
            "'quiver.stages.optimize.nf4:rounded'), or raise optimize.audit.max_mean_gap",
        )
    return cause, ""


def _quantization(batch: Batch, rows: Sequence[int]) -> str:
    """Return how the engine rounded when it sampled rollouts `rows`; empty if it did not."""
    kinds = dict.fromkeys(batch.origins[row].quantization for row in rows)
    return ", ".join(filter(None, kinds))


def _too_far(message: str, next: str = "") -> NumericError:
    return NumericError(
        "optimize audit",
        message,
        state="no weight was changed, no version was written.",
        next=next
        or "generate with the checkpoint that is trained, or raise optimize.audit.max_mean_gap. If "
        "it was that checkpoint, rounding may be the cause, as where it sends tokens to other "
        'experts: set generate.dtype = "float32" and optimize.precision = "fp32"',
    )


def _measure_rows(
    objective: Objective, batch: Batch, logprobs: Tensor, rows: Sequence[int]
) -> dict[str, Any]:
    """Return `measure` of the `logprobs` [N] of rollouts `rows`, with the surrogate's clip bounds,
    or PPO's 0.2 if it has none."""
    low, high = (objective.options.get(name, 0.2) for name in ("clip_low", "clip_high"))
    surrogate = objective.surrogate.__name__
    if surrogate == "geometric_clipped":  # its bounds apply to log r
        low, high = -math.expm1(-low), math.expm1(high)
    old = batch.sequences.completions.with_values(batch.old_logprobs).take(torch.tensor(rows))
    report = measure(
        logprobs[batch.places(rows)],
        old.values,
        old.offsets,
        low,
        high,
        of_sequences=surrogate in _OF_SEQUENCES,
    )
    log.info(
        "audit: mean gap %(mean_gap).1e, largest %(max_gap).1e, effective sample size "
        "%(effective_sample_size).3f",
        report,
    )
    return report


def measure(
    trainer: Tensor,
    old: Tensor,
    offsets: Tensor,
    clip_low: float,
    clip_high: float,
    of_sequences: bool = False,
) -> dict[str, float]:
    """Measure how far the trainer's logprobs [N] are from `old` [N], before any weight has changed.

    Args:
        trainer, old: [N] logprobs of the trainer and of the engine.
        offsets: [B+1] int64.
        clip_low, clip_high: distances of the clip bounds from ratio 1.
        of_sequences: true if the surrogate's ratio is a completion's, the geometric mean of its
            tokens'.
    Returns:
        mean_gap, max_gap: |trainer − old| over all tokens, in nats
        mean_excess: mean over tokens of max(trainer − old, 0)
        kl_k1, kl_k3: estimates of KL(old ‖ trainer), mean over tokens
        outside_clip: share of tokens, or of completions, whose ratio is outside [1 − clip_low, 1 +
            clip_high]
        effective_sample_size: (Σ w)² / Σ w² over rollouts, w the ratio of the whole completion; as
            a share of the rollouts
        tokens, rollouts: how many were compared
    """
    gap = (trainer - old).double()
    bounded = log_ratio(trainer, old).double()
    of_rollout = Ragged(gap, offsets)
    ratio = (
        log_ratio(of_rollout.segment_mean(), torch.zeros(())) if of_sequences else bounded
    ).exp()
    weight = log_ratio(of_rollout.segment_sum(), torch.zeros(())).exp()
    return {
        "mean_gap": float(gap.abs().mean()),
        "max_gap": float(gap.abs().max()),
        "mean_excess": float(gap.clamp(min=0).mean()),
        "kl_k1": float(-gap.mean()),
        "kl_k3": float((torch.expm1(bounded) - bounded).mean()),
        "outside_clip": float(((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).double().mean()),
        "effective_sample_size": float(weight.sum() ** 2 / (weight**2).sum() / len(weight)),
        "tokens": len(gap),
        "rollouts": len(weight),
    }


def _require_clip_beyond_noise(report: dict[str, Any], clip: float | None) -> None:
    """Raise NumericError if the engine's noise is more than a tenth of a tight clip bound: clipping
    would then respond to noise instead of what the policy has learned."""
    if clip is None or clip >= TIGHT_CLIP or report["mean_gap"] <= clip / 10:
        return
    raise _too_far(
        f"the trainer's logprobs differ from the engine's by {report['mean_gap']:.2g} nats per "
        f"token on average, expected at most {clip / 10:.2g}, a tenth of the clip bound {clip:g}. "
        "Without proximal logprobs, the engine's noise would be clipped",
        "give proximal logprobs (stage logprobs, role prox), as a recipe does by itself",
    )
