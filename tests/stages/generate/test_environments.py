"""Environments of every kind as their worker has them: TRL's, stepping classes, tools, gymnasium's,
MCP and OpenEnv."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, SecurityError
from quiver.stages.common import sandbox
from quiver.stages.common.environments.adapters import ENVIRONMENTS, TOOLS, open_source
from quiver.stages.common.environments.environment import (
    Step,
    Turn,
    call_tool,
    pictures_in,
    read_messages,
    read_opening,
    read_step,
)
from quiver.stages.common.environments.pool import EnvironmentPool
from quiver.stages.common.store import Store
from quiver.stages.generate.turns.config import Turns
from quiver.stages.generate.turns.tool_calls import Call
from tests import sight
from tests.stages.generate.test_environment_pool import next_replies
from tests.stages.reward.fake_server import FakeServer, Flood
from tests.tiny import CHATML, make_policy
from tests.writing import run_here

COUNTER = '''
class CountingEnvironment:
    """Of the form that TRL documents: no argument, keyword columns, tools with docstrings."""

    def __init__(self):
        self.count = 0
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.count = kwargs["start"]
        return f"You are at {self.count}."

    def raise_by(self, amount: int) -> int:
        """
        Go up.

        Args:
            amount: How far to go

        Returns:
            Where you are.
        """
        if amount > 100:
            raise ValueError("Too far.")
        self.count += amount
        self.reward = 1.0 if self.count == 12 else 0.0
        return self.count
'''


def write(folder: Path, source: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(source)
    return path


def test_a_class_as_trl_has_it_works_unchanged(tmp_path):
    source = f"{write(tmp_path, COUNTER)}:CountingEnvironment"
    factory = open_source(source, [], {})
    (schema,) = factory.tools
    assert schema["function"]["name"] == "raise_by" and factory.answers and factory.fingerprint
    environment = factory.make()
    row = {"prompt": "Go to 12.", "start": 5}
    assert environment.reset(row, 0) == [{"role": "user", "content": "You are at 5."}]
    step = environment.step(
        Turn("", (Call("raise_by", {"amount": 2}), Call("raise_by", {"amount": 5})))
    )
    assert step.messages == [
        {"role": "tool", "name": "raise_by", "content": "7"},
        {"role": "tool", "name": "raise_by", "content": "12"},
    ]
    assert not step.done and step.reward is None
    assert environment.finish() == 1.0


@pytest.mark.parametrize(
    "call, answer",
    [
        (Call("raise_by", {"amount": 101}), "Error: ValueError: Too far."),
        (Call("raise_by", {"by": 1}), "amount: Missing required argument; by: Unexpected keyword"),
        (
            Call("raise_by", {"amount": "1"}),
            "Error: TypeError: amount: Input should be a valid integer",
        ),
        (Call("reset", {}), "there is no tool reset; there is raise_by"),
        (Call("_private", {}), "there is no tool _private"),
    ],
)
def test_what_a_tool_raises_is_told_to_the_policy(tmp_path, call, answer):
    environment = open_source(f"{write(tmp_path, COUNTER)}:CountingEnvironment", [], {}).make()
    environment.reset({"start": 0}, 0)
    (message,) = environment.step(Turn("", (call,))).messages
    assert answer in message["content"]


def test_get_reward_goes_before_the_attribute(tmp_path):
    source = COUNTER + "\n    def get_reward(self):\n        return 0.25\n"
    environment = open_source(f"{write(tmp_path, source)}:CountingEnvironment", [], {}).make()
    environment.reset({"start": 0}, 0)
    assert environment.finish() == 0.25


STEPPING = """
import random
from quiver.stages.common.environments.environment import Step

class Guess:
    def __init__(self, limit=10):
        self.limit = limit

    def reset(self, seed, answer=None):
        self.number = random.Random(seed).randrange(self.limit) if answer is None else answer

    def step(self, turn):
        if not turn.text.strip().isdecimal():
            return "a number, please"
        guess = int(turn.text)
        if guess == self.number:
            return Step(reward=1.0, done=True, info={"guess": guess})
        return {"text": "higher" if guess < self.number else "lower", "reward": 0.0}
