"""Products of bfloat16 matrices that leave float32 behind, where the device's library makes them so
in one kernel: the sums inside are float32 anyway.

    logits = float32_product(hidden, weight.T)
    total = float32_product(grad.T, states, total)     # total += …, in the product's own kernel
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def float32_product(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """left @ right in float32; with `total`, which is float32, added to it in place. Where the
    device has no such product, the product in the dtype of both is made float32."""
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
    """Whether one kernel makes float32 of a product of two matrices like `states`."""
    return _abilities(states.device.type, states.dtype)[0]


@cache
def _abilities(device: str, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether a product in `dtype` can be left in float32, and be added to such a matrix. Tried, as
    builds differ."""
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
