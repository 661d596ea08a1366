"""The strip: many prompts and completions side by side, and which tokens attend to which.

A micro-batch is one strip of L tokens without padding, which predict n completion tokens. It is
made of pieces: a piece is a prompt, once, followed by some of the completions that continue it.
Their positions continue from the end of the prompt. With `optimize.packing = "shared"` a piece has
all completions of a group that fit into one micro-batch, so the model reads their prompt once and
the gradients of all of them meet there. With `packed` or `single` a piece is one rollout; with
`single` the model's own attention reads the pieces one after another. The last id of a completion
is only ever a target, so it is not in the strip. (A row, in `rows`, is the number of a rollout.)

    two pieces: prompt A with completions x x x and y y y y, prompt B with completion z z

    segment    A           x     y        B     z
    ids        A0 A1 A2    x0 x1 y0 y1 y2 B0 B1 z0
    index       0  1  2     3  4  5  6  7  8  9 10     into the strip
    position    0  1  2     3  4  3  4  5  0  1  2

    target     x0 x1 x2    y0 y1 y2 y3    z0 z1        n = 9 completion tokens
    predictor   2  3  4     2  5  6  7     9 10        index of the token before the target

A span is a stretch of the strip. Each of its tokens attends to the prefix of the span, if there is
one, and to the span up to itself. A rollout that is alone in its piece is one span:

    span       A (0-2)        x (3-4)    y (5-7)       B z (8-10)
    prefix     -              A (0-2)    A (0-2)       -

In a rollout of several turns, x stands for sampled ids with the observations between them, which
are no targets. A rewritten history begins a span without a prefix (model/turns.py has the picture).

Attention never makes a mask over the whole strip. It runs over blocks of spans with similar lengths
(`Block`), or over all spans by one kernel for sequences of any lengths (`Runs`); see attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quiver.stages.model.ragged import Ragged
from quiver.stages.model.turns import Turns, after_prompts

from .media import Media, MediaInStrip, in_strip
from .packing import Piece
from .transfer import to_device

_MASK_ITEMS = 32 * 1024 * 1024
"""Most items of one block's mask."""
_LONG = 48
"""Width from which a block is rounded up to a multiple of 32; below it, to a multiple of 8. Matrix
products are much faster with such widths."""
_SIMILAR = 0.75
"""Share of the keys of a block's longest span that a span needs in order to join the block."""


@dataclass(frozen=True)
class Sequences:
    """Everything the model reads of B rollouts, on the CPU."""

    prompts: Ragged
    completions: Ragged
    """Sampled ids of each rollout."""
    temperature: Tensor
    """[B] float32"""
    turns: Turns | None = None
    """Ids between the sampled ids, for rollouts of several turns."""
    media: Media | None = None
    """Pictures shown to the rollouts, if any."""

    @property
    def input_lengths(self) -> Tensor:
        """[B] int64: tokens of each rollout in the strip, after its prompt."""
        return self.turns.input_lengths if self.turns else self.completions.lengths - 1

    def sizes(self, prompt_numbers: Sequence[int]) -> tuple[int, int]:
        """Return the tokens of a pass that reads each prompt once, and the tokens of the longest
        rollout."""
        prompts = self.prompts.lengths
        read_once = dict(zip(prompt_numbers, prompts.tolist(), strict=True))
        tokens = sum(read_once.values()) + int(self.input_lengths.sum())
        longest = max((prompts + self.input_lengths).tolist(), default=0)
        return tokens, longest

    def take(self, rows: Sequence[int]) -> Sequences:
        """Return rollouts `rows`, in that order."""
        index = torch.tensor(rows)
        return Sequences(
            self.prompts.take(index),
            self.completions.take(index),
            self.temperature[index],
            self.turns and self.turns.take(index),
            self.media and self.media.take(index),
        )


def prompt_numbers(prompts: Ragged, groups: Sequence[int]) -> list[int]:
    """Return [B] numbers, equal for rollouts of one group with the same prompt ids, which can share
    the prompt."""
    numbers: dict[tuple[int, bytes], int] = {}
    views = prompts.views(np.arange(len(prompts)))
    return [
        numbers.setdefault((group, ids.tobytes()), len(numbers))
        for group, ids in zip(groups, views, strict=True)
    ]


