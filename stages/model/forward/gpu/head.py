"""The logprob head by kernels: each pass, forward and backward, reads a chunk of logits once.

The backward pass makes the chunk again. Logits are float32, from bfloat16 factors. A gradient needs
only a few numbers per row, so no chunk is kept. The products themselves sum the weight's gradient
over chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from quiver.stages.model.folder import says_no_memory

from .choice import (
    agree,
    fits,
    float32_product,
    gradient_of,
    makes_float32,
    precision_of_products,
    uncast,
)

log = logging.getLogger(__name__)


class FusedHead(torch.autograd.Function):
    """Logprobs and entropy as in `logprob_head`, for a head without bias or softcap."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        factors: Tensor,
        chunks: Sequence[slice],
        dtype: torch.dtype,
        entropy_gradient: bool,
        collision: bool,
    ):
        """Compute the head. `factors` [n] multiply the logits; products take inputs in `dtype`."""
        from . import operations

        ctx.hidden_dtype = hidden.dtype
        ctx.parameter = weight
        ctx.chunks = chunks
        ctx.entropy_gradient = entropy_gradient
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
        parts = [hidden.new_empty(4, 0, dtype=torch.float32)]  # there may be no chunk
        for chunk in chunks:
            logits = _logits(hidden[chunk], weight)
            parts.append(operations.head(logits, targets[chunk], factors[chunk], collision))
        rows = torch.cat(parts, 1)
        ctx.save_for_backward(hidden, weight, targets, factors, rows)
        logprobs = rows[0].clone()
        spread = rows[1].clone()
        if not entropy_gradient:
            ctx.mark_non_differentiable(spread)
        return logprobs, spread

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        from . import operations

        hidden, weight, targets, factors, rows = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_so_far = gradient_of(ctx.parameter)
        grad_weight = grad_so_far
        # p − 1, exact also where p is near 1
        rows = torch.cat([torch.expm1(rows[:1]), rows[1:]])
        grad = grad.contiguous()
        entropy_grad = entropy_grad.contiguous() if ctx.entropy_gradient else None
        with uncast(hidden):
            for chunk in ctx.chunks:
                slopes = operations.head_slope(
                    _logits(hidden[chunk], weight),
                    targets[chunk],
                    factors[chunk],
                    rows[:, chunk],
                    grad[chunk],
                    None if entropy_grad is None else entropy_grad[chunk],
                    weight.dtype,
                )
                if needs_hidden:
                    torch.mm(slopes, weight, out=grad_hidden[chunk])
                if needs_weight:
                    grad_weight = float32_product(slopes.T, hidden[chunk], grad_weight)
        if grad_weight is grad_so_far:
            grad_weight = None
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.hidden_dtype),
            None if grad_weight is None else grad_weight.to(ctx.parameter.dtype),
            *[None] * 6,
        )


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return [c, V] float32 logits."""
    return float32_product(hidden, weight.T)


def is_fused(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """True if `FusedHead` supports these tensors and is right on this device."""
    return fits(hidden, weight) and _is_right(hidden.device.type, dtype)


@cache
def _is_right(device: str, dtype: torch.dtype) -> bool:
    """Compare with plain operations on a few rows, one of them extreme; once per process."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 32, generator=draw).to(device, dtype)
    weight = torch.randn(4100, 32, generator=draw).to(device, dtype)
    hidden[1] *= 1000
    targets = torch.tensor([0, 5, 4099, 17, 4096], device=device)
    factors = torch.linspace(0.5, 1.5, 5, device=device)
    grads = torch.linspace(-1, 1, 5, device=device)
    gives = []
    try:
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            for is_kernel in (True, False):
                leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
                if is_kernel:
                    chunks = [slice(0, 3), slice(3, 5)]
                    logprobs, entropy = FusedHead.apply(
                        *leaves, targets, factors, chunks, dtype, True, False
                    )
                else:
                    logits = leaves[0].float() @ leaves[1].float().T * factors[:, None]
                    table = logits.log_softmax(-1)
                    logprobs = table.gather(1, targets[:, None])[:, 0]
                    entropy = -(table * table.exp()).sum(-1)
                gradients = torch.autograd.grad([logprobs, entropy], leaves, [grads, grads])
                gives.append([logprobs.detach(), entropy.detach(), *gradients])
        is_right = agree(*gives, precision_of_products(dtype))
    except Exception as error:  # Triton, its compilers and the driver raise many types
        if says_no_memory(error):
            raise
        log.warning("the head's kernels do not run here (%s); using plain operations", error)
        return False
    if not is_right and dtype != torch.float32 and not makes_float32(hidden):
        log.info(
            "products of %s do not stay in float32 here; the head uses plain operations", dtype
        )
    elif not is_right:
        log.warning("the head's kernels are wrong here; using plain operations")
    return is_right
