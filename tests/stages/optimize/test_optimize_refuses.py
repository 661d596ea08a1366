"""What the stage refuses before any weight changes, and what stops it when a step is not finite."""

import pytest
import torch

from quiver.schemas.errors import (
    ConfigError,
    LineageError,
    NumericError,
    ResourceError,
    SchemaError,
)
from quiver.stages.model import checkpoints
from quiver.stages.optimize.checks import biases
from tests.stages.optimize import world
from tests.stages.optimize.world import config as _config
from tests.stages.optimize.world import trained as _run
from tests.tiny import make_folder
from tests.writing import run_here


@pytest.mark.parametrize(
    ("file", "part"), [("tokenizer.json", "tokenizer"), ("chat_template.jinja", "template")]
)
def test_the_same_weights_with_another_tokenizer_or_template_are_refused(
    store, made, tmp_path, file, part
):
    folder = make_folder(tmp_path / "model")
    (folder / file).write_text((folder / file).read_text() + "\n")
    other = world.imported(store, folder, "other")
    with pytest.raises(LineageError, match=f"whose {part} differs from other/policy@0's"):
        _run(store, other, made)


def test_a_part_that_names_no_policy_is_not_trained_on(store, policy):
    rows = world.rows_of(policy, 3, 2)
    asked = world.write_prompts(store, rows)
    whole = world.write_rollouts(store, policy, rows, prompts=asked)
    part = store.open(run_here("subset", {"prompts": 2}, store, rollouts=whole.ref, into="part"))
    made = part, world.write_rewards(store, part, world.even_share, run="part")
    with pytest.raises(LineageError, match="no policy at all"):
        _run(store, policy, made)


def test_lack_of_memory_on_a_cpu_says_what_helps(store, policy, train, monkeypatch):
    monkeypatch.setattr(
        "quiver.stages.optimize.trainer.Trainer.train", lambda *_: torch.empty(1 << 60)
    )
    with pytest.raises(ResourceError, match="memory is short") as caught:
        train()
    assert "token_budget" in caught.value.next
    assert store.numbers("tiny", "policy") == [0]


def test_rollouts_of_other_weights_are_refused_unless_staleness_allows(policy, train):
    newer = train()
    with pytest.raises(LineageError) as caught:
        train(start=newer)
    old, new = (
        checkpoints.model_entry("policy", version).weights[:12] for version in (policy, newer)
    )
    assert old in caught.value.message and new in caught.value.message
    stale = train(start=newer, max_staleness=1)
    assert str(stale.ref) == "tiny/policy@2"
    assert stale.manifest.metrics["audit"]["mean_gap"] > 0.01  # said, and not held against them
    tight = train(start=newer, max_staleness=1, clip_high=0.01)
    assert tight.manifest.metrics["audit"]["judged"] is None


def test_an_ancestor_that_is_gone_matters_to_fresh_rollouts_no_more(store, policy, train):
    newer = train()
    fresh = world.make(store, newer, world.even_share)
    policy.files.folder.rename(policy.files.folder.with_name("gone"))
    assert str(_run(store, newer, fresh, _config(max_staleness=3)).ref) == "tiny/policy@2"
    with pytest.raises(LineageError, match="tiny/policy@0: there is no such version"):
        train(start=newer, max_staleness=3)


def test_a_weight_that_is_not_finite_after_the_last_step_stops_the_stage(store, policy, train):
    """Loss and gradient are; the step itself is too long for float32."""
    with pytest.raises(NumericError, match="a weight is not finite after the last step"):
        train(learning_rate=1e39)
    assert store.numbers("tiny", "policy") == [0] and not store.numbers("tiny", "updates")


@pytest.mark.parametrize(
    "sampling, judged", [({"top_p": 0.9}, "mean_excess"), ({"repetition_penalty": 1.1}, "kl_k1")]
)
def test_biased_sampling_is_refused_without_leave_and_proximal_logprobs(
    store, policy, sampling, judged
):
    rows = world.rows_of(policy, 2, 3)
    neutral = {"top_p": 1.0, "top_k": 0}
    made = world.scored(store, policy, rows, sampling={**neutral, **sampling})
    old = world.sampled_logprobs(made[0])
    prox = world.write_logprobs(store, made[0], old, "prox", policy)
    with pytest.raises(ConfigError, match=next(iter(sampling))):
        _run(store, policy, made, prox_logprobs=prox.ref)
    allowed = _config(allow_biased_sampling=True)
    with pytest.raises(ConfigError, match=f"{next(iter(sampling))}.* no proximal logprobs"):
        _run(store, policy, made, allowed)
    metrics = _run(store, policy, made, allowed, prox_logprobs=prox.ref).manifest.metrics
    named = ", ".join(f"{name} = {value}" for name, value in sampling.items())
    assert metrics["biased_sampling"] == [named]
    for report in (metrics["audit"], metrics["audit"]["prox"]):
        assert (report["judged"], report["biased_sampling"]) == (judged, named)


