"""Which rollouts share a micro-batch: pieces of one prompt, packed by tokens, nothing padded.

A piece is one prompt with some completions that follow it; with the shared prefix a group is one
piece (or several, when it is longer than the budget), without it each rollout is a piece of its
own. Pieces go by best fit into rows of at most `budget` tokens; a piece that is longer gets a row
for itself. The last id of a completion is only ever a target, so it does not stand in the row. The
order is decided by lengths and positions alone: the same rollouts give the same micro-batches.

Not of the spine: `layout` draws the rows that come of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One prompt (that of the first rollout) and the rollouts that continue it."""

    rows: tuple[int, ...]
    tokens: int
    """Tokens that it takes in the packed row."""


def make_pieces(
    rows: Sequence[int],
    prompt_numbers: Sequence[int],
    prompt_tokens: Sequence[int],
    input_tokens: Sequence[int],
    budget: int,
) -> list[Piece]:
    """Rollouts `rows` with the same prompt number joined, no piece beyond `budget` unless it is a
    single rollout.

    `prompt_numbers`, `prompt_tokens` and `input_tokens` (those in the row after the prompt) are
    indexed by rollout; equal numbers mean equal prompt ids.
    """
    pieces: list[Piece] = []
    last_piece_of: dict[int, int] = {}
    for row in rows:
        tokens = input_tokens[row]
        index = last_piece_of.get(prompt_numbers[row])
        if index is not None and pieces[index].tokens + tokens <= budget:
            piece = pieces[index]
            pieces[index] = Piece((*piece.rows, row), piece.tokens + tokens)
        else:
            last_piece_of[prompt_numbers[row]] = len(pieces)
            pieces.append(Piece((row,), prompt_tokens[row] + tokens))
    return pieces


def pack(pieces: Sequence[Piece], budget: int) -> list[list[Piece]]:
    """Best-fit decreasing: each piece into the fullest micro-batch that still has room for it.
    Longest micro-batch first."""
    microbatches: list[list[Piece]] = []
    free: list[tuple[int, int]] = []  # (tokens that still fit, index of the micro-batch), sorted
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        fullest = bisect.bisect_left(free, (piece.tokens, -1))
        if fullest < len(free):
            tokens_left, index = free.pop(fullest)
            microbatches[index].append(piece)
        else:
            tokens_left = budget
            index = len(microbatches)
            microbatches.append([piece])
        if tokens_left > piece.tokens:
            bisect.insort(free, (tokens_left - piece.tokens, index))
    return sorted(microbatches, key=lambda microbatch: -sum(piece.tokens for piece in microbatch))


def minibatches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Rollouts 0 … len(groups)-1 cut into at most `count` mini-batches of about equal size; a group
    stays whole, its rollouts in their order.

    `groups` lists the group of each rollout; the groups are taken in the order of their numbers.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    batches: dict[int, list[int]] = {}
    num_dealt = 0
    for group in sorted(members):
        batches.setdefault(num_dealt * count // len(groups), []).extend(members[group])
        num_dealt += len(members[group])
    return list(batches.values())
