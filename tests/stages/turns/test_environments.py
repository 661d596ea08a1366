"""Environments of every kind as their worker has them: TRL's, stepping classes, tools, gymnasium's,
MCP and OpenEnv."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, SecurityError
from quiver.stages.core import sandbox
from quiver.stages.turns.adapters import open_source
from quiver.stages.turns.config import Turns
from quiver.stages.turns.environment import (
    Step,
    Turn,
    call_tool,
    files_in,
    read_media,
    read_opening,
    read_step,
)
from quiver.stages.turns.tool_calls import Call
from tests import sound
from tests.stages.reward.fake_server import FakeServer, Flood

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


def made(source: str, arguments: dict | None = None, tools: list[str] | None = None):
    """The environment's maker, and one environment."""
    factory = open_source(source, tools or [], arguments or {})
    return factory, factory.make()


def answers_of(environment, *calls: Call) -> list[str]:
    """What the policy reads after these calls."""
    return [message["content"] for message in environment.step(Turn("", calls)).messages]


def test_a_class_as_trl_has_it_works_unchanged(tmp_path):
    factory, environment = made(f"{write(tmp_path, COUNTER)}:CountingEnvironment")
    (schema,) = factory.tools
    assert schema["function"]["name"] == "raise_by" and factory.answers and factory.fingerprint
    row = {"prompt": "Go to 12.", "start": 5}
    assert environment.reset(row, 0) == [{"role": "user", "content": "You are at 5."}]
    amounts = (2, 101, 5)
    contents = answers_of(environment, *(Call("raise_by", {"amount": n}) for n in amounts))
    assert contents == ["7", "Error: ValueError: Too far.", "12"]
    refused = answers_of(environment, Call("reset", {}), Call("raise_by", {"amount": "1"}))
    assert refused[0] == "Error: there is no tool reset; there is raise_by"
    assert refused[1].startswith("Error: TypeError: amount: Input should be a valid integer")
    assert environment.finish() == 1.0


STEPPING = """
import random
from quiver.stages.turns.environment import Step

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
    factory, environment = made(f"{write(tmp_path, STEPPING)}:Guess", {"limit": 50})
    assert factory.tools == [] and not factory.answers
    assert environment.reset({"answer": 7, "unasked": "x"}, 3) == []
    assert environment.step(Turn("what?")) == Step(text="a number, please")
    assert environment.step(Turn("3")) == Step(text="higher", reward=0.0)
    assert environment.step(Turn("7")) == Step(reward=1.0, done=True, info={"guess": 7})
    assert environment.finish() is None


def nested(levels: int) -> list:
    """Lists in lists."""
    return json.loads("[" * levels + "]" * levels)


TOOL = {"role": "tool", "name": "add", "content": "1"}
HISTORY = [
    {"role": "user", "content": "2 + 5?"},
    {"role": "assistant", "content": "7", "reasoning_content": "easy"},
    {"role": "user", "content": "+ 1?"},
]


@pytest.mark.parametrize(
    "returned, expected",
    [
        ({"info": {"a": float("nan"), "b": [1.5, "NaN"]}}, Step(info={"a": "NaN", "b": [1.5, "NaN"]})),
        ({"done": np.True_, "reward": np.float32(0.5)}, Step(done=True, reward=0.5)),
        ({"done": torch.tensor(True), "reward": True}, Step(done=True, reward=1.0)),
        ("a\0\ud800", Step(text="a\ufffd?")),
    ],
)  # fmt: skip
def test_a_step_is_read_as_plain_data(returned, expected):
    assert read_step(returned) == expected


def test_a_reset_may_give_history_and_a_step_messages_before_its_text():
    assert read_opening(HISTORY) == HISTORY
    assert read_opening("a\0") == [{"role": "user", "content": "a\ufffd"}]
    with pytest.raises(ValueError, match="the last message of reset is the assistant's"):
        read_opening(HISTORY[:2])
    step = read_step({"messages": [TOOL], "text": "go on"})
    assert step.observation() == [TOOL, {"role": "user", "content": "go on"}]


@pytest.mark.parametrize(
    "returned, why",
    [
        (None, "step returned NoneType, expected a Step"),
        ({"texts": "a"}, "the key texts"),
        ({"text": 7}, "text of the step is int"),
        ({"reward": float("nan")}, "expected a finite number"),
        ({"reward": "much"}, "expected a finite number"),
        ({"messages": [{"role": "tool"}]}, "expected role and content"),
        ({"messages": ["text"]}, "message 0 has text"),
        ({"messages": HISTORY[1:]}, "a message of the role assistant, which only the policy"),
        ({"info": [1]}, "not a mapping"),
        ({"info": {"quiver_failure": "none"}}, "quiver_failure: names that begin with"),
        ({"info": {"f": 10**350}}, "info of the step: f is a number of more than 300 digits"),
        ({"info": {"f": nested(100)}}, "info of the step: .* is nested more than 100 levels deep"),
        ({"done": "False"}, "done of the step is 'False', expected True or False"),
    ],
)
def test_a_step_that_is_none_is_refused(returned, why):
    with pytest.raises(ValueError, match=why):
        read_step(returned)


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
    sources = [f"{write(tmp_path, TOOL_FILE, name)}:search" for name in ("a.py", "b.py")]
    factory, environment = made("", tools=sources[:1])
    assert factory.answers and environment.reset({}, 0) == [] and environment.finish() is None
    (content,) = answers_of(environment, Call("search", {"query": "elk"}))
    assert json.loads(content) == [{"title": "elk"}] * 2
    with pytest.raises(ConfigError, match="two tools with the name search"):
        open_source("", sources, {})


def test_what_an_async_tool_opened_is_open_in_its_next_call():
    """A client belongs to the event loop of its first call."""
    clients: list[asyncio.Task] = []

    async def search() -> str:
        if not clients:
            clients.append(asyncio.create_task(asyncio.sleep(600)))
        await asyncio.wait(clients, timeout=0.001)
        return "cancelled" if clients[0].cancelled() else "open"

    contents = [call_tool({"search": search}, Call("search", {}))["content"] for _ in range(3)]
    assert contents == ["open"] * 3


def results_of(returned: object) -> str:
    """What the policy reads of a tool's result."""
    return call_tool({"look": lambda: returned}, Call("look", {}))["content"]


