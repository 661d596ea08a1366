"""Attention by FlashAttention's calls, loops standing in for torch's operations: in float64 against
blocks, over all kinds of layouts; and what it keeps, on meta tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from quiver.stages.model.forward.attention import attend_runs, block_attention
from quiver.stages.model.forward.layout import Blocks, Scoring, Sequences, make_layout
from quiver.stages.model.forward.packing import Piece
from quiver.stages.model.forward.transfer import to_device
from quiver.stages.model.ragged import Ragged
from tests import flash
from tests.bytes_moved import META, Counter
from tests.stages.model.forward import test_policy, test_turn_passes

SHARED = [(9, [4, 7, 1]), (5, [6]), (12, [3, 3, 8, 2])]
"""Tokens of prompts, and of the completions of each."""
LAYOUTS = {
    "shared": SHARED,
    "alone": [(9, [4]), (5, [6])],
    "completions of one token": [(4, [1, 1, 1]), (3, [2, 2])],
    "one group": [(2, [9, 9])],
    "alone first and last": [(3, [5]), (7, [2, 4]), (6, [3])],
}


def _sequences(pieces: list[tuple[int, list[int]]]) -> tuple[list[Piece], Sequences]:
    made, prompts, completions = [], [], []
    for prompt, lengths in pieces:
        rows = range(len(completions), len(completions) + len(lengths))
        made.append(Piece(tuple(rows), prompt + sum(lengths) - len(lengths)))
        prompts += [prompt] * len(lengths)
        completions += lengths
    ragged = (
        Ragged.from_lengths(torch.zeros(sum(lengths), dtype=torch.int64), torch.tensor(lengths))
        for lengths in (prompts, completions)
    )
    return made, Sequences(*ragged, torch.ones(len(completions)))


def _in_blocks(queries, keys, values, blocks: Blocks, window: int | None) -> torch.Tensor:
    """As `block_attention`, which has float32 on a CPU."""
    queries, keys, values = (states[0].transpose(0, 1) for states in (queries, keys, values))
    scoring = Scoring(8**-0.5, window)
    outputs = [
        F.scaled_dot_product_attention(
            queries[block.queries].transpose(1, 2),
            keys[block.keys].transpose(1, 2),
            values[block.keys].transpose(1, 2),
            attn_mask=block.mask(scoring, torch.float64),
            enable_gqa=True,
        )
        for block in blocks.parts
    ]
    joined = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
    return joined[blocks.gather][None]


def _compare(layout, window: int | None = None) -> None:
    draw = torch.Generator().manual_seed(0)
    length = layout.ids.numel()
    states = [
        torch.randn(1, heads, length, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    direction = torch.randn(1, length, 4, 8, generator=draw, dtype=torch.float64)
    with flash.on_cpu():
        found, _ = block_attention(None, *states, None, layout=layout, sliding_window=window)
        found = [found, *torch.autograd.grad(found, states, direction)]
    expected = _in_blocks(*states, layout.blocks, window)
    expected = [expected, *torch.autograd.grad(expected, states, direction)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_and_gradients_are_those_of_blocks(name, window):
    _compare(make_layout(*_sequences(LAYOUTS[name]), varlen=True), window)


def test_so_they_are_where_a_history_is_rewritten():
    """A prompt that completions read in several places is copied."""
    _, sequences, numbers = test_turn_passes.made(test_policy._model("llama"))
    rows_of: dict[int, list[int]] = {}
    for row, number in enumerate(numbers):
        rows_of.setdefault(number, []).append(row)
    layout = make_layout([Piece(tuple(r), 0) for r in rows_of.values()], sequences, varlen=True)
    assert layout.runs.calls == ()
    _compare(layout)


def test_a_prompts_keys_and_values_are_not_kept_for_each_completion():
    """A layer of Qwen3-1.7B keeps its output and log-sums. Copies would take 16 × 4,096 keys and
    values more: 268 MB a layer, 7.5 GB of the model's 28."""
    layout = to_device(make_layout(*_sequences([(4096, [512] * 16)]), varlen=True), META)
    length = layout.ids.numel()
    states = [
        torch.empty(length, heads, 128, dtype=torch.bfloat16, device=META, requires_grad=True)
        for heads in (16, 8, 8)
    ]
    with Counter({}) as counter:
        output = attend_runs(*states, layout.runs, Scoring(128**-0.5))
    log_sums = 4 * 16 * length
    assert output.nbytes + log_sums <= counter.live < output.nbytes + 3 * log_sums
