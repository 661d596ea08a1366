"""Scoring over HTTP against real loopback servers that misbehave: every fault is a row's error or a
typed stop, never a number."""

import asyncio
import datetime
import decimal
import email.utils
import gzip
import itertools
import json
import logging
import random
import ssl
import subprocess
import threading
import time
from collections import Counter

import pytest

from quiver.schemas.errors import RemoteError, ResourceError
from quiver.stages.reward.scoring import Part
from quiver.stages.reward.servers.config import ServerConfig, fingerprint
from quiver.stages.reward.servers.scorer import ServerScorer
from tests.stages.reward.fake_server import FakeServer, Flood, reply, scored
from tests.stages.reward.test_dialects import mutated

CANARY = "sk-canary-5f1d"
JUDGE = {"dialect": "openai-judge", "model": "m", "range": (0, 10)}


def good(asked):
    return reply(scored(asked))


def scorer(*urls, notice=lambda *_: None, **options) -> ServerScorer:
    quick = {"backoff_seconds": 0.01, "read_seconds": 2, "total_seconds": 6, "retries": 2}
    section = {"dialect": "quiver", "urls": urls, "breaker_seconds": 0.05, **quick, **options}
    return ServerScorer(ServerConfig(**section), notice)


def batch(count: int, **columns) -> dict[str, list]:
    return {
        "prompts": [f"{at} + 0 = " for at in range(count)],
        "completions": [str(at) for at in range(count)],
        "completion_ids": [[at] for at in range(count)],
        "finish_reason": ["stop"] * count,
        "rollout_ids": [f"r{at}" for at in range(count)],
        **columns,
    }


# -- without a fault


@pytest.mark.parametrize("dialect", ["openrlhf", "quiver"])
def test_one_response_too_many_shifts_no_answer(dialect):
    """Some proxies send the answer to a retried request twice. On a kept connection each request
    after it would be given the one before."""
    answers = {
        "openrlhf": lambda body: {"rewards": [float(text.split()[-1]) for text in body["query"]]},
        "quiver": lambda body: {
            "format": 1,
            "rows": [{"id": r["id"], "reward": float(r["completion"])} for r in body["rows"]],
        },
    }

    def behave(asked):
        answer = reply(answers[dialect](asked.body))
        return answer * 2 if asked.number % 3 == 1 else answer

    options = {"batch_rows": 1, "concurrency": 1, "breaker_failures": 100}
    with FakeServer(behave) as server:
        parts = scorer(server.url, dialect=dialect, **options).score(batch(16, answer=["x"] * 16))
    assert parts == [Part(float(at)) for at in range(16)]


def test_each_row_gets_its_own_number():
    def double(asked):
        rows = [{"id": r["id"], "reward": 2.0 * int(r["completion"])} for r in asked.body["rows"]]
        return reply({"format": 1, "rows": rows[::-1]})

    with FakeServer(double) as server:
        client = scorer(server.url, batch_rows=3, concurrency=4)
        for _ in range(2):  # each call has a loop of its own
            parts = client.score(batch(20, answer=list(range(20))))
            assert parts == [Part(2.0 * at) for at in range(20)]
        assert client.seconds > 0
    assert sorted(len(asked.body["rows"]) for asked in server.asked) == [2] * 2 + [3] * 12
    sent = server.asked[0]
    assert sent.path == "/v1/score" and sent.headers["accept-encoding"] == "identity"
    assert "authorization" not in sent.headers
    assert sent.body["rows"][0]["columns"] == {"answer": int(sent.body["rows"][0]["completion"])}


