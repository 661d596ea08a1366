"""Which rollouts share a micro-batch: pieces of one prompt, packed by tokens, nothing padded.

A piece is one prompt with some completions that follow it; with the shared prefix a group is one
piece (or several, when it is longer than the budget), without it each rollout is a piece of its
own. Pieces go by best fit into rows of at most `budget` tokens; a piece that is longer gets a row
for itself. The last id of a completion is only ever a target, so it does not stand in the row. The
order is decided by lengths and positions alone: the same rollouts give the same micro-batches.
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
    prompts: Sequence[int],
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    budget: int,
) -> list[Piece]:
    """Rollouts `rows` with the same `prompts` number joined, no piece beyond `budget` unless it is
    a single rollout.

    `prompts`, `prompt_tokens` and `completion_tokens` are indexed by rollout; equal `prompts`
    numbers mean equal prompt ids.
    """
    pieces: list[Piece] = []
    open_piece: dict[int, int] = {}
    for row in rows:
        extra = completion_tokens[row] - 1
        at = open_piece.get(prompts[row])
        if at is not None and pieces[at].tokens + extra <= budget:
            pieces[at] = Piece((*pieces[at].rows, row), pieces[at].tokens + extra)
        else:
            open_piece[prompts[row]] = len(pieces)
            pieces.append(Piece((row,), prompt_tokens[row] + extra))
    return pieces


def pack(pieces: Sequence[Piece], budget: int) -> list[list[Piece]]:
    """Best-fit decreasing: each piece into the fullest micro-batch that still has room for it.
    Longest micro-batch first."""
    bins: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        at = bisect.bisect_left(room, (piece.tokens, -1))
        if at < len(room):
            left, chosen = room.pop(at)
            bins[chosen].append(piece)
        else:
            left, chosen = budget, len(bins)
            bins.append([piece])
        if left > piece.tokens:
            bisect.insort(room, (left - piece.tokens, chosen))
    return sorted(bins, key=lambda packed: -sum(piece.tokens for piece in packed))


def minibatches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Rollouts 0 … len(groups)-1 cut into at most `count` parts of about equal size; a group stays
    whole, in the order given.

    `groups` lists the group of each rollout; the groups are taken in the order of their numbers.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    parts: list[list[int]] = [[] for _ in range(count)]
    seen = 0
    for group in sorted(members):
        parts[min(seen * count // max(len(groups), 1), count - 1)].extend(members[group])
        seen += len(members[group])
    return [part for part in parts if part]
