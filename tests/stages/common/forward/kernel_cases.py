"""What the kernels are tried on, and what they are held to: the same in float64 by plain
operations. Run by Triton's interpreter as a child (`python -m tests.stages.common.forward.
kernel_cases FILE`), which writes what they gave, and by tests/gpu on a GPU.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import MethodType, SimpleNamespace
from unittest import TestCase

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed import FileStore
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from quiver.stages.common.forward.gpu import choice, modules
from quiver.stages.common.forward.gpu import head as fused_head
from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.forward.logprob_head import Shaping, completion_logprobs
from quiver.stages.common.forward.policy import Policy
from quiver.stages.common.ragged import Ragged
from quiver.stages.optimize.sharding import ShardedPolicy

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Answer = dict[str, Tensor]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> Answer:
    """The outputs, and the gradients of their sum weighted at random."""
    loss = 0
    for seed, output in enumerate(outputs.values()):
        weights = drawn(*output.shape, seed=50 + seed).to(output)
        loss = loss + (weights * output.nan_to_num(0, 0, 0)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    named = {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: tensor.detach() for name, tensor in {**outputs, **named}.items()}


# -- the head, on logits that no product needs to reach

VOCABULARY = 5003
EXTREMES = ("ordinary", "a peak of 1e4", "all −1e4", "one −inf", "all but one −inf", "flat")


def extreme_logits() -> Tensor:
    logits = drawn(6, VOCABULARY, scale=5)
    logits[1, 7] = 1e4
    logits[2] = -1e4 + drawn(VOCABULARY, seed=1)
    logits[3, 4096] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 17] = 3.0
    logits[5] = 2.0
    return logits


TARGETS = torch.tensor([0, 7, VOCABULARY - 1, 4096, 17, 5000])
FACTORS = torch.tensor([1.0, 1.25, 0.5, 1.0, 2.0, 1.0])


def head_rows(logits: Tensor, *, collision: bool) -> Answer:
    """By kernels: what the head says of the logits, and the gradient by them."""
    from quiver.stages.common.forward.gpu import operations

    device = logits.device
    targets, factors = TARGETS.to(device), FACTORS.to(device)
    rows = operations.head(logits, targets, factors, collision)
    answer = {"logprobs": rows[0], "spread": rows[1]}
    if not collision:
        grads = [drawn(6, seed=50 + seed).to(device) for seed in range(2)]
        rows = torch.cat([torch.expm1(rows[:1]), rows[1:]])
        for name, entropy_grads in (("slope", None), ("slope with entropy", grads[1])):
            answer[name] = operations.head_slope(
                logits, targets, factors, rows, grads[0], entropy_grads, FP32
            )
    return answer


def head_rows_reference(logits: Tensor, *, collision: bool) -> Answer:
    z = (logits.double() * FACTORS.double()[:, None]).requires_grad_()
    table = z.log_softmax(-1)
    p = table.exp()
    logprobs = table.gather(1, TARGETS[:, None])[:, 0]
    if collision:
        return {"logprobs": logprobs.detach(), "spread": (p * p).sum(-1).detach()}
    entropy = -torch.where(p > 0, p * table.clamp(min=-1e30), 0.0).sum(-1)
    answer = {"logprobs": logprobs.detach(), "spread": entropy.detach()}
    grads = [drawn(6, seed=50 + seed).double() for seed in range(2)]
    one_hot = torch.nn.functional.one_hot(TARGETS, VOCABULARY)
    slope = grads[0][:, None] * (one_hot - p)
    of_entropy = -torch.where(p > 0, p * (table.clamp(min=-1e30) + entropy[:, None]), 0.0)
    factors = FACTORS.double()[:, None]
    answer["slope"] = (factors * slope).detach()
    answer["slope with entropy"] = (factors * (slope + grads[1][:, None] * of_entropy)).detach()
    return answer


def head(device: str, dtype: torch.dtype) -> Answer:
    """Hidden states and weight through it, in chunks of 4 rows."""
    from quiver.stages.common.forward.gpu.head import FusedHead

    leaves = {"hidden": drawn(11, 24), "weight": drawn(1031, 24, seed=1)}
    leaves = {name: leaf.to(device, dtype).requires_grad_() for name, leaf in leaves.items()}
    targets = torch.arange(0, 1031, 100, device=device)
    factors = torch.linspace(0.5, 1.5, 11, device=device)
    chunks = [slice(0, 4), slice(4, 8), slice(8, 12)]
    logprobs, entropy = FusedHead.apply(
        *leaves.values(), targets, factors, chunks, dtype, True, False
    )
    return gradients({"logprobs": logprobs, "entropy": entropy}, leaves)


def head_reference(dtype: torch.dtype) -> Answer:
    leaves = {"hidden": drawn(11, 24), "weight": drawn(1031, 24, seed=1)}
    leaves = {name: leaf.to(dtype).double().requires_grad_() for name, leaf in leaves.items()}
    factors = torch.linspace(0.5, 1.5, 11).double()[:, None]
    table = (leaves["hidden"] @ leaves["weight"].T * factors).log_softmax(-1)
    logprobs = table.gather(1, torch.arange(0, 1031, 100)[:, None])[:, 0]
    entropy = -(table * table.exp()).sum(-1)
    return gradients({"logprobs": logprobs, "entropy": entropy}, leaves)


# -- the head of a model, with what its architecture does to logits

HEADS = {
    "bias": (True, Shaping(), 11),
    "scale": (False, Shaping(scale=0.25), 11),
    "softcap": (False, Shaping(softcap=2.0), 11),
    "no rows": (False, Shaping(), 0),
}


def _head_leaves(case: str) -> dict[str, Tensor]:
    has_bias, _, num_rows = HEADS[case]
    leaves = {"hidden": drawn(num_rows, 24), "weight": drawn(97, 24, seed=1)}
    return {**leaves, "bias": drawn(97, seed=2)} if has_bias else leaves


def shaped_head(device: str, case: str) -> Answer:
    _, shaping, num_rows = HEADS[case]
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in _head_leaves(case).items()}
    linear = SimpleNamespace(weight=leaves["weight"], bias=leaves.get("bias"))
    targets = torch.arange(0, 97, 9, device=device)[:num_rows]
    temperature = torch.linspace(0.5, 1.5, 11, device=device)[:num_rows]
    logprobs, entropy = completion_logprobs(
        leaves["hidden"], linear, targets, temperature, shaping, entropy_gradient=True
    )
    if not num_rows:  # no gradient either
        return {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    return gradients({"logprobs": logprobs, "entropy": entropy}, leaves)


def shaped_head_reference(case: str) -> Answer:
    _, shaping, num_rows = HEADS[case]
    if not num_rows:
        return {"logprobs": torch.empty(0), "entropy": torch.empty(0)}
    leaves = {name: leaf.double().requires_grad_() for name, leaf in _head_leaves(case).items()}
    logits = leaves["hidden"] @ leaves["weight"].T + leaves.get("bias", 0)
    logits = logits * shaping.scale
    if shaping.softcap:
        logits = shaping.softcap * (logits / shaping.softcap).tanh()
    table = (logits / torch.linspace(0.5, 1.5, 11)[:, None]).log_softmax(-1)
    logprobs = table.gather(1, torch.arange(0, 97, 9)[:, None])[:, 0]
    return gradients({"logprobs": logprobs, "entropy": -(table * table.exp()).sum(-1)}, leaves)


# -- RMSNorm

NORMS = {
    "states": ((1, 41, 896), FP32, FP32),
    "odd width": ((7, 37), FP32, FP32),
    "heads": ((1, 13, 3, 40), BF16, FP32),
    "bfloat16": ((1, 41, 896), BF16, BF16),
    "one row": ((1, 1, 2048), FP32, FP32),
    # so wide that a program has a row at once, and so many that each has two turns
    "many rows": ((1, 520, 1025), FP32, FP32),
}


def _norm_leaves(case: str) -> dict[str, Tensor]:
    shape, states_dtype, weight_dtype = NORMS[case]
    states = drawn(*shape)
    states.view(-1, shape[-1])[0] = 0  # a place that only fills up
    states.view(-1, shape[-1])[-1] *= 1e4
    weight = 1 + drawn(shape[-1], seed=1)
    return {"states": states.to(states_dtype), "weight": weight.to(weight_dtype)}


def norm(device: str, case: str) -> Answer:
    from quiver.stages.common.forward.gpu.modules import Norm

    leaves = _norm_leaves(case)
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
    states = leaves["states"]
    if case == "heads":  # as they lie in one product's output
        wide = torch.cat([states.flatten(2), states.flatten(2)], -1)
        states = wide.split([120, 120], -1)[0].unflatten(-1, (3, 40))
    return gradients(
        {"output": Norm.apply(states, leaves["weight"], 1e-6, leaves["weight"].dtype)}, leaves
    )


def norm_reference(case: str) -> Answer:
    leaves = {name: leaf.double().requires_grad_() for name, leaf in _norm_leaves(case).items()}
    states = leaves["states"]
    scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6)
    return gradients({"output": leaves["weight"] * states * scale}, leaves)


SUMS = {"float32 and bfloat16": (FP32, BF16), "float32": (FP32, FP32), "bfloat16": (BF16, BF16)}


def _sum_leaves(case: str) -> dict[str, Tensor]:
    states_dtype, branch_dtype = SUMS[case]
    states, branch = drawn(1, 41, 101), drawn(1, 41, 101, seed=1)
    states[0, 0] = branch[0, 0] = 0
    states[0, 1] *= 1e4
    weight = 1 + drawn(101, seed=2)
    states, branch = states.to(states_dtype), branch.to(branch_dtype)
    return {"states": states, "branch": branch, "weight": weight.to(states_dtype)}


def summed(device: str, case: str) -> Answer:
    from quiver.stages.common.forward.gpu.modules import AddNorm

    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in _sum_leaves(case).items()}
    total, output = AddNorm.apply(*leaves.values(), 1e-6, SUMS[case][0])
    return gradients({"total": total, "output": output}, leaves)


def summed_reference(case: str) -> Answer:
    leaves = {name: leaf.double().requires_grad_() for name, leaf in _sum_leaves(case).items()}
    total = leaves["states"] + leaves["branch"]
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    return gradients({"total": total, "output": leaves["weight"] * total * scale}, leaves)


# -- the gated MLP

GATES = {"float32": FP32, "bfloat16": BF16}


def _gate_leaves(dtype: torch.dtype) -> dict[str, Tensor]:
    gate, up = drawn(9, 1031, scale=3), drawn(9, 1031, seed=1)
    gate[0, :4] = torch.tensor([1e4, -1e4, -90.0, 0.0])
    gate[8] = up[8] = 0
    return {"gate": gate.to(dtype), "up": up.to(dtype)}


def gated(device: str, dtype: torch.dtype) -> Answer:
    from quiver.stages.common.forward.gpu.modules import Gate

    both = torch.cat([leaf.to(device) for leaf in _gate_leaves(dtype).values()], 1)
    leaves = {"both": both.requires_grad_()}
    gate, up = (part[None] for part in both.split(1031, 1))
    return gradients({"output": Gate.apply(gate, up)}, leaves)


def gated_reference(dtype: torch.dtype) -> Answer:
    both = torch.cat([leaf.double() for leaf in _gate_leaves(dtype).values()], 1)
    gate, up = both.requires_grad_().split(1031, 1)
    return gradients({"output": (torch.nn.functional.silu(gate) * up)[None]}, {"both": both})


# -- rotary positions

ROTATIONS = {"of bfloat16": (BF16, 10), "of float32": (FP32, 64)}


def _rotation_parts(case: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    dtype, width = ROTATIONS[case]
    leaves = {"queries": drawn(1, 19, 3, width), "keys": drawn(1, 19, 1, width, seed=1)}
    angles = drawn(1, 19, width, seed=2, scale=100)
    leaves = {name: leaf.to(dtype) for name, leaf in leaves.items()}
    return leaves, angles.cos(), angles.sin()


def rotated(device: str, case: str) -> Answer:
    from quiver.stages.common.forward.gpu.modules import rotate

    leaves, cosines, sines = _rotation_parts(case)
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
    states = (leaf.transpose(1, 2) for leaf in leaves.values())
    queries, keys = rotate(None, *states, cosines.to(device), sines.to(device))
    return gradients({"queries": queries, "keys": keys}, leaves)


def rotation_reference(case: str) -> Answer:
    leaves, cosines, sines = _rotation_parts(case)
    leaves = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
    turned = {}
    for name, leaf in leaves.items():
        states = leaf.transpose(1, 2)
        low, high = states.chunk(2, -1)
        half = torch.cat([-high, low], -1)
        turned[name] = states * cosines.double()[:, None] + half * sines.double()[:, None]
    return gradients(turned, leaves)


# -- keys and values of shared prompts

COPIES = {"bfloat16": (BF16, 40), "float32": (FP32, 600)}
"""The second needs more than one program for a row."""
ROW_OF_KEYS = np.array([3, 0, 1, 2, 3, 0, 1, 2, 4, 6, 6])
"""Row 5 of 7 has no copy, row 6 two side by side."""


def _copied_leaves(case: str) -> dict[str, Tensor]:
    dtype, width = COPIES[case]
    names = "keys", "values"
    return {name: drawn(7, 2, width, seed=seed).to(dtype) for seed, name in enumerate(names)}


def copied(device: str, case: str) -> Answer:
    from quiver.stages.common.forward.gpu.copies import Copies, in_order

    leaves = {k: leaf.to(device).requires_grad_() for k, leaf in _copied_leaves(case).items()}
    index = torch.from_numpy(ROW_OF_KEYS).to(device)
    order = (torch.from_numpy(array).to(device) for array in in_order(ROW_OF_KEYS, 7))
    outputs = Copies.apply(*leaves.values(), index, *order)
    # their gradients are parts of one tensor, so that rows lie apart
    outputs = torch.cat(outputs, 1).split(outputs[0].shape[1], 1)
    return gradients(dict(zip(("copied keys", "copied values"), outputs, strict=True)), leaves)


def copied_reference(case: str) -> Answer:
    leaves = {k: leaf.double().requires_grad_() for k, leaf in _copied_leaves(case).items()}
    outputs = {f"copied {name}": leaf[ROW_OF_KEYS.tolist()] for name, leaf in leaves.items()}
    return gradients(outputs, leaves)


CASES: dict[str, tuple[Callable[[str], Answer], Callable[[], Answer], float]] = {
    "head of extreme logits": (
        lambda device: head_rows(extreme_logits().to(device), collision=False),
        lambda: head_rows_reference(extreme_logits(), collision=False),
        1e-6,
    ),
    "head's collisions": (
        lambda device: head_rows(extreme_logits().to(device), collision=True),
        lambda: head_rows_reference(extreme_logits(), collision=True),
        1e-6,
    ),
    "head of float32": (lambda d: head(d, FP32), lambda: head_reference(FP32), 1e-5),
    "head of bfloat16": (lambda d: head(d, BF16), lambda: head_reference(BF16), 1.5e-2),
    **{
        f"head with {case}": (
            lambda device, case=case: shaped_head(device, case),
            lambda case=case: shaped_head_reference(case),
            1e-5,
        )
        for case in HEADS
    },
    **{
        f"norm: {case}": (
            lambda device, case=case: norm(device, case),
            lambda case=case: norm_reference(case),
            1e-5 if NORMS[case][1] == FP32 else 6e-3,
        )
        for case in NORMS
    },
    **{
        f"sum and norm: {case}": (
            lambda device, case=case: summed(device, case),
            lambda case=case: summed_reference(case),
            1e-5 if case == "float32" else 8e-3,
        )
        for case in SUMS
    },
    **{
        f"gate: {case}": (
            lambda device, dtype=dtype: gated(device, dtype),
            lambda dtype=dtype: gated_reference(dtype),
            1e-6 if dtype == FP32 else 6e-3,
        )
        for case, dtype in GATES.items()
    },
    **{
        f"rotation: {case}": (
            lambda device, case=case: rotated(device, case),
            lambda case=case: rotation_reference(case),
            1e-6 if ROTATIONS[case][0] == FP32 else 4e-3,
        )
        for case in ROTATIONS
    },
    **{
        f"copies: {case}": (
            lambda device, case=case: copied(device, case),
            lambda case=case: copied_reference(case),
            1e-6 if COPIES[case][0] == FP32 else 4e-3,
        )
        for case in COPIES
    },
}
"""Of each case the kernels' answer on a device, the reference, and the largest difference that is
rounding, as a share of the norm."""


def largest_gap(answer: Answer, reference: Answer) -> float:
    """Of all tensors of the two, as a share of the norm; infinity where one is not finite where the
    other is."""
    gaps = []
    for name, given in reference.items():
        output, expected = answer[name].double().cpu(), given.double().cpu()
        is_finite = expected.isfinite()
        if not torch.equal(output[~is_finite], expected[~is_finite].to(output)):
            return torch.inf
        gap = (output - expected)[is_finite].norm()
        gaps.append(gap / expected[is_finite].norm().clamp(min=1e-30))
    return float(torch.stack(gaps).nan_to_num(torch.inf).max())


# -- what computes something else under the names of the common families


class Clamped(LlamaMLP):
    """As MLPs with `swiglu_limit`."""

    def forward(self, states: Tensor) -> Tensor:
        gate = self.gate_proj(states).clamp(max=10.0)
        up = self.up_proj(states).clamp(-10.0, 10.0)
        return self.down_proj(self.act_fn(gate) * up)


class Clipped(LlamaRMSNorm):
    """A norm of which a state that stands out is made smaller."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states).clamp(-5.0, 5.0)


