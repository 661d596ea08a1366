"""Many rollouts in one row of tokens: the layout of a micro-batch, and attention that keeps them apart.

`shared`: a group's prompt stands once in the row; each completion follows, with positions that go on where the prompt ends, and
attends to the prompt and to itself. `packed`: each rollout is a piece of its own, prompt included. Either way attention runs in
blocks of sequences with similar lengths; a mask over the whole row is never made. `single` is the yardstick and the last
resort: one rollout after another through the model's own attention.

The block attention is plugged into transformers' attention interface, so every decoder that uses the interface works. What it
can not do (logit caps, sinks, position biases) it refuses, and `choose_mode` then takes the next simpler mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from stages.common.ragged import Ragged

from .packing import Piece

NAME = "quiver_blocks"
MODES = ("shared", "packed", "single")
_MASK_ITEMS = 32 * 1024 * 1024
"""Most items of one block's mask."""
_SHORT = 256
"""Longest block for which a CPU keeps the attention weights instead of calling the fused kernel."""
_SIMILAR = 0.75
"""A sequence joins a block when it has at least this share of its longest sequence's length."""


@dataclass(frozen=True)
class Sequences:
    """What the model reads of B rollouts, on the CPU."""

    prompts: Ragged
    completions: Ragged
    temperature: torch.Tensor
    """[B] float32"""


def prompt_numbers(prompts: Ragged, groups: Sequence[int]) -> list[int]:
    """[B] equal numbers for rollouts of one group with the same prompt ids: those can share the prompt."""
    keys: dict[tuple[int, bytes], int] = {}
    rows = zip(groups, prompts, strict=True)
    return [keys.setdefault((group, row.numpy().tobytes()), len(keys)) for group, row in rows]


@dataclass(frozen=True)
class Block:
    """Sequences that attend together. Row i of `queries` [n, q] and `keys` [n, k] points into the packed row; short rows are
    filled up with index 0. Query t sees keys 0 … start[i] + t, so fill at the end is never seen by a query that counts."""

    queries: torch.Tensor
    keys: torch.Tensor
    start: torch.Tensor
    causal: bool
    """True: queries and keys are the same tokens, and a plain causal mask does."""
    masks: dict = field(default_factory=dict, compare=False)

    def to(self, device: torch.device | str) -> Block:
        """The same block on `device`."""
        return Block(self.queries.to(device), self.keys.to(device), self.start.to(device), self.causal)

    def mask(self, window: int | None, dtype: torch.dtype, *, always: bool = False) -> torch.Tensor | None:
        """[n, 1, q, k], 0 where a query may look and −inf elsewhere; made once a micro-batch.

        None where plain causal attention does the same, unless `always`.
        """
        n, longest = self.keys.shape
        window = window if window is not None and window < longest else None
        if self.causal and window is None and not always:
            return None
        if (window, dtype) not in self.masks:
            place = torch.arange(longest, device=self.keys.device)
            last = self.start[:, None] + torch.arange(self.queries.shape[1], device=self.keys.device)
            last = last.clamp(max=longest - 1)  # fill that sees no key would have NaN as its gradient, and 0 · NaN is NaN
            seen = place <= last[..., None]
            if window is not None:
                seen &= place > last[..., None] - window
            blank = torch.zeros((n, 1, *seen.shape[1:]), dtype=dtype, device=seen.device)
            self.masks[window, dtype] = blank.masked_fill_(~seen[:, None], float("-inf"))
        return self.masks[window, dtype]


@dataclass(frozen=True)
class Layout:
    """One micro-batch as one row of N tokens, and where the n completion tokens of its rollouts are predicted."""

    ids: torch.Tensor
    """[1, N] int64"""
    positions: torch.Tensor
    """[1, N] int64; the completions of a shared prompt all start at its length."""
    blocks: tuple[Block, ...]
    gather: torch.Tensor
    """[N] where each token's output lies in the blocks' queries, row after row."""
    rows: torch.Tensor
    """[b] int64, on the CPU: rollouts in the order of their completion tokens below."""
    predictors: torch.Tensor
    """[n] index into the row: the token before the target."""
    targets: torch.Tensor
    """[n] int64"""
    temperature: torch.Tensor
    """[n] float32"""


def make_layout(pieces: Sequence[Piece], data: Sequences, device: torch.device | str = "cpu") -> Layout:
    """Lay out `pieces`: each prompt once, then its completions without their last id."""
    ids, positions, predictors, spans, at = [], [], [], [], 0
    for piece in pieces:
        prompt, first = data.prompts[piece.rows[0]], at
        at += len(prompt)
        ids.append(prompt)
        positions.append(torch.arange(len(prompt)))
        shared = len(piece.rows) > 1
        if shared:
            spans.append((0, 0, first, at))
        for row in piece.rows:
            inputs = data.completions[row][:-1]
            ids.append(inputs)
            positions.append(torch.arange(len(prompt), len(prompt) + len(inputs)))
            predictors += [torch.tensor([first + len(prompt) - 1]), torch.arange(at, at + len(inputs))]
            if not shared:
                spans.append((0, 0, first, at + len(inputs)))
            elif len(inputs):
                spans.append((first, first + len(prompt), at, at + len(inputs)))
            at += len(inputs)
    rows = torch.tensor([row for piece in pieces for row in piece.rows])
    completions = data.completions.take(rows)
    blocks, gather = _blocks(spans, at)
    return Layout(
        ids=torch.cat(ids).long()[None].to(device),
        positions=torch.cat(positions)[None].to(device),
        blocks=tuple(block.to(device) for block in blocks),
        gather=gather.to(device),
        rows=rows,
        predictors=torch.cat(predictors).to(device),
        targets=completions.values.long().to(device),
        temperature=data.temperature[rows].repeat_interleave(completions.lengths).to(device),
    )


