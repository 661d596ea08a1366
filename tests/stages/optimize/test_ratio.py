"""The ratio's denominator: where the engine's noise would be clipped, what proximal logprobs are
needed for, and how truncated sampling is audited."""

import pytest
import torch

from quiver.schemas.errors import ConfigError, NumericError
from quiver.stages.common.models.loading import load_model
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.stage import Config
from quiver.stages.report import stage as report
from quiver.stages.report.gather import gather
from tests.stages.optimize import world
from tests.stages.optimize.world import config as _config
from tests.stages.optimize.world import trained as _run
from tests.tiny import make_policy
from tests.writing import run_here

TIGHT = """
from quiver.stages.optimize.algorithms import Algorithm
from quiver.stages.optimize.losses import clipped

MINE = Algorithm("mine", "group_normalized", clipped, "token_mean", {"clip_low": 0.01, "clip_high": 1})

def each(lengths, max_completion_tokens):
    return (1 / lengths.double()).repeat_interleave(lengths)

OWN_WEIGHTS = Algorithm("own", "group_normalized", clipped, each, {"clip_low": 0.2, "clip_high": 0.2})
"""


def _noisy(store, policy, size: float, signs: tuple[int, int] = (-1, 1)):
    """Rollouts and rewards whose old logprobs are off by ± `size` in turn, and proximal ones that are not,
    as the stage logprobs makes them."""
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(4), 4)
    for number, row in enumerate(rows):
        row["old_logprobs"] = [value + signs[number % 2] * size for value in row["old_logprobs"]]
    rollouts = world.write_rollouts(store, policy, rows)
    rewards = world.write_rewards(store, rollouts, world.even_share)
    return (rollouts, rewards), _scored(store, policy, rollouts)


def _scored(store, policy, rollouts):
    refs = {"rollouts": rollouts.ref, "policy": policy.ref}
    return run_here("logprobs", LogprobsConfig(role="prox"), store, **refs)


