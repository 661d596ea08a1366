"""Few bytes a weight: moments in 8 bits against bitsandbytes' own AdamW, gradients in bfloat16,
moments on the host, and a model of 32 billion weights over eight ranks that are not there."""

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3Config

from quiver.schemas.errors import ConfigError
from quiver.stages.model import memory
from quiver.stages.optimize import sharding
from quiver.stages.optimize.optimizer import ChunkedAdamW, dequantize, moment_shapes, quantize
from tests.bytes_moved import META, autocast_on_meta
from tests.stages.optimize import world

EIGHT = {"optimizer": "adamw_8bit"}
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
STATE = "optimizer/state.safetensors"
LATER = {"max_staleness": 3, "audit": {"enabled": False}}
QWEN3_32B = Qwen3Config(
    vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
    num_attention_heads=64, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps(optimizer, parameters, count: int = 5) -> None:
    for step in range(count):
        for number, parameter in enumerate(parameters):
            parameter.grad = _normal(*parameter.shape, seed=100 * step + number).to(
                parameter.device
            )
        optimizer.step()


# -- the optimizer


@pytest.mark.parametrize("is_signed", [True, False])
def test_each_number_becomes_a_neighbour_among_the_values_of_its_block(is_signed):
    """By the definition of block-wise quantization, in float64: x / max |x| of the block becomes
    a value that is no further off than the two around it are from each other. Of the second moment,
    x is the root."""
    moments = _normal(6, 192) if is_signed else _normal(6, 192).square()
    codes, scales = quantize(moments, 64, is_signed=is_signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (6, 192), (6, 3))
    blocks = (moments if is_signed else moments.sqrt()).double().view(6, 3, 64)

    def numbers(codes, scales):
        stored = dequantize(codes, scales, is_signed=is_signed).double()
        return stored if is_signed else stored.sqrt()

    torch.testing.assert_close(scales.double(), blocks.abs().amax(-1), rtol=0, atol=0)
    every = torch.arange(256, dtype=torch.uint8)[None]
    values = numbers(every, torch.ones(1, 1))[0]
    assert values.max() == 1 and (values.min() < -0.9) == is_signed
    shares = (blocks / scales.double()[..., None]).flatten()
    places = torch.searchsorted(values, shares).clamp(1, 255)
    low, high = values[places - 1], values[places]
    rounded = numbers(codes, scales).view(6, 3, 64)
    rounded = (rounded / scales.double()[..., None]).flatten()
    # the library finds the place in steps of 2^-15
    assert ((rounded - shares).abs() <= high - low + 2**-14).all()
    assert (rounded - shares).norm() < 0.02 * shares.norm()


def test_steps_are_as_near_to_float32s_as_those_of_bitsandbytes():
    from bitsandbytes.optim import AdamW8bit

    start = 0.02 * _normal(40, 256)
    ours, theirs, plain = (torch.nn.Parameter(start.clone()) for _ in range(3))
    steps(ChunkedAdamW([{"params": [ours]}], seed=0, step=0, is_8bit=True, **OPTIONS), [ours])
    steps(AdamW8bit([theirs], min_8bit_size=0, **OPTIONS), [theirs])
    steps(torch.optim.AdamW([plain], **OPTIONS), [plain])
    off, their_off = ((each - plain).norm() / (plain - start).norm() for each in (ours, theirs))
    assert off < 1.1 * their_off < 0.05


def test_a_gradient_far_below_its_blocks_largest_makes_no_long_step():
    """A row of an embedding: gradients of 3e-6 beside one of 1e-2, and none after that."""
    gradient = torch.full((1, 64), 3e-6)
    gradient[0, 0] = 1e-2
    ends = []
    for is_8bit in (False, True):
        weight = torch.nn.Parameter(torch.zeros(1, 64))
        optimizer = ChunkedAdamW([{"params": [weight]}], seed=0, step=0, is_8bit=is_8bit, **OPTIONS)
        for step in range(10):
            weight.grad = gradient * (step == 0)
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=0.1, atol=0)


def test_pieces_vectors_and_odd_rows_take_torchs_steps_bit_for_bit(monkeypatch):
    """Rows of 100 numbers are no multiple of a block. Blocks of 64 lie within a piece of 128."""
    monkeypatch.setattr("quiver.stages.optimize.optimizer._CHUNK", 128)
    shapes = (3, 100), (500,)
    ours, theirs = ([torch.nn.Parameter(_normal(*shape)) for shape in shapes] for _ in range(2))
    narrow, whole = (torch.nn.Parameter(_normal(5, 64)) for _ in range(2))
    options = {"seed": 0, "step": 0, "is_8bit": True, **OPTIONS}
    steps(ChunkedAdamW([{"params": [*ours, narrow]}], **options), [*ours, narrow])
    monkeypatch.undo()
    steps(torch.optim.AdamW(theirs, fused=True, **OPTIONS), theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    unused = [torch.nn.Parameter(torch.zeros(1)) for _ in ours]  # `whole` gets the same gradients
    steps(ChunkedAdamW([{"params": [*unused, whole]}], **options), [*unused, whole])
    assert torch.equal(narrow, whole)


def test_moments_take_two_bytes_and_a_scale_for_each_block():
    optimizer = ChunkedAdamW([{"params": [torch.zeros(1)]}], seed=0, step=0, is_8bit=True)
    shapes = moment_shapes(optimizer, torch.nn.Parameter(torch.empty(10, 768)))
    held = sum(shape.numel() * dtype.itemsize for shape, dtype in shapes.values())
    assert held == 7680 * memory._MOMENTS_8BIT


def test_without_bitsandbytes_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="bitsandbytes is not installed") as caught:
        ChunkedAdamW([{"params": [torch.zeros(1)]}], seed=0, step=0, is_8bit=True)
    assert caught.value.next == 'pip install "quiver-rl[8bit]"'


