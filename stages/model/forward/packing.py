"""Decides which rollouts share a micro-batch: pieces of one prompt, packed by tokens, no padding.

A piece is one prompt with some completions that follow it. If the prefix is shared, a group is one
piece, or several if it is longer than the budget; otherwise each rollout is its own piece. Pieces
go by best fit into strips of at most `budget` tokens; a longer piece gets a strip for itself. The
last id of a completion is only ever a target, so it is not in the strip. Lengths and positions
alone decide the order: the same rollouts give the same micro-batches.

Not of the spine: `layout` draws the resulting strips.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One prompt (the first rollout's) and the rollouts that continue it."""

    rows: tuple[int, ...]
    tokens: int
    """Tokens that it takes in the strip."""


def make_pieces(
    rows: Sequence[int],
    prompt_numbers: Sequence[int],
    prompt_tokens: Sequence[int],
    input_tokens: Sequence[int],
    budget: int,
) -> list[Piece]:
    """Join rollouts `rows` with the same prompt number into pieces of at most `budget` tokens.

    A single rollout may exceed the budget. The other arguments are indexed by rollout.

    Args:
        rows: Rollouts to join, in order.
        prompt_numbers: Equal numbers mean equal prompt ids.
        prompt_tokens: Tokens of each prompt.
        input_tokens: Tokens of each rollout in the strip, after its prompt.
        budget: Most tokens of a piece.
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
    """Pack by best-fit decreasing: each piece goes into the fullest micro-batch with room for it.

    The longest micro-batch comes first.
    """
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
    """Cut rollouts 0 … len(groups)-1 into at most `count` mini-batches of about equal size.

    A group stays whole, with its rollouts in their order. `groups` lists the group of each rollout;
    groups are taken in the order of their numbers.
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
