"""The surrogates of dppo, gmpo and luspo against their papers' equations, written densely: padded
rows in float64, the gradient by autograd."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize import losses, surrogates
from quiver.stages.optimize.algorithms import ALGORITHMS, find_function

LENGTHS = torch.tensor([3, 1, 6, 2, 4])
OFFSETS = Ragged.from_lengths(torch.zeros(int(LENGTHS.sum())), LENGTHS).offsets
B, T, N = len(LENGTHS), int(LENGTHS.max()), int(LENGTHS.sum())
MASK = torch.arange(T) < LENGTHS[:, None]
RNG = np.random.default_rng(11)
OLD = -torch.tensor(RNG.exponential(0.7, N))
NOW = torch.clamp(OLD + torch.tensor(RNG.normal(0, 0.5, N)), max=-1e-3)
ADVANTAGES = torch.tensor([1.5, -0.7, -2.0, 0.3, 0.9], dtype=torch.float64)


def padded(flat: Tensor) -> Tensor:
    """[N] -> [B, T], with 7 behind each row's end."""
    return torch.full((B, T), 7.0, dtype=flat.dtype).masked_scatter(MASK, flat)


def ours(surrogate: str, aggregation: str, **options) -> tuple[float, Tensor, Tensor]:
    """A step's loss, its gradient [N], and which tokens were at a bound."""
    now = NOW.clone().requires_grad_()
    tokens = losses.Tokens(now, OLD, ADVANTAGES.repeat_interleave(LENGTHS), OFFSETS)
    costs, at_bound = find_function("losses", surrogate)(tokens, **options)
    loss = (find_function("losses", aggregation)(LENGTHS, 9) * costs).sum()
    return loss.item(), torch.autograd.grad(loss, now)[0], at_bound


def same(found: tuple[float, Tensor, Tensor], equation) -> None:
    """The equation, of padded logprobs [B, T], gives the loss and the gradient found, which is not
    nothing."""
    now = NOW.clone().requires_grad_()
    loss = equation(padded(now))
    assert found[0] == pytest.approx(loss.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, now)
    np.testing.assert_allclose(found[1].numpy(), gradient.numpy(), rtol=1e-10, atol=1e-14)
    assert gradient.abs().max() > 1e-3


# -- dppo


def _distance(divergence: str, now: Tensor, old: Tensor) -> Tensor:
    """Between two coins that show the sampled token with probability `now` and `old`."""
    if divergence == "tv":
        return 0.5 * ((now - old).abs() + ((1 - now) - (1 - old)).abs())
    return old * (old / now).log() + (1 - old) * ((1 - old) / (1 - now)).log()


@pytest.mark.parametrize("divergence, low, high", [("tv", 0.15, 0.1), ("kl", 0.05, 0.02)])
@pytest.mark.parametrize("drift_coef", [0.0, 0.01])
def test_dppo_is_the_papers_mask_over_importance_sampling(divergence, low, high, drift_coef):
    options = {"divergence": divergence, "divergence_low": low, "divergence_high": high}
    found = ours("divergence_masked", "constant", drift_coef=drift_coef, **options)
    outside = []

    def equation(now: Tensor) -> Tensor:
        advantages = ADVANTAGES[:, None]
        ratio = (now - padded(OLD)).exp()
        distance = _distance(divergence, now.detach().exp(), padded(OLD).exp())
        rises = (advantages > 0) & (ratio > 1) & (distance > high)
        falls = (advantages < 0) & (ratio < 1) & (distance > low)
        outside.append((rises | falls)[MASK])
        costs = -torch.where(rises | falls, 0.0, 1.0) * ratio * advantages
        costs = costs + drift_coef * ratio.log() ** 2
        return torch.where(MASK, costs, 0.0).sum() / (B * 9)

    same(found, equation)
    assert torch.equal(found[2], outside[0])
    assert 0 < found[2].sum() < N
    if not drift_coef:
        assert ((found[1] == 0) == found[2]).all()