@pytest.mark.parametrize(
    "values, needed",
    [
        ({}, False),
        ({"algorithm": "gspo"}, True),
        ({"algorithm": "luspo"}, True),
        ({"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.2}, False),
        ({"clip_high": 0.01}, True),
        ({"algorithm": "cispo"}, False),
        ({"algorithm": "dppo_kl", "divergence_low": 0.01}, False),
        ({"prox_of": "start"}, True),
    ],
)
def test_tight_bounds_and_decoupled_ppo_need_proximal_logprobs(values, needed):
    assert Config(**values).needs_prox is needed
    assert Config(**values).resolved().needs_prox is needed


def test_an_own_algorithm_with_tight_bounds_needs_them_once_it_is_resolved(tmp_path):
    (tmp_path / "mine.py").write_text(TIGHT)
    assert Config(algorithm=f"{tmp_path}/mine.py:MINE").resolved().needs_prox


def test_an_own_aggregation_is_given_no_completion_without_tokens(tmp_path):
    (tmp_path / "mine.py").write_text(TIGHT)
    config = Config(
        algorithm=f"{tmp_path}/mine.py:OWN_WEIGHTS", on_length="mask", mask_counted=True
    )
    with pytest.raises(ConfigError, match="mask_counted"):
        config.resolved()
    assert config.model_copy(update={"aggregation": "sequence_mean"}).resolved().mask_counted


def test_bounds_within_the_engines_noise_are_refused_without_proximal_logprobs(
    store, policy, caplog
):
    made, prox = _noisy(store, policy, 1e-3)
    with pytest.raises(NumericError, match=r"tenth of the clip bound 0\.0003") as caught:
        _run(store, policy, made, _config(algorithm="gspo"))
    assert "proximal logprobs" in caught.value.next and store.numbers("tiny", "policy") == [0]
    done = _run(store, policy, made, _config(algorithm="gspo"), prox_logprobs=prox)
    metrics = done.manifest.metrics
    assert metrics["audit"]["outside_clip"] == 1.0  # all sequences, by the engine's logprobs
    assert metrics["audit"]["prox"]["mean_gap"] == pytest.approx(1e-3, rel=0.02)
    assert metrics["first_clip_fraction"] == 0.0
    assert "first step clipped" not in caplog.text
    assert _run(store, policy, made).manifest.metrics["audit"]["outside_clip"] == 0.0  # grpo's


@pytest.mark.parametrize("signs, outside", [((1, 1), 1.0), ((-1, -1), 0.0)])
def test_the_audit_of_gmpo_counts_between_its_own_bounds(store, policy, signs, outside):
    """They are of log r: [e^−0.1, e^1], and r is e^−0.5 or e^0.5."""
    made, prox = _noisy(store, policy, 0.5, signs)
    config = _config(algorithm="gmpo", clip_low=0.1, clip_high=1.0, audit={"max_mean_gap": 1.0})
    done = _run(store, policy, made, config, prox_logprobs=prox)
    assert done.manifest.metrics["audit"]["outside_clip"] == outside


def test_a_first_step_that_clips_is_told(store, policy, caplog):
    made, _ = _noisy(store, policy, 1e-3)
    done = _run(store, policy, made, _config(algorithm="gspo", audit={"enabled": False}))
    (step,) = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    share = done.manifest.metrics["first_clip_fraction"]
    assert share == step["clip_fraction"] > 0.2
    assert "first step clipped" in caplog.text
    told = f"{done.ref}: the first step clipped {share:.2g} of its tokens"
    assert [told in sentence for sentence in report.warnings(gather(store, "tiny"))].count(
        True
    ) == 1


@pytest.fixture
def truncated(store, policy):
    """Rollouts of the forty likeliest tokens, with the renormalised logprobs that a renormalising
    engine reports, and their rewards."""
    model = load_model(policy, dtype=torch.float32)
    rows = world.sample(model, world.prompts(4), 4, top_k=40)
    rollouts = world.write_rollouts(store, policy, rows, sampling={"top_k": 40})
    return rollouts, world.write_rewards(store, rollouts, world.even_share)


def test_truncated_sampling_is_trained_on_against_the_trainers_logprobs(store, policy, truncated):
    prox = _scored(store, policy, truncated[0])
    allowed = _config(allow_biased_sampling=True)
    done = _run(store, policy, truncated, allowed, prox_logprobs=prox)
    metrics = done.manifest.metrics
    for audit in (metrics["audit"], metrics["audit"]["prox"]):
        assert audit["mean_gap"] > 0.5
        assert audit["mean_excess"] < 1e-5
        assert (audit["judged"], audit["biased_sampling"]) == ("mean_excess", "top_k = 40")
    (step,) = store.open(metrics["updates"]).table().to_pylist()
    assert step["clip_fraction"] == 0.0


def test_the_audit_of_truncated_sampling_still_sees_wrong_logprobs(store, policy, truncated):
    """Logprobs of other weights are above what the trainer says at some tokens, and below at
    others: those above are counted."""
    other = make_policy(store, "other", seed=1)
    rows = truncated[0].table().to_pylist()
    foreign = store.open(_scored_as(store, other, truncated[0])).table().to_pylist()
    for row, scored in zip(rows, foreign, strict=True):
        row["old_logprobs"] = scored["logprobs"]
    rollouts = world.write_rollouts(store, policy, rows, sampling={"top_k": 40})
    made = rollouts, world.write_rewards(store, rollouts, world.even_share)
    allowed = _config(allow_biased_sampling=True)
    with pytest.raises(NumericError, match=r"biased \(top_k = 40\)"):
        _run(store, policy, made, allowed, prox_logprobs=_scored(store, policy, rollouts))


def test_a_gap_as_large_as_is_allowed_passes(store, policy, truncated):
    rows = truncated[0].table().to_pylist()
    for row in rows:
        row["old_logprobs"] = [logprob - 1.0 for logprob in row["old_logprobs"]]
    rollouts = world.write_rollouts(store, policy, rows, sampling={"top_k": 40})
    made = rollouts, world.write_rewards(store, rollouts, world.even_share)
    prox = _scored(store, policy, rollouts)

    def audit(max_mean_gap: float) -> dict:
        allowed = _config(allow_biased_sampling=True, audit={"max_mean_gap": max_mean_gap})
        return _run(store, policy, made, allowed, prox_logprobs=prox).manifest.metrics["audit"]

    excess = audit(1.0)["mean_excess"]
    assert 0 < excess < 1 and audit(excess)["mean_excess"] == excess
    with pytest.raises(NumericError, match="above the engine's"):
        audit(excess * 0.999)


def _scored_as(store, policy, rollouts):
    """Logprobs of another policy than the one that sampled."""
    config = LogprobsConfig(role="prox", prox_of="start")
    return run_here("logprobs", config, store, rollouts=rollouts.ref, policy=policy.ref)
