"""AdamW, its learning rate, and named tensors in a folder below the policy's: moments and a critic.

    optimizer = make_optimizer(config, model)
    write_tensors(folder / "optimizer", optimizer_state(optimizer, model))
    load_optimizer_state(optimizer, model, read_tensors(policy, "optimizer"))
    # no change: the next step is equal bit for bit

A folder of tensors holds safetensors and state.json, a note with the number of files; never a
pickle. There is one file, state.safetensors, or several, state-00001-of-00003.safetensors. With
`optimize.shard` a rank holds some rows of each tensor (a DTensor); what is saved is whole.

A step moves a weight by about the learning rate, but the smallest move of a bfloat16 weight w is
about |w| / 256. Rounded to nearest, most steps would never change anything. So with precision
`bf16_stochastic` a weight is rounded stochastically after each step to one of its two bfloat16
neighbours: it is right in the mean, and steps that are too small for one weight still move many.
The random numbers follow from seed, step and parameter, so all ranks round alike, and a restart
does too.

With `adamw_8bit` a matrix's gradient is bfloat16, and a moment is 8 bits a number: the index into
256 values of a dynamic quantization map, and a float32 scale for each block of a row. A step is
computed in float32, and the new moments are quantized after it, the second one as its root. A
vector, and a matrix whose rows are no multiple of 64, keep float32 moments. Blocks never cross a
row, so any number of ranks saves the same.

References: https://arxiv.org/abs/1502.02551 (stochastic rounding), https://arxiv.org/abs/2110.02861
(moments in 8 bits).

Not of the spine: the trainer steps it like any optimizer of torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.files import write_bytes
from quiver.stages.core.store import Version
from quiver.stages.model.folder import load_errors

from .checks import check_8bit
from .config import Config

_IS_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, by their keys; the second is never below 0."""
_SCALE = "_scale"
"""End of the key of a quantized moment's scales, one for each block."""
_MOMENTS = (*_IS_SIGNED, *(key + _SCALE for key in _IS_SIGNED))
_BLOCKS = (256, 128, 64)
"""Numbers that share a scale: the most that a row is a multiple of."""
_REST = "rest"
"""Key of what a weight lost when it was rounded to bfloat16 on disk, stored beside its moments."""
_FILE_BYTES = 10**9
"""Largest file of tensors. While one is written, the ones before it are flushed and hashed."""
_CHUNK = 1 << 22
"""Numbers stepped at a time, which bounds the memory for their float32 values."""
_PIECE = 1 << 18
"""Number of squares that are summed in float32."""


