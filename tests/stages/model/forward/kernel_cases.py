"""What the kernels are tried on, and what they are held to: the same in float64 by plain
operations. Run by Triton's interpreter as a child (`python -m tests.stages.model.forward.
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
from typing import NamedTuple
from unittest import TestCase
from unittest.mock import patch

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed import FileStore
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from quiver.stages.model.forward import modules
from quiver.stages.model.forward.gpu import choice, flash
from quiver.stages.model.forward.gpu import head as fused_head
from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize.sharding import ShardedPolicy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Answer = dict[str, Tensor]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Leaves = dict[str, Tensor]


class Case(NamedTuple):
    """Kernels, the same in plain operations, and the tensors that both take."""

    leaves: Leaves
    ours: Callable[..., Answer]
    """The kernels' outputs for the leaves."""
    exact: Callable[..., Answer]
    """The same by plain operations."""
    tolerance: float
    """The largest difference that is rounding, as a share of the norm."""
    has_gradients: bool = True
    most_shares: int = choice.MOST_SHARES
    """Most programs that share a sum. If they are few, each takes several turns for few rows; many
    rows take long in Triton's interpreter, which runs one program at a time."""

    def answer(self, device: str) -> Answer:
        """What the kernels give on a device."""
        from quiver.stages.model.forward.gpu import operations

        with patch.object(operations, "MOST_SHARES", self.most_shares):
            return self._run(self.ours, lambda leaf: leaf.to(device))

    def reference(self) -> Answer:
        """The same in float64."""
        return self._run(self.exact, Tensor.double)

    def _run(self, function: Callable[..., Answer], convert: Callable[[Tensor], Tensor]) -> Answer:
        """The outputs, and the gradients of their sum weighted at random."""
        leaves = {
            name: convert(leaf).requires_grad_(self.has_gradients)
            for name, leaf in self.leaves.items()
        }
        outputs = function(**leaves)
        grads = {}
        if self.has_gradients:
            weights = [drawn(*o.shape, seed=50 + n).to(o) for n, o in enumerate(outputs.values())]
            grads = torch.autograd.grad([*outputs.values()], [*leaves.values()], weights)
            grads = dict(zip((f"grad of {name}" for name in leaves), grads, strict=True))
        return {name: tensor.detach() for name, tensor in {**outputs, **grads}.items()}


CASES: dict[str, Case] = {}

# -- the head, on logits that no product needs to reach

VOCABULARY = 5003
TARGETS = torch.tensor([0, 7, VOCABULARY - 1, 4096, 17, 5000])
FACTORS = torch.tensor([1.0, 1.25, 0.5, 1.0, 2.0, 1.0])


def extreme_logits() -> Tensor:
    """An ordinary row, a peak of 1e4, all near −1e4, one −inf, all but one −inf, all equal."""
    logits = drawn(6, VOCABULARY, scale=5)
    logits[1, 7] = 1e4
    logits[2] = -1e4 + drawn(VOCABULARY, seed=1)
    logits[3, 4096] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 17] = 3.0
    logits[5] = 2.0
    return logits


def head_rows(logits: Tensor, *, collision: bool) -> Answer:
    """What the head gives for the logits, and the gradient by it."""
    from quiver.stages.model.forward.gpu import operations

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


def head_rows_exact(logits: Tensor, *, collision: bool) -> Answer:
    factors = FACTORS.double()[:, None]
    table = (logits * factors).log_softmax(-1)
    p = table.exp()
    answer = {"logprobs": table.gather(1, TARGETS[:, None])[:, 0], "spread": (p * p).sum(-1)}
    if not collision:
        table = table.clamp(min=-1e30)
        answer["spread"] = entropy = -(p * table).sum(-1, keepdim=True)
        grads = [drawn(6, seed=50 + seed).double()[:, None] for seed in range(2)]
        slope = grads[0] * (nn.functional.one_hot(TARGETS, VOCABULARY) - p)
        answer["spread"] = entropy[:, 0]
        answer["slope"] = factors * slope
        answer["slope with entropy"] = factors * (slope - grads[1] * p * (table + entropy))
    return answer


for name, collision in {"head of extreme logits": False, "head's collisions": True}.items():
    functions = (partial(each, collision=collision) for each in (head_rows, head_rows_exact))
    CASES[name] = Case({"logits": extreme_logits()}, *functions, 1e-6, has_gradients=False)

# -- the head of a model, with what its architecture does to logits


