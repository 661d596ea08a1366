"""The ratio's denominator: where the engine's noise would be clipped, what proximal logprobs are
needed for, and how truncated sampling is audited."""

import pytest
import torch

from quiver.flows.look import stage as report
from quiver.flows.look.gather import gather
from quiver.schemas.errors import NumericError
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.model.loading import load_model
from quiver.stages.optimize.checks import quantization
from tests.stages.optimize import world
from tests.stages.optimize.world import config as _config
from tests.stages.optimize.world import trained as _run
from tests.tiny import make_policy
from tests.writing import run_here


def _noisy(store, policy, size: float, signs: tuple[int, int] = (-1, 1)):
    """Rollouts and rewards whose old logprobs are off by ± `size` in turn, and proximal ones that
    are not, as the stage logprobs makes them."""
    rows = world.rows_of(policy, 4, 4)
    for number, row in enumerate(rows):
        row["old_logprobs"] = [old + signs[number % 2] * size for old in row["old_logprobs"]]
    made = world.scored(store, policy, rows)
    return made, _scored(store, policy, made[0])


def _scored(store, policy, rollouts):
    refs = {"rollouts": rollouts.ref, "policy": policy.ref}
    return run_here("logprobs", LogprobsConfig(role="prox"), store, **refs)


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
    (step,) = world.updates(store, done)
    share = done.manifest.metrics["first_clip_fraction"]
    assert share == step["clip_fraction"] > 0.2
    assert "first step clipped" in caplog.text
    sentence = f"{done.ref}: the first step clipped {share:.2g} of its tokens"
    warnings = [line for line in report.warnings(gather(store, "tiny")) if sentence in line]
    assert len(warnings) == 1


def test_a_quantized_engine_is_named_corrected_and_held_to_the_same_bound(store, policy, caplog):
    rows = world.rows_of(policy, 4, 4)
    options = {"engine_args": {"quantization": "fp8", "kv_cache_dtype": "auto"}}

    def audited(gap: float, *, has_prox: bool = True) -> dict:
        """Of an engine whose logprobs are off by ± `gap` in turn."""
        rounded = [
            {**row, "old_logprobs": [old - (-1) ** n * gap for old in row["old_logprobs"]]}
            for n, row in enumerate(rows)
        ]
        made = world.scored(store, policy, rounded, options=options)
        refs = {"prox_logprobs": _scored(store, policy, made[0])} if has_prox else {}
        return _run(store, policy, made, **refs).manifest.metrics["audit"]

    audit = audited(0.04)
    for gaps in (audit, audit["prox"]):
        assert gaps["mean_gap"] == pytest.approx(0.04, rel=0.01)
        assert (gaps["judged"], gaps["quantization"]) == ("mean_gap", "quantization = fp8")
    assert "set logprobs.prox = true" not in caplog.text
    audited(0.04, has_prox=False)
    assert "with quantization = fp8, and without proximal logprobs" in caplog.text
    with pytest.raises(NumericError, match=r"rounding \(quantization = fp8\)") as caught:
        audited(0.2)
    assert "sample once without it" in caught.value.next


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv_cache_dtype": "fp8_e5m2", "quantization": None}, "kv_cache_dtype = fp8_e5m2"),
        ({"quantization": "awq"}, "quantization = awq"),
        ({"kv_cache_dtype": "bfloat16", "max_loras": 1}, ""),
    ],
)
def test_what_rounds_an_engine_further_is_its_quantization(arguments, named):
    assert quantization({"engine_args": arguments}) == named
    assert quantization({"batch_size": 4}) == ""


def test_truncated_sampling_is_trained_on_against_the_trainers_logprobs(store, policy):
    """Sampled from the forty likeliest tokens, with the renormalised logprobs that such an engine
    reports. Logprobs of other weights are above what the trainer says at some tokens, and below at
    others: those above are counted, and as many as are allowed pass."""
    rows = world.rows_of(policy, 4, 4, top_k=40)

    def audited(shift=lambda row: row["old_logprobs"], **audit) -> dict:
        shifted = [{**row, "old_logprobs": shift(row)} for row in rows]
        made = world.scored(store, policy, shifted, sampling={"top_k": 40})
        config = _config(allow_biased_sampling=True, audit=audit)
        refs = {"prox_logprobs": _scored(store, policy, made[0])}
        return _run(store, policy, made, config, **refs).manifest.metrics

    metrics = audited()
    for audit in (metrics["audit"], metrics["audit"]["prox"]):
        assert audit["mean_gap"] > 0.5
        assert audit["mean_excess"] < 1e-5
        assert (audit["judged"], audit["biased_sampling"]) == ("mean_excess", "top_k = 40")
    other = load_model(make_policy(store, "other", seed=1), dtype=torch.float32)
    with pytest.raises(NumericError, match=r"Biased sampling \(top_k = 40\)"):
        audited(lambda row: world.own_logprobs(other, row).tolist())

    def lower(row: dict) -> list[float]:
        return [old - 1.0 for old in row["old_logprobs"]]

    excess = audited(lower, max_mean_gap=1.0)["audit"]["mean_excess"]
    assert 0 < excess < 1 and audited(lower, max_mean_gap=excess)
    with pytest.raises(NumericError, match="above the engine's"):
        audited(lower, max_mean_gap=excess * 0.999)