# -- the stage


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_stochastic"])
def test_gradients_of_matrices_are_bfloat16_and_near_float32s(store, policy, made, precision):
    """Over several micro-batches; the precision itself is off by 0.012 in bf16."""
    inputs = world.inputs_of(policy, made)
    gradients = {}
    for optimizer in ("adamw", "adamw_8bit"):
        config = world.config(
            precision=precision, optimizer=optimizer, audit={"enabled": False}, token_budget=40
        )
        trainer = world.trainer(store, inputs, config)
        assert world.step(trainer)["microbatches"] > 2
        gradients[optimizer] = torch.cat([p.grad.flatten().float() for p in trainer.parameters])
    dtypes = {(p.ndim > 1, p.grad.dtype) for p in trainer.parameters}
    assert dtypes == {(True, torch.bfloat16), (False, torch.float32)}
    plain = gradients["adamw"]
    assert 0 < (gradients["adamw_8bit"] - plain).norm() < 0.006 * plain.norm()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_moments_on_the_host_change_no_bit(train, optimizer):
    device, host = (
        world.config(optimizer=optimizer, epochs=2, moments_on_host=on_host)
        for on_host in (False, True)
    )
    one = train(device, into="device")
    other = train(host, into="host")
    for name in ("model.safetensors", STATE):
        assert world.are_equal(world.weights(one, name), world.weights(other, name))


def test_another_optimizer_goes_on_with_the_moments(train):
    """Rounded to 8 bits, and back. In a block of 64 a code is off by 1 % of the norm."""
    slow = {"learning_rate": 1e-9, **LATER}
    wide = train(**slow)
    codes = train(start=wide, **EIGHT, **slow)
    back = train(start=codes, **slow)
    held = [world.weights(version, STATE) for version in (codes, back)]
    name = "exp_avg.model.layers.0.mlp.down_proj.weight"
    assert held[0][name].dtype == torch.uint8 and held[1][name].dtype == torch.float32
    assert held[0][name.replace("avg.", "avg_scale.")].shape == (32, 1)
    assert not any("_scale" in key for key in held[1])
    plain = train(start=wide, seed=1, **slow)
    plain = train(start=plain, **slow)
    for key in (name, name.replace("avg", "avg_sq")):
        expected = world.weights(plain, STATE)[key]
        assert (held[1][key] - expected).norm() < 0.03 * expected.norm()
    assert float(held[1]["updates"]) == 3


def test_it_learns_as_float32_does(store, policy):
    """Mean of advantage times logprob after twelve steps on the same rollouts, over three splits
    into mini-batches."""
    made = world.make(store, policy, world.even_share, groups=6)
    gains = {}
    ways = {"plain": {}, "8bit": EIGHT, "fewest": {**EIGHT, "precision": "bf16_stochastic"}}
    for name, fields in ways.items():
        for seed in range(3):
            config = world.config(
                algorithm="dr_grpo", epochs=6, minibatches=2, clip_low=0.9, clip_high=5, seed=seed,
                learning_rate=3e-3, score_after=True, audit={"enabled": False}, **fields,
            )  # fmt: skip
            done = world.trained(store, policy, made, config, into=f"{name}-{seed}")
            rows = world.advantages(store, done)
            gain = sum(row["advantage"] * row["mean_logprob"] for row in rows) / len(rows)
            gains.setdefault(name, []).append(gain)
    plain = torch.tensor(gains.pop("plain"))
    for name, gained in gains.items():
        difference = abs(float(torch.tensor(gained).mean() - plain.mean()))
        assert difference < 2 * float(plain.std()), name


# -- sharded weights


def test_of_32_billion_weights_a_rank_of_eight_holds_less_than_72_gigabytes(monkeypatch):
    """By torch's own sharding of meta tensors: rows of each weight, and the largest units whole."""
    with META:
        model = AutoModelForCausalLM.from_config(QWEN3_32B, dtype=torch.float32)
    make_mesh = sharding.init_device_mesh
    monkeypatch.setattr(sharding, "init_device_mesh", lambda _, shape: make_mesh("cpu", shape))
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with autocast_on_meta(monkeypatch):
            policy = sharding.ShardedPolicy(model, device=META, autocast=True)
        num_rows = sum(parameter.to_local().numel() for parameter in policy.parameters())
        units = {}
        for name, module in policy.named_modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group
                sizes = [parameter._orig_size.numel() for parameter in group.fsdp_params]
                units[name] = sum(sizes)
    finally:
        distributed.destroy_process_group()
    shape = memory.shape_of(QWEN3_32B)
    assert units.pop("") == 5120, "the last norm alone is outside a unit"
    assert len(units) == 64 + 2
    assert units["model.lm_head"] == units["model.model.embed_tokens"]
    counted = memory.training(
        shape, 8192, on_gpu=True, precision="bf16", recomputes=True, ranks=8, is_8bit=True
    )
    assert counted["weights"] + counted["gradients"] == pytest.approx(8 * num_rows, rel=1e-3)
    head = units["model.lm_head"]
    layer = units["model.model.layers.0"]
    # the head and its cast, its gradient with the copy for the exchange, and the last layer
    assert counted["whole for a moment"] == (12 + 2) * head + 4 * layer > (16 + 2) * layer
    assert sum(counted.values()) < 72e9
