"""Per-token losses, token weights, KL estimators and off-policy weights: pure functions.

Legend: B rollouts with N completion tokens, concatenated as in an Arrow list column; rollout i owns
tokens `offsets[i]:offsets[i+1]`. `logprobs` [N] carries the gradient; everything else is data. The
surrogate gives each token's loss, `token_losses` [N]; the aggregation gives its weight in the step.
They are separate: loss = Σ_t weight_t · loss_t. The weights are computed once for the whole
optimizer step, so micro-batches, their order and ranks change nothing.

Policies whose logprobs appear, all of the sampled tokens:

    old       the policy that sampled (the behaviour policy), as the engine reported it
    prox      the proximal policy, by the trainer's numerics: the one that sampled (`prox_of` =
              "behaviour"), or that the training starts from ("start")
    anchor    the denominator of the ratio r = exp(logprobs − anchor): prox if given, else old
    ref       the reference of the KL, which is a term of the loss or, with `kl_in_reward`, is
              subtracted from the reward as old − ref

Without prox logprobs a training is refused if `prox_of` is "start" or sampling was biased
(checks.py), or if the audit finds a tight clip bound within ten times the engine's noise
(audit.py).

More surrogates are in surrogates.py.

    token_losses, at_bound = clipped(tokens, clip_low=0.2, clip_high=0.28)
    loss = (token_mean(lengths) * token_losses).sum()
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quiver.stages.model.ragged import Ragged

MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """The completion tokens of some whole rollouts, as a surrogate sees them."""

    logprobs: Tensor
    """[N] log π_θ, with gradient."""
    anchor: Tensor
    """[N] the ratio's denominator: `prox_logprobs` if they are given, else `old_logprobs`."""
    advantages: Tensor
    """[N] of the token, or of its rollout, repeated."""
    offsets: Tensor
    """[B+1] int64."""


