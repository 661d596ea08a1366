"""A [reward] section behind HTTP: scored over loopback as it is locally, closed to strangers, never
confused by a body."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from quiver.deployments.batcher import Batcher, Limits, score_rows
from quiver.deployments.reward_server import listen, load, main, make_app, make_server
from quiver.schemas.errors import BusyError, ConfigError, SecurityError
from quiver.stages.common.servers import read_json
from quiver.stages.reward.servers.config import ServerConfig
from quiver.stages.reward.servers.dialects import openrlhf, quiver
from quiver.stages.reward.servers.dialects.rows import Row, Scored
from quiver.stages.reward.servers.scorer import ServerScorer
from quiver.stages.reward.stage import Config, open_scorers

CANARY = "sk-canary-5f1d"
MINE = """
def picky(completions, answer):
    for text in completions:
        if "boom" in text:
            raise ValueError("cannot score " + text)
    return [None if want is None else {"reward": float(want in text), "seen": text} for text, want in zip(completions, answer)]

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


@pytest.fixture
def web(local):
    """The application, asked without a socket."""
    with TestClient(
        make_app(*local), base_url="http://127.0.0.1", raise_server_exceptions=False
    ) as client:
        yield client


BATCH = {
    "prompts": [[{"role": "user", "content": "2 + 2?"}], "3 + 3 = ", "4 + 4 = ", "5 + 5 = "],
    "completions": ["it is 4", "boom 6", "eight é", "10"],
    "completion_ids": [[1, 2, 3], [4, 5], [6], [7]],
    "finish_reason": ["stop", "stop", "length", "stop"],
    "rollout_ids": ["a", "b", "c", "d"],
    "answer": ["4", "6", "8", None],
}


@pytest.mark.parametrize("dialect", ["quiver", "openrlhf"])
def test_scoring_over_http_is_scoring_locally(dialect, url, local):
    options = {} if dialect == "quiver" else {"label": "answer"}
    scorer = ServerScorer(ServerConfig(dialect=dialect, urls=[url], **options))
    scorer.require(["answer"])
    (own,) = local[1]
    here = own.score(BATCH)
    there = scorer.score(BATCH)
    assert [part[:2] for part in there] == [part[:2] for part in here]
    assert [part.value for part in here] == [1.0, None, 0.0, None]
    assert "cannot score boom" in here[1].error and here[3].error is None
    if dialect == "quiver":
        assert (
            json.loads(there[0].extra)["extra"]
            == {"picky": json.loads(here[0].extra)}
            == {"picky": {"seen": "it is 4"}}
        )


@pytest.mark.parametrize("keeps", [False, True])
def test_the_end_token_that_openrlhf_sends_is_no_part_of_the_answer(keeps):
    """Its client decodes with special tokens: every right answer was scored 0."""
    config = Config(functions=[{"use": "exact_match"}])
    endings = [
        "<|im_end|>",
        "</s>",
        "<|eot_id|>\n",
        "<end_of_turn><pad><pad>",
        "<｜end▁of▁sentence｜>",
        "",
    ]
    asked = {
        "query": [f"2 + 2? 4{ending}" for ending in endings] + ["2 + 2? <b>4</b>"],
        "prompts": ["2 + 2? "] * 7,
        "labels": ["4"] * 6 + ["<b>4</b>"],
    }
    with (
        open_scorers(config) as scorers,
        TestClient(
            make_app(config, scorers, keeps_end_tokens=keeps), base_url="http://127.0.0.1"
        ) as web,
    ):
        answer = web.post("/get_reward", json=asked).json()
    assert answer["rewards"] == ([0.0] * 5 + [1.0, 1.0] if keeps else [1.0] * 7)
    taken_off = answer["extra_logs"].get("end_tokens_taken_off")
    assert taken_off == (None if keeps else [1, 1, 1, 3, 1, 0, 0])


@pytest.mark.parametrize("body", [{"query": []}, {"query": [], "prompts": [], "labels": []}])
def test_an_empty_openrlhf_request_has_an_empty_answer(web, body):
    answer = web.post("/get_reward", json=body)
    assert answer.status_code == 200
    assert answer.json() == {"rewards": [], "scores": [], "extra_logs": {"error": []}}
    assert web.post("/get_reward", json={**body, "query": ["x"]}).status_code == 422


def test_health_and_a_description(url):
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "format": 1}
    described = httpx.get(f"{url}/openapi.json").json()
    assert set(described["paths"]) == {"/health", "/v1/score", "/get_reward"}


