"""AdamW for weights that are bfloat16: moments and arithmetic in float32, and two ways to keep what
8 bits can not hold.

A step moves a weight by about the learning rate; a bfloat16 weight w can move by |w| / 256 at
least, or not at all. Rounded to nearest, most steps would change nothing, ever. So either

* `bf16_master`: the weights proper are float32 and travel with the optimizer's state; the model
  holds them rounded to nearest.
* `bf16_stochastic`: there are no others. After each step a weight goes to one of its two bfloat16
  neighbours by chance, so that it is right in the mean, and steps that are too small for one weight
  still move many.

The chance follows from seed, step and parameter: ranks round alike, and a restart does too.
Gradients are float32 (see `narrow`).

    masters = narrow(model)
    optimizer = Bf16AdamW(groups, masters if config.precision == "bf16_master" else {}, seed=0,
    step=12, lr=1e-6)

References: https://arxiv.org/abs/1710.03740 (master weights); https://arxiv.org/abs/1502.02551
(stochastic rounding).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.adamw import adamw

PRECISIONS = ("bf16_master", "bf16_stochastic")
MASTER = "master"
"""Name of the float32 weight in a parameter's state."""
_CHUNK = 1 << 20
"""Numbers rounded at a time: what rounding needs beside them stays small."""


class Bf16AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose state of a parameter may hold a `master`; without one a bfloat16
    weight is rounded by chance.

    Parameters in float32, such as a value head's, are treated as AdamW does.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        masters: Mapping[nn.Parameter, torch.Tensor],
        *,
        seed: int,
        step: int,
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self.seed, self.number = seed, step
        for parameter, master in masters.items():
            self.state[parameter] = {MASTER: master}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step over all weights that have a gradient, one after another; `number` counts steps
        over the policy's life."""
        numbered = enumerate(
            (group, parameter) for group in self.param_groups for parameter in group["params"]
        )
        for index, (group, parameter) in numbered:
            if parameter.grad is None:
                continue
            held = self.state[parameter]
            wide = held.get(MASTER, parameter).float()  # a float32 tensor itself, else a copy
            if "step" not in held:
                held["step"] = torch.zeros((), device=wide.device)
                held["exp_avg"], held["exp_avg_sq"] = torch.zeros_like(wide), torch.zeros_like(wide)
            adamw(
                [wide], [parameter.grad.float()], [held["exp_avg"]], [held["exp_avg_sq"]], [], [held["step"]], fused=True,
                amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            if MASTER in held:
                parameter.copy_(wide)
            elif parameter.dtype == torch.bfloat16:
                self._round(parameter, wide, index)
        self.number += 1

    def _round(self, parameter: nn.Parameter, wide: torch.Tensor, index: int) -> None:
        generator = torch.Generator(parameter.device)
        generator.manual_seed(
            int(np.random.SeedSequence([self.seed, self.number, index]).generate_state(1)[0])
        )
        for narrow, part in zip(
            parameter.view(-1).split(_CHUNK), wide.view(-1).split(_CHUNK), strict=True
        ):
            narrow.copy_(round_by_chance(part, generator))


def round_by_chance(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[n] float32 to [n] bfloat16: each to the neighbour below or above it, so that the mean over
    many draws is the value.

    P(up) = (x − low) / (high − low), exact to 2^-16: a bfloat16 is the upper half of a float32's
    bits, so the lower half over 65536 is how far x is on the way from the neighbour that is nearer
    to 0, and a uniform number of 16 bits, added below, carries over that often. What bfloat16 holds
    stays as it is, infinities and NaN too.
    """
    bits = values.view(torch.int32)
    words = torch.empty(
        -(-len(bits) // 4), dtype=torch.int64, device=bits.device
    )  # four numbers each: drawing them costs most
    noise = (
        words.random_(-(2**63), None, generator=generator)
        .view(torch.int16)[: len(bits)]
        .int()
        .bitwise_and_(0xFFFF)
    )
    rounded = noise.add_(bits).bitwise_and_(-0x10000).view(torch.float32)
    return rounded.to(torch.bfloat16).masked_fill_(
        values.isnan(), torch.nan
    )  # the carry makes a GPU's NaN, all ones, a 0
