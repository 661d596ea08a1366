"""Environments in worker processes: many a process; one that hangs or dies costs itself, and its
neighbours are played again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, ResourceError
from quiver.stages.turns.config import Turns
from quiver.stages.turns.environment import Call, Turn
from quiver.stages.turns.pool import EnvironmentPool, Reply, _Answer

ENVIRONMENT = '''
import os, random, time
from quiver.stages.turns.environment import Step

class Game:
    """Does what it is told, and draws numbers at every turn."""

    def reset(self, seed, start=0):
        self.total = start
        if start == -1:
            raise ValueError("no such start")
        return f"begin {random.randrange(10**6)}"

    def step(self, turn):
        word, _, number = turn.text.partition(" ")
        if word == "hang":
            time.sleep(600)
        if word == "wait":
            time.sleep(float(number))
            return "waited"
        if word == "exclaim":
            print("seen before the end")
            os._exit(3)
        if word == "eat":
            hoard = bytearray(4 << 30)
        if word == "raise":
            raise RuntimeError("it broke")
        if word == "who":
            return f"{os.getpid()} {self.total}"
        if word == "print":
            print("seen in the log")
        self.total += int(number or 0)
        import numpy as np  # only here, after the environment has begun
        drawn = f"{random.randrange(10**6)} {np.random.randint(10**6)}"
        return Step(text=f"{self.total} {drawn}", reward=self.total / 2, info={"pid": os.getpid()})

    def get_reward(self):
        return float(self.total)
'''


@pytest.fixture
def game(tmp_path: Path) -> str:
    return write(tmp_path, ENVIRONMENT)


def write(folder: Path, source: str) -> str:
    """The name of the class Game in this source."""
    (folder / "game.py").write_text(source)
    return f"{folder / 'game.py'}:Game"


def pool_of(environment: str, **settings) -> EnvironmentPool:
    return EnvironmentPool(Turns(**{"environment": environment, "processes": 1, **settings}))


def next_replies(pool: EnvironmentPool, count: int) -> dict[int, Reply]:
    replies: dict[int, Reply] = {}
    while len(replies) < count:
        answers = pool.replies(wait=60.0)
        assert answers, "nothing was answered in a minute"
        replies.update({reply.key: reply for reply in answers})
    return replies


def ask(pool: EnvironmentPool, key: int, text: str) -> Reply:
    pool.step(key, Turn(text))
    (reply,) = next_replies(pool, 1).values()
    assert reply.key == key
    return reply


def begin(pool: EnvironmentPool, count: int, seed: int = 5) -> list[int]:
    keys = [pool.open({"start": number}, seed) for number in range(count)]
    replies = next_replies(pool, count)
    assert all(reply.failure is None for reply in replies.values())
    return keys


def test_episodes_share_processes_and_keep_apart(game, fresh_python):
    with pool_of(game, processes=2) as pool:
        assert pool.loaded.tools == [] and not pool.loaded.answers and pool.loaded.fingerprint
        keys = begin(pool, 6)
        for key in keys:
            pool.step(key, Turn("add 10"))
        replies = next_replies(pool, 6)
        totals = [replies[key].step.text.split()[0] for key in keys]
        assert totals == ["10", "11", "12", "13", "14", "15"]
        pids = {ask(pool, key, "who").step.text.split()[0] for key in keys}
        assert len(pids) == 2
        pool.finish(keys[3])
        (reply,) = next_replies(pool, 1).values()
        assert reply.step.reward == 13.0 and reply.failure is None
        pool.forget(keys[3])
        assert [pool.holds(key) for key in keys[2:5]] == [True, False, True]
    assert not any(Path("/proc", pid).exists() for pid in pids), "none stays behind"


def test_what_is_drawn_is_of_the_seed_alone_wherever_it_is_drawn(game):
    """A group shares its seed, so its episodes open alike; neighbours do not disturb each other."""

    def drawn(processes: int, order: list[int]) -> list[list[str]]:
        with pool_of(game, processes=processes) as pool:
            keys = [pool.open({"start": 0}, seed) for seed in (2**40, 2**40, 2**10)]
            replies = next_replies(pool, 3)
            texts = [[replies[key].step.messages[0]["content"]] for key in keys]
            for _ in range(3):
                for place in order:
                    texts[place].append(ask(pool, keys[place], "add 1").step.text)
            return texts

    one = drawn(1, [0, 1, 2])
    assert one[0] == one[1] != one[2]
    by_python, by_numpy = (
        [[text.split()[place] for text in texts[1:]] for texts in one] for place in (1, 2)
    )
    assert by_python[0] != by_python[2] and by_numpy[0] != by_numpy[2]
    assert drawn(3, [2, 0, 1]) == one


@pytest.mark.parametrize(
    ("action", "failure", "why"),
    [
        ("hang", "timeout", "no answer within generate.turns.step_seconds 1"),
        ("exclaim", "environment_error", "its process ended with exit code 3, 2 times"),
        ("eat", "environment_error", "MemoryError"),
        ("raise", "environment_error", "RuntimeError: it broke"),
    ],
)
def test_who_fails_costs_itself_and_its_neighbours_are_played_again(
    game, caplog, monkeypatch, action, failure, why
):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    caplog.set_level("INFO", "quiver.stages")
    with pool_of(game, step_seconds=1.0, max_memory_gib=2.0) as pool:
        keys = begin(pool, 3)
        for key in keys:
            ask(pool, key, "add 1")
            ask(pool, key, "add 2")
        pid = ask(pool, keys[1], "print").step.info["pid"]
        reply = ask(pool, keys[0], action)
        assert reply.failure == failure and why in reply.why
        for number, key in enumerate(keys[1:], 1):
            reply = ask(pool, key, "add 0")
            is_replaced = action in ("hang", "exclaim")
            assert reply.failure is None and (reply.step.info["pid"] != pid) == is_replaced
            assert reply.step.text.startswith(f"{number + 3} ")
        bad = pool.open({"start": -1}, 0)
        assert "no such start" in next_replies(pool, 1)[bad].why
    assert "seen in the log" in caplog.text
    assert ("seen before the end" in caplog.text) == (action == "exclaim")


def test_killed_from_outside_twenty_times_the_answers_are_the_same(game):
    def answers(kills: set[int]) -> list[str]:
        texts = []
        with pool_of(game) as pool:
            keys = begin(pool, 3)
            for number in range(24):
                reply = ask(pool, keys[number % 3], "add 1")
                assert reply.failure is None, reply.why
                texts.append(reply.step.text)
                if number in kills:
                    os.kill(reply.step.info["pid"], signal.SIGKILL)
        return texts

    assert answers(set(range(20))) == answers(set())


def test_an_environment_that_answers_otherwise_when_it_is_played_again_has_failed(game):
    with pool_of(game) as pool:
        key, victim = begin(pool, 2)
        fresh = pool.open({"start": 0}, 0)
        next_replies(pool, 1)
        assert ask(pool, key, "who").failure is None
        assert ask(pool, victim, "exclaim").failure == "environment_error"
        reply = ask(pool, key, "who")
        assert reply.failure == "environment_error"
        assert "was lost, and when it was played again it answered differently" in reply.why
        assert ask(pool, fresh, "who").failure is None, "it had no turn to be played again"


def test_the_time_of_an_episode_is_the_sum_of_its_answers(game):
    with pool_of(game, episode_seconds=0.9) as pool:
        (key,) = begin(pool, 1)
        for _ in range(3):
            reply = ask(pool, key, "wait 0.4")
            if reply.failure is not None:
                break
    assert reply.failure == "timeout" and "episode_seconds 0.9" in reply.why


CLOSED = """
class Game:
    def reset(self, number):
        self.number = number

    def step(self, turn):
        return 1 / self.number

    def get_reward(self):
        return 1.0

    def close(self):
        print(f"closed {self.number}")
        raise OSError("already gone")