def test_the_whole_section_makes_the_reward(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    path = tmp_path / "recipe.toml"
    path.write_text(
        "[reward]\nreward_clip = [0.0, 1.5]\noverlong = { max_tokens = 20, cache = 8, weight = "
        "2.0 }\n"
        '[[reward.functions]]\nuse = "numeric"\nweight = 2.0\n[[reward.functions]]\nuse = '
        '"length"\narguments = { target = 14 }\n'
    )
    config = load(path)
    rows = [Row("x", "?", "it is 7", {"answer": 7}, [0] * tokens, "stop") for tokens in (3, 14, 25)]
    rows += [
        Row("x", "?", "it is 7", {"answer": "no number"}, [0] * 3),
        Row("x", "?", "it is 7", {"answer": 7}),
    ]
    with open_scorers(config) as scorers:
        found = score_rows(config, scorers, rows)
        with pytest.raises(ConfigError, match="needs answer"):
            score_rows(config, scorers, [Row("x", "?", "7", {"level": 1})])
    # numeric 1 · 2 + length, clipped to 1.5, plus 2 · overlong: 0, -1/4, -1
    assert [scored.reward for scored in found] == [1.5, 1.5 - 0.5, 1.5 - 2, None, None]
    assert found[2].parts == {"numeric": 1.0, "length": 0.0, "overlong": -1.0}
    assert found[3].error.startswith("numeric: ") and found[4].reward is None and found[4].error


def test_a_request_without_ids_is_told_every_reason_and_no_sum_leaves_float32(tmp_path):
    path, score = tmp_path / "recipe.toml", '[[reward.functions]]\nuse = "numeric"\nweight = {}\n'
    penalty = "[reward]\noverlong = { max_tokens = 2, cache = 1, weight = 3e38 }\n"
    path.write_text(penalty + score.format(-3e38))
    rows = [
        Row("x", "?", "it is 7", {"answer": 7}, [0] * 3),
        Row("x", "?", "it is 7", {"answer": "no number"}),
    ]
    with open_scorers(load(path)) as scorers:
        large, bare = score_rows(load(path), scorers, rows)
    assert large.reward is None and "is not finite as float32" in large.error
    assert "holds no number" in bare.error and "overlong counts completion_ids" in bare.error


def test_what_scores_must_be_what_the_recipe_pins(tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    path.write_text('[reward]\n[[reward.functions]]\nuse = "numeric"\nfingerprint = "quiver:0"\n')
    assert main([str(path), "--port", "0"]) == 2
    assert "fingerprint expected quiver:0, found quiver:2" in capsys.readouterr().err


def test_whole_groups_are_not_served(tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    path.write_text('[reward]\n[[reward.functions]]\nuse = "numeric"\nscope = "group"\n')
    assert main([str(path), "--port", "0"]) == 2
    assert "numeric: has scope group" in capsys.readouterr().err


# -- who may ask


def test_a_token_is_wanted_off_loopback(recipe, monkeypatch, capsys):
    for host in ("0.0.0.0", "::", "192.0.2.1", "scores.example", ""):
        with pytest.raises(SecurityError, match="token"):
            listen(host, 0, "")
    assert main([str(recipe), "--host", "0.0.0.0"]) == 10
    assert "E-SECURITY" in capsys.readouterr().err
    for token, code in ((CANARY, 2), ("env:REWARD_KEY", 2)):
        assert main([str(recipe), "--token", token]) == code
        assert CANARY not in capsys.readouterr().err
    monkeypatch.setenv("REWARD_KEY", CANARY)
    with listen("127.0.0.1", 0, "") as first, listen("0.0.0.0", 0, CANARY):
        assert (
            main([str(recipe), "--token", "env:REWARD_KEY", "--port", str(first.getsockname()[1])])
            == 2
        )
        assert "choose another port" in capsys.readouterr().err


def test_strangers_are_not_let_in(local):
    body = {"query": ["? 7"], "prompts": ["? "], "labels": ["7"]}
    with TestClient(make_app(*local, token=CANARY), base_url="http://scores.example") as client:
        assert client.get("/health").status_code == 200
        for headers in (
            {},
            {"Authorization": CANARY},
            {"Authorization": f"Bearer {CANARY}x"},
            {"Authorization": "Bearer "},
        ):
            refused = client.post("/get_reward", json=body, headers=headers)
            assert (
                refused.status_code == 401
                and CANARY not in refused.text
                and refused.headers["www-authenticate"] == "Bearer"
            )
            assert client.get("/openapi.json", headers=headers).status_code == 401
        good = client.post("/get_reward", json=body, headers={"Authorization": f"Bearer {CANARY}"})
        assert good.status_code == 200 and good.json()["rewards"] == [1.0]
        assert client.app.openapi()["components"]["securitySchemes"]


def test_without_a_token_no_web_page_gets_through(web):
    body = json.dumps({"query": ["? 7"], "prompts": ["? "], "labels": ["7"]})
    json_type = {"Content-Type": "application/json"}
    assert web.post("/get_reward", content=body, headers=json_type).status_code == 200
    for host in ("127.0.0.1:8700", "localhost", "[::1]:8700"):
        assert (
            web.post("/get_reward", content=body, headers={**json_type, "Host": host}).status_code
            == 200
        )
    for host in (
        "evil.example",
        "evil.example:8700",
        "127.0.0.1.evil.example",
        "",
        "127.0.0.1@evil.example",
    ):
        assert (
            web.post("/get_reward", content=body, headers={**json_type, "Host": host}).status_code
            == 403
        )
    assert (
        web.post("/get_reward", content=body, headers={"Content-Type": "text/plain"}).status_code
        == 422
    )


# -- what is asked


def score(web, **change):
    row = {"id": "a", "prompt": "?", "completion": "7", "columns": {"answer": "7"}}
    return web.post("/v1/score", json={"format": 1, "rows": [row], **change})


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": "1"},
        {"rows": []},
        {
            "rows": [
                {"id": "a", "prompt": "?", "completion": "7"},
                {"id": "a", "prompt": "?", "completion": "8"},
            ]
        },
        {"rows": [{"id": 1, "prompt": "?", "completion": "7"}]},
        {"rows": [{"id": "a", "prompt": "?", "completion": 7}]},
        {"rows": [{"id": "a", "prompt": [{"role": "user"}], "completion": "7"}]},
        {"rows": [{"id": "a", "prompt": "?", "completion": "7", "completion_ids": ["7"]}]},
        {"rows": [{"id": "a", "prompt": "?", "completion": "7", "columns": {"level": 1}}]},
        {"more": 1},
    ],
)
def test_another_request_is_refused_with_its_place(change, web):
    assert score(web).json()["rows"][0]["reward"] == 1.0
    answer = score(web, **change)
    assert (
        answer.status_code == 422
        and answer.json()["error"]["code"] == "E-CONFIG"
        and answer.json()["error"]["message"]
    )


def test_a_body_is_strict_json_and_not_too_large(local):
    app = make_app(*local, limits=Limits(bytes=5000))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for body, status in {
            b"": 422,
            b"{": 400,
            b"[" * 4000: 400,
            b'{"format": 1, "format": 1, "rows": []}': 400,
            b'{"prompt": "?", "response": "\\ud800"}': 400,
            b'{"prompt": "?", "response": "7", "label": NaN}': 400,
            b'"' + b"x" * 6000 + b'"': 413,
        }.items():
            for path in ("/v1/score", "/get_reward"):
                answer = client.post(
                    path, content=body, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code == status and set(answer.json()["error"]) == {
                    "code",
                    "object",
                    "message",
                    "next",
                }
        assert client.get("/nothing").json()["error"]["message"] == "Not Found"
        assert client.get("/get_reward").status_code == 405


ANSWERS = {"/v1/score": quiver.Answer, "/get_reward": openrlhf.Answer}
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def values(schema: dict, parts: dict) -> st.SearchStrategy:
    """JSON that a schema of the description allows; anything where it says nothing."""
    if "$ref" in schema:
        return values(parts[schema["$ref"].rpartition("/")[2]], parts)
    if "const" in schema:
        return st.just(schema["const"]) | ANYTHING
    if "anyOf" in schema:
        return st.one_of(*(values(each, parts) for each in schema["anyOf"]))
    if schema.get("type") == "object" and "properties" in schema:
        known = {name: values(each, parts) for name, each in schema["properties"].items()}
        needed = {name: known.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional=known)
    if schema.get("type") == "array":
        return st.lists(values(schema["items"], parts), max_size=3)
    kinds = {"string": st.text(max_size=8), "integer": st.integers(), "null": st.none()}
    return kinds.get(schema.get("type"), ANYTHING)


@pytest.mark.parametrize("path", ["/v1/score", "/get_reward"])
def test_whatever_comes_is_answered_by_the_description(path, recipe):
    config = Config(functions=[{"use": f"{recipe.with_name('mine.py')}:words"}])
    with (
        open_scorers(config) as scorers,
        TestClient(make_app(config, scorers), base_url="http://127.0.0.1") as web,
    ):
        ask_anything(web, path)


def ask_anything(web, path):
    described = web.app.openapi()
    post, parts = described["paths"][path]["post"], described["components"]["schemas"]
    body = values(post["requestBody"]["content"]["application/json"]["schema"], parts) | ANYTHING
    seen = set()

    @settings(
        max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(body)
    def ask(data):
        answer = web.post(path, json=data)
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 422), answer.text
        assert str(answer.status_code) in post["responses"] or answer.status_code == 200
        if answer.status_code == 200:
            ANSWERS[path].model_validate(read_json(answer.content), strict=True)
        else:
            assert set(answer.json()["error"]) == {"code", "object", "message", "next"}

    ask()
    assert {200, 422} <= seen


# -- together


def rows(*ids: str, column: str = "answer") -> list[Row]:
    return [Row(name, "?", name, {column: name}) for name in ids]


def said(row: Row) -> Scored:
    return Scored(float(len(row.completion)), None, {}, {})


def test_rows_of_requests_that_come_together_are_scored_together():
    batches = []

    def score_batch(batch):
        batches.append([row.id for row in batch])
        return [said(row) for row in batch]

    async def ask():
        batcher = Batcher(score_batch, Limits(rows=4, wait=0.05))
        work = asyncio.create_task(batcher.work())
        requests = [rows("a", "bb"), rows("c", column="other"), rows("ddd"), rows("e", "f", "g")]
        found = await asyncio.gather(*(batcher.score(request) for request in requests))
        work.cancel()
        return [[scored.reward for scored in each] for each in found]

    assert asyncio.run(ask()) == [[1.0, 2.0], [1.0], [3.0], [1.0, 1.0, 1.0]]
    assert batches == [["a", "bb", "ddd", "e"], ["c"], ["f", "g"]]


def test_a_batch_that_fails_fails_its_requests_alone():
    def score_batch(batch):
        if batch[0].id == "bad":
            raise ConfigError("function x", "no")
        return [said(row) for row in batch]

    async def ask():
        batcher = Batcher(score_batch, Limits(rows=1, wait=0))
        work = asyncio.create_task(batcher.work())
        found = await asyncio.gather(
            *(batcher.score(rows(name)) for name in ("bad", "good")), return_exceptions=True
        )
        work.cancel()
        return found

    bad, good = asyncio.run(ask())
    assert isinstance(bad, ConfigError) and good == [said(rows("good")[0])]


def test_more_rows_than_can_wait_are_refused_for_now(local):
    async def ask():
        batcher = Batcher(lambda batch: [said(row) for row in batch], Limits(queued=2))
        with pytest.raises(BusyError):
            await batcher.score(rows("a", "b", "c"))

    asyncio.run(ask())
    with TestClient(
        make_app(*local, limits=Limits(queued=0)), base_url="http://127.0.0.1"
    ) as client:
        answer = score(client)
    assert (
        answer.status_code == 503
        and answer.headers["retry-after"] == "1"
        and answer.json()["error"]["code"] == "E-BUSY"
    )


def test_many_clients_at_once_get_their_own_answers(url):
    def one(number):
        completions = [f"{number}:{at}" for at in range(20)]
        answers = [text if at % 2 else "no" for at, text in enumerate(completions)]
        batch = {
            **dict.fromkeys(("prompts", "finish_reason", "rollout_ids"), completions),
            "completions": completions,
        }
        scorer = ServerScorer(ServerConfig(dialect="quiver", urls=[url], batch_rows=3))
        return [
            part.value
            for part in scorer.score({**batch, "completion_ids": [[1]] * 20, "answer": answers})
        ]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [[0.0, 1.0] * 10] * 16


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


def what_comes(connection: socket.socket) -> bytes:
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
def test_who_sends_no_whole_request_is_let_go(local, sent):
    with served(local, header_seconds=0.5) as address, ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(50)]
        for connection in connections:
            connection.sendall(sent)
        assert is_healthy(address)
        assert [what_comes(connection) for connection in connections] == [b""] * 50


def test_a_server_lets_go_of_half_sent_headers_after_10_s_unless_told_otherwise(local):
    limits = make_app(*local, token="").state.limits
    assert 1 <= limits.header_seconds <= 10


@pytest.mark.parametrize("start", [HALF, REFUSED], ids=["headers", "the body of a refused request"])
def test_who_sends_byte_after_byte_for_ever_is_let_go(local, start, monkeypatch):
    monkeypatch.setattr("quiver.deployments.connections.GRACE_SECONDS", 0)
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
        assert what_comes(connection) == b""


def test_more_headers_than_anybody_needs_are_refused_unread(local):
    """51 MB of them were taken in before the token was looked at."""
    with served(local, token=CANARY) as address, socket.create_connection(address) as connection:
        connection.sendall(HALF)
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 51_000_000:
                connection.sendall(b"x" * 65536)
                sent += 65536
                time.sleep(0.001)
        assert sent < 16_000_000, "but for what the system's buffers hold"
        assert is_healthy(address)


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
                assert what_comes(fourth).startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-a")
        deadline = time.monotonic() + 60
        while not is_healthy(address):  # until it has seen that they are gone
            assert time.monotonic() < deadline