def test_cells_without_json_are_left_out_and_named_once(caplog):
    nan = float("nan")
    columns = {"picture": [b"7"] * 2, "price": [decimal.Decimal("7.5")] * 2, "rate": [nan, 0.5]}
    columns |= {"answer": [7, 8], "day": [datetime.date(2024, 1, 2)] * 2, "noted": [None, None]}
    columns["nested"] = [{"deep": [{"rate": nan}]}] * 2
    with FakeServer(good) as server:
        client = scorer(server.url)
        for _ in range(2):
            assert client.score(batch(2, **columns)) == [Part(0.5)] * 2
    sent = {row["id"]: row["columns"] for asked in server.asked for row in asked.body["rows"]}
    plain = {"day": "2024-01-02", "noted": None}
    assert sent == {"r0": {"answer": 7, **plain}, "r1": {"answer": 8, "rate": 0.5, **plain}}
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        "reward server quiver: cells of these columns are not sent: nested (NaN and infinite "
        "numbers have no JSON), picture (bytes has no JSON), price (Decimal has no JSON), rate (NaN "
        "and infinite numbers have no JSON); name the columns to send in reward.servers.columns"
    )


def test_a_row_that_is_refused_for_a_cell_without_json_fails_alone():
    """Whatever stands beside it: a retry asks for this row alone."""

    def behave(asked):
        lack = any("rate" not in row["columns"] for row in asked.body["rows"])
        return reply({"error": "needs rate"}, 422) if lack else good(asked)

    nan = float("nan")
    with FakeServer(behave) as server:
        client = scorer(server.url)
        parts = client.score(batch(4, rate=[nan, 0.5, nan, 1.0]))
        assert [part.value for part in parts] == [None, 0.5, None, 0.5]
        assert "422" in parts[0].error and parts[0] == parts[2]
        assert client.score(batch(1, rate=[nan])) == parts[:1]
    assert len(server.asked) == 3
    with FakeServer(behave) as server, pytest.raises(RemoteError, match="422"):
        scorer(server.url).score(batch(2, answer=[1, 2]))


def test_a_rubric_holds_fields_and_names_of_several_words():
    """Of objects, of JSON text as a CSV file has it, and of cells that are neither."""
    cells = [{"ground_truth": "7"}, '{"ground_truth": 8}', "N/A", None]
    columns = {"reward_model": cells, "right-one": ["a"] * 4, "right one": ["b"] * 4}
    rubric = '{reward_model.ground_truth}|{right-one}|{right one}|{"score": 5}|{{a.b}}'
    message = {"content": "Score: 5"}
    answer = reply({"choices": [{"message": message, "finish_reason": "stop"}]})
    with FakeServer(lambda _: answer) as server:
        judge = scorer(server.url, concurrency=1, **JUDGE, rubric=rubric)
        judge.require([*columns])
        assert judge.score(batch(4, **columns)) == [Part(5.0, extra='{"answer": "Score: 5"}')] * 4
    sent = [asked.body["messages"][0]["content"] for asked in server.asked]
    rest = '|a|b|{"score": 5}|{a.b}'
    assert sent == [f"{truth}{rest}" for truth in ("7", "8", "null", "null")]


NAMED = [
    (
        "columns",
        {"columns": ["prompt_text"]},
        lambda body: body["rows"][0]["columns"]["prompt_text"],
    ),
    ("rubric", {**JUDGE, "rubric": "{prompt_text}"}, lambda body: body["messages"][0]["content"]),
    ("label", {"dialect": "openrlhf", "label": "prompt_text"}, lambda body: body["labels"][0]),
]


@pytest.mark.parametrize(("key", "options", "read"), NAMED, ids=["quiver", "judge", "openrlhf"])
def test_a_named_column_is_sent_or_is_the_row_s_error(key, options, read):
    with FakeServer(good) as server:
        client = scorer(server.url, retries=0, **options)
        client.require(["answer"])
        client.score(batch(1, prompt_text=["<user>0 + 0 = "], answer=[0]))
        (part,) = client.score(batch(1, prompt_text=[b"7"], answer=[0]))
    assert [read(asked.body) for asked in server.asked] == ["<user>0 + 0 = "]
    assert part == Part(
        error="column prompt_text cannot be sent: bytes has no JSON; leave it out of "
        f"reward.servers.{key}, or make it text or a number in the rows"
    )


@pytest.mark.parametrize(
    "cell", [float("nan"), "half \ud800", object()], ids=["nan", "half a character", "object"]
)
def test_a_cell_that_json_cannot_hold_costs_its_row_alone(cell):
    with FakeServer(good) as server:
        parts = scorer(server.url, columns=["answer"]).score(batch(4, answer=[1, cell, 3, 4]))
    assert [part.value for part in parts] == [0.5, None, 0.5, 0.5]
    assert "cannot be sent" in parts[1].error


