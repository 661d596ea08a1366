"""AdamW, its learning rate, and its moments as named tensors that travel with the policy.

optimizer = make_optimizer(config, model)
load_state(optimizer, model, state(optimizer, model))
# no change: the next step is equal bit for bit

Not of the spine: the trainer steps it like any optimizer of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quiver.schemas.errors import ConfigError

from .bf16 import Bf16AdamW
from .config import Config
from .shards import is_sharded, like, local

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "master"
"""Key of the float32 value of a weight that is saved in bfloat16, stored beside its moments."""
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
    times the policy's. `step`: step of the policy's life, for weights in bfloat16 (see bf16.py)."""
    groups = _groups(config, model)
    if critic is not None:
        critic_rate = config.critic_learning_rate or config.learning_rate
        groups += _groups(config, critic, scale=critic_rate / config.learning_rate)
    options = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    if config.precision == "bf16_stochastic":
        return Bf16AdamW(groups, seed=config.seed, step=step, **options)
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
        return torch.nn.utils.get_total_norm(gradients)
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


def state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the moments by parameter name, and `updates`, the number of steps that made them;
    empty before the first step. They are the optimizer's own tensors, on its device."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        for key in _MOMENTS:
            if key in moments:
                tensors[f"{key}.{name}"] = moments[key].detach()
        if "step" in moments:
            tensors["updates"] = moments["step"].detach().reshape(1)
    return tensors


def masters(model: nn.Module, before: Mapping[nn.Parameter, Tensor]) -> dict[str, Tensor]:
    """Return the float32 weights of a model that is saved in bfloat16, named as in `state`.
    `before`: the result of `narrow`."""
    return {f"{_MASTER}.{name}": before[weight] for name, weight in model.named_parameters()}


def load_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Load the tensors of `state` and `masters`. A weight that never had a gradient has no moments.

    Saved float32 weights replace the model's, unless its weights are bfloat16 themselves; those are
    the same weights, rounded, and stay. Raises ConfigError if the tensors belong to other names,
    shapes or weights.
    """
    parameters = dict(model.named_parameters())
    names = {key.partition(".")[2] for key in tensors if key != "updates"}
    for name in sorted(names):
        keys = [key for key in (*_MOMENTS, _MASTER) if f"{key}.{name}" in tensors]
        moments = {key: tensors[f"{key}.{name}"] for key in keys}
        parameter = parameters.get(name)
        has_moments = moments.keys() >= set(_MOMENTS)
        is_complete = has_moments or moments.keys() == {_MASTER}
        if (
            parameter is None
            or not is_complete
            or any(tensor.shape != parameter.shape for tensor in moments.values())
        ):
            raise _not_ours(f"{name} is missing or of another shape")
        moments = {key: like(tensor, parameter) for key, tensor in moments.items()}
        if _MASTER in moments:
            master = moments.pop(_MASTER)
            rounded = master.to(torch.bfloat16).to(parameter.dtype)
            if not torch.equal(local(rounded), local(parameter)):
                raise _not_ours(f"the float32 weights of {name} are not those of the policy")
            if parameter.dtype == torch.float32:
                with torch.no_grad():
                    parameter.copy_(master)
        if has_moments and ("updates" not in tensors or tensors["updates"].numel() != 1):
            raise _not_ours("how many steps made the moments is not told")
        if has_moments:
            moments["step"] = tensors["updates"].reshape(()).clone().to(parameter.device)
        optimizer.state[parameter].update(moments)


def _not_ours(message: str) -> ConfigError:
    return ConfigError("optimizer state", message, next="set optimize.load_optimizer = false")
