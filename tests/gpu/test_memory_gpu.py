"""What saves memory on a CUDA device: moments in 8 bits and on the host, a base of 4 bits, and smaller
micro-batches once memory runs out. Each is compared with float32 on the CPU."""

import pytest
import torch
from torch import nn

from quiver.stages.model.loading import load_model
from quiver.stages.optimize.nf4 import Nf4Linear
from quiver.stages.optimize.optimizer import ChunkedAdamW
from tests.gpu.test_optimize_gpu import optimize
from tests.stages.optimize import world
from tests.stages.optimize.test_8bit import EIGHT, OPTIONS, steps
from tests.stages.optimize.test_qlora import ADAPTER, NF4, rounded

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.usefixtures("exact_products"),
]


def _gap(found: dict[str, torch.Tensor], expected: dict, start: dict) -> float:
    """How far all weights of `found` are off, as a share of how far the expected ones moved."""
    off, moved = (
        torch.cat([(one[name] - other[name]).flatten() for name in start])
        for one, other in ((found, expected), (expected, start))
    )
    return float(off.norm() / moved.norm())


# -- moments


START = 0.02 * torch.randn(40, 256, generator=torch.Generator().manual_seed(0))


def _after_steps(device: str, **options) -> tuple[torch.Tensor, ChunkedAdamW]:
    """START after five steps with the same gradients on every device, and the optimizer."""
    weight = nn.Parameter(START.to(device, copy=True))
    optimizer = ChunkedAdamW([{"params": [weight]}], seed=0, step=0, **options, **OPTIONS)
    steps(optimizer, [weight])
    return weight.detach().cpu(), optimizer


def test_8_bit_moments_step_as_on_the_cpu():
    """But for numbers half way between two codes; and near torch's own float32."""
    plain = nn.Parameter(START.clone())
    steps(torch.optim.AdamW([plain], **OPTIONS), [plain])
    found, expected = (_after_steps(device, is_8bit=True)[0] for device in (DEVICE, "cpu"))
    moved = (plain - START).norm()
    assert 0 < (found - plain).norm() < 0.05 * moved
    assert (found - expected).norm() < 0.005 * moved


@pytest.mark.parametrize("is_8bit", [False, True])
def test_moments_on_the_host_are_pinned_and_change_no_bit(is_8bit):
    weights = []
    for on_host in (False, True):
        weight, optimizer = _after_steps(DEVICE, is_8bit=is_8bit, on_host=on_host)
        weights.append(weight)
        (state,) = optimizer.state.values()
        moments = {key: tensor for key, tensor in state.items() if key != "step"}
        assert len(moments) == (4 if is_8bit else 2)
        for tensor in moments.values():
            assert tensor.device.type == ("cpu" if on_host else DEVICE)
            assert tensor.is_pinned() == on_host
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        ({"moments_on_host": True}, 1e-3),
        (EIGHT, 0.05),
        ({**EIGHT, "moments_on_host": True}, 0.05),
    ],
)
def test_a_training_with_few_bytes_of_moments_is_near_the_cpus_plain_one(
    store, policy, fields, tolerance
):
    """`eps` is near the gradients, so that no step is the sign of a gradient that is only noise."""
    made = world.make(store, policy, world.even_share)
    plain, found = (
        world.weights(
            optimize(store, policy, made, device, precision="fp32", epochs=3, eps=1e-3, **more)
        )
        for device, more in (("cpu", {}), (DEVICE, fields))
    )
    assert _gap(found, plain, world.weights(policy)) < tolerance


# -- a base of 4 bits


@pytest.mark.parametrize("shape", [(48, 32), (7, 65), (512, 256)])
def test_a_layer_in_4_bits_has_the_papers_values(shape):
    linear = nn.Linear(*shape[::-1])
    found = Nf4Linear(linear, torch.device(DEVICE)).weight
    expected = rounded(linear.weight.detach())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_pass_in_4_bits_gives_the_numbers_of_the_rounded_layer(dtype, tolerance):
    linear = nn.Linear(64, 48).requires_grad_(False)
    states = torch.linspace(-1, 1, 320).view(5, 64)
    exact = rounded(linear.weight.detach()).double()
    expected = (
        states.to(dtype).double() @ exact.T + linear.bias.double(),
        exact.sum(0).expand(5, 64),
    )
    layer = Nf4Linear(linear, torch.device(DEVICE)).to(DEVICE)
    leaf = states.to(DEVICE, dtype).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = layer(leaf)
    output.sum().backward()
    for found, wanted in zip((output.detach(), leaf.grad), expected, strict=True):
        assert (found.cpu().double() - wanted).norm() < tolerance * wanted.norm()


def test_adapters_on_a_base_of_4_bits_start_and_step_as_on_the_cpu(store, policy):
    made = world.make(store, policy, world.even_share)
    found, expected = (
        world.weights(
            optimize(
                store, policy, made, device, precision="fp32", lora=NF4, eps=1.0, epochs=2,
                audit={"enabled": False},
            ),
            ADAPTER,
        )
        for device in (DEVICE, "cpu")
    )  # fmt: skip
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    assert max(float(value.abs().max()) for name, value in expected.items() if "_B" in name) > 1e-5


# -- memory that runs out


def _many_rollouts(store, policy, groups: int = 64, each: int = 8, longest: int = 192):
    """Rollouts of random ids with the policy's own logprobs, and rewards: a hundred thousand
    tokens."""
    draw = torch.Generator().manual_seed(0)
    model = load_model(policy, dtype=torch.float32)
    rows = []
    for number, prompt in enumerate(world.prompts(groups, low=8, high=9)):
        ids = torch.randint(3, 300, (each, longest), generator=draw)
        whole = torch.cat([torch.tensor([prompt] * each), ids], 1)
        with torch.no_grad():
            table = model(input_ids=whole).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        scores = table.gather(2, ids[..., None])[..., 0]
        for index in range(each):
            rows.append(
                {
                    "rollout_id": f"r-{number:03d}-{index}",
                    "group_id": f"g-{number:03d}",
                    "sample_index": index,
                    "prompt_ids": prompt,
                    "completion_ids": ids[index].tolist(),
                    "old_logprobs": scores[index].clamp(max=0).tolist(),
                    "finish_reason": "length",
                    "stop_reason": None,
                    "completion_text": "",
                    "temperature": 1.0,
                    "seed": 0,
                }
            )
    return world.scored(store, policy, rows)


def test_a_full_device_halves_the_micro_batches_and_the_loss_stays(store, policy):
    """The device's own error: the untouched run shows what one micro-batch of all rollouts takes,
    and all but seven tenths of that is occupied before the other one begins."""
    made = _many_rollouts(store, policy)
    options = {"precision": "fp32", "token_budget": 1 << 18, "epochs": 2, "eps": 1.0}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calm = optimize(store, policy, made, DEVICE, **options)
    taken = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    occupied = torch.empty(free - 7 * taken // 10, dtype=torch.uint8, device=DEVICE)
    short = optimize(store, policy, made, DEVICE, **options)
    del occupied
    assert calm.manifest.metrics["budget_halvings"] == 0
    assert short.manifest.metrics["budget_halvings"] >= 1
    for row, expected in zip(*(world.updates(store, each) for each in (short, calm)), strict=True):
        assert expected["microbatches"] == 1 < row["microbatches"]
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
