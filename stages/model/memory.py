"""Bytes that each stage holds at once, from the shape of a model alone.

    shape = shape_of(config)            # on torch's meta device: no weight is loaded
    memory = training(shape, 8192, on_gpu=True, precision="bf16")
    sum(memory.values())                # of one process, by use: weights, gradients, …
    choose_budget(bytes_of, …)          # the longest micro-batches that fit

The formulas describe this project's own passes; tests compare them with measured processes. For
each token and layer, a pass keeps these numbers for the backward pass: inputs and outputs of both
norms, queries, the keys and values of its row, attention outputs, gate and up. Norms and MLPs are
computed again in the backward pass, or are one kernel.

Not of the spine: nothing is trained or sampled differently by it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.model import vllm_env
from quiver.stages.model.devices import SLEEPING_BYTES, engine_gpus
from quiver.stages.model.families import loader_of, modalities_of
from quiver.stages.model.folder import load_errors
from quiver.stages.model.forward import logprob_head
from quiver.stages.model.forward.media import vision_parameters

USABLE = 0.97
"""Usable share of a device's memory; the rest is lost between blocks."""
_CPU_BUDGET = 2048
_GPU_BUDGETS = (65536, 49152, 32768, 24576, 16384, 12288, 8192)
_NOT_KNOWN = "start with a low optimize.token_budget, and look at the report's memory"

# Bytes of a process without a model, on a CPU and on a GPU: code, its allocations, CUDA's context.
_LIBRARIES = (0.6e9, 0.8e9)
_TRAINING_LIBRARIES = (0.85e9, 0.8e9)
_VLLM_LIBRARIES = (0.93e9, SLEEPING_BYTES)  # on a GPU with its CUDA graphs
_MOMENTS_8BIT = 2 * (1 + 4 / 256)
"""Bytes of a weight's two moments in 8 bits, and of their blocks' scales."""
_NF4 = 1 / 2 + 4 / 64
"""Bytes of a weight in 4 bits, and of its block's scale."""


@dataclass(frozen=True)
class Shape:
    """Counts of weights, and widths. Widths count only the experts a token is routed to; if layers
    differ, they are the largest."""

    weights: int
    outside_layers: int
    """Weights outside the layers: embeddings, last norm and head."""
    head: int
    """Weights of the output embedding, which may be shared with the input."""
    is_tied: bool
    largest_layer: int
    linear: int
    """Weights of linear layers within the layers."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; with experts, of all experts a token is routed to."""
    heads: int
    """Attention heads; tensor parallelism splits them evenly."""
    attention: int
    """Width of all heads' queries together."""
    keys: int
    """Width of all heads' keys together, and of their values."""

    @property
    def in_layers(self) -> int:
        return self.weights - self.outside_layers


def shape_of(config: transformers.PreTrainedConfig) -> Shape:
    """Return the shape of a model with this config. Raises ConfigError if it is not a decoder, or
    its sizes cannot be read."""
    name = f"model {config.model_type}"
    text = config.get_text_config(decoder=True)
    # transformers refuses to read a size that differs between layers from the whole config
    each = [*text.per_layer_config] if text.is_heterogeneous else [text]
    if config.is_encoder_decoder or not hasattr(each[0], "num_attention_heads"):
        raise _not_known(name, "it is not a decoder with attention")
    fields = config.to_dict()
    with load_errors(name), torch.device("meta"):
        model = loader_of(fields, modalities_of(fields)).from_config(config)
    modules = [*layers_of(model)]
    layers = [_count(layer) for layer in modules]
    if not layers:
        raise _not_known(name, "it has no layers of a known kind")
    try:
        intermediate, heads, attention, keys = map(max, zip(*map(_widths, each), strict=True))
    except Exception as error:  # each family names its sizes in its own way
        raise _not_known(name, f"{type(error).__name__}: {printable(error)}") from error
    head = model.get_output_embeddings().weight
    return Shape(
        weights=_count(model),
        outside_layers=_count(model) - sum(layers),
        head=head.numel(),
        is_tied=head is model.get_input_embeddings().weight,
        largest_layer=max(layers),
        linear=sum(
            part.weight.numel()
            for layer in modules
            for part in layer.modules()
            if type(part) is nn.Linear
        ),
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=intermediate,
        heads=heads,
        attention=attention,
        keys=keys,
    )