def test_a_long_mapping_is_whole_and_only_info_is_cut():
    """What a policy reads has a limit of its own, max_observation_tokens."""
    page = {"results": ["word " * 20] * 200}
    assert json.loads(results_of(page)) == page
    assert json.loads(results_of([page])) == [page]
    info = read_step({"text": "a", "info": page}).info
    assert [*info] == ["cut"] and len(info["cut"]) == 10_000


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ({"type": ["string", "null"], "a": 1}, {"type": ["string", "null"], "a": 1}),
        ([{"type": "image", "url": "a.png"}], [{"type": "image", "url": "a.png"}]),
        (np.int64(3), 3),
        ({"n": np.float32(0.5), "is": np.True_}, {"n": 0.5, "is": True}),
        ({"k": np.arange(3), "t": torch.tensor([0.5])}, {"k": [0, 1, 2], "t": [0.5]}),
        (np.array([1.0, np.nan]), [1.0, "NaN"]),
        ({"elk", "owl", "ant", "bee"}, ["ant", "bee", "elk", "owl"]),
        ({"a": frozenset({(2, 1), (1, 2)})}, {"a": [[1, 2], [2, 1]]}),
    ],
)
def test_a_result_is_read_as_what_it_says(returned, expected):
    """Numbers are numbers, and the order of a set is the same in each process."""
    assert json.loads(results_of(returned)) == expected


def test_what_has_no_text_of_its_own_is_an_error_of_the_tool():
    """Where it lies in memory would be another text in every run."""
    for returned in (object(), {"key": object()}):
        message = call_tool({"look": lambda: returned}, Call("look", {}))  # noqa: B023
        why = "a object is not text, and cannot be written as JSON"
        assert message["content"] == f"Error: TypeError: {why}"