class PassedStraight(LlamaRMSNorm):
    """A norm with another gradient."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states).detach() + states - states.detach()


class Wrapped(LlamaDecoderLayer):
    """A layer that returns a tuple, as those of older families."""

    def forward(self, *arguments: Tensor, **options: object) -> tuple[Tensor]:
        return (super().forward(*arguments, **options),)


class Faint(LlamaMLP):
    """With small weights GELU's curve differs from SiLU's by less than bfloat16 shows."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.act_fn = nn.GELU()
        for weight in self.parameters():
            nn.init.normal_(weight, std=1e-7)


def strangers() -> list[nn.Module]:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, attn_implementation="eager"
    )
    torch.manual_seed(0)
    return [
        Clamped(config),
        Clipped(64),
        PassedStraight(64),
        Wrapped(config, 0),
        Faint(config).bfloat16(),
    ]


def strangers_replaced() -> dict[str, bool]:
    """Of each whether a kernel takes its place."""
    replaced = {}
    for module in strangers():
        modules.fuse_modules(nn.ModuleList([module]))
        replaced[type(module).__name__] = "forward" in vars(module)
    return replaced


class Coarse(LlamaMLP):
    """An MLP whose products differ as two of TF32 do."""

    def forward(self, states: Tensor) -> Tensor:
        return 1.0005 * super().forward(states)


