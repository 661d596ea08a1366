"""Packing: nothing lost, nothing over the budget but a single long rollout, the same every time."""

import random

import pytest

from quiver.stages.model.forward.packing import Piece, make_pieces, minibatches, pack


@pytest.mark.parametrize("seed", range(30))
def test_every_rollout_once_within_the_budget(seed):
    rng = random.Random(seed)
    count = rng.randrange(1, 60)
    prompts = sorted(rng.randrange(8) for _ in range(count))
    sizes = {prompt: rng.randrange(1, 20) for prompt in set(prompts)}
    prompt_tokens, inputs = (
        [sizes[prompt] for prompt in prompts],
        [rng.randrange(39) for _ in range(count)],
    )
    budget = rng.choice([10, 40, 100])
    pieces = make_pieces(range(count), prompts, prompt_tokens, inputs, budget)
    micros = pack(pieces, budget)
    assert sorted(row for micro in micros for piece in micro for row in piece.rows) == list(
        range(count)
    )
    for micro in micros:
        assert (
            sum(piece.tokens for piece in micro) <= budget or len(micro) == len(micro[0].rows) == 1
        )
        for piece in micro:
            assert len({prompts[row] for row in piece.rows}) == 1
            assert piece.tokens == sizes[prompts[piece.rows[0]]] + sum(
                inputs[row] for row in piece.rows
            )
    assert pack(pieces, budget) == micros


def test_best_fit_fills_the_fullest_row_that_has_room():
    pieces = [Piece((i,), tokens) for i, tokens in enumerate([6, 5, 4, 3, 2])]
    assert [[piece.tokens for piece in micro] for micro in pack(pieces, 10)] == [[6, 4], [5, 3, 2]]


def test_an_over_long_rollout_gets_a_micro_batch_of_its_own():
    micros = pack([Piece((0,), 3), Piece((1,), 50)], 10)
    assert [[piece.tokens for piece in micro] for micro in micros] == [[50], [3]]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_minibatches_keep_groups_whole_and_even(count):
    groups = [3, 3, 0, 0, 1, 1, 2, 2, 4, 4, 5, 5]
    batches = minibatches(groups, count)
    assert sorted(row for batch in batches for row in batch) == list(range(12))
    groups_of = [{groups[row] for row in batch} for batch in batches]
    assert sum(map(len, groups_of)) == 6, "no group is in two"
    assert max(map(len, batches)) - min(map(len, batches)) <= 4
    assert len(batches) == min(count, 6)


def test_groups_are_taken_by_their_numbers_not_as_they_stand():
    """The trainer shuffles by numbering them anew; the rollouts stay where they are."""
    assert minibatches([2, 2, 0, 0, 1, 1], 3) == [[2, 3], [4, 5], [0, 1]]
