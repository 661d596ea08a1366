"""The stage on a tiny model: what it writes, and which rollouts it learns from."""

import itertools
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from transformers import AutoModelForCausalLM

from quiver.schemas.errors import LineageError, NumericError
from quiver.stages.common.models import checkpoints
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.store.writer import Writer
from quiver.stages.common.verification import verify
from quiver.stages.optimize.inputs import Sampled
from quiver.stages.report.gather import gather
from quiver.stages.report.troubles import learned_nothing
from tests.stages.optimize import world
from tests.stages.optimize.world import config as _config
from tests.stages.optimize.world import trained as _run
from tests.stages.optimize.world import weights as _weights
from tests.tiny import make_policy
from tests.writing import run_here

run = partial(run_here, "optimize")


# -- what it writes


def test_it_writes_a_policy_advantages_and_updates(store, policy, made):
    done = _run(store, policy, made, _config(minibatches=2, epochs=2))
    assert str(done.ref) == "tiny/policy@1"
    assert {entry.role for entry in done.manifest.inputs} == {"policy", "rollouts", "rewards"}
    metrics = done.manifest.metrics
    updates = store.open(metrics["updates"]).table().to_pylist()
    assert [(row["step"], row["epoch"], row["minibatch"]) for row in updates] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert all(row["applied"] for row in updates)
    assert metrics["step"] == metrics["steps"] == 4
    assert metrics["tokens"] == sum(row["tokens"] for row in updates)
    assert {"load", "steps", "save", "total"} <= done.manifest.seconds.keys()
    advantages = store.open(metrics["advantages"])
    assert advantages.manifest.status == {"kept": 16}
    assert advantages.table()["rollout_id"].to_pylist() == made[0].table()["rollout_id"].to_pylist()
    assert verify(store)[1] == []