def coarse_replaced() -> dict[str, int]:
    """How many of one such MLP are replaced, by what products of float32 are allowed to be."""
    replaced = {}
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        mlp = Coarse(LlamaConfig(hidden_size=64, intermediate_size=96))
        replaced[precision] = modules.fuse_modules(nn.ModuleList([mlp]))
    torch.set_float32_matmul_precision("highest")
    return replaced


def told() -> list[str]:
    """What is logged of two modules that compute something else, and of a head where products of
    narrow matrices are narrow."""
    with TestCase().assertLogs("quiver", "INFO") as logged:
        modules.fuse_modules(nn.ModuleList([Clipped(64), Clipped(64)]))
        fused_head.is_fused(torch.ones(1, dtype=FP16), torch.ones(1, dtype=FP16), FP16)
    return [f"{record.levelname} {record.getMessage()}" for record in logged.records]


# -- the operations as torch has them


def operations_checked() -> dict[str, dict[str, str]]:
    """What torch says of each operation: of its schema, and of what it says of tensors without
    content."""
    from quiver.stages.common.forward.gpu import operations

    logits, rows = drawn(6, 97), drawn(4, 6)
    targets, factors = torch.arange(6), torch.ones(6)
    states, wide = drawn(6, 64).to(BF16), drawn(6, 64)
    weight, gates, ups = torch.ones(64), *drawn(6, 256).split(128, 1)
    positions = drawn(5, 8)
    samples = {
        "head": [(logits, targets, factors, is_collision) for is_collision in (False, True)],
        "head_slope": [
            (logits, targets, factors, rows, factors, grads, dtype)
            for grads, dtype in ((None, BF16), (factors, FP32))
        ],
        "norm": [(states, weight, 1e-6, BF16), (states, weight.to(BF16), 1e-6, FP32)],
        "add_norm": [(wide, states, weight, 1e-6, BF16), (states, states, weight, 1e-6, FP32)],
        "norm_slope": [
            (grad, total_grad, states, weight, factors, dtype)
            for grad, total_grad, dtype in ((states, None, None), (wide, states, FP32))
        ],
        "gate": [(gates, ups)],
        "gate_slope": [(drawn(6, 128), gates, ups)],
        "rotate": [(drawn(5, 3, 8), drawn(5, 1, 8), positions, positions, False, FP32, BF16)],
        "add_copies": [(wide, states.float(), torch.arange(6), torch.tensor([0, 2, 2, 6]))],
    }
    all_names = {name for name, each in vars(operations).items() if hasattr(each, "register_fake")}
    assert samples.keys() == all_names
    said = {}
    for name, each in samples.items():
        for number, arguments in enumerate(each):
            outcomes = torch.library.opcheck(
                getattr(operations, name), arguments, raise_exception=False
            )
            said[f"{name} {number}"] = {test: str(outcome) for test, outcome in outcomes.items()}
    return said


