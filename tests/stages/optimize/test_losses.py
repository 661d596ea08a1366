"""Losses, weights, KL and corrections against float64 loops written from the formulas, and the
relations between them."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from quiver.schemas.errors import NumericError
from quiver.stages.optimize import audit, losses, offpolicy, surrogates
from quiver.stages.optimize.algorithms import find_algorithm, find_function
from quiver.stages.optimize.config import Config, Correction
from quiver.stages.optimize.objective import Objective
from tests.stages.optimize.test_batch import batch_of

RNG = np.random.default_rng(7)
LENGTHS = [3, 1, 5, 2]
OFFSETS = [0, 3, 4, 9, 11]
N = sum(LENGTHS)
OLD = -RNG.exponential(1.0, N)
NOW = OLD + RNG.normal(0, 0.4, N)
ADVANTAGES = np.repeat([1.5, -0.7, -2.0, 0.3], LENGTHS)
RATIOS = np.exp(NOW - OLD)
exactly = partial(pytest.approx, rel=1e-12)


def _tokens(now=NOW, old=OLD, advantages=ADVANTAGES) -> losses.Tokens:
    data = [torch.tensor(np.asarray(x), dtype=torch.float64) for x in (now, old, advantages)]
    return losses.Tokens(*data, torch.tensor(OFFSETS))


def _found(surrogate, tokens: losses.Tokens, **options) -> tuple[list, list, list]:
    """Of each token its loss, the gradient of their sum, and whether it is at a bound."""
    now = tokens.logprobs.clone().requires_grad_()
    loss, at_bound = surrogate(tokens._replace(logprobs=now), **options)
    assert loss.isfinite().all()
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    return loss.tolist(), gradient.tolist(), at_bound.tolist()


def _clipped(ratio, advantage, clip_low, clip_high, dual_clip, delta) -> tuple[float, bool]:
    """Loss of a token, and whether a bound decided it."""
    free = min(ratio, delta or math.inf) * advantage
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage
    loss, is_clipped = -min(free, bounded), bounded < free or bool(delta and ratio > delta)
    if dual_clip and advantage < 0 and -dual_clip * advantage < loss:
        return -dual_clip * advantage, True
    return loss, is_clipped


def _require_clipped(found: tuple[list, list, list], ratios, **bounds) -> None:
    loss, _, taken = found
    tokens = zip(ratios, ADVANTAGES, strict=True)
    expected = [_clipped(*token, **bounds) for token in tokens]
    assert loss == exactly([each for each, _ in expected])
    assert taken == [is_clipped for _, is_clipped in expected]


@pytest.mark.parametrize("low, high", [(0.2, 0.28), (0.0, 0.05)])
@pytest.mark.parametrize("dual, delta", [(None, None), (1.2, None), (None, 1.4), (1.2, 1.4)])
def test_clipped_golden(low, high, dual, delta):
    options = {"clip_low": low, "clip_high": high, "dual_clip": dual, "delta": delta}
    found = _found(losses.clipped, _tokens(), **options)
    _require_clipped(found, RATIOS, **options)
    assert 0 < sum(found[2]) < N


@pytest.mark.parametrize(
    "ratios, advantages, delta, at_bound, gradient",
    [
        ([1.5, 0.5, 1.5, 0.5], [1.0, -1.0, -1.0, 1.0], None, [1, 1, 0, 0], [0.0, 0.0, 1.5, -0.5]),
        ([1.5, 1.3, 1.5], [-1.0, -1.0, 0.0], 1.4, [1, 0, 0], [0.0, 1.3, 0.0]),
    ],
)
def test_a_token_at_a_bound_has_no_gradient(ratios, advantages, delta, at_bound, gradient):
    offsets = torch.tensor([0, len(ratios)])
    columns = torch.tensor(ratios).log(), torch.zeros(len(ratios)), torch.tensor(advantages)
    tokens = losses.Tokens(*columns, offsets)
    options = {"clip_low": 0.2, "clip_high": 0.2, "delta": delta}
    _, found, taken = _found(losses.clipped, tokens, **options)
    assert taken == at_bound
    assert found == pytest.approx(gradient)


# -- sequence_clipped, cispo, sapo, reinforce


def _sequence_ratios(now=NOW) -> list[float]:
    """(Π r)^(1/T) of each rollout, repeated over its tokens: the product, not a mean of
    logarithms."""
    found = []
    for start, end in itertools.pairwise(OFFSETS):
        product = 1.0
        for t in range(start, end):
            product *= math.exp(now[t]) / math.exp(OLD[t])
        found += [product ** (1 / (end - start))] * (end - start)
    return found


@pytest.mark.parametrize("token_form", [False, True])
@pytest.mark.parametrize("low, high", [(0.02, 0.03), (3e-4, 4e-4), (9.0, 9.0)])
@pytest.mark.parametrize("dual, delta", [(None, None), (1.1, None), (None, 0.9)])
def test_sequence_clipped_golden(token_form, low, high, dual, delta):
    options = {"clip_low": low, "clip_high": high, "dual_clip": dual, "delta": delta}
    found = _found(losses.sequence_clipped, _tokens(), **options, token_form=token_form)
    _require_clipped(found, _sequence_ratios(), **options)


def test_a_sequences_tokens_share_one_gradient():
    """d/dlogp_k of Σ_t weight · loss_t, by differences of the product form; the clipped rollout has
    none."""

    def whole(now: np.ndarray) -> float:
        ratios = _sequence_ratios(now)
        return sum(
            -min(ratios[t] * ADVANTAGES[t], min(max(ratios[t], 0.9), 1.1) * ADVANTAGES[t])
            / (4 * length)
            for t, length in enumerate(np.repeat(LENGTHS, LENGTHS))
        )

    step = 1e-6
    expected = [
        (whole(NOW + step * one) - whole(NOW - step * one)) / (2 * step) for one in np.eye(N)
    ]
    weights = losses.sequence_mean(torch.tensor(LENGTHS))
    for token_form in (False, True):
        now = torch.tensor(NOW, requires_grad=True)
        loss, taken = losses.sequence_clipped(
            _tokens()._replace(logprobs=now), clip_low=0.1, clip_high=0.1, token_form=token_form
        )
        (gradient,) = torch.autograd.grad((weights * loss).sum(), now)
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6, atol=1e-9)
        assert (gradient[taken] == 0).all() and (gradient[~taken] != 0).all()
        for start, end in itertools.pairwise(OFFSETS):
            assert gradient[start:end].tolist() == exactly([gradient[start].item()] * (end - start))
    assert 0 < taken.sum() < N


def test_the_forms_part_where_tokens_have_advantages_of_their_own():
    """Token form: −A_t s. Sequence form: −s · mean of A over the sequence."""
    advantages = np.array([1.0, -2.0, 4.0, *[1.0] * (N - 3)])
    ratio = _sequence_ratios()[0]
    options = {"clip_low": 9.0, "clip_high": 9.0}
    for token_form, expected in ((True, [-ratio, 2 * ratio, -4 * ratio]), (False, [-ratio] * 3)):
        tokens = _tokens(advantages=advantages)
        _, gradient, _ = _found(losses.sequence_clipped, tokens, **options, token_form=token_form)
        assert gradient[:3] == exactly(expected)


@pytest.mark.parametrize("clip_max", [0.8, 1.0, 1.3, 5.0])
def test_cispo_golden(clip_max):
    loss, gradient, bounded = _found(losses.cispo, _tokens(), clip_max=clip_max)
    slopes = -np.minimum(RATIOS, clip_max) * ADVANTAGES
    assert loss == exactly(slopes * NOW)
    assert gradient == exactly(slopes)
    assert bounded == (clip_max < RATIOS).tolist()


@pytest.mark.parametrize("positive, negative", [(1.0, 1.05), (3.0, 0.5)])
def test_sapo_golden(positive, negative):
    advantages = np.where(np.arange(N) == 4, 0.0, ADVANTAGES)
    options = {"tau_positive": positive, "tau_negative": negative}
    loss, gradient, bounded = _found(losses.sapo, _tokens(advantages=advantages), **options)
    tau = np.where(advantages > 0, positive, negative)
    gate = 1 / (1 + np.exp(-tau * (RATIOS - 1)))
    assert loss == exactly(-advantages * gate * 4 / tau)
    assert gradient == exactly(-advantages * 4 * gate * (1 - gate) * RATIOS)
    assert not any(bounded)


def test_reinforce_golden():
    loss, _, bounded = _found(losses.reinforce, _tokens())
    assert loss == exactly(-ADVANTAGES * NOW)
    assert not any(bounded)


SURROGATES = {
    "clipped": {"clip_low": 0.2, "clip_high": 0.2},
    "sequence_clipped": {"clip_low": 3e-4, "clip_high": 4e-4, "token_form": True},
    "cispo": {"clip_max": 5.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "divergence_masked": {"divergence": "kl", "divergence_low": 0.05, "divergence_high": 0.05},
    "geometric_clipped": {"clip_low": 0.4, "clip_high": 0.4},
    "reinforce": {},
}


def _gradient(name: str, tokens: losses.Tokens) -> np.ndarray:
    _, gradient, _ = _found(find_function("losses", name), tokens, **SURROGATES[name])
    return np.array(gradient)


@pytest.mark.parametrize("name", SURROGATES)
def test_at_ratio_one_every_surrogate_has_the_gradient_of_reinforce(name):
    np.testing.assert_allclose(_gradient(name, _tokens(now=OLD)), -ADVANTAGES, rtol=1e-12)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_rollout_of_advantage_zero_has_no_gradient(name):
    """So the loop may leave it out of its passes."""
    gradient = _gradient(name, _tokens(advantages=np.repeat([1.5, -0.7, 0.0, 0.3], LENGTHS)))
    assert (gradient[4:9] == 0).all()


@pytest.mark.parametrize("name", SURROGATES)
def test_one_rollout_changes_nothing_in_another(name):
    """Rollouts in another order, or alone, have the gradients that they have together."""
    whole = _gradient(name, _tokens())
    alone = losses.Tokens(*[x[4:9] for x in _tokens()[:3]], torch.tensor([0, 5]))
    np.testing.assert_allclose(_gradient(name, alone), whole[4:9], rtol=1e-12)
    order = [*range(9, 11), *range(4, 9), *range(3), 3]
    turned = losses.Tokens(*[x[order] for x in _tokens()[:3]], torch.tensor([0, 2, 7, 10, 11]))
    np.testing.assert_allclose(_gradient(name, turned), whole[order], rtol=1e-12)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("old", [-900.0, 900.0])
def test_extreme_ratios_stay_finite_in_every_surrogate(name, old):
    tokens = losses.Tokens(
        *[x.float() for x in _tokens(np.full(N, -1.0), np.full(N, old))[:3]], torch.tensor(OFFSETS)
    )
    assert np.isfinite(_gradient(name, tokens)).all()
    if name == "clipped":
        loss, _ = losses.clipped(tokens, **SURROGATES[name])
        assert old > 0 or loss.max().item() == pytest.approx(2.0 * math.exp(20.0))


def test_aggregations_golden():
    lengths = torch.tensor(LENGTHS)
    assert losses.token_mean(lengths).tolist() == pytest.approx([1 / N] * N)
    assert losses.sequence_mean(lengths).tolist() == pytest.approx(
        [1 / (4 * n) for n in LENGTHS for _ in range(n)]
    )
    assert losses.sequence_sum(lengths).tolist() == pytest.approx([1 / 4] * N)
    assert losses.constant(lengths, 16).tolist() == pytest.approx([1 / (4 * 16)] * N)
    none = lengths[:0]
    for weigh in (losses.token_mean, losses.sequence_mean, losses.sequence_sum):
        assert weigh(none).tolist() == []


def test_every_prompt_counts_alike():
    """Groups of 3 + 5 and of 1 + 2 tokens, whose rollouts stand apart."""
    lengths, groups = torch.tensor(LENGTHS), torch.tensor([7, 4, 7, 4])
    found = surrogates.prompt_mean(lengths, groups=groups)
    expected = [1 / 16] * 3 + [1 / 6] + [1 / 16] * 5 + [1 / 6] * 2
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx(expected)
    alone = surrogates.prompt_mean(lengths, groups=torch.arange(4))
    torch.testing.assert_close(alone, losses.sequence_mean(lengths))
    together = surrogates.prompt_mean(lengths, groups=torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(together, losses.token_mean(lengths))
    cut = surrogates.prompt_mean(torch.tensor([3, 0, 0, 0]), groups=groups)
    assert cut.tolist() == pytest.approx([1 / 6] * 3)  # counted, with no token


def test_kl_golden_and_gradients():
    ref = NOW + RNG.normal(0, 0.3, N)
    d = ref - NOW
    formulas = {
        "k1": (-d, np.ones(N)),
        "k2": (d * d / 2, -d),
        "k3": (np.exp(d) - d - 1, 1 - np.exp(d)),
    }
    near = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    for name, (value, slope) in formulas.items():
        for unbiased in (False, True):
            now = torch.tensor(NOW, requires_grad=True)
            found = losses.kl(now, torch.tensor(ref), name, unbiased)
            near(found.detach(), value)
            (gradient,) = torch.autograd.grad(found.sum(), now)
            near(gradient, -d if unbiased else slope)


def test_the_unbiased_gradient_is_that_of_the_true_kl():
    """Exact expectation over a small vocabulary: E_π[gradient of the estimator] against autograd
    through Σ π log(π/ρ)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.5, -0.2, 0.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True
    )
    weights = logprobs.exp().detach()
    gradients = {
        unbiased: torch.autograd.grad(
            (weights * losses.kl(logprobs, ref, "k3", unbiased)).sum(), logits, retain_graph=True
        )[0]
        for unbiased in (True, False)
    }
    torch.testing.assert_close(gradients[True], true)
    assert (gradients[False] - true).abs().max() > 1e-2


