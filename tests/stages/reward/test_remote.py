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
import subprocess
import threading
import time
import uuid
from collections import Counter

import pytest

from quiver.schemas.errors import RemoteError, ResourceError
from quiver.stages.reward.scoring import Part
from quiver.stages.reward.servers.config import ServerConfig, fingerprint
from quiver.stages.reward.servers.scorer import ServerScorer
from tests.stages.reward.fake_server import FakeServer, Flood, reply, scored
from tests.stages.reward.test_dialects import mutated

CANARY = "sk-canary-5f1d"


def scorer(*urls, dialect="quiver", notice=lambda *_: None, **options) -> ServerScorer:
    quick = {
        "backoff_seconds": 0.01,
        "read_seconds": 2,
        "total_seconds": 6,
        "retries": 2,
        "breaker_seconds": 0.05,
    }
    return ServerScorer(ServerConfig(dialect=dialect, urls=urls, **{**quick, **options}), notice)


def batch(count: int, **columns) -> dict[str, list]:
    return {
        "prompts": [f"{at} + 0 = " for at in range(count)],
        "completions": [str(at) for at in range(count)],
        "completion_ids": [[at] for at in range(count)],
        "finish_reason": ["stop"] * count,
        "rollout_ids": [f"r{at}" for at in range(count)],
        **columns,
    }


def first(behave, otherwise=lambda asked: reply(scored(asked))):
    """Misbehave for the first request, then be good."""
    return lambda asked: behave(asked) if asked.number == 0 else otherwise(asked)


# -- when all is well


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

    with FakeServer(behave) as server:
        client = scorer(
            server.url,
            dialect=dialect,
            batch_rows=1,
            concurrency=1,
            breaker_failures=100,
        )
        columns = {"answer": ["x"] * 16}
        parts = client.score(batch(16, **columns))
        assert [(part.value, part.error) for part in parts] == [(at, None) for at in range(16)]
        client.close()


def test_each_row_gets_its_own_number():
    def double(asked):
        rows = [
            {"id": row["id"], "reward": 2.0 * int(row["completion"])} for row in asked.body["rows"]
        ]
        return reply({"format": 1, "rows": rows[::-1]})

    with FakeServer(double) as server:
        client = scorer(server.url, batch_rows=3, concurrency=4)
        assert client.score(batch(20, answer=list(range(20)))) == [
            Part(2.0 * at) for at in range(20)
        ]
        assert client.seconds > 0
        client.close()
    assert sorted(len(asked.body["rows"]) for asked in server.asked) == [2, 3, 3, 3, 3, 3, 3]
    sent = server.asked[0]
    assert sent.path == "/v1/score" and sent.headers["accept-encoding"] == "identity"
    assert "authorization" not in sent.headers
    assert sent.body["rows"][0]["columns"] == {"answer": int(sent.body["rows"][0]["completion"])}


NAN = float("nan")
NO_JSON = {
    "picture": b"7",
    "price": decimal.Decimal("7.5"),
    "lasted": datetime.timedelta(7),
    "key": uuid.UUID(int=7),
    "rate": NAN,
    "most": float("inf"),
    "nested": {"deep": [{"rate": NAN}]},
}


def test_cells_without_json_are_left_out_and_named_once(caplog):
    """What nobody asked for by name costs no row its reward."""
    columns = {name: [cell, cell] for name, cell in NO_JSON.items()}
    columns |= {"answer": [7, 8], "day": [datetime.date(2024, 1, 2)] * 2, "noted": [None, None]}
    columns["rate"] = [NAN, 0.5]
    with FakeServer(lambda asked: reply(scored(asked))) as server:
        client = scorer(server.url)
        for _ in range(2):
            assert [part.error for part in client.score(batch(2, **columns))] == [None, None]
        client.close()
    sent = {row["id"]: row["columns"] for asked in server.asked for row in asked.body["rows"]}
    plain = {"day": "2024-01-02", "noted": None}
    assert sent == {"r0": {"answer": 7, **plain}, "r1": {"answer": 8, "rate": 0.5, **plain}}
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == (
        "reward server quiver: cells of these columns are not sent: key (UUID has no JSON), lasted "
        "(timedelta has no JSON), most (NaN and infinite numbers have no JSON), nested (NaN and "
        "infinite numbers have no JSON), picture (bytes has no JSON), price (Decimal has no JSON), "
        "rate (NaN and infinite numbers have no JSON); name the columns to send in "
        "reward.servers.columns"
    )


