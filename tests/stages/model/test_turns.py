"""What the model reads of turns: the picture in turns.py, rows without turns among them, and that
what is read is always prompt + Σ(turn + observation)."""

import random
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from quiver.schemas import rollouts as kind
from quiver.stages.model.ragged import Ragged
from quiver.stages.model.turns import Turns, after_prompts
from tests import episodes
from tests.episodes import turn


def table_of(*rows: dict) -> pa.Table:
    """Rows of prompt [1, 5], with completion_ids and turns."""
    about = {
        "group_id": "g",
        "sample_index": 0,
        "prompt_ids": [1, 5],
        "finish_reason": "stop",
        "stop_reason": None,
        "completion_text": "",
        "temperature": 1.0,
        "seed": 0,
        "end_reason": "answered",
    }
    rows = [
        {
            **about,
            "rollout_id": str(number),
            "old_logprobs": [-1.0] * len(row["completion_ids"]),
            **row,
        }
        for number, row in enumerate(rows)
    ]
    return pa.Table.from_pylist(rows, schema=kind.OF_TURNS)


class Inputs(NamedTuple):
    """The result of `after_prompts`, with one row for each rollout."""

    ids: list
    predictors: Ragged
    restarts: Ragged


def inputs_from(completions: Ragged, turns: Turns, rows: list[int]) -> Inputs:
    after = after_prompts(completions, turns, np.array(rows))
    lengths = completions.lengths[rows]
    counts = torch.from_numpy(after.restart_counts)
    return Inputs(
        after.ids,
        Ragged.from_lengths(torch.from_numpy(after.predictors), lengths),
        Ragged.from_lengths(torch.from_numpy(after.restarts), counts),
    )


def inputs_of(table: pa.Table) -> Inputs:
    completions = Ragged.from_arrow(table["completion_ids"])
    turns = Turns.of_table(table, completions.lengths)
    inputs = inputs_from(completions, turns, list(range(len(table))))
    assert turns.input_lengths.tolist() == [len(ids) for ids in inputs.ids]
    return inputs


def as_lists(ragged: Ragged | list) -> list[list[int]]:
    return [row.tolist() for row in ragged]


def test_the_picture_is_what_is_made():
    picture = {
        "completion_ids": [10, 11, 12, 13, 14, 15, 16],
        "turns": [turn(3, [20, 21]), turn(2), turn(2, restart_ids=[30, 31, 32])],
    }
    single = {"completion_ids": [40, 41], "turns": [turn(2)]}
    table = table_of(single, picture, single)
    kind.check(table)
    inputs = inputs_of(table)
    assert as_lists(inputs.ids) == [[40], [10, 11, 12, 20, 21, 13, 30, 31, 32, 15], [40]]
    assert as_lists(inputs.predictors) == [[-1, 0], [-1, 0, 1, 4, 5, 8, 9], [-1, 0]]
    assert as_lists(inputs.restarts) == [[], [6], []]


def test_turns_without_ids():
    """Before an observation, at the end, and of a sequence of which nothing is predicted: that is
    not read."""
    rows = [
        {"completion_ids": [10], "turns": [turn(0, [20]), turn(1)]},
        {"completion_ids": [10], "turns": [turn(1, [20]), turn(0)]},
        {"completion_ids": [10], "turns": [turn(1), turn(0, [20], restart_ids=[30]), turn(0)]},
        {"completion_ids": [], "turns": [turn(0)]},
        {"completion_ids": [10], "turns": [turn(0), turn(1, restart_ids=[30, 31])]},
    ]
    table = table_of(*rows)
    kind.check(table)
    inputs = inputs_of(table)
    assert as_lists(inputs.ids) == [[20], [], [], [], [30, 31]]
    assert as_lists(inputs.predictors) == [[0], [-1], [-1], [], [1]]
    assert as_lists(inputs.restarts) == [[], [], [], [], [0]]


def random_row(generator: random.Random) -> dict:
    turns = []
    for number in range(generator.randrange(1, 5)):
        history = None
        if number and generator.random() < 0.3:
            history = [generator.randrange(300) for _ in range(generator.randrange(1, 4))]
        elif number:
            ids = [generator.randrange(300) for _ in range(generator.randrange(3))]
            turns[-1]["observation_ids"] = ids
        turns.append(turn(generator.randrange(4), restart_ids=history))
    ids = [generator.randrange(300) for _ in range(sum(part["length"] for part in turns))]
    return {"completion_ids": ids, "turns": turns}


