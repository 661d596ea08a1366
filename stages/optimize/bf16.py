"""AdamW for bfloat16 weights, with moments and arithmetic in float32.

A step moves a weight by about the learning rate, but the smallest move of a bfloat16 weight w is
about |w| / 256. Rounded to nearest, most steps would never change anything. So after each step a
weight is rounded stochastically to one of its two bfloat16 neighbours: it is right in the mean, and
steps that are too small for one weight still move many.

The random numbers follow from seed, step and parameter, so all ranks round alike, and a restart
does too. Gradients are float32 (see `narrow`).

    narrow(model)
    optimizer = Bf16AdamW(groups, seed=0, step=12, lr=1e-6)

Reference: https://arxiv.org/abs/1502.02551 (stochastic rounding).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

_CHUNK = 1 << 20
"""Numbers rounded at a time, which bounds the memory for random bits."""


class Bf16AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with stochastic rounding of bfloat16 weights.

    Parameters in float32, such as a value head's, are treated as AdamW does.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, seed: int, step: int, **options: Any
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self.seed = seed
        self.number = step
        """Steps over the policy's life."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step over all weights that have a gradient, one after another."""
        index = -1
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                wide = parameter.float()  # the tensor itself if float32, else a copy
                if "step" not in state:
                    state["step"] = torch.zeros((), device=wide.device)
                    state["exp_avg"] = torch.zeros_like(wide)
                    state["exp_avg_sq"] = torch.zeros_like(wide)
                adamw(
                    [wide],
                    [parameter.grad.float()],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [state["step"]],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                if parameter.dtype != torch.bfloat16:
                    continue
                seed = np.random.SeedSequence([self.seed, self.number, index]).generate_state(1)[0]
                generator = torch.Generator(parameter.device)
                generator.manual_seed(int(seed))
                chunks = (tensor.view(-1).split(_CHUNK) for tensor in (parameter, wide))
                for narrow_chunk, wide_chunk in zip(*chunks, strict=True):
                    narrow_chunk.copy_(round_by_chance(wide_chunk, generator))
        self.number += 1


def round_by_chance(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round [n] float32 to [n] bfloat16: each to the neighbour below or above it, so that the mean
    over many draws is the value.

    P(up) = (x − low) / (high − low), exact to 2^-16. A bfloat16 is the upper half of a float32's
    bits, so the lower half over 65536 is the distance of x from the neighbour nearer to 0, as a
    share. Adding a uniform 16-bit number to the lower half carries over with that probability.
    Values that bfloat16 can hold stay unchanged, infinities and NaN too.
    """
    bits = values.view(torch.int32)
    # each word gives four numbers, since drawing them costs most
    words = torch.empty(-(-len(bits) // 4), dtype=torch.int64, device=bits.device)
    words.random_(-(2**63), None, generator=generator)
    noise = words.view(torch.int16)[: len(bits)].int().bitwise_and_(0xFFFF)
    rounded = noise.add_(bits).bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)
    # a GPU's NaN has all bits 1, and the carry would make it 0
    return rounded.masked_fill_(values.isnan(), torch.nan)
