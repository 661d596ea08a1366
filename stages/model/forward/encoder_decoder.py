"""Encoder-decoder models behind the same interface as causal ones.

Prompts go to the encoder; the decoder reads [start] + completion[:-1]. Rows are padded only here,
because the attention of these models does not support strips. Masks come from lengths, never
from ids: pad may equal the start or the end id. A prompt is encoded once for all its rollouts in a
micro-batch. Micro-batches hold rollouts of similar length, and their budget counts padding too.
Stored completions never hold the start id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .layout import Sequences
from .packing import Piece


@dataclass(frozen=True)
class Pairs:
    """One micro-batch: p prompts as [p, P], b decoder rows as [b, T], and the positions that
    predict the n completion tokens."""

    prompts: Tensor
    """[p, P] int64"""
    prompt_mask: Tensor
    """[p, P] int64: 1 at a prompt's ids, 0 at padding."""
    owners: Tensor
    """[b] int64: the prompt that each decoder row reads."""
    inputs: Tensor
    """[b, T] int64"""
    input_mask: Tensor
    """[b, T] int64"""
    rows: np.ndarray
    """[b] int64: rollouts in the order of `targets`."""
    predictors: Tensor
    """[n] index into the decoder's b · T positions: where it reads the id before the target."""
    targets: Tensor
    """[n] int64"""
    temperature: Tensor
    """[n] float32"""
    filling: tuple[int, int]
    """Padding positions of encoder and decoder together, and positions in all."""


def make_pairs(pieces: Sequence[Piece], sequences: Sequences, start: int) -> Pairs:
    """Pad the prompts and the shifted completions of `pieces`, on the CPU; `start` is the decoder's
    start id. The rollouts have one turn each (`loading.check_rows`)."""
    rows = torch.tensor([row for piece in pieces for row in piece.rows])
    counts = torch.tensor([len(piece.rows) for piece in pieces])
    completions = sequences.completions.take(rows)
    first = torch.tensor([start])
    prompts, prompt_mask = _pad([sequences.prompts[piece.rows[0]] for piece in pieces])
    inputs, input_mask = _pad([torch.cat([first, ids[:-1]]) for ids in completions])
    num_places = prompts.numel() + inputs.numel()
    num_ids = int(prompt_mask.sum() + input_mask.sum())
    return Pairs(
        prompts=prompts,
        prompt_mask=prompt_mask,
        owners=torch.arange(len(pieces)).repeat_interleave(counts),
        inputs=inputs,
        input_mask=input_mask,
        rows=rows.numpy(),
        predictors=input_mask.flatten().nonzero()[:, 0],
        targets=completions.values.long(),
        temperature=sequences.temperature[rows].repeat_interleave(completions.lengths),
        filling=(num_places - num_ids, num_places),
    )


def _pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return rows as one tensor [b, T], padded at the end with 0, and its mask of rows' ids, made
    from the lengths."""
    ids = pad_sequence(rows, batch_first=True).long()
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids, mask.long()


def pack_pairs(
    rows: Sequence[int], prompt_numbers: Sequence[int], sequences: Sequences, budget: int
) -> list[list[Piece]]:
    """Sort rollouts by length and cut them into micro-batches of at most `budget` tokens.

    The budget counts prompts and decoder rows with their padding. Rollouts with equal
    `prompt_numbers` share a prompt. The longest micro-batch comes first. A rollout longer than the
    budget gets a micro-batch of its own.
    """
    prompt_lengths = sequences.prompts.lengths.tolist()
    lengths = sequences.completions.lengths.tolist()
    microbatches: list[dict[int, list[int]]] = []  # the rollouts of each prompt number
    members: dict[int, list[int]] = {}
    count = longest = longest_prompt = 0
    for row in sorted(
        rows, key=lambda row: (-lengths[row], -prompt_lengths[row], prompt_numbers[row], row)
    ):
        count += 1
        longest_prompt = max(longest_prompt, prompt_lengths[row])
        num_prompts = len(members.keys() | {prompt_numbers[row]})
        if not microbatches or num_prompts * longest_prompt + count * longest > budget:
            members = {}
            microbatches.append(members)
            count = 1
            longest = lengths[row]
            longest_prompt = prompt_lengths[row]
        members.setdefault(prompt_numbers[row], []).append(row)
    return [
        [
            Piece(tuple(rows), prompt_lengths[rows[0]] + sum(lengths[row] for row in rows))
            for rows in members.values()
        ]
        for members in microbatches
    ]


def decoder_states(model: nn.Module, pairs: Pairs) -> Tensor:
    """Return [n, d] last hidden states of the decoder that predict the targets."""
    encoded = model.get_encoder()(
        input_ids=pairs.prompts, attention_mask=pairs.prompt_mask
    ).last_hidden_state
    output = model.get_decoder()(
        input_ids=pairs.inputs,
        attention_mask=pairs.input_mask,
        encoder_hidden_states=encoded[pairs.owners],
        encoder_attention_mask=pairs.prompt_mask[pairs.owners],
        use_cache=False,
    )
    return output.last_hidden_state.flatten(0, 1)[pairs.predictors]
