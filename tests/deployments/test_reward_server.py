"""A [reward] section behind HTTP: scored over loopback as it is locally, closed to strangers, never
confused by a body."""

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from starlette.testclient import TestClient

from quiver.deployments.batcher import Batcher, Limits, score_rows
from quiver.deployments.reward_server import DEFAULT, listen, load, main, make_app, make_server
from quiver.schemas.errors import BusyError, ConfigError, SecurityError
from quiver.stages.core.servers import read_json
from quiver.stages.reward.servers.config import ServerConfig
from quiver.stages.reward.servers.dialects import openrlhf, quiver
from quiver.stages.reward.servers.dialects.rows import Row, Scored
from quiver.stages.reward.servers.scorer import ServerScorer
from quiver.stages.reward.stage import Config, open_scorers
from tests.stages.reward.test_dialects import swapped

CANARY = "sk-canary-5f1d"
MINE = """
def picky(completions, answer):
    for text in completions:
        if "boom" in text:
            raise ValueError("cannot score " + text)
    return [None if want is None else {"reward": float(want in text), "seen": text} for text, want in zip(completions, answer)]

def cut(completions, rollout_ids):
    if "boom" in completions:
        raise ValueError("boom \\ud83d")
    return [{"reward": 1.0, "id\\ud83d": id + "\\ud83d"} for id in rollout_ids]

def length_of(completions, answer):
    return [None if want is None else float(len(want)) for want in answer]

def words(completions, **columns):
    return [float(len(text.split())) for text in completions]
"""
RECIPE = """
[[reward.functions]]
use = "{}:picky"
extra = true
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "mine.py").write_text(MINE)
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(folder / "mine.py"))
    return path


@pytest.fixture(scope="module")
def local(recipe):
    """The section's config and its scorers, in this process."""
    config = load(recipe)
    with open_scorers(config) as scorers:
        yield config, scorers


@pytest.fixture(scope="module")
def url(recipe):
    """A server as users start it."""
    command = [sys.executable, "-m", "quiver.deployments.reward_server", str(recipe), "--port", "0"]
    log = recipe.with_suffix(".log")
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as server:
        try:
            while "http" not in log.read_text():
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            yield re.search(r"http://\S+", log.read_text())[0]
        finally:
            server.terminate()
            assert server.wait(20) == 143
    assert "Traceback" not in log.read_text()


@contextmanager
def web_of(config, scorers, host="127.0.0.1", **options):
    """The application, asked without a socket."""
    app = make_app(config, scorers, **options)
    with TestClient(app, base_url=f"http://{host}", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def web(local):
    with web_of(*local) as client:
        yield client


BATCH = {
    "prompts": [[{"role": "user", "content": "2 + 2?"}], "3 + 3 = ", "4 + 4 = ", "5 + 5 = "],
    "completions": ["it is 4", "boom 6", "eight é", "10"],
    "completion_ids": [[1, 2, 3], [4, 5], [6], [7]],
    "finish_reason": ["stop", "stop", "length", "stop"],
    "rollout_ids": ["a", "b", "c", "d"],
    "answer": ["4", "6", "8", None],
}
QUERY = {"query": ["? 7"], "prompts": ["? "], "labels": ["7"]}
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.mark.parametrize("dialect", ["quiver", "openrlhf"])
def test_scoring_over_http_is_scoring_locally(dialect, url, local):
    options = {} if dialect == "quiver" else {"label": "answer"}
    scorer = ServerScorer(ServerConfig(dialect=dialect, urls=[url], **options))
    scorer.require(["answer"])
    here = local[1][0].score(BATCH)
    there = scorer.score(BATCH)
    assert [part[:2] for part in there] == [part[:2] for part in here]
    assert [part.value for part in here] == [1.0, None, 0.0, None]
    assert "cannot score boom" in here[1].error and here[3].error is None
    if dialect == "quiver":
        assert json.loads(there[0].extra)["extra"] == {"picky": {"seen": "it is 4"}}


def test_health_and_a_description(url):
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "format": 1}
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert set(paths) == {"/health", "/v1/score", "/get_reward"}


