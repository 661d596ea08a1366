"""Weights in bfloat16: rounding by its statistics, AdamW against torch's own in float32, and the
stage on a tiny model."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quiver.schemas.errors import ConfigError
from quiver.stages.common.config import parse
from quiver.stages.common.forward.precision import narrow
from quiver.stages.common.models.loading import load_model
from quiver.stages.optimize import state_folder
from quiver.stages.optimize.bf16 import Bf16AdamW, round_by_chance
from quiver.stages.optimize.optimizer import load_state, make_optimizer, masters
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import test_trainer, world
from tests.stages.optimize.test_seq2seq_policies import sampled
from tests.tiny import make_policy
from tests.writing import run_here

run = partial(run_here, "optimize")


DRAWS = 40_000


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _neighbours(value: float) -> tuple[float, float]:
    """The largest bfloat16 that is not above `value` and the smallest that is not below it, by
    looking through all of them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).double()
    every = every[every.isfinite()]
    return float(every[every <= value].max()), float(every[every >= value].min())


# -- rounding


@pytest.mark.parametrize(
    "value", [1.0012, -1.0012, 0.7 / 3, -5e-4, 1.9999, 123.4, 3e38, 1e-39, -1e-40, 1e-6 + 0.02]
)
def test_rounding_gives_the_two_neighbours_and_the_value_in_the_mean(value):
    value = float(np.float32(value))
    low, high = _neighbours(value)
    drawn = round_by_chance(torch.full((DRAWS,), value), _generator()).double()
    assert set(drawn.tolist()) == {low, high} and low < value < high
    share = (value - low) / (high - low)
    error = float((drawn > low).double().mean()) - share
    assert abs(error) < 5 * (share * (1 - share) / DRAWS) ** 0.5


def test_rounding_keeps_what_bfloat16_holds():
    held = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    found = round_by_chance(held.float(), _generator())
    assert torch.equal(found.nan_to_num(7.0), held.nan_to_num(7.0))


def test_no_number_becomes_another_kind_of_number():
    """A carry out of a NaN of ones would be −0."""
    ones = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_by_chance(ones.repeat(100), _generator()).isnan().all()
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(round_by_chance(infinite, _generator()), infinite.bfloat16())


# -- AdamW

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}


def _twins(
    count: int = 3, size: int = 1000
) -> tuple[torch.nn.ParameterList, torch.nn.ParameterList]:
    torch.manual_seed(0)
    values = [torch.randn(size) * 0.02 for _ in range(count)]
    return tuple(
        torch.nn.ParameterList(torch.nn.Parameter(value.clone()) for value in values)
        for _ in range(2)
    )


def _grads(step: int, like: torch.nn.ParameterList) -> list[torch.Tensor]:
    torch.manual_seed(step)
    return [torch.randn(len(p)) for p in like]