def targets_of(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """An id and a factor for each of up to 11 rows."""
    num_rows = len(hidden)
    targets, factors = torch.arange(0, 1031, 100)[:num_rows], torch.linspace(0.5, 1.5, 11)
    return targets.to(hidden.device), factors[:num_rows].to(hidden.device)


def head(hidden: Tensor, weight: Tensor) -> Answer:
    """In chunks of 4 rows."""
    chunks = [slice(start, start + 4) for start in range(0, len(hidden), 4)]
    targets, factors = targets_of(hidden)
    logprobs, entropy = fused_head.FusedHead.apply(
        hidden, weight, targets, factors, chunks, hidden.dtype, True, False
    )
    return {"logprobs": logprobs, "entropy": entropy}


def head_exact(hidden: Tensor, weight: Tensor) -> Answer:
    targets, factors = targets_of(hidden)
    table = (hidden @ weight.T * factors.double()[:, None]).log_softmax(-1)
    logprobs = table.gather(1, targets[:, None])[:, 0]
    return {"logprobs": logprobs, "entropy": -(table * table.exp()).sum(-1)}


for dtype, num_rows, tolerance in ((FP32, 11, 1e-5), (BF16, 11, 1.5e-2), (FP32, 0, 1e-5)):
    leaves = {"hidden": drawn(num_rows, 24).to(dtype), "weight": drawn(1031, 24, seed=1).to(dtype)}
    name = f"head of {num_rows} rows of {dtype}"
    CASES[name] = Case(leaves, head, head_exact, tolerance, has_gradients=num_rows > 0)

# -- RMSNorm, also of a sum


def norm(states: Tensor, weight: Tensor, branch: Tensor | None = None) -> Answer:
    if states.ndim == 4:  # heads as they lie in one product's output
        wide = torch.cat([states.flatten(2), states.flatten(2)], -1)
        states = wide.split(wide.shape[-1] // 2, -1)[0].unflatten(-1, states.shape[2:])
    total, output = modules.AddNorm.apply(states, branch, weight, 1e-6, weight.dtype)
    return {"output": output} if branch is None else {"total": total, "output": output}


def norm_exact(states: Tensor, weight: Tensor, branch: Tensor | None = None) -> Answer:
    total = states if branch is None else states + branch
    output = weight * total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    return {"output": output} if branch is None else {"total": total, "output": output}


for name, shape, states_dtype, weight_dtype, branch_dtype, tolerance in (
    ("states", (1, 41, 896), FP32, FP32, None, 1e-5),
    ("odd width", (7, 37), FP32, FP32, None, 1e-5),
    ("heads", (1, 13, 3, 40), BF16, FP32, None, 6e-3),
    ("bfloat16", (1, 41, 896), BF16, BF16, None, 6e-3),
    ("one row", (1, 1, 2048), FP32, FP32, None, 1e-5),
    # so wide that a program has a row at once, and so many that each has two turns
    ("many rows", (1, 20, 1025), FP32, FP32, None, 1e-5),
    ("sum of float32 and bfloat16", (1, 41, 101), FP32, FP32, BF16, 8e-3),
    ("sum of float32", (1, 41, 101), FP32, FP32, FP32, 1e-5),
    ("sum of bfloat16", (1, 41, 101), BF16, BF16, BF16, 8e-3),
):
    states, weight, branch = drawn(*shape), 1 + drawn(shape[-1], seed=1), drawn(*shape, seed=2)
    rows = states.view(-1, shape[-1])
    rows[-1] *= 1e4
    rows[0] = branch.view(-1, shape[-1])[0] = 0  # a place that only fills up
    leaves = {"states": states.to(states_dtype), "weight": weight.to(weight_dtype)}
    if branch_dtype is not None:
        leaves["branch"] = branch.to(branch_dtype)
    most_shares = 10 if name == "many rows" else choice.MOST_SHARES
    CASES[f"norm: {name}"] = Case(leaves, norm, norm_exact, tolerance, most_shares=most_shares)

# -- the gated MLP, whose gate and up lie side by side


def gated(both: Tensor) -> Answer:
    return {"output": modules.Gate.apply(*(part[None] for part in both.split(1031, 1)))}


def gated_exact(both: Tensor) -> Answer:
    gate, up = both.split(1031, 1)
    return {"output": (nn.functional.silu(gate) * up)[None]}


for dtype, tolerance in ((FP32, 1e-6), (BF16, 6e-3)):
    gate, up = drawn(9, 1031, scale=3), drawn(9, 1031, seed=1)
    gate[0, :4] = torch.tensor([1e4, -1e4, -90.0, 0.0])
    gate[8] = up[8] = 0
    leaves = {"both": torch.cat([gate, up], 1).to(dtype)}
    CASES[f"gate of {dtype}"] = Case(leaves, gated, gated_exact, tolerance)

# -- rotary positions


def rotated(angles: Tensor, queries: Tensor, keys: Tensor) -> Answer:
    states = (leaf.transpose(1, 2) for leaf in (queries, keys))
    positions = (position.to(queries.device) for position in (angles.cos(), angles.sin()))
    queries, keys = modules.rotate(None, *states, *positions)
    return {"queries": queries, "keys": keys}


def rotated_exact(angles: Tensor, **leaves: Tensor) -> Answer:
    turned = {}
    for name, leaf in leaves.items():
        states = leaf.transpose(1, 2)
        low, high = states.chunk(2, -1)
        half = torch.cat([-high, low], -1)
        turned[name] = states * angles.cos()[:, None] + half * angles.sin()[:, None]
    return turned


for dtype, width, tolerance in ((BF16, 10, 4e-3), (FP32, 64, 1e-6)):
    queries, keys = drawn(1, 19, 3, width), drawn(1, 19, 1, width, seed=1)
    angles = drawn(1, 19, width, seed=2, scale=100)
    functions = (partial(each, angles) for each in (rotated, rotated_exact))
    leaves = {"queries": queries.to(dtype), "keys": keys.to(dtype)}
    CASES[f"rotation of {dtype}"] = Case(leaves, *functions, tolerance)

# -- the same after norms of the heads


def normed_and_rotated(
    angles: Tensor, query_weight: Tensor, key_weight: Tensor, **leaves
) -> Answer:
    queries, keys = (leaf.transpose(1, 2) for leaf in leaves.values())
    positions = (position.to(queries.device) for position in (angles.cos(), angles.sin()))
    norms = [SimpleNamespace(weight=w, variance_epsilon=1e-6) for w in (query_weight, key_weight)]
    queries, keys = modules.rotate(None, queries, keys, *positions, norms=norms)
    return {"queries": queries, "keys": keys}


def normed_and_rotated_exact(
    angles: Tensor, queries: Tensor, keys: Tensor, query_weight: Tensor, key_weight: Tensor
) -> Answer:
    queries = norm_exact(queries, query_weight)["output"]
    keys = norm_exact(keys, key_weight)["output"]
    return rotated_exact(angles, queries=queries, keys=keys)


# of 100 tokens each of 8 programs takes two turns
for dtype, num_tokens, width, tolerance in ((BF16, 19, 10, 6e-3), (FP32, 100, 16, 1e-5)):
    angles = drawn(1, num_tokens, width, seed=2, scale=100)
    functions = (partial(each, angles) for each in (normed_and_rotated, normed_and_rotated_exact))
    leaves = {"queries": drawn(1, num_tokens, 3, width).to(dtype)}
    leaves["keys"] = drawn(1, num_tokens, 1, width, seed=1).to(dtype)
    leaves["query_weight"] = 1 + drawn(width, seed=3)
    leaves["key_weight"] = 1 + drawn(width, seed=4)
    CASES[f"norms and rotation of {dtype}"] = Case(leaves, *functions, tolerance, most_shares=8)

# -- attention over the keys of two calls


def merged(output: Tensor, log_sums: Tensor, more: Tensor, more_log_sums: Tensor) -> Answer:
    merged = flash.merge(output, log_sums, more, more_log_sums)
    return dict(zip(("merged output", "merged log-sums"), merged, strict=True))


def merged_exact(output: Tensor, log_sums: Tensor, more: Tensor, more_log_sums: Tensor) -> Answer:
    first, second = log_sums.exp(), more_log_sums.exp().nan_to_num(posinf=0)
    share = (second / (first + second)).T[..., None]
    return {
        "merged output": (1 - share) * output + share * more,
        "merged log-sums": (first + second).log(),
    }


for dtype, width, tolerance in ((BF16, 40, 4e-3), (FP32, 64, 1e-6)):
    output, more = (drawn(19, 3, width, seed=seed).to(dtype) for seed in range(2))
    log_sums, more_log_sums = (drawn(3, 19, seed=2 + seed, scale=5) for seed in range(2))
    # queries that saw no key in the second call, by one kernel's sign or another's
    more_log_sums[:, :4] = torch.inf
    more_log_sums[:, 4:8] = -torch.inf
    leaves = {"output": output, "log_sums": log_sums, "more": more, "more_log_sums": more_log_sums}
    CASES[f"merge of {dtype}"] = Case(leaves, merged, merged_exact, tolerance, has_gradients=False)


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


def has_kernel(module: nn.Module) -> bool:
    """True if its forward pass is by kernels, not only recomputed."""
    forward = vars(module).get("forward")
    if isinstance(forward, partial):
        is_kernel = forward.func in (modules._layer, modules._normalize)
        return is_kernel or (forward.func is modules._gate and forward.args[1])
    if not isinstance(forward, MethodType) or forward.__func__ is type(module).forward:
        return False  # the class's own, which torch's FSDP2 binds for an output embedding
    return forward.__func__.__name__ == "forward"


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
        replaced[type(module).__name__] = has_kernel(module)
    return replaced


class Coarse(LlamaMLP):
    """An MLP whose products differ as two of TF32 do."""

    def forward(self, states: Tensor) -> Tensor:
        return 1.0005 * super().forward(states)


class NormedLate(Qwen3Attention):
    """Queries and keys are rotated first."""

    def forward(self, hidden_states, position_embeddings, attention_mask, **options):
        states = [
            linear(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        ]
        queries, keys = apply_rotary_pos_emb(*states[:2], *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager_attention_forward)
        output, weights = attend(
            self, self.q_norm(queries), self.k_norm(keys), states[2], attention_mask
        )
        return self.o_proj(output.flatten(2)), weights


def norms_replaced() -> dict[str, bool]:
    """Of attention with norms before and after the rotation, whether the rotation makes them."""
    config = Qwen3Config(hidden_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    replaced = {}
    for kind in (Qwen3Attention, NormedLate):
        torch.manual_seed(0)
        attention = kind(config, 0)
        for norm in (attention.q_norm, attention.k_norm):
            nn.init.normal_(norm.weight)
        modules.fuse_modules(attention)
        replaced[kind.__name__] = isinstance(attention.forward.__self__, modules._Normless)
    return replaced


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


# -- whole passes

PASSES = {
    # two layers with two norms, MLP and attention each, and the last norm
    "llama": 11,
    # one layer, whose queries and keys are normalized too
    "qwen3": 8,
    # biases of the projections
    "qwen2": 6,
    # other norms and another activation: the rotation alone
    "gemma2": 1,
    "gpt2": 0,
    # what a layer adds is scaled: its parts alone; and so are its logits
    "granite": 5,
}
"""Kinds of models, and how many of their modules are replaced by kernels."""
NARROW = ("llama", "qwen3")
"""Those that are tried in bfloat16 too."""


WAYS = {
    # a rollout's layer is made again in the backward pass
    "checkpointing": 6,
    # torch's FSDP2 of two layers; the one rank has all of the weights
    "sharded": 11,
    # adapters beside four of the projections: none are joined
    "lora": 6,
}
"""Ways of training a llama, and how many of its modules are replaced."""


def _model(kind: str, way: str) -> nn.Module:
    num_layers = 2 if kind == "llama" and way in ("", "sharded") else 1
    sizes = {"hidden_size": 24, "intermediate_size": 40, "head_dim": 8}
    sizes["num_hidden_layers"] = num_layers
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    if kind == "gpt2":
        sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4}
    if kind == "gemma2":
        sizes |= {"final_logit_softcapping": 5.0, "attn_logit_softcapping": None}
    if kind == "granite":
        sizes |= {"residual_multiplier": 0.5, "logits_scaling": 2.0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes)).eval()
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
    answer = {}
    with policy.context():
        # gradients of the second micro-batch are added to those of the first
        for number, pieces in enumerate(policy.microbatches(range(3), [0, 0, 1], sequences, 60)):
            logprobs, entropy, _ = policy(policy.layout(pieces, sequences))
            (drawn(len(logprobs)).to(logprobs) * logprobs).sum().backward()
            answer |= {
                f"logprobs {number}": logprobs.detach(),
                f"entropy {number}": entropy.detach(),
            }
    assert number == 1
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
    answers["fused"] = passed(policy)
    if way == "sharded":
        torch.distributed.destroy_process_group()
    choice.DEVICES.clear()
    choice.DEVICES.update(before)
    return {**answers, "replaced": sum(map(has_kernel, model.modules()))}


if __name__ == "__main__":
    import_module("tests.interpreted_kernels")  # it stands for this process
    answers = {kind: passes(kind) for kind in PASSES}
    answers |= {f"{kind} in bfloat16": passes(kind, autocast=True) for kind in NARROW}
    answers |= {way: passes("llama", way=way) for way in WAYS}
    answers |= {"strangers": strangers_replaced(), "coarse": coarse_replaced(), "told": told()}
    answers["norms"] = norms_replaced()
    answers |= {name: case.answer("cpu") for name, case in CASES.items()}
    torch.save(answers, sys.argv[1])
