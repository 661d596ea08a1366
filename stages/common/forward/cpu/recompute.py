"""Modules of the common families that keep less for the backward pass, or go through memory less
often: RMSNorm, the gated MLP, and the rotation of queries and keys.

Autograd keeps the input of an RMSNorm and that input normalized; of a gated MLP gate, act(gate), up
and act(gate) · up. Here the input is kept, and gate with up; the rest is made again from them. The
rotation goes over its input three times instead of seven. Only a module's `forward` is replaced,
and only where the new one gives the same bits for a probe, or the rotation the same numbers but for
rounding; so a family which computes something else under these names stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_PROBE = 3
"""Positions of the probe."""
_ROTATION = "apply_rotary_pos_emb"
"""Name of the function in transformers, by which the attention of most families rotates."""


@torch.no_grad()
def lean(model: nn.Module) -> int:
    """Replace what can be in every module of `model`, in the precision in which it is called to
    come; how many were replaced."""
    found, rotating = 0, {}
    for module in model.modules():
        if "forward" in vars(module):  # replaced already
            continue
        kind = type(module)
        if kind not in rotating:
            rotating[kind] = _rotating(kind.forward)
        forward, width = _leaner(module)
        if rotating[kind] is not None:
            forward = rotating[kind].__get__(module)
        elif forward is None or not _is_same(module, forward, width):
            continue
        module.forward, found = forward, found + 1
    return found


def _leaner(module: nn.Module) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, int]:
    """Another `forward` for `module`, and the width of what it reads; None where there is none, or
    where it reads more than one tensor, such as a norm with a gate."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return None, 0
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if weight is not None and epsilon is not None and weight.ndim == 1:
        return partial(_normalized, module), len(weight)
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    width = getattr(parts[0], "in_features", None)
    if (
        width
        and callable(getattr(module, "act_fn", None))
        and all(isinstance(part, nn.Module) for part in parts)
    ):
        return partial(_gated, module, module.forward), width
    return None, 0


def _is_same(
    module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], width: int
) -> bool:
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, _PROBE, width, generator=generator).to(weight)
    with torch.enable_grad():  # as it is trained
        return torch.equal(module(probe), forward(probe))


def _gated(
    module: nn.Module, own: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor
) -> torch.Tensor:
    """[…, d] -> […, d]"""
    if not torch.is_grad_enabled():
        return own(states)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(
        partial(_down, module), module.gate_proj(states), module.up_proj(states), **options
    )


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
        normal = (wide * scale).to(states.dtype)
        return normal.mul_(weight) if weight.dtype == normal.dtype else weight * normal

    @staticmethod
    def backward(ctx, grad):
        """With r = 1 / rms(x), the gradient by x is r · w · g − x · r³ · mean(x · w · g), that by w
        the sum of r · x · g."""
        own, weight, scale = ctx.saved_tensors
        states, grad, scale = (each.float().flatten(0, -2) for each in (own, grad, scale))
        with torch.autocast(grad.device.type, enabled=False):
            product = grad * states
            # by `mv`, which no setting for fast products makes coarser
            grad_weight = (
                product.T.mv(scale[:, 0]).to(weight.dtype) if ctx.needs_input_grad[1] else None
            )
            slope = product.mv(weight.float())[:, None] * scale.pow(3) / len(weight)
            into = (
                torch.mul(grad, weight, out=product).mul_(scale).addcmul_(states, slope, value=-1)
            )
        return into.view(own.shape).to(own.dtype), grad_weight, None


def _rotating(forward: Callable) -> Callable | None:
    """`forward` of a family's attention that rotates by `_rotated`; None where it rotates by
    nothing or by something else."""
    own = getattr(forward, "__globals__", {}).get(_ROTATION)
    if own is None or _ROTATION not in forward.__code__.co_names:
        return None
    if list(inspect.signature(own).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return None
    generator = torch.Generator().manual_seed(0)
    angles = [torch.randn(1, _PROBE, 8, generator=generator) for _ in range(2)]
    for dtype in (torch.float32, torch.bfloat16):
        states = [
            torch.randn(1, heads, _PROBE, 8, generator=generator).to(dtype) for heads in (2, 1)
        ]
        for expected, found in zip(
            own(*states, *angles), _rotated(own, *states, *angles), strict=True
        ):
            if expected.dtype != found.dtype or not torch.allclose(
                expected, found, rtol=1e-5, atol=1e-6
            ):
                return None
    names = {**forward.__globals__, _ROTATION: partial(_rotated, own)}
    found = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def _rotated(
    own: Callable,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *more: int,
    **named: int,
) -> tuple[torch.Tensor, ...]:
    """Queries [1, H, N, e] and keys [1, h, N, e] rotated (Su et al. 2021, eq. 34) by cos and sin
    [1, N, e]; by `own` where these are narrower than the heads, or not float32, or where more is
    asked for."""
    if more or named or cos.shape[-1] != q.shape[-1] or cos.dtype != torch.float32:
        return own(q, k, cos, sin, *more, **named)
    return tuple(_Rotation.apply(states, cos[:, None], sin[:, None]) for states in (q, k))


class _Rotation(torch.autograd.Function):
    """x · cos + (−x₂, x₁) · sin, where x₁ and x₂ are the halves of x."""

    @staticmethod
    def forward(ctx, states, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = states.dtype
        return _turn(states.float(), cos, *sin.chunk(2, -1))

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        ahead, behind = sin.chunk(2, -1)
        return _turn(grad.float(), cos, -behind, -ahead).to(ctx.dtype), None, None


def _turn(
    states: torch.Tensor, cos: torch.Tensor, ahead: torch.Tensor, behind: torch.Tensor
) -> torch.Tensor:
    """x₁ · cos₁ − x₂ · `ahead` and x₂ · cos₂ + x₁ · `behind`"""
    found = states * cos
    for into, other, factor, sign in zip(
        found.chunk(2, -1), states.chunk(2, -1)[::-1], (ahead, behind), (-1, 1), strict=True
    ):
        into.addcmul_(other, factor, value=sign)
    return found