def log_ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Return logprobs − anchor [N], clamped to ±20 so that `exp` stays finite (the gradient is 0
    beyond)."""
    return (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# -- surrogates: Tokens -> (token_losses [N], at_bound [N] bool)


def clipped(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> tuple[Tensor, Tensor]:
    """loss_t = −min(r A, clip(r, 1−clip_low, 1+clip_high) A) with r = exp(logprobs − anchor).

    Clipping stops the gradient of a token that its advantage has already pushed past the bound. At
    r = 1 its gradient is REINFORCE's, −A ∇logprobs; with both bounds infinite it is plain
    importance sampling. If A < 0, `dual_clip` c bounds the loss: min(loss, −c A). `delta` caps r in
    the unclipped branch only.

    Args:
        tokens: of whole rollouts.
        clip_low, clip_high: distances from ratio 1, each ≥ 0.
        dual_clip: > 1, or None for off.
        delta: > 1 + clip_high, or None for off.
    Returns:
        token losses [N]; and bool [N], true where a bound decided the loss (that token has no
        gradient).

    Reference: PPO, https://arxiv.org/abs/1707.06347, equation 7; separate bounds: DAPO,
    https://arxiv.org/abs/2503.14476; dual clip: https://arxiv.org/abs/1912.09729; delta:
    https://arxiv.org/abs/2505.07291 (two-sided clipping).
    """
    ratio = log_ratio(tokens.logprobs, tokens.anchor).exp()
    return _clip_ratio(ratio, tokens.advantages, clip_low, clip_high, dual_clip, delta)


def _clip_ratio(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    delta: float | None,
) -> tuple[Tensor, Tensor]:
    """Return what `clipped` returns, for any ratio [N], of a token or of its sequence."""
    capped_ratio = ratio if delta is None else ratio.clamp(max=delta)
    unclipped_gain = capped_ratio * advantages
    clipped_gain = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    token_losses = -torch.minimum(unclipped_gain, clipped_gain)
    at_bound = clipped_gain < unclipped_gain
    if delta is not None:
        at_bound = at_bound | ((ratio > delta) & (advantages != 0))
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        above = (advantages < 0) & (token_losses > ceiling)
        token_losses = torch.where(above, ceiling, token_losses)
        at_bound = at_bound | above
    return token_losses, at_bound


def sequence_clipped(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
    token_form: bool = False,
) -> tuple[Tensor, Tensor]:
    """loss_t = −min(s_i A, clip(s_i, 1−clip_low, 1+clip_high) A) with s_i = exp(mean over rollout
    i's tokens of log r).

    The whole completion is clipped or not: its tokens share one ratio, and all get the same
    gradient. As a geometric mean, s_i stays far nearer to 1 than a token's ratio, so its bounds are
    hundreds of times tighter than `clipped`'s. With completions of one token it is `clipped`.
    `token_form` uses s_i · exp(logprobs − sg(logprobs)) instead. The value is the same, and so is
    the gradient if a rollout's tokens share one advantage and one weight; with advantages per token
    the gradients differ.

    The clamp to ±20 applies to the mean, which goes into `exp`, not to single tokens. verl takes
    the token form, bounded above by log s = 10; TRL (`importance_sampling_level`) and OpenRLHF take
    the sequence form, without a clamp.

    Args:
        tokens: of whole rollouts.
        clip_low, clip_high: distances from sequence ratio 1, each ≥ 0.
        dual_clip, delta: as in `clipped`, for the sequence ratio.
        token_form: as above.
    Returns:
        token losses [N]; and bool [N], true where a bound decided the loss (for all tokens of a
        rollout, if A is the rollout's).

    Reference: GSPO, https://arxiv.org/abs/2507.18071, section 4.1; the token form is its
    GSPO-token.
    """
    log_ratios = Ragged(tokens.logprobs - tokens.anchor, tokens.offsets)
    log_s = log_ratios.segment_mean().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[log_ratios.segment_ids]
    if token_form:
        log_s = log_s.detach() + (tokens.logprobs - tokens.logprobs.detach())
    return _clip_ratio(log_s.exp(), tokens.advantages, clip_low, clip_high, dual_clip, delta)


def cispo(tokens: Tokens, *, clip_max: float) -> tuple[Tensor, Tensor]:
    """loss_t = −sg[min(r, clip_max)] A logprobs: REINFORCE, weighted by the bounded ratio.

    The bound limits the weight and drops no token: none loses its gradient, so rare tokens that
    `clipped` would cut still teach. At r = 1, and with clip_max = 1 for every r ≥ 1, it is
    `reinforce`; with an infinite clip_max its gradient is plain importance sampling's, −r A
    ∇logprobs. Its value estimates no objective; only its gradient means something.

    `clip_max` bounds the ratio itself (5.0 lets weights up to 5 through). The paper writes clip(r,
    1−ε_low, 1+ε_high) and leaves the lower end open in its experiments; verl clips to
    [1−clip_ratio_low, 1+clip_ratio_high], so its 4.0 is the 5.0 here; TRL's `epsilon_high` is the
    bound itself when its loss type is cispo.

    Args:
        tokens: of whole rollouts.
        clip_max: largest weight, > 0; the absolute bound of the ratio, not a distance from 1.
    Returns:
        token losses [N]; and bool [N], true where the weight was bounded (that token keeps a
        gradient, of clip_max).

    Reference: MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5; 5.0:
    https://arxiv.org/abs/2510.13786.
    """
    ratio = log_ratio(tokens.logprobs, tokens.anchor).detach().exp()
    token_losses = -ratio.clamp(max=clip_max) * tokens.advantages * tokens.logprobs
    at_bound = (ratio > clip_max) & (tokens.advantages != 0)
    return token_losses, at_bound


def sapo(tokens: Tokens, *, tau_positive: float, tau_negative: float) -> tuple[Tensor, Tensor]:
    """loss_t = −A σ(τ (r−1)) 4/τ, with τ = tau_positive where A > 0, tau_negative elsewhere.

    A soft gate in place of clipping: the gradient is −A r 4 σ(1−σ) ∇logprobs, which is
    `reinforce`'s at r = 1 and fades smoothly on both sides of it, the faster the larger τ. Towards
    τ = 0 it is plain importance sampling up to a constant. At r = 1 the value is −2 A/τ, not −A, so
    losses of different τ cannot be compared.

    As in the paper, TRL and verl (whose names are sapo_temperature_pos/neg and tau_pos/neg).

    Args:
        tokens: of whole rollouts.
        tau_positive, tau_negative: > 0.
    Returns:
        token losses [N]; and bool [N], false throughout: there is no bound.

    Reference: SAPO, https://arxiv.org/abs/2511.20347.
    """
    advantages = tokens.advantages
    ratio = log_ratio(tokens.logprobs, tokens.anchor).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    token_losses = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return token_losses, torch.zeros_like(advantages, dtype=torch.bool)


def reinforce(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """loss_t = −A logprobs: the policy gradient of samples of the policy itself.

    The ratio is not used, so from the second step on the same rollouts its gradient is biased and
    nothing bounds it. The first step of every other surrogate here has this gradient where r = 1.

    Args:
        tokens: of whole rollouts.
    Returns:
        token losses [N]; and bool [N], false throughout: there is no bound.

    Reference: Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    token_losses = -tokens.advantages * tokens.logprobs
    return token_losses, torch.zeros_like(tokens.advantages, dtype=torch.bool)


# -- aggregations: the weight of a token in the optimizer step


def token_mean(lengths: Tensor, max_completion_tokens: int | None = None) -> Tensor:
    """1 / N for each of the step's N tokens: every token counts alike, so long completions count
    more.

    Args:
        lengths: [B] int64, tokens of each of the step's completions.
        max_completion_tokens: not used.
    Returns:
        [N] float64.

    Reference: DAPO, https://arxiv.org/abs/2503.14476 (token-level loss).
    """
    num_tokens = int(lengths.sum())
    return torch.full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float64)


def sequence_mean(lengths: Tensor, max_completion_tokens: int | None = None) -> Tensor:
    """1 / (B T_i): mean over the step's rollouts of the mean over the T_i tokens of each.

    Args:
        lengths: [B] int64, tokens of each of the step's completions.
        max_completion_tokens: not used.
    Returns:
        [N] float64.

    Reference: DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3.
    """
    return (1.0 / (len(lengths) * lengths.double())).repeat_interleave(lengths)


def sequence_sum(lengths: Tensor, max_completion_tokens: int | None = None) -> Tensor:
    """1 / B: mean over the step's rollouts of the sum over the tokens of each.

    A completion's influence grows with its length, as in the policy gradient itself. It is
    `constant` times max_completion_tokens.

    Args:
        lengths: [B] int64, tokens of each of the step's completions.
        max_completion_tokens: not used.
    Returns:
        [N] float64.

    Reference: LUSPO, https://arxiv.org/abs/2602.05261, which weighs a completion by its length.
    """
    return torch.full((int(lengths.sum()),), 1.0 / max(len(lengths), 1), dtype=torch.float64)


def constant(lengths: Tensor, max_completion_tokens: int) -> Tensor:
    """1 / (B max_completion_tokens): a token weighs the same in every step, however long the
    completions came out.

    Args:
        lengths: [B] int64, tokens of each of the step's completions.
        max_completion_tokens: ≥ 1, the limit of generation.
    Returns:
        [N] float64.

    Reference: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    weight = 1.0 / (len(lengths) * max_completion_tokens)
    return torch.full((int(lengths.sum()),), weight, dtype=torch.float64)


# -- the critic


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.2
) -> Tensor:
    """0.5 · max((V − R)², (clip(V, V_old − c, V_old + c) − R)²): the critic's squared error,
    clipped as PPO clips the policy.

    It takes the larger of both, so a token has no gradient once V has moved by more than c towards
    its return. With c = None it is half the squared error. verl uses the same.

    Args:
        values: [N] V_t, with gradient.
        old_values: [N] V_t before the first update.
        returns: [N] target of V_t.
        clip: c ≥ 0 in units of reward, or None for off.
    Returns:
        [N] ≥ 0.

    Reference: https://arxiv.org/abs/2006.05990 (PPO-style value clipping).
    """
    squared_error = (values - returns).square()
    if clip is None:
        return 0.5 * squared_error
    clipped_values = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    return 0.5 * torch.maximum(squared_error, (clipped_values - returns).square())


# -- KL to the reference


def kl(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3", unbiased_gradient: bool = True
) -> Tensor:
    """Estimate of KL(π_θ ‖ π_ref) a token, with d = ref − logprobs: k1 = −d, k2 = d²/2, k3 = e^d −
    d − 1.

    All three estimate the value, but as a loss they differ. Under samples of π_θ, k1's gradient is
    0 in the mean, k3's is not the KL's gradient, and k2's is. `unbiased_gradient` therefore keeps
    the estimator's value and takes k2's gradient, −d ∇logprobs.

    Args:
        logprobs: [N] with gradient.
        ref_logprobs: [N] under the reference, at the same temperature.
        estimator: k1, k2 or k3.
        unbiased_gradient: take the gradient from k2 with every estimator.
    Returns:
        [N]; k2 and k3 are ≥ 0.

    Reference: http://joschu.net/blog/kl-approx.html; gradients: https://arxiv.org/abs/2510.01555.
    """
    d = -log_ratio(logprobs, ref_logprobs)
    k2 = d**2 / 2
    estimate = {"k1": -d, "k2": k2, "k3": torch.expm1(d) - d}[estimator]
    if unbiased_gradient:
        estimate = estimate.detach() + (k2 - k2.detach())
    return estimate


# -- off-policy correction


def correction(
    prox_logprobs: Tensor,
    old_logprobs: Tensor,
    offsets: Tensor,
    *,
    mode: str = "truncate",
    level: str = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """w = exp(prox − old), bounded: the factor of a token's loss if the ratio's denominator is
    `prox_logprobs`.

    `level`: `token` uses w itself; `sequence` the product over the rollout's tokens; `geometric`
    their geometric mean. The logarithm of the result, not of each token, is clamped to ±20. `mode`:
    `truncate` sets w to min(w, high); `clamp` to the nearest in [low, high]; `mask` to 0 outside
    [low, high] and leaves it inside. Equal policies give 1 everywhere.

    Args:
        prox_logprobs: [N] from the trainer, under the weights that sampled or the weights that the
            training starts from.
        old_logprobs: [N] from the engine, under the weights that sampled.
        offsets: [B+1] int64.
        mode, level, low, high: as above.
    Returns:
        [N], no gradient.

    Reference: decoupled PPO, https://arxiv.org/abs/2110.00641; truncation:
    https://arxiv.org/abs/1802.01561, section 4.1.
    """
    log_ratios = Ragged((prox_logprobs - old_logprobs).detach(), offsets)
    log_weight = log_ratios.values
    if level != "token":
        of_rollout = log_ratios.segment_sum() if level == "sequence" else log_ratios.segment_mean()
        log_weight = of_rollout[log_ratios.segment_ids]
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode != "mask":
        return weight.clamp(low if mode == "clamp" else 0.0, high)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)
