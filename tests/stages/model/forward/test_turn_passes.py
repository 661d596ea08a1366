"""Passes over rollouts of several turns against transformers' own, one sequence at a time; what is
planted there is seen; encoder-decoder models read none."""

import copy
from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.model.forward.layout import Sequences, make_layout, prompt_numbers
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.verify import choose_mode
from quiver.stages.model.loading import check_rows, longest_sequence
from quiver.stages.model.ragged import Ragged
from quiver.stages.model.turns import Turns
from tests import episodes, flash
from tests.stages.model.forward import test_policy as forward

MODES = ["shared", "packed", "single"]


def made(model, **options) -> tuple[list[dict], Sequences, list[int]]:
    """Rows, what the model reads of them, and their prompts' numbers. Ids are below 97."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in (4, 1, 7)]
    rows = episodes.sample(model, prompts, 4, vocabulary=97, **options)
    table = episodes.table_of(rows)
    sequences = sequences_of(table)
    return rows, sequences, prompt_numbers(sequences.prompts, table["group_id"].to_pylist())


def sequences_of(table: pa.Table) -> Sequences:
    completions = Ragged.from_arrow(table["completion_ids"])
    return Sequences(
        Ragged.from_arrow(table["prompt_ids"]),
        completions,
        torch.tensor(table["temperature"].to_pylist()),
        Turns.of_table(table, completions.lengths),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_logprobs_and_gradients_are_transformers_own(kind, mode):
    model = forward._model(kind)
    rows, sequences, numbers = made(model, temperature=0.8)
    assert any(len(episodes.sequences_of(row)) > 1 for row in rows)
    expected = torch.cat([episodes.own_logprobs(model, row) for row in rows])
    forward.compare(Policy(model, autocast=False), mode, sequences, numbers, expected)


@pytest.mark.parametrize("mode", ["shared", "packed"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_kernel_for_any_lengths_is_given_the_same(kind, mode):
    """On a GPU; here a plain loop stands for it."""
    model = forward._model(kind)
    rows, sequences, numbers = made(model)
    with torch.no_grad(), flash.on_cpu():
        expected = torch.cat([episodes.own_logprobs(model, row) for row in rows])
        policy = Policy(model, autocast=False)
        policy.kernel = "varlen"
        logprobs = forward.packed(policy, mode, sequences, numbers)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_a_budget_counts_what_is_read():
    model = forward._model("llama")
    rows, sequences, numbers = made(model)
    policy = Policy(model, autocast=False)
    for mode, budget in (("packed", 40), ("shared", 60), ("packed", 1), ("shared", 1)):
        policy.set_mode(mode)
        for micro in policy.microbatches(range(len(rows)), numbers, sequences, budget):
            layout = make_layout(micro, sequences)
            assert layout.ids.numel() == sum(piece.tokens for piece in micro)
            assert layout.ids.numel() <= budget or len(layout.rows) == 1


def test_the_model_is_asked_for_its_own_pass_over_turns():
    """`choose_mode` compares with it; a layout that leaves the observations out is not used."""
    model = forward._model("llama")
    _, sequences, numbers = made(model)
    policy = Policy(model, autocast=False)
    for mode in MODES:
        assert choose_mode(policy, sequences, numbers, mode) == mode


def test_an_observation_left_out_or_off_by_one_is_far_off():
    """What a reader would compute that ignores turns, or loses or adds an id of an observation."""
    model = forward._model("llama")
    rows, sequences, numbers = made(model, restarts=False)
    expected = torch.cat([episodes.own_logprobs(model, row) for row in rows]).detach()
    policy = Policy(model, autocast=False)

    def gap(changed: Sequences) -> float:
        with torch.no_grad():
            logprobs = forward.packed(policy, "shared", changed, numbers)
        return float((logprobs - expected).abs().mean())

    assert gap(sequences) < 1e-6
    assert gap(replace(sequences, turns=None)) > 0.1
    for change in (lambda ids: ids[1:], lambda ids: ids[:-1], lambda ids: [*ids, 5]):
        changed = copy.deepcopy(rows)
        for turn in (turn for row in changed for turn in row["turns"] if turn["observation_ids"]):
            turn["observation_ids"] = change(turn["observation_ids"])
        assert gap(sequences_of(episodes.table_of(changed))) > 0.05
    for row in rows:  # the observation begins one id too early
        if len(row["turns"]) > 1 and row["turns"][0]["length"] > 1:
            row["turns"][0]["length"] -= 1
            row["turns"][1]["length"] += 1
    assert gap(sequences_of(episodes.table_of(rows))) > 0.05


def test_the_longest_sequence_is_what_the_model_must_read():
    rows, _, _ = made(forward._model("llama"))
    table = episodes.table_of(rows)
    longest = max(len(ids) for row in rows for ids, _ in episodes.sequences_of(row))
    lengths = pa.compute.list_value_length(table["prompt_ids"])
    assert longest_sequence(lengths, table["turns"]) == longest


def test_an_encoder_decoder_model_reads_no_turns(store):
    from tests.tiny import make_policy

    rows, _, _ = made(forward._model("llama"))
    with pytest.raises(ConfigError, match="an encoder-decoder model answers a prompt only once"):
        check_rows(episodes.table_of(rows), "rollouts", make_policy(store, "t5", kind="t5"))
