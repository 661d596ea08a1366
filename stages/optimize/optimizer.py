"""AdamW, its learning rate, and its moments as named tensors that travel with the policy.

optimizer = make_optimizer(config, model)
load_state(optimizer, model, state(optimizer, model))     # as if nothing had happened: the next step is equal bit for bit
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quiver.schemas.errors import ConfigError

from .bf16 import MASTER, PRECISIONS, Bf16AdamW

if TYPE_CHECKING:
    from .stage import Config

_MOMENTS = ("exp_avg", "exp_avg_sq")
_PIECE = 1 << 18
"""Numbers whose squares are summed in float32."""


def make_optimizer(
    config: Config,
    model: nn.Module,
    critic: nn.Module | None = None,
    *,
    wide: Mapping[nn.Parameter, torch.Tensor] | None = None,
    step: int = 0,
) -> torch.optim.Optimizer:
    """AdamW over all trainable weights; decay on matrices only. A critic's rate is `scale` times
    the policy's.

    For weights in bfloat16 (see bf16.py): `wide`, what they were in float32, and `step` of the
    policy's life.
    """
    groups = _groups(config, model)
    if critic is not None:
        groups += _groups(
            config,
            critic,
            scale=(config.critic_learning_rate or config.learning_rate) / config.learning_rate,
        )
    groups = [group for group in groups if group["params"]]
    options = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    if config.precision in PRECISIONS:
        masters = wide if config.precision == "bf16_master" else None
        return Bf16AdamW(groups, masters or {}, seed=config.seed, step=step, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _groups(config: Config, model: nn.Module, **common: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.requires_grad]
    return [
        {
            "params": [p for p in weights if p.ndim > 1],
            "weight_decay": config.weight_decay,
            **common,
        },
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0, **common},
    ]


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm of all of them as one vector, float32 []. On a CPU from dot products of pieces:
    torch's own sum of 28 million squares in float32 loses 1 in 2,000 and more."""
    if not gradients or gradients[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(gradients)
    pieces = [
        piece.float() for gradient in gradients for piece in gradient.reshape(-1).split(_PIECE)
    ]
    return (
        torch.stack([piece.dot(piece) for piece in pieces]).sum(dtype=torch.float64).sqrt().float()
    )


def learning_rate(config: Config, step: int) -> float:
    """Rate of optimizer step `step` of the policy's life: linear warm-up, then constant, linear or
    cosine down to 0."""
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    if config.schedule == "constant":
        return config.learning_rate * warm
    span = max(config.total_steps - config.warmup_steps, 1)
    done = min(max(step - config.warmup_steps, 0) / span, 1.0)
    decay = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * warm * decay


def state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The moments by parameter name, and `updates`, the number of steps that made them; empty
    before the first step. With `bf16_master` the weights proper besides."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        held = optimizer.state.get(parameter, {})
        found |= {
            f"{key}.{name}": held[key].detach().cpu().contiguous()
            for key in (*_MOMENTS, MASTER)
            if key in held
        }
        if "step" in held:
            found["updates"] = held["step"].detach().cpu().reshape(1)
    return found


def load_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, found: Mapping[str, torch.Tensor]
) -> None:
    """Take up what `state` gave; a weight that never had a gradient has no moments. ConfigError
    when they belong to a model of other names or shapes, or to other weights.

    Saved master weights are taken up where the optimizer has some; else the policy's weights, which
    are those rounded, go on.
    """
    parameters, moments = dict(model.named_parameters()), set(_MOMENTS)
    for name in sorted({key.partition(".")[2] for key in found if key != "updates"}):
        kept = {
            key: found[f"{key}.{name}"] for key in (*_MOMENTS, MASTER) if f"{key}.{name}" in found
        }
        parameter, whole = parameters.get(name), kept.keys() >= moments or kept.keys() == {MASTER}
        if (
            parameter is None
            or not whole
            or any(value.shape != parameter.shape for value in kept.values())
        ):
            raise _not_ours(f"{name} is missing or of another shape")
        held = optimizer.state[parameter]
        if MASTER not in held:
            kept.pop(MASTER, None)
        elif MASTER in kept and not torch.equal(kept[MASTER].to(parameter), parameter):
            raise _not_ours(f"the float32 weights of {name} are not those of the policy")
        if moments <= kept.keys():
            kept["step"] = found["updates"].reshape(()).clone()
        held |= {key: value.to(parameter.device) for key, value in kept.items()}


def _not_ours(message: str) -> ConfigError:
    return ConfigError("optimizer state", message, next="set optimize.load_optimizer = false")