def test_the_next_policy_loads_and_keeps_the_tokenizer(store, policy, made):
    done = _run(store, policy, made)
    model, info = AutoModelForCausalLM.from_pretrained(done.files.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    before, after = (checkpoints.as_model("policy", version) for version in (policy, done))
    assert (before.tokenizer, before.template) == (after.tokenizer, after.template)
    assert before.weights != after.weights
    assert json.loads((done.files.folder / "config.json").read_bytes()) == json.loads(
        (policy.files.folder / "config.json").read_bytes()
    )
    assert sorted(path.name for path in done.files.folder.glob("*.safetensors")) == [
        "model.safetensors"
    ]
    assert {path.suffix for path in (done.files.folder / "optimizer").iterdir()} == {
        ".safetensors",
        ".json",
    }


def test_the_same_work_again_is_a_cache_hit(store, policy, made):
    first = _run(store, policy, made)
    assert _run(store, policy, made, _config(token_budget=33, packing="packed")).ref == first.ref
    assert _run(store, policy, made, _config(seed=1)).ref != first.ref


@pytest.mark.parametrize("config", [{"attention_dropout": 0.5}, {}])
def test_the_next_config_is_the_parents(store, tmp_path, config):
    policy = world.import_changed(store, tmp_path / "model", "own", config=config)
    made = world.make(store, policy, world.even_share, run="own")
    done = _run(store, policy, made, _config(activation_checkpointing=True))
    assert json.loads((done.files.folder / "config.json").read_bytes()) == json.loads(
        (policy.files.folder / "config.json").read_bytes()
    )


def test_the_manifest_says_what_was_decided(store, policy, made):
    manifest = _run(store, policy, made, _config(algorithm="dapo")).manifest
    told = {
        name: manifest.config[name]
        for name in ("clip_low", "clip_high", "aggregation", "drop_zero_variance")
    }
    assert told == {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "drop_zero_variance": True,
    }
    assert manifest.metrics["precision"] == "fp32"
    assert (
        manifest.metrics["max_completion_tokens"] == 8
    )  # the longest: the stand-in for generation names no limit
    explicit = _config(
        algorithm="dapo",
        clip_low=0.2,
        clip_high=0.28,
        aggregation="token_mean",
        drop_zero_variance=True,
    )
    assert str(_run(store, policy, made, explicit).ref) == manifest.ref


def test_a_stage_that_dies_between_the_commits_leaves_nothing_twice(
    store, policy, made, monkeypatch
):
    publish = Writer.publish

    def dies(self, *about):
        if self.kind == "policy":
            raise KeyboardInterrupt
        return publish(self, *about)

    monkeypatch.setattr(Writer, "publish", dies)
    with pytest.raises(KeyboardInterrupt):
        _run(store, policy, made)
    monkeypatch.undo()
    done = _run(store, policy, made)
    assert (done.manifest.metrics["advantages"], done.manifest.metrics["updates"]) == (
        "tiny/advantages@1",
        "tiny/updates@1",
    )
    assert store.numbers("tiny", "advantages") == store.numbers("tiny", "updates") == [1]
    forced = store.open(
        run(
            _config(),
            store,
            policy=policy.ref,
            rollouts=made[0].ref,
            rewards=made[1].ref,
            into="tiny",
            force=True,
        )
    )
    assert forced.manifest.metrics["advantages"] == "tiny/advantages@2"


def test_score_after_says_what_the_new_policy_thinks(store, policy, made):
    done = _run(store, policy, made, _config(score_after=True))
    model, rollouts = (
        load_model(done, dtype=torch.float32),
        {row["rollout_id"]: row for row in made[0].table().to_pylist()},
    )
    moved = []
    for row in store.open(done.manifest.metrics["advantages"]).table().to_pylist():
        rollout = rollouts[row["rollout_id"]]
        prompt, ids = rollout["prompt_ids"], torch.tensor(rollout["completion_ids"])
        with torch.no_grad():
            table = (
                model(input_ids=torch.tensor([prompt + ids.tolist()]))
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
            )
        expected = table.gather(1, ids[:, None])[:, 0]
        old = torch.tensor(rollout["old_logprobs"])
        assert row["mean_logprob"] == pytest.approx(float(expected.mean()), abs=1e-4)
        assert row["mean_ratio"] == pytest.approx(float((expected - old).exp().mean()), rel=1e-3)
        moved.append(abs(row["mean_ratio"] - 1))
    assert max(moved) > 1e-3


def test_advantages_and_what_the_policy_thought_when_it_was_trained(store, policy, made):
    done = _run(store, policy, made, _config(algorithm="dr_grpo", max_completion_tokens=8))
    rows = {
        row["rollout_id"]: row
        for row in store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    }
    rollouts = made[0].table().to_pylist()
    for row in rollouts:
        peers = [
            world.even_share(other) for other in rollouts if other["group_id"] == row["group_id"]
        ]
        found = rows[row["rollout_id"]]
        assert found["advantage"] == pytest.approx(
            world.even_share(row) - sum(peers) / len(peers), abs=1e-6
        )
        if found["mean_ratio"] is not None:
            assert found["mean_ratio"] == pytest.approx(1.0, abs=1e-4)
            assert found["mean_logprob"] == pytest.approx(
                sum(row["old_logprobs"]) / len(row["old_logprobs"]), abs=1e-4
            )


def test_step_zero_is_on_policy(store, policy, made):
    metrics = _run(store, policy, made).manifest.metrics
    assert metrics["audit"]["mean_gap"] < 1e-5
    assert metrics["audit"]["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    (row,) = store.open(metrics["updates"]).table().to_pylist()
    assert row["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert row["clip_fraction"] == 0.0
    assert row["entropy"] > 0


def test_into_another_run_keeps_the_number(store, policy, made):
    assert (
        str(
            run(
                _config(),
                store,
                policy=policy.ref,
                rollouts=made[0].ref,
                rewards=made[1].ref,
                into="fork",
            )
        )
        == "fork/policy@1"
    )


# -- joins and filters


def test_rewards_in_another_order_give_the_same_policy(store, policy, made):
    shuffled = [
        {"rollout_id": row["rollout_id"], "group_id": row["group_id"], "reward": row["reward"]}
        for row in made[1].table().to_pylist()[::-1]
    ]
    first = _run(store, policy, made)
    second = _run(store, policy, (made[0], world.write_rewards(store, made[0], shuffled)))
    assert first.ref != second.ref
    for one, other in zip(_weights(first).values(), _weights(second).values(), strict=True):
        assert torch.equal(one, other)


def joined(rollout_ids: pa.ChunkedArray, rows: pa.Table) -> pa.ChunkedArray:
    """Column `values` of `rows`, in the order of the rollouts."""
    rollouts, rewards = (
        SimpleNamespace(ref=name, table=lambda table=table: table)
        for name, table in (("rollouts", pa.table({"rollout_id": rollout_ids})), ("rewards", rows))
    )
    return Sampled({"rollouts": rollouts, "rewards": rewards}).column("rewards", "values")


def cut(column: pa.Array, *ends: int) -> pa.ChunkedArray:
    """Its rows up to each of `ends` as a chunk."""
    bounds = itertools.pairwise([0, *ends, len(column)])
    return pa.chunked_array([column[start:end] for start, end in bounds], column.type)


@pytest.mark.parametrize("order", ["as it is", "shifted", "by chance"])
def test_a_column_is_joined_whatever_its_order_and_its_chunks(order):
    rows = np.arange(50)
    lists = [None if row % 5 == 0 else [float(row)] * (row % 7) for row in rows]
    places = {
        "as it is": rows,
        "shifted": np.roll(rows, 13),
        "by chance": np.random.default_rng(0).permutation(rows),
    }[order]
    ids = np.array([f"r{row}" for row in rows])
    values = cut(pa.array(lists, pa.list_(pa.float32())), 7, 30)
    table = pa.table({"rollout_id": cut(pa.array(ids), 20, 20, 33), "values": values})
    column = joined(cut(pa.array(ids[places]), 0, 11, 40), table)
    assert column.to_pylist() == [lists[place] for place in places]


def test_lists_of_more_items_than_one_arrow_array_can_have_are_joined():
    """2.4 billion nulls, which take no memory."""
    items = 1_200_000_000
    one = pa.ListArray.from_arrays(pa.array([0, items], pa.int32()), pa.nulls(items))
    rows = pa.table(
        {
            "rollout_id": pa.chunked_array([["first"], ["second"]]),
            "values": pa.chunked_array([one, one]),
        }
    )
    column = joined(pa.chunked_array([["second"], ["first"]]), rows)
    assert pc.list_value_length(column).to_pylist() == [items, items]


@pytest.mark.parametrize("change, word", [("missing", "missing"), ("unknown", "unknown")])
def test_rewards_must_name_exactly_the_rollouts(store, policy, made, change, word):
    rows = [
        {"rollout_id": row["rollout_id"], "group_id": row["group_id"], "reward": 1.0}
        for row in made[1].table().to_pylist()
    ]
    rows = rows[1:] if change == "missing" else [*rows, {**rows[0], "rollout_id": "r-999-0"}]
    with pytest.raises(LineageError, match=word):
        _run(store, policy, (made[0], world.write_rewards(store, made[0], rows)))


def test_rewards_of_other_rollouts_are_refused(store, policy, made):
    model = load_model(policy, dtype=torch.float32)
    others = world.write_rollouts(store, policy, world.sample(model, world.prompts(4), 4, seed=5))
    with pytest.raises(LineageError, match="not of"):
        _run(store, policy, (others, made[1]))
    nameless = world.write_rewards(store, made[0], world.even_share, inputs={})
    with pytest.raises(LineageError, match="no rollouts that its manifest names"):
        _run(store, policy, (made[0], nameless))


def test_proximal_logprobs_are_of_the_policy_that_sampled(store, policy, made):
    old = made[0].table()["old_logprobs"].to_pylist()
    other = make_policy(store, "other", seed=1)
    for wrong, said in (
        (other, checkpoints.as_model("policy", other).weights[:12]),
        (None, "no model"),
    ):
        prox = world.write_logprobs(store, made[0], old, "prox", wrong)
        with pytest.raises(LineageError, match=said):
            _run(store, policy, made, prox_logprobs=prox.ref)
    prox = world.write_logprobs(store, made[0], old, "prox", policy)
    assert _run(store, policy, made, prox_logprobs=prox.ref).manifest.metrics["steps"] == 1


def test_what_can_not_be_trained_on_is_dropped_with_its_reason(store, policy):
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(4), 4)
    rows[0]["finish_reason"] = "abort"
    rows[12]["completion_ids"], rows[12]["old_logprobs"] = [], []
    values = {f"r-001-{i}": None for i in range(3)} | {f"r-002-{i}": 0.5 for i in range(4)}
    rollouts = world.write_rollouts(store, policy, rows)
    rewards = world.write_rewards(
        store, rollouts, lambda row: values.get(row["rollout_id"], float(row["sample_index"]))
    )
    done = _run(store, policy, (rollouts, rewards), _config(algorithm="dapo"))
    table = {
        row["rollout_id"]: row
        for row in store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    }
    expected = {
        "r-000-0": "abort",
        "r-001-0": "not_scored",
        "r-001-1": "not_scored",
        "r-001-2": "not_scored",
        "r-001-3": "small_group",
        "r-003-0": "empty",
        **{f"r-002-{i}": "zero_variance" for i in range(4)},
    }
    assert {
        name: row["drop_reason"] for name, row in table.items() if row["drop_reason"]
    } == expected
    assert all(
        row["kept"] == (row["drop_reason"] is None) == (row["advantage"] is not None)
        for row in table.values()
    )
    assert done.manifest.metrics["dropped"] == {
        "abort": 1,
        "empty": 1,
        "not_scored": 3,
        "small_group": 1,
        "zero_variance": 4,
    }
    assert table["r-000-1"]["advantage"] == pytest.approx(
        -1 / 1.0001, abs=1e-5
    )  # of 1, 2, 3: the aborted 0 is not among them


def test_on_length_mask_leaves_cut_completions_out_of_the_loss(store, policy):
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(4), 4)
    for index, row in enumerate(rows):
        row["finish_reason"] = "length" if index % 3 == 0 else "stop"
    rollouts = world.write_rollouts(store, policy, rows)
    made = rollouts, world.write_rewards(store, rollouts, world.even_share)
    masked, kept = (_run(store, policy, made, _config(on_length=how)) for how in ("mask", "keep"))
    assert masked.manifest.metrics["dropped"] == {"length": 6}
    counted = _run(store, policy, made, _config(on_length="mask", mask_counted=True))
    assert counted.manifest.metrics["dropped"] == {"length": 6}
    assert counted.manifest.metrics["kept"] == masked.manifest.metrics["kept"] == 10
    loss = {done: done.manifest.metrics["loss"] for done in (masked, counted)}
    assert loss[counted] == pytest.approx(10 / 16 * loss[masked], abs=1e-6) and loss[masked]
    tables = [
        store.open(done.manifest.metrics["advantages"]).table().to_pylist()
        for done in (masked, kept, counted)
    ]
    assert tables.pop() == tables[0]  # what is counted is no more kept than what is not
    for one, other in zip(
        *tables, strict=True
    ):  # the cut ones count in the group's mean all the same
        assert one["advantage"] in (None, other["advantage"])


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])  # dapo drops them all
def test_all_rewards_equal_commits_the_same_weights_and_says_so(
    store, policy, made, caplog, algorithm
):
    rewards = world.write_rewards(store, made[0], lambda row: 1.0)
    done = _run(store, policy, (made[0], rewards), _config(algorithm=algorithm))
    assert done.manifest.metrics["all_advantages_zero"] is True
    assert done.manifest.metrics["steps"] == 0
    assert "nothing to learn" in caplog.text
    assert all(
        torch.equal(a, b)
        for a, b in zip(_weights(done).values(), _weights(policy).values(), strict=True)
    )