def test_the_kl_of_dppo_goes_from_what_sampled_to_the_policy():
    """KL(½ ‖ ¼) = ½ ln(4/3) and KL(¼ ‖ ½) = ¾ ln(3/2) − ¼ ln 2: the bound lies between the two, so
    the order of the arguments decides which token is masked."""
    now = torch.tensor([0.25, 0.5], dtype=torch.float64).log()
    old = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    found = surrogates.binary_divergence(now, old, "kl")
    by_hand = [0.5 * math.log(4 / 3), 0.75 * math.log(1.5) - 0.25 * math.log(2)]
    assert found.tolist() == pytest.approx(by_hand)
    assert by_hand == pytest.approx([0.143841, 0.130812], abs=1e-6)
    tokens = losses.Tokens(now, old, torch.tensor([-1.0, 1.0]).double(), torch.tensor([0, 2]))
    options = {"divergence": "kl", "divergence_low": 0.137, "divergence_high": 0.137}
    loss, masked = surrogates.divergence_masked(tokens, **options)
    assert masked.tolist() == [True, False]
    assert loss.tolist() == pytest.approx([0.0, -2.0])  # −r A of the token that is kept


def test_the_cap_of_dppo_keeps_the_gradient_of_a_token():
    options = {"divergence": "tv", "divergence_low": 1.0, "divergence_high": 1.0}
    _, gradient, _ = ours("divergence_masked", "sequence_sum", ratio_max=1.2, **options)
    advantages = ADVANTAGES.repeat_interleave(LENGTHS)
    ratios = (NOW - OLD).exp()
    np.testing.assert_allclose(gradient, -ratios.clamp(max=1.2) * advantages / B, rtol=1e-12)
    assert (ratios > 1.2).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_token_has_a_finite_loss(dtype):
    """Probability 1 now, before, or both: KL is infinite, 0.5, or 0."""
    certain = torch.tensor([0.0, -0.5, 0.0], dtype=dtype, requires_grad=True)
    anchor = torch.tensor([-0.5, 0.0, 0.0], dtype=dtype)
    advantages = torch.tensor([1.0, -1.0, 1.0], dtype=dtype)
    tokens = losses.Tokens(certain, anchor, advantages, torch.tensor([0, 3]))
    loss, masked = surrogates.divergence_masked(tokens, **ALGORITHMS["dppo_kl"].defaults)
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), certain)[0].tolist() == [0.0, 0.0, -1.0]
    assert masked.tolist() == [True, True, False]


def test_the_distance_of_two_outcomes_is_what_its_docstring_says():
    """Within 0 and 1, or the KL from the anchor to the policy; infinite at π = 0 alone."""
    policy = torch.tensor([0.0, 0.25, 1.0, 0.5]).log()
    anchor = torch.tensor([0.5, 0.5, 0.5, 0.5]).log()
    tv = surrogates.binary_divergence(policy, anchor, "tv")
    assert tv.tolist() == pytest.approx([0.5, 0.25, 0.5, 0.0])
    kl = surrogates.binary_divergence(policy, anchor, "kl")
    from_anchor = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    smallest = math.log(torch.finfo(torch.float32).tiny)
    almost = 0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - smallest)
    assert kl.tolist() == pytest.approx([math.inf, from_anchor, almost, 0.0], rel=1e-5, abs=1e-6)
    assert 87 < -smallest < 88


# -- gmpo and luspo


@pytest.mark.parametrize("low, high", [(0.4, 0.4), (0.1, 0.3)])
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(low, high):
    found = ours("geometric_clipped", "sequence_mean", clip_low=low, clip_high=high)

    def equation(now: Tensor) -> Tensor:
        sign = ADVANTAGES.sign()[:, None]
        power = (now - padded(OLD)).exp() ** sign  # w^sgn(A)
        bounds = sorted((math.exp(-low), math.exp(high)))
        bounded = torch.where(
            sign > 0,
            power.clamp(*bounds),
            power.clamp(1 / bounds[1], 1 / bounds[0]),  # w in the bounds, its inverse
        )
        smaller = torch.minimum(power, bounded) ** sign
        product = torch.where(MASK, smaller, 1.0).prod(1)
        return -(product ** (1 / LENGTHS.double()) * ADVANTAGES).mean()

    same(found, equation)
    assert 0 < found[2].sum() < N
    assert ((found[1] == 0) == found[2]).all()


def test_luspo_weighs_the_loss_of_gspo_by_length():
    row = ALGORITHMS["luspo"]
    options = {"clip_low": 0.05, "clip_high": 0.1}
    found = ours(row.surrogate, row.aggregation, **options)

    def equation(now: Tensor) -> Tensor:
        product = torch.where(MASK, (now - padded(OLD)).exp(), 1.0).prod(1)
        ratio = product ** (1 / LENGTHS.double())
        clipped = ratio.clamp(1 - 0.05, 1 + 0.1)
        return -(LENGTHS * torch.minimum(ratio * ADVANTAGES, clipped * ADVANTAGES)).mean()

    same(found, equation)
    assert 0 < found[2].sum() < N