def test_every_dialect_over_the_wire(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", CANARY)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    answers = {
        "/get_reward": lambda body: {"rewards": [0.5] * len(body["query"])},
        "/mine": lambda body: {"rewards": [0.5] * len(body["query"])},
        "/classify": lambda body: {
            "data": [{"index": at, "probs": [0.5]} for at in range(len(body.get("input", "m")))]
        },
        "/score": lambda body: {
            "data": [{"index": at, "score": 0.5} for at in range(len(body["text_1"]))]
        },
        "/v1/chat/completions": lambda body: {
            "choices": [{"message": {"content": "Score: 5"}, "finish_reason": "stop"}]
        },
    }
    chats = batch(2, prompts=[[{"role": "user", "content": "hi"}]] * 2)
    with FakeServer(lambda asked: reply(answers[asked.path](asked.body))) as server:
        for path, options, rows in (
            ("", {"dialect": "openrlhf"}, batch(2)),
            ("/mine", {"dialect": "openrlhf"}, batch(1)),
            ("", {"dialect": "vllm-classify"}, batch(3)),
            ("", {"dialect": "vllm-classify"}, chats),
            ("", {"dialect": "vllm-score"}, batch(3)),
            ("", {**JUDGE, "rescale": True, "token": "env:REWARD_KEY"}, batch(3)),
        ):
            parts = scorer(server.url + path, **options).score(rows)
            assert {part.value for part in parts} == {0.5}, (path, options)
    counts = Counter((asked.path, asked.headers.get("authorization")) for asked in server.asked)
    assert counts == {
        ("/get_reward", None): 1,
        ("/mine", None): 1,
        ("/classify", None): 1 + 2,
        ("/score", None): 1,
        ("/v1/chat/completions", f"Bearer {CANARY}"): 3,
    }


def test_a_repetition_has_the_same_key():
    with FakeServer(lambda asked: good(asked) if asked.number else reply({}, 500)) as server:
        client = scorer(server.url, batch_rows=1, concurrency=1)
        client.score(batch(2))
        client.score(batch(1, completions=["another"]))
        scorer(server.url, batch_rows=1, revision="2").score(batch(1))
    keys = [asked.headers["idempotency-key"] for asked in server.asked]
    assert keys[0] == keys[1] and len(set(keys)) == 4
    assert server.asked[-1].body == server.asked[0].body, "what another model behind it is asked"


# -- faults that may pass


async def silence(asked):
    await asyncio.sleep(30)


async def trickle(asked):
    async def drops():
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
        while True:
            yield b" "
            await asyncio.sleep(0.02)

    return drops()


async def endless_head(asked):
    async def lines():
        yield b"HTTP/1.1 200 OK\r\n"
        for number in itertools.count():
            yield f"X-{number}: {'x' * 1000}\r\n".encode()

    return lines()


