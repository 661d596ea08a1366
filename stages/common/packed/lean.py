"""Modules of the common families that keep less for the backward pass: RMSNorm, and the gated MLP.

Autograd keeps the input of an RMSNorm and that input normalized; of a gated MLP gate, act(gate), up and act(gate) · up. Here the
input is kept, and gate with up; the rest is made again from them. Only a module's `forward` is replaced, and only where the
new one gives the same bits for a probe, so that a family which computes something else under these names stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_PROBE = 3
"""Positions of the probe."""


@torch.no_grad()
def lean(model: nn.Module) -> int:
    """Replace what can be in every module of `model`, in the precision in which it is called to come; how many were replaced."""
    found = 0
    for module in model.modules():
        forward, width = _leaner(module)
        if forward is not None and _is_same(module, forward, width):
            module.forward, found = forward, found + 1
    return found


def _leaner(module: nn.Module) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, int]:
    """Another `forward` for `module`, and the width of what it reads; None where there is none, it was replaced already, or reads
    more than one tensor, such as a norm with a gate."""
    if "forward" in vars(module) or len(inspect.signature(module.forward).parameters) != 1:
        return None, 0
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if weight is not None and epsilon is not None and weight.ndim == 1:
        return partial(_normalized, module), len(weight)
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    width = getattr(parts[0], "in_features", None)
    if width and callable(getattr(module, "act_fn", None)) and all(isinstance(part, nn.Module) for part in parts):
        return partial(_gated, module, module.forward), width
    return None, 0


def _is_same(module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], width: int) -> bool:
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, _PROBE, width, generator=generator).to(weight)
    with torch.enable_grad():  # as it is trained
        return torch.equal(module(probe), forward(probe))


def _gated(module: nn.Module, own: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """[…, d] -> […, d]"""
    if not torch.is_grad_enabled():
        return own(states)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(partial(_down, module), module.gate_proj(states), module.up_proj(states), **options)


def _down(module: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return module.down_proj(module.act_fn(gate) * up)


def _normalized(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """[…, d] -> […, d]"""
    return _Norm.apply(states, module.weight, module.variance_epsilon)


class _Norm(torch.autograd.Function):
    """weight · x / rms(x) (Zhang and Sennrich 2019, eq. 4), in float32."""

    @staticmethod
    def forward(ctx, states, weight, epsilon):
        wide = states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(states, weight, scale)
        return weight * (wide * scale).to(states.dtype)

    @staticmethod
    def backward(ctx, grad):
        states, weight, scale = ctx.saved_tensors
        normal, wide = states.float() * scale, grad.float()
        product = wide * normal
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        inner = (product * weight).mean(-1, keepdim=True)
        into = (wide * weight).addcmul_(normal, inner, value=-1).mul_(scale)
        return into.to(states.dtype), grad_weight, None
