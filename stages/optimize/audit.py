"""The numeric audit: does the trainer give the saved tokens the probability that the engine gave?

Wrong weights, a wrong template, another temperature, raw instead of processed logprobs: each gives
finite losses and a policy that gets worse. Each also moves the mean gap between the trainer's and
the engine's logprobs far beyond what their numerics can differ. So they are compared before the
first update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quiver.schemas.errors import NumericError
from quiver.stages.common.ragged import Ragged

from .batch import Batch
from .config import TIGHT_CLIP
from .losses import log_ratio
from .objective import Objective

_OF_SEQUENCES = {"sequence_clipped", "geometric_clipped"}
"""Surrogates whose ratio is a completion's."""
log = logging.getLogger(__name__)


def audit(
    objective: Objective, batch: Batch, logprobs: Tensor, rows: Sequence[int]
) -> dict[str, Any]:
    """Measure rollouts `rows`, on which the policy has the `logprobs` [N], and its proximal
    logprobs where they are given; `_compare` says what of it is required. Rollouts of an older
    policy than the starting checkpoint are only measured, apart where there are fresh ones too,
    under `stale`; their proximal logprobs, where these are of the policy that sampled, tell whether
    they were sampled right. NumericError."""
    is_stale = [False] * len(batch.groups) if batch.stale is None else batch.stale.tolist()
    fresh_rows = [row for row in rows if not is_stale[row]]
    stale_rows = [row for row in rows if is_stale[row]]
    report = _compare(objective, batch, logprobs, fresh_rows, "the trainer's logprobs")
    if stale_rows:
        stale_report = {**_measure_rows(objective, batch, logprobs, stale_rows), "judged": None}
        report = {**report, "stale": stale_report} if report else stale_report
    if batch.prox_logprobs is None:
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
    """Measure rollouts of the very policy that has the `logprobs` [N], called `name`; those of
    biased sampling apart where there are others too, under `biased`. Empty without rollouts.

    `judged` names the number that must be within `audit.max_mean_gap`: `mean_gap`; where sampling
    was truncated `mean_excess`, since what was left bears more than the policy's probability; under
    penalties −`kl_k1`, since a KL is not negative. NumericError where it is not.
    """
    limit = objective.config.audit.max_mean_gap
    biases = batch.biases or [""] * len(batch.groups)
    unbiased_rows = [row for row in rows if not biases[row]]
    biased_rows = [row for row in rows if biases[row]]
    report: dict[str, Any] = {}
    if unbiased_rows:
        report = {**_measure_rows(objective, batch, logprobs, unbiased_rows), "judged": "mean_gap"}
        require(report, limit, "optimize audit", name)
    if biased_rows:
        names = ", ".join(dict.fromkeys(biases[row] for row in biased_rows))
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
            raise NumericError(
                "optimize audit",
                f"{name} are above the engine's by {excess:.4f} nats a token in the mean, allowed "
                f"is optimize.audit.max_mean_gap = {limit}; sampling was biased ({names}), so they "
                "may be below them, and not above: the engine sampled with other weights, another "
                "temperature, or reported raw logprobs",
                state="no weight was changed, no version was written.",
                next="generate with the very checkpoint that is trained, or raise "
                "optimize.audit.max_mean_gap",
            )
        report = {**report, "biased": biased_report} if report else biased_report
    return report


def _measure_rows(
    objective: Objective, batch: Batch, logprobs: Tensor, rows: Sequence[int]
) -> dict[str, Any]:
    """`measure` of the `logprobs` [N] of rollouts `rows`, within the bounds of the surrogate; those
    without such bounds are measured by PPO's."""
    low, high = (objective.options.get(name, 0.2) for name in ("clip_low", "clip_high"))
    surrogate = objective.surrogate.__name__
    if surrogate == "geometric_clipped":  # its bounds are of log r
        low, high = -math.expm1(-low), math.expm1(high)
    old = batch.sequences.completions.with_values(batch.old_logprobs).take(torch.tensor(rows))
    report = measure(
        logprobs[batch.positions(rows)],
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
    """How far the trainer's logprobs [N] are from `old` [N], before any weight has changed.
    `of_sequences`: the surrogate's ratio is a completion's, the geometric mean of its tokens'.

    Returns:
        mean_gap, max_gap: |trainer − old| over all tokens, in nats
        mean_excess: mean of trainer − old where it is above 0, else 0
        kl_k1, kl_k3: estimates of KL(old ‖ trainer), mean over tokens
        outside_clip: share of tokens, or of completions, whose ratio is outside
            [1 − clip_low, 1 + clip_high]
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


def require(
    report: dict[str, Any], max_mean_gap: float, object: str, name: str = "the trainer's logprobs"
) -> None:
    """NumericError about `object` unless the mean gap is a number up to `max_mean_gap`. `name`:
    whose gap to the engine's it is."""
    if not report["mean_gap"] <= max_mean_gap:
        raise NumericError(
            object,
            f"{name} differ from the engine's by {report['mean_gap']:.4f} nats a "
            f"token in the mean (at most {report['max_gap']:.3f}), allowed is "
            f"optimize.audit.max_mean_gap = {max_mean_gap}; the engine sampled with other weights, "
            "another temperature, or reported raw logprobs",
            state="no weight was changed, no version was written.",
            next="generate with the very checkpoint that is trained, or raise "
            "optimize.audit.max_mean_gap",
        )


def _require_clip_beyond_noise(report: dict[str, Any], clip: float | None) -> None:
    """NumericError where the engine's noise is not far smaller than a tight clip bound: the noise
    would be clipped, in place of what the policy has learned."""
    if clip is None or clip >= TIGHT_CLIP or report["mean_gap"] <= clip / 10:
        return
    raise NumericError(
        "optimize audit",
        f"the trainer's logprobs differ from the engine's by {report['mean_gap']:.2g} nats a token "
        f"in the mean, expected at most {clip / 10:.2g}, a tenth of the clip bound {clip:g}: the "
        "ratio would be clipped for the engine's noise, since no proximal logprobs are given",
        state="no weight was changed, no version was written.",
        next="give proximal logprobs (stage logprobs, role prox), as a recipe does by itself",
    )