FAULTS = {
    "500": lambda asked: reply({"detail": "boom"}, 500),
    "503 and a date": lambda asked: reply(
        b"later", 503, Retry_After=email.utils.formatdate(time.time() - 5, usegmt=True)
    ),
    "429 and nonsense": lambda asked: reply(b"slow down", 429, Retry_After="soon"),
    "408": lambda asked: reply(b"", 408),
    "reset": lambda asked: None,
    "reset in the body": lambda asked: iter([good(asked)[:-5]]),
    "silence": silence,
    "trickle": trickle,
    "endless head": endless_head,
    "not http": lambda asked: iter([b"SSH-2.0-OpenSSH_9.6\r\n"]),
    "204": lambda asked: b"HTTP/1.1 204 No Content\r\n\r\n",
    "html": lambda asked: reply(b"<html><h1>Bad gateway</h1></html>"),
    "another id": lambda asked: reply(json.dumps(scored(asked)).replace('"r', '"q').encode()),
    "gzip": lambda asked: reply(gzip.compress(bytes(10_000_000)), Content_Encoding="gzip"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_no_row_if_it_passes_and_is_the_rows_error_if_it_stays(fault):
    with FakeServer(lambda asked: (good if asked.number else FAULTS[fault])(asked)) as server:
        assert scorer(server.url, read_seconds=0.3).score(batch(3)) == [Part(0.5)] * 3
    assert len(server.asked) == 2
    options = {"read_seconds": 0.2, "retries": 1, "total_seconds": 1, "breaker_failures": 1}
    with FakeServer(FAULTS[fault]) as server:
        parts = scorer(server.url, **options).score(batch(3))
    assert [part.value for part in parts] == [None] * 3
    assert all(part.error and part.error.isprintable() and len(part.error) < 400 for part in parts)


def test_wounded_answers_down_to_the_status_line_are_named():
    dice = random.Random(3)
    whole = reply({"format": 1, "rows": [{"id": "r0", "reward": 0.5}]})
    parts = []
    for raw in [mutated(whole, dice) for _ in range(80)]:
        with FakeServer(lambda asked, raw=raw: iter([raw])) as server:
            client = scorer(server.url, retries=0, read_seconds=0.3, range=(0, 1))
            try:
                parts += client.score(batch(1))
            except RemoteError as error:
                parts.append(Part(error=str(error)))
    assert len(parts) == 80
    for part in parts:
        assert (part.value is None) != (part.error is None) and 0 <= (part.value or 0) <= 1


@pytest.mark.parametrize(
    ("flood", "problem"),
    [
        (Flood(b"[" * 2**16), "more than 1000000 bytes"),
        (Flood(b"[" * 2**16, 2**19), "is not JSON: it is nested more than 100 levels deep"),
        (Flood(b" ", 1000, seconds_between=0.05), "no whole answer within 1 s"),
        (Flood(b"10000\r\n" + b" " * 2**16 + b"\r\n", Transfer_Encoding="chunked"), "more than"),
    ],
    ids=["large", "deep", "slow", "endless"],
)
def test_a_flood_is_read_to_the_limits_only(flood, problem):
    with FakeServer(flood) as server:
        options = {"max_bytes": 1_000_000, "read_seconds": 1 if flood.seconds_between else 30}
        (part,) = scorer(server.url, retries=0, total_seconds=30, **options).score(batch(1))
    assert problem in part.error and flood.bytes_sent < 50_000_000


def test_a_host_that_asks_for_time_is_given_it_at_the_cost_of_no_retry():
    """Good answers to other requests meanwhile do not shorten the wait."""
    times = {"r0": [], "r1": []}

    async def busy(asked):
        row = asked.body["rows"][0]["id"]
        times[row].append(time.monotonic())
        await asyncio.sleep(0.3 if row == "r1" else 0)
        is_busy = row == "r0" and len(times[row]) == 1
        return reply(b"", 429, Retry_After="1") if is_busy else good(asked)

    with FakeServer(busy) as server:
        assert scorer(server.url, batch_rows=1, retries=0).score(batch(2)) == [Part(0.5)] * 2
    assert times["r0"][1] - times["r0"][0] >= 1


def test_retry_after_beyond_the_time_allowed_ends_the_waiting():
    with FakeServer(lambda asked: reply(b"", 429, Retry_After="86400")) as server:
        parts = scorer(server.url, total_seconds=60).score(batch(40))
    assert all("answered 429" in part.error or "no host" in part.error for part in parts)
    assert len(server.asked) <= 3


@pytest.mark.parametrize(
    "answer", [reply(b"", 500), reply(b"too long", 400), reply(b"<html>"), None], ids=str
)
def test_a_row_that_spoils_its_request_is_found(answer):
    def spoiled(asked):
        return answer if "r5" in [row["id"] for row in asked.body["rows"]] else good(asked)

    with FakeServer(spoiled) as server:
        parts = scorer(server.url, retries=0).score(batch(16))
    bad = [at for at, part in enumerate(parts) if part.error]
    assert bad == ([5] if answer else list(range(16))), "a reset says nothing of the rows"
    assert all(part == Part(0.5) for at, part in enumerate(parts) if at not in bad)


# -- several hosts


def test_a_dead_host_is_left_alone_and_costs_nothing():
    options = {"batch_rows": 1, "concurrency": 4, "breaker_failures": 3, "breaker_seconds": 60}
    with FakeServer(lambda asked: reply(b"", 500)) as dead, FakeServer(good) as alive:
        client = scorer(dead.url, alive.url, **options)
        assert client.score(batch(100)) == [Part(0.5)] * 100
        assert client.score(batch(20)) == [Part(0.5)] * 20
    assert 3 <= len(dead.asked) <= 3 + 4  # those under way when the third failed


def test_a_host_that_rested_is_tried_again_by_one_request():
    is_down = True
    options = {"concurrency": 8, "breaker_failures": 2, "breaker_seconds": 0.2, "retries": 1}
    with FakeServer(lambda asked: reply(b"", 500) if is_down else good(asked)) as server:
        client = scorer(server.url, batch_rows=1, **options)
        assert all(part.error for part in client.score(batch(8)))
        num_before = len(server.asked)
        is_down = False
        time.sleep(0.25)
        assert client.score(batch(8)) == [Part(0.5)] * 8
    assert len(server.asked) - num_before == 8


def test_a_host_that_failed_just_too_often_is_tried_again_by_one_request():
    """Though all could ask it, now that its rest is over."""
    options = {"breaker_failures": 2, "breaker_seconds": 60, "retries": 1, "concurrency": 8}
    with FakeServer(lambda asked: reply(b"", 500)) as server:
        client = scorer(server.url, batch_rows=1, **options)
        client.score(batch(1))
        (host,) = client._transport._hosts
        assert (host.failures, len(server.asked)) == (2, 2)
        host.rest_until = 0.0
        assert all(part.error for part in client.score(batch(8)))
        assert len(server.asked) == 3


def test_a_host_that_refuses_a_row_works(caplog):
    """Its failures before and after that are not in a row."""
    statuses = [500, 400, 500, 200]

    def answer(asked):
        status = statuses.pop(0)
        return good(asked) if status == 200 else reply(b"", status)

    options = {"batch_rows": 1, "concurrency": 1, "breaker_failures": 2, "breaker_seconds": 60}
    with FakeServer(answer) as server:
        refused, answered = scorer(server.url, **options).score(batch(2))
    assert "400" in refused.error and answered == Part(0.5)
    assert "rests" not in caplog.text


def test_no_host_at_all_is_an_error_a_row():
    with FakeServer(good) as server:
        url = server.url
    parts = scorer(url, retries=1).score(batch(3))
    assert [part.value for part in parts] == [None] * 3 and "ConnectError" in parts[0].error


# -- when to ask, and when to end


def test_the_rate_is_kept():
    times = []

    def note(asked):
        times.append(time.monotonic())
        return good(asked)

    with FakeServer(note) as server:
        scorer(server.url, batch_rows=1, requests_per_second=50).score(batch(11))
    assert max(times) - min(times) >= 0.18


def test_waiting_for_the_rate_takes_no_time_from_a_retry():
    """40 requests wait longer than one of them may take."""

    def busy_at_first(asked):
        key = asked.headers["idempotency-key"]
        is_new = [each.headers["idempotency-key"] for each in server.asked].count(key) == 1
        return reply({}, 503) if is_new else good(asked)

    options = {"batch_rows": 1, "breaker_failures": 100, "total_seconds": 0.4}
    with FakeServer(busy_at_first) as server:
        client = scorer(server.url, requests_per_second=40, **options)
        assert client.score(batch(20)) == [Part(0.5)] * 20
    assert len(server.asked) == 40


def test_a_request_whose_time_is_over_is_not_halved():
    """The first cause stays, not that no time was left."""

    async def slow(asked):
        await asyncio.sleep(0.3)
        return reply({"rewards": []})

    options = {"dialect": "openrlhf", "total_seconds": 0.35, "retries": 0}
    with FakeServer(slow) as server:
        parts = scorer(server.url, **options).score(batch(4))
    errors = {part.error for part in parts}
    assert len(server.asked) == 2 and not any("0 s" in error for error in errors), errors


def test_it_ends_when_the_notice_says_that_too_many_rows_failed():
    failures = []

    def notice(*failure):
        failures.append(failure)
        raise ArithmeticError

    with FakeServer(lambda asked: reply(b"too long", 400)) as server:
        client = scorer(server.url, batch_rows=1, concurrency=2, notice=notice)
        with pytest.raises(ArithmeticError):
            client.score(batch(50))
    scorer_name, row, error = failures[0]
    assert scorer_name == "quiver" and row in ("r0", "r1") and "answered 400: too long" in error
    assert len(server.asked) < 10


def test_it_can_be_closed_from_another_thread():
    with FakeServer(silence) as server:
        client = scorer(server.url, read_seconds=3600, total_seconds=3600)
        threading.Timer(0.3, client.close).start()
        for _ in range(2):
            with pytest.raises(ResourceError, match="closed"):
                client.score(batch(5))


@pytest.mark.parametrize(
    ("status", "advice"), [(401, "token"), (404, "path"), (422, "section"), (501, "section")]
)
def test_a_refusal_of_everything_ends_scoring_at_once(status, advice):
    with FakeServer(lambda asked: reply({"detail": "no"}, status)) as server:
        client = scorer(server.url, batch_rows=1, concurrency=2)
        with pytest.raises(RemoteError, match=f"answered {status}") as caught:
            client.score(batch(50))
    assert caught.value.exit_code == 6 and advice in caught.value.next
    assert len(server.asked) <= 2


@pytest.mark.parametrize("status", [300, 302, 304, 308])
def test_a_redirect_is_never_followed(status):
    with FakeServer(good) as private:
        for target in (private.url, "file:///etc/passwd"):
            with FakeServer(lambda asked, to=target: reply(b"", status, Location=to)) as server:
                with pytest.raises(RemoteError, match="redirect is not followed"):
                    scorer(server.url).score(batch(1))
                assert len(server.asked) == 1
    assert private.asked == []


def test_a_certificate_without_a_known_issuer_is_refused(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate")

    async def ask():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server = await asyncio.start_server(
            lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context
        )
        client = scorer(f"https://localhost:{server.sockets[0].getsockname()[1]}")
        await asyncio.to_thread(client.score, batch(1))

    with pytest.raises(RemoteError, match="certificate"):
        asyncio.run(ask())


def test_a_token_that_the_server_repeats_is_shown_nowhere(monkeypatch, caplog):
    monkeypatch.setenv("REWARD_KEY", CANARY)
    caplog.set_level(logging.DEBUG)
    echo = {"id": "r0", "reward": 0.5, "extra": {CANARY: f"Bearer {CANARY}"}}
    answers = [
        reply({"format": 1, "rows": [echo]}),
        reply({"format": 1, "rows": [{"id": "r0", "reward": None, "error": f"is {CANARY}?"}]}),
        reply(json.dumps({"format": 1, "rows": [echo]}).replace("canary", "c\\u0061nary").encode()),
        reply(f"<html>{CANARY}".encode()),
        reply({"error": {"message": f"{CANARY}" * 500}}, 400),
        reply(CANARY, 401),
        reply(b"", 302, Location=f"http://evil.example/{CANARY}"),
        reply(b"", Content_Encoding=CANARY),
        f"HTTP/1.1 200 OK\r\n{CANARY}\r\n\r\n".encode(),
    ]
    texts = []
    for answer in answers:
        with FakeServer(lambda asked, answer=answer: answer) as server:
            client = scorer(server.url, token="env:REWARD_KEY", retries=0)
            try:
                texts.append(repr(client.score(batch(1))))
            except RemoteError as error:
                texts.append(str(error))
            texts.append(repr([fingerprint(client.config), client.config, vars(client)]))
            assert server.asked[0].headers["authorization"] == f"Bearer {CANARY}"
    assert "***" in texts[0] and "***" in texts[8]
    assert [text for text in texts if CANARY in text] == []
    assert CANARY not in caplog.text
