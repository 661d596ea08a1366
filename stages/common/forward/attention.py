"""Many rollouts in one row of tokens: the layout of a micro-batch, and attention that keeps them
apart.

`shared`: a group's prompt stands once in the row; each completion follows, with positions that go
on where the prompt ends, and attends to the prompt and to itself. `packed`: each rollout is a piece
of its own, prompt included. Either way attention runs in blocks of sequences with similar lengths;
a mask over the whole row is never made. `single` is the yardstick and the last
resort: one rollout after another through the model's own attention.

The block attention is plugged into transformers' attention interface, so every decoder that uses
the interface works. What it can not do (logit caps, sinks, position biases) it refuses, and
`choose_mode` then takes the next simpler mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from quiver.stages.common.forward.packing import Piece
from quiver.stages.common.forward.varlen import Runs, attend, make_runs, ranges
from quiver.stages.common.ragged import Ragged

NAME = "quiver_blocks"
MODES = ("shared", "packed", "single")
_MASK_ITEMS = 32 * 1024 * 1024
"""Most items of one block's mask."""
_SHORT = 256
"""Longest block for which a CPU keeps the attention weights instead of calling the fused kernel."""
_KEPT_ITEMS = 6 * 1024 * 1024
"""Most attention weights of one block that a CPU keeps in bfloat16 however long it is: the fused
kernel takes twice the time."""
_ROWS = 128
"""Queries that a CPU computes at once where later keys are hidden from all of them."""
_LONG = 48
"""From this width on a block is rounded up to a multiple of 32, below to one of 8."""
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
    """[B] equal numbers for rollouts of one group with the same prompt ids: those can share the
    prompt."""
    keys: dict[tuple[int, bytes], int] = {}
    rows = zip(groups, prompts.views(np.arange(len(prompts))), strict=True)
    return [keys.setdefault((group, view.tobytes()), len(keys)) for group, view in rows]


@dataclass(frozen=True)
class Block:
    """Sequences that attend together. Row i of `queries` [n, q] and `keys` [n, k] points into the
    packed row; short rows are filled up with index 0. Query t sees keys 0 … start[i] + t, so fill
    at the end is never seen by a query that counts."""

    queries: torch.Tensor
    keys: torch.Tensor
    start: torch.Tensor
    causal: bool
    """True: queries and keys are the same tokens, and a plain causal mask does."""
    masks: dict = field(default_factory=dict, compare=False)

    def to(self, device: torch.device | str) -> Block:
        """The same block on `device`."""
        return Block(
            self.queries.to(device), self.keys.to(device), self.start.to(device), self.causal
        )

    def mask(
        self, window: int | None, dtype: torch.dtype, *, always: bool = False
    ) -> torch.Tensor | None:
        """[n, 1, q, k], 0 where a query may look and −inf elsewhere; made once a micro-batch.

        None where plain causal attention does the same, unless `always`.
        """
        n, longest = self.keys.shape
        window = window if window is not None and window < longest else None
        if self.causal and window is None and not always:
            return None
        if (window, dtype) not in self.masks:
            place = torch.arange(longest, device=self.keys.device)
            last = self.start[:, None] + torch.arange(
                self.queries.shape[1], device=self.keys.device
            )
            last = last.clamp(
                max=longest - 1
            )  # fill that sees no key would have NaN as its gradient, and 0 · NaN is NaN
            seen = place <= last[..., None]
            if window is not None:
                seen &= place > last[..., None] - window
            blank = torch.zeros((n, 1, *seen.shape[1:]), dtype=dtype, device=seen.device)
            self.masks[window, dtype] = blank.masked_fill_(~seen[:, None], float("-inf"))
        return self.masks[window, dtype]


@dataclass(frozen=True)
class Layout:
    """One micro-batch as one row of N tokens, and where the n completion tokens of its rollouts are
    predicted."""

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
    runs: Runs | None = None
    """Where they are, attention goes by them and not by blocks."""

    @property
    def filling(self) -> tuple[int, int]:
        """Places that only fill up, and places in all: nothing is padded here."""
        return 0, self.ids.numel()


