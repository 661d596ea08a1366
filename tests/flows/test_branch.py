"""`quiver branch`: prefixes of saved episodes as prompts, by the command line; the environment can
be brought to their place."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from quiver.flows.verification import verify
from quiver.schemas import prompts as prompts_kind
from quiver.schemas.errors import ConfigError, SchemaError
from quiver.stages.core.store import Store, Version
from quiver.stages.model.loading import load_model
from quiver.stages.turns.config import Turns
from quiver.stages.turns.environment import Turn
from quiver.stages.turns.pool import EnvironmentPool
from quiver.stages.turns.reenact import reenact
from quiver.stages.turns.saved import beginning_of
from tests import episodes, sight
from tests.flows.test_reenact import CALL, by_halves, write_guess
from tests.stages.generate.recorded import answer, opened, record
from tests.stages.optimize import world
from tests.tiny import make_policy, tokenizer
from tests.writing import run_here

CALLED = """
from quiver.stages.turns.environment import Step

class Counter:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    def reset(self, start):
        self.total = start

    def step(self, turn):
        messages = []
        for call in turn.calls:
            self.total += call.arguments["amount"]
            messages.append({"role": "tool", "name": "add", "content": str(self.total)})
        return Step(messages=messages, done=not turn.calls)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("branch")
    store = Store(folder / "store")
    policy = make_policy(store)
    turns = Turns(environment=write_guess(folder), max_turns=4, processes=1)
    made = record(store, policy, turns, [{"limit": 8}] * 5, by_halves)
    return folder, store, policy, turns, made


@pytest.fixture
def branch(saved, command):
    """A function that runs the command line; returns its exit code and its JSON object."""
    words = ("branch", "tiny/rollouts@1", "--store", str(saved[1].url), "--turn")
    return partial(command, *words)


def branched(store: Store, turn: int, into: str, ref: str = "tiny/rollouts@1") -> Version:
    """The same without the shell."""
    return store.open(run_here("branch", {"turn": turn}, store, into=into, rollouts=ref))


def test_the_ids_are_those_that_were_read_before_the_turn(saved):
    _, store, _, _, made = saved
    for turn in (1, 2, 3):
        version = branched(store, turn, "cut")
        rows = version.table().to_pylist()
        longer = {
            f"{row['rollout_id']}.{turn}": made.read[row["rollout_id"]][turn]
            for row in made.rollouts.table().to_pylist()
            if len(row["turns"]) > turn
        }
        assert {row["group_id"]: row["prompt_ids"] for row in rows} == longer
        assert [row["prompt_text"] for row in rows] == tokenizer().batch_decode([*longer.values()])
        assert all(row["columns"]["limit"] == 8 for row in rows)
        inputs = version.manifest.inputs
        assert [entry.ref for entry in inputs] == ["tiny/rollouts@1", "tiny/prompts@1"]
        assert version.manifest.status == {
            "kept": len(longer),
            "shorter": 10 - len(longer),
            "failed": 0,
        }
    assert verify(store)[1] == []


def test_the_same_again_is_done_already(saved, branch):
    store = saved[1]
    first, second = (branch("1", "--into", "again")[1]["prompts"] for _ in range(2))
    rows = store.open("tiny/rollouts@1").table().to_pylist()
    num_longer = sum(len(row["turns"]) > 1 for row in rows)
    assert not first["cached"] and second["cached"]
    assert second["ref"] == first["ref"] == "again/prompts@1"
    assert second["rows"] == len(store.open("again/prompts@1").table()) == num_longer == 8


def test_the_environment_goes_on_from_there_as_it_had(saved):
    """Brought to the place of each prompt, it answers the turn that followed as it did then."""
    _, store, _, turns, made = saved
    prompts = branched(store, 2, "place")
    by_id = {row["rollout_id"]: row for row in made.rollouts.table().to_pylist()}
    with EnvironmentPool(turns) as pool:
        for row in prompts.table().to_pylist():
            rollout = by_id[row["group_id"].removesuffix(".2")]
            key, reply = opened(pool, beginning_of(row["group_id"], row["columns"]))
            assert reply.step.text == rollout["turns"][1]["observation"]
            assert row["messages"][-1]["content"] == reply.step.text
            assert row["columns"][prompts_kind.PLAYED_GROUP] == rollout["group_id"]
            pool.step(key, Turn(rollout["turns"][2]["text"]))
            assert answer(pool).step.text == rollout["turns"][2]["observation"]


def test_what_is_sampled_from_there_is_played_again_and_branched_again(saved):
    _, store, policy, turns, _ = saved
    prompts = branched(store, 1, "more")
    going_on = turns.model_copy(update={"max_turns": 3})
    made = record(
        store, policy, going_on, prompts, lambda *at: str(7 - at[2]), samples=1, run="more"
    )
    report = reenact(store, "more/rollouts@1", processes=1)
    assert report.episodes == report.episodes_agree == len(made.rollouts.table()) == 8
    for row in branched(store, 1, "more", "more/rollouts@1").table().to_pylist():
        played = json.loads(row["columns"][prompts_kind.PLAYED_TURNS])
        assert [turn["text"] for turn in played][1:] == ["7"] and len(played) == 2
        assert row["columns"][prompts_kind.PLAYED_GROUP] in {f"g{n}" for n in range(5)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("random.Random(seed)", "random.Random(seed + 1)"),
        ("/ 7", "/ 8"),
        ("done=guess == self.number", "done=True"),
    ],
)
def test_an_environment_that_comes_to_another_place_is_told(saved, tmp_path, before, after):
    """Not what it says to the turn that is sampled, but on the way there."""
    folder, store, policy, turns, _ = saved
    prompts = branched(store, 1, "elsewhere")
    text = (folder / "guess.py").read_text()
    assert before in text
    (tmp_path / "other.py").write_text(text.replace(before, after))
    made = record(store, policy, turns, prompts, lambda *at: "7", samples=1, run="elsewhere")
    report = reenact(
        store, str(made.rollouts.ref), environment=f"{tmp_path}/other.py:Guess", processes=1
    )
    assert report.episodes_agree < report.episodes
    assert {difference.turn for difference in report.differences} >= {None}