def _step(optimizer, parameters, gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


def test_a_weight_takes_torchs_step_and_is_rounded_by_chance():
    """The first step of a weight is that of its value in float32, whatever it is rounded to; a
    float32 weight is not rounded."""
    ours = torch.nn.Parameter(torch.full((DRAWS,), 0.02))
    head = torch.nn.Parameter(torch.full((DRAWS,), 0.02))
    narrow(torch.nn.ParameterList([ours]))
    plain = [torch.nn.Parameter(each.detach().float()) for each in (ours, head)]
    gradients = [torch.full((DRAWS,), 0.3), torch.randn(DRAWS)]
    options = {**OPTIONS, "lr": 2e-5}  # a sixth of what lies between two bfloat16 there
    _step(torch.optim.AdamW(plain, **options), plain, gradients)
    _step(
        Bf16AdamW([{"params": [ours, head]}], seed=0, step=0, **options),
        [ours, head],
        gradients,
    )
    assert torch.equal(head, plain[1])
    expected = plain[0][0].item()
    low, high = _neighbours(expected)
    assert set(ours.tolist()) == {low, high}
    assert ours.detach().double().mean().item() == pytest.approx(
        expected, abs=5 * 0.5 * (high - low) / DRAWS**0.5
    )


def test_small_steps_add_up():
    """600 steps of a hundredth of a bfloat16 step each, all one way: in the mean the weights come
    to where float32 comes."""
    start, rate = 1.0, 2.0**-8 / 100
    found = {}
    for name in ("nearest", "stochastic"):
        weights = torch.nn.Parameter(torch.full((2000,), start))
        narrow(torch.nn.ParameterList([weights]))
        made = Bf16AdamW([{"params": [weights]}], seed=0, step=0, lr=rate)
        for _ in range(600):
            before = weights.detach().clone()
            _step(made, [weights], [torch.full((2000,), 1.0)])
            if name == "nearest":
                weights.data = (before.float() - rate).bfloat16()
        found[name] = weights.detach().double().mean().item()
    assert found["nearest"] == start
    assert found["stochastic"] == pytest.approx(start - 600 * rate, abs=0.04 * 600 * rate)


def test_the_noise_is_of_seed_step_and_parameter():
    def rounded(seed: int, step: int) -> list[torch.Tensor]:
        ours = _twins()[0]
        narrow(ours)
        same = [torch.full_like(p, 0.0123, dtype=torch.float32) for p in ours]
        for p in ours:
            p.data.fill_(0.02)
        made = Bf16AdamW([{"params": list(ours)}], seed=seed, step=step, **{**OPTIONS, "lr": 6e-5})
        _step(made, ours, same)
        return [p.detach().clone() for p in ours]

    first, again = rounded(0, 3), rounded(0, 3)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    others = [first[1], first[2], rounded(0, 4)[0], rounded(1, 3)[0]]
    for other in others:  # two of equally likely neighbours: independent draws agree half the time
        assert 0.4 < float((first[0] == other).double().mean()) < 0.6


def test_masters_that_are_not_the_policys_weights_are_refused(policy):
    model = load_model(policy, dtype=torch.float32)
    found = masters(model, narrow(model))
    made = make_optimizer(Config(), model)
    name = next(iter(found))
    load_state(made, model, found)
    found[name] = found[name] + 1
    with pytest.raises(ConfigError, match=f"float32 weights of {name.removeprefix('master.')}"):
        load_state(made, model, found)


# -- the stage


def _config(**values) -> Config:
    return Config(**{"device": "cpu", "learning_rate": 1e-3, **values})


def _run(store, policy, made, config, **refs):
    named = {"policy": policy.ref, "rollouts": made[0].ref, "rewards": made[1].ref, **refs}
    return store.open(run(config, store, **named))


def _tensors(version, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(version.files.folder / name)


@pytest.fixture
def made(store, policy):
    """(rollouts, rewards) of the tiny policy."""
    return world.make(store, policy, world.even_share)


def test_the_policy_is_bfloat16_on_disk_too(store, policy, made):
    done = _run(store, policy, made, _config(precision="bf16_stochastic", minibatches=2))
    metrics = done.manifest.metrics
    assert metrics["precision"] == "bf16_stochastic" and metrics["skipped_steps"] == 0
    assert 1e-4 < metrics["audit"]["mean_gap"] < 0.03
    weights, kept = _tensors(done), _tensors(done, "optimizer/state.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert json.loads((done.files.folder / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert {value.dtype for value in kept.values()} == {torch.float32}
    assert {name.partition(".")[0] for name in kept} == {"exp_avg", "exp_avg_sq", "updates"}


@pytest.mark.parametrize("precision", ["bf16", "bf16_stochastic"])
def test_the_first_ratio_is_one_and_the_gradient_float32s(policy, precision):
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(4), 4)
    for row in rows:
        row |= {
            "old": row["old_logprobs"],
            "reward": world.even_share(row),
            "group": int(row["group_id"][2:]),
        }
    everyone, found = list(range(16)), {}
    for name in ("fp32", precision):
        config = _config(precision=name, audit={"enabled": False}, token_budget=40)
        trainer = test_trainer._trainer(policy, rows, config, "grpo")
        trainer.batch.old_logprobs.copy_(trainer.score(everyone))
        numbers = trainer.accumulate(everyone, everyone)
        assert numbers["ratio_max"] == pytest.approx(1.0, abs=1e-6) and numbers["approx_kl"] < 1e-9
        assert numbers["microbatches"] > 2
        found[name] = torch.cat([parameter.grad.flatten() for parameter in trainer.parameters])
    distance = float((found[precision] - found["fp32"]).norm() / found["fp32"].norm())
    assert distance < 0.1


def test_two_iterations_of_one_step_are_one_of_two_bit_for_bit(store, policy, made):
    common = {"max_staleness": 1, "precision": "bf16_stochastic"}
    together = _run(store, policy, made, _config(epochs=2, **common), into="together")
    first = _run(store, policy, made, _config(epochs=1, **common))
    second = _run(store, first, made, _config(epochs=1, audit={"enabled": False}, **common))
    for name in ("model.safetensors", "optimizer/state.safetensors"):
        one, other = _tensors(together, name), _tensors(second, name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_another_precision_goes_on_from_the_policys_weights(store, policy, made):
    """Rates of 1e-9 move no weight that bfloat16 could tell from where it was."""
    common = {"max_staleness": 3, "audit": {"enabled": False}, "learning_rate": 1e-9}
    first = _run(store, policy, made, _config(save_dtype="bfloat16", **common))
    for precision in ("fp32", "bf16_stochastic"):
        after = _run(store, first, made, _config(precision=precision, **common))
        kept = _tensors(after, "optimizer/state.safetensors")
        assert after.manifest.metrics["step"] == 2 and float(kept["updates"]) == 2
        for name, value in _tensors(after).items():
            torch.testing.assert_close(
                value.float(), _tensors(first)[name].float(), rtol=2**-7, atol=2e-9
            )
            assert f"master.{name}" not in kept


def test_weights_on_disk_may_be_bfloat16_and_the_training_goes_on_in_float32(store, policy, made):
    """Two iterations are those of float32 files, bit for bit: its weights went with the optimizer's
    state."""
    common = {"max_staleness": 1, "audit": {"max_mean_gap": 1.0}}
    policies = {}
    for dtype in ("float32", "bfloat16"):
        first = _run(store, policy, made, _config(save_dtype=dtype, **common))
        config = _config(save_dtype=dtype, **common)
        policies[dtype] = first, _run(store, first, made, config)
    for wide, rounded_policy in zip(*policies.values(), strict=True):
        masters = _tensors(rounded_policy, "optimizer/state.safetensors")
        rounded = _tensors(rounded_policy)
        assert json.loads(rounded_policy.files.read("config.json"))["dtype"] == "bfloat16"
        for name, weight in _tensors(wide).items():
            assert torch.equal(masters[f"master.{name}"], weight)
            assert torch.equal(rounded[name], weight.bfloat16())


def test_a_model_in_several_files_is_the_same_model(store, policy, made, monkeypatch):
    together = _run(store, policy, made, _config(), into="together")
    monkeypatch.setattr("quiver.stages.common.models.checkpoints.FILE_BYTES", 60_000)
    apart = _run(store, policy, made, _config(), into="apart")
    sizes = {
        entry.name: entry.bytes
        for entry in apart.manifest.files
        if entry.name.endswith(".safetensors") and "/" not in entry.name
    }
    assert len(sizes) > 2 and max(sizes.values()) < 90_000  # the embedding alone has 81,920
    assert "model.safetensors.index.json" in apart.files.names
    weights = _tensors(together)
    for name, parameter in load_model(apart, dtype=torch.float32).named_parameters():
        assert torch.equal(parameter, weights[name]), name
    common = {"max_staleness": 1, "audit": {"enabled": False}}
    after = [_run(store, start, made, _config(**common)) for start in (together, apart)]
    monkeypatch.undo()
    one, other = (load_model(version, dtype=torch.float32).state_dict() for version in after)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_on_disk_in_bfloat16_want_the_optimizers_state():
    with pytest.raises(ValueError, match="save_dtype 'bfloat16' keeps the float32 weights"):
        _config(save_dtype="bfloat16", save_optimizer=False)
    _config(save_dtype="bfloat16", save_optimizer=False, lora={})


def test_weights_on_disk_in_bfloat16_do_not_go_with_tight_bounds():
    """Of 200 ids the geometric ratio to rounded weights is off by more than gspo's bounds."""
    for options in ({"algorithm": "gspo"}, {"prox_of": "start"}):
        with pytest.raises(ValueError, match="save_dtype 'bfloat16' does not go with"):
            _config(save_dtype="bfloat16", **options)
        _config(save_dtype="bfloat16", precision="bf16_stochastic", **options)


def test_nothing_to_learn_keeps_the_masters(store, policy, made):
    rewards = world.write_rewards(store, made[0], lambda row: 1.0)
    done = _run(store, policy, (made[0], rewards), _config(save_dtype="bfloat16"))
    kept = state_folder.read(done, "optimizer")
    assert all(
        torch.equal(kept[f"master.{name}"], value) for name, value in _tensors(policy).items()
    )


def test_a_value_head_stays_float32(store, policy):
    rollouts = sampled(store, policy, groups=12, each=1)
    made = rollouts, world.write_rewards(store, rollouts, world.even_share)
    done = _run(
        store,
        policy,
        made,
        _config(algorithm="ppo", precision="bf16_stochastic", epochs=3, critic_learning_rate=1e-2),
    )
    assert {value.dtype for value in _tensors(done).values()} == {torch.bfloat16}
    assert {value.dtype for value in _tensors(done, "value_head/state.safetensors").values()} == {
        torch.float32
    }
    updates = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert updates[-1]["value_loss"] < updates[0]["value_loss"]


@pytest.mark.parametrize(
    "values, said",
    [({"lora": {"rank": 4}}, "lora"), ({"algorithm": "ppo", "critic": "model"}, "critic")],
)
def test_what_trains_other_weights_is_refused(values, said):
    with pytest.raises(
        ConfigError, match=f"precision 'bf16_stochastic' does not go with {said}.*take 'bf16'"
    ):
        parse(Config, {"precision": "bf16_stochastic", **values}, "optimize")


@pytest.mark.parametrize("precision", ["bf16_master", "fp32_fast"])
def test_a_precision_that_is_not_there_is_told_with_those_that_are(precision):
    with pytest.raises(ConfigError, match="'auto', 'fp32', 'bf16' or 'bf16_stochastic'"):
        parse(Config, {"precision": precision}, "optimize")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_stochastic"])
def test_it_learns_to_prefer_even_ids(store, precision, kind):
    policy, shares = make_policy(store, kind, kind), []
    config = _config(precision=precision, learning_rate=2e-2, minibatches=2)
    for iteration in range(11):
        rollouts = sampled(store, policy, groups=6, each=16, seed=iteration, temperature=1.0)
        shares.append(
            float(np.mean([world.even_share(row) for row in rollouts.table().to_pylist()]))
        )
        policy = _run(
            store,
            policy,
            (rollouts, world.write_rewards(store, rollouts, world.even_share, run=kind)),
            config,
        )
    assert shares[-1] > shares[0] + 0.15