def test_the_tool_python_runs_in_the_sandbox():
    try:
        sandbox.check("full")
    except Exception as error:
        pytest.skip(str(error))
    _, environment = made("", tools=["python"])
    programs = ("print(6 * 7)", "1 / 0", "x = 1", "print(x)")
    calls = [Call("python", {"code": program}) for program in programs]
    product, error, nothing, unknown = answers_of(environment, *calls)
    assert product == "42\n" and nothing == "(it printed nothing)"
    assert "ZeroDivisionError" in error and "(exit code 1)" in error and "NameError" in unknown


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
HOW = "gymnasium is not installed: make environments"


@pytest.mark.parametrize(
    "space, answer, actions",
    [("Text(50)", "elk", (" owl ", "elk")), ("Discrete(4)", 3, ("1 or 2", "3"))],
)
def test_environments_of_gymnasium_take_text_or_the_last_number(tmp_path, space, answer, actions):
    pytest.importorskip("gymnasium", reason=HOW)
    source = GYM.format(space=f"gymnasium.spaces.{space}")
    _, environment = made(f"{write(tmp_path, source)}:Echo")
    opening = environment.reset({"answer": answer}, 2**40 + 7)
    assert opening == [{"role": "user", "content": "seed 7"}]
    assert environment.step(Turn(actions[0])).text in ("you said owl", "you said 2")
    for text in ("9", "none", "-1") if answer == 3 else ():
        step = environment.step(Turn(text))
        assert "is no action here" in step.text and step.reward is None and not step.done
    step = environment.step(Turn(actions[1]))
    assert step.reward == 1.0 and step.done and step.info == {"n": 1}
    environment.close()


def test_a_registered_environment_is_named_and_a_missing_one_told(monkeypatch):
    pytest.importorskip("gymnasium", reason=HOW)
    _, environment = made("gymnasium:FrozenLake-v1", {"is_slippery": False})
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
import base64
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

