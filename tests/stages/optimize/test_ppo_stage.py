"""PPO through the stage: what it writes, how its critic goes on, what it refuses, that it learns;
causal and encoder-decoder."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from quiver.schemas.errors import ConfigError, CorruptError, NumericError, SchemaError
from quiver.stages.common.config import parse
from quiver.stages.common.models.checkpoints import as_model
from quiver.stages.common.models.loading import load_model
from quiver.stages.optimize import reward_scaling
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import resolve
from quiver.stages.optimize.inputs import open_inputs
from quiver.stages.optimize.optimizer import state
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from tests import episodes
from tests.stages.optimize import world
from tests.stages.optimize.test_seq2seq_policies import sampled
from tests.tiny import make_policy
from tests.writing import run_here

run = partial(run_here, "optimize")


def _config(**values) -> Config:
    return Config(**{"algorithm": "ppo", "device": "cpu", "learning_rate": 1e-3, **values})


@pytest.fixture(params=["llama", "t5", "bart"])
def made(request, store):
    """(policy, rollouts, rewards) of a tiny model; one rollout a prompt."""
    policy = make_policy(store, request.param, request.param)
    rollouts = sampled(store, policy, groups=12, each=1)
    return (
        policy,
        rollouts,
        world.write_rewards(store, rollouts, world.even_share, run=request.param),
    )


def _run(store, made, config=None, policy=None, **refs):
    start, rollouts, rewards = made
    named = {
        "policy": (policy or start).ref,
        "rollouts": rollouts.ref,
        "rewards": rewards.ref,
        **refs,
    }
    return store.open(run(config or _config(), store, **named))


def _tensors(version, name: str) -> dict[str, torch.Tensor]:
    return load_file(version.files.folder / name)


def _row(name: str, length: int) -> dict:
    """One rollout of one turn, of group NAME where it is called NAME-INDEX; logprobs are −0.5."""
    row = episodes.row(name, [episodes.turn(length)])
    return {key: value for key, value in row.items() if key not in ("turns", "end_reason")}


def _equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- what it writes


def test_one_rollout_a_prompt_gives_an_advantage_a_token(store, made):
    done = _run(store, made, _config(minibatches=2, epochs=2))
    rows = {
        row["rollout_id"]: row
        for row in store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    }
    rollouts = made[1].table().to_pylist()
    gains = []
    for row in rollouts:
        found = rows[row["rollout_id"]]
        assert found["kept"] and len(found["advantage"]) == len(row["completion_ids"])
        gains += found["advantage"]
    # the head starts at 0, so every advantage is λ ** (tokens to go) · reward, whitened
    expected = [
        0.95 ** (len(row["completion_ids"]) - 1 - t) * world.even_share(row)
        for row in rollouts
        for t in range(len(row["completion_ids"]))
    ]
    mean = sum(expected) / len(expected)
    std = math.sqrt(sum((value - mean) ** 2 for value in expected) / (len(expected) - 1))
    assert gains == pytest.approx([(value - mean) / std for value in expected], abs=1e-4)
    updates = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert len(updates) == 4 and all(row["applied"] and row["value_loss"] > 0 for row in updates)
    assert updates[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    metrics = done.manifest.metrics
    assert metrics["audit"]["max_gap"] < 1e-4
    assert (metrics["value_loss"], metrics["explained_variance"]) == (
        updates[-1]["value_loss"],
        updates[-1]["explained_variance"],
    )


def test_the_policy_is_no_other_model_for_having_a_critic(store, made):
    done = _run(store, made)
    loader = AutoModelForCausalLM if made[0].ref.run == "llama" else AutoModelForSeq2SeqLM
    _, info = loader.from_pretrained(done.files.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert [path.name for path in done.files.folder.glob("*.safetensors")] == ["model.safetensors"]
    assert {path.name for path in (done.files.folder / "value_head").iterdir()} == {
        "state.safetensors",
        "state.json",
    }
    found = _tensors(done, "value_head/state.safetensors")
    assert {"weight", "bias", "exp_avg.weight", "exp_avg_sq.bias", "updates"} <= found.keys()
    assert found["weight"].shape == (32,) and found["weight"].abs().max() > 0


def test_dropped_rollouts_have_no_advantages(store, policy):
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(6), 1)
    rows[0]["finish_reason"] = "abort"
    rows[1]["completion_ids"], rows[1]["old_logprobs"] = [], []
    rollouts = world.write_rollouts(store, policy, rows)
    scores = {"r-002-0": None}
    rewards = world.write_rewards(
        store,
        rollouts,
        lambda row: scores.get(row["rollout_id"], float(len(row["completion_ids"]))),
    )
    done = _run(store, (policy, rollouts, rewards))
    found = store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    assert [row["drop_reason"] for row in found] == [
        "abort",
        "empty",
        "not_scored",
        None,
        None,
        None,
    ]
    assert [row["advantage"] is None for row in found] == [True] * 3 + [False] * 3


def test_without_a_scored_rollout_it_stops(store, policy):
    rollouts = world.write_rollouts(
        store, policy, world.sample(load_model(policy, dtype=torch.float32), world.prompts(2), 1)
    )
    with pytest.raises(NumericError, match="0 of 2 rollouts are scored"):
        _run(store, (policy, rollouts, world.write_rewards(store, rollouts, lambda row: None)))


def test_where_nothing_is_left_the_same_weights_go_on(store, policy):
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(2), 1)
    rows = [{**row, "finish_reason": "length"} for row in rows]
    rollouts = world.write_rollouts(store, policy, rows)
    done = _run(
        store,
        (policy, rollouts, world.write_rewards(store, rollouts, world.even_share)),
        _config(on_length="mask"),
    )
    assert done.manifest.metrics["steps"] == 0
    assert _equal(_tensors(done, "model.safetensors"), _tensors(policy, "model.safetensors"))


def test_a_group_algorithm_writes_no_critic(store, policy):
    made = (policy, *world.make(store, policy, world.even_share))
    done = _run(store, made, _config(algorithm="grpo"))
    assert not (done.files.folder / "value_head").exists()
    (row,) = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert row["value_loss"] is None and row["explained_variance"] is None


# -- going on


def test_a_critic_that_is_carried_is_one_that_never_stopped(store, made):
    """Two iterations through the store against one process that keeps model, head and moments."""
    config = _config(
        max_staleness=1,
        audit={"enabled": False},
        epochs=2,
        minibatches=2,
        critic_learning_rate=5e-3,
    )
    first = _run(store, made, config)
    second = _run(store, made, config, policy=first)
    row, config = resolve("ppo"), config.resolved()
    loaded = joining.load(
        config, row, store, dict(zip(("policy", "rollouts", "rewards"), made, strict=True))
    )
    model, accelerator = load_model(made[0], dtype=torch.float32), make_accelerator(config)
    trainer = Trainer(config, model, loaded.batch, row, accelerator)
    trainer.prepare()
    trainer.train()
    again = Trainer(config, model, loaded.batch, row, accelerator, step=trainer.step)
    for name in ("policy", "optimizer", "parameters", "clip_groups"):
        setattr(again, name, getattr(trainer, name))
    again.prepare()
    again.train()
    head = dict(again.policy.value_head.named_parameters()) | state(
        again.optimizer, again.policy.value_head
    )
    assert _equal(
        _tensors(second, "value_head/state.safetensors"),
        {name: value.detach() for name, value in head.items()},
    )
    assert _equal(_tensors(second, "optimizer/state.safetensors"), state(again.optimizer, model))
    saved = load_model(second, dtype=torch.float32)
    assert _equal(dict(saved.named_parameters()), dict(model.named_parameters()))
    forgotten = _run(store, made, config.model_copy(update={"load_optimizer": False}), policy=first)
    assert not _equal(
        _tensors(forgotten, "value_head/state.safetensors"),
        _tensors(second, "value_head/state.safetensors"),
    )


def test_rewards_over_their_deviation_so_far(store, policy):
    """The head starts at 0, so the first value loss is of the rewards alone, and goes with their
    square. The next training counts the rewards of the one before."""
    trainings = []
    for number in range(2):
        rollouts = sampled(store, policy, groups=6, each=2, seed=number)
        rewards = world.write_rewards(store, rollouts, lambda row: 3 + 2 * world.even_share(row))
        trainings.append((policy, rollouts, rewards))
    rewards = [version.table()["reward"].to_numpy() for _, _, version in trainings]
    plain = _run(store, trainings[0], _config())
    scaling = _config(reward_scaling="running", max_staleness=1, audit={"enabled": False})
    first = _run(store, trainings[0], scaling)
    losses = [
        store.open(done.manifest.metrics["updates"]).table()["value_loss"][0].as_py()
        for done in (plain, first)
    ]
    assert losses[1] / losses[0] == pytest.approx(1 / rewards[0].std(ddof=1) ** 2, rel=1e-4)
    second = _run(store, trainings[1], scaling, policy=first)
    for done, seen in (first, rewards[0]), (second, np.concatenate(rewards)):
        moments = done.manifest.metrics["reward_moments"]
        assert moments["count"] == len(seen)
        assert moments["mean"] == pytest.approx(seen.mean(), rel=1e-6)
        assert moments["squares"] == pytest.approx(seen.var() * len(seen), rel=1e-5)
    assert reward_scaling.scale(moments) == pytest.approx(1 / np.concatenate(rewards).std(ddof=1))
    equal = reward_scaling.go_on(None, torch.tensor([2.0, 2.0, torch.nan]))
    assert equal["count"] == 2 and reward_scaling.scale(equal) == 1.0


def _loaded(store, policy, rows, rewards, config, **beside):
    """What the stage makes of rollouts `rows` of one policy, with these rewards."""
    rollouts = world.write_rollouts(store, policy, rows)
    scores = dict(zip((row["rollout_id"] for row in rows), rewards, strict=True))
    scored = world.write_rewards(store, rollouts, lambda row: scores[row["rollout_id"]])
    refs = {"rewards": [scored.ref]}
    for role, values in beside.items():
        refs[role] = [world.write_logprobs(store, rollouts, values).ref]
    inputs = open_inputs(store, policy.ref, [rollouts.ref], refs)
    config = config.resolved()
    return joining.load(config, config.row(), store, inputs)


def test_the_reward_scale_counts_every_scored_rollout(store, policy):
    """Also one that takes no part: mean 4, squares 9 + 1 + 16, deviation √(26 / 2)."""
    rows = [_row(f"g-{number}", 2) for number in range(4)]
    rows[2]["finish_reason"] = "length"
    config = _config(reward_scaling="running", on_length="mask")
    loaded = _loaded(store, policy, rows, [1.0, 3.0, 8.0, None], config)
    assert loaded.reasons == [None, None, "length", "not_scored"]
    assert loaded.summary["reward_moments"] == {"count": 3, "mean": 4.0, "squares": 26.0}
    assert loaded.batch.reward_scale == pytest.approx(1 / math.sqrt(13))


def test_while_the_critic_warms_up_the_policy_rests(store, made):
    config = _config(critic_warmup_steps=3, epochs=2, critic_learning_rate=1e-2)
    first = _run(store, made, config)
    assert as_model("policy", first).weights == as_model("policy", made[0]).weights
    rows = store.open(first.manifest.metrics["updates"]).table().to_pylist()
    assert [row["loss"] for row in rows] == pytest.approx([0.1 * row["value_loss"] for row in rows])
    assert rows[1]["value_loss"] < rows[0]["value_loss"]
    assert not (first.files.folder / "optimizer").exists()  # no moments yet
    second = _run(
        store, made, config, policy=first
    )  # steps 2 and 3: the last one is the policy's first
    rows = store.open(second.manifest.metrics["updates"]).table().to_pylist()
    assert [row["step"] for row in rows] == [2, 3]
    assert rows[0]["loss"] == pytest.approx(0.1 * rows[0]["value_loss"])
    assert rows[1]["loss"] == pytest.approx(rows[1]["policy_loss"] + 0.1 * rows[1]["value_loss"])
    assert as_model("policy", second).weights != as_model("policy", made[0]).weights
    assert _tensors(second, "optimizer/state.safetensors")["updates"].tolist() == [1.0]
    assert _tensors(second, "value_head/state.safetensors")["updates"].tolist() == [4.0]


def test_a_damaged_value_head_is_refused(store, made):
    first = _run(store, made)
    path = first.files.folder / "value_head" / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"state\.safetensors"):
        _run(store, made, _config(max_staleness=1, audit={"enabled": False}), policy=first)


# -- options


def test_the_kl_may_come_off_the_reward(store, made):
    rollouts = made[1]
    rows = rollouts.table().to_pylist()
    lower = [[value - 0.3 * (t + 1) for t, value in enumerate(row["old_logprobs"])] for row in rows]
    reference = world.write_logprobs(store, rollouts, lower)
    config = _config(kl_in_reward=True, kl_coef=0.5, gae_lambda=1.0)
    with pytest.raises(ConfigError, match="reference's logprobs"):
        _run(store, made, config)
    done = _run(store, made, config, ref_logprobs=reference.ref)
    found = store.open(done.manifest.metrics["advantages"]).table()["advantage"].to_pylist()
    expected = []
    for row in rows:
        steps = [-0.5 * 0.3 * (t + 1) for t in range(len(row["completion_ids"]))]
        steps[-1] += world.even_share(row)
        expected += [sum(steps[t:]) for t in range(len(steps))]
    mean = sum(expected) / len(expected)
    std = math.sqrt(sum((value - mean) ** 2 for value in expected) / (len(expected) - 1))
    assert [value for row in found for value in row] == pytest.approx(
        [(v - mean) / std for v in expected], abs=1e-4
    )
    (row,) = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert row["loss"] == pytest.approx(
        row["policy_loss"] + 0.1 * row["value_loss"], abs=1e-6
    )  # and not off the loss as well


def test_without_a_critic_it_comes_off_the_rollouts_reward(store, policy):
    rollouts, rewards = world.make(store, policy, world.even_share)
    rows = rollouts.table().to_pylist()
    lower = [[value - 0.1 * row["sample_index"] for value in row["old_logprobs"]] for row in rows]
    reference = world.write_logprobs(store, rollouts, lower)
    config = _config(algorithm="rloo", kl_in_reward=True, kl_coef=0.5)
    done = _run(store, (policy, rollouts, rewards), config, ref_logprobs=reference.ref)
    found = store.open(done.manifest.metrics["advantages"]).table()["advantage"].to_pylist()

    def shaped(row: dict) -> float:
        return world.even_share(row) - 0.5 * 0.1 * row["sample_index"] * len(row["completion_ids"])

    for row, advantage in zip(rows, found, strict=True):
        others = [
            shaped(o)
            for o in rows
            if o["group_id"] == row["group_id"] and o["sample_index"] != row["sample_index"]
        ]
        assert advantage == pytest.approx(shaped(row) - sum(others) / len(others), abs=1e-5)


def test_zero_variance_is_of_the_rewards_less_the_kl(store, policy):
    """Half of Σ old − ref comes off. Rewards 1 and 1 become 1 and 0, and are learned from; 1 and 0
    become 0 and 0, and are not."""
    rows = [_row(name, 2) for name in ("a-0", "a-1", "b-0", "b-1")]
    ref = [[-0.5, -0.5], [-1.5, -1.5], [-0.5, -2.5], [-0.5, -0.5]]
    config = _config(algorithm="rloo", kl_in_reward=True, kl_coef=0.5, drop_zero_variance=True)
    loaded = _loaded(store, policy, rows, [1.0, 1.0, 1.0, 0.0], config, ref=ref)
    assert loaded.reasons == [None, None, "zero_variance", "zero_variance"]
    assert loaded.batch.advantages.tolist() == [1.0, -1.0]


def test_kl_in_the_reward_needs_a_coefficient():
    with pytest.raises(ConfigError, match="kl_in_reward needs kl_coef > 0"):
        parse(Config, {"algorithm": "ppo", "kl_in_reward": True}, "optimize")


def test_the_value_of_a_cut_state_counts_when_asked(store, made):
    rollouts = made[1]
    first = _run(store, made, _config(critic_learning_rate=0.1, epochs=3, max_staleness=1))
    assert any(row["finish_reason"] == "length" for row in rollouts.table().to_pylist())
    common = {"max_staleness": 1, "audit": {"enabled": False}}
    found = [
        store.open(
            _run(
                store, made, _config(bootstrap_length=asked, **common), policy=first
            ).manifest.metrics["advantages"]
        )
        for asked in (False, True)
    ]
    plain, asked = (version.table()["advantage"].to_pylist() for version in found)
    assert plain != asked and all(len(a) == len(b) for a, b in zip(plain, asked, strict=True))


def test_a_cut_state_must_fit_the_decoder(store):
    policy = make_policy(store, "bart", "bart")
    rows = sampled(store, policy, groups=2, each=1).table().to_pylist()
    rows[0] |= {
        "completion_ids": [5] * 256,
        "old_logprobs": [-5.0] * 256,
        "finish_reason": "length",
    }
    rollouts = world.write_rollouts(store, policy, rows, run="bart")
    made = policy, rollouts, world.write_rewards(store, rollouts, world.even_share, run="bart")
    with pytest.raises(SchemaError, match="257 tokens, the policy reads 256"):
        _run(store, made, _config(bootstrap_length=True))
    assert _run(store, made, _config(audit={"enabled": False})).manifest.metrics["steps"] == 1


# -- learning


def test_the_critic_learns_what_the_prompt_tells(store, made):
    """The reward depends on the prompt alone; the head alone comes to explain it."""

    def reward(row: dict) -> float:
        return sum(token % 2 for token in row["prompt_ids"]) / len(row["prompt_ids"])

    rewards = world.write_rewards(store, made[1], reward, run=made[0].ref.run)
    config = _config(
        critic_warmup_steps=80,
        epochs=80,
        critic_learning_rate=0.1,
        value_clip=None,
        gae_lambda=1.0,
    )
    done = _run(store, (*made[:2], rewards), config)
    rows = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert rows[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert (
        rows[-1]["explained_variance"] > 0.5
        and rows[-1]["value_loss"] < 0.2 * rows[0]["value_loss"]
    )


def test_it_learns(store):
    """Even ids are rewarded, one rollout a prompt; their share rises in what is sampled anew."""
    kind = "llama"
    policy, share = make_policy(store, kind, kind), []
    config = _config(learning_rate=2e-2, critic_learning_rate=4e-2, epochs=2, minibatches=4)
    for iteration in range(6):
        rollouts = sampled(store, policy, groups=64, each=1, seed=iteration, temperature=1.0)
        share.append(sum(map(world.even_share, rollouts.table().to_pylist())) / 64)
        made = policy, rollouts, world.write_rewards(store, rollouts, world.even_share, run=kind)
        policy = _run(store, made, config)
    assert share[-1] > share[0] + 0.15


def test_bf16_autocast_trains_and_keeps_weights_in_float32(store, made):
    done = _run(store, made, _config(precision="bf16", epochs=2, activation_checkpointing=True))
    assert 0 < done.manifest.metrics["audit"]["mean_gap"] < 0.1
    for name in ("model.safetensors", "value_head/state.safetensors"):
        assert {value.dtype for value in _tensors(done, name).values()} == {torch.float32}
    updates = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert (
        all(row["applied"] for row in updates)
        and updates[1]["value_loss"] < updates[0]["value_loss"]
    )