@pytest.mark.parametrize("seed", range(20))
def test_each_id_is_predicted_by_the_token_before_it(seed):
    generator = random.Random(seed)
    table = table_of(*(random_row(generator) for _ in range(12)))
    kind.check(table)
    inputs = inputs_of(table.slice(2))
    for number, row in enumerate(table.slice(2).to_pylist()):
        read = [*row["prompt_ids"], *inputs.ids[number].tolist()]
        before = [read[place + 2] for place in inputs.predictors[number].tolist()]
        sequences = episodes.sequences_of(row)
        assert before == [ids[place - 1] for ids, places in sequences for place in places]
        needed = [(ids, places[-1]) for ids, places in sequences[1:] if places]
        whole = [*row["prompt_ids"]]
        if sequences[0][1]:
            whole = sequences[0][0][: sequences[0][1][-1]]
        assert read == [*whole, *(id for ids, end in needed for id in ids[:end])]
        starts = [len(whole)]
        for _, end in needed:
            starts.append(starts[-1] + end)
        assert (inputs.restarts[number] + 2).tolist() == starts[:-1]


def test_rows_are_taken_with_their_turns():
    generator = random.Random(0)
    rows = [random_row(generator) for _ in range(6)]
    table = table_of(*rows)
    completions = Ragged.from_arrow(table["completion_ids"])
    turns = Turns.of_table(table, completions.lengths)
    order = [4, 1, 1, 5]
    taken = inputs_from(completions, turns, order)
    again = inputs_of(table_of(*(rows[number] for number in order)))
    for name in ("ids", "predictors", "restarts"):
        assert as_lists(getattr(taken, name)) == as_lists(getattr(again, name))


def test_a_row_without_turns_is_one_turn():
    """As after joining rollouts/1 and rollouts/2."""
    generator = random.Random(1)
    table = table_of(*(random_row(generator) for _ in range(5)))
    singles = table.drop_columns(["turns", "end_reason"])
    mixed = pa.concat_tables(
        [singles.slice(0, 2), table.slice(2, 2), singles.slice(4)], promote_options="default"
    )
    whole = [turn(len(ids)) for ids in table["completion_ids"].to_pylist()]
    rows = [
        {"completion_ids": ids, "turns": [whole[n]] if n in (0, 1, 4) else turns}
        for n, (ids, turns) in enumerate(
            zip(table["completion_ids"].to_pylist(), table["turns"].to_pylist(), strict=True)
        )
    ]
    mine = inputs_of(mixed)
    expected = inputs_of(table_of(*rows))
    for name in ("ids", "predictors", "restarts"):
        assert as_lists(getattr(mine, name)) == as_lists(getattr(expected, name))
    assert Turns.of_table(singles, torch.zeros(5)) is None


def test_last_tokens_are_those_of_turns():
    rows = [
        {"completion_ids": [10, 11], "turns": [turn(0, [20]), turn(2)]},
        {"completion_ids": [12, 13, 14], "turns": [turn(2, [20]), turn(0), turn(1)]},
    ]
    table = table_of(*rows)
    turns = Turns.of_table(table, torch.tensor([2, 3]))
    assert turns.last_tokens().tolist() == [0, 1, 3, 3, 4]


def test_the_state_after_a_cut_turn_is_read():
    rows = [
        {"completion_ids": [10, 11], "turns": [turn(1, [20]), turn(1)]},
        {"completion_ids": [12, 13], "turns": [turn(1), turn(1, restart_ids=[30])]},
    ]
    turns = Turns.of_table(table_of(*rows), torch.tensor([2, 2]))
    longer = Ragged.from_lengths(torch.tensor([10, 11, 12, 13, 0]), torch.tensor([2, 3]))
    inputs = inputs_from(longer, turns.with_next_state(torch.tensor([False, True])), [0, 1])
    assert as_lists(inputs.ids) == [[10, 20], [30, 13]]
    assert as_lists(inputs.predictors) == [[-1, 1], [-1, 0, 1]]


def test_a_turn_without_ids_has_its_last_token_in_its_own_rollout():
    """The rollouts sampled ids 0 and 1; 2, 3 and 4; 5. Empty turns stand first, between and
    last."""
    table = table_of(
        {"completion_ids": [10, 11], "turns": [turn(2)]},
        {"completion_ids": [10, 11, 12], "turns": [turn(0, [20]), turn(2, [21]), turn(0), turn(1)]},
        {"completion_ids": [10], "turns": [turn(0, [20]), turn(0, [21]), turn(1), turn(0)]},
    )
    turns = Turns.of_table(table, Ragged.from_arrow(table["completion_ids"]).lengths)
    assert turns.last_tokens().tolist() == [1, 2, 3, 3, 4, 5, 5, 5, 5]
