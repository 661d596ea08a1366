"""A sandbox on a server, against a real one on this machine: what is sent, and that a bad answer is
never a result."""

import json
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, RemoteError, ResourceError
from quiver.stages.common.config import parse
from quiver.stages.common.isolation import Limits
from quiver.stages.common.sandbox import Finished, run_program
from quiver.stages.reward import remote_sandbox
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.functions.programs import code
from quiver.stages.reward.stage import Config, check

GOOD = {"stdout": "out", "stderr": "err", "exit_code": 3, "timed_out": False}
DOUBLE = "def double(x):\n    return 2 * x\n"


class Server(BaseHTTPRequestHandler):
    """Runs programs, unless `answers` says what to do instead, one a request: (status, headers,
    body)."""

    asked: list[tuple[str, dict]]
    answers: list[tuple[int, dict, bytes]]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers.get("Authorization"), body))
        if self.answers:
            status, headers, data = self.answers.pop(0)
        else:
            finished = run_program(
                body["code"],
                stdin=body["stdin"],
                limits=Limits(**body["limits"]),
                isolation="process",
            )
            answer = {name: value for name, value in asdict(finished).items() if name in GOOD}
            status, headers, data = (
                200,
                {},
                json.dumps({**answer, "timed_out": finished.timed_out}).encode(),
            )
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """Its URL, what it was asked, and what it shall answer."""
    monkeypatch.setattr(remote_sandbox, "PAUSE_SECONDS", 0.01)
    asked, answers = [], []
    handler = type("Handler", (Server,), {"asked": asked, "answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/run", asked, answers
        http.shutdown()


def says(**changes) -> tuple[int, dict, bytes]:
    return 200, {}, json.dumps({**GOOD, **changes}).encode()


def test_a_program_runs_there(server, monkeypatch):
    url, asked, _ = server
    monkeypatch.setenv("SANDBOX_TOKEN", "canary-77")
    finished = remote_sandbox.run_program(
        "print(input() * 2)",
        stdin="é",
        limits=Limits(seconds=7),
        url=url,
        token="env:SANDBOX_TOKEN",
    )
    assert (finished.exit_code, finished.stdout, finished.stderr, finished.timed_out) == (
        0,
        "éé\n",
        "",
        False,
    )
    ((authorization, body),) = asked
    assert authorization == "Bearer canary-77"
    assert (body["code"], body["stdin"], body["language"]) == ("print(input() * 2)", "é", "python")
    assert body["limits"] == {
        "seconds": 7,
        "memory_mib": 512,
        "processes": 16,
        "files_mib": 16,
        "open_files": 64,
        "output_kib": 64,
    }


def test_what_it_answers_is_read(server):
    url, _, answers = server
    answers += [says(), says(timed_out=True, exit_code=-9)]
    first, second = (remote_sandbox.run_program("", url=url) for _ in range(2))
    assert first == Finished(3, "out", "err", None, first.seconds)
    assert (second.timed_out, second.killed_by, second.exit_code) == (True, "time", -9)


def test_the_reward_function_runs_its_programs_there(server):
    url, asked, _ = server
    tests = ["assert double(2) == 4", "assert double(1) == 3"]
    cases = [{"input": "a", "output": "aa"}]
    assert code([DOUBLE, "print(input() * 2)"], [tests, cases], sandbox_url=url) == [0.5, 1.0]
    assert len(asked) == 3  # the first one sees whether the server runs anything


BAD = {
    "not JSON": (200, {}, b"<html>"),
    "cut": (200, {}, b'{"stdout": "ou'),
    "not an object": (200, {}, b"[1]"),
    "nested": (200, {}, b"[" * 100_000),
    "nothing": (200, {}, b""),
    "no exit code": says(exit_code=None),
    "exit code as text": says(exit_code="0"),
    "exit code as a truth": says(exit_code=True),
    "output as a number": says(stdout=1),
    "time as a number": says(timed_out=0),
    "too long": (200, {}, b" " * 10_000_000),
    "compressed": (200, {"Content-Encoding": "gzip"}, b"x"),
    "moved": (307, {"Location": "http://127.0.0.1:1/"}, b""),
    "refused": (401, {}, b"{}"),
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_a_bad_answer_is_an_error(server, answer):
    url, asked, answers = server
    answers += [answer] * remote_sandbox.ATTEMPTS
    with pytest.raises(RemoteError) as caught:
        remote_sandbox.run_program("print(1)", url=url)
    assert caught.value.state == "the program was not judged."
    is_final = answer[0] in (307, 401)
    assert len(asked) == (1 if is_final else remote_sandbox.ATTEMPTS)


def test_what_may_pass_is_tried_again(server):
    url, asked, answers = server
    answers += [(503, {}, b""), (429, {}, b""), says()]
    assert remote_sandbox.run_program("", url=url).exit_code == 3
    answers += [(500, {}, b"")] * 3
    with pytest.raises(RemoteError, match=r"answered 500: no text \(3 attempts\)"):
        remote_sandbox.run_program("", url=url)
    assert len(asked) == 6


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr(remote_sandbox, "PAUSE_SECONDS", 0.01)
    with pytest.raises(RemoteError, match="ConnectError"):
        remote_sandbox.run_program("", url="http://127.0.0.1:1/run")
    with pytest.raises(ConfigError) as caught:
        code([DOUBLE], [["assert double(1) == 2"]], sandbox_url="http://127.0.0.1:1/run?key=canary")
    assert "canary" not in str(caught.value)


def test_a_server_that_runs_nothing_is_an_error_and_no_number(server):
    url, _, answers = server
    answers += [says(stdout="", stderr="no interpreter", exit_code=127)]
    with pytest.raises(RemoteError, match="a program that does nothing failed: no interpreter"):
        code([DOUBLE], [["assert double(1) == 2"]], sandbox_url=url)
    answers += [says(stdout="ready\n"), says(stdout="", stderr="Killed", exit_code=-9)]
    with pytest.raises(ResourceError, match="the harness did not start: Killed"):
        code([DOUBLE], [["assert double(1) == 2"]], sandbox_url=url)


def test_tokens_and_urls(monkeypatch):
    for token in ("canary", "env:", "file:x"):
        with pytest.raises(ConfigError, match="must be env:NAME") as caught:
            remote_sandbox.run_program("", url="http://127.0.0.1:1", token=token)
        assert "canary" not in str(caught.value)
    with pytest.raises(ConfigError, match="environment variable MISSING_TOKEN is not set"):
        remote_sandbox.run_program("", url="http://127.0.0.1:1", token="env:MISSING_TOKEN")
    monkeypatch.setenv("SANDBOX_TOKEN", "canary-77")
    with pytest.raises(ConfigError, match=r"a token would go to scores.example in the clear"):
        remote_sandbox.run_program("", url="http://scores.example:8/run", token="env:SANDBOX_TOKEN")
    with pytest.raises(ConfigError, match="a URL must be http"):
        remote_sandbox.run_program("", url="file:///etc/passwd")


@pytest.mark.parametrize(
    "arguments",
    [
        {"sandbox_token": "sk-canary"},
        {"sandbox_url": "https://scores.example/run", "sandbox_token": ["sk-canary"]},
        {"sandbox_url": "https://me:sk-canary@scores.example/run"},
        {"sandbox_url": "https://scores.example/run?key=sk-canary"},
        {"sandbox_url": "file:///sk-canary"},
    ],
)
def test_a_recipe_is_no_place_for_a_secret(arguments):
    section = {"use": "code", "arguments": arguments}
    with pytest.raises(ConfigError) as caught:
        parse(Config, {"functions": [section]}, "reward")
    with pytest.raises(ValidationError) as raised:
        FunctionConfig(**section)
    assert "canary" not in str(caught.value) and "canary" not in str(raised.value)


def test_no_token_goes_over_plain_http_to_another_machine():
    arguments = {"sandbox_url": "http://scores.example/run", "sandbox_token": "env:TOKEN"}
    with pytest.raises(
        ConfigError, match=r"a token would go to scores.example in the clear: use https\n"
    ):
        parse(FunctionConfig, {"use": "code", "arguments": arguments}, "reward")
    for url, token in (
        ("https://scores.example/run", "env:TOKEN"),
        ("http://[::1]:8/run", "env:TOKEN"),
        ("http://a.example", ""),
    ):
        parse(
            FunctionConfig,
            {"use": "code", "arguments": {"sandbox_url": url, "sandbox_token": token}},
            "reward",
        )


def test_a_token_that_is_not_there_is_told_before_any_generation():
    arguments = {"sandbox_url": "http://127.0.0.1:1", "sandbox_token": "env:MISSING_TOKEN"}
    with pytest.raises(ConfigError, match="environment variable MISSING_TOKEN is not set"):
        check(Config(functions=[{"use": "code", "arguments": arguments}]), ["tests"])