class Scoring(NamedTuple):
    """How a layer weighs the keys of a query."""

    scaling: float
    """Factor of the scores."""
    window: int | None = None
    """Keys that a query sees, including its own. None: no limit."""
    is_chunk: bool = False
    """If true, a query sees the keys of its own chunk of `window` tokens instead."""
    softcap: float | None = None
    """Limit of the scores, as softcap · tanh(score / softcap)."""
    sinks: Tensor | None = None
    """[H] score of each head for a key without a value."""


@dataclass(frozen=True)
class Block:
    """Spans that attend together.

    `queries` [s, q] and `keys` [s, k] hold indices into the strip, one line for each span; short
    lines are padded with index 0. Query t of span i sees its keys 0 … prefix_lengths[i] + t, so no
    real query ever sees padding.
    """

    queries: Tensor
    keys: Tensor
    prefix_lengths: Tensor
    """[s]"""
    has_no_prefix: bool
    """If true, queries and keys are the same tokens, so a plain causal mask is enough. Otherwise
    `mask` must show each span its prefix."""
    _masks: dict = field(default_factory=dict, init=False, compare=False)

    def mask(self, scoring: Scoring, dtype: torch.dtype) -> Tensor:
        """Return the mask [s, 1, q, k]: 0 if a query may see a key, else −inf.

        Made once per micro-batch. With a window of w, a query sees only the last w of its keys, or
        those in its chunk of w. With sinks, there is one more key, the first, that each query sees.
        """
        window = scoring.window
        name = window, scoring.is_chunk, scoring.sinks is None, dtype
        if name not in self._masks:
            num_keys = self.keys.shape[1]
            key_numbers = torch.arange(num_keys, device=self.keys.device)
            query_numbers = torch.arange(self.queries.shape[1], device=self.keys.device)
            last_seen = self.prefix_lengths[:, None] + query_numbers
            # with a window, a padding query past the last key would see no key: its gradient would
            # be NaN, and 0 · NaN is NaN
            last_seen = last_seen.clamp(max=num_keys - 1)[..., None]
            visible = key_numbers <= last_seen
            if window is not None:
                is_chunk = scoring.is_chunk
                oldest = last_seen // window * window if is_chunk else last_seen - window + 1
                visible &= key_numbers >= oldest
            if scoring.sinks is not None:
                visible = F.pad(visible, (1, 0), value=True)
            zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[name] = zeros.masked_fill_(~visible, float("-inf"))[:, None]
        return self._masks[name]


class Blocks(NamedTuple):
    """All spans of a strip, in blocks."""

    parts: tuple[Block, ...]
    gather: Tensor
    """[L] index of each token's output in the blocks' queries, laid end to end."""


class Stretches(NamedTuple):
    """Stretches of queries and of keys, for one call of a kernel for sequences of any lengths.

    Stretch i of the queries, tokens query_offsets[i] … query_offsets[i + 1] − 1, attends to stretch
    i of the keys. Either may be empty.
    """

    query_offsets: Tensor
    """[s + 1] int32, the first one 0"""
    key_offsets: Tensor
    """[s + 1] int32, the first one 0"""
    longest: tuple[int, int]
    """Most queries and most keys of one stretch."""
    causal: bool
    """If true, the last query sees all keys of its stretch, and each query before it one less."""


@dataclass(frozen=True)
class Runs:
    """All spans in the strip's order, for a kernel that takes sequences of any lengths."""

    calls: tuple[Stretches, ...]
    """At most two calls. The first has all spans, each with its own keys. The second, if there are
    prefixes, has the keys of each prefix with the queries of all spans that continue it;
    gpu/flash.py merges the outputs. Empty if spans that share a prefix are not neighbours in the
    strip: then `copied` is taken."""
    copied: Stretches
    """Each span with the keys of its prefix and its own, which are copied: its keys are tokens of
    `keys`."""
    keys: Tensor
    """[K] int64 index into the strip; a prompt's tokens are repeated for each of its completions,
    and once for the prompt itself."""


