"""Memory, traffic and products of each stage on a machine: the formulas of `quiver fit`.

Memory is the bytes held at once, by part; bytes moved and FLOPs are per iteration. Seconds are on
paper, as if the device reached its data sheet. The formulas describe this project's own passes;
tests compare them with counts and with measured processes.

For each token and layer, a pass keeps these numbers for the backward pass: inputs and outputs of
both norms, queries, the keys and values of its row, attention outputs, gate and up. Norms and MLPs
are computed again in the backward pass, or are one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quiver.stages.common.models import vllm_env
from quiver.stages.common.models.checkpoints import find_folder
from quiver.stages.common.models.devices import engine_gpus
from quiver.stages.common.models.folder import count_parameters
from quiver.stages.common.store.writer import ROWS_PER_SHARD
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.config import Config as OptimizeConfig

from ..recipe import Recipe
from .machines import Machine, this_host
from .shapes import Shape
from .workload import Workload

_LIBRARIES = {"cpu": 0.6e9, "gpu": 0.8e9}
"""Bytes of a process without a model: code and its allocations; on a GPU, its context."""
_TRAINING_LIBRARIES = {"cpu": 0.85e9, "gpu": 0.8e9}
_ENGINE_LIBRARIES = {"cpu": 0.93e9, "gpu": 2.5e9}
"""The same for vLLM; on a GPU with its CUDA graphs."""
_CHUNK_BYTES = {"cpu": 128 * 2**20, "gpu": 768 * 2**20}
"""Bytes of a chunk's logits, and on a GPU of their gradient."""
_GPU_CHUNK = 512 * 2**20
ROOM = 0.97
"""Usable share of a device's memory; the rest is lost between blocks."""
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Need:
    """Needs of one stage, on each device that it uses."""

    stage: str
    devices: int
    """Number of devices used at once."""
    parts: Mapping[str, float]
    """Bytes by part."""
    flops: float = 0.0
    """FLOPs per iteration, on all devices."""
    moved: float = 0.0
    """Bytes moved per iteration, on all devices."""
    seconds: float | None = None
    """Seconds per iteration on paper; None on a CPU."""
    notes: tuple[str, ...] = field(default=())
    on_gpu: bool = False

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


# -- a pass with its backward pass


def _sides_of_products(shape: Shape) -> int:
    """Return the summed widths of inputs and outputs of one layer's products, per token."""
    return 4 * shape.hidden + 2 * (shape.attention + shape.keys) + 3 * shape.intermediate


