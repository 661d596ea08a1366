"""The kernels as functions of tensors, which also accept tensors without content (meta).

| operation | gives |
|---|---|
| `head` | for a chunk of logits: logprobs, entropy, and numbers that the gradient needs |
| `head_slope` | the gradient of that chunk |
| `norm`, `add_norm`, `norm_slope` | RMSNorm, also of a sum; its gradients |
| `gate`, `gate_slope` | silu(gate) · up; its gradients |
| `rotate` | rotary positions of queries and keys, also of their norms; the gradients |
| `merge` | attention over keys of two kinds, from the attention over each |

Importing this module needs Triton. Each operation reads and writes the tensors of its signature
once, and no other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .choice import MOST_SHARES

_ROW_BLOCK = 4096
"""Logits of a row that one program of the head holds at once."""
_TILE = 2048
"""Numbers of a norm's rows that one program holds at once, approximately."""
_COLUMNS = 1024
"""Numbers of a row that one program of another kernel holds at once."""


def _power(number: int) -> int:
    """Return the smallest power of two ≥ `number`, since blocks must be powers of two."""
    return 1 << max(0, number - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `kernel` on the device of its first tensor, since Triton uses the current device.

    Tensors without content (meta) stay without.
    """
    if arguments[0].device.type != "meta":
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **options)


# -- the head


def head(logits: Tensor, targets: Tensor, factors: Tensor, collision: bool) -> Tensor:
    """Compute logprobs and row statistics of logits [c, V] times factors [c].

    Returns [4, c] float32: the logprobs of `targets` [c] int64; the entropy, or Σ p² if
    `collision`; the largest logit; and log Σ exp(logit − largest).
    """
    rows = logits.new_empty(4, len(logits), dtype=torch.float32)
    launch(
        kernels.head_kernel,
        (len(logits),),
        logits,
        targets,
        factors,
        *rows.unbind(),
        logits.stride(0),
        logits.shape[1],
        COLLISION=collision,
        BLOCK=min(_ROW_BLOCK, _power(logits.shape[1])),
        num_warps=8,
    )
    return rows


def head_slope(
    logits: Tensor,
    targets: Tensor,
    factors: Tensor,
    rows: Tensor,
    grads: Tensor,
    entropy_grads: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient [c, V] of the logits, in `dtype`.

    Args:
        logits: [c, V].
        targets: [c] int64.
        factors: [c].
        rows: The result of `head`, with exp(logprob) − 1 in place of the logprobs.
        grads: [c] gradients of the logprobs.
        entropy_grads: [c] gradients of the entropy. None: it has none.
        dtype: Dtype of the result.
    """
    num_rows, num_ids = logits.shape
    slopes = logits.new_empty(num_rows, num_ids, dtype=dtype)
    block = min(_ROW_BLOCK, _power(num_ids))
    launch(
        kernels.head_slope_kernel,
        (num_rows, -(-num_ids // block)),
        logits,
        slopes,
        targets,
        factors,
        *rows.unbind(),
        grads,
        grads if entropy_grads is None else entropy_grads,
        logits.stride(0),
        num_ids,
        ENTROPY=entropy_grads is not None,
        BLOCK=block,
        num_warps=8,
    )
    return slopes


# -- RMSNorm


def _rows(states: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Return `states` […, width] and the position of its rows in memory.

    The position is the number of rows, heads per token, and the strides of tokens and heads. States
    that cannot be described so are copied.
    """
    sizes: list[list[int]] = []
    for size, stride in zip(states.shape[:-1], states.stride()[:-1], strict=True):
        if size == 1:
            continue
        if sizes and sizes[-1][1] == size * stride:
            sizes[-1] = [sizes[-1][0] * size, stride]
        else:
            sizes.append([size, stride])
    num_rows = states.numel() // states.shape[-1]
    if len(sizes) > 2 or states.stride(-1) != 1:
        return states.contiguous(), (num_rows, 1, states.shape[-1], 0)
    while len(sizes) < 2:
        sizes.append([1, 0])
    (_, token_stride), (num_heads, head_stride) = sizes
    return states, (num_rows, num_heads, token_stride, head_stride)


def _block(width: int) -> dict[str, int]:
    block = _power(width)
    return {"ROWS": max(1, _TILE // block), "BLOCK": block, "num_warps": 4 if block < 4096 else 8}


def norm(
    states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return weight · x / rms(x) of states […, width], contiguous, in `dtype`, and 1 / rms(x)
    [rows] float32."""
    output = states.new_empty(states.shape, dtype=dtype)
    return output, _normalize(states, None, weight, epsilon, states, output)


def add_norm(
    states: Tensor, branch: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of states and branch, in their common dtype, and the results of `norm` for it.

    `branch` must be contiguous.
    """
    total_dtype = torch.promote_types(states.dtype, branch.dtype)
    total = states.new_empty(states.shape, dtype=total_dtype)
    output = states.new_empty(states.shape, dtype=dtype)
    return total, output, _normalize(states, branch, weight, epsilon, total, output)


def _normalize(
    states: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    epsilon: float,
    total: Tensor,
    output: Tensor,
) -> Tensor:
    """Fill `output`, and `total` if there is a branch; return the scales."""
    states, where = _rows(states)
    scales = states.new_empty(where[0], dtype=torch.float32)
    block = _block(states.shape[-1])
    launch(
        kernels.norm_kernel,
        (-(-where[0] // block["ROWS"]),),
        states,
        states if branch is None else branch,
        weight,
        total,
        output,
        scales,
        epsilon,
        *where,
        states.shape[-1],
        ADD=branch is not None,
        **block,
    )
    return scales


def norm_slope(
    grad: Tensor,
    total_grad: Tensor | None,
    states: Tensor,
    weight: Tensor,
    scales: Tensor,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a norm. Gradients passed in must be contiguous.

    Returns:
        The gradient of the norm's input, contiguous, with `total_grad` added if given; the same
        gradient in `branch_dtype`, empty if that is None; and shares [p, width] float32 whose sum
        is the gradient of the weight.
    """
    states, where = _rows(states)
    width = states.shape[-1]
    block = _block(width)
    num_programs, num_turns = _shares(where[0], block["ROWS"])
    grad_states = states.new_empty(states.shape)
    grad_branch = states.new_empty(0)
    if branch_dtype is not None:
        grad_branch = states.new_empty(states.shape, dtype=branch_dtype)
    shares = states.new_empty(num_programs, width, dtype=torch.float32)
    launch(
        kernels.norm_slope_kernel,
        (num_programs,),
        grad,
        grad if total_grad is None else total_grad,
        states,
        weight,
        scales,
        grad_states,
        grad_branch,
        shares,
        *where,
        width,
        num_turns,
        ADD=total_grad is not None,
        TWICE=branch_dtype is not None,
        **block,
    )
    return grad_states, grad_branch, shares


def _shares(num_rows: int, rows_at_once: int) -> tuple[int, int]:
    """Return the number of programs, and how many turns of `rows_at_once` rows each takes."""
    num_turns = max(1, -(-num_rows // (rows_at_once * MOST_SHARES)))
    return -(-num_rows // (rows_at_once * num_turns)), num_turns


# -- the gated MLP


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """Return silu(gates) · ups of two matrices [N, i] of one dtype; their rows may be strided."""
    num_rows, width = gates.shape
    output = gates.new_empty(num_rows, width)
    launch(
        kernels.gate_kernel,
        (num_rows, -(-width // _COLUMNS)),
        gates,
        ups,
        output,
        gates.stride(0),
        ups.stride(0),
        width,
        BLOCK=_COLUMNS,
    )
    return output


def gate_slope(grad: Tensor, gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gates and ups, side by side [N, 2 i], and the result of `gate`."""
    num_rows, width = gates.shape
    both = gates.new_empty(num_rows, 2 * width)
    output = gates.new_empty(num_rows, width)
    strides = (tensor.stride(0) for tensor in (grad, gates, ups))
    launch(
        kernels.gate_slope_kernel,
        (num_rows, -(-width // _COLUMNS)),
        grad,
        gates,
        ups,
        both,
        output,
        *strides,
        width,
        BLOCK=_COLUMNS,
    )
    return both, output


# -- rotary positions


_TOKENS = 8
"""Tokens of one program."""


class Norms(NamedTuple):
    """Norms of queries and keys before their rotation."""

    query_weight: Tensor
    """[e]"""
    key_weight: Tensor
    """[e]"""
    epsilon: float


def rotate(
    queries: Tensor,
    keys: Tensor,
    cosines: Tensor,
    sines: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    norms: Norms | None = None,
    *,
    inverse: bool = False,
    before: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries [L, H, e] and keys [L, h, e], normalized first if there are `norms`.

    Args:
        queries: Heads of width e, each contiguous.
        keys: The same.
        cosines: [L, e], contiguous.
        sines: [L, e], contiguous.
        dtypes: Dtypes of the results.
        norms: The norms. Default: none.
        inverse: If true, compute gradients: `queries` and `keys` are those of the results.
        before: For the gradients of norms, their inputs.

    Returns:
        Both, contiguous; and shares [p, 2, e] float32 of the gradients of the norms' weights.
    """
    num_tokens, _, width = queries.shape
    num_programs, num_turns, num_shares = -(-num_tokens // _TOKENS), 1, 0
    if inverse and norms is not None:
        num_programs, num_turns = _shares(num_tokens, _TOKENS)
        num_shares = num_programs
    device = queries.device
    shares = torch.empty(num_shares, 2, width, dtype=torch.float32, device=device)
    turned = [
        torch.empty(states.shape, dtype=dtype, device=device)
        for states, dtype in zip((queries, keys), dtypes, strict=True)
    ]
    before = before or (queries, keys)
    query_weight, key_weight, epsilon = norms or (cosines, cosines, 0.0)
    launch(
        kernels.rotate_kernel,
        (num_programs,),
        queries,
        keys,
        cosines,
        sines,
        *turned,
        *before,
        query_weight,
        key_weight,
        shares,
        num_tokens,
        num_turns,
        queries.shape[1],
        keys.shape[1],
        *(stride for states in (queries, keys, *before) for stride in states.stride()[:2]),
        width // 2,
        epsilon,
        INVERSE=inverse,
        NORM=norms is not None,
        TOKENS=_TOKENS,
        BLOCK=_power(width // 2),
    )
    return *turned, shares


# -- attention over the keys of several calls


def merge(
    output: Tensor, log_sums: Tensor, more: Tensor, more_log_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention's output [L, H, e] and log-sums [H, L] over some keys with those over others,
    into the first. A query whose other log-sum is infinite saw none of the others."""
    output = output.contiguous()
    num_tokens, num_heads, width = output.shape
    launch(
        kernels.merge_kernel,
        (-(-num_tokens // _TOKENS), num_heads),
        output,
        log_sums,
        more.contiguous(),
        more_log_sums,
        num_tokens,
        num_heads,
        width,
        TOKENS=_TOKENS,
        BLOCK=_power(width),
    )
    return output, log_sums
