"""AdamW, its learning rate, and its moments as named tensors that travel with the policy.

optimizer = make_optimizer(config, model)
load_state(optimizer, model, state(optimizer, model))     # as if nothing had happened: the next step is equal bit for bit
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from .stage import Config

_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(config: Config, model: nn.Module, critic: nn.Module | None = None) -> torch.optim.Optimizer:
    """AdamW over all trainable weights; decay on matrices only. A critic's rate is `scale` times the policy's."""
    groups = _groups(config, model)
    if critic is not None:
        groups += _groups(config, critic, scale=(config.critic_learning_rate or config.learning_rate) / config.learning_rate)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
    )


def _groups(config: Config, model: nn.Module, **common: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": config.weight_decay, **common},
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0, **common},
    ]


def learning_rate(config: Config, step: int) -> float:
    """Rate of optimizer step `step` of the policy's life: linear warm-up, then constant, linear or cosine down to 0."""
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    if config.schedule == "constant":
        return config.learning_rate * warm
    span = max(config.total_steps - config.warmup_steps, 1)
    done = min(max(step - config.warmup_steps, 0) / span, 1.0)
    decay = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * warm * decay


def state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The moments by parameter name, and `updates`, the number of steps that made them; empty before the first step."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        held = optimizer.state.get(parameter)
        if held:
            found |= {f"{key}.{name}": held[key].detach().cpu().contiguous() for key in _MOMENTS}
            found["updates"] = held["step"].detach().cpu().reshape(1)
    return found


def load_state(optimizer: torch.optim.Optimizer, model: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """Take up what `state` gave; a weight that never had a gradient has no moments. ConfigError when they belong to a model of
    other names or shapes."""
    parameters = dict(model.named_parameters())
    for name in sorted({key.partition(".")[2] for key in found if key != "updates"}):
        moments, parameter = {key: found.get(f"{key}.{name}") for key in _MOMENTS}, parameters.get(name)
        if parameter is None or any(value is None or value.shape != parameter.shape for value in moments.values()):
            raise ConfigError(
                "optimizer state", f"{name} is missing or of another shape", next="set optimize.load_optimizer = false"
            )
        step = found["updates"].reshape(()).clone().to(parameter.device)
        optimizer.state[parameter] = {"step": step, **{key: value.to(parameter.device) for key, value in moments.items()}}
