"""Keys and values of a prompt, repeated for each completion that reads them.

The kernel for sequences of any lengths needs them repeated. The gradient of a lookup would sort its
index in every layer. Here the index is the same in all layers and was sorted once, with the layout.
Sums are taken in this fixed order, so the bits are the same each time.
"""

from __future__ import annotations

import numpy as np
import torch


def in_order(index: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Group the positions of `index` [K] by row.

    Returns:
        places [K] int64 in `index`, those of row 0 first; and offsets [num_rows + 1] int64. The
        places of row i are places[offsets[i]] … places[offsets[i + 1] − 1].
    """
    counts = np.bincount(index, minlength=num_rows)
    return index.argsort(kind="stable"), np.append(0, counts.cumsum())


class Copies(torch.autograd.Function):
    """Rows `index` [K] of keys and values [N, h, e], contiguous.

    `copies` and `offsets` are the result of `in_order` for `index`.
    """

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