"""


def test_an_environment_is_closed_once_after_its_reward_or_its_error(tmp_path, caplog):
    """What closing it raises is not its episode's."""
    caplog.set_level("INFO", "quiver.stages")
    with pool_of(write(tmp_path, CLOSED)) as pool:
        broken, whole, _ = (pool.open({"number": number}, 0) for number in range(3))
        next_replies(pool, 3)
        assert "ZeroDivisionError" in ask(pool, broken, "go").why
        assert "closed 0" in caplog.text and "closed 1" not in caplog.text
        pool.finish(whole)
        assert next_replies(pool, 1)[whole].step.reward == 1.0
    closed = [line for line in caplog.messages if "closed " in line]
    assert closed == ["environment: closed 0", "environment: closed 1"]


# -- loading

KILL = """
import os, signal
with open(__file__ + ".loads", "a+b") as file:
    file.write(b"+")
    file.flush()
    file.tell() <= {} and os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        ("raise SystemExit(1)", ConfigError, "cannot be loaded"),
        (KILL.format(3), ResourceError, "3 times in a row"),
        (ENVIRONMENT, ConfigError, "its file changed meanwhile"),
    ],
)
def test_code_that_cannot_be_loaded_is_told_at_the_start(tmp_path, caplog, source, error, why):
    caplog.set_level("INFO", "quiver.stages")
    source = f"print('seen before it failed', flush=True)\n{source}"
    with pytest.raises(error, match=why):
        pool_of(write(tmp_path, source), fingerprint="another")
    assert "seen before it failed" in caplog.text


def test_a_process_that_is_killed_while_it_loads_is_begun_anew_twice(tmp_path):
    with pool_of(write(tmp_path, KILL.format(2) + ENVIRONMENT)) as pool:
        begin(pool, 1)


def test_what_no_process_can_go_on_after_is_raised_with_the_replies(game):
    with pool_of(game) as pool:
        key, victim = begin(pool, 2)
        Path(game.partition(":")[0]).write_text("1 / 0")
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            ask(pool, victim, "exclaim")
            ask(pool, key, "add 1")


@pytest.mark.slow
def test_one_of_sixty_four_hangs(game):
    with pool_of(game, processes=2, step_seconds=2.0) as pool:
        keys = begin(pool, 64)
        for key in keys:
            pool.step(key, Turn("hang" if key == keys[20] else "add 1"))
        replies = next_replies(pool, 64)
        assert [key for key, reply in replies.items() if reply.failure] == [keys[20]]
        for key in {*keys} - {keys[20]}:
            pool.step(key, Turn("add 1"))
        assert not any(reply.failure for reply in next_replies(pool, 63).values())


# -- processes that answer too often


FORKING = """
import os