@pytest.mark.parametrize("name", NO_JSON)
@pytest.mark.parametrize(
    ("dialect", "key"),
    [("quiver", "columns"), ("openai-judge", "rubric"), ("openrlhf", "label")],
)
def test_a_named_column_without_json_is_the_row_s_error(dialect, key, name):
    named = {"columns": [name], "label": name, "rubric": f"{{{name}}}"}
    options = {"model": "m", "range": (0, 1)} if dialect == "openai-judge" else {}
    with FakeServer(lambda asked: reply(scored(asked))) as server:
        client = scorer(server.url, dialect=dialect, **{key: named[key]}, **options)
        (part,) = client.score(batch(1, **{name: [NO_JSON[name]]}))
        client.close()
    assert part.value is None
    assert part.error.startswith(f"column {name} cannot be sent: ")
    assert f"leave it out of reward.servers.{key}, or make it text or a number" in part.error
    assert server.asked == []


@pytest.mark.parametrize(
    ("dialect", "key", "read"),
    [
        ("quiver", "columns", lambda body: body["rows"][0]["columns"]["prompt_text"]),
        ("openai-judge", "rubric", lambda body: body["messages"][0]["content"]),
        ("openrlhf", "label", lambda body: body["labels"][0]),
    ],
)
def test_the_prompt_s_text_is_sent_where_it_is_named(dialect, key, read):
    named = {"columns": ["prompt_text", "prompt_ids"], "label": "prompt_text"}
    named["rubric"] = "{prompt_text}"
    options = {"model": "m", "range": (0, 1)} if dialect == "openai-judge" else {}
    with FakeServer(lambda asked: reply(scored(asked))) as server:
        client = scorer(server.url, dialect=dialect, retries=0, **{key: named[key]}, **options)
        client.require(["answer"])
        client.score(batch(1, prompt_text=["<user>0 + 0 = "], prompt_ids=[[1, 5]], answer=[0]))
        client.close()
    assert read(server.asked[0].body) == "<user>0 + 0 = "
    if dialect == "quiver":
        assert server.asked[0].body["rows"][0]["columns"]["prompt_ids"] == [1, 5]


def test_every_dialect_over_the_wire(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", CANARY)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    answers = {
        "/get_reward": lambda body: {"rewards": [len(query) for query in body["query"]]},
        "/classify": lambda body: {
            "data": [{"index": at, "probs": [0.5]} for at in range(len(body.get("input", "m")))]
        },
        "/score": lambda body: {
            "data": [{"index": at, "score": 0.5} for at in range(len(body["text_1"]))]
        },
        "/v1/chat/completions": lambda body: {
            "choices": [{"message": {"content": "Score: 5"}, "finish_reason": "stop"}]
        },
        "/mine": lambda body: {"rewards": [0.5]},
    }
    with FakeServer(lambda asked: reply(answers[asked.path](asked.body))) as server:
        for dialect, options in {
            "vllm-classify": {},
            "vllm-score": {},
            "openai-judge": {
                "model": "judge",
                "range": (0, 10),
                "rescale": True,
                "token": "env:REWARD_KEY",
            },
        }.items():
            values = [
                part.value
                for part in scorer(server.url, dialect=dialect, **options).score(batch(3))
            ]
            assert values == [0.5, 0.5, 0.5], dialect
        assert [part.value for part in scorer(server.url, dialect="openrlhf").score(batch(2))] == [
            9.0,
            9.0,
        ]
        assert [
            part.value for part in scorer(server.url + "/mine", dialect="openrlhf").score(batch(1))
        ] == [0.5]
        conversations = batch(2, prompts=[[{"role": "user", "content": "hi"}]] * 2)
        assert [
            part.value for part in scorer(server.url, dialect="vllm-classify").score(conversations)
        ] == [0.5, 0.5]
    counts = Counter(asked.path for asked in server.asked)
    assert counts == {
        "/classify": 3,
        "/score": 1,
        "/v1/chat/completions": 3,
        "/get_reward": 1,
        "/mine": 1,
    }
    assert {
        asked.headers.get("authorization")
        for asked in server.asked
        if asked.path == "/v1/chat/completions"
    } == {f"Bearer {CANARY}"}


