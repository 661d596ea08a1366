"""PPO through the stage: what it writes, how its critic goes on, that it learns; a critic on the
policy's trunk or on its own, causal and encoder-decoder."""

import itertools
import math
import shutil
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, SchemaError
from quiver.stages.core.store import Store
from quiver.stages.model.checkpoints import model_entry
from quiver.stages.model.loading import load_model
from quiver.stages.optimize import critic as critics
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize import terms
from quiver.stages.optimize.inputs import open_inputs
from quiver.stages.optimize.optimizer import make_optimizer, optimizer_state
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from tests import episodes
from tests.stages.optimize import world
from tests.tiny import make_policy

STALE = {"max_staleness": 2, "audit": {"enabled": False}}
"""Later trainings are on the same rollouts."""


def _config(**fields) -> Config:
    return world.config(algorithm="ppo", **fields)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """By kind of model, each made once: a run to copy, with rollouts and rewards, one a prompt."""

    @cache
    def make(kind: str) -> Path:
        store = Store(tmp_path_factory.mktemp(kind) / "store")
        world.by_engine(store, make_policy(store, kind, kind), groups=8, each=1)
        return Path(store.url) / kind

    return make


@pytest.fixture(params=["llama", "t5"])
def start(request, store, originals):
    """A tiny policy, causal or encoder-decoder."""
    kind = request.param
    shutil.copytree(originals(kind), Path(store.url) / kind, symlinks=True)
    return store.open(f"{kind}/policy@0")


@pytest.fixture
def made(store, start):
    return tuple(store.open(f"{start.ref.run}/{kind}@1") for kind in ("rollouts", "rewards"))


EACH_CRITIC = pytest.mark.parametrize(
    ("start", "critic"), [("llama", "trunk"), ("t5", "model")], indirect=["start"]
)


def _critic_of(version, critic: str) -> dict[str, torch.Tensor]:
    return world.weights(version, f"{critics.FOLDERS[critic]}/state.safetensors")


# -- what it writes