def _widths(config: transformers.PreTrainedConfig) -> tuple[int, int, int, int]:
    """Return `intermediate`, `heads`, `attention` and `keys` of a `Shape` from the text's config,
    or from one layer's."""

    def first(*names: str) -> Any:
        """Return the first of these fields that is set; architectures name them differently."""
        return next((size for name in names if (size := getattr(config, name, None))), 0)

    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    intermediate = first("intermediate_size", "n_inner", "ffn_dim") or 4 * config.hidden_size
    if isinstance(intermediate, list | tuple):  # one for each layer
        intermediate = max(intermediate)
    if experts:
        of_expert = first("moe_intermediate_size") or intermediate
        routed_to = (first("num_experts_per_tok") or 1) + first("n_shared_experts")
        intermediate = routed_to * of_expert + first("shared_expert_intermediate_size")
    heads = config.num_attention_heads
    head_width = first("head_dim") or config.hidden_size // heads
    keys = (first("num_key_value_heads") or heads) * head_width
    return intermediate, heads, heads * head_width, keys


def _not_known(name: str, why: str) -> ConfigError:
    return ConfigError(name, f"its memory cannot be estimated: {why}", next=_NOT_KNOWN)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layers_of(trunk: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that every pass runs one after another.

    They are the modules that transformers never splits over devices, or that it can recompute in
    the backward pass. Layers of the vision encoder, and layers that share weights with another, are
    left out.
    """
    names = set(getattr(trunk, "_no_split_modules", None) or ())
    of_vision = {id(parameter) for parameter in vision_parameters(trunk)}
    uses = uses_of(trunk)
    within: set[nn.Module] = set()
    for module in trunk.modules():
        is_layer = type(module).__name__ in names or isinstance(module, GradientCheckpointingLayer)
        if not is_layer or module in within:
            continue
        within.update(module.modules())
        if all(
            uses[number] == count and number not in of_vision
            for number, count in uses_of(module).items()
        ):
            yield module


def uses_of(module: nn.Module) -> Counter[int]:
    """Count how often each parameter occurs in `module`, by its `id`."""
    return Counter(
        id(parameter) for child in module.modules() for parameter in child.parameters(recurse=False)
    )


def choose_budget(
    bytes_of: Callable[[int, bool], Mapping[str, float]],
    device_bytes: float,
    budget: int | None,
    recomputes: bool | None,
) -> tuple[int, bool]:
    """Return the tokens of a micro-batch, and whether layers are recomputed in the backward pass.

    What is given stays. Otherwise it is the largest budget that fits into 92 % of a GPU less 1 GB,
    with layers recomputed only if none fits without. If none fits at all, it is the smallest budget
    with layers recomputed.

    Args:
        bytes_of: Bytes of the process by use, with this budget, and with or without recomputing.
            If it raises ConfigError, the smallest budget is taken, and nothing is recomputed.
        device_bytes: Memory of the GPU; 0 on a CPU, where nothing is chosen by memory.
        budget: A given budget.
        recomputes: True or False if given.
    """
    if not device_bytes:
        return budget or _CPU_BUDGET, bool(recomputes)
    budgets = (budget,) if budget else _GPU_BUDGETS
    ways = (False, True) if recomputes is None else (recomputes,)
    with suppress(ConfigError):
        for again, tokens in itertools.product(ways, budgets):
            if sum(bytes_of(tokens, again).values()) <= 0.92 * device_bytes - 1e9:
                return tokens, again
        return budgets[-1], ways[-1]
    return budgets[-1], ways[0]


# -- the stages


def training(
    shape: Shape,
    tokens: float,
    *,
    on_gpu: bool,
    precision: str,
    lora_rank: int | None = None,
    has_critic: bool = False,
    recomputes: bool = False,
    ranks: int = 1,
    is_8bit: bool = False,
    moments_on_host: bool = False,
    has_nf4_base: bool = False,
) -> dict[str, float]:
    """Return the bytes of a training process.

    Args:
        shape: The policy's.
        tokens: Tokens of the largest micro-batch.
        on_gpu: True if it trains on a GPU.
        precision: fp32, bf16 or bf16_stochastic.
        lora_rank: Rank of the adapters. Default: all weights are trained.
        has_critic: True if a second model of this shape is trained beside the policy.
        recomputes: True with activation checkpointing: layers keep only their inputs.
        ranks: Processes that shard weights, gradients and moments.
        is_8bit: True with moments in 8 bits, gradients in bfloat16 (float32 if sharded), and casts
            that are not kept between passes.
        moments_on_host: True if the moments take none of the GPU's memory.
        has_nf4_base: True if adapters are trained on linear layers of 4 bits.
    """
    trained = shape.weights
    weights = _weights(shape, precision)
    if precision == "bf16" and (ranks > 1 or (is_8bit and lora_rank is None)):
        weights = 4 * shape.weights  # casts are not kept
    if lora_rank is not None:
        # Queries, keys, values, gate and up each have their own adapter input, which a joint
        # product reads only once.
        sides = 7 * shape.hidden + 2 * (shape.attention + shape.keys) + 3 * shape.intermediate
        trained = lora_rank * sides * shape.layers
        if precision == "bf16" and ranks == 1:  # a frozen product's weights are bfloat16 alone
            weights -= 4 * shape.in_layers + (2 if shape.is_tied else 4) * shape.head
        if has_nf4_base:
            weights -= (_width(precision) - _NF4) * shape.linear
        weights += 4 * trained
    models = 2 if has_critic else 1
    width = _width(precision)
    of_gradient = 2 if is_8bit and ranks == 1 else 4
    of_moments = _MOMENTS_8BIT if is_8bit else 8
    memory = {
        "weights": models * weights / ranks,
        "gradients": models * of_gradient * trained / ranks,
        "moments": 0 if moments_on_host and on_gpu else models * of_moments * trained / ranks,
    }
    if ranks > 1:
        memory["whole for a moment"] = _whole(shape, width)
    elif is_8bit and lora_rank is None:
        # the head's gradient is summed in float32 before it is rounded
        memory["whole for a moment"] = 4 * shape.head
        if precision == "bf16":
            cast = shape.largest_layer if recomputes else shape.in_layers
            memory["whole for a moment"] += 2 * (cast + shape.head)
    elif has_nf4_base:
        memory["whole for a moment"] = width * shape.hidden * shape.intermediate
    stream = width if precision == "bf16_stochastic" else 4
    normed = 2 * shape.hidden if on_gpu else 0
    copies = 2
    if lora_rank is not None and width == 2:
        # adapters of five projections cast the same input, each for itself; and the projections
        # are not joined, so queries and keys are kept before the rotation too
        normed += 5 * shape.hidden
        copies = 3
    of_layer = 2 * shape.hidden * stream + width * (
        normed + copies * (shape.attention + shape.keys) + 2 * shape.intermediate
    )
    of_layers = of_layer * shape.layers
    if recomputes:
        of_layers = 4 * shape.hidden * shape.layers + of_layer
    memory["activations"] = tokens * of_layers
    return memory | {"logits": _logits(on_gpu), "libraries": _TRAINING_LIBRARIES[on_gpu]}


def scoring(shape: Shape, tokens: float, *, on_gpu: bool, precision: str) -> dict[str, float]:
    """Return the bytes of a process that computes logprobs; arguments as for `training`."""
    of_layer = 8 * shape.hidden + _width(precision) * (
        2 * shape.attention + 2 * shape.keys + 3 * shape.intermediate
    )
    return {
        "weights": _weights(shape, precision),
        "activations": tokens * of_layer,
        "logits": _logits(on_gpu),
        "libraries": _LIBRARIES[on_gpu],
    }


def sampling(
    shape: Shape,
    *,
    engine: str,
    options: Mapping[str, Any],
    width: int,
    longest: int,
    sequences: int,
    on_gpu: bool,
    device_bytes: float,
) -> dict[str, float]:
    """Return the bytes of an engine's process on one device.

    On a GPU, vLLM takes the share `gpu_memory_utilization`, and the cache gets what the weights
    leave. Elsewhere the cache holds all sequences, up to 40 % of the memory.

    Args:
        shape: The policy's.
        engine: vllm or transformers.
        options: The engine's options.
        width: Bytes of one weight and of one cached number.
        longest: Tokens of the longest sequence.
        sequences: Sequences decoded together at most.
        on_gpu: True if it samples on a GPU.
        device_bytes: Memory of the device.
    """
    is_vllm = engine == "vllm"
    split = split_of(options) if is_vllm and on_gpu else 1
    weights = shape.weights * width / split
    libraries = (_VLLM_LIBRARIES if is_vllm else _LIBRARIES)[on_gpu]
    of_token = cache_bytes(shape, width) / split
    if is_vllm and on_gpu:
        share = min(options.get("gpu_memory_utilization", 0.9), USABLE) * device_bytes
        cache = max(of_token * longest, share - weights - libraries)
    elif options.get("cpu_kv_cache_gib"):
        cache = options["cpu_kv_cache_gib"] * 2**30
    else:
        cache = min(of_token * (longest + vllm_env.CPU_BLOCK) * sequences, 0.4 * device_bytes)
    return {"weights": weights, "cache": cache, "libraries": libraries}


def cache_bytes(shape: Shape, width: int) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.keys * width


def split_of(options: Mapping[str, Any]) -> int:
    """Return over how many GPUs vLLM splits each weight; copies by data parallelism are whole."""
    return engine_gpus(options, ("tensor", "pipeline"))


def reward_model(weights: int, *, width: int, on_gpu: bool, split: int = 1) -> dict[str, float]:
    """Return the bytes of a reward model's process, with `split` GPUs per weight."""
    return {"weights": weights * width / split, "libraries": _LIBRARIES[on_gpu]}


def _whole(shape: Shape, width: int) -> float:
    """Return the bytes of the weights and gradients that a rank holds whole at the same time.

    While one layer computes, the next one is being gathered: two weights, a gradient, and its copy
    for the exchange, 4 bytes each. Products with `width` 2 add a cast. Embeddings and head are
    units of their own, unless they share their weight.
    """
    cast = width % 4
    of_layer = (16 + cast) * shape.largest_layer
    if shape.is_tied:  # they stay whole
        return of_layer + (8 + cast) * shape.outside_layers
    # while the head has its gradient, the last layer is on its way
    return max(of_layer, (12 + cast) * shape.head + 4 * shape.largest_layer)


def _width(precision: str) -> int:
    """Return the bytes of one activation."""
    return 4 if precision == "fp32" else 2


def _weights(shape: Shape, precision: str) -> int:
    """Return the bytes of all weights, and of autocast's bfloat16 copies of what is multiplied."""
    if precision == "bf16":
        return 4 * shape.weights + 2 * (shape.in_layers + shape.head)
    return (4 if precision == "fp32" else 2) * shape.weights


def _logits(on_gpu: bool) -> float:
    """Return the bytes of a chunk's logits; on a GPU with their gradient in bfloat16."""
    return 1.5 * logprob_head.GPU_CHUNK_BYTES if on_gpu else logprob_head.KEPT_BYTES