def make_layout(
    pieces: Sequence[Piece],
    data: Sequences,
    device: torch.device | str = "cpu",
    *,
    varlen: bool = False,
) -> Layout:
    """Lay out `pieces`: each prompt once, then its completions without their last id. `varlen`:
    with runs."""
    counts = np.array([len(piece.rows) for piece in pieces])
    rows = np.array([row for piece in pieces for row in piece.rows])
    piece_of, heads = (
        np.repeat(np.arange(len(pieces)), counts),
        np.cumsum(counts) - counts,
    )  # each piece's first rollout
    prompts = data.prompts.lengths.numpy()[rows[heads]]
    inputs = data.completions.lengths.numpy()[rows] - 1
    # the row of tokens in segments: prompt, completion, completion, …, prompt, …
    places = np.arange(len(rows)) + piece_of + 1  # where a completion stands among the segments
    lengths = np.empty(len(rows) + len(pieces), np.int64)
    lengths[places], lengths[heads + np.arange(len(pieces))] = inputs, prompts
    starts = np.cumsum(lengths) - lengths
    first = starts[heads + np.arange(len(pieces))]  # of each piece, where its prompt starts
    own = starts[places]  # of each rollout, where its completion starts
    answers = data.completions.views(rows)
    rest = iter(answers)
    segments = []
    for prompt, count in zip(data.prompts.views(rows[heads]), counts.tolist(), strict=True):
        segments += prompt, *(answer[:-1] for answer in islice(rest, count))
    ids = np.concatenate(
        segments, dtype=np.int64
    )  # slices are copied several times faster than ids are gathered one by one
    begins = np.zeros_like(lengths)  # the position of each segment's first token
    begins[places] = prompts[piece_of]
    positions = np.arange(len(ids)) - np.repeat(starts - begins, lengths)
    wanted = inputs + 1
    predictors = ranges(own - 1, wanted)
    predictors[np.cumsum(wanted) - wanted] = (first + prompts - 1)[piece_of]
    targets = np.concatenate(answers, dtype=np.int64)
    spans = _spans(counts, piece_of, first, prompts, own, inputs)
    blocks, gather = _blocks(spans, len(ids))
    return Layout(
        ids=torch.from_numpy(ids)[None].to(device),
        positions=torch.from_numpy(positions)[None].to(device),
        blocks=tuple(block.to(device) for block in blocks),
        gather=gather.to(device),
        rows=torch.from_numpy(rows),
        predictors=torch.from_numpy(predictors).to(device),
        targets=torch.from_numpy(targets).to(device),
        temperature=torch.from_numpy(np.repeat(data.temperature.numpy()[rows], wanted)).to(device),
        runs=make_runs(spans, device) if varlen else None,
    )


def _spans(counts, piece_of, first, prompts, own, inputs) -> np.ndarray:
    """[s, 4] int64, what attends together: prefix start, prefix end, own start, own end. A piece of
    one rollout is one span with no prefix; one of several is its prompt, then each completion with
    the prompt as prefix."""
    alone = counts[piece_of] == 1
    several = counts > 1
    ends, zeros = first + prompts, np.zeros_like(own)
    single = np.array([zeros, zeros, first[piece_of], own + inputs])[:, alone]
    shared = np.array([np.zeros_like(first), np.zeros_like(first), first, ends])[:, several]
    after = np.array([first[piece_of], ends[piece_of], own, own + inputs])[:, ~alone & (inputs > 0)]
    return np.concatenate([single, shared, after], 1).T


def _blocks(spans: np.ndarray, size: int) -> tuple[list[Block], torch.Tensor]:
    """`spans` as blocks, and the index that puts their outputs back in order."""
    low, high, start, end = spans.T
    queries, causal, prefix = end - start, low == high, high - low
    keys = prefix + queries
    order = np.lexsort((-start, -keys, ~causal))  # the causal ones first, longest first
    blocks, shifts, filled = [], np.empty_like(start), 0
    for part in _parts(order, queries, keys, causal):
        query = _indices(queries[part], start[part])
        key = query  # where they are the same tokens
        if not causal[part[0]]:
            key = _indices(keys[part], start[part] - prefix[part], low[part], prefix[part])
        shifts[part] = filled + np.arange(len(part)) * query.shape[1] - start[part]
        filled += query.size
        tensors = (torch.from_numpy(each) for each in (query, key, prefix[part]))
        blocks.append(Block(*tensors, bool(causal[part[0]])))
    in_row = np.argsort(start, kind="stable")
    return blocks, torch.from_numpy(np.arange(size) + np.repeat(shifts[in_row], queries[in_row]))


