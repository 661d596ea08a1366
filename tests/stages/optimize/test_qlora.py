"""Adapters on a base of 4 bits: NF4 by the paper's values, training as on the rounded weights, the
policy that is saved, bytes, and what is refused."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from quiver.schemas.errors import ConfigError, NumericError
from quiver.stages.model import memory
from quiver.stages.model.loading import load_model
from quiver.stages.optimize.lora import load_with_adapters, require_layers
from quiver.stages.optimize.nf4 import Nf4Linear
from quiver.stages.optimize.stage import Config, check
from tests.stages.optimize import world
from tests.tiny import make_folder, make_policy
from tests.writing import run_here

CPU = torch.device("cpu")
ADAPTER = "adapter/adapter_model.safetensors"
LORA = {"rank": 4, "alpha": 12}
NF4 = {**LORA, "base": "nf4"}
VALUES = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""Appendix E of the paper."""


def _config(**fields) -> Config:
    return world.config(**{"learning_rate": 1e-2, "lora": NF4, **fields})


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """NF4 in blocks of 64, in float64: the nearest value times the block's largest magnitude."""
    flat = weight.double().numpy().ravel()
    rounded = np.empty_like(flat)
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        scale = np.abs(block).max()
        nearest = np.abs(block[:, None] / scale - VALUES).argmin(1)
        rounded[start : start + 64] = VALUES[nearest] * scale
    return torch.from_numpy(rounded.astype(np.float32)).view(weight.shape)


def _is_rounded(name: str) -> bool:
    """True for the weights of the tiny models' linear layers."""
    return name.endswith("_proj.weight")


@pytest.fixture
def pair(request, store, tmp_path):
    """A policy, and another with its linear layers rounded."""
    folders = [make_folder(tmp_path / name, request.param) for name in ("exact", "rounded")]
    with world.edited_weights(folders[1]) as weights:
        for name in filter(_is_rounded, weights):
            weights[name] = rounded(weights[name])
    return [world.imported(store, folder, folder.name) for folder in folders]


# -- NF4


@pytest.mark.parametrize("shape", [(48, 32), (7, 65), (3, 10), (5, 26), (16, 64)])
def test_weights_are_the_papers_values_times_the_largest_of_their_block(shape):
    linear = nn.Linear(*shape[::-1])
    layer = Nf4Linear(linear, CPU)
    torch.testing.assert_close(layer.weight, rounded(linear.weight.detach()), rtol=1e-6, atol=0)
    assert torch.equal(layer.weight_in(torch.bfloat16), layer.weight.bfloat16())


def test_rounded_weights_do_not_change_if_they_are_rounded_again():
    linear = nn.Linear(96, 64)
    with torch.no_grad():
        linear.weight[:4] = 0
        linear.weight[4:8] *= 1e-30
    once = Nf4Linear(linear, CPU).dequantized()
    twice = Nf4Linear(once, CPU).dequantized()
    assert torch.equal(once.weight, twice.weight) and torch.equal(once.bias, linear.bias)
    assert not once.weight[:2].any()


@pytest.mark.parametrize("is_bf16", [False, True])
def test_a_pass_gives_the_plain_layers_numbers_and_keeps_no_weight(is_bf16):
    layer = Nf4Linear(nn.Linear(64, 48).requires_grad_(False), CPU)
    plain = layer.dequantized().requires_grad_(False)
    saved, answers = [], []
    for one in (plain, layer):
        states = torch.linspace(-1, 1, 320).view(5, 64).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, one=one: saved.append((one, tensor.shape)) or tensor, lambda kept: kept
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16), hooks:
            output = one(states)
        output.square().sum().backward()
        answers.append((output, states.grad))
    assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))
    assert {one for one, shape in saved if 48 in shape and 64 in shape} == {plain}


# -- training


@pytest.mark.parametrize(
    ("pair", "precision"), [("llama", "fp32"), ("qwen3", "bf16")], indirect=["pair"]
)
def test_training_is_that_on_the_rounded_weights_bit_for_bit(store, pair, precision):
    """The next policy included: rounded weights plus the adapter."""
    rows = world.rows_of(pair[1], 3, 3)
    done = []
    for policy, lora in zip(pair, (NF4, LORA), strict=True):
        made = world.scored(store, policy, rows, run=policy.ref.run)
        config = _config(lora=lora, precision=precision, epochs=2, audit={"enabled": False})
        done.append(world.trained(store, policy, made, config))
    for name in (ADAPTER, "model.safetensors"):
        assert world.are_equal(*(world.weights(version, name) for version in done)), name
    assert any(
        tensor.any() for name, tensor in world.weights(done[0], ADAPTER).items() if "_B" in name
    )


def test_layers_without_an_adapter_are_rounded_too(policy, train):
    lora = {**NF4, "target_modules": ["q_proj", "down_proj"]}
    done = train(_config(lora=lora, audit={"max_mean_gap": 1.0}))
    after, adapter = world.weights(done), world.weights(done, ADAPTER)
    for name, weight in world.weights(policy).items():
        expected = rounded(weight) if _is_rounded(name) else weight
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in adapter:
            expected = (
                expected + 3 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            )
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6)