@pytest.mark.parametrize("keeps", [False, True])
def test_the_end_token_that_openrlhf_sends_is_no_part_of_the_answer(keeps):
    config = Config(functions=[{"use": "exact_match"}])
    texts = ["4<|im_end|>", "4<end_of_turn><pad><pad>", "4", "<b>4</b>"]
    asked = {
        "query": [f"2 + 2? {text}" for text in texts],
        "prompts": ["2 + 2? "] * 4,
        "labels": ["4", "4", "4", "<b>4</b>"],
    }
    with open_scorers(config) as scorers, web_of(config, scorers, keeps_end_tokens=keeps) as web:
        answer = web.post("/get_reward", json=asked).json()
    assert answer["rewards"] == ([0.0, 0.0, 1.0, 1.0] if keeps else [1.0] * 4)
    counts = answer["extra_logs"].get("end_tokens_taken_off")
    assert counts == (None if keeps else [1, 3, 0, 0])


def test_an_empty_openrlhf_request_has_an_empty_answer(web):
    answer = web.post("/get_reward", json={"query": []})
    assert answer.status_code == 200
    assert answer.json() == {"rewards": [], "scores": [], "extra_logs": {"error": []}}


def test_the_whole_section_makes_the_reward():
    functions = [{"use": "numeric", "weight": 2.0}]
    functions += [{"use": "length", "arguments": {"target": 14}}]
    overlong = {"max_tokens": 20, "cache": 8, "weight": 2.0}
    config = Config(reward_clip=(0.0, 1.5), overlong=overlong, functions=functions)
    right, wrong = {"answer": 7}, {"answer": "no number"}
    rows = [Row("x", "?", "it is 7", right, [0] * count, "stop") for count in (3, 14, 25)]
    rows += [Row("x", "?", "it is 7", wrong, [0] * 3), Row("x", "?", "it is 7", wrong)]
    with open_scorers(config) as scorers:
        scored = score_rows(config, scorers, rows)
        with pytest.raises(ConfigError, match="needs answer"):
            score_rows(config, scorers, [Row("x", "?", "7", {"level": 1})])
    # numeric 1 · 2 + length, clipped to 1.5, plus 2 · overlong: 0, -1/4, -1
    assert [row.reward for row in scored] == [1.5, 1.5 - 0.5, 1.5 - 2, None, None]
    assert scored[2].parts == {"numeric": 1.0, "length": 0.0, "overlong": -1.0}
    assert scored[3].error.startswith("numeric: ")
    assert "holds no number" in scored[4].error and "overlong counts" in scored[4].error


def test_a_function_is_given_the_ids_of_the_request_and_may_cut_characters(recipe):
    """Rows of two requests with one id are told apart, and half a character is replaced."""
    row = {"id": "é-7", "prompt": "?", "completion": "7"}
    cut = {"use": f"{recipe.with_name('mine.py')}:cut", "extra": True}
    config = Config(functions=[cut])

    async def ask_twice(batcher):
        work = asyncio.create_task(batcher.work())
        requests = [quiver.Request(format=1, rows=[row, {**row, "id": id}]) for id in "ab"]
        answers = await asyncio.gather(*(batcher.score(each.as_rows()) for each in requests))
        work.cancel()
        return answers

    with open_scorers(config) as scorers, web_of(config, scorers) as web:
        rows = [row, {**row, "id": "b"}, {**row, "id": "c", "completion": "boom"}]
        answers = web.post("/v1/score", json={"format": 1, "rows": rows}).json()["rows"]
        batcher = Batcher(lambda rows: score_rows(config, scorers, rows), Limits(wait=0.2))
        twice = asyncio.run(ask_twice(batcher))
    ids = [{"cut": {"id?": f"{id}?"}} for id in ("é-7", "b", "a")]
    assert [answer["extra"] for answer in answers] == [*ids[:2], {}]
    assert "ValueError: boom" in answers[2]["error"]
    assert [[row.extra for row in rows] for rows in twice] == [[ids[0], ids[2]], ids[:2]]