# -- whole passes

PASSES = {
    # two layers with two norms, MLP and attention each, and the last norm
    "llama": (LlamaConfig, 11),
    # queries and keys are normalized too
    "qwen3": (Qwen3Config, 15),
    # biases of the projections
    "qwen2": (Qwen2Config, 11),
    # other norms and another activation: the rotations alone
    "gemma2": (Gemma2Config, 2),
    "gpt2": (GPT2Config, 0),
    # what a layer adds is scaled: its parts alone
    "granite": (GraniteConfig, 9),
}
"""Kinds of models, and how many of their modules are replaced."""
NARROW = ("llama", "qwen3")
"""Those that are tried in bfloat16 too."""


WAYS = {
    # a rollout's layers are made again in the backward pass
    "checkpointing": 11,
    # torch's FSDP2; the one rank has all of the weights
    "sharded": 11,
    # adapters beside four of the layers: no projections are joined
    "lora": 11,
}
"""Ways of training a llama, and how many of its modules are replaced."""


def _model(kind: str, way: str) -> nn.Module:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    if kind == "gpt2":
        sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}
    if kind == "gemma2":
        sizes |= {"final_logit_softcapping": 5.0, "attn_logit_softcapping": None}
    if kind == "granite":
        sizes |= {"residual_multiplier": 0.5}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(PASSES[kind][0](**sizes)).eval()
    if way == "lora":
        names = ["q_proj", "o_proj", "gate_proj", "down_proj"]
        model = inject_adapter_in_model(LoraConfig(r=4, target_modules=names), model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, mean=0.0 if parameter.ndim > 1 else 0.7)
    if way == "checkpointing":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return model


