"""A sandbox on a server: what is sent, and that a bad answer is never a result. What goes wrong on
the network is in test_remote.py."""

import asyncio
from dataclasses import asdict

import pytest
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, RemoteError, ResourceError
from quiver.stages.core.config import parse
from quiver.stages.core.isolation import Limits
from quiver.stages.core.sandbox import Finished, run_program
from quiver.stages.reward import remote_sandbox
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.functions.programs import code
from quiver.stages.reward.stage import Config, check
from tests.stages.reward.fake_server import FakeServer, reply

GOOD = {"stdout": "out", "stderr": "err", "exit_code": 3, "timed_out": False}
DOUBLE = "def double(x):\n    return 2 * x\n"
TEST = ["assert double(1) == 2"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote_sandbox, "PAUSE_SECONDS", 0.01)


def serving(*answers) -> FakeServer:
    """A server with these answers, one a request, the last for all further ones."""
    return FakeServer(lambda asked: answers[min(asked.number, len(answers) - 1)])


def says(**changes) -> bytes:
    return reply({**GOOD, **changes})


async def run_here(asked) -> bytes:
    """Run the program on this machine."""
    finished = await asyncio.to_thread(
        run_program,
        asked.body["code"],
        stdin=asked.body["stdin"],
        limits=Limits(**asked.body["limits"]),
        isolation="process",
    )
    answer = {name: field for name, field in asdict(finished).items() if name in GOOD}
    return reply({**answer, "timed_out": finished.timed_out})


def test_a_program_runs_there(monkeypatch):
    monkeypatch.setenv("SANDBOX_TOKEN", "canary-77")
    program, limits = "print(input() * 2)", Limits(seconds=7)
    options = {"stdin": "é", "limits": limits, "token": "env:SANDBOX_TOKEN"}
    with FakeServer(run_here) as server:
        finished = remote_sandbox.run_program(program, url=server.url, **options)
    assert finished == Finished(0, "éé\n", "", None, finished.seconds)
    (asked,) = server.asked
    assert asked.headers["authorization"] == "Bearer canary-77"
    body = {"language": "python", "code": program, "stdin": "é", "limits": asdict(limits)}
    assert asked.body == body


def test_an_answer_is_read():
    with serving(says(), says(timed_out=True, exit_code=-9)) as server:
        first, second = (remote_sandbox.run_program("", url=server.url) for _ in range(2))
    assert first == Finished(3, "out", "err", None, first.seconds)
    assert (second.timed_out, second.killed_by, second.exit_code) == (True, "time", -9)


def test_the_reward_function_runs_its_programs_there():
    tests = ["assert double(2) == 4", "assert double(1) == 3"]
    cases = [{"input": "a", "output": "aa"}]
    programs = [DOUBLE, "print(input() * 2)"]
    with FakeServer(run_here) as server:
        assert code(programs, [tests, cases], sandbox_url=server.url) == [0.5, 1.0]
    assert len(server.asked) == 3  # the first one sees if the server runs anything


@pytest.mark.parametrize(
    ("answer", "num_asked"),
    [
        (reply(b"<html>"), remote_sandbox.ATTEMPTS),
        (reply([1]), remote_sandbox.ATTEMPTS),
        (says(exit_code=None), remote_sandbox.ATTEMPTS),
        (says(exit_code=True), remote_sandbox.ATTEMPTS),
        (says(stdout=1), remote_sandbox.ATTEMPTS),
        (reply(b" " * 10_000_000), remote_sandbox.ATTEMPTS),
        (reply({}, 401), 1),
    ],
    ids=["not JSON", "not an object", "no exit code", "a truth", "a number", "too long", "401"],
)
def test_a_bad_answer_is_an_error(answer, num_asked):
    with serving(answer) as server, pytest.raises(RemoteError) as caught:
        remote_sandbox.run_program("print(1)", url=server.url)
    assert caught.value.state == "the program was not judged."
    assert len(server.asked) == num_asked


def test_a_failure_that_may_pass_is_tried_again():
    with serving(reply(b"", 503), reply(b"", 429), says(), reply(b"", 500)) as server:
        assert remote_sandbox.run_program("", url=server.url).exit_code == 3
        with pytest.raises(RemoteError, match=r"answered 500: no text \(3 attempts\)"):
            remote_sandbox.run_program("", url=server.url)


def test_a_server_that_runs_nothing_is_an_error_and_no_number():
    nothing = says(stdout="", stderr="no interpreter", exit_code=127)
    problem = "a program that does nothing failed: no interpreter"
    with serving(nothing) as server, pytest.raises(RemoteError, match=problem):
        code([DOUBLE], [TEST], sandbox_url=server.url)
    killed = says(stdout="", stderr="Killed", exit_code=-9)
    problem = "the harness did not start: Killed"
    with (
        serving(says(stdout="ready\n"), killed) as server,
        pytest.raises(ResourceError, match=problem),
    ):
        code([DOUBLE], [TEST], sandbox_url=server.url)


@pytest.mark.parametrize(
    ("url", "token", "problem"),
    [
        ("http://127.0.0.1:1", "canary", "must be env:NAME"),
        ("http://127.0.0.1:1", "env:MISSING_TOKEN", "variable MISSING_TOKEN is not set"),
        (
            "http://scores.example:8/run",
            "env:SANDBOX_TOKEN",
            "would go to scores.example unencrypted",
        ),
        ("http://127.0.0.1:1/run?key=canary", "", "has a user, a query"),
    ],
)
def test_tokens_and_urls_are_checked(url, token, problem, monkeypatch):
    monkeypatch.setenv("SANDBOX_TOKEN", "canary-77")
    with pytest.raises(ConfigError, match=problem) as caught:
        code([DOUBLE], [TEST], sandbox_url=url, sandbox_token=token)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"sandbox_token": "sk-canary"}, "sandbox_token must be env:NAME"),
        ({"sandbox_url": "https://me:sk-canary@scores.example/run"}, "has a user"),
        ({"sandbox_url": "http://scores.example", "sandbox_token": "env:KEY"}, "unencrypted"),
    ],
)
def test_a_recipe_is_no_place_for_a_secret(arguments, problem):
    section = {"use": "code", "arguments": arguments}
    with pytest.raises(ConfigError) as caught:
        parse(Config, {"functions": [section]}, "reward")
    with pytest.raises(ValidationError) as raised:
        FunctionConfig(**section)
    assert problem in str(caught.value)
    assert "canary" not in str(caught.value) and "canary" not in str(raised.value)


def test_a_missing_token_is_reported_before_any_generation():
    arguments = {"sandbox_url": "http://[::1]:1", "sandbox_token": "env:MISSING_TOKEN"}
    with pytest.raises(ConfigError, match="environment variable MISSING_TOKEN is not set"):
        check(Config(functions=[{"use": "code", "arguments": arguments}]), ["tests"])
