"""Products of bfloat16 matrices with float32 results, if the device's library supports them.

One kernel then makes them, since its sums are float32 anyway.

    logits = float32_product(hidden, weight.T)
    total = float32_product(grad.T, states, total)     # total += …, in the product's own kernel
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def float32_product(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """Return left @ right in float32; if `total` (float32) is given, add to it in place.

    If the device has no such product, the product is made in the factors' dtype and converted.
    """
    with torch.autocast(left.device.type, enabled=False):
        can_widen, can_add = _abilities(left.device.type, left.dtype)
        if total is None:
            return (
                torch.mm(left, right, out_dtype=torch.float32)
                if can_widen
                else (torch.mm(left, right).float())
            )
        if can_add:
            return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return total.add_(float32_product(left, right))


def makes_float32(states: Tensor) -> bool:
    """True if one kernel makes a float32 product of two matrices like `states`."""
    return _abilities(states.device.type, states.dtype)[0]


@cache
def _abilities(device: str, dtype: torch.dtype) -> tuple[bool, bool]:
    """Return whether a product in `dtype` can be float32, and can be added to a float32 matrix.

    Tried, because builds differ.
    """
    if device not in ("cuda", "meta") or dtype not in (torch.bfloat16, torch.float16):
        return False, False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, device=device)
    abilities = []
    for added in (None, total):
        options = {"out_dtype": torch.float32}
        try:
            if added is None:
                product = torch.mm(ones, ones, **options)
            else:
                product = torch.addmm(added, ones, ones, out=added, **options)
        except (NotImplementedError, RuntimeError, TypeError):
            abilities.append(False)
        else:
            expected = torch.full_like(total, 16 if added is None else 17)
            is_right = product.dtype == torch.float32
            abilities.append(is_right and (device == "meta" or torch.equal(product, expected)))
    return tuple(abilities)