@pytest.mark.parametrize("gap, is_refused", [(0.3, True), (-0.3, False)])
def test_penalties_can_only_put_the_policy_below_the_engine(store, policy, gap, is_refused):
    """`gap`: how far the policy's logprobs are above those that the engine reported."""
    rows = world.rows_of(policy, 2, 3)
    old = [row["old_logprobs"] for row in rows]
    for row in rows:
        row["old_logprobs"] = [min(logprob - gap, 0.0) for logprob in row["old_logprobs"]]
    made = world.scored(store, policy, rows, sampling={"repetition_penalty": 1.1})
    prox = world.write_logprobs(store, made[0], old, "prox", policy)
    allowed = _config(allow_biased_sampling=True, audit={"max_mean_gap": 0.1})
    options = {"prox_logprobs": prox.ref}
    if is_refused:
        with pytest.raises(NumericError, match=r"are above the engine's by 0\.3"):
            _run(store, policy, made, allowed, **options)
    else:
        audit = _run(store, policy, made, allowed, **options).manifest.metrics["audit"]
        assert audit["kl_k1"] == pytest.approx(0.3, abs=0.05)


def test_every_setting_that_changes_the_distribution_is_a_bias():
    biased = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "min_tokens": 3, "presence_penalty": 1}
    biased |= {"frequency_penalty": 1, "repetition_penalty": 1.1}
    assert biases(biased) == [f"{name} = {value}" for name, value in biased.items()]
    neutral = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": None, "seed": 5}
    assert biases(neutral) == []


@pytest.mark.parametrize(
    "change, word", [(("completion_ids", 999), "ids below"), (("prompt_ids", None), "no ids")]
)
def test_rows_that_the_model_cannot_read(store, policy, change, word):
    rows = world.rows_of(policy, 2, 2)
    name, value = change
    rows[0][name] = [] if value is None else [*rows[0][name][:-1], value]
    made = world.scored(store, policy, rows, lambda row: float(row["sample_index"]))
    with pytest.raises(SchemaError, match=word):
        _run(store, policy, made)


def test_the_kl_is_of_the_references_logprobs(store, made, train):
    """Half a nat lower on every token: e^−0.5 − 0.5."""
    lower = world.sampled_logprobs(made[0], less=0.5)
    reference = world.write_logprobs(store, made[0], lower)
    done = train(kl_coef=0.1, ref_logprobs=reference.ref)
    (row,) = world.updates(store, done)
    assert row["kl_loss"] == pytest.approx(2.718281828**-0.5 - 0.5, abs=1e-3)
    assert row["loss"] == pytest.approx(row["policy_loss"] + 0.1 * row["kl_loss"])


def test_answers_of_a_script_are_refused_unless_nothing_is_audited(store, policy):
    """The audit could only find that their logprobs are not the policy's, and not why."""
    made = world.by_engine(store, policy, engine="scripted")
    with pytest.raises(ConfigError, match=f"{made[0].ref}.*logprobs are made up"):
        _run(store, policy, made)
    assert _run(store, policy, made, _config(audit={"enabled": False})).ref.version == 1


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_audit_stops_before_anything_changes(store, policy, minibatches):
    """As if the engine had reported logprobs of another temperature."""
    rows = world.rows_of(policy, 4, 4)
    exact = [old for row in rows for old in row["old_logprobs"]]
    for row in rows:
        row["old_logprobs"] = [old * 0.7 for old in row["old_logprobs"]]
    made = world.scored(store, policy, rows)
    with pytest.raises(NumericError, match="max_mean_gap") as caught:
        _run(store, policy, made, _config(minibatches=minibatches))
    assert caught.value.exit_code == 8
    assert store.numbers("tiny", "policy") == [0]
    assert not store.numbers("tiny", "updates") and not store.numbers("tiny", "advantages")
    config = _config(minibatches=minibatches, audit={"max_mean_gap": 9})
    gap = _run(store, policy, made, config).manifest.metrics["audit"]["mean_gap"]
    assert gap == pytest.approx(0.3 * -sum(exact) / len(exact), rel=0.2)


ALGORITHM = """
from quiver.stages.optimize.algorithms import Algorithm
from quiver.stages.optimize.losses import clipped
seen = []
def surrogate(tokens, *, bad=(), **options):
    seen.append(1)
    loss, taken = clipped(tokens, **options)
    return loss * (float("nan") if len(seen) - 1 in bad else 1.0), taken
MINE = Algorithm("mine", "group_normalized", surrogate, "token_mean", {"clip_low": 0.2, "clip_high": 0.2})
"""