def test_it_scores_again_in_another_loop():
    with FakeServer(lambda asked: reply(scored(asked))) as server:
        client = scorer(server.url)
        assert client.score(batch(2)) == client.score(batch(2)) == [Part(0.5)] * 2


def test_a_repetition_is_known_by_its_key():
    with FakeServer(
        lambda asked: reply(scored(asked)) if asked.number else reply({}, 500)
    ) as server:
        client = scorer(server.url, batch_rows=1, concurrency=1)
        client.score(batch(2))
        client.score(batch(1, completions=["another"]))
    keys = [asked.headers["idempotency-key"] for asked in server.asked]
    assert keys[0] == keys[1] and len(set(keys)) == 3


# -- what may pass


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


def shortened(asked):
    return reply({"format": 1, "rows": scored(asked)["rows"][1:]})


FAULTS = {
    "500": lambda asked: reply({"detail": "boom"}, 500),
    "503 and a date": lambda asked: reply(
        b"later", 503, Retry_After=email.utils.formatdate(time.time() - 5, usegmt=True)
    ),
    "429": lambda asked: reply(b"slow down", 429, Retry_After="0"),
    "429 and nonsense": lambda asked: reply(b"slow down", 429, Retry_After="soon"),
    "408": lambda asked: reply(b"", 408),
    "reset": lambda asked: None,
    "reset in the body": lambda asked: iter([reply(scored(asked))[:-5]]),
    "silence": silence,
    "trickle": trickle,
    "endless head": endless_head,
    "not http": lambda asked: iter([b"SSH-2.0-OpenSSH_9.6\r\n"]),
    "html": lambda asked: reply(b"<html><h1>Bad gateway</h1></html>"),
    "nothing": lambda asked: reply(b""),
    "204": lambda asked: b"HTTP/1.1 204 No Content\r\n\r\n",
    "cut json": lambda asked: reply(json.dumps(scored(asked)).encode()[:-3]),
    "nan": lambda asked: reply(json.dumps(scored(asked, float("nan"))).encode()),
    "1e400": lambda asked: reply(json.dumps(scored(asked)).replace("0.5", "1e400").encode()),
    "nesting": lambda asked: reply(b"[" * 100_000),
    "twice": lambda asked: reply(
        json.dumps(scored(asked)).replace("0.5", '0.5, "reward": 1.0').encode()
    ),
    "wrong length": shortened,
    "another id": lambda asked: reply(json.dumps(scored(asked)).replace('"r', '"q').encode()),
    "1 GB declared": lambda asked: iter([b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"]),
    "gzip": lambda asked: reply(gzip.compress(bytes(10_000_000)), Content_Encoding="gzip"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_no_row(fault):
    with FakeServer(first(FAULTS[fault])) as server:
        assert scorer(server.url, read_seconds=0.3).score(batch(3)) == [Part(0.5)] * 3
    assert len(server.asked) == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_is_the_rows_error(fault):
    with FakeServer(FAULTS[fault]) as server:
        start = time.monotonic()
        parts = scorer(
            server.url, read_seconds=0.2, retries=1, total_seconds=1, breaker_failures=1
        ).score(batch(3))
        assert time.monotonic() - start < 10
    assert [part.value for part in parts] == [None] * 3
    assert all(part.error and part.error.isprintable() and len(part.error) < 400 for part in parts)


def test_wounded_answers_down_to_the_status_line_are_named():
    dice, told = random.Random(3), []
    whole = reply({"format": 1, "rows": [{"id": "r0", "reward": 0.5}]})
    for raw in [mutated(whole, dice) for _ in range(80)]:
        with FakeServer(lambda asked, raw=raw: iter([raw])) as server:
            try:
                told += scorer(
                    server.url, retries=0, read_seconds=0.3, total_seconds=1, range=(0, 1)
                ).score(batch(1))
            except RemoteError as error:
                told.append(Part(error=str(error)))
    assert len(told) == 80
    assert all(
        (part.value is None) != (part.error is None) and 0 <= (part.value or 0) <= 1
        for part in told
    )


def test_text_is_no_number_and_costs_its_row_alone():
    def one_text(asked):
        rows = scored(asked)["rows"]
        rows[1]["reward"] = "1.0"
        return reply({"format": 1, "rows": rows})

    with FakeServer(one_text) as server:
        parts = scorer(server.url).score(batch(3))
    assert parts == [Part(0.5), Part(error="gave text, expected a number"), Part(0.5)]


@pytest.mark.parametrize(
    "flood, problem",
    [
        (Flood(b"[" * 2**16), "bytes, more than max_bytes"),
        (Flood(b"[" * 2**16, 2**19), "is not JSON: it is nested more than 100 levels deep"),
        (Flood(b" ", 1000, seconds_between=0.05), "no whole answer within 1 s"),
        (Flood(b"10000\r\n" + b" " * 2**16 + b"\r\n", Transfer_Encoding="chunked"), "max_bytes"),
    ],
    ids=["large", "deep", "slow", "endless"],
)
def test_a_flood_is_read_to_the_limits_only(flood, problem):
    with FakeServer(flood) as server:
        options = {"max_bytes": 1_000_000, "read_seconds": 1 if flood.seconds_between else 30}
        (part,) = scorer(server.url, retries=0, total_seconds=30, **options).score(batch(1))
    assert problem in part.error and flood.bytes_sent < 50_000_000


def test_a_gzip_bomb_is_never_unpacked():
    bomb = gzip.compress(bytes(1_000_000))
    with FakeServer(lambda asked: reply(bomb, Content_Encoding="gzip")) as server:
        (part,) = scorer(server.url, retries=0).score(batch(1))
    assert "compressed" in part.error


def test_retry_after_is_kept():
    times = []

    def busy(asked):
        times.append(time.monotonic())
        return reply(b"", 429, Retry_After="1") if asked.number == 0 else reply(scored(asked))

    with FakeServer(busy) as server:
        assert scorer(server.url, retries=0).score(batch(1)) == [Part(0.5)]
    assert times[1] - times[0] >= 1


def test_a_good_answer_to_another_request_does_not_shorten_the_wait():
    times = {}

    async def busy(asked):
        row = asked.body["rows"][0]["id"]
        times.setdefault(row, []).append(time.monotonic())
        await asyncio.sleep(0.3 if row == "r1" else 0)
        return (
            reply(b"", 429, Retry_After="1")
            if row == "r0" and len(times[row]) == 1
            else reply(scored(asked))
        )

    with FakeServer(busy) as server:
        assert scorer(server.url, batch_rows=1).score(batch(2)) == [Part(0.5)] * 2
    assert times["r0"][1] - times["r0"][0] >= 1


def test_retry_after_beyond_the_time_allowed_ends_the_waiting():
    with FakeServer(lambda asked: reply(b"", 429, Retry_After="86400")) as server:
        parts = scorer(server.url, total_seconds=60).score(batch(40, finish_reason=["stop"] * 40))
    assert (
        all("answered 429" in part.error or "no host" in part.error for part in parts)
        and len(server.asked) <= 3
    )


def test_a_server_that_fails_1_in_20_loses_no_row():
    dice, lock = random.Random(1), []

    def flaky(asked):
        lock.append(asked)
        faults = [
            reply(b"", 500),
            None,
            reply(b"<html>"),
            reply(scored(asked), 503, Retry_After="0"),
        ]
        return (
            dice.choice(faults)
            if dice.random() < 0.05
            else reply(scored(asked, int(asked.body["rows"][0]["id"][1:])))
        )

    with FakeServer(flaky) as server:
        parts = scorer(server.url, batch_rows=1, retries=5, concurrency=16).score(batch(600))
    assert parts == [Part(float(at)) for at in range(600)] and len(server.asked) > 610


@pytest.mark.parametrize(
    "answer", [reply(b"", 500), reply(b"too long", 400), reply(b"<html>"), None], ids=str
)
def test_a_row_that_spoils_its_request_is_found(answer):
    def spoiled(asked):
        return answer if "r5" in [row["id"] for row in asked.body["rows"]] else reply(scored(asked))

    with FakeServer(spoiled) as server:
        parts = scorer(server.url, retries=0).score(batch(16))
    bad = [at for at, part in enumerate(parts) if part.error]
    assert bad == ([5] if answer else list(range(16))), (
        "a reset says nothing of the rows, so nothing is halved"
    )
    assert all(part == Part(0.5) for at, part in enumerate(parts) if at not in bad)


@pytest.mark.parametrize(
    "value",
    [float("nan"), b"bytes", "half \ud800", object()],
    ids=["nan", "bytes", "half", "object"],
)
def test_a_column_that_json_can_not_hold_costs_its_row(value):
    with FakeServer(lambda asked: reply(scored(asked))) as server:
        parts = scorer(server.url, columns=["answer"]).score(batch(4, answer=[1, value, 3, 4]))
    assert [part.value for part in parts] == [0.5, None, 0.5, 0.5] and "cannot be sent" in parts[
        1
    ].error


# -- several hosts


def test_a_dead_host_is_left_alone_and_costs_nothing():
    with (
        FakeServer(lambda asked: reply(b"", 500)) as dead,
        FakeServer(lambda asked: reply(scored(asked))) as alive,
    ):
        client = scorer(
            dead.url, alive.url, batch_rows=1, concurrency=4, breaker_failures=3, breaker_seconds=60
        )
        assert client.score(batch(100)) == [Part(0.5)] * 100
        assert client.score(batch(20)) == [Part(0.5)] * 20
    assert 3 <= len(dead.asked) <= 3 + 4  # those under way when the third failed


def test_a_host_that_rested_is_tried_again_by_one_request():
    down = [True]

    def recovers(asked):
        return reply(b"", 500) if down[0] else reply(scored(asked))

    with FakeServer(recovers) as server:
        client = scorer(
            server.url,
            batch_rows=1,
            concurrency=8,
            breaker_failures=2,
            breaker_seconds=0.2,
            retries=1,
        )
        assert all(part.error for part in client.score(batch(8)))
        before = len(server.asked)
        down[0] = False
        time.sleep(0.25)
        assert client.score(batch(8)) == [Part(0.5)] * 8
    assert len(server.asked) - before == 8


def test_the_rate_is_kept():
    times = []

    def note(asked):
        times.append(time.monotonic())
        return reply(scored(asked))

    with FakeServer(note) as server:
        scorer(server.url, batch_rows=1, requests_per_second=50).score(batch(11))
    assert max(times) - min(times) >= 0.18


def test_it_ends_when_it_is_told_that_too_many_rows_failed():
    heard = []

    class Enough(Exception):
        pass

    def notice(*failure):
        heard.append(failure)
        raise Enough

    with FakeServer(lambda asked: reply(b"too long", 400)) as server, pytest.raises(Enough):
        scorer(server.url, batch_rows=1, concurrency=2, notice=notice).score(batch(50))
    assert (
        heard[0][:2] in (("quiver", "r0"), ("quiver", "r1"))
        and "answered 400" in heard[0][2]
        and len(server.asked) < 10
    )


def test_it_can_be_closed_from_another_thread():
    with FakeServer(silence) as server:
        client = scorer(server.url, read_seconds=60, total_seconds=60)
        threading.Timer(0.3, client.close).start()
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(ResourceError, match="closed"):
                client.score(batch(5))
        assert time.monotonic() - start < 10


def test_no_host_at_all_is_an_error_a_row():
    with FakeServer(lambda asked: None) as server:
        url = server.url
    parts = scorer(url, retries=1).score(batch(3))
    assert [part.value for part in parts] == [None] * 3 and "ConnectError" in parts[0].error


# -- what cannot pass


@pytest.mark.parametrize("status", [401, 403, 404, 405, 415, 422, 501])
def test_a_refusal_of_everything_ends_scoring_at_once(status):
    with (
        FakeServer(lambda asked: reply({"detail": "no"}, status)) as server,
        pytest.raises(RemoteError) as caught,
    ):
        scorer(server.url, batch_rows=1, concurrency=2).score(batch(50))
    assert (
        f"answered {status}" in str(caught.value)
        and caught.value.exit_code == 6
        and caught.value.next
    )
    assert len(server.asked) <= 2


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 300, 304])
def test_a_redirect_is_never_followed(status):
    with FakeServer(lambda asked: reply(scored(asked))) as private:
        for target in (private.url, "file:///etc/passwd", "http://169.254.169.254/latest"):
            with FakeServer(lambda asked, to=target: reply(b"", status, Location=to)) as server:
                with pytest.raises(RemoteError, match="redirect is not followed"):
                    scorer(server.url).score(batch(1))
                assert len(server.asked) == 1
    assert private.asked == []


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path):
    import ssl

    pair = [tmp_path / "key.pem", tmp_path / "cert.pem"]
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "1",
    ]
    try:
        subprocess.run(
            [*made, "-keyout", pair[0], "-out", pair[1]], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate")

    async def ask():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair[1], pair[0])
        server = await asyncio.start_server(
            lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context
        )
        client = scorer(f"https://localhost:{server.sockets[0].getsockname()[1]}")
        await asyncio.to_thread(client.score, batch(1))

    with pytest.raises(RemoteError, match="certificate"):
        asyncio.run(ask())