"""


def test_a_class_with_a_step_answers_with_steps_mappings_or_text(tmp_path):
    factory = open_source(f"{write(tmp_path, STEPPING)}:Guess", [], {"limit": 50})
    assert factory.tools == [] and not factory.answers
    environment = factory.make()
    assert environment.reset({"answer": 7, "unasked": "x"}, 3) == []
    assert environment.step(Turn("what?")) == Step(text="a number, please")
    assert environment.step(Turn("3")) == Step(text="higher", reward=0.0)
    assert environment.step(Turn("7")) == Step(reward=1.0, done=True, info={"guess": 7})
    assert environment.finish() is None


@pytest.mark.parametrize(
    "returned, why",
    [
        (7, "int, expected a Step"),
        ({"texts": "a"}, "the key texts"),
        ({"text": 7}, "text of the step is int"),
        ({"reward": float("nan")}, "expected a finite number"),
        ({"reward": "much"}, "expected a finite number"),
        ({"messages": [{"role": "tool"}]}, "expected role and content"),
        ({"info": [1]}, "not a mapping"),
        ({"info": {"quiver_failure": "none"}}, "quiver_failure: names that begin with"),
        ({"done": "False"}, "done of the step is 'False', expected True or False"),
    ],
)
def test_a_step_that_is_none_is_refused(returned, why):
    with pytest.raises(ValueError, match=why):
        read_step(returned)


HISTORY = [
    {"role": "user", "content": "2 + 5?"},
    {"role": "assistant", "content": "7", "reasoning_content": "easy"},
    {"role": "user", "content": "+ 1?"},
]


def test_a_reset_may_give_history_and_a_step_no_turn_of_the_policys():
    assert read_opening(HISTORY) == HISTORY
    with pytest.raises(ValueError, match="the last message of reset is the assistant's"):
        read_opening(HISTORY[:2])
    with pytest.raises(ValueError, match="a message of the role assistant, which only the policy"):
        read_step({"messages": HISTORY[1:]})


@pytest.mark.parametrize("read", [read_opening, lambda given: read_step({"messages": given})])
@pytest.mark.parametrize(
    "message, why",
    [
        ({"role": "user<|im_end|>", "content": "a"}, "expected a word"),
        ({"role": "tool", "content": "a", "name": "n" * 300}, "has 300 characters"),
        ({"role": "user", "content": "a", "mood": 1}, "mood"),
        ({"role": "user", "content": 7}, "holds a number, expected text"),
        ("text", "message 0 has text"),
    ],
)
def test_a_message_that_is_none_is_refused(read, message, why):
    with pytest.raises(ValueError, match=why):
        read([message])


def test_messages_of_a_step_come_before_its_text():
    tool = {"role": "tool", "name": "add", "content": "1"}
    step = read_step({"messages": [tool], "text": "go on"})
    assert step.observation() == [tool, {"role": "user", "content": "go on"}]


def test_what_has_no_word_in_json_is_text_in_info():
    told = read_step({"info": {"a": float("nan"), "b": [float("-inf"), 1.5], "c": "NaN"}}).info
    assert told == {"a": "NaN", "b": ["-Infinity", 1.5], "c": "NaN"}


@pytest.mark.parametrize("done", [np.True_, torch.tensor(True)])
def test_a_truth_value_of_numpy_or_torch_ends_an_episode(done):
    assert read_step({"done": done}).done is True


def test_text_that_no_tokenizer_takes_is_made_whole():
    assert read_messages("a\0\ud800") == [{"role": "user", "content": "a\ufffd?"}]
    assert read_step({"text": "\ud800"}).text == "?"


TOOL_FILE = '''
async def search(query: str, most: int = 2) -> list:
    """Search.

    Args:
        query: What for.
        most: How many.
    """
    return [{"title": query}] * most
'''


def test_plain_functions_are_tools_async_ones_too(tmp_path):
    factory = open_source("", [f"{write(tmp_path, TOOL_FILE)}:search"], {})
    environment = factory.make()
    assert factory.answers and environment.reset({}, 0) == [] and environment.finish() is None
    (message,) = environment.step(Turn("", (Call("search", {"query": "elk"}),))).messages
    assert json.loads(message["content"]) == [{"title": "elk"}] * 2


NESTED_FILE = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import TypedDict
from PIL import Image

class Place(TypedDict):
    city: str

@dataclass
class Trip:
    places: list[Place]
    days: int = 1

def draw(trip: Trip, **colours: str) -> Image.Image:
    """Draw it.

    Args:
        trip: Where to.
    """
    return f"{trip} {colours}"

class Agency:
    async def book(self, trip: Trip) -> str:
        """Book it.

        Args:
            trip: Where to.
        """
        return repr(trip)
'''


def test_nested_parameters_of_functions_and_methods_in_files(tmp_path):
    """Their annotations are text there."""
    path = write(tmp_path, NESTED_FILE)
    trip = {"places": [{"city": "Rome"}]}
    read = "Trip(places=[{'city': 'Rome'}], days=1)"
    function = open_source("", [f"{path}:draw"], {})
    method = open_source(f"{path}:Agency", [], {})
    for factory in (function, method):
        properties = factory.tools[0]["function"]["parameters"]["properties"]
        assert properties["trip"]["properties"]["places"]["items"]["required"] == ["city"]
    calls = [Call("draw", {"trip": trip, "sea": "blue"}), Call("draw", {"trip": {"places": [{}]}})]
    answers = function.make().step(Turn("", tuple(calls))).messages
    assert [message["content"] for message in answers] == [
        f"{read} {{'sea': 'blue'}}",
        "Error: TypeError: trip.places.0.city: Field required",
    ]
    (answer,) = method.make().step(Turn("", (Call("book", {"trip": trip}),))).messages
    assert answer["content"] == read


def test_two_tools_of_one_name_are_refused(tmp_path):
    sources = [f"{write(tmp_path, TOOL_FILE, name)}:search" for name in ("a.py", "b.py")]
    with pytest.raises(ConfigError, match="two tools with the name search"):
        open_source("", sources, {})


def test_the_tool_python_runs_in_the_sandbox():
    try:
        sandbox.check("full")
    except Exception as error:
        pytest.skip(str(error))
    environment = open_source("", ["python"], {}).make()

    def run(code: str) -> str:
        (message,) = environment.step(Turn("", (Call("python", {"code": code}),))).messages
        return message["content"]

    assert run("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in run("1 / 0") and "(exit code 1)" in run("1 / 0")
    assert run("x = 1") == "(it printed nothing)"
    assert "NameError" in run("print(x)")


def test_the_tool_python_is_refused_without_bubblewrap(monkeypatch, tmp_path):
    sandbox.check.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SecurityError, match="bwrap, mount, unshare, setpriv, prlimit not found"):
        open_source("", ["python"], {})


# -- gymnasium

GYM = """
import gymnasium