@dataclass(frozen=True)
class Layout:
    """One micro-batch as one strip of L tokens, and the tokens that predict the n completion tokens
    of its rollouts."""

    ids: Tensor
    """[1, L] int64"""
    positions: Tensor
    """[1, L] int64; the completions of a shared prompt all start at its length. [3, 1, L] if there
    are pictures and the model counts by three axes (axes.py)."""
    spans: Spans
    rows: np.ndarray
    """[b] int64: rollouts in the order of `targets`."""
    predictors: Tensor
    """[n] index into the strip: the token before the target."""
    targets: Tensor
    """[n] int64"""
    temperature: Tensor
    """[n] float32"""
    made_blocks: Blocks | None = None
    """The spans as blocks. None: they are made if a layer reads them."""
    runs: Runs | None = None
    """Spans for the kernel for sequences of any lengths. If given, they replace blocks."""
    sequence_lengths: tuple[int, ...] = ()
    """With rewritten histories: the lengths of all sequences, for the mode `single`."""
    media: MediaInStrip | None = None

    @cached_property
    def blocks(self) -> Blocks:
        """The spans as blocks, on the layout's device."""
        return self.made_blocks or to_device(make_blocks(self.spans), self.ids.device)

    @property
    def filling(self) -> tuple[int, int]:
        """Slots without a token, and slots in all.

        The strip has no padding. Padding inside attention's blocks is not counted.
        """
        return 0, self.ids.numel()


@dataclass(frozen=True)
class Spans:
    """Arrays of [s] int64, in the strip's order.

    Span i is the lengths[i] tokens from starts[i] on; its prefix is the prefix_lengths[i] tokens
    from prefix_starts[i] on. A length of 0 means no prefix.
    """

    starts: np.ndarray
    lengths: np.ndarray
    prefix_starts: np.ndarray
    prefix_lengths: np.ndarray

    @property
    def key_counts(self) -> np.ndarray:
        return self.prefix_lengths + self.lengths


def make_layout(pieces: Sequence[Piece], sequences: Sequences, *, varlen: bool = False) -> Layout:
    """Lay out `pieces` as in the picture above, on the CPU; with runs in place of blocks if
    `varlen`. No completion may be empty."""
    counts = np.array([len(piece.rows) for piece in pieces])
    rows = np.array([row for piece in pieces for row in piece.rows])
    first_rollouts = _starts(counts)
    of_prompts = rows[first_rollouts]
    prompt_lengths = sequences.prompts.lengths.numpy()[of_prompts]
    target_counts = sequences.completions.lengths.numpy()[rows]

    # copying slices is several times faster than gathering ids one by one
    prompts = sequences.prompts.views(of_prompts)
    completions = sequences.completions.views(rows)
    after = after_prompts(sequences.completions, sequences.turns, rows)
    input_lengths = np.array([len(ids) for ids in after.ids])
    segments = []
    for prompt, first, count in zip(prompts, first_rollouts, counts, strict=True):
        segments += [prompt, *after.ids[first : first + count]]

    completion_starts = _starts(input_lengths) + np.repeat(np.cumsum(prompt_lengths), counts)
    prompt_ends = np.repeat(completion_starts[first_rollouts], counts)
    at_prompts = of_prompts, completion_starts[first_rollouts] - prompt_lengths
    predictors = after.predictors + np.repeat(completion_starts, target_counts)
    # `after.predictors` count from the start of a completion's segment. -1 is the token before it,
    # the prompt's last, which stands once before the piece's completions. A first target has
    # another predictor only if its turn has a rewritten history.
    firsts = _starts(target_counts)
    follows_prompt = after.predictors[firsts] < 0
    predictors[firsts[follows_prompt]] = prompt_ends[follows_prompt] - 1

    spans = make_spans(counts, prompt_lengths, input_lengths)
    if len(after.restarts):
        restarts = after.restarts + np.repeat(completion_starts, after.restart_counts)
        spans = cut_spans(spans, restarts)
    length = int(spans.lengths.sum())
    media = in_strip(sequences.media, at_prompts, (rows, completion_starts), length)
    return Layout(
        ids=torch.from_numpy(np.concatenate(segments, dtype=np.int64))[None],
        positions=_positions(spans, media),
        spans=spans,
        rows=rows,
        predictors=torch.from_numpy(predictors),
        targets=torch.from_numpy(np.concatenate(completions, dtype=np.int64)),
        temperature=torch.from_numpy(np.repeat(sequences.temperature.numpy()[rows], target_counts)),
        made_blocks=None if varlen else make_blocks(spans),
        runs=make_runs(spans) if varlen else None,
        sequence_lengths=tuple(spans.lengths.tolist()) if len(after.restarts) else (),
        media=media,
    )


