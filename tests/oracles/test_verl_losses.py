"""Losses, KL and corrections against verl's own functions, called on the padded batch; and where
the two mean different things."""

import math

import pytest
import torch

from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize import audit, losses, offpolicy
from quiver.stages.optimize.algorithms import ALGORITHMS
from tests.oracles.peers import (
    ADVANTAGES,
    DOCUMENT,
    JUNK,
    LENGTHS,
    MASK,
    MAX_TOKENS,
    NOW,
    OFFSETS,
    OLD,
    REF,
    B,
    N,
    T,
    agree,
    differ,
    flat,
    gradient_of,
    noise,
    ours,
    padded,
    peer,
    per_token,
)

pytestmark = pytest.mark.oracle
core, helper = peer("verl.trainer.ppo.core_algos"), peer("verl.trainer.ppo.rollout_corr_helper")

AGGREGATION = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
NAMES = {
    "clipped": "vanilla",
    "sequence_clipped": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "geometric_clipped": "geo_mean",
}
NO_DUAL_CLIP = 1e9


def settings(options: dict) -> dict:
    """Our surrogate's options as verl's config names them."""
    if "clip_max" in options:
        return {"clip_ratio_low": 1.0, "clip_ratio_high": options["clip_max"] - 1}
    if "tau_positive" in options:
        return {"tau_pos": options["tau_positive"], "tau_neg": options["tau_negative"]}
    if "divergence" in options:
        return {
            "clip_ratio_low": options["divergence_low"],
            "clip_ratio_high": options["divergence_high"],
            "clip_ratio_c": options.get("ratio_max", NO_DUAL_CLIP),
        }
    dual = options.get("dual_clip") or NO_DUAL_CLIP
    return {
        "clip_ratio_low": options["clip_low"],
        "clip_ratio_high": options["clip_high"],
        "clip_ratio_c": dual,
    }


def theirs(name: str, aggregation: str, *, weight=None, old=OLD, **config):
    """verl's policy loss `name` as a function of logprobs [N]."""
    from verl.workers.config import ActorConfig

    counts = {"global_batch_info": {"loss_scale_factor": MAX_TOKENS}}
    made = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **counts, **config
    )
    weight = None if weight is None else padded(weight)
    advantages = per_token(ADVANTAGES)

    def loss(now):
        mode = AGGREGATION[aggregation]
        return core.get_policy_loss_fn(name)(
            padded(old), padded(now), advantages, MASK, mode, made, weight
        )[0]

    return loss


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "row",
    [row for row in ALGORITHMS.values() if row.surrogate in NAMES],
    ids=lambda row: row.name,
)
def test_every_algorithms_loss_and_gradient(row, weighted):
    """gspo under a weight a token: verl has its token form only, in which each token keeps its own
    weight."""
    options = {key: value for key, value in row.defaults.items() if key != "drop_zero_variance"}
    if weighted and row.surrogate == "geometric_clipped":
        pytest.skip("verl weighs gmpo by the geometric mean of the weights, not token by token")
    weight, form = (
        (
            noise(6, 0.3) + 1,
            {"token_form": True} if row.surrogate == "sequence_clipped" else {},
        )
        if weighted
        else (None, {})
    )
    agree(
        ours(
            row.surrogate,
            row.aggregation,
            weight=1.0 if weight is None else weight,
            **options,
            **form,
        ),
        theirs(NAMES[row.surrogate], row.aggregation, weight=weight, **settings(options)),
    )


@pytest.mark.parametrize("aggregation", AGGREGATION)
def test_every_aggregation(aggregation):
    options = {"clip_low": 0.2, "clip_high": 0.28}
    agree(
        ours("clipped", aggregation, **options), theirs("vanilla", aggregation, **settings(options))
    )


@pytest.mark.parametrize("dual_clip", [1.1, 1.5, 3.0])
def test_dual_clip(dual_clip):
    now = OLD + noise(7, 2.0)
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": dual_clip}
    agree(
        ours("clipped", "token_mean", **options),
        theirs("vanilla", "token_mean", **settings(options)),
        now,
    )


