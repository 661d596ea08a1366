"""Keys and values of a prompt, once more for each completion that reads them: what the kernel for
sequences of any lengths takes.

The gradient of a lookup sorts its index in every layer; here the index is the same in all of them,
and was put in order when the row was laid out. The sums are taken in that order: the same bits each
time.
"""

from __future__ import annotations

import numpy as np
import torch


def in_order(index: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Places [K] int64 in `index` [K], those of row 0 first; and offsets [num_rows + 1] int64: the
    places of row i are places[offsets[i]] … places[offsets[i + 1] − 1]."""
    counts = np.bincount(index, minlength=num_rows)
    return index.argsort(kind="stable"), np.append(0, counts.cumsum())


class Copies(torch.autograd.Function):
    """Rows `index` [K] of keys and values [N, h, e], contiguous; `copies` and `offsets` are what
    `in_order` gives of it."""

    @staticmethod
    def forward(ctx, keys, values, index, copies, offsets):
        ctx.save_for_backward(copies, offsets)
        return keys.index_select(0, index), values.index_select(0, index)

    @staticmethod
    def backward(ctx, *grads):
        from . import operations

        rows = (grad.flatten(1).contiguous() for grad in grads)
        sums = operations.add_copies(*rows, *ctx.saved_tensors)
        return *(s.unflatten(1, grads[0].shape[1:]) for s in sums), None, None, None