def _blocks(spans: list[tuple[int, int, int, int]], size: int) -> tuple[list[Block], torch.Tensor]:
    """Spans (prefix start, prefix end, own start, own end) as blocks, and the index that puts their outputs back in order."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i][0] == spans[i][1], _keys(spans[i]), i), reverse=True)
    parts: list[list[int]] = []
    for i in order:
        if parts and _fits(spans[parts[-1][0]], spans[i], len(parts[-1]) + 1):
            parts[-1].append(i)
        else:
            parts.append([i])
    blocks, gather, filled = [], torch.empty(size, dtype=torch.int64), 0
    for part in parts:
        width = max(spans[i][3] - spans[i][2] for i in part)
        queries = torch.zeros(len(part), width, dtype=torch.int64)
        keys = torch.zeros(len(part), max(_keys(spans[i]) for i in part), dtype=torch.int64)
        for line, i in enumerate(part):
            low, high, start, end = spans[i]
            own = torch.arange(start, end)
            queries[line, : len(own)] = own
            keys[line, : high - low] = torch.arange(low, high)
            keys[line, high - low : high - low + len(own)] = own
            gather[start:end] = torch.arange(filled + line * width, filled + line * width + len(own))
        filled += queries.numel()
        prefix = torch.tensor([spans[i][1] - spans[i][0] for i in part])
        blocks.append(Block(queries, keys, prefix, spans[part[0]][0] == spans[part[0]][1]))
    return blocks, gather


def _keys(span: tuple[int, int, int, int]) -> int:
    return span[1] - span[0] + span[3] - span[2]


def _fits(first: tuple[int, int, int, int], span: tuple[int, int, int, int], count: int) -> bool:
    """Whether `span` may join the block that `first`, its longest, began: same sort, similar length, mask not too large."""
    same = (first[0] == first[1]) == (span[0] == span[1])
    queries = max(first[3] - first[2], span[3] - span[2])
    small = count * queries * _keys(first) <= _MASK_ITEMS
    return same and small and _keys(span) >= _SIMILAR * _keys(first)


def block_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface over one packed row: query [1, H, N, e], key and value [1, h, N, e] -> [1, N, H,
    e]."""
    if attention_mask is not None or softcap is not None or s_aux is not None or position_bias is not None:
        raise NotImplementedError("block attention knows no masks, logit caps, sinks or position biases of the model's own")
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    outputs = []
    for block in layout.blocks:
        q, k, v = (_rows(states, block.queries if i == 0 else block.keys) for i, states in enumerate(flat))
        if query.device.type == "cpu" and block.keys.shape[1] <= _SHORT:
            out = _by_products(q, k, v, block.mask(sliding_window, query.dtype, always=True), scaling)
        else:
            mask, times = block.mask(sliding_window, query.dtype), q.shape[1] // k.shape[1]
            if times > 1 and query.device.type != "cpu" and (mask is not None or q.dtype == torch.float32):
                # of a GPU's fused kernels only flash attention takes fewer key heads, and that takes no mask and no float32
                k, v, times = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), 1
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=times > 1
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _take(joined, layout.gather)[None], None


def _by_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Attention by two matrix products, softmax in float32; a key head's queries are one matrix. [n, H, q, e]

    For short sequences on a CPU its backward pass in bfloat16 is several times faster than that of the fused kernel.
    """
    times = q.shape[1] // k.shape[1]
    folded = q.unflatten(1, (-1, times)).flatten(2, 3)
    with torch.autocast(
        q.device.type, enabled=False
    ):  # scores rounded to bfloat16 would cost a third more error in the logprobs
        scores = (folded.float() * (scaling or q.shape[-1] ** -0.5)) @ k.float().transpose(-1, -2)
    scores = scores.unflatten(2, (times, -1)) + mask[:, :, None]
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype).flatten(2, 3)
    return (weights @ v).unflatten(2, (times, -1)).flatten(1, 2)


def _take(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows `index` of [N, H, e]. An embedding lookup: its gradient adds up rows far faster on a CPU than that of indexing."""
    return F.embedding(index, states.flatten(1)).unflatten(-1, states.shape[1:])


def _rows(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[N, H, e] at [n, l] -> [n, H, l, e]."""
    return _take(states, index).transpose(1, 2)


def hidden_states(model: nn.Module, layout: Layout) -> torch.Tensor:
    """[n, d] last hidden states that predict the layout's targets, by block attention."""
    output = model.base_model(
        input_ids=layout.ids, attention_mask=None, position_ids=layout.positions, use_cache=False, layout=layout
    )
    return _take(output.last_hidden_state[0][:, None], layout.predictors)[:, 0]


def single_hidden_states(model: nn.Module, layout: Layout) -> torch.Tensor:
    """The same for a layout of one rollout, by the model's own attention."""
    output = model.base_model(input_ids=layout.ids, use_cache=False)
    return output.last_hidden_state[0][layout.predictors]


def set_mode(model: nn.Module, mode: str) -> None:
    """Plug the block attention in, or the model's own back."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, block_attention)
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)  # sdpa would leave the cap out, in silence
    own = "eager" if capped else "sdpa"
    model.set_attn_implementation(own if mode == "single" else NAME)