def make_optimizer(
    config: Config,
    model: nn.Module,
    critic: nn.Module | None = None,
    *,
    step: int = 0,
) -> torch.optim.Optimizer:
    """Return AdamW over all trainable weights; decay on matrices only. A critic's rate is `scale`
    times the policy's. `step`: step of the policy's life, for weights in bfloat16."""
    groups = _groups(config, model)
    if critic is not None:
        critic_rate = config.critic_learning_rate or config.learning_rate
        groups += _groups(config, critic, scale=critic_rate / config.learning_rate)
    options = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    is_8bit = config.optimizer == "adamw_8bit"
    if is_8bit or config.moments_on_host or config.precision == "bf16_stochastic":
        options |= {"is_8bit": is_8bit, "on_host": config.moments_on_host}
        return ChunkedAdamW(groups, seed=config.seed, step=step, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _groups(config: Config, model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in weights if p.ndim > 1]
    vectors = [p for p in weights if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, **options},
        {"params": vectors, "weight_decay": 0.0, **options},
    ]
    return [group for group in groups if group["params"]]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients as one vector, float32 [].

    On a CPU it is computed from dot products of pieces: torch's own float32 sum of 28 million
    squares loses 1 in 2,000 or more. For sharded gradients it covers all ranks' rows.
    """
    if gradients and is_sharded(gradients[0]):
        norm = total_norm([local(gradient) for gradient in gradients])
        square = norm.double().square()
        torch.distributed.all_reduce(square)
        return square.sqrt().float()
    if not gradients or gradients[0].device.type != "cpu":
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)
    squares = [
        piece.dot(piece)
        for gradient in gradients
        for piece in gradient.reshape(-1).float().split(_PIECE)
    ]
    return torch.stack(squares).sum(dtype=torch.float64).sqrt().float()


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of optimizer step `step` of the policy's life: linear warm-up, then constant,
    linear or cosine down to 0."""
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    if config.schedule == "constant":
        return config.learning_rate * warmup
    span = config.total_steps - config.warmup_steps
    progress = min(max(step - config.warmup_steps, 0) / span, 1.0)
    decay = 1 - progress
    if config.schedule == "cosine":
        decay = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * warmup * decay


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the moments by parameter name, and `updates`, the number of steps that made them;
    empty before the first step. They are the optimizer's own tensors, on its device.

    A weight that had a gradient in fewer steps than others, such as an expert's, has a number of
    its own, `updates.NAME`.
    """
    tensors: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        for key in _MOMENTS:
            if key in moments:
                tensors[f"{key}.{name}"] = moments[key].detach()
        if "step" in moments:
            counts[name] = moments["step"].detach().reshape(1)
    if counts:
        most = tensors["updates"] = max(counts.values(), key=float)
        tensors |= {f"updates.{name}": count for name, count in counts.items() if count != most}
    return tensors


def round_weights(model: nn.Module) -> dict[str, Tensor]:
    """Round the float32 weights of `model` to bfloat16 in place, to nearest, and return what they
    lost, int16 by names as in `optimizer_state`.

        bits of the weight = bits of the rounded weight · 2^16 + rest

    So policy and state together hold each bit of a weight once. The rest lies in [-2^15, 2^15),
    because a half is rounded away from 0; torch rounds it to the even neighbour.
    """
    rest = {}
    for name, parameter in model.named_parameters():
        weight = parameter.data.contiguous()
        if weight.untyped_storage().nbytes() > weight.nbytes:  # a part of a joint product's weight
            weight = weight.clone()
        bits = weight.view(torch.int32)
        upper = (bits + 2**15) >> 16
        lower = bits - (upper << 16)
        # both replace the weight where it is, which may be a mapped file (see sharding.py)
        halves = weight.view(-1).view(torch.int16).view(2, *weight.shape)
        halves[0].copy_(upper)
        halves[1].copy_(lower)
        parameter.data = halves[0].view(torch.bfloat16)
        rest[f"{_REST}.{name}"] = halves[1]
    return rest


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Load the tensors of `optimizer_state` and `round_weights`. A weight that never had a gradient
    has no moments.

    The model's weights become the float32 ones from before they were rounded, unless they are
    bfloat16 themselves; then they stay. Raises ConfigError if the tensors belong to other names or
    shapes.
    """
    parameters = dict(model.named_parameters())
    for key, saved in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "updates" or kind.endswith(_SCALE):
            continue
        parameter = parameters.get(name)
        problem = ""
        if kind not in (*_IS_SIGNED, _REST):
            problem = f"{printable(key)} is of an unknown kind"
        elif parameter is None or saved.shape != parameter.shape:
            problem = f"{name} is missing or of another shape"
        if problem:
            advice = "set optimize.load_optimizer = false"
            raise ConfigError("optimizer state", problem, next=advice)
        if kind == _REST:
            if parameter.dtype == torch.float32:
                local(parameter.detach()).view(torch.int32).add_(local(like(saved, parameter)))
            continue
        scales = tensors.get(f"{kind}{_SCALE}.{name}")
        block = _block(optimizer, parameter)
        is_signed = _IS_SIGNED[kind]
        moment = saved
        if scales is None and block:
            moment, scales = quantize(saved, block, is_signed=is_signed)
        elif scales is not None and not block:
            moment, scales = dequantize(saved, scales, is_signed=is_signed), None
        moments = optimizer.state[parameter]
        moments[kind] = like(moment, parameter, on_host=_is_on_host(optimizer))
        if scales is not None:
            moments[kind + _SCALE] = like(scales, parameter, on_host=_is_on_host(optimizer))
        updates = tensors.get(f"updates.{name}", tensors["updates"])
        moments["step"] = updates.reshape(()).clone().to(parameter.device)