server.run()
'''


def test_the_tools_of_a_server_that_speaks_mcp(tmp_path):
    pytest.importorskip("mcp")
    command = f"{sys.executable} {write(tmp_path, MCP_SERVER)}"
    factory, environment = made("", tools=[f"mcp:{command}"])
    function = next(tool["function"] for tool in factory.tools if "cost" in str(tool))
    assert function["name"] == "price" and function["description"] == "What things cost."
    assert function["parameters"]["required"] == ["thing"]
    things = ({"thing": "bread", "count": 2}, {"thing": "moon"})
    answers = answers_of(environment, *(Call("price", thing) for thing in things))
    assert answers[0] == "6 for bread" and answers[1].startswith("Error: RuntimeError")
    (message,) = environment.step(Turn("", (Call("look", {"thing": "bread"}),))).messages
    assert message["content"] == "bread" and files_in([message]) == {"image": [b"bread"]}
    with pytest.raises(ConfigError, match="server cannot be used"):
        open_source("", ["mcp:/nowhere/server"], {})


class OpenEnvServer(BaseHTTPRequestHandler):
    """Episodes by id: an answer is right where it is the row's."""

    episodes: dict[str, dict] = {}  # noqa: RUF012  the server's

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/env/reset":
            self.episodes[request["episode_id"]] = request
            answer = {"observation": {"echo": f"seed {request['seed']}"}}
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
    factory, first = made(openenv_url)
    second = factory.make()
    assert first.reset({"answer": "elk"}, 7) == [{"role": "user", "content": "seed 7"}]
    second.reset({"answer": "owl"}, 8)
    step = first.step(Turn("owl"))
    assert json.loads(step.text) == {"echo": "owl", "left": 2}
    assert step.reward == 0.5 and not step.done
    assert second.step(Turn("owl")).done
    with pytest.raises(RuntimeError, match="500"):
        first.step(Turn("crash"))
    _, text_only = made(openenv_url, {"text_key": "echo"})
    text_only.reset({"answer": "elk"}, 7)
    assert text_only.step(Turn("owl")).text == "owl"
    _, other = made(openenv_url, {"text_key": "text"})
    with pytest.raises(
        RuntimeError, match="/reset: its observation has no text, it has echo; correct text_key"
    ):
        other.reset({"answer": "elk"}, 7)
    with pytest.raises(ConfigError, match="unknown argument key"):
        open_source(openenv_url, [], {"key": "echo"})


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


@pytest.mark.parametrize(
    "section, why",
    [
        ({}, "name an environment or tools"),
        ({"environment": "a.py:A", "tools": ["python"]}, "one of the two"),
        ({"environment": "Guess"}, "expected file.py:name"),
        ({"environment": "gymnasium:"}, "gymnasium:"),
        ({"tools": ["pythn"]}, "did you mean python"),
        ({"tools": ["python:3"]}, "is not known"),
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


@pytest.mark.parametrize(
    "source, why",
    [
        ("pass", "neither a method `step` nor any public method"),
        ("def __init__(self):\n        1 / 0", "ZeroDivisionError"),
        ("def look(self):\n        pass\n    look.schema = {'name': 'see', 'parameters': {}}", "its own schema has the name see"),
    ],
)  # fmt: skip
def test_a_class_that_can_not_be_used_is_told(tmp_path, source, why):
    path = write(tmp_path, f"class Mine:\n    {source}\n")
    with pytest.raises(ConfigError, match=why):
        open_source(f"{path}:Mine", [], {})


def test_the_game_of_the_document_is_played(tmp_path):
    """The very lines that the page about environments shows."""
    page = Path(__file__).parents[3] / "deployments/docs/environments.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    _, environment = made(f"{write(tmp_path, code)}:Guess")
    assert environment.reset({"limit": 3}, 5) == [{"role": "user", "content": "It is below 3."}]
    steps = [environment.step(Turn(str(guess))) for guess in range(3)]
    (number,) = [guess for guess, step in enumerate(steps) if step.done]
    hints = ["higher" if guess < number else "lower" for guess in range(3)]
    hints[number] = "right"
    assert [step.text for step in steps] == hints
    assert [step.reward for step in steps] == [float(guess == number) for guess in range(3)]
    assert environment.step(Turn("²")).text == "higher", "a digit that is no decimal"


TONE = sound.tone(440, 0.1)


@pytest.mark.parametrize(
    "samples",
    [
        TONE,
        TONE.astype("float16"),
        TONE.astype("float64"),
        (TONE * 32768).astype("int16"),
        torch.from_numpy(TONE),
        np.stack([TONE, TONE], 1),
        np.where(np.arange(len(TONE)) == 7, 1.25, TONE),
    ],
    ids=["float32", "float16", "float64", "int16", "torch", "stereo", "one above 1"],
)
def test_samples_of_a_clip_are_heard_as_they_are(samples):
    (content,) = files_in([{"audio": read_media("audio", [(samples, np.int64(sound.RATE))])}])[
        "audio"
    ]
    heard, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    expected = TONE if np.max(np.asarray(samples)) != 1.25 else samples.clip(-1, 1)
    assert rate == sound.RATE
    np.testing.assert_allclose(heard.mean(1), expected, atol=3e-4)


@pytest.mark.parametrize(
    ("samples", "rate", "problem"),
    [
        ((TONE * 32767).astype("int32"), 16_000, "samples of type int32"),
        (TONE > 0, 16_000, "samples of type bool"),
        (TONE.astype(complex), 16_000, "samples of type complex128"),
        (np.where(TONE > 0.4, np.nan, TONE), 16_000, "samples that are no finite numbers"),
        (np.where(TONE > 0.4, np.inf, TONE), 16_000, "samples that are no finite numbers"),
        (TONE * 32767, 16_000, "samples up to 163"),
        (np.where(np.arange(len(TONE)) < 20, -1.5, TONE), 16_000, "samples up to 1.5"),
        (TONE[None], 16_000, r"samples of shape \(1, 1600\)"),
        (np.stack([TONE, TONE]), 16_000, r"samples of shape \(2, 1600\)"),
        (TONE[0], 16_000, r"samples of shape \(\)"),
        (TONE, 22050.7, "the rate 22050.7"),
        (TONE, "16000", "the rate '16000'"),
        (TONE, 0, "the rate 0"),
        (TONE, None, "the rate None"),
    ],
)
def test_samples_that_would_be_heard_otherwise_are_refused(samples, rate, problem):
    with pytest.raises(
        ValueError, match=f"a clip has {problem}.*floats between -1 and 1 or as int16"
    ):
        read_media("audio", [(samples, rate)])
