"""Per-token losses, their weights, KL estimators, off-policy weights. Pure functions of flat
tensors.

Legend: B rollouts, N completion tokens, one after another as an Arrow list column stores them;
rollout i owns tokens `offsets[i]:offsets[i+1]`. `logprobs` [N] carries the gradient; everything
else is data. The surrogate (what a token costs) and the aggregation (what a token weighs in the
step) are apart: loss = Σ_t weight_t · surrogate_t. The weights are made once for the whole
optimizer step, so micro-batches, their order and ranks change nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quiver.stages.common.ragged import Ragged

MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """What a surrogate sees of the completion tokens of some whole rollouts."""

    logprobs: torch.Tensor
    """[N] log π_θ, with gradient."""
    anchor: torch.Tensor
    """[N] the ratio's denominator: `prox_logprobs` where given, else `old_logprobs`."""
    advantages: torch.Tensor
    """[N] of the token, or of its rollout repeated."""
    offsets: torch.Tensor
    """[B+1] int64."""


def log_ratio(logprobs: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """[N] logprobs − anchor, clamped to ±20 so that `exp` stays finite (the gradient is 0
    beyond)."""
    return (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# -- surrogates: Tokens -> (loss [N], clipped [N] bool)


def clipped(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """loss_t = −min(r A, clip(r, 1−clip_low, 1+clip_high) A) with r = exp(logprobs − anchor).

    Clipping stops the step where it would move a token further in the direction that its advantage
    already pushed it. At r = 1 its gradient is REINFORCE's, −A ∇logprobs; with both bounds infinite
    it is plain importance sampling. `dual_clip` c bounds the loss where A < 0: min(loss, −c A).
    `delta` caps r in the unclipped branch only.

    Args:
        tokens: of whole rollouts.
        clip_low, clip_high: distances from ratio 1, each ≥ 0.
        dual_clip: > 1, or None for off.
        delta: > 1 + clip_high, or None for off.
    Returns:
        loss [N]; and bool [N], true where a bound was the value taken (that token has no gradient).

    Reference: PPO, https://arxiv.org/abs/1707.06347, equation 7; separate bounds: DAPO,
    https://arxiv.org/abs/2503.14476; dual
    clip: https://arxiv.org/abs/1912.09729; delta: https://arxiv.org/abs/2505.07291 (two-sided
    clipping).
    """
    ratio = log_ratio(tokens.logprobs, tokens.anchor).exp()
    return _bounded(ratio, tokens.advantages, clip_low, clip_high, dual_clip, delta)


def _bounded(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    delta: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped objective of any ratio [N]: of a token, or of its sequence."""
    free = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, taken = -torch.minimum(free, bounded), bounded < free
    if delta is not None:
        taken = taken | ((ratio > delta) & (advantages != 0))
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, taken = torch.where(over, ceiling, loss), taken | over
    return loss, taken


def sequence_clipped(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
    token_form: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """loss_t = −min(s_i A, clip(s_i, 1−clip_low, 1+clip_high) A) with s_i = exp(mean over rollout
    i's tokens of log r).

    The whole completion is in or out: its tokens share one ratio, whose gradient every one of them
    gets alike. As a geometric mean s_i stays far nearer to 1 than a token's ratio, so its bounds
    are hundreds of times tighter than `clipped`'s. With completions of one token it is `clipped`.
    `token_form` takes s_i · exp(logprobs − sg(logprobs)) instead: the same value, and the same
    gradient wherever a rollout's tokens bear one advantage and one weight; the two part where
    tokens have advantages of their own.

    The clamp to ±20 is of the mean, which is what goes into `exp`, not of single tokens. verl takes
    the token form, bounded above by log s = 10; TRL (`importance_sampling_level`) and OpenRLHF take
    the sequence form, without a clamp.

    Args:
        tokens: of whole rollouts.
        clip_low, clip_high: distances from sequence ratio 1, each ≥ 0.
        dual_clip, delta: as in `clipped`, of the sequence ratio.
        token_form: as above.
    Returns:
        loss [N]; and bool [N], true where a bound was the value taken (all of a rollout's tokens,
        where A is the rollout's).

    Reference: GSPO, https://arxiv.org/abs/2507.18071, section 4.1; the token form is its
    GSPO-token.
    """
    each = Ragged(tokens.logprobs - tokens.anchor, tokens.offsets)
    mean = each.segment_mean().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[each.segment_ids]
    if token_form:
        mean = mean.detach() + (tokens.logprobs - tokens.logprobs.detach())
    return _bounded(mean.exp(), tokens.advantages, clip_low, clip_high, dual_clip, delta)


def cispo(tokens: Tokens, *, clip_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    """loss_t = −sg[min(r, clip_max)] A logprobs: REINFORCE, weighted by the bounded ratio.

    The bound holds the weight back, not the token: none loses its gradient, so rare tokens that
    `clipped` would cut still teach. At r = 1, and with clip_max = 1 for every r ≥ 1, it is
    `reinforce`; with an infinite clip_max its gradient is that of plain importance sampling, −r A
    ∇logprobs. Its value estimates no objective; only its gradient means something.

    `clip_max` bounds the ratio itself (5.0 lets weights up to 5 through). The paper writes clip(r,
    1−ε_low, 1+ε_high) and leaves the lower end open in its experiments; verl clips to
    [1−clip_ratio_low, 1+clip_ratio_high], so its 4.0 is the 5.0 here; TRL's `epsilon_high` is the
    bound itself when its loss type is cispo.

    Args:
        tokens: of whole rollouts.
        clip_max: largest weight, > 0; the absolute bound of the ratio, not a distance from 1.
    Returns:
        loss [N]; and bool [N], true where the weight was bounded (that token keeps a gradient, of
        clip_max).

    Reference: MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5; 5.0:
    https://arxiv.org/abs/2510.13786.
    """
    ratio = log_ratio(tokens.logprobs, tokens.anchor).detach().exp()
    loss = -ratio.clamp(max=clip_max) * tokens.advantages * tokens.logprobs
    return loss, (ratio > clip_max) & (tokens.advantages != 0)


def sapo(
    tokens: Tokens, *, tau_positive: float, tau_negative: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """loss_t = −A σ(τ (r−1)) 4/τ, with τ = tau_positive where A > 0, tau_negative elsewhere.

    A soft gate in place of clipping: the gradient is −A r 4 σ(1−σ) ∇logprobs, which is
    `reinforce`'s at r = 1 and fades smoothly on both sides of it, the faster the larger τ. Towards
    τ = 0 it is plain importance sampling up to a constant. At r = 1 the value is −2 A/τ, not −A, so
    losses of different τ can not be compared.

    As in the paper, TRL and verl (whose names are sapo_temperature_pos/neg and tau_pos/neg).

    Args:
        tokens: of whole rollouts.
        tau_positive, tau_negative: > 0.
    Returns:
        loss [N]; and bool [N], false throughout: there is no bound.

    Reference: SAPO, https://arxiv.org/abs/2511.20347.
    """
    advantages = tokens.advantages
    ratio = log_ratio(tokens.logprobs, tokens.anchor).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return loss, torch.zeros_like(advantages, dtype=torch.bool)


def reinforce(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """loss_t = −A logprobs: the policy gradient of samples of the policy itself.

    The ratio is not used, so from the second step on the same rollouts its gradient is biased and
    nothing bounds it. The first step of every other surrogate here has this gradient where r = 1.

    Args:
        tokens: of whole rollouts.
    Returns:
        loss [N]; and bool [N], false throughout: there is no bound.

    Reference: Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return -tokens.advantages * tokens.logprobs, torch.zeros_like(
        tokens.advantages, dtype=torch.bool
    )


# -- aggregations: what a token of the optimizer step weighs


def token_mean(lengths: torch.Tensor, max_completion_tokens: int | None = None) -> torch.Tensor:
    """1 / N for each of the step's N tokens: every token counts alike, so long completions count
    more. [N]

    Reference: DAPO, https://arxiv.org/abs/2503.14476 (token-level loss).
    """
    tokens = int(lengths.sum())
    return torch.full((tokens,), 1.0 / max(tokens, 1), dtype=torch.float64)


def sequence_mean(lengths: torch.Tensor, max_completion_tokens: int | None = None) -> torch.Tensor:
    """1 / (B T_i): mean over the step's rollouts of the mean over each one's own tokens. [N]

    Reference: DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3.
    """
    return (1.0 / (len(lengths) * lengths.double())).repeat_interleave(lengths)


def constant(lengths: torch.Tensor, max_completion_tokens: int | None = None) -> torch.Tensor:
    """1 / (B max_completion_tokens): a token weighs the same in every step, however long the
    completions came out. [N]

    Reference: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    if not max_completion_tokens:
        raise ValueError("aggregation 'constant' needs max_completion_tokens >= 1")
    return torch.full(
        (int(lengths.sum()),), 1.0 / (len(lengths) * max_completion_tokens), dtype=torch.float64
    )


# -- the critic


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None = 0.2
) -> torch.Tensor:
    """0.5 · max((V − R)², (clip(V, V_old − c, V_old + c) − R)²): the critic's squared error, with
    the policy's caution.

    The larger of both, so a token has no gradient once V has moved by more than c towards its
    return. With c = None it is half the squared error. verl takes the same.

    Args:
        values: [N] V_t, with gradient.
        old_values: [N] the same before the first update.
        returns: [N] what V_t should be.
        clip: c ≥ 0 in units of reward, or None for off.
    Returns:
        [N] ≥ 0.

    Reference: https://arxiv.org/abs/2006.05990 (PPO-style value clipping).
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error
    bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    return 0.5 * torch.maximum(error, (bounded - returns).square())


# -- KL to the reference


def kl(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: str = "k3",
    unbiased_gradient: bool = True,
) -> torch.Tensor:
    """Estimate of KL(π_θ ‖ π_ref) a token, with d = ref − logprobs: k1 = −d, k2 = d²/2, k3 = e^d −
    d − 1.

    All three estimate the value; as a loss they differ: under samples of π_θ, the gradient of k1 is
    0 in the mean and that of k3 is not the KL's, while that of k2 is. `unbiased_gradient` therefore
    keeps the estimator's value and takes k2's gradient, −d ∇logprobs.

    Args:
        logprobs: [N] with gradient.
        ref_logprobs: [N] under the reference, at the same temperature.
        estimator: k1, k2 or k3.
        unbiased_gradient: take the gradient from k2 whatever the value is.
    Returns:
        [N]; k2 and k3 are ≥ 0.

    Reference: http://joschu.net/blog/kl-approx.html; gradients: https://arxiv.org/abs/2510.01555.
    """
    d = -log_ratio(logprobs, ref_logprobs)
    k2 = d**2 / 2
    value = {"k1": lambda: -d, "k2": lambda: k2, "k3": lambda: torch.expm1(d) - d}[estimator]()
    return value.detach() + (k2 - k2.detach()) if unbiased_gradient else value


# -- off-policy correction


def correction(
    prox_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = "truncate",
    level: str = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> torch.Tensor:
    """w = exp(prox − old), bounded: what multiplies a token's loss when the ratio is taken against
    `prox_logprobs`.

    `level`: `token` as it stands; `sequence` the product over the rollout's tokens; `geometric`
    their geometric mean. `mode`: `truncate` sets w to min(w, high); `mask` sets it to 0 outside
    [low, high] and leaves it inside. Equal policies give 1 everywhere.

    Args:
        prox_logprobs, old_logprobs: [N] of the same weights under the trainer's and the engine's
        numerics.
        offsets: [B+1] int64.
        mode, level, low, high: as above.
    Returns:
        [N], no gradient.

    Reference: decoupled PPO, https://arxiv.org/abs/2110.00641; truncation:
    https://arxiv.org/abs/1802.01561, section 4.1.
    """
    rows = Ragged(log_ratio(prox_logprobs, old_logprobs).detach(), offsets)
    if level != "token":
        each = rows.segment_sum() if level == "sequence" else rows.segment_mean()
        rows = rows.with_values(each.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[rows.segment_ids])
    weight = rows.values.exp()
    if mode == "truncate":
        return weight.clamp(max=high)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)