def leave_copy(game, place):
    if game.place == place and os.fork() == 0:
        os.execvp("missing", ["missing"])

class Game:
    def reset(self, number, place):
        self.number, self.place = number, place
        leave_copy(self, "reset")

    def get_reward(self):
        leave_copy(self, "get_reward")
        return float(self.number)
"""
STEP = """
    def step(self, turn):
        leave_copy(self, "step")
        return f"{self.number}"
"""
TOOL = """
    def look(self) -> str:
        'Looks.'
        leave_copy(self, "tool")
        open(f"{__file__}.looks", "a").write("looked\\n")
        return f"{self.number}"
"""


@pytest.mark.parametrize("place", ["reset", "step", "tool", "get_reward"])
def test_a_copy_of_its_process_that_an_environment_leaves_never_answers(place, tmp_path):
    is_tool = place == "tool"
    turn = Turn("", (Call("look", {}), Call("look", {})) if is_tool else ())
    with pool_of(write(tmp_path, FORKING + (TOOL if is_tool else STEP))) as pool:
        keys = [pool.open({"number": number, "place": place}, seed=0) for number in range(8)]
        openings = next_replies(pool, 8)
        for key in keys:
            pool.step(key, turn)
        answers = next_replies(pool, 8)
        for key in keys:
            pool.finish(key)
        rewards = next_replies(pool, 8)
    replies = [*openings.values(), *answers.values(), *rewards.values()]
    assert [reply.why for reply in replies] == [""] * 24
    steps = [answers[key].step for key in keys]
    texts = [step.text or step.messages[-1]["content"] for step in steps]
    assert texts == [f"{number}" for number in range(8)]
    assert [rewards[key].step.reward for key in keys] == [float(number) for number in range(8)]
    if is_tool:
        looks = (tmp_path / "game.py.looks").read_text().split()
        assert len(looks) == 16, "a copy makes no further calls"


ANSWERING_TWICE = """
import sys

class Game:
    def reset(self, number):
        self.number, self.turns = number, 0

    def step(self, turn):
        frame = sys._getframe()
        while turn.text == "twice" and "envelope" not in frame.f_locals:
            frame = frame.f_back
        if turn.text == "twice":
            frame.f_locals["send"]({"step": {"text": "forged"}, "error": None})
        self.turns += 1
        return f"{self.number} {self.turns}"
"""


def test_an_answer_too_many_ends_the_process_and_costs_its_own_episode(tmp_path):
    with pool_of(write(tmp_path, ANSWERING_TWICE)) as pool:
        keys = [pool.open({"number": number}, seed=0) for number in range(3)]
        next_replies(pool, 3)
        assert [ask(pool, key, "go").step.text for key in keys] == ["0 1", "1 1", "2 1"]
        assert ask(pool, keys[1], "twice").step.text == "forged"
        assert [ask(pool, keys[place], "go").step.text for place in (0, 2)] == ["0 2", "2 2"]
        reply = ask(pool, keys[1], "go")
    assert reply.failure == "environment_error"
    assert reply.why == "its process ended after one answer too many, 2 times"


def test_pictures_that_are_no_text_are_no_answer():
    with pytest.raises(ValidationError, match="base64 text"):
        _Answer.model_validate({"step": {"text": "seen", "images": [7]}, "error": None})