def test_a_row_without_the_field_that_a_function_reads_stays_alone(recipe):
    """Its cell tells nothing of the fields that other rows have."""
    columns = {"answer": "about.truth"}
    function = {"use": f"{recipe.with_name('mine.py')}:length_of", "columns": columns}
    config = Config(functions=[function])
    cells = ['{"truth": "abc"}', "N/A", {"other": 1}]
    with open_scorers(config) as scorers:
        for asked in cells, cells[1:], cells[2:], cells[1:2]:
            rows = [Row(str(at), "?", "7", {"about": cell}) for at, cell in enumerate(asked)]
            rewards = [row.reward for row in score_rows(config, scorers, rows)]
            assert rewards == [3.0 if cell == cells[0] else None for cell in asked]


def test_no_sum_leaves_float32():
    functions = [{"use": "numeric", "weight": -3e38}]
    overlong = {"max_tokens": 2, "cache": 1, "weight": 3e38}
    config = Config(overlong=overlong, functions=functions)
    with open_scorers(config) as scorers:
        (large,) = score_rows(config, scorers, [Row("x", "?", "7", {"answer": 7}, [0] * 3)])
    assert large.reward is None and "is not finite as float32" in large.error


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ('fingerprint = "quiver:0"', "fingerprint expected quiver:0, found quiver:5"),
        ('scope = "group"', "numeric: has scope group"),
        (None, "has no section [reward]"),
        ("=", "reward.toml"),
    ],
)
def test_a_section_that_cannot_be_served_is_refused(setting, problem, tmp_path, capsys):
    path = tmp_path / "reward.toml"
    path.write_text("" if setting is None else f'[[reward.functions]]\nuse = "numeric"\n{setting}')
    assert main([str(path), "--port", "0"]) == 2
    assert problem in capsys.readouterr().err


# -- who may ask


def test_a_token_is_required_off_loopback(recipe, monkeypatch, capsys):
    for host in ("0.0.0.0", "::", "192.0.2.1", "scores.example", ""):
        with pytest.raises(SecurityError, match="token"):
            listen(host, 0, "")
    assert main([str(recipe), "--host", "0.0.0.0"]) == 10
    assert "E-SECURITY" in capsys.readouterr().err
    for token in (CANARY, "env:REWARD_KEY"):
        assert main([str(recipe), "--token", token]) == 2
        assert CANARY not in capsys.readouterr().err
    monkeypatch.setenv("REWARD_KEY", CANARY)
    with listen("127.0.0.1", 0, "") as first, listen("0.0.0.0", 0, CANARY):
        port = str(first.getsockname()[1])
        assert main([str(recipe), "--token", "env:REWARD_KEY", "--port", port]) == 2
        assert "choose another port" in capsys.readouterr().err


