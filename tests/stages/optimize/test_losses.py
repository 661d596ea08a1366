"""Losses, weights, KL and corrections against float64 loops written from the formulas, and the relations between them."""

import itertools
import math

import numpy as np
import pytest
import torch

from stages.optimize import losses

RNG = np.random.default_rng(7)
LENGTHS = [3, 1, 5, 2]
OFFSETS = [0, 3, 4, 9, 11]
N = sum(LENGTHS)
OLD = -RNG.exponential(1.0, N)
NOW = OLD + RNG.normal(0, 0.4, N)
ADVANTAGES = np.repeat([1.5, -0.7, -2.0, 0.3], LENGTHS)


def _tokens(now=NOW, old=OLD, advantages=ADVANTAGES) -> losses.Tokens:
    data = [torch.tensor(np.asarray(x), dtype=torch.float64) for x in (now, old, advantages)]
    return losses.Tokens(*data, torch.tensor(OFFSETS))


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.2, 0.28), (0.0, 0.05)])
@pytest.mark.parametrize("dual", [None, 1.2])
@pytest.mark.parametrize("delta", [None, 1.4])
def test_clipped_golden(low, high, dual, delta):
    loss, taken = losses.clipped(_tokens(), clip_low=low, clip_high=high, dual_clip=dual, delta=delta)
    for t in range(N):
        ratio = math.exp(NOW[t] - OLD[t])
        free = min(ratio, delta if delta else math.inf) * ADVANTAGES[t]
        bounded = min(max(ratio, 1 - low), 1 + high) * ADVANTAGES[t]
        expected = -min(free, bounded)
        clipped = bounded < free or bool(delta and ratio > delta)
        if dual and ADVANTAGES[t] < 0 and -dual * ADVANTAGES[t] < expected:
            expected, clipped = -dual * ADVANTAGES[t], True
        assert loss[t].item() == pytest.approx(expected, rel=1e-12)
        assert taken[t].item() == clipped
    assert taken.any() and not taken.all()


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    now = torch.tensor(OLD, requires_grad=True)
    tokens = losses.Tokens(now, torch.tensor(OLD), torch.tensor(ADVANTAGES), torch.tensor(OFFSETS))
    loss, taken = losses.clipped(tokens, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    np.testing.assert_allclose(gradient.numpy(), -ADVANTAGES, rtol=1e-12)
    assert not taken.any()


def test_a_clipped_token_has_no_gradient():
    now = torch.tensor([math.log(1.5), math.log(0.5), math.log(1.5), math.log(0.5)], requires_grad=True)
    tokens = losses.Tokens(now, torch.zeros(4), torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.tensor([0, 4]))
    loss, taken = losses.clipped(tokens, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    assert taken.tolist() == [True, True, False, False]
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 1.5, -0.5])


def test_a_token_whose_gradient_the_cap_removed_counts_as_clipped():
    now = torch.tensor([math.log(1.5), math.log(1.3), math.log(1.5)], requires_grad=True)
    tokens = losses.Tokens(now, torch.zeros(3), torch.tensor([-1.0, -1.0, 0.0]), torch.tensor([0, 3]))
    loss, taken = losses.clipped(tokens, clip_low=0.2, clip_high=0.2, delta=1.4)
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    assert loss.tolist() == pytest.approx([1.4, 1.3, 0.0])
    assert taken.tolist() == [True, False, False]
    assert gradient.tolist() == pytest.approx([0.0, 1.3, 0.0])


def test_extreme_ratios_stay_finite():
    loss, _ = losses.clipped(_tokens(np.full(N, -1.0), np.full(N, -900.0)), clip_low=0.2, clip_high=0.2)
    assert loss.isfinite().all()
    assert loss.max().item() == pytest.approx(2.0 * math.exp(20.0))


def test_aggregations_golden():
    lengths = torch.tensor(LENGTHS)
    assert losses.token_mean(lengths).tolist() == pytest.approx([1 / N] * N)
    assert losses.sequence_mean(lengths).tolist() == pytest.approx([1 / (4 * n) for n in LENGTHS for _ in range(n)])
    assert losses.constant(lengths, 16).tolist() == pytest.approx([1 / (4 * 16)] * N)
    with pytest.raises(ValueError, match="max_completion_tokens"):
        losses.constant(lengths, None)


def test_kl_golden_and_gradients():
    ref = NOW + RNG.normal(0, 0.3, N)
    for name, formula in {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - d - 1}.items():
        for unbiased in (False, True):
            now = torch.tensor(NOW, requires_grad=True)
            found = losses.kl(now, torch.tensor(ref), name, unbiased)
            assert found.tolist() == pytest.approx([formula(ref[t] - NOW[t]) for t in range(N)], rel=1e-9, abs=1e-12)
            (gradient,) = torch.autograd.grad(found.sum(), now)
            d = ref - NOW
            own = {"k1": np.ones(N), "k2": -d, "k3": 1 - np.exp(d)}[name]
            np.testing.assert_allclose(gradient.numpy(), -d if unbiased else own, rtol=1e-9, atol=1e-12)


def test_the_unbiased_gradient_is_that_of_the_true_kl():
    """Exact expectation over a small vocabulary: E_π[gradient of the estimator] against autograd through Σ π log(π/ρ)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.5, -0.2, 0.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    weights = logprobs.exp().detach()
    gradients = {
        unbiased: torch.autograd.grad((weights * losses.kl(logprobs, ref, "k3", unbiased)).sum(), logits, retain_graph=True)[0]
        for unbiased in (True, False)
    }
    torch.testing.assert_close(gradients[True], true)
    assert (gradients[False] - true).abs().max() > 1e-2


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_correction_golden(mode, level):
    prox, low, high = OLD + RNG.normal(0, 0.5, N), 0.5, 1.5
    found = losses.correction(
        torch.tensor(prox), torch.tensor(OLD), torch.tensor(OFFSETS), mode=mode, level=level, low=low, high=high
    )
    for start, end in itertools.pairwise(OFFSETS):
        gaps = [prox[t] - OLD[t] for t in range(start, end)]
        for t in range(start, end):
            power = {"token": prox[t] - OLD[t], "sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}[level]
            weight = math.exp(power)
            expected = min(weight, high) if mode == "truncate" else (weight if low <= weight <= high else 0.0)
            assert found[t].item() == pytest.approx(expected, rel=1e-12)


def test_correction_of_equal_policies_is_one():
    same = torch.tensor(OLD)
    assert losses.correction(same, same, torch.tensor(OFFSETS)).tolist() == [1.0] * N