@pytest.mark.parametrize("name", ["dppo", "dppo_kl"])
@pytest.mark.parametrize("changed", [{}, {"ratio_max": 1.2}, {"divergence_high": 0.01}])
def test_the_gradient_of_dppo(name, changed):
    """Its value is another: verl's is of logprobs, ours of ratios."""
    row = ALGORITHMS[name]
    options = {**row.defaults, **changed}
    other = "dppo_tv" if name == "dppo" else name
    now = (OLD + noise(2, 0.4)).clamp(max=-0.01)
    mine, theirs_ = (
        gradient_of(loss, now)[1]
        for loss in (
            ours(row.surrogate, row.aggregation, **options),
            theirs(other, row.aggregation, **settings(options)),
        )
    )
    torch.testing.assert_close(mine, theirs_, rtol=1e-6, atol=1e-9)
    assert (mine == 0).any() and (mine != 0).sum() > N / 2


@pytest.mark.parametrize("low, high", [(0.02, 0.03), (0.2, 0.2)])
def test_the_token_form_of_gspo(low, high):
    options = {"clip_low": low, "clip_high": high}
    expected = theirs("gspo", "sequence_mean", **settings(options))
    for token_form in (True, False):  # one advantage and one weight a rollout: the forms are one
        agree(ours("sequence_clipped", "sequence_mean", token_form=token_form, **options), expected)


@pytest.mark.parametrize("positive, negative", [(2.0, 0.5), (1.0, 3.0)])
def test_taus_of_sapo(positive, negative):
    options = {"tau_positive": positive, "tau_negative": negative}
    agree(
        ours("sapo", "sequence_mean", **options),
        theirs("sapo", "sequence_mean", **settings(options)),
    )


def test_defaults_of_sapo():
    agree(
        ours("sapo", "sequence_mean", **ALGORITHMS["sapo"].defaults),
        theirs("sapo", "sequence_mean"),
    )


def test_a_tokens_log_ratio_is_clamped_at_20():
    options, now = {"clip_low": 0.2, "clip_high": 0.2}, OLD + 30.0 * (torch.arange(N) % 3 - 1)
    expected = theirs("vanilla", "token_mean", **settings(options))
    agree(ours("clipped", "token_mean", **options), expected, now)
    assert expected(now).item() > 1e6


@pytest.mark.parametrize("told", [True, False])
def test_two_micro_batches_are_the_whole_where_the_caller_counts(told):
    """verl's callers give the step's tokens; without them each micro-batch has a mean of its
    own."""
    costs, counts = padded(noise(13)), {"batch_num_tokens": N} if told else {}
    halves = [
        core.agg_loss(costs[rows], MASK[rows], "token-mean", **counts)
        for rows in (slice(0, 3), slice(3, B))
    ]
    whole = (losses.token_mean(LENGTHS) * noise(13)).sum()
    assert (sum(halves) == pytest.approx(whole.item(), rel=1e-6)) == told


