"""Which kernel attends: blocks by torch's fused kernels, or one kernel for sequences of any
lengths.

On a GPU in bfloat16 both are measured at the start of a stage, on what attention is really given
for the first micro-batch: the faster one is taken, if it gives the numbers of attention in float32.
Everywhere else there are only blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from quiver.stages.common.forward.attention import (
    NAME,
    Layout,
    Sequences,
    block_attention,
    make_layout,
)
from quiver.stages.common.forward.packing import Piece

if TYPE_CHECKING:
    from quiver.stages.common.forward.policy import Policy

_TOLERANCE = 0.02
"""Largest error of an output or gradient, as a share of its norm: bfloat16 itself is near 0.005, a
wrong key far above."""
_REPEATS = 3
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """What a layer gave to attention: query [1, H, N, e], key and value [1, h, N, e], and the
    options beside them."""

    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: dict[str, Any]

    @property
    def kind(self) -> tuple:
        return (
            *(each.shape for each in self.states),
            self.options.get("sliding_window"),
            self.options.get("scaling"),
        )


def choose_kernel(policy: Policy, pieces: Sequence[Piece], data: Sequences) -> str:
    """Set and return the kernel of the policy's passes: `blocks`, `varlen`, or `model` where the
    model attends in its own way.

    With gradients, where they are enabled, the backward pass counts too. `pieces` are a
    micro-batch.
    """
    policy.varlen = False
    if policy.mode == "single" or policy.start is not None:
        return "model"
    if policy.device.type != "cuda":
        return "blocks"
    layout = make_layout(pieces, data, policy.device, varlen=True)
    with policy.context():
        with torch.no_grad(), recorded() as calls:
            policy(replace(layout, runs=None))
        policy.varlen = varlen_is_faster(list(calls.values()), layout)
    return "varlen" if policy.varlen else "blocks"


@contextmanager
def recorded() -> Iterator[dict[tuple, Call]]:
    """Inside, the first call of block attention of each kind is kept."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: dict[tuple, Call] = {}

    def record(module, query, key, value, attention_mask, *, layout, **options):
        call = Call((query.detach(), key.detach(), value.detach()), options)
        calls.setdefault(call.kind, call)
        return block_attention(module, query, key, value, attention_mask, layout=layout, **options)

    ALL_ATTENTION_FUNCTIONS.register(NAME, record)
    try:
        yield calls
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, block_attention)


def varlen_is_faster(calls: Sequence[Call], layout: Layout) -> bool:
    """Whether the kernel for any lengths is right in each of `calls` and takes less time for all;
    `layout` has runs."""
    if any(call.states[2].dtype != torch.bfloat16 for call in calls):
        return False
    blocks, seconds = replace(layout, runs=None), {"blocks": 0.0, "varlen": 0.0}
    try:
        for call in calls:
            error = _error(call, layout, blocks)
            if not error <= _TOLERANCE:  # NaN is not
                log.warning(
                    "attention: varlen is wrong here by %.3f of the norm; using blocks", error
                )
                return False
            for name, each in (("blocks", blocks), ("varlen", layout)):
                seconds[name] += _seconds(
                    lambda each=each, call=call: _pass(call.states, call.options, each)
                )
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        log.warning("attention: varlen does not run here (%s); using blocks", error)
        return False
    log.info(
        "attention: blocks %.2f ms, varlen %.2f ms",
        1e3 * seconds["blocks"],
        1e3 * seconds["varlen"],
    )
    return seconds["varlen"] < seconds["blocks"]


def _pass(
    states: Sequence[torch.Tensor], options: dict[str, Any], layout: Layout
) -> list[torch.Tensor]:
    """The output, and where gradients are enabled those of `states` for the same random gradient
    each time."""
    leaves = [each.detach().requires_grad_(torch.is_grad_enabled()) for each in states]
    out, _ = block_attention(None, *leaves, None, layout=layout, **options)
    if not torch.is_grad_enabled():
        return [out]
    generator = torch.Generator(out.device).manual_seed(0)
    grad = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _error(call: Call, layout: Layout, blocks: Layout) -> float:
    """Of output and gradients the largest difference to blocks in float32, as a share of its
    norm."""
    narrow = [each.to(torch.bfloat16) for each in call.states]
    found = _pass(narrow, call.options, layout)
    with torch.autocast(layout.ids.device.type, enabled=False):
        expected = _pass([each.float() for each in narrow], call.options, blocks)
    errors = [
        (mine.float() - each).norm() / each.norm()
        for mine, each in zip(found, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def _seconds(run: Callable[[], object]) -> float:
    """The least of some runs after a first one, on the device."""
    run()
    taken = []
    for _ in range(_REPEATS):
        _wait()
        started = time.perf_counter()
        run()
        _wait()
        taken.append(time.perf_counter() - started)
    return min(taken)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