# -- weights and moments that are not float32


class ChunkedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` over a few million numbers at a time.

    Weights in bfloat16, moments in 8 bits and moments in host memory are float32 on the device only
    for their own part of the step. A bfloat16 weight is rounded stochastically. What is float32 and
    on the device takes AdamW's own step, bit for bit.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        seed: int,
        step: int,
        is_8bit: bool = False,
        on_host: bool = False,
        **options: Any,
    ) -> None:
        """`step`: steps over the policy's life. `is_8bit`: quantize the moments. `on_host`: keep
        them in host memory."""
        super().__init__(groups, fused=True, **options)
        if is_8bit:
            check_8bit()
        self.seed = seed
        self.number = step
        """Steps over the policy's life."""
        self.is_8bit = is_8bit
        self.on_host = on_host

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step over all weights that have a gradient, one after another."""
        index = -1
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "step" not in state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    for key, (shape, dtype) in moment_shapes(self, parameter).items():
                        is_elsewhere = self.on_host or is_sharded(parameter)
                        device = "cpu" if is_elsewhere else parameter.device
                        zeros = torch.zeros(shape, dtype=dtype, device=device)
                        state[key] = like(zeros, parameter, on_host=self.on_host)
                seed = np.random.SeedSequence([self.seed, self.number, index]).generate_state(1)[0]
                generator = torch.Generator(parameter.device)
                generator.manual_seed(int(seed))
                self._step_one(parameter, state, group, generator)
                state["step"] += 1
        self.number += 1

    def _step_one(
        self,
        parameter: nn.Parameter,
        state: dict[str, Tensor],
        group: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        weights = local(parameter).view(-1)
        gradients = local(parameter.grad).reshape(-1)
        for start in range(0, len(weights), _CHUNK):
            piece = slice(start, start + _CHUNK)
            wide = weights[piece].float()  # the weights themselves if float32, else a copy
            moments = {key: _read(state, key, piece, wide.device) for key in _IS_SIGNED}
            adamw(
                [wide],
                [gradients[piece].float()],
                [moments["exp_avg"]],
                [moments["exp_avg_sq"]],
                [],
                [state["step"].clone()],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for key, moment in moments.items():
                _write(state, key, piece, moment)
            if parameter.dtype == torch.bfloat16:
                weights[piece] = round_by_chance(wide, generator)


def moment_shapes(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each tensor that holds moments of `parameter`, by its key."""
    block = _block(optimizer, parameter)
    if not block:
        return dict.fromkeys(_IS_SIGNED, (parameter.shape, torch.float32))
    scales = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // block))
    shapes = dict.fromkeys(_IS_SIGNED, (parameter.shape, torch.uint8))
    return shapes | {key + _SCALE: (scales, torch.float32) for key in _IS_SIGNED}


def _block(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    """Return how many moments of `parameter` share a scale; 0 if they are float32."""
    if parameter.ndim < 2 or not getattr(optimizer, "is_8bit", False):
        return 0
    return next((block for block in _BLOCKS if parameter.shape[-1] % block == 0), 0)


def _is_on_host(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "on_host", False)


def _pieces(state: dict[str, Tensor], key: str, piece: slice) -> tuple[Tensor, Tensor | None]:
    """Return the stored moments at `piece` and, if they are quantized, their scales."""
    stored = local(state[key]).view(-1)
    if key + _SCALE not in state:
        return stored[piece], None
    scales = local(state[key + _SCALE]).view(-1)
    block = len(stored) // len(scales)
    return stored[piece], scales[piece.start // block : piece.stop // block]


def _read(state: dict[str, Tensor], key: str, piece: slice, device: torch.device) -> Tensor:
    """Return moments as float32 on `device`: the stored ones themselves if they are so."""
    stored, scales = (
        None if each is None else each.to(device) for each in _pieces(state, key, piece)
    )
    if scales is None:
        return stored
    return dequantize(stored, scales, is_signed=_IS_SIGNED[key])


def _write(state: dict[str, Tensor], key: str, piece: slice, moments: Tensor) -> None:
    """Store the moments that `_read` returned."""
    stored, scales = _pieces(state, key, piece)
    if scales is not None:
        block = len(stored) // len(scales)
        moments, new_scales = quantize(moments, block, is_signed=_IS_SIGNED[key])
        scales.copy_(new_scales)
    if moments.data_ptr() != stored.data_ptr():
        stored.copy_(moments)


def quantize(moments: Tensor, block: int, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 in the shape of `moments` […, d], and the scales […, d / block].

    Of the second moment (`is_signed` false) the root is quantized. A gradient far below its block's
    largest would otherwise leave a second moment of 0 beside a first moment that is not, and steps
    that are a hundred times too long.
    """
    from bitsandbytes import functional

    values = _values(is_signed, moments.device)
    numbers = moments if is_signed else moments.sqrt()
    codes, about = functional.quantize_blockwise(numbers.contiguous(), code=values, blocksize=block)
    return codes, about.absmax.view(*moments.shape[:-1], -1)


def dequantize(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Return the moments of `quantize`'s codes and scales, rounded, in float32."""
    check_8bit()
    from bitsandbytes import functional

    numbers = functional.dequantize_blockwise(
        codes.contiguous(),
        absmax=scales.reshape(-1),
        code=_values(is_signed, codes.device),
        blocksize=codes.numel() // scales.numel(),
    )
    return numbers if is_signed else numbers.square()


@cache
def _values(is_signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of a code, within [−1, 1] or [0, 1]."""
    from bitsandbytes import functional

    return functional.create_dynamic_map(signed=is_signed).to(device)


def round_by_chance(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round [n] float32 to [n] bfloat16: each to the neighbour below or above it, so that the mean
    over many draws is the value.

    P(up) = (x − low) / (high − low), exact to 2^-16. A bfloat16 is the upper half of a float32's
    bits, so the lower half over 65536 is the distance of x from the neighbour nearer to 0, as a
    share. Adding a uniform 16-bit number to the lower half carries over with that probability.
    Values that bfloat16 can hold stay unchanged, infinities and NaN too.
    """
    bits = values.view(torch.int32)
    # each word gives four numbers, since drawing them costs most
    words = torch.empty(-(-len(bits) // 4), dtype=torch.int64, device=bits.device)
    words.random_(-(2**63), None, generator=generator)
    noise = words.view(torch.int16)[: len(bits)].int().bitwise_and_(0xFFFF)
    rounded = noise.add_(bits).bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)
    # a GPU's NaN has all bits 1, and the carry would make it 0
    return rounded.masked_fill_(values.isnan(), torch.nan)


# -- tensors in a folder


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    file_bytes: int = _FILE_BYTES,
    done: Callable[[Path], None] = lambda path: None,
) -> None:
    """Create `folder` with `tensors`, which may be on any device.

    Only one file's tensors are copied from a GPU at a time.

    Args:
        file_bytes: largest file, unless a single tensor is larger.
        done: called with each file of tensors, once it is complete.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="state{suffix}.safetensors", max_shard_size=file_bytes
    )
    files = split.filename_to_tensors
    folder.mkdir()
    for file, names in files.items():
        of_file = {name: tensors[name].cpu().contiguous() for name in names}
        save_file(of_file, folder / file)
        done(folder / file)
    write_bytes(folder / "state.json", json.dumps({"files": len(files)}).encode())


def read_tensors(policy: Version, folder: str) -> dict[str, Tensor]:
    """Return the tensors that `write_tensors` wrote into this policy, checked against its hashes.
    Raises CorruptError, and ConfigError if a file cannot be loaded."""
    from safetensors.torch import load_file

    policy.verify(f"{folder}/")
    tensors: dict[str, Tensor] = {}
    with load_errors(f"{policy.ref} {folder}/"):
        for name in policy.files.names:
            if name.startswith(f"{folder}/state") and name.endswith(".safetensors"):
                tensors |= load_file(policy.files.path(name))
    return tensors


# -- what of a running training is saved


_COUNTERS = ("step", "updates", "audit_report", "padding", "slots")
_COUNTERS += ("entropy_coef", "last_entropy", "kl_coef")
"""Attributes that are saved beside the tensors."""


class SavedState:
    """Base class of trainers that saves and restores their state."""

    step: int
    logprobs: Tensor
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def state(self, room: Path | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and counters that the next step depends on; counters are plain JSON.
        `room`: a folder on disk for copies, if one rank's memory cannot hold them."""
        tensors = {"logprobs": self.logprobs}
        for number, parameter in enumerate(self.parameters):
            tensors[f"weight.{number}"] = parameter.detach()
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{number}"] = tensor
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return self.copies(tensors, room), counters

    def copies(self, tensors: Mapping[str, Tensor], room: Path | None) -> dict[str, Tensor]:
        """Return whole copies on the CPU, for the rank that saves them."""
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        return {name: copy.contiguous() for name, copy in copies.items()}

    def agree(self, is_time: bool) -> bool:
        """Return True if this rank takes part in saving. Sharded trainers decide together."""
        return is_time

    def gather(self, room: Path | None) -> None:
        """Make sharded tensors whole before they are saved; see sharding.py."""

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `tensors` have the names, shapes and dtypes of this trainer's
        `state`."""
        expected = {"logprobs": (self.logprobs.shape, self.logprobs.dtype)}
        for number, parameter in enumerate(self.parameters):
            expected[f"weight.{number}"] = (parameter.shape, parameter.dtype)
            if f"step.{number}" in tensors:
                expected[f"step.{number}"] = (torch.Size(), torch.float32)
                for key, about in moment_shapes(self.optimizer, parameter).items():
                    expected[f"{key}.{number}"] = about
        if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} != expected:
            raise ValueError("its tensors do not belong to this training")

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.logprobs.copy_(tensors["logprobs"])
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                parameter.copy_(like(tensors[f"weight.{number}"], parameter))
        for name, tensor in tensors.items():
            key, _, number = name.partition(".")
            if number and key != "weight":
                parameter = self.parameters[int(number)]
                on_host = key in _MOMENTS and _is_on_host(self.optimizer)
                state = self.optimizer.state[parameter]
                state[key] = like(tensor, parameter, on_host=on_host)
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        if isinstance(self.optimizer, ChunkedAdamW):
            self.optimizer.number = self.step


# -- tensors of which each rank holds some rows


def is_sharded(tensor: Tensor) -> bool:
    """Return True if `tensor` is this rank's share of a tensor."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(tensor: Tensor, parameter: Tensor, *, on_host: bool = False) -> Tensor:
    """Return the whole `tensor` on the device of `parameter` or, if that is sharded, this rank's
    rows of it. A step count has no rows and stays whole. `on_host`: keep it in host memory, from
    which a GPU copies fast."""
    if on_host:
        return tensor.pin_memory() if parameter.device.type == "cuda" else tensor.cpu()
    if not is_sharded(parameter) or not tensor.ndim:
        return tensor.to(parameter.device)
    from torch.distributed.tensor import DTensor

    mesh = parameter.device_mesh
    num_rows = -(-len(tensor) // mesh.size())
    first = mesh.get_local_rank() * num_rows
    rows = tensor[first : first + num_rows].to(parameter.device, copy=True)
    return DTensor.from_local(
        rows.contiguous(),
        mesh,
        parameter.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
