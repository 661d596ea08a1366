"""`quiver reenact`: saved episodes against their environment again, by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.schemas.errors import LineageError
from quiver.stages.core.store import Store
from quiver.stages.turns.config import Turns
from quiver.stages.turns.reenact import Report, reenact
from tests import episodes
from tests.flows.conftest import quiver
from tests.stages.generate.recorded import record
from tests.stages.optimize import world
from tests.tiny import make_policy

GUESS = '''
import random
from quiver.stages.turns.environment import Step

class Guess:
    """A number below a limit, with hints."""

    def reset(self, seed, limit):
        self.number = random.Random(seed).randrange(limit)
        return f"a number below {limit}"

    def step(self, turn):
        if turn.text == "break":
            raise RuntimeError("it broke")
        guess = int(turn.text)
        hint = "right" if guess == self.number else "higher" if guess < self.number else "lower"
        return Step(text=hint * LENGTH, reward=-abs(guess - self.number) / 7, done=guess == self.number)

    def get_reward(self):
        return 0.1
'''
TOOLS = '''
class Counter:
    def __init__(self, goal):
        self.goal = goal

    def reset(self, start):
        self.total = start

    def add(self, amount: int) -> int:
        """Add to the number.

        Args:
            amount: How much.
        """
        self.total += amount
        return self.total

    def get_reward(self):
        return float(self.total == self.goal)
'''
THREE = '''
def add(amount: int) -> int:
    """Say 3.

    Args:
        amount: Any.
    """
    return 3
'''
CALL = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'


def write_guess(folder: Path, length: int = 1) -> str:
    (folder / "guess.py").write_text(GUESS.replace("LENGTH", str(length)))
    return f"{folder}/guess.py:Guess"


def by_halves(group: str, sample: int, number: int) -> str:
    """Guesses that do not depend on the hints."""
    return str([4, 2, 6, 1, 3, 5, 7, 0][(number + sample) % 8])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`tiny/rollouts@1`: 12 episodes of up to 4 turns; the folder of the environment."""
    folder = tmp_path_factory.mktemp("guess")
    store = Store(folder / "store")
    turns = Turns(environment=write_guess(folder), max_turns=4, processes=1)
    made = record(store, make_policy(store), turns, [{"limit": 8}] * 6, by_halves)
    return folder, made.rollouts


def play_here(folder: Path, environment: str | None = None) -> Report:
    """The same without the shell."""
    store = Store(folder / "store")
    return reenact(store, "tiny/rollouts@1", environment=environment, processes=1)


PLAY = ("reenact", "tiny/rollouts@1", "--store", "store")


def test_what_is_of_seed_row_and_turns_alone_agrees(saved, command, monkeypatch):
    folder, rollouts = saved
    answer = quiver(folder, *PLAY)
    rows = rollouts.table().to_pylist()
    num_turns = sum(len(row["turns"]) for row in rows)
    assert {row["end_reason"] for row in rows} == {"environment", "max_turns"}
    assert (answer["episodes"], answer["episodes_agree"], answer["failed"]) == (12, 12, 0)
    assert (answer["turns"], answer["turns_agree"]) == (num_turns, num_turns)
    assert answer["differences"] == [] and not answer["is_changed"]
    monkeypatch.chdir(folder)
    assert command(*PLAY, "--rows", "5")[1]["episodes"] == 5


def test_other_code_is_told_and_what_differs_is_shown(saved, tmp_path, command, monkeypatch):
    folder, rollouts = saved
    other = tmp_path / "other.py"
    other.write_text(
        (folder / "guess.py").read_text().replace('"lower"', '"LOWER"').replace("LENGTH", "1")
    )
    monkeypatch.chdir(folder)
    code, answer = command(*PLAY, "--environment", f"{other}:Guess")
    assert code == 3
    rows = rollouts.table().to_pylist()
    first_lower = {
        row["rollout_id"]: next(
            number for number, turn in enumerate(row["turns"]) if turn["observation"] == "lower"
        )
        for row in rows
        if any(turn["observation"] == "lower" for turn in row["turns"])
    }
    assert answer["is_changed"] and 0 < len(first_lower) < 12
    assert answer["episodes_agree"] == 12 - len(first_lower)
    assert [[d["rollout_id"], d["turn"]] for d in answer["differences"]] == [
        [*pair] for pair in first_lower.items()
    ]
    assert {(d["what"], d["recorded"], d["came"]) for d in answer["differences"]} == {
        ("observation", "lower", "LOWER")
    }


@pytest.mark.parametrize(
    "before, after, what, recorded, came",
    [
        ("/ 7", "/ 8", "reward", None, None),
        ("done=guess == self.number", "done=False", "end", "it ended", "it went on"),
        ("a number", "some number", "opening", "a number below 8", "some number below 8"),
        ("return 0.1", "return 0.2", "reward", None, None),
        ("guess = int(turn.text)", "guess = missing", "failure", None, None),
    ],
)
def test_each_thing_is_compared(saved, tmp_path, before, after, what, recorded, came):
    folder, _ = saved
    text = (folder / "guess.py").read_text()
    assert before in text
    (tmp_path / "changed.py").write_text(text.replace(before, after))
    differences = play_here(folder, f"{tmp_path}/changed.py:Guess").differences
    assert {difference.what for difference in differences} == {what}
    if recorded is not None:
        assert (differences[0].recorded, differences[0].came) == (recorded, came)


