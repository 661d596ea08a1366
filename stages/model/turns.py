"""The model's input for rollouts with several turns: the sampled ids and all ids between them.

Values "of tokens" (logprobs, advantages, weights) are for sampled ids only, one after another. Only
the forward pass reads more: the observation after each turn. If a turn's history was rewritten,
that history begins a new sequence of the same rollout.

    prompt P P, turn x x x, observation o o, turn y y; then a history R R R and a turn z z

    read        P P | x x x o o y y    R R R | z z
    in the strip      x x x o o y      R R R   z      without ids that are only targets
    index             0 1 2 3 4 5      6 7 8   9      among the ids after the prompt
    target            x x x     y y            z z    the sampled ids
    predictor        -1 0 1     4 5            8 9    the token before it; -1: the prompt's last

Not of the spine: without turns it is `completion[:-1]`, and predictors -1, 0, 1, …
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from .ragged import Ragged


@dataclass(frozen=True)
class Turns:
    """The T turns of B rollouts, on the CPU."""

    lengths: Ragged
    """[B rows, T values] int64: number of ids sampled in each turn."""
    observations: Ragged
    """[T rows] ids the model reads after each turn; empty for a rollout's last turn."""
    histories: Ragged
    """[T rows] ids it reads before a turn whose history was rewritten; empty for other turns."""

    @classmethod
    def of_table(cls, rollouts: pa.Table, completion_lengths: Tensor) -> Turns | None:
        """Read the turns of rollouts/2; None for rollouts/1.

        A rollout with null turns has one turn, with as many ids as in `completion_lengths` [B].
        """
        if "turns" not in rollouts.column_names:
            return None
        column = rollouts["turns"]
        is_single = np.array(column.is_null())
        counts = np.array(pc.list_value_length(column).fill_null(0), dtype=np.int64)
        singles = counts.cumsum()[is_single]  # positions of their turns among the written ones
        turns = pc.list_flatten(column)
        sampled = np.array(pc.struct_field(turns, "length"), dtype=np.int64)
        sampled = np.insert(sampled, singles, completion_lengths.numpy()[is_single])

        def ids(name: str) -> Ragged:
            lists = pc.struct_field(turns, name)
            lengths = np.array(pc.list_value_length(lists).fill_null(0), dtype=np.int64)
            return _rows(np.array(pc.list_flatten(lists)), np.insert(lengths, singles, 0))

        lengths = _rows(sampled, counts + is_single)
        return cls(lengths, ids("observation_ids"), ids("restart_ids"))

    @cached_property
    def begins_sequence(self) -> Tensor:
        """[T] bool: true if the turn is its rollout's first, or has a history of its own."""
        begins = self.histories.lengths > 0
        begins[self.lengths.offsets[:-1]] = True
        return begins

    @cached_property
    def input_lengths(self) -> Tensor:
        """[B] int64: number of tokens that each rollout adds to the strip after its prompt.

        From each sequence these are the tokens before its last sampled id.
        """
        lengths = self.lengths.values
        read = (self.histories.lengths + lengths + self.observations.lengths).cumsum(0)
        ends = read - self.observations.lengths  # end of each turn's sampled ids
        starts = (ends - lengths - self.histories.lengths)[self.begins_sequence]
        sequences = self.begins_sequence.cumsum(0) - 1
        inputs = ends - starts[sequences] - 1
        is_sampled = lengths > 0
        longest = torch.zeros_like(starts).scatter_reduce(
            0, sequences[is_sampled], inputs[is_sampled], "amax"
        )
        rows = self.lengths.segment_ids[self.begins_sequence]
        return lengths.new_zeros(len(self.lengths)).index_add(0, rows, longest)

    def take(self, rows: Tensor) -> Turns:
        """Return the turns of rollouts `rows` [b], in that order."""
        numbers = self.lengths.with_values(torch.arange(len(self.lengths.values))).take(rows).values
        return Turns(
            self.lengths.take(rows), self.observations.take(numbers), self.histories.take(numbers)
        )

    def with_next_state(self, cut: Tensor) -> Turns:
        """Return the turns with one more sampled id at the end of rollouts in `cut` [B] bool."""
        lengths = self.lengths.values.clone()
        lengths[self.lengths.offsets[1:][cut] - 1] += 1
        return replace(self, lengths=self.lengths.with_values(lengths))

    def last_tokens(self) -> Tensor:
        """[T] position of each turn's last sampled id among those of all rollouts.

        For a turn without sampled ids it is the id before it, or its rollout's first.
        """
        ends = self.lengths.values.cumsum(0)
        starts = (ends - self.lengths.values)[self.lengths.offsets[:-1]]
        return torch.maximum(ends - 1, starts.repeat_interleave(self.lengths.lengths))


