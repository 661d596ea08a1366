"""The stage on a tiny model: what it writes, and which rollouts it learns from."""

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from transformers import AutoModelForCausalLM

from quiver.flows.look.gather import gather
from quiver.flows.look.troubles import learned_nothing
from quiver.flows.verification import verify
from quiver.schemas.errors import LineageError, NumericError, ResourceError, SchemaError
from quiver.stages.core.store.writer import Writer
from quiver.stages.model import checkpoints
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.loading import load_model
from quiver.stages.optimize.inputs import RolloutSet
from tests.stages.optimize import world
from tests.stages.optimize.world import config as _config
from tests.stages.optimize.world import trained as _run
from tests.tiny import make_policy

# -- what it writes


def test_it_writes_a_policy_advantages_and_updates(store, policy, made, train):
    done = train(algorithm="dapo", minibatches=2, epochs=2)
    assert str(done.ref) == "tiny/policy@1"
    assert {entry.role for entry in done.manifest.inputs} == {"policy", "rollouts", "rewards"}
    metrics = done.manifest.metrics
    updates = world.updates(store, done)
    places = [(row["step"], row["epoch"], row["minibatch"]) for row in updates]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert all(row["applied"] for row in updates)
    assert updates[0]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert updates[0]["clip_fraction"] == 0.0 < updates[0]["entropy"]
    assert metrics["step"] == metrics["steps"] == 4
    assert metrics["tokens"] == sum(row["tokens"] for row in updates)
    assert metrics["precision"] == "fp32" and metrics["max_completion_tokens"] == 8
    assert metrics["audit"]["mean_gap"] < 1e-5
    assert metrics["audit"]["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    chosen = done.manifest.config
    assert (chosen["clip_high"], chosen["aggregation"]) == (0.28, "token_mean")
    assert {"load", "steps", "save", "total"} <= done.manifest.seconds.keys()
    advantages = store.open(metrics["advantages"])
    assert advantages.manifest.status == {"kept": 16}
    assert advantages.table()["rollout_id"].to_pylist() == made[0].table()["rollout_id"].to_pylist()
    assert verify(store)[1] == []


@pytest.mark.parametrize("changed", [{}, {"attention_dropout": 0.5}])
def test_the_next_policy_loads_and_keeps_config_and_tokenizer(store, tmp_path, changed):
    policy = world.import_changed(store, tmp_path / "model", "own", config=changed)
    made = world.make(store, policy, world.even_share, run="own")
    done = _run(store, policy, made, _config(activation_checkpointing=True), into="fork")
    assert str(done.ref) == "fork/policy@1"
    model, info = AutoModelForCausalLM.from_pretrained(done.files.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    before, after = (checkpoints.model_entry("policy", version) for version in (policy, done))
    assert (before.tokenizer, before.template) == (after.tokenizer, after.template)
    assert before.weights != after.weights
    configs = [json.loads(version.files.read("config.json")) for version in (policy, done)]
    assert configs[0] == configs[1]
    assert [path.name for path in done.files.folder.glob("*.safetensors")] == ["model.safetensors"]


def short_of_memory(monkeypatch, most: int, fits: int):
    """Let passes with gradients of over `most` tokens run out of memory, after `fits` of them."""
    passed = itertools.count()
    forward = Policy.forward

    def limited(policy, layout, **options):
        is_long = torch.is_grad_enabled() and layout.filling[1] > most
        if is_long and next(passed) >= fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(policy, layout, **options)

    monkeypatch.setattr(Policy, "forward", limited)


def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_micro_batches(
    store, policy, train, monkeypatch
):
    settings = _config(token_budget=60, epochs=2)
    calm = train(settings, into="calm")
    short_of_memory(monkeypatch, 40, 1)  # some of the gradient is there already
    done = train(settings)
    assert store.numbers("tiny", "policy") == [0, 1]
    assert calm.manifest.metrics["token_budget"] == 60
    assert calm.manifest.metrics["budget_halvings"] == 0
    assert done.manifest.metrics["token_budget"] <= 30
    assert done.manifest.metrics["budget_halvings"] == 1
    for ours, theirs in zip(world.updates(store, done), world.updates(store, calm), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["microbatches"] > theirs["microbatches"]
    expected = world.weights(calm)
    for name, weight in world.weights(done).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def test_a_rollout_that_memory_does_not_hold_is_refused(store, policy, train, monkeypatch):
    short_of_memory(monkeypatch, 0, 0)
    with pytest.raises(ResourceError, match="memory is short"):
        train()
    assert store.numbers("tiny", "policy") == [0]


@pytest.mark.parametrize(
    ("device_bytes", "chosen"), [(8 * 10**10, (65536, False)), (10**9, (8192, True))]
)
def test_the_budget_is_of_the_cards_memory(policy, train, monkeypatch, device_bytes, chosen):
    monkeypatch.setattr("quiver.stages.optimize.budget.available_bytes", lambda _: device_bytes)
    done = train()
    metrics = done.manifest.metrics
    assert (metrics["token_budget"], metrics["activation_checkpointing"]) == chosen
    assert done.files.read("config.json") == policy.files.read("config.json")


def test_how_the_work_is_cut_is_no_other_work(train):
    first = train()
    assert train(token_budget=33, packing="packed").ref == first.ref
    assert train(seed=1).ref != first.ref


def test_a_stage_that_dies_between_the_commits_leaves_nothing_twice(
    store, policy, train, monkeypatch
):
    publish = Writer.publish

    def dies(self, *about):
        if self.kind == "policy":
            raise KeyboardInterrupt
        return publish(self, *about)

    monkeypatch.setattr(Writer, "publish", dies)
    with pytest.raises(KeyboardInterrupt):
        train()
    monkeypatch.undo()
    metrics = train().manifest.metrics
    assert (metrics["advantages"], metrics["updates"]) == ("tiny/advantages@1", "tiny/updates@1")
    assert store.numbers("tiny", "advantages") == store.numbers("tiny", "updates") == [1]
    forced = train(into="tiny", force=True)
    assert forced.manifest.metrics["advantages"] == "tiny/advantages@2"


def test_score_after_says_what_the_new_policy_thinks(store, made, train):
    done = train(score_after=True)
    model = load_model(done, dtype=torch.float32)
    moved = []
    for row, saved in zip(made[0].table().to_pylist(), world.advantages(store, done), strict=True):
        with torch.no_grad():
            expected = world.own_logprobs(model, row)
        ratio = (expected - torch.tensor(row["old_logprobs"])).exp().mean()
        assert saved["mean_logprob"] == pytest.approx(float(expected.mean()), abs=1e-4)
        assert saved["mean_ratio"] == pytest.approx(float(ratio), rel=1e-3)
        moved.append(abs(saved["mean_ratio"] - 1))
    assert max(moved) > 1e-3


# -- joins and filters


def joined(rollout_ids: pa.ChunkedArray, rows: pa.Table) -> pa.ChunkedArray:
    """Column `values` of `rows`, in the order of the rollouts."""
    rollouts, rewards = (
        SimpleNamespace(ref=name, table=lambda table=table: table)
        for name, table in (("rollouts", pa.table({"rollout_id": rollout_ids})), ("rewards", rows))
    )
    return RolloutSet({"rollouts": rollouts, "rewards": rewards}).column("rewards", "values")


def cut(column: pa.Array, *ends: int) -> pa.ChunkedArray:
    """Its rows up to each of `ends` as a chunk."""
    bounds = itertools.pairwise([0, *ends, len(column)])
    return pa.chunked_array([column[start:end] for start, end in bounds], column.type)


@pytest.mark.parametrize("order", ["as it is", "shifted", "by chance"])
def test_a_column_is_joined_whatever_its_order_and_its_chunks(order):
    rows = np.arange(50)
    lists = [None if row % 5 == 0 else [float(row)] * (row % 7) for row in rows]
    by_chance = np.random.default_rng(0).permutation(rows)
    places = {"as it is": rows, "shifted": np.roll(rows, 13), "by chance": by_chance}[order]
    ids = np.array([f"r{row}" for row in rows])
    values = cut(pa.array(lists, pa.list_(pa.float32())), 7, 30)
    table = pa.table({"rollout_id": cut(pa.array(ids), 20, 20, 33), "values": values})
    column = joined(cut(pa.array(ids[places]), 0, 11, 40), table)
    assert column.to_pylist() == [lists[place] for place in places]


def test_lists_of_more_items_than_one_arrow_array_can_have_are_joined():
    """2.4 billion nulls, which take no memory."""
    items = 1_200_000_000
    one = pa.ListArray.from_arrays(pa.array([0, items], pa.int32()), pa.nulls(items))
    ids, values = pa.chunked_array([["first"], ["second"]]), pa.chunked_array([one, one])
    rows = pa.table({"rollout_id": ids, "values": values})
    column = joined(pa.chunked_array([["second"], ["first"]]), rows)
    assert pc.list_value_length(column).to_pylist() == [items, items]


def test_rewards_must_name_exactly_the_rollouts(store, policy, made):
    rows = [
        {"rollout_id": row["rollout_id"], "group_id": row["group_id"], "reward": 1.0}
        for row in made[1].table().to_pylist()
    ]
    more = [*rows, {**rows[0], "rollout_id": "r-999-0"}]
    for wrong, said in ((rows[1:], "missing"), (more, "unknown")):
        with pytest.raises(LineageError, match=said):
            _run(store, policy, (made[0], world.write_rewards(store, made[0], wrong)))


def test_what_belongs_to_other_rollouts_or_policies_is_refused(store, policy, made, train):
    others = world.write_rollouts(store, policy, world.rows_of(policy, 4, 4, seed=5))
    with pytest.raises(LineageError, match="not of"):
        _run(store, policy, (others, made[1]))
    nameless = world.write_rewards(store, made[0], world.even_share, inputs={})
    with pytest.raises(LineageError, match="was made of no rollouts"):
        _run(store, policy, (made[0], nameless))
    old = world.sampled_logprobs(made[0])
    other = make_policy(store, "other", seed=1)
    weights = checkpoints.model_entry("policy", other).weights[:12]
    for wrong, said in ((other, weights), (None, "no model")):
        prox = world.write_logprobs(store, made[0], old, "prox", wrong)
        with pytest.raises(LineageError, match=said):
            train(prox_logprobs=prox.ref)
    ref = world.write_logprobs(store, made[0], old, "ref", policy)
    with pytest.raises(LineageError, match="holds ref logprobs, expected prox"):
        train(prox_logprobs=ref.ref)
    short = world.write_logprobs(store, made[0], [row[:1] for row in old], "ref", policy)
    with pytest.raises(SchemaError, match="differ in length"):
        train(ref_logprobs=short.ref)


def test_what_cannot_be_trained_on_is_dropped_with_its_reason(store, policy):
    rows = world.rows_of(policy, 4, 4)
    rows[0]["finish_reason"] = "abort"
    rows[12]["completion_ids"], rows[12]["old_logprobs"] = [], []
    scores = {f"r-001-{i}": None for i in range(3)} | {f"r-002-{i}": 0.5 for i in range(4)}
    made = world.scored(
        store, policy, rows, lambda row: scores.get(row["rollout_id"], float(row["sample_index"]))
    )
    done = _run(store, policy, made, _config(algorithm="dapo"))
    saved = {row["rollout_id"]: row for row in world.advantages(store, done)}
    expected = {"r-000-0": "abort", "r-001-3": "small_group", "r-003-0": "empty"}
    expected |= {f"r-001-{i}": "not_scored" for i in range(3)}
    expected |= {f"r-002-{i}": "zero_variance" for i in range(4)}
    for name, row in saved.items():
        assert row["drop_reason"] == expected.get(name)
        assert row["kept"] == (row["drop_reason"] is None) == (row["advantage"] is not None)
    dropped = dict(sorted(Counter(expected.values()).items()))
    assert done.manifest.metrics["dropped"] == dropped
    # of 1, 2, 3: the aborted 0 is not among them
    assert saved["r-000-1"]["advantage"] == pytest.approx(-1 / 1.0001, abs=1e-5)


def test_on_length_mask_leaves_cut_completions_out_of_the_loss(store, policy):
    """They count in the group's mean all the same; and with `mask_counted` as rollouts of the
    step."""
    rows = world.rows_of(policy, 4, 4)
    for index, row in enumerate(rows):
        row["finish_reason"] = "length" if index % 3 == 0 else "stop"
    made = world.scored(store, policy, rows)
    masked, counted, kept = (
        _run(store, policy, made, _config(**fields))
        for fields in ({"on_length": "mask"}, {"on_length": "mask", "mask_counted": True}, {})
    )
    for done in (masked, counted):
        assert done.manifest.metrics["dropped"] == {"length": 6}
        assert done.manifest.metrics["kept"] == 10
    losses = [done.manifest.metrics["loss"] for done in (masked, counted)]
    assert losses[1] == pytest.approx(10 / 16 * losses[0], abs=1e-6) and losses[0]
    saved = [world.advantages(store, done) for done in (masked, counted, kept)]
    assert saved[0] == saved[1]
    for one, other in zip(saved[0], saved[2], strict=True):
        assert one["advantage"] in (None, other["advantage"])


@pytest.mark.parametrize(
    ("fields", "trains"),
    [
        ({}, False),
        ({"algorithm": "dapo"}, False),  # drops them all
        ({"kl_coef": 0.1}, True),
        ({"entropy_coef": 0.1}, True),
        ({"entropy_target": 9.0}, True),
        ({"nll_coef": 0.1}, True),
        ({"nll_coef": 0.1, "nll_reward": 2.0}, False),
    ],
)
def test_equal_rewards_are_nothing_to_learn_from_unless_another_term_trains(
    store, policy, made, caplog, fields, trains
):
    rewards = world.write_rewards(store, made[0], lambda row: 1.0)
    refs = {}
    if "kl_coef" in fields:
        old = world.sampled_logprobs(made[0])
        refs["ref_logprobs"] = world.write_logprobs(store, made[0], old).ref
    done = _run(store, policy, (made[0], rewards), _config(**fields), **refs)
    metrics = done.manifest.metrics
    assert metrics["all_advantages_zero"] is True
    assert ("nothing to learn" in caplog.text) is not trains
    assert metrics.get("trained_by") == ([*fields][:1] if trains else None)
    (iteration,) = gather(store, "tiny").iterations
    assert learned_nothing(iteration) is not trains
    if trains:
        assert f"only optimize.{next(iter(fields))} can train" in caplog.text
    else:
        assert metrics["steps"] == ("nll_coef" in fields)
        assert world.are_equal(world.weights(done), world.weights(policy))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_where_every_rollout_is_left_out_it_says_why(store, policy, caplog, algorithm):
    rows = [{**row, "finish_reason": "length"} for row in world.rows_of(policy, 2, 2)]
    config = _config(algorithm=algorithm, on_length="mask")
    metrics = _run(store, policy, world.scored(store, policy, rows), config).manifest.metrics
    assert (metrics["kept"], metrics["steps"]) == (0, 0)
    assert "no rollout is left to learn from (length: 4)" in caplog.text
    assert "rewards are equal" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "next"),
    [
        ({}, "raise generate.sampling.max_tokens"),
        ({"sampling": {"ignore_eos": True}}, "set generate.sampling.ignore_eos = false, since"),
        (
            {"metrics": {"unknown_end": {"id": 7, "text": "<|eot|>"}}},
            "set generate.sampling.stop_token_ids = [7], since the chat template ends a turn with "
            "'<|eot|>', which ends no completion",
        ),
    ],
)
def test_where_all_completions_were_cut_it_says_what_would_end_them(store, policy, settings, next):
    rows = [{**row, "finish_reason": "length"} for row in world.rows_of(policy, 2, 2)]
    rollouts = world.write_rollouts(store, policy, rows, **settings)
    made = rollouts, world.write_rewards(store, rollouts, lambda row: None)
    with pytest.raises(NumericError, match="ended: 4 by length") as refusal:
        _run(store, policy, made)
    assert refusal.value.next.startswith(next)
    assert store.numbers("tiny", "policy") == [0]


def test_no_rows_are_nothing_to_learn_from(store, policy):
    with pytest.raises(NumericError, match="0 of 0 rollouts are scored"):
        _run(store, policy, world.scored(store, policy, []))