def make_spans(counts: np.ndarray, prompt_lengths: np.ndarray, input_lengths: np.ndarray) -> Spans:
    """Return the spans of pieces.

    Args:
        counts: [p] rollouts of each piece.
        prompt_lengths: [p] tokens of each piece's prompt.
        input_lengths: [b] tokens of each completion in the strip.
    """
    first_rollouts = _starts(counts)
    prompt_segments = first_rollouts + np.arange(len(counts))
    lengths = np.insert(input_lengths, first_rollouts, prompt_lengths)
    starts = _starts(lengths)
    prefix_starts = np.insert(np.repeat(starts[prompt_segments], counts), first_rollouts, 0)
    prefix_lengths = np.insert(np.repeat(prompt_lengths, counts), first_rollouts, 0)

    # a rollout that is alone in its piece is one span without a prefix: prompt and completion
    alone = prompt_segments[counts == 1]
    lengths[alone] += lengths[alone + 1]
    lengths[alone + 1] = 0
    spans = np.array([starts, lengths, prefix_starts, prefix_lengths])
    return Spans(*spans[:, lengths > 0])


def _positions(spans: Spans, media: MediaInStrip | None) -> Tensor:
    """Return the position of each token of the strip in its own sequence: [1, L] int64, or
    [3, 1, L] with pictures that take positions of three axes."""
    index_minus_position = np.repeat(spans.starts - spans.prefix_lengths, spans.lengths)
    positions = np.arange(len(index_minus_position)) - index_minus_position
    plain = torch.from_numpy(positions)[None]
    has_axes = media is not None and media.shifts is not None
    return plain + media.shifts[:, None] if has_axes else plain


def cut_spans(spans: Spans, restarts: np.ndarray) -> Spans:
    """Cut the spans at the indices `restarts` [r] into the strip, where rewritten histories begin.

    From each of them on, the span has no prefix.
    """
    after = np.searchsorted(spans.starts, restarts, "right")
    starts = np.insert(spans.starts, after, restarts)
    lengths = np.diff(starts, append=spans.lengths.sum())
    prefixes = (np.insert(p, after, 0) for p in (spans.prefix_starts, spans.prefix_lengths))
    arrays = np.array([starts, lengths, *prefixes])
    return Spans(*arrays[:, lengths > 0])


def make_blocks(spans: Spans) -> Blocks:
    """Return `spans` as blocks, longest first."""
    blocks = []
    num_queries = 0
    shifts = np.empty_like(spans.starts)  # from a token's index in the strip to its index in blocks
    for members in _cut(spans):
        starts = spans.starts[members]
        prefix_lengths = spans.prefix_lengths[members]
        queries = _indices(starts, spans.lengths[members])
        keys = queries
        has_no_prefix = not prefix_lengths.any()
        if not has_no_prefix:
            # the first `prefix_lengths` columns are overwritten below
            keys = _indices(starts - prefix_lengths, spans.key_counts[members])
            column = np.arange(prefix_lengths.max())
            prefix = spans.prefix_starts[members, None] + column
            np.copyto(keys[:, : len(column)], prefix, where=column < prefix_lengths[:, None])
        tensors = map(torch.from_numpy, (queries, keys, prefix_lengths))
        blocks.append(Block(*tensors, has_no_prefix))
        shifts[members] = num_queries + np.arange(len(members)) * queries.shape[1] - starts
        num_queries += queries.size
    gather = np.arange(spans.lengths.sum()) + np.repeat(shifts, spans.lengths)
    return Blocks(tuple(blocks), torch.from_numpy(gather))