def test_strangers_are_not_let_in(local):
    with web_of(*local, host="scores.example", token=CANARY) as client:
        assert client.get("/health").status_code == 200
        for value in (None, CANARY, f"Bearer {CANARY}x", "Bearer "):
            headers = {"Authorization": value} if value else {}
            refused = client.post("/get_reward", json=QUERY, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert CANARY not in refused.text
            assert client.get("/openapi.json", headers=headers).status_code == 401
        headers = {"Authorization": f"Bearer {CANARY}"}
        assert client.post("/get_reward", json=QUERY, headers=headers).json()["rewards"] == [1.0]
        assert client.app.openapi()["components"]["securitySchemes"]


def test_without_a_token_no_web_page_gets_through(web):
    def status(**headers: str) -> int:
        sent_headers = {**JSON_TYPE, **headers}
        return web.post("/get_reward", content=json.dumps(QUERY), headers=sent_headers).status_code

    for host in ("127.0.0.1:8700", "localhost", "[::1]:8700"):
        assert status(Host=host) == 200
    for host in ("evil.example:8700", "127.0.0.1.evil.example", "", "127.0.0.1@evil.example"):
        assert status(Host=host) == 403
    assert status(**{"Content-Type": "text/plain"}) == 422


# -- requests


def score(web, **change):
    row = {"id": "a", "prompt": "?", "completion": "7", "columns": {"answer": "7"}}
    return web.post("/v1/score", json={"format": 1, "rows": [row], **change})


def fields_of(answer) -> set[str]:
    """The fields of a refusal."""
    return set(answer.json()["error"])


FIELDS = {"code", "object", "message", "next"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": "1"}, "body.format: Input should be 1"),
        ({"rows": []}, "body.rows: "),
        ({"rows": [{"id": "a", "prompt": "?", "completion": "7"}] * 2}, "an id occurs twice"),
        ({"rows": [{"id": 1, "prompt": "?", "completion": "7"}]}, "body.rows.0.id: "),
        (
            {
                "rows": [
                    {"id": id, "prompt": "?", "completion": "7", "columns": {id: 1}} for id in "ab"
                ]
            },
            "every row of a request must have the same columns",
        ),
        (
            {"rows": [{"id": "a", "prompt": "?", "completion": "7", "columns": {"level": 1}}]},
            "needs answer",
        ),
        ({"more": 1}, "body.more: "),
    ],
)
def test_another_request_is_refused_with_its_place(change, problem, web):
    answer = score(web, **change)
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "E-CONFIG"
    assert problem in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 400),
        (b"[" * 4000, 400),
        (b'{"format": 1, "format": 1, "rows": []}', 400),
        (b'"' + b"x" * 6000 + b'"', 413),
    ],
)
def test_a_body_is_strict_json_and_not_too_large(local, body, status):
    with web_of(*local, limits=Limits(bytes=5000)) as client:
        for path in ("/v1/score", "/get_reward"):
            answer = client.post(path, content=body, headers=JSON_TYPE)
            assert (answer.status_code, fields_of(answer)) == (status, FIELDS)


def test_other_paths_and_methods_are_refused(web):
    assert web.get("/nothing").json()["error"]["message"] == "Not Found"
    assert web.get("/get_reward").status_code == 405


ROW = {"id": "a", "prompt": "?", "completion": "7", "completion_ids": [1], "columns": {"x": 1}}
ASKED = {
    "/v1/score": ({"format": 1, "rows": [ROW]}, quiver.Answer),
    "/get_reward": (QUERY, openrlhf.Answer),
}


@pytest.mark.parametrize("path", ASKED)
def test_every_body_is_answered_as_described(path, recipe):
    config = Config(functions=[{"use": f"{recipe.with_name('mine.py')}:words"}])
    request, answer_type = ASKED[path]
    dice, statuses = random.Random(0), set()
    with open_scorers(config) as scorers, web_of(config, scorers) as web:
        for _ in range(300):
            answer = web.post(path, json=swapped(request, dice))
            statuses.add(answer.status_code)
            if answer.status_code == 200:
                answer_type.model_validate(read_json(answer.content), strict=True)
            else:
                assert fields_of(answer) == FIELDS
        assert web.post(path, json=request).status_code == 200
    described = {int(status) for status in web.app.openapi()["paths"][path]["post"]["responses"]}
    assert 422 in statuses and statuses <= {200, 422} & described


# -- together


def rows(*ids: str, column: str = "answer") -> list[Row]:
    return [Row(name, "?", name, {column: name}) for name in ids]


def score_by_length(batch: list[Row]) -> list[Scored]:
    if batch[0].id == "bad":
        raise ConfigError("function x", "no")
    return [Scored(float(len(row.completion)), None, {}, {}) for row in batch]


def batched(requests, limits: Limits, score=score_by_length) -> list:
    """The answers of a batcher to requests that come together."""

    async def ask():
        batcher = Batcher(score, limits)
        work = asyncio.create_task(batcher.work())
        answers = await asyncio.gather(*map(batcher.score, requests), return_exceptions=True)
        work.cancel()
        return answers

    return asyncio.run(ask())


def test_rows_of_requests_that_come_together_are_scored_together():
    batches = []

    def noted(batch):
        batches.append([row.id for row in batch])
        return score_by_length(batch)

    requests = [rows("a", "bb"), rows("c", column="other"), rows("ddd"), rows("e", "f", "g")]
    answers = batched(requests, Limits(rows=4, wait=0.05), noted)
    rewards = [[scored.reward for scored in answer] for answer in answers]
    assert rewards == [[1.0, 2.0], [1.0], [3.0], [1.0, 1.0, 1.0]]
    assert batches == [["a", "bb", "ddd"], ["c"], ["e", "f", "g"]]