def passed(policy: Policy) -> Answer:
    """Logprobs and entropy of three rollouts of two prompts, and the gradients of what is
    trained."""
    policy.set_mode("shared")
    ids = torch.randint(97, (61,), generator=torch.Generator().manual_seed(0))
    sequences = Sequences(
        Ragged.from_lengths(ids[:21].repeat(3), torch.tensor([21, 21, 21])),
        Ragged.from_lengths(ids[21:], torch.tensor([9, 30, 1])),
        torch.tensor([1.0, 0.7, 1.2]),
    )
    (pieces,) = policy.microbatches(range(3), [0, 0, 1], sequences, 1000)
    with policy.context():
        logprobs, entropy, _ = policy(policy.layout(pieces, sequences))
        (drawn(40).to(logprobs) * logprobs).sum().backward()
    answer = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            grad, parameter.grad = parameter.grad, None
            answer[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return answer


def passes(
    kind: str, *, autocast: bool = False, device: str = "cpu", way: str = ""
) -> dict[str, Answer | int]:
    """By kernels, as the model does it, and the latter in float64."""
    before = set(choice.DEVICES)
    choice.DEVICES.clear()
    model = _model(kind, way)
    exact = Policy(copy.deepcopy(model).double().to(device), autocast=False)
    model.to(device)
    answers = {"exact": passed(exact), "plain": passed(Policy(model, autocast=autocast))}
    choice.DEVICES.add(device)
    if way == "sharded":
        port = FileStore(f"{tempfile.mkdtemp()}/ranks", 1)
        torch.distributed.init_process_group("gloo", store=port, rank=0, world_size=1)
        policy = ShardedPolicy(model, device=torch.device(device), autocast=autocast)
    else:
        policy = Policy(model, autocast=autocast)
        policy.set_mode("shared")
        policy.fuse()
    replaced = [vars(module).get("forward") for module in model.modules()]
    is_ours = [
        (isinstance(forward, MethodType) and forward.__func__.__name__ == "forward")
        or (isinstance(forward, partial) and forward.func.__module__ == modules.__name__)
        for forward in replaced
    ]
    answers["fused"] = passed(policy)
    if way == "sharded":
        torch.distributed.destroy_process_group()
    choice.DEVICES.clear()
    choice.DEVICES.update(before)
    return {**answers, "replaced": sum(is_ours)}


if __name__ == "__main__":
    import_module("tests.interpreted_kernels")  # it stands for this process
    answers = {
        f"{kind}, {autocast}": passes(kind, autocast=autocast)
        for kind in PASSES
        for autocast in ((False, True) if kind in NARROW else (False,))
    }
    answers |= {way: passes("llama", way=way) for way in WAYS}
    answers |= {"strangers": strangers_replaced(), "operations": operations_checked()}
    answers |= {"coarse": coarse_replaced(), "told": told()}
    answers |= {name: ours("cpu") for name, (ours, _, _) in CASES.items()}
    torch.save(answers, sys.argv[1])