@dataclass(frozen=True)
class Pass:
    """Bytes that a micro-batch keeps, and that passes over `tokens` move."""

    shape: Shape
    work: Workload
    machine: Machine
    is_narrow: bool
    """True if products are computed in bfloat16."""
    has_narrow_weights: bool = False

    @property
    def width(self) -> int:
        return 2 if self.is_narrow else 4

    @property
    def kept_a_token(self) -> float:
        """Bytes kept per token in one layer."""
        shape, width = self.shape, self.width
        stream = width if self.has_narrow_weights else 4
        keys = self.work.keys_per_token if self.machine.is_gpu else 1.0
        normed = 2 * shape.hidden * width if self.machine.is_gpu else 0
        return (
            2 * shape.hidden * stream
            + normed
            + width * (2 * shape.attention + 2 * shape.keys * keys + 2 * shape.intermediate)
        )

    @property
    def moved_a_token(self) -> float:
        """Bytes moved per token in one layer, forward and backward, without products.

        Each kernel's reads and writes are counted in bfloat16, unless the float32 stream is named.
        """
        shape, scale = self.shape, self.width / 2
        gated = 18 * shape.intermediate  # 3 numbers forward, 6 backward
        # Joined, then turned by position and back.
        heads = 4 * (shape.attention + 2 * shape.keys) + 8 * (shape.attention + shape.keys)
        attention = 12 * (shape.attention + shape.keys * self.work.keys_per_token)
        # Two norms and two sums, forward and backward; the stream is float32.
        stream = 88 * shape.hidden
        return scale * (gated + heads + attention) + stream

    def moved_by_micro_batch(self, tokens: float) -> float:
        """Return the bytes moved by a micro-batch, forward and backward: products and everything
        else."""
        shape, width = self.shape, self.width
        predicted = tokens * self.work.predicted_share
        rows_of_chunk = max(1, _GPU_CHUNK // (4 * shape.vocabulary))
        chunks = math.ceil(predicted / rows_of_chunk)
        sides = _sides_of_products(shape)
        # Each product runs three times: forward, and for both gradients. The weights' gradient is
        # float32.
        products = tokens * 3 * width * sides * shape.layers + (2 * width + 4) * shape.multiplied
        # Logits are computed twice. A chunk reads the head three times and adds to its gradient.
        products += chunks * 7 * width * shape.head + 6 * width * predicted * shape.vocabulary
        logits = 10 * predicted * shape.vocabulary  # read in float32, read and written again
        casts = 6 * (shape.multiplied + shape.head) if self.is_narrow else 0
        embedding = 24 * tokens * shape.hidden + 16 * shape.head
        layers = tokens * self.moved_a_token * shape.layers
        return products + layers + logits + casts + embedding

    def flops(self, tokens: float) -> float:
        """Return the FLOPs of a forward pass over `tokens`."""
        shape, work = self.shape, self.work
        predicted = tokens * work.predicted_share
        mean_keys = work.prompt_tokens + work.completion_tokens / 2
        attention = 4 * shape.layers * shape.attention * mean_keys * tokens
        return 2 * shape.multiplied * tokens + 2 * shape.head * predicted + attention


def _products_per_second(machine: Machine, is_narrow: bool) -> float:
    return machine.bf16_flops if is_narrow else machine.fp32_flops


def _on_paper(machine: Machine, flops: float, moved: float, devices: int, narrow: bool):
    if not machine.is_gpu:
        return None
    slowest = max(flops / _products_per_second(machine, narrow), moved / machine.bandwidth)
    return slowest / devices


# -- stages


def _place(machine: Machine, device: str) -> tuple[Literal["cpu", "gpu"], Machine]:
    """Return the device kind and machine for a stage with this `device`: the GPU machine, or this
    host."""
    if machine.is_gpu and device != "cpu":
        return "gpu", machine
    return "cpu", this_host()


def training(shape: Shape, config: OptimizeConfig, work: Workload, machine: Machine) -> Need:
    """Return the needs of the optimize stage."""
    kind, machine = _place(machine, config.device)
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if kind == "gpu" else "fp32"
    ranks = config.processes or 1
    is_pure = precision == "bf16_stochastic"
    steps = config.epochs * config.minibatches
    passes = Pass(shape, work, machine, precision.startswith("bf16"), is_pure)
    in_step = work.passed_tokens / config.minibatches
    budget = config.token_budget or (8192 if kind == "gpu" else 2048)
    tokens = max(min(budget, in_step), work.longest)
    micro_batches = max(1, round(in_step / tokens))
    parts = _held_by_training(shape, config, precision)
    if config.shard and ranks > 1:
        parts = {name: held / ranks for name, held in parts.items()}
        parts["whole for a moment"] = 4 * (2 * shape.outside_layers + 4 * shape.largest_layer)
    if config.activation_checkpointing:
        kept = tokens * (4 * shape.hidden * shape.layers + passes.kept_a_token)
    else:
        kept = tokens * passes.kept_a_token * shape.layers
    parts["activations"] = kept
    parts["logits"] = _CHUNK_BYTES[kind]
    parts["libraries"] = _TRAINING_LIBRARIES[kind]
    forward = passes.flops(work.passed_tokens) * config.epochs
    # Forward, gradients of states, gradients of weights; adapters have few weight gradients.
    passed = 3 if config.lora is None else 2
    flops = forward * (passed + config.activation_checkpointing)
    moved = steps * micro_batches * passes.moved_by_micro_batch(in_step / micro_batches)
    trained = _trained(shape, config)
    # AdamW reads four numbers per weight and writes three. Clipping reads and writes the gradient,
    # and so does each further micro-batch, with its own.
    moved += steps * trained * (28 + 8 + 12 * (micro_batches > 1))
    is_narrow = passes.is_narrow
    notes = [f"micro-batches of {tokens:.0f} tokens, {precision}"]
    if ranks > 1:
        notes.append("what travels between the ranks is not counted")
    return Need(
        "optimize",
        ranks,
        parts,
        flops,
        moved if kind == "gpu" else 0.0,
        _on_paper(machine, flops, moved, ranks, is_narrow) if kind == "gpu" else None,
        tuple(notes),
        kind == "gpu",
    )


def _trained(shape: Shape, config: OptimizeConfig) -> float:
    """Return the number of trained weights."""
    if config.lora is None:
        return shape.weights
    # Queries, keys, values, gate and up each have their own adapter input, which a joint product
    # reads only once.
    sides = _sides_of_products(shape) + 3 * shape.hidden
    return config.lora.rank * sides * shape.layers


def _held_by_training(shape: Shape, config: OptimizeConfig, precision: str) -> dict[str, float]:
    """Return the bytes of weights, gradients and AdamW moments."""
    trained = _trained(shape, config)
    narrow = shape.in_layers + (0 if shape.is_tied else shape.head)
    weights = {
        "fp32": 4 * shape.weights,
        "bf16": 4 * shape.weights + 2 * (shape.in_layers + shape.head),
        "bf16_stochastic": 2 * shape.weights,
    }[precision]
    if config.lora and precision == "bf16":
        weights = 2 * narrow + 4 * (shape.weights - narrow) + 4 * trained
    elif config.lora:
        weights += 4 * trained
    held = {"weights": weights, "gradients": 4 * trained, "moments": 8 * trained}
    if config.critic == "model":
        held = {name: 2 * each for name, each in held.items()}
    return held


def scoring(
    shape: Shape, config: LogprobsConfig, work: Workload, machine: Machine, devices: int
) -> Need:
    """Return the needs of a logprobs stage."""
    kind, machine = _place(machine, config.device)
    is_narrow = kind == "gpu" if config.precision == "auto" else "bf16" in config.precision
    passes = Pass(shape, work, machine, is_narrow)
    budget = config.token_budget or (8192 if kind == "gpu" else 2048)
    tokens = max(min(budget, work.passed_tokens), work.longest)
    width = passes.width
    one_layer = 2 * 4 * shape.hidden + width * (
        2 * shape.attention + 2 * shape.keys * work.keys_per_token + 3 * shape.intermediate
    )
    parts = {
        "weights": 4 * shape.weights + (2 * (shape.in_layers + shape.head) if is_narrow else 0),
        "activations": tokens * one_layer,
        "logits": _CHUNK_BYTES[kind],
        "libraries": _LIBRARIES[kind],
    }
    flops = passes.flops(work.passed_tokens)
    passed = math.ceil(work.passed_tokens / tokens)
    # A third of the bytes that forward and backward move.
    moved = passed * passes.moved_by_micro_batch(work.passed_tokens / passed) / 3
    return Need(
        f"logprobs ({config.role})",
        devices,
        parts,
        flops,
        moved if kind == "gpu" else 0.0,
        _on_paper(machine, flops, moved, devices, is_narrow) if kind == "gpu" else None,
        on_gpu=kind == "gpu",
    )


def sampling(
    shape: Shape,
    recipe: Recipe,
    work: Workload,
    machine: Machine,
    options: dict[str, Any] | None = None,
) -> Need:
    """Return the needs of the generate stage, with `options` in place of the recipe's engine
    options.

    On a GPU, vLLM takes the share `gpu_memory_utilization` of the memory. The cache gets what the
    weights leave, and its size decides how many rollouts are decoded together.
    """
    config = recipe.generate
    options = config.options if options is None else options
    kind, machine = _place(machine, config.device)
    is_split = kind == "gpu" and config.engine == "vllm"
    # Copies by `data` parallelism are whole.
    split = engine_gpus(options, ("tensor", "pipeline")) if is_split else 1
    of_engine = engine_gpus(options) if is_split else 1
    shards = math.ceil(work.rollouts / config.rows_per_shard)
    devices = _devices(recipe, machine, of_engine, shards)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if kind == "gpu" or _has_bfloat16() else "float32"
    width = _WIDTHS[dtype]
    weights = shape.weights * width / split
    libraries = _ENGINE_LIBRARIES[kind]
    # vLLM's own default.
    is_large = kind == "gpu" and machine.memory >= 70 * 2**30 and machine.name != "a100"
    most = options.get("max_num_seqs") or (1024 if is_large else 256)
    if config.engine == "transformers":
        most = options.get("batch_size", 32)
        libraries = _LIBRARIES[kind]
    cache_of_token = 2 * shape.layers * shape.keys * width / split
    if kind == "gpu" and config.engine == "vllm":
        taken = min(options.get("gpu_memory_utilization", 0.9), ROOM) * machine.memory
        cache = max(cache_of_token * work.longest, taken - weights - libraries)
        mean = work.prompt_tokens + work.completion_tokens
        together = int(min(cache // (cache_of_token * mean), most))
    else:
        together = most
        asked = options.get("cpu_kv_cache_gib")
        sequences = cache_of_token * (work.longest + vllm_env.CPU_BLOCK) * most
        cache = asked * 2**30 if asked else min(sequences, 0.4 * machine.memory)
    sampled = work.rollouts * work.completion_tokens
    notes = [f"up to {together} rollouts are decoded together, in {dtype}"]
    with_more_shards = _devices(recipe, machine, of_engine, work.rollouts)
    if devices < with_more_shards:
        notes.append(
            f"{shards} shard{'s' if shards > 1 else ''} of generate.rows_per_shard = "
            f"{config.rows_per_shard} keep no more GPUs busy"
        )
    batch = max(1.0, min(together, work.rollouts * split / devices))
    read_keys = work.prompt_tokens + work.completion_tokens / 2
    prompts = work.prompts * work.prompt_tokens
    met_keys = prompts * work.prompt_tokens / 2 + sampled * read_keys
    # Each prompt is read once, and has logits only at its end.
    flops = 2 * shape.multiplied * (prompts + sampled) + 2 * shape.head * sampled
    flops += 4 * shape.layers * shape.attention * met_keys
    moved = sampled / batch * shape.weights * width + sampled * read_keys * cache_of_token * split
    return Need(
        "generate",
        devices,
        {"weights": weights, "cache": cache, "libraries": libraries},
        flops,
        moved if kind == "gpu" else 0.0,
        _on_paper(machine, flops, moved, devices, width == 2) if kind == "gpu" else None,
        tuple(notes),
        kind == "gpu",
    )


def _has_bfloat16() -> bool:
    import torch

    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def reward_models(recipe: Recipe, machine: Machine) -> list[Need]:
    """Return the needs of each reward model: its weights and its process."""
    needs = []
    for model in recipe.reward.models:
        kind, _ = _place(machine, model.device)
        folder = find_folder(model.model, model.revision, "reward.models.model")
        dtype = model.dtype
        if dtype == "auto":
            dtype = "bfloat16" if kind == "gpu" else "float32"
        on_gpu = kind == "gpu"
        split = engine_gpus(model.engine_args, ("tensor", "pipeline")) if on_gpu else 1
        weights = count_parameters(folder) * _WIDTHS[dtype] / split
        parts = {"weights": weights, "libraries": _LIBRARIES[kind]}
        devices = engine_gpus(model.engine_args) if on_gpu else 1
        needs.append(Need(f"reward ({model.name})", devices, parts, on_gpu=on_gpu))
    return needs


def _devices(recipe: Recipe, machine: Machine, each: int, shards: int) -> int:
    """Return how many devices the processes of a shared stage use together, with `each` per
    process.

    There are never more processes than shards.
    """
    asked = recipe.placement.devices
    if asked is None or not machine.is_gpu:
        return each
    most = machine.count if asked == "all" else min(asked, machine.count)
    return max(1, min(most // each, shards)) * each


def needs_of(recipe: Recipe, shape: Shape, work: Workload, machine: Machine) -> list[Need]:
    """Return the needs of each stage that holds a model, in the order of an iteration.

    Servers hold their own models, and nothing is known about a user's own engine; both are left
    out.
    """
    config = recipe.optimize_config()
    needs = []
    if recipe.generate.engine in ("vllm", "transformers"):
        needs.append(sampling(shape, recipe, work, machine))
    needs += reward_models(recipe, machine)
    roles = ["ref"] if config.kl_coef > 0 else []
    roles += ["prox"] if recipe.logprobs.prox or config.needs_prox else []
    devices = _devices(recipe, machine, 1, math.ceil(work.rollouts / ROWS_PER_SHARD))
    needs += [
        scoring(shape, recipe.logprobs.for_role(role), work, machine, devices) for role in roles
    ]
    needs.append(training(shape, config, work, machine))
    return needs