def test_chance_that_is_not_of_the_seed_is_found(store, tmp_path):
    path = Path(write_guess(tmp_path).rpartition(":")[0])
    path.write_text(
        path.read_text()
        .replace("import random", "import os, random")
        .replace("random.Random(seed)", "random.Random(os.urandom(8))")
    )
    turns = Turns(environment=f"{path}:Guess", max_turns=4, processes=1)
    record(store, make_policy(store), turns, [{"limit": 8}] * 4, by_halves)
    report = play_here(tmp_path)
    assert report.episodes == 8 and not report.is_changed
    assert report.episodes_agree < 8


def test_a_cut_observation_is_compared_as_it_was_cut(store, tmp_path):
    turns = Turns(
        environment=write_guess(tmp_path, 60), max_turns=3, max_observation_tokens=80, processes=1
    )
    made = record(store, make_policy(store), turns, [{"limit": 8}] * 2, by_halves)
    infos = [turn["info"] for row in made.rollouts.table().to_pylist() for turn in row["turns"]]
    assert any(info and "quiver_cut_characters" in info for info in infos)
    assert play_here(tmp_path).episodes_agree == 4
    assert play_here(tmp_path, write_guess(tmp_path, 61)).episodes_agree == 0


def test_an_episode_that_failed_is_not_played(store, tmp_path):
    turns = Turns(environment=write_guess(tmp_path), max_turns=3, processes=1)

    def say(group: str, sample: int, number: int) -> str:
        return "break" if (group, sample, number) == ("g1", 1, 1) else "9"

    record(store, make_policy(store), turns, [{"limit": 8}] * 2, say)
    report = play_here(tmp_path)
    assert (report.episodes, report.episodes_agree, report.failed, report.turns) == (3, 3, 1, 9)


def with_tools(folder: Path, said: list[str], starts: list[int], **options) -> list[dict]:
    """The rows of recorded episodes in which the policy says this, turn by turn."""
    store = Store(folder / "store")
    (folder / "counter.py").write_text(TOOLS)
    turns = Turns(environment=f"{folder}/counter.py:Counter", processes=1, **options)
    begun = [{"start": start} for start in starts]
    made = record(store, make_policy(store), turns, begun, lambda *at: said[at[2]])
    return made.rollouts.table().to_pylist()


def test_a_turn_of_too_many_calls_is_not_asked_for(tmp_path):
    rows = with_tools(tmp_path, [CALL, CALL * 2], [1], arguments={"goal": 3}, max_tool_calls=2)
    assert {row["end_reason"] for row in rows} == {"max_tool_calls"}
    report = play_here(tmp_path)
    assert (report.episodes_agree, report.turns_agree) == (2, 4)


def test_calls_of_tools_and_turns_that_could_not_be_read(tmp_path):
    said = [f"I add.{CALL}{CALL}", "<tool_call>{}</tool_call>", CALL, "It is done."]
    rows = with_tools(tmp_path, said, [1, 2], arguments={"goal": 7})
    assert [row["turns"][0]["observation"] for row in rows[::2]] == ["3\n5", "4\n6"]
    assert [row["turns"][-1]["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    report = play_here(tmp_path)
    assert (report.episodes_agree, report.turns_agree) == (4, 16)


def test_tools_in_place_of_an_environment_do_not_get_its_arguments(tmp_path):
    with_tools(tmp_path, [CALL, "It is done."], [1], arguments={"goal": 3})
    (tmp_path / "three.py").write_text(THREE)
    store, tool = Store(tmp_path / "store"), f"{tmp_path}/three.py:add"
    report = reenact(store, "tiny/rollouts@1", tools=[tool], processes=1)
    assert (report.sources, report.turns, report.turns_agree) == ((tool,), 4, 2)
    assert {difference.what for difference in report.differences} == {"reward"}


def test_what_can_not_be_played_is_refused(store, tmp_path):
    policy = make_policy(store)
    rows = [episodes.row("g-0", [episodes.turn(2, [5]), episodes.turn(1)])]
    episodes.write(store, policy, rows)
    with pytest.raises(LineageError, match="names no prompts"):
        play_here(tmp_path)
    prompts = world.write_prompts(store, rows)
    ref = str(episodes.write(store, policy, rows, "told", prompts).ref)
    with pytest.raises(LineageError, match="no environment") as caught:
        reenact(store, ref)
    assert caught.value.next == f"quiver reenact {ref} --environment my_env.py:Guess"
    single = [{k: v for k, v in row.items() if k not in ("turns", "end_reason")} for row in rows]
    episodes.write(store, policy, single, "single")
    with pytest.raises(LineageError, match="rollouts/2"):
        reenact(store, "single/rollouts@1")
