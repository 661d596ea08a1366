"""The optimize stage on a CUDA device: the CPU's step in float32, its own logprobs in bfloat16
within the audit's limit, vLLM's in float32 and with FP8 weights, and attention by fused kernels
alone."""

from functools import partial

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from quiver.stages.core.run.call import Call
from quiver.stages.core.run.stage_process import run_call
from quiver.stages.model.forward.attention import block_attention
from quiver.stages.model.forward.gpu.flash import implemented_by
from quiver.stages.model.forward.layout import Sequences, make_layout
from quiver.stages.model.forward.packing import make_pieces
from quiver.stages.model.forward.transfer import to_device
from quiver.stages.model.forward.verify import KERNELS
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize.stage import Config
from tests import flash
from tests.stages.generate.making import random_prompts
from tests.stages.optimize import world
from tests.writing import run_here

run = partial(run_here, "optimize")


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def optimize(store, policy, made, device, prox_logprobs=None, **values):
    AcceleratorState._reset_state(True)  # else a second run stays on the first one's device
    config = Config(learning_rate=1e-3, grad_clip=1e9, device=device, **values)
    refs = {"policy": policy.ref, "rollouts": made[0].ref, "rewards": made[1].ref}
    refs |= {"prox_logprobs": prox_logprobs} if prox_logprobs else {}
    done = store.open(run(config, store, **refs, force=True))
    assert done.manifest.environment["device"] == device
    return done


def sample(store, policy, **values):
    """Rollouts by vLLM on the GPU, with its CUDA graphs, in a process of its own, and rewards for
    them."""
    config = {
        "device": "cuda",
        "samples_per_prompt": 4,
        "sampling": {"temperature": 0.8, "max_tokens": 32},
        **values,
    }
    refs = {"prompts": str(random_prompts(store, 8).ref), "policy": str(policy.ref)}
    rollouts = store.open(run_call(Call("generate", config, store.url, refs)).ref)
    assert rollouts.manifest.environment["device"] == "cuda"
    return rollouts, world.write_rewards(store, rollouts, world.even_share)


@pytest.mark.usefixtures("exact_products")
def test_float32_takes_the_cpus_step(store, policy):
    made = world.make(store, policy, world.even_share)
    rows = [
        store.open(
            optimize(store, policy, made, device, precision="fp32").manifest.metrics["updates"]
        ).table()
        for device in ("cpu", "cuda")
    ]
    for name in ("loss", "grad_norm", "entropy"):
        assert rows[1][name].to_pylist() == pytest.approx(
            rows[0][name].to_pylist(), rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_passes_the_audit_and_saves_the_weights(store, policy, dtype):
    made = world.make(store, policy, world.even_share)
    done = optimize(store, policy, made, "cuda", save_dtype=str(dtype).removeprefix("torch."))
    assert done.manifest.metrics["precision"] == "bf16"
    assert 0 < done.manifest.metrics["audit"]["mean_gap"] < 0.1
    assert {
        tensor.dtype for tensor in load_file(done.files.folder / "model.safetensors").values()
    } == {dtype}


@pytest.mark.usefixtures("exact_products")
def test_adapters_start_and_step_as_on_the_cpu(store, policy):
    made, found = world.make(store, policy, world.even_share), []
    for device in ("cpu", "cuda"):
        done = optimize(store, policy, made, device, precision="fp32", lora={"rank": 4}, eps=1.0)
        found.append(load_file(done.files.folder / "adapter" / "adapter_model.safetensors"))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-6)
    assert (
        max(float(value.abs().max()) for name, value in found[0].items() if "lora_B" in name) > 1e-5
    )


@pytest.mark.vllm
def test_what_vllm_samples_in_float32_the_trainer_reproduces(store, policy):
    made = sample(store, policy, dtype="float32")
    metrics = optimize(
        store, policy, made, "cuda", precision="fp32", audit={"max_mean_gap": 1e-3}
    ).manifest.metrics
    assert metrics["audit"]["mean_gap"] <= 1e-3
    assert metrics["audit"]["rollouts"] + metrics["zero_advantage"] == len(made[0].table()) == 32