def test_the_first_rollouts_are_of_other_weights_and_all_later_ones_of_these(store, policy, train):
    with pytest.raises(NumericError, match="while the trainer has them in 4 bits") as caught:
        train(_config())
    assert "quiver.stages.optimize.nf4:rounded" in caught.value.next
    first = train(_config(epochs=3, audit={"max_mean_gap": 1.0}))
    assert first.manifest.metrics["audit"]["mean_gap"] > 0.1
    later = world.scored(store, first, world.rows_of(first, 4, 4))
    second = world.trained(store, first, later, _config())
    assert second.manifest.metrics["audit"]["max_gap"] < 1e-5
    assert second.manifest.input("base").ref == str(policy.ref)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_may_start_from_the_rounded_base(store, tmp_path, dtype):
    """By the recipe's own way to name a function that makes the base."""
    folder = make_folder(tmp_path / "exact")
    with world.edited_weights(folder) as exact:
        exact |= {name: weight.to(dtype) for name, weight in exact.items()}
    world.edit_config(folder, dtype=str(dtype)[6:])
    config = {"model": "quiver.stages.optimize.nf4:rounded", "arguments": {"model": str(folder)}}
    policy = store.open(run_here("policy", config, store, into="rounded"))
    for name, weight in world.weights(policy).items():
        assert weight.dtype == dtype
        if _is_rounded(name):
            torch.testing.assert_close(weight, rounded(exact[name]).to(dtype), rtol=0.02, atol=0)
        else:
            assert torch.equal(weight, exact[name])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert policy.files.read(name) == (folder / name).read_bytes()
    for linear in load_model(policy, dtype=torch.float32).model.layers[0].mlp.children():
        if isinstance(linear, nn.Linear):
            assert torch.equal(Nf4Linear(linear, CPU).weight_in(dtype).float(), linear.weight)
    made = world.by_engine(store, policy)
    gap = world.trained(store, policy, made, _config()).manifest.metrics["audit"]["max_gap"]
    assert gap < (1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("architecture", ["gpt2", "t5"])
def test_it_trains_other_architectures(store, architecture):
    """gpt2's own kind of layers stays exact; an encoder-decoder's are rounded."""
    policy = make_policy(store, architecture, architecture)
    made = world.by_engine(store, policy)
    done = world.trained(store, policy, made, _config(audit={"max_mean_gap": 1.0}))
    gap = done.manifest.metrics["audit"]["max_gap"]
    assert (gap < 1e-4) == (architecture == "gpt2")
    later = world.scored(store, done, world.rows_of(done, 4, 4)) if architecture == "gpt2" else None
    later = later or world.by_engine(store, done, temperature=1.0)
    again = world.trained(store, done, later, _config())
    assert again.manifest.metrics["audit"]["max_gap"] < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_trainer_holds_the_bytes_that_are_counted(store, policy, made, precision):
    inputs = world.inputs_of(policy, made)
    held = {}
    for lora in (LORA, NF4):
        config = _config(lora=lora, precision=precision, audit={"enabled": False})
        model = load_with_adapters(config, {"base": policy, **inputs}, CPU)
        trainer = world.trainer(store, inputs, config, model)
        world.step(trainer)
        tensors = [*trainer.policy.parameters(), *trainer.policy.buffers()]
        held[config.lora.base] = sum(tensor.nbytes for tensor in tensors)
    shape = memory.shape_of(load_model(policy, dtype=torch.float32).config)
    counted = {
        base: memory.training(
            shape, 64, on_gpu=False, precision=precision, lora_rank=4, has_nf4_base=base == "nf4"
        )["weights"]
        for base in held
    }
    assert counted["nf4"] < counted["exact"]
    assert held["nf4"] == pytest.approx(counted["nf4"], rel=0.03)


# -- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": {**NF4, "save": "adapter"}}, "base 'nf4' does not go with save = 'adapter'"),
        ({"shard": True}, "lora.base = 'nf4' does not go with shard"),
        ({"precision": "bf16_stochastic"}, "does not go with lora"),
        ({"lora": {"base": "int4"}}, "'exact' or 'nf4'"),
    ],
)
def test_settings_that_contradict_it_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        _config(**fields)


def test_a_base_is_for_life(train):
    first = train(_config(lora=LORA))
    with pytest.raises(ConfigError, match="has base = exact, the recipe asks for base = nf4"):
        train(_config(max_staleness=1), start=first)


def test_without_bitsandbytes_it_says_what_to_install(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = _config()
    for starts in (
        lambda: check(config, ["answer"]),
        lambda: require_layers(config.lora, policy),
        lambda: load_with_adapters(config, {"base": policy, "policy": policy}, CPU),
    ):
        with pytest.raises(ConfigError, match="bitsandbytes is not installed") as caught:
            starts()
        assert caught.value.next == 'pip install "quiver-rl[8bit]"'
    check(_config(lora=LORA), ["answer"])