def _indices(
    lengths: np.ndarray,
    own: np.ndarray,
    low: np.ndarray | None = None,
    prefix: np.ndarray | None = None,
) -> np.ndarray:
    """[n, width] where the tokens of n sequences of `lengths` [n] stand in the row, 0 beyond their
    ends: number t at own + t, the first `prefix` of them at low + t."""
    column = np.arange(_rounded(int(lengths.max())))
    found = own[:, None] + column
    if low is not None:
        early = column[: prefix.max()]
        found[:, : len(early)] += (low - own)[:, None] * (early < prefix[:, None])
    if lengths.min() < len(column):
        found *= column < lengths[:, None]
    return found


def _rounded(length: int) -> int:
    """A block's width for sequences of `length`: products of matrices are much faster where sides
    are multiples of 32."""
    grain = 32 if length >= _LONG else 8
    return -(-length // grain) * grain


def _parts(
    order: np.ndarray, queries: np.ndarray, keys: np.ndarray, causal: np.ndarray
) -> list[np.ndarray]:
    """`order` cut where the next span may not join the block that the cut's first, its longest,
    began: another sort, a length that differs too much, or a mask that would be too large."""
    queries, keys, causal = (each[order].tolist() for each in (queries, keys, causal))
    cuts, first, most = [], 0, queries[0]
    for place in range(1, len(order)):
        most = max(most, queries[place])
        large = (place - first + 1) * most * keys[first] > _MASK_ITEMS
        if causal[place] != causal[first] or large or keys[place] < _SIMILAR * keys[first]:
            cuts.append(place)
            first, most = place, queries[place]
    return np.split(order, cuts)


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
    """Attention of transformers' interface over one packed row: query [1, H, N, e], key and value
    [1, h, N, e] -> [1, N, H, e]."""
    if (
        attention_mask is not None
        or softcap is not None
        or s_aux is not None
        or position_bias is not None
    ):
        raise NotImplementedError(
            "block attention knows no masks, logit caps, sinks or position biases of the model's "
            "own"
        )
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    if layout.runs is not None:
        q, *own = (states.to(value.dtype) for states in flat)
        return attend(
            q,
            *(_take(states, layout.runs.keys) for states in own),
            layout.runs,
            sliding_window,
            scaling,
        )[None], None
    outputs = []
    for block in layout.blocks:
        q, k, v = (
            _rows(states, block.queries if i == 0 else block.keys) for i, states in enumerate(flat)
        )
        if query.device.type == "cpu" and _is_small(block, query.shape[1], value.dtype):
            out = _by_products(q, k, v, block, sliding_window, scaling or q.shape[-1] ** -0.5)
        else:
            mask, times = block.mask(sliding_window, query.dtype), q.shape[1] // k.shape[1]
            if (
                times > 1
                and query.device.type != "cpu"
                and (mask is not None or q.dtype == torch.float32)
            ):
                # of a GPU's fused kernels only flash attention takes fewer key heads, and that
                # takes no mask and no float32
                k, v, times = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), 1
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=times > 1
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _take(joined, layout.gather)[None], None


def _is_small(block: Block, heads: int, dtype: torch.dtype) -> bool:
    """Whether a CPU computes this block by plain products. Under autocast only the values are in
    bfloat16 yet."""
    (n, queries), keys = block.queries.shape, block.keys.shape[1]
    kept = dtype == torch.bfloat16 and heads * n * queries * keys <= _KEPT_ITEMS
    return keys <= _SHORT or kept


