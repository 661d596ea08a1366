"""The row of prompts and completions: the picture in layout.py, and that no mask spans the row."""

import torch

from quiver.stages.model.forward.layout import Sequences, make_layout, prompt_numbers
from quiver.stages.model.forward.packing import make_pieces
from quiver.stages.model.forward.policy import pieces_of
from quiver.stages.model.ragged import Ragged
from tests.stages.model.forward import test_policy

A, X, Y = [10, 11, 12], [20, 21, 22], [30, 31, 32, 33]
B, Z = [40, 41], [50, 51]


def _ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_lengths(
        torch.tensor([id for row in rows for id in row]), torch.tensor([len(row) for row in rows])
    )


def test_the_picture_is_what_is_made():
    sequences = Sequences(_ragged([A, A, B]), _ragged([X, Y, Z]), torch.tensor([0.5, 1.0, 2.0]))
    pieces = make_pieces(range(3), [0, 0, 1], [3, 3, 2], [3, 4, 2], 100)
    layout = make_layout(pieces, sequences, varlen=True)
    assert layout.ids.tolist() == [A + X[:-1] + Y[:-1] + B + Z[:-1]]
    assert layout.filling == (0, 11)
    assert sequences.sizes([0, 0, 1]) == (11, 6)
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]]
    assert layout.rows.tolist() == [0, 1, 2]
    assert layout.targets.tolist() == X + Y + Z
    assert layout.predictors.tolist() == [2, 3, 4, 2, 5, 6, 7, 9, 10]
    assert layout.temperature.tolist() == [0.5] * 3 + [1.0] * 4 + [2.0] * 2
    own, prefixes = layout.runs.calls
    assert own.query_offsets.tolist() == own.key_offsets.tolist() == [0, 3, 5, 8, 11]
    assert (own.longest, own.causal) == ((3, 3), True)
    # A meets no prefix; x and y meet A; x, y, B and z are the prefix of none, and B z meets none
    assert prefixes.query_offsets.tolist() == [0, 3, 3, 8, 11, 11]
    assert prefixes.key_offsets.tolist() == [0, 0, 0, 3, 3, 11]
    assert (prefixes.longest, prefixes.causal) == ((5, 8), False)
    assert layout.runs.copied.query_offsets.tolist() == [0, 3, 5, 8, 11]
    assert layout.runs.copied.key_offsets.tolist() == [0, 3, 8, 14, 17]
    assert layout.runs.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10]
    prompts, completions = layout.blocks.parts
    assert prompts.has_no_prefix and not completions.has_no_prefix
    assert prompts.queries.tolist() == [[8, 9, 10] + [0] * 5, [0, 1, 2] + [0] * 5]
    assert completions.queries.tolist() == [[5, 6, 7] + [0] * 5, [3, 4] + [0] * 6]
    assert completions.keys.tolist() == [[0, 1, 2, 5, 6, 7, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    queries = torch.cat([block.queries.flatten() for block in layout.blocks.parts])
    assert queries[layout.blocks.gather].tolist() == list(range(11))


def test_rollouts_of_one_group_share_a_prompt_where_its_ids_are_the_same():
    assert prompt_numbers(_ragged([A, A, B, A, B]), [7, 7, 7, 8, 7]) == [0, 0, 1, 2, 1]


def test_no_mask_spans_the_whole_row():
    data, groups = test_policy._data(longest=90)
    layout = make_layout(pieces_of("shared", range(len(groups)), groups, data, 10_000), data)
    sides = [(*block.queries.shape, block.keys.shape[1]) for block in layout.blocks.parts]
    area = sum(spans * queries * keys for spans, queries, keys in sides)
    assert area < layout.ids.numel() ** 2 / 2.5
    assert all(queries % 8 == keys % 8 == 0 for _, queries, keys in sides)
    prompt_tokens = data.prompts.lengths[[0, 3, 4, 8]].sum()
    assert len(layout.ids[0]) == prompt_tokens + (data.completions.lengths - 1).sum()


def test_a_piece_counts_its_tokens_in_the_row():
    data, groups = test_policy._data()
    for mode in ("shared", "packed"):
        pieces = pieces_of(mode, range(len(groups)), groups, data, 10_000)
        layout = make_layout(pieces, data)
        assert sum(piece.tokens for piece in pieces) == layout.ids.numel()


def test_rollouts_are_taken_in_order():
    data, _ = test_policy._data()
    taken = data.take([3, 0])
    assert taken.prompts[1].tolist() == data.prompts[0].tolist()
    assert taken.completions[0].tolist() == data.completions[3].tolist()
    assert taken.temperature.tolist() == data.temperature[[3, 0]].tolist()
    assert taken.turns is None