def test_reinforce():
    from verl.workers.config import ActorConfig

    made = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    agree(
        ours("reinforce", "token_mean"),
        lambda now: core.compute_policy_loss_reinforce(
            padded(OLD), padded(now), per_token(ADVANTAGES), MASK, "token-mean", made
        )[0],
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl(estimator, unbiased):
    """verl writes the form with the unbiased gradient k1+, k3+."""
    name = estimator + "+" * unbiased
    agree(
        lambda now: losses.kl(now, REF, estimator, unbiased).mean(),
        lambda now: core.agg_loss(
            core.kl_penalty(padded(now), padded(REF), name), MASK, "token-mean"
        ),
    )


@pytest.mark.parametrize("clip", [0.1, 0.5])
def test_value_loss(clip):
    old, returns = OLD + noise(8, 0.5), noise(9)
    agree(
        lambda values: losses.value_loss(values, old, returns, clip).mean(),
        lambda values: core.compute_value_loss(
            padded(values), padded(returns), padded(old), MASK, clip
        )[0],
    )


# -- off-policy correction: verl's threshold is our high, "low_high" its mask


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode, bounds", [("truncate", 1.3), ("mask", "0.6_1.3")])
def test_importance_weights(level, mode, bounds):
    ours = losses.correction(REF, OLD, OFFSETS, mode=mode, level=level, low=0.6, high=1.3)
    theirs, _ = helper.compute_rollout_correction_weights(
        padded(REF) - padded(OLD), MASK, level, bounds
    )
    torch.testing.assert_close(ours, flat(theirs), rtol=1e-6, atol=1e-9)
    assert (ours == (1.3 if mode == "truncate" else 0.0)).any() and ours.unique().numel() > 2


@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("measure", ["ratio", "k2", "k3"])
def test_rejection(measure, level):
    """Its k1 is old − prox, so its bounds are the inverse of ours; it has no maximum of it."""
    if (measure, level) == ("ratio", "max"):
        pytest.skip("verl has no seq_max_k1")
    low, high = 0.0, {"token": 0.05, "sum": 0.2, "mean": 0.04, "max": 0.1}[level]
    bounds, name = f"{high}", measure
    if measure == "ratio":
        low, high, name = (0.5, 1.5, "k1") if level == "sum" else (0.9, 1.05, "k1")
        bounds = f"{1 / high}_{1 / low}"
    ours = offpolicy.kept(REF, OLD, OFFSETS, measure=measure, level=level, low=low, high=high)
    option = f"token_{name}" if level == "token" else f"seq_{level}_{name}"
    kept, _ = helper.compute_rollout_rejection_mask(padded(REF) - padded(OLD), MASK, option, bounds)
    assert torch.equal(ours.double(), flat(kept))
    assert 0 < flat(kept).sum() < N


def test_the_audits_estimates():
    report = audit.measure(REF, OLD, OFFSETS, 0.2, 0.2)
    theirs = helper.compute_offpolicy_metrics(padded(REF), padded(OLD), MASK)
    assert report["kl_k1"] == pytest.approx(theirs["kl"], rel=1e-6)
    assert report["kl_k3"] == pytest.approx(theirs["k3_kl"], rel=1e-6)
    weights = Ragged(REF - OLD, OFFSETS).segment_sum().exp()  # chi2 = E[w²] − 1
    assert float((weights**2).mean() - 1) == pytest.approx(theirs["chi2_seq"], rel=1e-6)
    assert report["effective_sample_size"] == pytest.approx(
        float(weights.mean() ** 2) / (theirs["chi2_seq"] + 1), rel=1e-6
    )


# -- where the definitions differ: deployments/docs/who-does-what.md


def test_verl_clips_twice_by_default_and_here_dual_clip_is_off():
    now = OLD + noise(7, 2.0)
    default, options = theirs("vanilla", "token_mean"), {"clip_low": 0.2, "clip_high": 0.2}
    differ(ours("clipped", "token_mean", **options), default, now)
    agree(ours("clipped", "token_mean", dual_clip=3.0, **options), default, now)


def test_verls_cispo_has_a_lower_bound_and_measures_from_1():
    """0.2 lets weights between 0.8 and 1.2 through; ours is the upper bound itself, and there is no
    lower one."""
    default = theirs("cispo", "token_mean")
    differ(ours("cispo", "token_mean", clip_max=5.0), default)
    differ(ours("cispo", "token_mean", clip_max=1.2), default)
    above = OLD + noise(2, 0.4).abs()  # no ratio below 1: only the upper bound is met
    agree(ours("cispo", "token_mean", clip_max=1.2), default, above)


def test_verl_bounds_gspos_ratio_at_log_10_from_above_only():
    """A rollout whose mean of log r is 15: exp(10) there, exp(15) here, where nothing else clips (A
    < 0)."""
    row = int(ADVANTAGES.argmin())
    now = OLD + 15.0 * (torch.arange(B) == row).repeat_interleave(LENGTHS)
    loss = {
        "ours": ours("sequence_clipped", "sequence_mean", clip_low=0.2, clip_high=0.2)(now).item()
    }
    loss["theirs"] = theirs("gspo", "sequence_mean", clip_ratio_low=0.2, clip_ratio_high=0.2)(
        now
    ).item()
    rest = -float(ADVANTAGES.sum() - ADVANTAGES[row]) / B  # all others have ratio 1
    for name, power in (("ours", 15.0), ("theirs", 10.0)):
        assert loss[name] == pytest.approx(
            rest - float(ADVANTAGES[row]) * math.exp(power) / B, rel=1e-6
        )


def test_verl_bounds_k3_at_10():
    far = NOW + 4.0  # d = 4: e^4 − 4 − 1 = 49.6
    assert losses.kl(NOW, far, "k3")[0].item() == pytest.approx(math.exp(4) - 5)
    assert core.kl_penalty(NOW, far, "k3")[0].item() == 10.0


def test_only_verl_bounds_nothing_in_k1():
    assert core.kl_penalty(NOW, NOW - 30.0, "k1")[0].item() == pytest.approx(30.0)
    assert losses.kl(NOW, NOW - 30.0, "k1")[0].item() == pytest.approx(20.0)


def test_the_table_names_this_version():
    assert f"verl {peer('verl').__version__}" in DOCUMENT


def test_padding_holds_what_a_peer_must_not_see():
    assert padded(OLD)[1, 1:].tolist() == [JUNK] * (T - 1) and torch.equal(flat(padded(OLD)), OLD)