# -- secrets


def test_a_token_that_the_server_repeats_is_told_to_nobody(monkeypatch, caplog):
    monkeypatch.setenv("REWARD_KEY", CANARY)
    caplog.set_level(logging.DEBUG)
    echo = {"id": "r0", "reward": 0.5, "extra": {CANARY: f"Bearer {CANARY}"}}
    answers = [
        reply({"format": 1, "rows": [echo]}),
        reply({"format": 1, "rows": [{"id": "r0", "reward": None, "error": f"who is {CANARY}?"}]}),
        reply(f"<html>{CANARY}".encode()),
        reply(f"{CANARY}" * 500, 400),
        reply(CANARY, 500, X_Echo=CANARY),
        reply(CANARY, 401),
        reply(b"", 302, Location=f"http://evil.example/{CANARY}"),
        reply(b"", Content_Encoding=CANARY),
        f"HTTP/1.1 200 OK\r\n{CANARY}\r\n\r\n".encode(),
        reply(json.dumps({"format": 1, "rows": [echo]}).replace("canary", "c\\u0061nary").encode()),
    ]
    told = []
    for answer in answers:
        with FakeServer(lambda asked, answer=answer: answer) as server:
            client = scorer(server.url, token="env:REWARD_KEY", retries=0)
            try:
                told.append(repr(client.score(batch(1))))
            except RemoteError as error:
                told.append(str(error))
            told.append(repr([fingerprint(client.config), client.config, vars(client)]))
            assert server.asked[0].headers["authorization"] == f"Bearer {CANARY}"
    assert len(told) == 20 and "***" in told[0]
    assert [text for text in told if CANARY in text] == []
    assert CANARY not in caplog.text