def test_one_rollout_a_prompt_gives_an_advantage_a_token(store, start, made):
    """The head starts at 0, so every advantage is λ ** (tokens to go) · reward, whitened."""
    done = world.trained(store, start, made, _config(minibatches=2, epochs=2))
    rows = made[0].table().to_pylist()
    gains = [
        0.95 ** (len(row["completion_ids"]) - 1 - t) * world.even_share(row)
        for row in rows
        for t in range(len(row["completion_ids"]))
    ]
    saved = list(itertools.chain(*world.gains(store, done)))
    assert saved == pytest.approx([(g - fmean(gains)) / stdev(gains) for g in gains], abs=1e-4)
    updates = world.updates(store, done)
    assert len(updates) == 4 and all(row["applied"] and row["value_loss"] > 0 for row in updates)
    assert updates[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    metrics = done.manifest.metrics
    assert metrics["audit"]["max_gap"] < 1e-4
    for name in ("value_loss", "explained_variance"):
        assert metrics[name] == updates[-1][name]


@EACH_CRITIC
def test_the_policy_is_no_other_model_for_having_a_critic(store, start, made, critic):
    fields = {"critic": critic, "precision": "bf16", "audit": {"max_mean_gap": 1.0}}
    done = world.trained(store, start, made, _config(**fields))
    loader = AutoModelForCausalLM if start.ref.run == "llama" else AutoModelForSeq2SeqLM
    model, info = loader.from_pretrained(done.files.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert [path.name for path in done.files.folder.glob("*.safetensors")] == ["model.safetensors"]
    weights = {"weight", "bias"}
    if critic == "model":
        trunk = critics.trunk_of(model)
        weights = {"head.weight", "head.bias"}
        weights |= {f"trunk.{name}" for name, _ in trunk.named_parameters()}
    moments = {f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq") for name in weights}
    saved = _critic_of(done, critic)
    assert saved.keys() == {*weights, *moments, "updates"}
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert verify(store)[1] == []
    wider = critics.ValueHead(7)
    if critic == "model":
        wider = critics.with_trunk(wider, trunk)
    with pytest.raises(ConfigError, match=r"weight was saved as \[\d+\], the model has \[7\]"):
        critics.resume(wider, torch.optim.AdamW(wider.parameters()), done, critic, moments=False)
    slim = world.trained(store, start, made, _config(**fields, save_optimizer=False))
    assert _critic_of(slim, critic).keys() == weights


def test_a_group_algorithm_writes_no_critic(store, policy):
    made = world.make(store, policy, world.even_share)
    done = world.trained(store, policy, made)
    assert not any((done.files.folder / name).exists() for name in critics.FOLDERS.values())
    (row,) = world.updates(store, done)
    assert row["value_loss"] is None and row["explained_variance"] is None


# -- the step of a critic with its own trunk


def _trainer(store, start, made, **fields) -> Trainer:
    """Ready for its first step, with a critic whose weights are not those of the policy."""
    trunk = critics.trunk_of(load_model(start, dtype=torch.float32))
    inputs = world.inputs_of(start, made)
    config = _config(critic="model", **fields)
    trainer = world.trainer(store, inputs, config, value_trunk=trunk)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.critic.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    trainer.prepare()
    return trainer


@pytest.mark.parametrize("fields", [{}, {"packing": "single", "value_clip": None}])
def test_values_and_their_gradient_are_those_of_the_critics_own_trunk(store, start, made, fields):
    """By float64: the values have moved since they were taken, some by more than the bound."""
    trainer = _trainer(store, start, made, **fields)
    head = trainer.critic["head"]
    model = load_model(start, dtype=torch.float64)
    trunk = dict(model.base_model.named_parameters())
    with torch.no_grad():
        for name, parameter in trainer.critic["trunk"].named_parameters():
            trunk[name].copy_(parameter)
    weight, bias = (p.detach().double().requires_grad_() for p in (head.weight, head.bias))
    hidden = [world.own_pass(model, row)[1][:-1] for row in made[0].table().to_pylist()]
    before = (torch.cat(hidden) @ weight + bias).detach()
    torch.testing.assert_close(trainer.batch.old_values.double(), before, rtol=0, atol=1e-5)
    with torch.no_grad():
        head.weight.mul_(1.5)
        weight.mul_(1.5)
    numbers = world.step(trainer)
    values = torch.cat(hidden) @ weight + bias
    returns = trainer.batch.returns.double()
    clip = trainer.config.value_clip
    near = values if clip is None else torch.clamp(values, before - clip, before + clip)
    loss = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()
    (trainer.config.value_coef * loss).backward()
    assert numbers["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {f"trunk.{name}": p.grad for name, p in trunk.items()}
    expected |= {"head.weight": weight.grad, "head.bias": bias.grad}
    for name, parameter in trainer.critic.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].float(), rtol=1e-3, atol=1e-6)


def _gradients(module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_policy_and_critic_learn_each_for_itself(store, start, made):
    """The policy's gradient is the one without a value loss; the critic's is what it is while the
    policy rests; and each is clipped by its own norm."""
    unjudged = _trainer(store, start, made, value_coef=0.0)
    both, resting = (
        _trainer(store, start, made, value_coef=1e-4, grad_clip=0.01, critic_warmup_steps=steps)
        for steps in (0, 1)
    )
    rows = [world.step(trainer) for trainer in (both, resting, unjudged)]
    assert world.are_equal(_gradients(unjudged.model), _gradients(both.model))
    assert not _gradients(unjudged.critic) and not _gradients(resting.model)
    assert world.are_equal(_gradients(resting.critic), _gradients(both.critic))
    for name in ("value_loss", "policy_loss", "entropy"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-6)

    def norms() -> list[float]:
        modules = (both.model, both.critic)
        return [
            float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))
            for module in modules
        ]

    before = norms()
    assert before[1] < 0.01 < before[0]
    assert both.apply({"step": 0, **rows[0]})["grad_norm"] == pytest.approx(before[0])
    assert norms() == pytest.approx([0.01, before[1]], rel=1e-3)


def test_the_critic_has_a_rate_of_its_own_and_decay_on_matrices(policy):
    model, trunk = (load_model(policy, dtype=torch.float32) for _ in range(2))
    critic = critics.with_trunk(critics.ValueHead(32), critics.trunk_of(trunk))
    config = _config(learning_rate=1e-4, critic_learning_rate=3e-3, weight_decay=0.1)
    groups = make_optimizer(config, model, critic).param_groups
    assert [(group.get("scale"), group["weight_decay"]) for group in groups] == [
        (None, 0.1), (None, 0.0), (pytest.approx(30.0), 0.1), (pytest.approx(30.0), 0.0)
    ]  # fmt: skip
    parameters = {id(p) for group in groups[2:] for p in group["params"]}
    assert parameters == {id(p) for p in critic.parameters()}
    assert make_optimizer(_config(), model, critic).param_groups[-1]["scale"] == 1.0


# -- going on


@EACH_CRITIC
def test_a_critic_that_is_carried_is_one_that_never_stopped(store, start, made, critic):
    """Two iterations through the store against one process that keeps model, critic and moments."""
    config = _config(**STALE, critic=critic, epochs=2, minibatches=2, critic_learning_rate=5e-3)
    first = world.trained(store, start, made, config)
    second = world.trained(store, first, made, config)
    inputs = world.inputs_of(start, made)
    whole = load_model(start, dtype=torch.float32)
    trunk = critics.trunk_of(whole) if critic == "model" else None
    trainer = world.trainer(store, inputs, config, value_trunk=trunk)
    trainer.prepare()
    trainer.train()
    again = world.trainer(
        store, inputs, config, trainer.model, step=trainer.step, value_trunk=trunk
    )
    for name in ("policy", "optimizer", "parameters", "clip_groups", "critic"):
        setattr(again, name, getattr(trainer, name))
    again.prepare()
    again.train()
    kept = {name: p.detach() for name, p in again.critic.named_parameters()}
    kept |= optimizer_state(again.optimizer, again.critic)
    assert world.are_equal(_critic_of(second, critic), kept)
    moments = optimizer_state(again.optimizer, again.model)
    assert world.are_equal(world.weights(second, "optimizer/state.safetensors"), moments)
    saved = dict(load_model(second, dtype=torch.float32).named_parameters())
    assert world.are_equal(saved, dict(again.model.named_parameters()))
    forgetful = config.model_copy(update={"load_optimizer": False})
    forgotten = world.trained(store, first, made, forgetful)
    assert not world.are_equal(_critic_of(forgotten, critic), kept)


@EACH_CRITIC
def test_while_the_critic_warms_up_the_policy_rests(store, start, made, critic):
    """Steps 0 and 1; then steps 2 and 3, the last of which is the policy's first."""
    fields = {"critic": critic, "critic_warmup_steps": 3, "critic_learning_rate": 1e-2}
    config = _config(epochs=2, **fields, **STALE)
    first = world.trained(store, start, made, config)
    assert model_entry("policy", first).weights == model_entry("policy", start).weights
    rows = world.updates(store, first)
    assert [row["loss"] for row in rows] == pytest.approx([0.1 * row["value_loss"] for row in rows])
    assert rows[1]["value_loss"] < rows[0]["value_loss"]
    assert not (first.files.folder / "optimizer").exists()  # no moments yet
    second = world.trained(store, first, made, config)
    rows = world.updates(store, second)
    assert [row["step"] for row in rows] == [2, 3]
    assert rows[0]["loss"] == pytest.approx(0.1 * rows[0]["value_loss"])
    assert rows[1]["loss"] == pytest.approx(rows[1]["policy_loss"] + 0.1 * rows[1]["value_loss"])
    assert model_entry("policy", second).weights != model_entry("policy", start).weights
    assert world.weights(second, "optimizer/state.safetensors")["updates"].tolist() == [1.0]
    assert _critic_of(second, critic)["updates"].tolist() == [4.0]


def test_a_critic_of_weight_0_judges_and_rests(store, start, made):
    first = world.trained(store, start, made, _config(critic="model", critic_learning_rate=3e-3))
    rests = _config(critic="model", value_coef=0, weight_decay=0.1, **STALE)
    second = world.trained(store, first, made, rests)
    assert world.are_equal(_critic_of(first, "model"), _critic_of(second, "model"))
    assert model_entry("policy", second).weights != model_entry("policy", first).weights
    row = world.updates(store, second)[-1]
    assert row["value_loss"] > 0 and row["loss"] == pytest.approx(row["policy_loss"])


def test_from_the_policys_trunk_to_a_model_of_its_own_and_not_back(store, start, made):
    """The head goes on upon a copy of the trunk that it was trained on, so its first values are
    what they would have been."""
    first = world.trained(store, start, made, _config(epochs=3, critic_learning_rate=3e-2))
    moved, stayed = (
        world.trained(store, first, made, _config(critic=kind, **STALE))
        for kind in ("model", "trunk")
    )
    rows = [world.updates(store, version)[0] for version in (moved, stayed)]
    for name in ("value_loss", "policy_loss", "explained_variance"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-6)
    assert rows[0]["explained_variance"] != 0.0
    counts = [
        {key: count.tolist() for key, count in _critic_of(version, kind).items() if "upd" in key}
        for version, kind in ((moved, "model"), (stayed, "trunk"))
    ]
    assert counts == [{"updates": [1.0]}, {"updates": [4.0]}], "its moments are new"
    with pytest.raises(ConfigError, match="its critic is a model of its own") as caught:
        world.trained(store, moved, made, _config(**STALE))
    assert caught.value.next == 'set optimize.critic = "model"'


# -- rewards


def test_rewards_over_their_deviation_so_far(store, policy):
    """The head starts at 0, so the first value loss is of the rewards alone, and goes with their
    square. The next training counts the rewards of the one before."""
    trainings = []
    for seed in range(2):
        rollouts, _ = world.by_engine(store, policy, groups=6, each=2, seed=seed)
        score = world.write_rewards(store, rollouts, lambda row: 3 + 2 * world.even_share(row))
        trainings.append((rollouts, score))
    rewards = [version.table()["reward"].to_numpy() for _, version in trainings]
    plain = world.trained(store, policy, trainings[0], _config())
    scaling = _config(reward_scaling="running", **STALE)
    first = world.trained(store, policy, trainings[0], scaling)
    losses = [world.updates(store, done)[0]["value_loss"] for done in (plain, first)]
    assert losses[1] / losses[0] == pytest.approx(1 / rewards[0].std(ddof=1) ** 2, rel=1e-4)
    second = world.trained(store, first, trainings[1], scaling)
    for done, seen in (first, rewards[0]), (second, np.concatenate(rewards)):
        moments = done.manifest.metrics["reward_moments"]
        assert moments["count"] == len(seen)
        assert moments["mean"] == pytest.approx(seen.mean(), rel=1e-6)
        assert moments["squares"] == pytest.approx(seen.var() * len(seen), rel=1e-5)
    assert terms.reward_scale(moments) == pytest.approx(1 / np.concatenate(rewards).std(ddof=1))
    equal = terms.reward_moments(None, torch.tensor([2.0, 2.0, torch.nan]))
    assert equal["count"] == 2 and terms.reward_scale(equal) == 1.0


def _loaded(store, policy, rewards: dict[str, float | None], config, ref=None, cut=()):
    """What the stage makes of rollouts of two tokens by name, with these rewards and reference
    logprobs; `cut`: those that ended by length."""
    rows = [episodes.row(name, [episodes.turn(2)]) for name in rewards]
    for row in rows:
        row["finish_reason"] = "length" if row["rollout_id"] in cut else "stop"
        del row["turns"], row["end_reason"]
    made = world.scored(store, policy, rows, lambda row: rewards[row["rollout_id"]])
    beside = {"rewards": made[1].ref, "ref": ref and world.write_logprobs(store, made[0], ref).ref}
    inputs = open_inputs(store, policy.ref, made[0].ref, beside)
    resolved = config.resolved()
    return joining.load(resolved, resolved.chosen_algorithm(), store, inputs)


def test_the_reward_scale_counts_every_scored_rollout(store, policy):
    """Also one that takes no part: mean 4, squares 9 + 1 + 16, deviation √(26 / 2)."""
    rewards = {"g-0": 1.0, "g-1": 3.0, "g-2": 8.0, "g-3": None}
    config = _config(reward_scaling="running", on_length="mask")
    loaded = _loaded(store, policy, rewards, config, cut=["g-2"])
    assert loaded.reasons == [None, None, "length", "not_scored"]
    assert loaded.summary["reward_moments"] == {"count": 3, "mean": 4.0, "squares": 26.0}
    assert loaded.batch.reward_scale == pytest.approx(1 / math.sqrt(13))


def test_zero_variance_is_of_the_rewards_less_the_kl(store, policy):
    """Half of Σ old − ref comes off. Rewards 1 and 1 become 1 and 0, and are learned from; 1 and 0
    become 0 and 0, and are not."""
    rewards = {"a-0": 1.0, "a-1": 1.0, "b-0": 1.0, "b-1": 0.0}
    ref = [[-0.5, -0.5], [-1.5, -1.5], [-0.5, -2.5], [-0.5, -0.5]]
    config = world.config(algorithm="rloo", kl_in_reward=True, kl_coef=0.5, drop_zero_variance=True)
    loaded = _loaded(store, policy, rewards, config, ref)
    assert loaded.reasons == [None, None, "zero_variance", "zero_variance"]
    assert loaded.batch.advantages.tolist() == [1.0, -1.0]


def test_zero_variance_is_not_of_the_advantages(store, policy):
    """Every two of the answers hold a right one, so all advantages of pass@2 are 0."""
    rewards = {"g-0": 1.0, "g-1": 1.0, "g-2": 0.0}
    config = world.config(
        algorithm="grpo", advantage="pass_at_k", pass_k=2, drop_zero_variance=True
    )
    loaded = _loaded(store, policy, rewards, config)
    assert loaded.reasons == [None] * 3 and loaded.batch.advantages.tolist() == [0.0] * 3


def test_the_kl_comes_off_the_reward_and_not_off_the_loss_as_well(store, start, made):
    rows = made[0].table().to_pylist()
    lower = [[old - 0.3 * (t + 1) for t, old in enumerate(row["old_logprobs"])] for row in rows]
    reference = world.write_logprobs(store, made[0], lower)
    config = _config(kl_in_reward=True, kl_coef=0.5, gae_lambda=1.0)
    done = world.trained(store, start, made, config, ref_logprobs=reference.ref)
    saved = list(itertools.chain(*world.gains(store, done)))
    gains = []
    for row in rows:
        steps = [-0.5 * 0.3 * (t + 1) for t in range(len(row["completion_ids"]))]
        steps[-1] += world.even_share(row)
        gains += [sum(steps[t:]) for t in range(len(steps))]
    assert saved == pytest.approx([(g - fmean(gains)) / stdev(gains) for g in gains], abs=1e-4)
    (row,) = world.updates(store, done)
    assert row["loss"] == pytest.approx(row["policy_loss"] + 0.1 * row["value_loss"], abs=1e-6)


def test_a_cut_state_must_fit_the_decoder(store):
    policy = make_policy(store, "bart", "bart")
    rows = world.by_engine(store, policy, groups=2, each=1)[0].table().to_pylist()
    rows[0] |= {"completion_ids": [5] * 256, "old_logprobs": [-5.0] * 256}
    rows[0]["finish_reason"] = "length"
    made = world.scored(store, policy, rows)
    with pytest.raises(SchemaError, match="257 tokens, the policy reads 256"):
        world.trained(store, policy, made, _config(bootstrap_length=True))
    assert world.trained(store, policy, made, _config(**STALE)).manifest.metrics["steps"] == 1