@pytest.mark.parametrize(
    ("term", "trains"),
    [
        ({"kl_coef": 0.1}, True),
        ({"entropy_coef": 0.1}, True),
        ({"entropy_target": 9.0}, True),
        ({"nll_coef": 0.1}, True),
        ({"nll_coef": 0.1, "nll_reward": 2.0}, False),
    ],
)
def test_equal_rewards_are_nothing_to_learn_from_unless_another_term_trains(
    store, policy, made, caplog, term, trains
):
    rewards = world.write_rewards(store, made[0], lambda row: 1.0)
    refs = {}
    if "kl_coef" in term:
        old = made[0].table()["old_logprobs"].to_pylist()
        refs["ref_logprobs"] = world.write_logprobs(store, made[0], old).ref
    done = _run(store, policy, (made[0], rewards), _config(**term), **refs)
    assert done.manifest.metrics["all_advantages_zero"] is True
    assert ("nothing to learn" in caplog.text) is not trains
    assert ("every advantage is 0" in caplog.text) is not trains
    assert (f"only optimize.{next(iter(term))} can train" in caplog.text) is trains
    assert done.manifest.metrics.get("trained_by") == ([*term][:1] if trains else None)
    (iteration,) = gather(store, "tiny").iterations
    assert learned_nothing(iteration) is not trains


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_where_every_rollout_is_left_out_it_says_why(store, policy, caplog, algorithm):
    rows = [
        {**row, "finish_reason": "length"}
        for row in world.sample(load_model(policy, dtype=torch.float32), world.prompts(2), 2)
    ]
    rollouts = world.write_rollouts(store, policy, rows)
    made = rollouts, world.write_rewards(store, rollouts, world.even_share)
    done = _run(store, policy, made, _config(algorithm=algorithm, on_length="mask"))
    assert (done.manifest.metrics["kept"], done.manifest.metrics["steps"]) == (0, 0)
    assert "no rollout is left to learn from (length: 4)" in caplog.text
    assert "rewards are equal" not in caplog.text