class AfterPrompts(NamedTuple):
    """Ids that b rollouts add to the strip after their prompts, as in the picture above."""

    ids: list[np.ndarray]
    """[b] arrays, one per rollout: the tokens after which an id is predicted."""
    predictors: np.ndarray
    """[n] int64: for each target, the position in its rollout's `ids` of the token before it; −1 if
    that is the prompt's last.
    """
    restarts: np.ndarray
    """[r] int64: positions in a rollout's `ids` where a rewritten history begins."""
    restart_counts: np.ndarray
    """[b] int64: number of restarts in each rollout."""


def after_prompts(completions: Ragged, turns: Turns | None, rows: np.ndarray) -> AfterPrompts:
    """Build the inputs of rollouts `rows` [b]; they are never in memory for all rollouts at once.

    Args:
        turns: the turns of the rollouts. None: they have none.
    """
    if turns is None:
        counts = completions.lengths.numpy()[rows]
        predictors = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) - 1
        ids = [ids[:-1] for ids in completions.views(rows)]
        return AfterPrompts(ids, predictors, np.zeros(0, np.int64), np.zeros_like(counts))
    index = torch.from_numpy(rows)
    completions = completions.take(index)
    turns = turns.take(index)
    counts = torch.stack(
        [turns.histories.lengths, turns.lengths.values, turns.observations.lengths], 1
    ).numpy()
    num_turns = len(counts)
    lengths = counts.ravel()
    # for each token read: its kind (history, sampled, observation), its turn, and its sequence
    kinds = np.tile(np.arange(3), num_turns).repeat(lengths)
    turn_of_token = np.arange(num_turns).repeat(counts.sum(1))
    is_start = turns.begins_sequence.numpy()
    sequences = np.cumsum(is_start)[turn_of_token] - 1

    ids = np.empty(len(kinds), np.int32)
    for kind, source in enumerate((turns.histories, completions, turns.observations)):
        ids[kinds == kind] = source.values.numpy()
    targets = np.flatnonzero(kinds == 1)
    last_target = np.full(int(is_start.sum()), -1)
    last_target[sequences[targets]] = targets  # if an index repeats, the last value stays
    is_input = np.arange(len(ids)) < last_target[sequences]

    row_of_token = turns.lengths.segment_ids.numpy()[turn_of_token]
    input_counts = np.bincount(row_of_token[is_input], minlength=len(completions))
    row_starts = np.cumsum(input_counts) - input_counts
    places = np.cumsum(is_input) - 1 - row_starts[row_of_token]  # in its rollout's `ids`
    predictors = np.where(_is_first(row_of_token)[targets], -1, places[targets - 1])
    restarts = (kinds == 0) & _is_first(turn_of_token) & is_input
    restart_counts = np.bincount(row_of_token[restarts], minlength=len(completions))
    return AfterPrompts(
        np.split(ids[is_input], input_counts.cumsum()[:-1]),
        predictors,
        places[restarts],
        restart_counts,
    )


def _is_first(numbers: np.ndarray) -> np.ndarray:
    """[n] bool: true if a number differs from the one before it."""
    return np.insert(numbers[1:] != numbers[:-1], 0, True)[: len(numbers)]


def _rows(values: np.ndarray, lengths: np.ndarray) -> Ragged:
    # torch needs writable memory, and Arrow's may be read-only
    writable = np.require(values, requirements="W")
    return Ragged.from_lengths(torch.from_numpy(writable), torch.from_numpy(lengths))