def test_a_step_that_is_not_finite_is_left_out(store, train, tmp_path):
    """Steps 1 and 2 are; in a training of one step that step would stop the stage."""
    (tmp_path / "nan_algo.py").write_text(ALGORITHM)
    mine = {"algorithm": f"{tmp_path}/nan_algo.py:MINE"}
    done = train(**mine, epochs=4, options={"bad": [1, 2]})
    rows = world.updates(store, done)
    assert [row["applied"] for row in rows] == [True, False, False, True]
    assert rows[1]["loss"] is None and rows[1]["grad_norm"] is None
    assert [row["step"] for row in rows] == [0, 1, 1, 1]
    assert (done.manifest.metrics["skipped_steps"], done.manifest.metrics["step"]) == (2, 2)
    assert all(weight.isfinite().all() for weight in world.weights(done).values())
    with pytest.raises(NumericError, match="none of 1 optimizer steps"):
        train(**mine, options={"bad": [*range(9)]})


FEW = """
import torch
from quiver.stages.optimize.algorithms import Algorithm
def none(rewards, groups):
    return rewards * float("nan")
def of_tokens(rewards, offsets, groups):
    return rewards
NONE = Algorithm("none", none, "reinforce", "token_mean")
CENTERED = Algorithm("centered", "group_centered", "reinforce", "token_mean")
TOKENS = Algorithm("tokens", of_tokens, "reinforce", "token_mean", advantage_of="tokens")
"""


@pytest.mark.parametrize(
    ("algorithm", "each", "says", "helps"),
    [
        (
            "pass_at_k",
            4,
            "pass_at_k with k = 4 needs 5 scored rollouts a prompt, found 4",
            "_prompt >= 5, or lower optimize.pass_k",
        ),
        (
            "grpo",
            1,
            "group_normalized needs 2 scored rollouts a prompt, found 1",
            "_prompt >= 2, or",
        ),
        ("CENTERED", 1, "group_centered needs 2 scored rollouts a prompt, found 1", "_prompt >= 2"),
        ("TOKENS", 1, "its advantage needs 2 scored rollouts a prompt, found 1", "_prompt >= 2"),
        ("NONE", 4, "its advantage gave no number for 16 scored rollouts", "correct the function"),
    ],
)
def test_when_all_is_scored_the_advantage_says_what_it_lacks(
    store, policy, tmp_path, algorithm, each, says, helps
):
    """Every rollout was cut by length, which is not why."""
    if algorithm.isupper():
        (tmp_path / "few_algo.py").write_text(FEW)
        algorithm = f"{tmp_path}/few_algo.py:{algorithm}"
    rows = [{**row, "finish_reason": "length"} for row in world.rows_of(policy, 4, each)]
    made = world.scored(store, policy, rows)
    with pytest.raises(ConfigError) as caught:
        _run(store, policy, made, _config(algorithm=algorithm))
    assert says in caught.value.message and helps in caught.value.next
    assert caught.value.object == f"optimize.algorithm {algorithm}"


def test_one_rollout_in_all_has_nothing_to_be_compared_with(store, policy):
    made = world.scored(store, policy, world.rows_of(policy, 4, 4)[:1])
    with pytest.raises(ConfigError, match="needs 2 scored rollouts in all, found 1") as caught:
        _run(store, policy, made, _config(algorithm="reinforce_pp"))
    assert "train on more rollouts" in caught.value.next
    unscored = world.write_rewards(store, made[0], lambda row: None)
    with pytest.raises(NumericError, match="gae needs 1 scored rollout a prompt, found 0"):
        _run(store, policy, (made[0], unscored), _config(algorithm="ppo"))


@pytest.mark.parametrize(
    ("ends", "helps"), [(["length", "stop"], "quiver show"), (["stop", "length"], "max_tokens")]
)
def test_what_helps_is_told_by_the_rollouts_that_are_not_scored(store, policy, ends, helps):
    """`ends`: of those that are scored, one a prompt, and of the others."""
    rows = world.rows_of(policy, 4, 4)
    rows = [{**row, "finish_reason": ends[row["sample_index"] > 0]} for row in rows]
    made = world.scored(store, policy, rows, lambda row: None if row["sample_index"] else 1.0)
    with pytest.raises(NumericError) as caught:
        _run(store, policy, made)
    assert "4 of 16 rollouts are scored" in caught.value.message
    assert "group_normalized needs 2 scored rollouts a prompt, found 1" in caught.value.message
    assert f"the others ended: 12 by {ends[1]}" in caught.value.message
    assert helps in caught.value.next


@pytest.mark.parametrize("algorithm", ["dr_grpo", "ppo"])
def test_rewards_whose_square_is_infinite_are_not_a_matter_of_the_learning_rate(
    store, policy, algorithm
):
    def score(row):
        return (-1.0) ** row["sample_index"] * 2e38

    made = world.scored(store, policy, world.rows_of(policy, 4, 4), score)
    with pytest.raises(NumericError, match=r"the largest reward is 2e\+38, ") as caught:
        _run(store, policy, made, _config(algorithm=algorithm))
    assert caught.value.next == "make the rewards smaller"