def _by_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: Block,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Attention by two matrix products, softmax in float32; a key head's queries are one matrix.
    [n, H, q, e]

    For short sequences on a CPU its backward pass in bfloat16 is several times faster than that of
    the fused kernel. Where queries and keys are the same tokens, `_ROWS` queries at a time meet the
    keys up to their own.
    """
    (queries, keys), mask = (q.shape[2], k.shape[2]), block.mask(window, q.dtype, always=True)
    windowed = window is not None and window < keys
    if not block.causal:
        return _Products.apply(
            q, k, v, mask if windowed else mask[..., int(block.start.min()) :], scaling
        )
    parts = []
    for low in range(0, queries, _ROWS):
        rows, high = slice(low, low + _ROWS), min(low + _ROWS, keys)
        own = mask[:, :, rows, 0 if windowed else low : high]
        parts.append(_Products.apply(q[:, :, rows], k[:, :, :high], v[:, :, :high], own, scaling))
    return torch.cat(parts, 2)


class _Products(torch.autograd.Function):
    """Keeps the attention weights in the values' dtype alone; autograd would keep them in float32
    too, three times the memory.

    `mask` is that of the last keys; those before it are seen by every query.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask, scaling):
        ctx.times, ctx.scaling, ctx.dtypes = q.shape[1] // k.shape[1], scaling, (q.dtype, k.dtype)
        # each laid out once as the products read it; a product of strided matrices copies them
        # every time
        scaled = torch.mul(q.float(), scaling, out=torch.empty(q.shape, device=q.device))
        folded, k, v = _folded(scaled, ctx.times), k.float().contiguous(), v.contiguous()
        with torch.autocast(
            q.device.type, enabled=False
        ):  # bfloat16 scores would cost a third more error in the logprobs
            scores = folded @ k.transpose(-1, -2)
            scores.unflatten(2, (ctx.times, -1))[..., -mask.shape[-1] :].add_(mask[:, :, None])
            weights = torch.softmax(scores, -1, out=scores).to(v.dtype)
            ctx.save_for_backward(folded.to(v.dtype), k.to(v.dtype), v, weights)
            return _unfolded(weights @ v, ctx.times)

    @staticmethod
    def backward(ctx, grad):
        folded, k, v, weights = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad = _folded(grad, ctx.times)
            grad_v = weights.transpose(-1, -2) @ grad
            slope = (
                grad @ v.transpose(-1, -2).contiguous()
            )  # as it lies the product takes twice the time
            slope = torch._softmax_backward_data(
                slope, weights, -1, slope.dtype
            )  # w · (g − Σ w · g); it has no public name
            grad_q = _unfolded((slope @ k).to(ctx.dtypes[0]).mul_(ctx.scaling), ctx.times)
            grad_k = (slope.transpose(-1, -2) @ folded).to(ctx.dtypes[1])
        return grad_q, grad_k, grad_v, None, None


def _folded(states: torch.Tensor, times: int) -> torch.Tensor:
    """[n, h · times, q, e] -> [n, h, times · q, e]"""
    return states.unflatten(1, (-1, times)).flatten(2, 3)


def _unfolded(states: torch.Tensor, times: int) -> torch.Tensor:
    """[n, h, times · q, e] -> [n, h · times, q, e]"""
    return states.unflatten(2, (times, -1)).flatten(1, 2)


def _take(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows `index` of [N, H, e]. An embedding lookup: its gradient adds up rows far faster on a CPU
    than that of indexing."""
    return F.embedding(index, states.flatten(1)).unflatten(-1, states.shape[1:])


def _rows(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[N, H, e] at [n, l] -> [n, H, l, e]."""
    return _take(states, index).transpose(1, 2)


def hidden_states(model: nn.Module, layout: Layout) -> torch.Tensor:
    """[n, d] last hidden states that predict the layout's targets, by block attention."""
    output = model.base_model(
        input_ids=layout.ids,
        attention_mask=None,
        position_ids=layout.positions,
        use_cache=False,
        layout=layout,
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
    capped = getattr(
        model.config.get_text_config(), "attn_logit_softcapping", None
    )  # sdpa would leave the cap out, in silence
    own = "eager" if capped else "sdpa"
    model.set_attn_implementation(own if mode == "single" else NAME)