def _cut(spans: Spans) -> list[list[int]]:
    """Return the spans of each block: those without a prefix first, then by length, longest first.

    A block ends if the next span is of the other sort, has far fewer keys than the block's first,
    or would make the block's mask too large.
    """
    causal = spans.prefix_lengths == 0
    queries = spans.lengths.tolist()
    keys = spans.key_counts.tolist()
    first, *following = np.lexsort((-spans.starts, -spans.key_counts, ~causal)).tolist()
    blocks = [[first]]
    most_queries = queries[first]
    for span in following:
        most_queries = max(most_queries, queries[span])
        mask_items = (len(blocks[-1]) + 1) * most_queries * keys[first]
        is_similar = causal[span] == causal[first] and keys[span] >= _SIMILAR * keys[first]
        if is_similar and mask_items <= _MASK_ITEMS:
            blocks[-1].append(span)
        else:
            first = span
            blocks.append([first])
            most_queries = queries[first]
    return blocks


def make_runs(spans: Spans) -> Runs:
    """Return `spans` as runs."""
    starts = np.stack([spans.prefix_starts, spans.starts], 1).ravel()
    lengths = np.stack([spans.prefix_lengths, spans.lengths], 1).ravel()
    calls = (_stretches(spans.lengths, spans.lengths, causal=True),)
    if spans.prefix_lengths.any():
        prefixes = _prefix_stretches(spans)
        calls = (*calls, _stretches(*prefixes, causal=False)) if prefixes else ()
    copied = _stretches(spans.lengths, spans.key_counts, causal=True)
    return Runs(calls, copied, torch.from_numpy(_ranges(starts, lengths)))


def _prefix_stretches(spans: Spans) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the lengths of stretches in which spans meet the prefix before them: their queries,
    and their keys. Both add up to the whole strip.

    A prompt of 4 tokens and its two completions of 3 and 2 give queries [4, 0, 5, 0] and keys
    [0, 0, 4, 5]: the prompt meets no prefix, the completions meet the prompt, and their own keys
    meet no query here. Returns None if spans that share a prefix are not neighbours, since each key
    can be in one stretch only.
    """
    queries, keys = [], []
    last_start, num_keys = -1, 0
    columns = (spans.lengths, spans.prefix_starts, spans.prefix_lengths)
    for length, start, prefix_length in zip(*(column.tolist() for column in columns), strict=True):
        if not prefix_length:
            queries.append(length)
            keys.append(0)
            last_start = -1
        elif start == last_start:
            queries[-1] += length
        elif start < num_keys:
            return None
        else:
            queries += [0, length]
            keys += [start - num_keys, prefix_length]
            last_start, num_keys = start, start + prefix_length
    queries.append(0)
    keys.append(int(spans.lengths.sum()) - num_keys)
    return np.array(queries), np.array(keys)


def _stretches(queries: np.ndarray, keys: np.ndarray, *, causal: bool) -> Stretches:
    """Return stretches with these lengths [s]."""
    offsets = (
        torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32))
        for lengths in (queries, keys)
    )
    # for one query per stretch, FlashAttention has a path of its own that takes no empty stretches
    return Stretches(*offsets, (max(2, int(queries.max())), int(keys.max())), causal)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return [n] the starts of n consecutive stretches with `lengths` [n]."""
    return np.cumsum(lengths) - lengths


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return start, start + 1, … for each of `lengths` [n] in turn: [Σ lengths] int64."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())


def _indices(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return [n, width]: start, start + 1, … in each row, 0 beyond its length."""
    longest = int(lengths.max())
    grain = 32 if longest >= _LONG else 8
    column = np.arange(-(-longest // grain) * grain)
    return (starts[:, None] + column) * (column < lengths[:, None])