def test_what_was_called_stands_in_messages_and_turns(store, tmp_path):
    (tmp_path / "counter.py").write_text(CALLED)
    turns = Turns(environment=f"{tmp_path}/counter.py:Counter", processes=1)
    said = [f"I add.{CALL}{CALL}", "<tool_call>{}</tool_call>", CALL, "It is done."]
    record(store, make_policy(store), turns, [{"start": 1}], lambda *at: said[at[2]], samples=1)
    (row,) = branched(store, 3, "tiny").table().to_pylist()
    call = {"name": "add", "arguments": {"amount": 2}}
    assert json.loads(row["columns"][prompts_kind.PLAYED_TURNS]) == [
        {"text": "I add.", "calls": [call, call], "observation": "3\n5", "cut": 0, "reward": None},
        {"text": "", "calls": [call], "observation": "7", "cut": 0, "reward": None},
    ], "the turn that could not be read was none of the environment's"
    messages = [(m["role"], m["name"], m["content"]) for m in row["messages"]]
    assert messages[1:4] == [
        ("assistant", None, "I add."),
        ("tool", "add", "3"),
        ("tool", "add", "5"),
    ]
    assert messages[5][:2] == ("tool", "error") and messages[7] == ("tool", "add", "7")
    saved_calls = json.loads(row["messages"][1]["tool_calls"])
    assert [each["function"] for each in saved_calls] == [call, call]
    assert [m["tool_call_id"] for m in row["messages"][2:4]] == [each["id"] for each in saved_calls]


def test_a_rewritten_history_is_read_from_where_it_begins(store):
    policy = make_policy(store)
    rows = episodes.sample(
        load_model(policy, dtype=torch.float32), episodes.prompts(6), 2, most_turns=4
    )
    episodes.write(store, policy, rows, prompts=world.write_prompts(store, rows))
    made = branched(store, 2, "tiny").table().to_pylist()
    ids = {row["group_id"]: row["prompt_ids"] for row in made}
    num_restarted = 0
    for row in rows:
        if len(row["turns"]) < 3:
            continue
        sampled = sum(turn["length"] for turn in row["turns"][:2])
        expected = next(  # all that stands before the first id of turn 2, in its sequence
            sequence[: places[sampled - before]]
            for sequence, places, before in with_counts(episodes.sequences_of(row))
            if sampled - before < len(places)
        )
        num_restarted += any(turn["restart_ids"] for turn in row["turns"][:3])
        assert ids.pop(f"{row['rollout_id']}.2") == expected
    assert not ids and num_restarted > 0


def test_where_a_rewritten_history_shows_its_pictures_is_not_known(tmp_path):
    store = sight.make_prompts(tmp_path, [{"prompt": "one", "images": ["0.png"]}])
    prompts = store.open(sight.REFS["prompts"])
    (prompt,) = prompts.table().to_pylist()
    turns = [episodes.turn(1), episodes.turn(1, restart_ids=[5, 6])]
    row = episodes.row("000000-0", turns, prompt_ids=prompt["prompt_ids"])
    policy = store.open(sight.REFS["policy"])
    rollouts = episodes.write(store, policy, [row], "sees", prompts)
    with pytest.raises(SchemaError, match="the places of its pictures and clips are not known"):
        branched(store, 1, "cut", str(rollouts.ref))


def with_counts(sequences):
    """Each sequence with how many ids were sampled before it."""
    before = 0
    for sequence, places in sequences:
        yield sequence, places, before
        before += len(places)


def test_failed_episodes_are_left_out(store, tmp_path):
    """Their rewards are unknown, so no environment could repeat them."""
    turns = Turns(environment=write_guess(tmp_path), max_turns=3, processes=1)

    def say(group: str, sample: int, turn: int) -> str:
        return "break" if turn == 2 and (sample == 1 or group == "g1") else "9"

    policy = make_policy(store)
    made = record(store, policy, turns, [{"limit": 8}] * 2, say)
    version = branched(store, 1, "cut")
    assert [row["group_id"] for row in version.table().to_pylist()] == ["tiny-g0-0.1"]
    assert version.manifest.status == {"kept": 1, "shorter": 0, "failed": 3}
    with pytest.raises(ConfigError, match="episode has 3, without those that failed"):
        branched(store, 3, "cut")
    record(store, policy, turns, [{"limit": 8}], lambda *at: "break", run="broken")
    with pytest.raises(ConfigError, match="all its 2 episodes failed") as refusal:
        branched(store, 1, "cut", "broken/rollouts@1")
    assert refusal.value.next == "quiver show broken/rollouts@1"
    assert len(made.rollouts.table()) == 4


def test_a_turn_that_no_episode_has_is_refused(saved, branch):
    store = saved[1]
    before = store.numbers("tiny", "prompts")
    code, answer = branch("4")
    assert code == 2 and "the longest episode has 4" in answer["error"]["message"]
    assert store.numbers("tiny", "prompts") == before