@pytest.mark.vllm
def test_what_vllm_samples_with_fp8_weights_is_corrected_and_near_the_trainers(store, policy):
    """As recipes/fp8.toml does: proximal logprobs by the trainer's numerics, and weights that are
    truncated. The policy's first ratio is 1 then, however much the engine rounds."""
    audits, clipped = {}, {}
    for name, arguments in (("bfloat16", {}), ("fp8", {"quantization": "fp8_per_tensor"})):
        made = sample(store, policy, dtype="bfloat16", options={"engine_args": arguments})
        config = {"role": "prox", "precision": "fp32", "device": "cuda"}
        refs = {"rollouts": str(made[0].ref), "policy": str(policy.ref)}
        prox = run_call(Call("logprobs", config, store.url, refs)).ref
        correction = {"mode": "truncate", "level": "token", "high": 2.0}
        options = {"precision": "fp32", "correction": correction, "prox_logprobs": prox}
        metrics = optimize(store, policy, made, "cuda", **options).manifest.metrics
        audits[name] = metrics["audit"]
        clipped[name] = metrics["first_clip_fraction"]
    assert audits["bfloat16"]["mean_gap"] < audits["fp8"]["mean_gap"] < 0.1
    assert audits["fp8"]["quantization"] == audits["fp8"]["prox"]["quantization"]
    assert audits["fp8"]["quantization"] == "quantization = fp8_per_tensor"
    assert "quantization" not in audits["bfloat16"]
    assert clipped == {"bfloat16": 0, "fp8": 0}


# -- attention

PROMPTS, COMPLETIONS = [40, 40, 40, 9], [50, 61, 1, 33]


def _ragged(lengths: list[int]) -> Ragged:
    return Ragged.from_lengths(torch.zeros(sum(lengths), dtype=torch.int32), torch.tensor(lengths))


def _attend(
    states: list[torch.Tensor],
    device: str,
    dtype: torch.dtype,
    window: int | None,
    *,
    varlen: bool = False,
) -> list[torch.Tensor]:
    """Output and gradients for three rollouts that share a prompt and one alone; four query heads
    to two key heads."""
    data = Sequences(_ragged(PROMPTS), _ragged(COMPLETIONS), torch.ones(4))
    layout = make_layout(
        make_pieces(range(4), [0, 0, 0, 1], PROMPTS, COMPLETIONS, 10_000),
        data,
        varlen=varlen,
    )
    layout = to_device(layout, device)
    own = [each[:, :, : layout.ids.shape[1]].to(device, dtype).requires_grad_() for each in states]
    out, _ = block_attention(None, *own, None, layout=layout, sliding_window=window)
    out.float().square().sum().backward()
    return [out.detach().cpu().float(), *[each.grad.cpu().float() for each in own]]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 1e-1)])
def test_fused_kernels_are_enough(dtype, tolerance, window):
    torch.manual_seed(0)
    states = [torch.randn(1, heads, sum(PROMPTS) + sum(COMPLETIONS), 32) for heads in (4, 2, 2)]
    expected = _attend(states, "cpu", torch.float32, window)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = _attend(states, "cuda", dtype, window)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 16])
def test_the_kernel_for_any_lengths_gives_the_numbers_of_float32(window):
    torch.manual_seed(0)
    states = [torch.randn(1, heads, sum(PROMPTS) + sum(COMPLETIONS), 32) for heads in (4, 2, 2)]
    expected = _attend(states, "cpu", torch.float32, window)
    for mine, theirs in zip(
        _attend(states, "cuda", torch.bfloat16, window, varlen=True), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-1, atol=1e-1)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    ("kernel", "package", "capabilities"),
    [("FA3", "flash_attn_interface", [9]), ("FA4", "flash_attn.cute.interface", [9, 10])],
)
def test_flash_attention_3_and_4_give_the_numbers_of_float64(kernel, package, capabilities, window):
    """Prompts and completions make stretches without keys, and without queries."""
    pytest.importorskip(package, reason=f"{kernel} is not installed here")
    if torch.cuda.get_device_capability()[0] not in capabilities:
        pytest.skip(f"{kernel} does not run on this GPU")
    torch.manual_seed(0)
    states = [torch.randn(1, heads, sum(PROMPTS) + sum(COMPLETIONS), 64) for heads in (4, 2, 2)]
    with flash.on_cpu():
        expected = _attend(states, "cpu", torch.float64, window, varlen=True)
    with implemented_by(kernel):
        found = _attend(states, "cuda", torch.bfloat16, window, varlen=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


def test_a_stage_in_bfloat16_takes_a_kernel_for_any_lengths(store, policy):
    made = world.make(store, policy, world.even_share)
    done = optimize(store, policy, made, "cuda", precision="bf16")
    assert done.manifest.metrics["attention"] in KERNELS
