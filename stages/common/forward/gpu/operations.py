"""The kernels as operations of torch, which tensors without content (meta) go through as well.

| operation | gives |
|---|---|
| `head` | of a chunk of logits: logprobs, entropy, and what the gradient needs |
| `head_slope` | the gradient by that chunk |
| `norm`, `add_norm`, `norm_slope` | RMSNorm, also of a sum; its gradients |
| `gate`, `gate_slope` | silu(gate) · up; its gradients |
| `rotate` | rotary positions of queries and keys, or back |
| `add_copies` | of a shared prompt's keys and values the gradients, summed over its completions |

Importing this needs Triton. Each operation reads and writes what its signature shows, once: no
other memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from . import kernels

_ROW_BLOCK = 4096
"""Logits of a row that a program of the head has in hand."""
_PROGRAMS = 512
"""Shares of a norm's gradient by its weight."""
_TILE = 2048
"""About as many numbers of a norm's rows are in hand at once."""
_COLUMNS = 1024
"""Numbers of a row that a program has in hand elsewhere."""


def _power(number: int) -> int:
    """The power of two from `number` on: as many lanes hold it."""
    return 1 << max(0, number - 1).bit_length()


def _on_its_device(operation: Callable) -> Callable:
    """The same where its first tensor is: Triton takes the device that the process has chosen."""

    @wraps(operation)
    def run(first: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(first):
            return operation(first, *others)

    return run


# -- the head


@torch.library.custom_op("quiver::head", mutates_args=())
@_on_its_device
def head(logits: Tensor, targets: Tensor, factors: Tensor, collision: bool) -> Tensor:
    """Logits [c, V] times factors [c] -> [4, c] float32: logprobs of targets [c] int64; entropy, or
    Σ p² for `collision`; the largest logit, and log Σ exp(logit − largest)."""
    rows = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
    kernels.head_kernel[(len(logits),)](
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


@head.register_fake
def _(logits, targets, factors, collision):
    return logits.new_empty(4, len(logits), dtype=torch.float32)


@torch.library.custom_op("quiver::head_slope", mutates_args=())
@_on_its_device
def head_slope(
    logits: Tensor,
    targets: Tensor,
    factors: Tensor,
    rows: Tensor,
    grads: Tensor,
    entropy_grads: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient [c, V] by the logits, in `dtype`; `rows` is what `head` gave, with exp(logprob)
    − 1 in place of the logprobs. `grads` [c] are those of the logprobs; `entropy_grads` [c] those
    of the entropy, None where it has none."""
    num_rows, num_ids = logits.shape
    slopes = torch.empty(num_rows, num_ids, dtype=dtype, device=logits.device)
    block = min(_ROW_BLOCK, _power(num_ids))
    kernels.head_slope_kernel[(num_rows, -(-num_ids // block))](
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


@head_slope.register_fake
def _(logits, targets, factors, rows, grads, entropy_grads, dtype):
    return logits.new_empty(logits.shape, dtype=dtype)


# -- RMSNorm


def _rows(states: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """`states` […, width], and where its rows lie: how many there are, heads of a token, and the
    strides of tokens and heads. Copied where that does not say it."""
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


@torch.library.custom_op("quiver::norm", mutates_args=())
@_on_its_device
def norm(
    states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """weight · x / rms(x) of states […, width], contiguous, in `dtype`, and 1 / rms(x) [rows]
    float32."""
    output = torch.empty(states.shape, dtype=dtype, device=states.device)
    return output, _normalize(states, None, weight, epsilon, states, output)


@norm.register_fake
def _(states, weight, epsilon, dtype):
    scales = states.new_empty(states.numel() // states.shape[-1], dtype=torch.float32)
    return states.new_empty(states.shape, dtype=dtype), scales


@torch.library.custom_op("quiver::add_norm", mutates_args=())
@_on_its_device
def add_norm(
    states: Tensor, branch: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of states and branch, in the dtype that they have together, and of it what `norm`
    gives. `branch` is contiguous."""
    total_dtype = torch.promote_types(states.dtype, branch.dtype)
    total = torch.empty(states.shape, dtype=total_dtype, device=states.device)
    output = torch.empty(states.shape, dtype=dtype, device=states.device)
    return total, output, _normalize(states, branch, weight, epsilon, total, output)


@add_norm.register_fake
def _(states, branch, weight, epsilon, dtype):
    total_dtype = torch.promote_types(states.dtype, branch.dtype)
    scales = states.new_empty(states.numel() // states.shape[-1], dtype=torch.float32)
    total = states.new_empty(states.shape, dtype=total_dtype)
    return total, states.new_empty(states.shape, dtype=dtype), scales


def _normalize(
    states: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    epsilon: float,
    total: Tensor,
    output: Tensor,
) -> Tensor:
    """Fill `output`, and `total` where there is a branch; the scales."""
    states, where = _rows(states)
    scales = torch.empty(where[0], dtype=torch.float32, device=states.device)
    block = _block(states.shape[-1])
    kernels.norm_kernel[(-(-where[0] // block["ROWS"]),)](
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


@torch.library.custom_op("quiver::norm_slope", mutates_args=())
@_on_its_device
def norm_slope(
    grad: Tensor,
    total_grad: Tensor | None,
    states: Tensor,
    weight: Tensor,
    scales: Tensor,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient by what was normalized, contiguous, `total_grad` added where it is given; the
    same in `branch_dtype`, or nothing; and shares [p, width] float32 whose sum is the gradient by
    the weight. The gradients given are contiguous."""
    states, where = _rows(states)
    width = states.shape[-1]
    block = _block(width)
    num_programs, num_turns = _shares(where[0], block["ROWS"])
    grad_states = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    grad_branch = torch.empty(0, dtype=states.dtype, device=states.device)
    if branch_dtype is not None:
        grad_branch = torch.empty(states.shape, dtype=branch_dtype, device=states.device)
    shares = torch.empty(num_programs, width, dtype=torch.float32, device=states.device)
    kernels.norm_slope_kernel[(num_programs,)](
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


@norm_slope.register_fake
def _(grad, total_grad, states, weight, scales, branch_dtype):
    width = states.shape[-1]
    num_programs, _ = _shares(len(scales), _block(width)["ROWS"])
    shares = states.new_empty(num_programs, width, dtype=torch.float32)
    branch = states.new_empty(0)
    if branch_dtype is not None:
        branch = states.new_empty(states.shape, dtype=branch_dtype)
    return states.new_empty(states.shape), branch, shares


def _shares(num_rows: int, rows_at_once: int) -> tuple[int, int]:
    """Programs, and turns of `rows_at_once` that each takes."""
    num_turns = max(1, -(-num_rows // (rows_at_once * _PROGRAMS)))
    return -(-num_rows // (rows_at_once * num_turns)), num_turns


# -- the gated MLP


@torch.library.custom_op("quiver::gate", mutates_args=())
@_on_its_device
def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) · ups of two matrices [N, i] of one dtype, whose rows may lie apart."""
    num_rows, width = gates.shape
    output = torch.empty(num_rows, width, dtype=gates.dtype, device=gates.device)
    kernels.gate_kernel[(num_rows, -(-width // _COLUMNS))](
        gates, ups, output, gates.stride(0), ups.stride(0), width, BLOCK=_COLUMNS
    )
    return output


@gate.register_fake
def _(gates, ups):
    return gates.new_empty(gates.shape)


@torch.library.custom_op("quiver::gate_slope", mutates_args=())
@_on_its_device
def gate_slope(grad: Tensor, gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by gates and ups, beside each other [N, 2 i], and what `gate` gives."""
    num_rows, width = gates.shape
    both = torch.empty(num_rows, 2 * width, dtype=gates.dtype, device=gates.device)
    output = torch.empty(num_rows, width, dtype=gates.dtype, device=gates.device)
    strides = (tensor.stride(0) for tensor in (grad, gates, ups))
    kernels.gate_slope_kernel[(num_rows, -(-width // _COLUMNS))](
        grad, gates, ups, both, output, *strides, width, BLOCK=_COLUMNS
    )
    return both, output


@gate_slope.register_fake
def _(grad, gates, ups):
    num_rows, width = gates.shape
    return gates.new_empty(num_rows, 2 * width), gates.new_empty(num_rows, width)


# -- rotary positions


_TOKENS = 8
"""Tokens of one program."""


@torch.library.custom_op("quiver::rotate", mutates_args=())
@_on_its_device
def rotate(
    queries: Tensor,
    keys: Tensor,
    cosines: Tensor,
    sines: Tensor,
    inverse: bool,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Queries [N, H, e] and keys [N, h, e] turned by cosines and sines [N, e], which are
    contiguous; `inverse`: turned back, which is the gradient. Both contiguous, in these dtypes."""
    num_tokens, num_heads, width = queries.shape
    shape = num_tokens, keys.shape[1], width
    new_queries = torch.empty(queries.shape, dtype=query_dtype, device=queries.device)
    new_keys = torch.empty(shape, dtype=key_dtype, device=keys.device)
    kernels.rotate_kernel[(-(-num_tokens // _TOKENS),)](
        queries,
        keys,
        cosines,
        sines,
        new_queries,
        new_keys,
        num_tokens,
        num_heads,
        keys.shape[1],
        *queries.stride()[:2],
        *keys.stride()[:2],
        width // 2,
        INVERSE=inverse,
        TOKENS=_TOKENS,
        BLOCK=_power(width // 2),
    )
    return new_queries, new_keys


@rotate.register_fake
def _(queries, keys, cosines, sines, inverse, query_dtype, key_dtype):
    new_queries = queries.new_empty(queries.shape, dtype=query_dtype)
    return new_queries, keys.new_empty(keys.shape, dtype=key_dtype)


# -- keys and values of a prompt that several completions read


@torch.library.custom_op("quiver::add_copies", mutates_args=())
@_on_its_device
def add_copies(
    key_grads: Tensor, value_grads: Tensor, copies: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients [K, w] of copies, contiguous and of one dtype, summed for each of N tokens [N, w];
    token i's are the rows copies[offsets[i]] … copies[offsets[i + 1] − 1]."""
    num_tokens, width = len(offsets) - 1, key_grads.shape[1]
    new_keys, new_values = (key_grads.new_empty(num_tokens, width) for _ in range(2))
    kernels.add_copies_kernel[(num_tokens, -(-width // _COLUMNS))](
        key_grads,
        value_grads,
        new_keys,
        new_values,
        copies,
        offsets,
        width,
        BLOCK=min(_COLUMNS, _power(width)),
    )
    return new_keys, new_values


@add_copies.register_fake
def _(key_grads, value_grads, copies, offsets):
    shape = len(offsets) - 1, key_grads.shape[1]
    return key_grads.new_empty(shape), value_grads.new_empty(shape)
