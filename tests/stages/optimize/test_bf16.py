"""Weights in bfloat16: rounding by its statistics, AdamW against torch's own in float32, and the
stage on a tiny model."""

import json

import numpy as np
import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.model.forward.precision import narrow
from quiver.stages.model.loading import load_model
from quiver.stages.optimize.optimizer import (
    ChunkedAdamW,
    load_optimizer_state,
    round_by_chance,
    round_weights,
)
from tests.stages.optimize import world

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
        ChunkedAdamW([{"params": [ours, head]}], seed=0, step=0, **options),
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
    to where float32 comes. Rounded to nearest they would never leave."""
    rate = 2.0**-8 / 100
    weights = torch.nn.Parameter(torch.ones(2000))
    narrow(torch.nn.ParameterList([weights]))
    made = ChunkedAdamW([{"params": [weights]}], seed=0, step=0, lr=rate)
    for _ in range(600):
        _step(made, [weights], [torch.ones(2000)])
    mean = weights.detach().double().mean().item()
    assert mean == pytest.approx(1 - 600 * rate, abs=0.04 * 600 * rate)


def test_the_noise_is_of_seed_step_and_parameter():
    def rounded(seed: int, step: int) -> list[torch.Tensor]:
        ours = _twins()[0]
        narrow(ours)
        same = [torch.full_like(p, 0.0123, dtype=torch.float32) for p in ours]
        for p in ours:
            p.data.fill_(0.02)
        made = ChunkedAdamW(
            [{"params": list(ours)}], seed=seed, step=step, **{**OPTIONS, "lr": 6e-5}
        )
        _step(made, ours, same)
        return [p.detach().clone() for p in ours]

    first, again = rounded(0, 3), rounded(0, 3)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    others = [first[1], first[2], rounded(0, 4)[0], rounded(1, 3)[0]]
    for other in others:  # two of equally likely neighbours: independent draws agree half the time
        assert 0.4 < float((first[0] == other).double().mean()) < 0.6


# -- the stage


@pytest.mark.parametrize("precision", ["bf16", "bf16_stochastic"])
def test_the_first_ratio_is_one_and_the_gradient_float32s(store, policy, made, precision):
    inputs = world.inputs_of(policy, made)
    gradients = {}
    for name in ("fp32", precision):
        config = world.config(precision=name, audit={"enabled": False}, token_budget=40)
        trainer = world.trainer(store, inputs, config)
        trainer.batch.old_logprobs.copy_(trainer.compute_logprobs(range(16)))
        numbers = world.step(trainer)
        assert numbers["ratio_max"] == pytest.approx(1.0, abs=1e-6) and numbers["approx_kl"] < 1e-9
        assert numbers["microbatches"] > 2
        gradients[name] = torch.cat([p.grad.flatten() for p in trainer.parameters])
    distance = (gradients[precision] - gradients["fp32"]).norm() / gradients["fp32"].norm()
    assert float(distance) < 0.1


STATE = "optimizer/state.safetensors"
LATER = {"max_staleness": 3, "audit": {"enabled": False}}


def test_the_policy_is_bfloat16_on_disk_too(store, policy):
    """A value head stays float32."""
    made = world.make(store, policy, world.even_share)
    config = world.config(
        algorithm="ppo", precision="bf16_stochastic", epochs=3, critic_learning_rate=1e-2
    )
    done = world.trained(store, policy, made, config)
    metrics = done.manifest.metrics
    assert metrics["precision"] == "bf16_stochastic" and metrics["skipped_steps"] == 0
    assert 1e-4 < metrics["audit"]["mean_gap"] < 0.03
    moments = world.weights(done, STATE)
    assert {value.dtype for value in world.weights(done).values()} == {torch.bfloat16}
    assert json.loads((done.files.folder / "config.json").read_bytes())["dtype"] == "bfloat16"
    head = world.weights(done, "value_head/state.safetensors")
    assert {value.dtype for value in (*moments.values(), *head.values())} == {torch.float32}
    assert {name.partition(".")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "updates"}
    updates = world.updates(store, done)
    assert updates[-1]["value_loss"] < updates[0]["value_loss"]


def test_weights_trained_in_bf16_are_so_on_disk_and_the_training_goes_on_in_float32(policy, train):
    """Two iterations are those of float32 files, bit for bit: the halves of the weights that the
    policy lacks went with the optimizer's state. Both take as many bytes."""
    policies = {}
    for dtype in ("float32", "auto"):
        options = {"save_dtype": dtype, "precision": "bf16", **LATER}
        first = train(**options)
        policies[dtype] = first, train(start=first, seed=1, **options)
    for wide, narrow_policy in zip(*policies.values(), strict=True):
        state = world.weights(narrow_policy, STATE)
        rounded = world.weights(narrow_policy)
        assert json.loads(narrow_policy.files.read("config.json"))["dtype"] == "bfloat16"
        for name, weight in world.weights(wide).items():
            assert _whole(rounded[name], state[f"rest.{name}"]).equal(weight)
            error, least = (
                (near.float() - weight).abs() for near in (rounded[name], weight.bfloat16())
            )
            assert torch.equal(error, least), "it is not rounded to nearest"
        sizes = [
            sum(entry.bytes for entry in each.manifest.files) for each in (wide, narrow_policy)
        ]
        assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