@pytest.mark.parametrize("mode", ["truncate", "clamp", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_correction_golden(mode, level):
    prox, low, high = OLD + RNG.normal(0, 0.5, N), 0.5, 1.5
    correction = Correction(mode=mode, level=level, low=low, high=high)
    found = offpolicy.weight(
        torch.tensor(prox), torch.tensor(OLD), torch.tensor(OFFSETS), correction
    )
    for start, end in itertools.pairwise(OFFSETS):
        gaps = (prox - OLD)[start:end]
        power = {"token": gaps, "sequence": gaps.sum(), "geometric": gaps.mean()}[level]
        weights = np.exp(power) * np.ones(len(gaps))
        expected = {
            "truncate": np.minimum(weights, high),
            "clamp": np.clip(weights, low, high),
            "mask": np.where((low <= weights) & (weights <= high), weights, 0.0),
        }[mode]
        assert found[start:end].tolist() == exactly(expected)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.5, 1.0)])
def test_a_mask_leaves_a_weight_at_either_bound(low, high):
    same = torch.tensor([-1.0, -2.0])
    found = losses.correction(same, same, torch.tensor([0, 2]), mode="mask", low=low, high=high)
    assert found.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("measure", ["ratio", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("mode", ["truncate", "none"])
def test_rejection_golden(measure, level, mode):
    """Of every token or rollout by plain loops, beside the weight."""
    prox = OLD + np.random.default_rng(3).normal(0, 0.5, N)
    low, high = {
        ("ratio", "token"): (0.7, 1.4),
        ("ratio", "sum"): (0.5, 2.0),
        ("ratio", "mean"): (0.8, 1.2),
        ("ratio", "max"): (0.0, 1.6),
    }.get((measure, level), (0.0, {"token": 0.1, "sum": 0.4, "mean": 0.12, "max": 0.3}[level]))
    correction = Correction(
        mode=mode, reject=measure, reject_level=level, reject_low=low, reject_high=high
    )
    found = offpolicy.weight(
        torch.tensor(prox), torch.tensor(OLD), torch.tensor(OFFSETS), correction
    )
    expected = []
    for start, end in itertools.pairwise(OFFSETS):
        gaps = (prox - OLD)[start:end]
        distances = {"ratio": gaps, "k2": gaps**2 / 2, "k3": np.exp(gaps) - gaps - 1}[measure]
        if level != "token":
            distances = np.full(len(gaps), getattr(distances, level)())
        measured = np.exp(distances) if measure == "ratio" else distances
        weights = np.minimum(np.exp(gaps), 2.0) if mode == "truncate" else np.ones(len(gaps))
        expected += np.where((low <= measured) & (measured <= high), weights, 0.0).tolist()
    assert found.tolist() == exactly(expected)
    assert 0 < expected.count(0.0) < N


def test_single_gaps_are_summed_before_they_are_clamped():
    """+30, −50 and 0.1: clamped one by one to ±20 they would sum up to 0.1."""
    gaps = torch.tensor([30.0, -50.0, 0.1], dtype=torch.float64)
    for level, log_weight in (("sequence", -19.9), ("geometric", -19.9 / 3)):
        weights = losses.correction(gaps, torch.zeros(3), torch.tensor([0, 3]), level=level)
        assert weights.tolist() == pytest.approx([math.exp(log_weight)] * 3, rel=1e-9)


def test_the_audit_by_hand():
    """A rollout's weight is the ratio of its whole completion; the two bounds are told apart."""
    gaps = [math.log(1.5), math.log(1.25), math.log(0.9), math.log(0.75)]
    report = audit.measure(torch.tensor(gaps), torch.zeros(4), torch.tensor([0, 2, 4]), 0.2, 0.28)
    weights = [1.5 * 1.25, 0.9 * 0.75]
    share = sum(weights) ** 2 / sum(weight**2 for weight in weights) / 2
    assert report["effective_sample_size"] == pytest.approx(share, rel=1e-6)
    assert report["outside_clip"] == 0.5
    assert report["mean_gap"] == pytest.approx(sum(map(abs, gaps)) / 4)
    assert report["max_gap"] == pytest.approx(math.log(1.5))
    assert report["kl_k1"] == pytest.approx(-sum(gaps) / 4)
    assert report["kl_k3"] == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / 4)
    assert report["mean_excess"] == pytest.approx(sum(max(gap, 0) for gap in gaps) / 4)


def test_a_ratio_on_a_bound_is_within_it():
    gaps = torch.tensor([0.25, -0.25], dtype=torch.float64)
    above, below = gaps.exp().tolist()  # 1 − (1 − r) and 1 + (r − 1) are exact for these
    arguments = gaps, torch.zeros(2), torch.tensor([0, 2])
    assert audit.measure(*arguments, 1 - below, above - 1)["outside_clip"] == 0.0
    assert audit.measure(*arguments, 1 - below - 1e-9, above - 1)["outside_clip"] == 0.5
    assert audit.measure(*arguments, 1 - below, above - 1 - 1e-9)["outside_clip"] == 0.5


def test_a_gap_that_is_no_number_does_not_pass():
    batch = batch_of([2], [1.0], [1.0])
    objective = Objective(Config().resolved(), find_algorithm("grpo"))
    with pytest.raises(NumericError, match="nan nats"):
        audit.audit(objective, batch, torch.full((2,), torch.nan), [0])


def test_the_audit_counts_completions_where_the_ratio_is_theirs():
    """Geometric means √(1.5 · 1.2) = 1.34 and √(1.5 · 0.6) = 0.95: one completion is outside, and
    three of the four tokens."""
    gaps = torch.tensor([math.log(ratio) for ratio in (1.5, 1.2, 1.5, 0.6)])
    arguments = gaps, torch.zeros(4), torch.tensor([0, 2, 4]), 0.2, 0.25
    assert audit.measure(*arguments)["outside_clip"] == 0.75
    assert audit.measure(*arguments, of_sequences=True)["outside_clip"] == 0.5