class Echo(gymnasium.Env):
    action_space = {space}
    observation_space = gymnasium.spaces.Text(100)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted = options["answer"]
        return f"seed {{seed}}", {{}}

    def step(self, action):
        done = action == self.wanted
        return f"you said {{action}}", float(done), done, False, {{"n": 1}}
"""
HOW = "make environments"


def gym_file(folder: Path, space: str) -> str:
    pytest.importorskip("gymnasium", reason=f"gymnasium is not installed: {HOW}")
    source = GYM.format(space=space)
    return f"{write(folder, source)}:Echo"


def test_a_text_environment_of_gymnasium_reads_text(tmp_path):
    environment = open_source(gym_file(tmp_path, "gymnasium.spaces.Text(50)"), [], {}).make()
    assert environment.reset({"answer": "elk"}, 2**40 + 7) == [
        {"role": "user", "content": "seed 7"}
    ]
    assert environment.step(Turn(" owl ")).text == "you said owl"
    step = environment.step(Turn("elk"))
    assert step.reward == 1.0 and step.done and step.info == {"n": 1}
    environment.close()


def test_numbered_actions_are_the_last_number_of_the_text(tmp_path):
    environment = open_source(gym_file(tmp_path, "gymnasium.spaces.Discrete(4)"), [], {}).make()
    environment.reset({"answer": 3}, 0)
    assert environment.step(Turn("1 or 2")).text == "you said 2"
    for text in ("9", "none", "-1"):
        step = environment.step(Turn(text))
        assert "is no action here" in step.text and step.reward is None and not step.done
    assert environment.step(Turn("3")).done


def test_a_registered_environment_is_named_and_a_missing_one_told():
    pytest.importorskip("gymnasium", reason=f"gymnasium is not installed: {HOW}")
    environment = open_source("gymnasium:FrozenLake-v1", [], {"is_slippery": False}).make()
    assert environment.reset({}, 0) == [{"role": "user", "content": "0"}]
    assert environment.step(Turn("2")).text == "1"
    with pytest.raises(ConfigError, match="cannot be made"):
        open_source("gymnasium:NoSuch-v0", [], {})


def test_without_gymnasium_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match="not installed") as refusal:
        open_source("gymnasium:FrozenLake-v1", [], {})
    assert refusal.value.next == "pip install gymnasium"


# -- servers

MCP_SERVER = '''
import base64, os
from mcp.server import MCPServer
from mcp.types import ImageContent

server = MCPServer("shop")

@server.tool()
def price(thing: str, count: int = 1) -> str:
    """What things cost."""
    if thing == "moon":
        raise ValueError("not for sale")
    return f"{3 * count} for {thing}"

@server.tool()
def look(thing: str) -> list:
    """How things look."""
    data = base64.b64encode(thing.encode()).decode()
    return [thing, ImageContent(type="image", data=data, mime_type="image/png")]

@server.tool()
def flood() -> str:
    """What nobody can read to its end."""
    while True:
        os.write(1, b"[" * 2**16)

server.run()
'''


def test_the_tools_of_a_server_that_speaks_mcp(tmp_path):
    pytest.importorskip("mcp")
    command = f"{sys.executable} {write(tmp_path, MCP_SERVER)}"
    factory = open_source("", [f"mcp:{command}"], {})
    function = next(tool["function"] for tool in factory.tools if "cost" in str(tool))
    assert function["name"] == "price" and function["description"] == "What things cost."
    assert function["parameters"]["required"] == ["thing"]
    environment = factory.make()
    calls = (Call("price", {"thing": "bread", "count": 2}), Call("price", {"thing": "moon"}))
    answers = [message["content"] for message in environment.step(Turn("", calls)).messages]
    assert answers[0] == "6 for bread" and answers[1].startswith("Error: RuntimeError")
    (message,) = environment.step(Turn("", (Call("look", {"thing": "bread"}),))).messages
    assert message["content"] == "bread" and pictures_in([message]) == [b"bread"]


def test_a_flood_of_an_mcp_server_ends_with_the_time_of_a_turn(tmp_path):
    pytest.importorskip("mcp")
    command = f"{sys.executable} {write(tmp_path, MCP_SERVER)}"
    config = Turns(tools=[f"mcp:{command}"], processes=1, max_memory_gib=1.0, step_seconds=2.0)
    with EnvironmentPool(config) as pool:
        key = pool.open({}, 1)
        assert next_replies(pool, 1)[key].failure is None
        pool.step(key, Turn("", (Call("flood", {}),)))
        assert next_replies(pool, 1)[key].failure == "timeout"


def test_a_server_that_does_not_start_is_told():
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match="server cannot be used"):
        open_source("", ["mcp:/nowhere/server"], {})


class OpenEnvServer(BaseHTTPRequestHandler):
    """Episodes by id: an answer is right where it is the row's."""

    episodes: dict[str, dict] = {}  # noqa: RUF012  the server's

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/env/reset":
            self.episodes[request["episode_id"]] = request
            answer = {"observation": {"prompt": f"seed {request['seed']}"}}
        else:
            wanted = self.episodes[request["episode_id"]]["answer"]
            if request["action"] == {"message": "crash"}:
                self.send_error(500, "it failed")
                return
            said = request["action"].get("message")
            observation = {"echo": said, "left": 2, "reward": 0.5, "done": False}
            answer = {"observation": observation, "reward": 0.5, "done": said == wanted}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def openenv_url():
    with ThreadingHTTPServer(("127.0.0.1", 0), OpenEnvServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"openenv:http://127.0.0.1:{server.server_port}/env"
        server.shutdown()


def test_episodes_on_a_server_that_speaks_openenv(openenv_url):
    factory = open_source(openenv_url, [], {})
    first, second = factory.make(), factory.make()
    assert first.reset({"answer": "elk"}, 7) == [{"role": "user", "content": "seed 7"}]
    second.reset({"answer": "owl"}, 8)
    step = first.step(Turn("owl"))
    assert json.loads(step.text) == {"echo": "owl", "left": 2}
    assert step.reward == 0.5 and not step.done
    assert second.step(Turn("", (Call("act", {"message": "owl"}),))).done
    with pytest.raises(RuntimeError, match="500"):
        first.step(Turn("crash"))
    text_only = open_source(openenv_url, [], {"text_key": "echo"}).make()
    text_only.reset({"answer": "elk"}, 7)
    assert text_only.step(Turn("owl")).text == "owl"


PACKED = gzip.compress(bytes(2**20))


@pytest.mark.parametrize(
    "flood, problem",
    [
        (Flood(b"[" * 2**16), "/reset: its answer has more than 16777216 bytes"),
        (Flood(b"[" * 2**16, 2**19), "/reset: no JSON, it is nested more than 100 levels deep"),
        (Flood(PACKED, len(PACKED), Content_Encoding="gzip"), "/reset: no JSON"),
    ],
    ids=["large", "deep", "packed"],
)
def test_a_flood_of_an_openenv_server_is_read_to_a_limit_and_never_unpacked(flood, problem):
    with FakeServer(flood) as server:
        episode = open_source(f"openenv:{server.url}", [], {}).make()
        with pytest.raises(RuntimeError, match=problem):
            episode.reset({"answer": "elk"}, 7)
    assert 0 < flood.bytes_sent < 2**25


# -- the section


def test_a_recipe_names_an_environment_or_tools():
    assert Turns(environment="my_env.py:Guess").sources == ("my_env.py:Guess",)
    assert Turns(tools=["my_tools.py:search", "python", "mcp:server --fast"]).max_turns == 8


@pytest.mark.parametrize(
    "section, why",
    [
        ({}, "name an environment or tools"),
        ({"environment": "a.py:A", "tools": ["python"]}, "one of the two"),
        ({"environment": "Guess"}, "expected file.py:name"),
        ({"environment": "gymnasium:"}, "gymnasium:"),
        ({"tools": ["pythn"]}, "did you mean python"),
        ({"tools": ["python:3"]}, "no such name"),
        ({"tools": ["python"], "arguments": {"a": 1}}, "tools take none"),
        ({"tools": ["python"], "parser": "hermess"}, "did you mean hermes"),
        ({"tools": ["python"], "max_turns": 0}, "greater than or equal to 1"),
    ],
)
def test_a_section_that_is_none_is_refused(section, why):
    with pytest.raises(ValidationError, match=why):
        Turns(**section)


def test_the_key_leaves_out_processes_and_a_known_files_folder():
    plain = Turns(environment="here/mine.py:A", fingerprint="f")
    elsewhere = Turns(
        environment="/there/mine.py:A", fingerprint="f", processes=3, max_memory_gib=1
    )
    assert plain.key() == elsewhere.key()
    assert (
        Turns(environment="openenv:http://a/b", fingerprint="f").key()["environment"]
        == "openenv:http://a/b"
    )


def test_the_table_says_what_there_is():
    assert set(ENVIRONMENTS) == {"gymnasium", "openenv"} and set(TOOLS) == {"python", "mcp"}


def test_a_class_that_can_not_be_used_is_told(tmp_path):
    empty = write(tmp_path, "class Nothing:\n    pass\n", "a.py")
    with pytest.raises(ConfigError, match="neither a method `step` nor any public method"):
        open_source(f"{empty}:Nothing", [], {})
    raising = write(tmp_path, "class Bad:\n    def __init__(self):\n        1 / 0\n", "b.py")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        open_source(f"{raising}:Bad", [], {})


def test_the_game_of_the_document_is_played(tmp_path):
    """The very lines that the page about environments shows."""
    page = Path(__file__).parents[3] / "deployments/docs/environments.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "number.py").write_text(code)
    environment = open_source(f"{tmp_path / 'number.py'}:Guess", [], {}).make()
    assert environment.reset({"limit": 3}, 5) == [{"role": "user", "content": "It is below 3."}]
    steps = [environment.step(Turn(str(guess))) for guess in range(3)]
    (number,) = [guess for guess, step in enumerate(steps) if step.done]
    assert [step.reward for step in steps] == [float(guess == number) for guess in range(3)]
    hints = ["higher" if guess < number else "lower" for guess in range(3)]
    hints[number] = "right"
    assert [step.text for step in steps] == hints
    assert environment.step(Turn("no number")).text == "higher"


# -- what cannot be read


@pytest.mark.parametrize(
    "returned, why",
    [
        (object(), "a object is no text, and cannot be written as JSON"),
        ((number for number in range(3)), "a generator is no text, and cannot be written as JSON"),
        ({"made": object()}, "a object is no text, and cannot be written as JSON"),
    ],
)
def test_what_has_no_text_of_its_own_is_an_error_of_the_tool(returned, why):
    """Where it lies in memory would be another text in every run."""
    message = call_tool({"look": lambda: returned}, Call("look", {}))
    assert message["content"] == f"Error: TypeError: {why}"


def test_a_step_that_was_forgotten_is_told():
    with pytest.raises(ValueError, match="step returned NoneType, expected a Step"):
        read_step(None)


def test_a_tool_whose_parameter_has_no_name_is_refused(tmp_path):
    source = 'def add(a: int, /):\n    """Add.\n\n    Args:\n        a: A.\n    """\n'
    with pytest.raises(ConfigError, match="parameter a cannot be given by its name"):
        open_source("", [f"{write(tmp_path, source)}:add"], {})


# -- through every stage


@pytest.mark.parametrize("kind", ["trl", "gymnasium"])
def test_environments_of_others_go_through_every_stage(tmp_path, kind):
    """By a real engine, whose random weights answer at random."""
    if kind == "gymnasium":
        pytest.importorskip("gymnasium", reason=f"gymnasium is not installed: {HOW}")
        turns = {"environment": "gymnasium:FrozenLake-v1", "arguments": {"is_slippery": False}}
    else:
        turns = {"environment": f"{write(tmp_path, COUNTER)}:CountingEnvironment"}
    store = Store(tmp_path / "store")
    policy = str(make_policy(store).ref)
    rows = [{"prompt": f"Go to 12 from {start}.", "start": start} for start in range(4)]
    prompts = run_here(
        "prompt",
        {"source": sight.write_rows(tmp_path, rows), "prompt": "prompt", "turns": turns},
        store,
        policy=policy,
    )
    # what ends a turn stands in most texts of random weights
    sampling = {"max_tokens": 12, "temperature": 1.0, "stop_token_ids": [*range(100, 200)]}
    config = {
        "engine": "transformers",
        "samples_per_prompt": 2,
        "dtype": "float32",
        "sampling": sampling,
        "turns": {**turns, "max_turns": 3, "max_tokens": 36},
    }
    rollouts = run_here("generate", config, store, prompts=str(prompts), policy=policy)
    saved = store.open(rollouts).table().to_pylist()
    first = {"trl": "You are at 0.", "gymnasium": "0"}[kind]
    assert first in store.open(prompts).table()["prompt_text"][0].as_py()
    ends = {"trl": {"answered"}, "gymnasium": {"max_turns", "environment"}}[kind]
    assert {row["end_reason"] for row in saved} <= {*ends, "max_tokens"}
    paid = run_here(
        "reward", {"functions": [{"use": "environment"}]}, store, rollouts=str(rollouts)
    )
    # who takes no step is told nothing by the lake
    expected = {"trl": {0.0}, "gymnasium": {None, 0.0}}[kind]
    assert set(store.open(paid).table()["reward"].to_pylist()) <= expected
    functions = [{"use": "length", "arguments": {"target": 0, "tolerance": 100}}]
    rewards = run_here("reward", {"functions": functions}, store, rollouts=str(rollouts))
    config = {
        "algorithm": "grpo",
        "precision": "fp32",
        "device": "cpu",
        "drop_zero_variance": False,
    }
    refs = {"rollouts": str(rollouts), "rewards": str(rewards), "policy": policy}
    trained = store.open(run_here("optimize", config, store, **refs))
    assert trained.manifest.metrics["audit"]["max_gap"] < 1e-4


@pytest.mark.parametrize("shows", [True, False])
def test_a_template_that_shows_no_tools_is_told(tmp_path, caplog, shows):
    """Else the policy would not know of them, and nobody that it does not."""
    store = Store(tmp_path / "store")
    policy = str(make_policy(store).ref)
    template = CHATML + ("{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}" * shows)
    (tmp_path / "template.jinja").write_text(template)
    source = 'def add(a: int):\n    """Add.\n\n    Args:\n        a: A.\n    """\n'
    config = {
        "source": sight.write_rows(tmp_path, [{"prompt": "one"}]),
        "prompt": "prompt",
        "template": str(tmp_path / "template.jinja"),
        "turns": {"tools": [f"{write(tmp_path, source)}:add"]},
    }
    with caplog.at_level("WARNING", logger="quiver.stages.prompt.rows"):
        run_here("prompt", config, store, policy=policy)
    assert ("does not show the tools" in caplog.text) != shows