def _whole(rounded: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The float32 numbers of a bfloat16 policy and its state, by whole numbers of numpy."""
    upper = rounded.view(torch.int16).numpy().astype(np.int64)
    bits = upper * 2**16 + rest.numpy()
    return torch.from_numpy(bits.astype(np.int32)).view(torch.float32)


def test_every_number_is_rounded_to_nearest_and_restored():
    """Halves, which the rest just holds, neighbours of powers of two, denormals, both signs."""
    upper = torch.arange(-(2**15), 2**15).repeat_interleave(5)
    lower = torch.tensor([0, 1, 2**15 - 1, 2**15, 2**16 - 1]).repeat(2**16)
    numbers = (upper * 2**16 + lower).to(torch.int32).view(torch.float32)
    numbers = numbers[numbers.abs() < 3.38e38]
    layer = torch.nn.Linear(1, len(numbers), bias=False)
    layer.weight.data = numbers[:, None].clone()
    rest = round_weights(layer)["rest.weight"]
    rounded = layer.weight.detach()
    assert rounded.dtype == torch.bfloat16 and rest.dtype == torch.int16
    assert _whole(rounded[:, 0], rest[:, 0]).view(torch.int32).equal(numbers.view(torch.int32))
    error, least = ((near.double() - numbers).abs() for near in (rounded[:, 0], numbers.bfloat16()))
    assert torch.equal(error, least)


@pytest.mark.parametrize(
    ("settings", "precision", "dtype"),
    [
        ({}, "bf16", "bfloat16"),
        ({}, "fp32", "float32"),
        ({"save_optimizer": False}, "bf16", "float32"),
        ({"load_optimizer": False}, "bf16", "float32"),
        ({"algorithm": "gspo"}, "bf16", "float32"),
        ({"lora": {}, "save_optimizer": False}, "bf16", "bfloat16"),
        ({"lora": {"save": "adapter"}}, "bf16", "float32"),
        ({"save_dtype": "bfloat16"}, "fp32", "bfloat16"),
        ({"save_dtype": "float32"}, "bf16", "float32"),
    ],
)
def test_the_dtype_on_disk_is_narrow_only_if_the_training_goes_on_exactly(
    settings, precision, dtype
):
    assert world.config(**settings).saved_dtype(precision) == dtype


def test_a_state_with_tensors_of_an_unknown_kind_is_refused():
    layer = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    with pytest.raises(ConfigError, match=r"master\.weight is of an unknown kind") as caught:
        load_optimizer_state(optimizer, layer, {"master.weight": torch.randn(2, 3)})
    assert caught.value.next == "set optimize.load_optimizer = false"


def test_another_precision_goes_on_from_the_policys_weights(train):
    """Rates of 1e-9 move no weight that bfloat16 could tell from where it was."""
    slow = {"learning_rate": 1e-9, **LATER}
    first = train(save_dtype="bfloat16", **slow)
    for precision in ("fp32", "bf16_stochastic"):
        after = train(start=first, precision=precision, **slow)
        moments = world.weights(after, STATE)
        assert after.manifest.metrics["step"] == 2 and float(moments["updates"]) == 2
        assert not any(name.startswith("rest") for name in moments)
        weights = world.weights(first)
        for name, value in world.weights(after).items():
            torch.testing.assert_close(value.float(), weights[name].float(), rtol=2**-7, atol=2e-9)


def test_a_model_in_several_files_is_the_same_model(train, monkeypatch):
    together = train(into="together")
    monkeypatch.setattr("quiver.stages.model.checkpoints.FILE_BYTES", 60_000)
    apart = train(into="apart")
    sizes = [
        entry.bytes
        for entry in apart.manifest.files
        if entry.name.endswith(".safetensors") and "/" not in entry.name
    ]
    assert len(sizes) > 2 and max(sizes) < 90_000  # the embedding alone has 81,920
    assert "model.safetensors.index.json" in apart.files.names
    after = [train(start=start, **LATER) for start in (together, apart)]
    one, other = (load_model(version, dtype=torch.float32).state_dict() for version in after)
    assert world.are_equal(one, other)


def test_nothing_to_learn_keeps_the_weights(store, policy, made):
    rewards = world.write_rewards(store, made[0], lambda row: 1.0)
    config = world.config(save_dtype="bfloat16")
    done = world.trained(store, policy, (made[0], rewards), config)
    rounded, state = world.weights(done), world.weights(done, STATE)
    whole = {name: _whole(rounded[name], state[f"rest.{name}"]) for name in rounded}
    assert world.are_equal(whole, world.weights(policy)) and len(state) == len(rounded)