def test_a_group_of_one_has_no_variance_that_could_be_zero(store, policy):
    made = world.make(store, policy, world.even_share, groups=4, each=1)
    done = _run(store, policy, made, _config(algorithm="ppo", drop_zero_variance=True))
    assert done.manifest.metrics["kept"] == 4


def test_without_any_advantage_it_stops(store, policy):
    made = world.make(store, policy, lambda row: None)
    with pytest.raises(NumericError, match="no advantage can be computed"):
        _run(store, policy, made)
    assert store.numbers("tiny", "policy") == [0]


@pytest.mark.parametrize(
    ("settings", "metrics", "next"),
    [
        ({}, {}, "raise generate.sampling.max_tokens"),
        ({"sampling": {"ignore_eos": True}}, {}, "set generate.sampling.ignore_eos = false, since"),
        (
            {},
            {"unknown_end": {"id": 7, "text": "<|eot|>"}},
            "set generate.sampling.stop_token_ids = [7], since the chat template ends a turn with "
            "'<|eot|>', which ends no completion",
        ),
    ],
)
def test_where_all_completions_were_cut_it_says_what_would_end_them(
    store, policy, settings, metrics, next
):
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(2), 2)
    rows = [{**row, "finish_reason": "length"} for row in rows]
    rollouts = world.write_rollouts(store, policy, rows, metrics=metrics, **settings)
    made = rollouts, world.write_rewards(store, rollouts, lambda row: None)
    with pytest.raises(NumericError, match="ended: 4 by length") as refusal:
        _run(store, policy, made)
    assert refusal.value.next.startswith(next)


def test_no_rows_are_nothing_to_learn_from(store, policy):
    rollouts = world.write_rollouts(store, policy, [])
    with pytest.raises(NumericError, match="0 of 0 rollouts are scored"):
        _run(store, policy, (rollouts, world.write_rewards(store, rollouts, world.even_share)))