def test_a_batch_that_fails_fails_its_requests_alone():
    bad, good = batched([rows("bad"), rows("good")], Limits(rows=1, wait=0))
    assert isinstance(bad, ConfigError) and good == score_by_length(rows("good"))


def test_more_rows_than_can_wait_are_refused_for_now(local):
    (refused,) = batched([rows("a", "b", "c")], Limits(queued=2))
    assert isinstance(refused, BusyError)
    with web_of(*local, limits=Limits(queued=0)) as client:
        answer = score(client)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "E-BUSY"


# -- connections


@contextmanager
def served(local, token: str = "", **limits):
    """The address of a server in a thread, with these limits."""
    server = make_server(make_app(*local, token=token, limits=Limits(**limits)))
    with listen("127.0.0.1", 0, "") as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def is_healthy(address) -> bool:
    return httpx.get(f"http://{address[0]}:{address[1]}/health", timeout=60).status_code == 200


def read_to_the_end(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    connection.settimeout(60)
    answer = b""
    try:
        while chunk := connection.recv(65536):
            answer += chunk
    except ConnectionError:
        pass
    return answer


HALF = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-half: "
REFUSED = b"POST /get_reward HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half of its headers"])
def test_a_client_that_sends_no_whole_request_is_let_go(local, sent):
    assert 1 <= DEFAULT.header_seconds <= 10
    with served(local, header_seconds=0.5) as address, ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(50)]
        for connection in connections:
            connection.sendall(sent)
        assert is_healthy(address)
        assert [read_to_the_end(connection) for connection in connections] == [b""] * 50


@pytest.mark.parametrize("start", [HALF, REFUSED], ids=["headers", "the body of a refused request"])
def test_a_client_that_sends_byte_after_byte_for_ever_is_let_go(local, start, monkeypatch):
    monkeypatch.setattr("quiver.deployments.reward_server.GRACE_SECONDS", 0)
    limits = {"header_seconds": 0.5, "body_seconds": 0.5}
    with served(local, token=CANARY, **limits) as address:
        with socket.create_connection(address) as connection:
            connection.sendall(start)
            with pytest.raises(ConnectionError):
                for _ in range(6000):
                    connection.sendall(b"x")
                    time.sleep(0.01)
        assert is_healthy(address)


def test_a_request_that_comes_in_pieces_and_a_kept_connection_are_served(local):
    """The clock of headers stops when they are there, and starts anew for the next request."""
    request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with (
        served(local, header_seconds=3.0) as address,
        socket.create_connection(address) as connection,
    ):
        connection.settimeout(60)
        for _ in range(3):
            for piece in (request[:9], request[9:30], request[30:]):
                connection.sendall(piece)
                time.sleep(0.02)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(HALF)
        assert read_to_the_end(connection) == b""


def test_large_headers_are_refused_unread(local):
    """51 MB of them were taken in before the token was looked at."""
    with served(local, token=CANARY) as address, socket.create_connection(address) as connection:
        connection.sendall(HALF)
        num_sent = 0
        with pytest.raises(ConnectionError):
            while num_sent < 51_000_000:
                connection.sendall(b"x" * 65536)
                num_sent += 65536
                time.sleep(0.001)
        assert num_sent < 16_000_000, "but for what the system's buffers hold"


def test_too_many_headers_are_refused(web):
    def status(count: int) -> int:
        return web.get("/health", headers={f"x-{n}": "1" for n in range(count)}).status_code

    assert (status(50), status(150)) == (200, 431)


def test_a_connection_too_many_is_told_to_come_again(local):
    with served(local, connections=3) as address:
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(socket.create_connection(address))
            with socket.create_connection(address) as fourth:
                answer = read_to_the_end(fourth)
            assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-a")
        deadline = time.monotonic() + 60
        while not is_healthy(address):  # until it has seen that they are gone
            assert time.monotonic() < deadline
