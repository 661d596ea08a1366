"""Norms and MLPs of the common families that keep less memory for the backward pass.

For an RMSNorm, autograd keeps the input and the normalized input; for a gated MLP it keeps gate,
act(gate), up, and act(gate) · up. Here only the input is kept, or gate and up; the rest is computed
again from them. Only a module's `forward` is replaced, and only if the new one gives the same bits
for a probe. So a family that computes something else under these names is not changed.
"""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PROBE = 3
"""Positions of the probe."""


@torch.no_grad()
def recompute_norms_and_mlps(model: nn.Module) -> int:
    """Replace norms and MLPs in `model` if possible, and return how many were replaced.

    Call it in the precision of later passes.
    """
    num_replaced = 0
    for module in model.modules():
        if "forward" in vars(module):  # replaced already
            continue
        # modules that read more than one tensor, such as a norm with a gate, are left alone
        if len(inspect.signature(module.forward).parameters) != 1:
            continue
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", None)
        projections = [getattr(module, name, None) for name in _PROJECTIONS]
        width = 0
        if weight is not None and weight.ndim == 1 and epsilon is not None:
            width = len(weight)
            forward = partial(_normalize, module)
        elif hasattr(module, "act_fn") and all(isinstance(p, nn.Module) for p in projections):
            width = getattr(projections[0], "in_features", 0)
            forward = partial(_gate, module)
        if not width:
            continue
        probe = torch.randn(1, _PROBE, width, generator=torch.Generator().manual_seed(0))
        probe = probe.to(next(module.parameters()))
        probe = torch.cat([probe, standing_out(probe)])
        with torch.enable_grad():  # so that the code that training runs is compared
            is_same = torch.equal(module(probe), forward(probe))
        if is_same:
            module.forward = forward
            num_replaced += 1
    return num_replaced


def standing_out(probe: Tensor) -> Tensor:
    """Return large states […, d], with one far larger per row, as real models have them.

    Such states show whether something is cut off.
    """
    times = 10 if probe.dtype == torch.float16 else 100  # the products of an MLP must not overflow
    large = times * probe
    large[..., 0] *= times
    return large


def _gate(module: nn.Module, states: Tensor) -> Tensor:
    """[…, d] -> […, d]"""

    def project_down(gate: Tensor, up: Tensor) -> Tensor:
        return module.down_proj(module.act_fn(gate) * up)

    if not torch.is_grad_enabled():
        return type(module).forward(module, states)
    gate = module.gate_proj(states)
    up = module.up_proj(states)
    return checkpoint(project_down, gate, up, use_reentrant=False, preserve_rng_state=False)


def _normalize(module: nn.Module, states: Tensor) -> Tensor:
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
        """Return the gradients, with r = 1 / rms(x).

        With respect to x: r · w · g − x · r³ · mean(x · w · g). With respect to w: the sum of
        r · x · g.
        """
        states, weight, scale = ctx.saved_tensors
        wide, grad, scale = (tensor.float().flatten(0, -2) for tensor in (states, grad, scale))
        grad_weight = None
        with torch.autocast(grad.device.type, enabled=False):
            product = grad * wide
            # `mv` is not affected by settings for fast, less exact products
            if ctx.needs_input_grad[1]:
                grad_weight = product.T.mv(scale[:, 0]).to(weight.dtype)
            slope = product.mv(weight.float())[:, None] * scale.pow(3) / len(weight)
            grad_states = torch.mul(grad, weight, out=product)
            grad_states.mul_(scale).addcmul_(wide, slope, value=-1)
        return grad_states.view(states.shape).to(states.dtype), grad_weight, None
