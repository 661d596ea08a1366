"""FlashAttention over stretches of a strip, by torch's kernel for sequences of any lengths.

Several calls may share their queries: each gives an output and, for each query and head, the
logarithm of the sum of its exponentiated scores. These merge into the output for all keys
(https://arxiv.org/abs/2205.14135, section 3.1). A backward call takes the merged output and
logarithm, and gives its keys' part of the gradients. So completions read their prompt's keys and
values where they stand, and none are copied.

    with implemented_by("FA3"): …       # the same operations by FlashAttention 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from .choice import fits

if TYPE_CHECKING:
    from ..layout import Stretches

IMPLEMENTATIONS = ("FA3", "FA4")
"""Implementations that torch can put in place of its own FlashAttention, the first tried first.
Each is a package of its own, for some GPUs only."""


@contextmanager
def implemented_by(kernel: str) -> Iterator[None]:
    """Let the implementation `kernel` compute torch's FlashAttention while the context is open; a
    name that is not in IMPLEMENTATIONS changes nothing.

    torch switches it for the whole process. That covers the backward pass in other threads. Outside
    the context, all attention in this process is torch's own.
    """
    if kernel not in IMPLEMENTATIONS or kernel == current_flash_attention_impl():
        yield
        return
    activate_flash_attention_impl(kernel)
    try:
        yield
    finally:
        restore_flash_attention_impl()


class Flash(torch.autograd.Function):
    """Attention of queries [L, H, e] to keys and values [K, h, e], over the stretches of each call.

    With a window of w, a query of a causal call sees w keys, its own among them.
    """

    @staticmethod
    def forward(
        ctx,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        calls: Sequence[Stretches],
        scaling: float,
        window: int | None,
    ):
        ctx.calls = [_arguments(call, scaling, window) for call in calls]
        merged: tuple[Tensor, ...] = ()
        for positional, named in ctx.calls:
            output, log_sums, *random, _ = torch.ops.aten._flash_attention_forward(
                queries, keys, values, *positional, False, **named
            )
            merged = merge(*merged, output, log_sums)
        ctx.save_for_backward(queries, keys, values, *merged, *random)
        return merged[0]

    @staticmethod
    def backward(ctx, grad):
        *states, random, unused = ctx.saved_tensors
        first, *others = [
            torch.ops.aten._flash_attention_backward(
                grad, *states, *positional, random, unused, **named
            )
            for positional, named in ctx.calls
        ]
        for gradients in others:
            torch._foreach_add_(first, gradients)
        return *first, None, None, None


def _arguments(
    call: Stretches, scaling: float, window: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what both of torch's operations take; its option counts the keys before a query's
    own."""
    left = -1 if window is None or not call.causal else window - 1
    right = 0 if call.causal else -1
    dropout, is_causal = 0.0, (left, right) == (-1, 0)
    positional = call.query_offsets, call.key_offsets, *call.longest, dropout, is_causal
    return positional, {"scale": scaling, "window_size_left": left, "window_size_right": right}


def merge(
    output: Tensor,
    log_sums: Tensor,
    more: Tensor | None = None,
    more_log_sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two outputs [L, H, e] over different keys, with their log-sums [H, L]; the first may be
    overwritten. An infinite log-sum of the second means that the query saw no key there."""
    if more is None:
        return output, log_sums
    if fits(output):
        from . import operations

        return operations.merge(output, log_sums, more, more_log_sums)
    more_log_sums = more_log_sums.masked_fill(more_log_sums.isinf(), -torch.inf)
    share = torch.sigmoid(more_log_sums - log_sums).T[..., None].to(output.dtype)
    return torch.lerp(output, more, share), torch.logaddexp(log_sums, more_log_sums)
