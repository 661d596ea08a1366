"""A critic that is a model of its own: values and gradient against float64, the policy untouched by
it, its life in the store."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.checkpoints import as_model
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.verification import verify
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize import critic as value_head
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import resolve
from quiver.stages.optimize.optimizer import make_optimizer, state
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from tests.stages.optimize import world
from tests.stages.optimize.test_critic import _states
from tests.stages.optimize.test_seq2seq_policies import sampled
from tests.tiny import make_policy
from tests.writing import run_here

run = partial(run_here, "optimize")


def _config(**values) -> Config:
    return Config(
        **{"algorithm": "ppo", "critic": "model", "device": "cpu", "learning_rate": 1e-3, **values}
    )


@pytest.fixture(params=["llama", "t5"])
def made(request, store):
    """(policy, rollouts, rewards) of a tiny model; one rollout a prompt."""
    policy = make_policy(store, request.param, request.param)
    rollouts = sampled(store, policy, groups=8, each=1)
    return (
        policy,
        rollouts,
        world.write_rewards(store, rollouts, world.even_share, run=request.param),
    )


def _run(store, made, config=None, policy=None):
    start, rollouts, rewards = made
    return store.open(
        run(
            config or _config(),
            store,
            policy=(policy or start).ref,
            rollouts=rollouts.ref,
            rewards=rewards.ref,
        )
    )


def _tensors(version, name: str) -> dict[str, torch.Tensor]:
    return load_file(version.files.folder / name)


def _equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- the step


def _trainer(store, made, **changed) -> Trainer:
    """Ready for its first step, with a critic whose weights are not those of the policy."""
    config, row = _config(**changed).resolved(), resolve("ppo")
    loaded = joining.load(
        config, row, store, dict(zip(("policy", "rollouts", "rewards"), made, strict=True))
    )
    model, copy = (load_model(made[0], dtype=torch.float32) for _ in range(2))
    trunk = value_head.trunk_of(copy)
    trainer = Trainer(config, model, loaded.batch, row, make_accelerator(config), value_trunk=trunk)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.critic.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    trainer.prepare()
    return trainer


def _critic64(made, trainer: Trainer) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """The critic in float64: a whole model with its trunk's weights, the head's weight and bias."""
    model = load_model(made[0], dtype=torch.float64)
    own = dict(model.base_model.named_parameters())
    with torch.no_grad():
        for name, value in trainer.critic["trunk"].named_parameters():
            own[name].copy_(value)
    head = trainer.critic["head"]
    return model, *(value.detach().double().requires_grad_() for value in (head.weight, head.bias))


def _values64(made, model, weight, bias) -> torch.Tensor:
    rows = made[1].table().to_pylist()
    return torch.cat([(_states(model, row)[1] @ weight + bias)[:-1] for row in rows])


@pytest.mark.parametrize(
    "changed",
    [{}, {"token_budget": 40, "value_coef": 0.7}, {"packing": "single", "value_clip": None}],
)
def test_values_and_their_gradient_are_those_of_the_critics_own_trunk(store, made, changed):
    trainer = _trainer(store, made, **changed)
    before = _values64(made, *_critic64(made, trainer)).detach()
    torch.testing.assert_close(trainer.batch.old_values.double(), before, rtol=0, atol=1e-5)
    with (
        torch.no_grad()
    ):  # the values have moved since they were taken, some by more than the bound
        trainer.critic["head"].weight.mul_(1.5)
    everyone = list(range(len(trainer.batch.groups)))
    numbers = trainer.accumulate(everyone, everyone)

    model, weight, bias = _critic64(made, trainer)
    values, returns = _values64(made, model, weight, bias), trainer.batch.returns.double()
    clip = trainer.config.value_clip
    near = (
        values
        if clip is None
        else torch.minimum(torch.maximum(values, before - clip), before + clip)
    )
    loss = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()
    (trainer.config.value_coef * loss).backward()
    assert numbers["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    wanted = dict(model.base_model.named_parameters())
    for name, parameter in trainer.critic["trunk"].named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad.float(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(
        trainer.critic["head"].weight.grad, weight.grad.float(), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        trainer.critic["head"].bias.grad, bias.grad.float(), rtol=1e-4, atol=1e-6
    )


def test_the_policys_gradient_is_the_one_without_a_value_loss(store, made):
    trainers = [_trainer(store, made, value_coef=coef) for coef in (0.0, 0.7)]
    for trainer in trainers:
        everyone = list(range(len(trainer.batch.groups)))
        trainer.accumulate(everyone, everyone)
    without, having = (
        {name: p.grad for name, p in trainer.model.named_parameters()} for trainer in trainers
    )
    assert _equal(without, having)
    assert any(
        parameter.grad.abs().max() > 0 for parameter in trainers[1].critic["trunk"].parameters()
    )
    assert all(parameter.grad is None for parameter in trainers[0].critic.parameters())


def test_policy_and_critic_are_clipped_each_for_itself(store, made):
    trainer = _trainer(store, made, value_coef=1e-4, grad_clip=0.01)
    everyone = list(range(len(trainer.batch.groups)))
    row = {"step": 0, **trainer.accumulate(everyone, everyone)}
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in part.parameters()])
        for part in (trainer.model, trainer.critic)
    ]
    assert norms[1] < 0.01 < norms[0]
    told = trainer.apply(row)
    assert told["grad_norm"] == pytest.approx(float(norms[0]))
    after = [
        torch.nn.utils.get_total_norm([p.grad for p in part.parameters()])
        for part in (trainer.model, trainer.critic)
    ]
    assert float(after[0]) == pytest.approx(0.01, rel=1e-3) and torch.equal(after[1], norms[1])


def test_the_critic_has_a_rate_of_its_own_and_decay_on_matrices(policy):
    model, trunk = (load_model(policy, dtype=torch.float32) for _ in range(2))
    critic = value_head.with_trunk(value_head.ValueHead(32), value_head.trunk_of(trunk))
    groups = make_optimizer(
        _config(learning_rate=1e-4, critic_learning_rate=3e-3, weight_decay=0.1), model, critic
    ).param_groups
    assert [(group.get("scale"), group["weight_decay"]) for group in groups] == [
        (None, 0.1), (None, 0.0), (pytest.approx(30.0), 0.1), (pytest.approx(30.0), 0.0)
    ]  # fmt: skip
    assert {id(p) for group in groups[2:] for p in group["params"]} == {
        id(p) for p in critic.parameters()
    }


# -- in the store


def test_it_lies_below_the_policy_whole_and_without_output_embedding(store, made):
    done = _run(store, made)
    loader = AutoModelForCausalLM if made[0].ref.run == "llama" else AutoModelForSeq2SeqLM
    model, info = loader.from_pretrained(done.files.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert [path.name for path in done.files.folder.glob("*.safetensors")] == ["model.safetensors"]
    assert {path.name for path in (done.files.folder / "critic").iterdir()} == {
        "state.safetensors",
        "state.json",
    }
    assert not (done.files.folder / "value_head").exists()
    found = _tensors(done, "critic/state.safetensors")
    trunk = {f"trunk.{name}" for name, _ in value_head.trunk_of(model).named_parameters()}
    weights = {"head.weight", "head.bias", *trunk}
    assert found.keys() == {
        *weights,
        *(f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq") for name in weights),
        "updates",
    }
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert verify(store)[1] == []
    slim = _run(store, made, _config(save_optimizer=False))
    assert _tensors(slim, "critic/state.safetensors").keys() == weights
    group = (
        (made[0], *world.make(store, made[0], world.even_share, run="group"))
        if made[0].ref.run == "llama"
        else None
    )
    assert (
        not group
        or not (
            _run(store, group, _config(algorithm="grpo", critic="trunk")).files.folder / "critic"
        ).exists()
    )


def test_a_critic_that_is_carried_is_one_that_never_stopped(store, made):
    """Two iterations through the store against one process that keeps both models and all
    moments."""
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
    model, copy = (load_model(made[0], dtype=torch.float32) for _ in range(2))
    trainer = Trainer(
        config,
        model,
        loaded.batch,
        row,
        make_accelerator(config),
        value_trunk=value_head.trunk_of(copy),
    )
    trainer.prepare()
    trainer.train()
    again = Trainer(
        config,
        model,
        loaded.batch,
        row,
        trainer.accelerator,
        step=trainer.step,
        value_trunk=trainer.policy.value_trunk,
    )
    for name in ("policy", "optimizer", "parameters", "clip_groups", "critic"):
        setattr(again, name, getattr(trainer, name))
    again.prepare()
    again.train()
    critic = {name: value.detach() for name, value in again.critic.named_parameters()} | state(
        again.optimizer, again.critic
    )
    assert _equal(_tensors(second, "critic/state.safetensors"), critic)
    assert _equal(_tensors(second, "optimizer/state.safetensors"), state(again.optimizer, model))
    assert _equal(
        dict(load_model(second, dtype=torch.float32).named_parameters()),
        dict(model.named_parameters()),
    )


def test_while_the_critic_warms_up_the_policy_rests(store, made):
    done = _run(store, made, _config(critic_warmup_steps=4, epochs=4, critic_learning_rate=3e-3))
    assert as_model("policy", done).weights == as_model("policy", made[0]).weights
    rows = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert rows[-1]["value_loss"] < rows[0]["value_loss"] and all(
        row["grad_norm"] > 0 for row in rows
    )
    assert not (done.files.folder / "optimizer").exists()
    trunk = value_head.trunk_of(load_model(made[0], dtype=torch.float32))
    found = _tensors(done, "critic/state.safetensors")
    assert not any(
        torch.equal(found[f"trunk.{name}"], value) for name, value in trunk.named_parameters()
    )


def test_while_the_critic_warms_up_no_gradient_of_the_policy_is_computed(store, made):
    """And the critic's is what it is beside the policy's."""
    beside, alone = (_trainer(store, made, critic_warmup_steps=steps) for steps in (0, 1))
    rows = [
        trainer.accumulate(*[list(range(len(trainer.batch.groups)))] * 2)
        for trainer in (beside, alone)
    ]
    assert all(parameter.grad is None for parameter in alone.model.parameters())
    grads = [
        {name: p.grad for name, p in trainer.critic.named_parameters()}
        for trainer in (beside, alone)
    ]
    assert _equal(*grads)
    for name in ("value_loss", "policy_loss", "entropy"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-6)


def test_a_critic_of_weight_0_judges_and_rests(store, made):
    first = _run(store, made, _config(epochs=2, critic_learning_rate=3e-3))
    common = {"max_staleness": 1, "audit": {"enabled": False}, "weight_decay": 0.1}
    second = _run(store, made, _config(value_coef=0, **common), policy=first)
    one, other = (_tensors(version, "critic/state.safetensors") for version in (first, second))
    assert _equal(one, other)
    assert as_model("policy", second).weights != as_model("policy", first).weights
    row = store.open(second.manifest.metrics["updates"]).table().to_pylist()[-1]
    assert row["value_loss"] > 0 and row["loss"] == pytest.approx(row["policy_loss"])
    third = _run(store, made, _config(**common | {"max_staleness": 2}), policy=second)
    assert not _equal(other, _tensors(third, "critic/state.safetensors"))


def test_from_the_policys_trunk_to_a_model_of_its_own_and_not_back(store, made):
    """The head goes on upon a copy of the trunk that it was trained on, so its first values are
    what they would have been."""
    common = {"max_staleness": 2, "audit": {"enabled": False}}
    first = _run(store, made, _config(critic="trunk", epochs=3, critic_learning_rate=3e-2))
    moved, stayed = (
        _run(store, made, _config(critic=kind, **common), policy=first)
        for kind in ("model", "trunk")
    )
    rows = [
        store.open(version.manifest.metrics["updates"]).table().to_pylist()[0]
        for version in (moved, stayed)
    ]
    for name in ("value_loss", "policy_loss", "explained_variance"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-6)
    assert rows[0]["explained_variance"] != 0.0
    with pytest.raises(ConfigError, match="its critic is a model of its own") as caught:
        _run(store, made, _config(critic="trunk", **common), policy=moved)
    assert (caught.value.object, caught.value.next) == (
        str(moved.ref),
        'set optimize.critic = "model"',
    )


def test_activation_checkpointing_trains_the_same_critic(store, made):
    plain, again = (  # the seed decides nothing here but that the work is done again
        _tensors(_run(store, made, config), "critic/state.safetensors")
        for config in (_config(), _config(activation_checkpointing=True, seed=1))
    )
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-5)


def test_bf16_autocast_keeps_the_critics_weights_in_float32(store, made):
    done = _run(store, made, _config(precision="bf16", epochs=3))
    assert {value.dtype for value in _tensors(done, "critic/state.safetensors").values()} == {
        torch.float32
    }
    updates = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert (
        all(row["applied"] for row in updates)
        and updates[2]["value_loss"] < updates[0]["value_loss"]
    )


def test_it_learns_what_the_prompt_tells(store, made):
    """The reward depends on the prompt alone; the critic comes to explain it while the policy
    rests."""

    def reward(row: dict) -> float:
        return sum(token % 2 for token in row["prompt_ids"]) / len(row["prompt_ids"])

    rewards = world.write_rewards(store, made[1], reward, run=made[0].ref.run)
    config = _config(
        critic_warmup_steps=30,
        epochs=30,
        critic_learning_rate=1e-2,
        value_clip=None,
        gae_lambda=1.0,
    )
    done = _run(store, (*made[:2], rewards), config)
    rows = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert rows[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert (
        rows[-1]["explained_variance"] > 0.5
        and rows[-1]["value_loss"] < 0.3 * rows[0]["value_loss"]
    )
