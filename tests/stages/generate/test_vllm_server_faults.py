"""Engine `vllm-server` with servers that are wrong or fail: a small one that speaks as vLLM does.
test_vllm_server.py has what only a real one can show, tests/stages/reward/test_remote.py the faults
of the network."""

from __future__ import annotations

import asyncio
import copy
import resource
import signal
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from quiver.schemas.errors import ConfigError, LineageError, NumericError, ResourceError
from quiver.stages.core.config import parse
from quiver.stages.core.run.runner import run_stage
from quiver.stages.generate.config import Config
from quiver.stages.generate.engine import Request, Setup
from quiver.stages.generate.engines import vllm_server
from quiver.stages.generate.engines.vllm_server import VllmServerEngine
from quiver.stages.generate.options import Sampling
from quiver.stages.model.checkpoints import model_entry
from tests.stages.generate.fake_vllm import WORDS, FakeVllm, completion
from tests.stages.generate.making import random_prompts
from tests.tiny import make_policy

CLOSED = "http://127.0.0.1:9"
PROMPT = np.array([3, 4, 5], np.int32)


@pytest.fixture
def server(policy):
    with FakeVllm(policy) as fake:
        yield fake


def sample(store, policy, server, **options):
    """A version of 24 rows, by this server, in shards of four."""
    config = {
        "engine": "vllm-server",
        "samples_per_prompt": 4,
        "sampling": {"max_tokens": 8, "stop_token_ids": [7]},
        "rows_per_shard": 4,
        "options": {"urls": [server.url], "concurrency": 3, "down_seconds": 0.6, **options},
    }
    refs = {"prompts": random_prompts(store, 6).ref, "policy": policy.ref}
    return store.open(run_stage("generate", config, store, in_process=True, **refs))


def engine_of(policy, *servers, **options) -> closing[VllmServerEngine]:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    options = {"urls": urls, "concurrency": 3, "down_seconds": 0.6, **options}
    setup = Setup(policy, Sampling(max_tokens=8), (2,), 64, options=options)
    return closing(VllmServerEngine(setup))


def ask(engine, num_rows: int = 24) -> None:
    """Sample rows, and check that each came once, as its seed decides."""
    requests = [Request(index, PROMPT, 1000 + index) for index in range(num_rows)]
    answers = {answer.index: answer for answer in engine.generate(requests)}
    assert len(answers) == num_rows
    for request in requests:
        ids, logprobs = completion(PROMPT, request.seed)
        answer = answers[request.index]
        assert (answer.completion_ids.tolist(), answer.logprobs.tolist()) == (ids, logprobs)


def changed(answer, **fields):
    """A copy of an answer with these fields of its choice."""
    answer = copy.deepcopy(answer)
    answer["choices"][0] |= fields
    return answer


def test_requests_name_everything_that_shapes_a_row(store, policy, server):
    version = sample(store, policy, server)
    assert version.manifest.metrics["engine"] == {
        "name": "vllm-server",
        "version": "0.32.0",
        "dtype": "unknown",
        "device": "server",
        "logprobs_mode": "processed_logprobs",
    }
    expected = {"stop_token_ids": [2, 7], "ignore_eos": True, "max_tokens": 8, "n": 1}
    expected |= {"watermarking": False, "temperature": 1.0, "top_p": 1.0, "detokenize": False}
    parameters = server.bodies[0]["sampling_params"]
    assert parameters | expected == parameters
    seeds = {body["sampling_params"]["seed"] for body in server.bodies}
    assert seeds == {row["seed"] for row in version.table().to_pylist()}


def test_rows_follow_after_the_first_are_answered(policy, server):
    server.says = lambda answer, count: changed(answer, finish_reason="stop", stop_reason="x")
    with engine_of(policy, server) as engine:
        assert [*engine.generate([])] == []
        for index in range(2):
            (answer,) = engine.generate([Request(index, PROMPT, 7)])
            assert (answer.index, answer.finish_reason, answer.stop_reason) == (index, "stop", "x")


ONCE = {
    "other ids": lambda answer: changed(answer, token_ids=[9, 9, 9]),
    "no ids": lambda answer: changed(answer, token_ids=[], logprobs={"content": []}),
    "large ids": lambda answer: changed(
        answer, token_ids=[2**40], logprobs={"content": [{"token_id": 2**40, "logprob": -1.0}]}
    ),
    "another request": lambda answer: {**answer, "request_id": "generate-tokens-quiver-0"},
    "another prompt": lambda answer: {**answer, "usage": {"prompt_tokens": 1}},
    "another model": lambda answer: {**answer, "model": "another"},
    "two weights": lambda answer: changed(
        answer, weight_versions=[{"version": "default"}, {"version": "later"}]
    ),
    "no weights": lambda answer: changed(answer, weight_versions=None),
    "aborted": lambda answer: changed(answer, finish_reason="abort"),
    "two choices": lambda answer: {**answer, "choices": answer["choices"] * 2},
    "closed": lambda answer: None,
    "503": lambda answer: 503,
}


@pytest.mark.parametrize("fault", ONCE)
def test_a_row_that_fails_is_asked_for_again(policy, server, fault):
    server.says = lambda answer, count: ONCE[fault](answer) if count in (2, 9) else answer
    with engine_of(policy, server) as engine:
        ask(engine)
    assert server.num_rows >= 26


def test_a_row_that_always_fails_ends_the_stage_which_then_continues(store, policy, server):
    server.says = lambda answer, count: 500 if count > 8 else answer
    words = rf"row \d+ failed 3 times, at last at {server.url}: answered 500: {WORDS}"
    with pytest.raises(ResourceError, match=words):
        sample(store, policy, server, retries=2)
    assert store.numbers("tiny", "rollouts") == []
    server.says = lambda answer, count: answer
    num_before = server.num_rows
    rows = sample(store, policy, server).table().to_pylist()
    assert server.num_rows - num_before < len(rows) == 24
    for row in rows:
        ids, logprobs = completion(row["prompt_ids"], row["seed"])
        assert (row["completion_ids"], row["old_logprobs"]) == (ids, logprobs)


def test_a_refusal_is_final_and_quoted_without_the_token(policy, server, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "a-long-secret")
    for status, advice in (400, "correct generate.sampling"), (401, "set generate.options.token"):
        server.says = lambda answer, count, status=status: status
        with (
            engine_of(policy, server, token="env:MY_TOKEN") as engine,
            pytest.raises(ConfigError) as caught,
        ):
            ask(engine)
        assert f"answered {status}: {WORDS} Bearer ***" in caught.value.message
        assert advice in caught.value.next
    assert {request.headers["authorization"] for request in server.asked} == {
        "Bearer a-long-secret"
    }


def with_logprob(answer, logprob):
    answer["choices"][0]["logprobs"]["content"][-1]["logprob"] = logprob
    return answer


ENDING = {
    "-9999": (lambda answer: with_logprob(answer, -9999.0), NumericError, "is not a number"),
    "null": (lambda answer: with_logprob(answer, None), NumericError, "is not a number"),
    "NaN": (lambda answer: with_logprob(answer, float("nan")), NumericError, "is not a number"),
    "slow": (lambda answer: asyncio.sleep(30), ResourceError, r"no whole answer within 0\.1 s"),
    "another name": (
        lambda answer: {**answer, "model": "f" * 64},
        LineageError,
        f"it serves {'f' * 64}",
    ),
    "no such name": (lambda answer: 404, LineageError, f"it serves {'f' * 64}"),
}


@pytest.mark.parametrize("fault", ENDING)
def test_an_answer_that_ends_the_stage(policy, server, fault):
    """A server that was started anew refuses the old name; one behind a balancer may answer."""
    says, error, words = ENDING[fault]

    def fail(answer, count):
        if count < 9 and "name" in fault:
            return answer
        if "name" in fault:
            server.card["id"] = "f" * 64
        return says(answer)

    server.says = fail
    seconds = 0.1 if fault == "slow" else 30
    with (
        engine_of(policy, server, row_seconds=seconds, retries=1) as engine,
        pytest.raises(error, match=words),
    ):
        ask(engine)


def test_an_answer_may_have_so_many_bytes_for_each_token(policy, server, monkeypatch):
    monkeypatch.setattr(vllm_server, "_MOST_BYTES", 2000)
    server.says = lambda answer, count: {**answer, "padding": "x" * 8 * 1024}
    with engine_of(policy, server, retries=0) as engine:
        ask(engine)
        server.says = lambda answer, count: {**answer, "padding": "x" * (8 * 1024 + 2000)}
        with pytest.raises(ResourceError, match="the answer has more than 10192 bytes"):
            ask(engine)


def test_the_others_continue_without_a_server_of_other_weights(policy, server, caplog):
    with FakeVllm(policy) as replaced:

        def says(answer, count):
            if count == 4:
                replaced.labels = ["step 7"]
            return changed(answer, weight_versions=[{"version": replaced.labels[0]}])

        replaced.says = says
        with engine_of(policy, replaced, server, CLOSED) as engine:
            ask(engine)
        assert min(server.num_rows, replaced.num_rows) > 3
    assert f"{CLOSED} is left out: ConnectError" in caplog.text
    assert f"{replaced.url} is left out: it serves weights that were loaded later" in caplog.text


WRONG = {
    "a name that says nothing": (
        LineageError,
        {"card": {"id": "mine"}},
        "it serves mine; expected",
    ),
    "an adapter of the name": (LineageError, {"card": {"parent": "base"}}, "it serves no model"),
    "weights loaded later": (LineageError, {"labels": ["step 7"]}, "loaded later, as step 7"),
    "weights loaded now": (LineageError, {"labels": ["a", "default"]}, "later, as a, default"),
    "a short context": (ConfigError, {"card": {"max_model_len": 12}}, "max_model_len is 12"),
    "raw logprobs": (ConfigError, {"probe_logprob": -5.5}, r"has \[-5\.5, -5\.5\], expected 0\.0"),
    "no logprob": (NumericError, {"probe_logprob": None}, "is not a number"),
    "no list of models": (ResourceError, {"card": {"id": 7}}, r"data\.0\.id: Input should be"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_server_that_fails_its_check_gets_no_row(policy, server, wrong):
    kind, changes, match = WRONG[wrong]
    for name, setting in changes.items():
        setattr(server, name, server.card | setting if name == "card" else setting)
    with pytest.raises(kind, match=match):
        engine_of(policy, server)
    assert server.num_rows == 0


def test_an_error_shows_the_command_that_starts_a_right_server(policy, server):
    server.card["id"] = "mine"
    with pytest.raises(LineageError, match="expected the weights of tiny/policy@0") as caught:
        engine_of(policy, CLOSED, server)
    assert caught.value.next == (
        f"python -m vllm.entrypoints.openai.api_server --model {policy.files.folder} "
        f"--served-model-name {model_entry('policy', policy).weights} --logprobs-mode "
        f"processed_logprobs --max-model-len 64 --dtype auto --port {server.port} "
        "--enable-scale-out"
    )


def test_a_row_is_kept_away_from_the_server_that_failed_it(policy, server):
    """The one that fails at once would else have used up every attempt."""

    async def slow(answer):
        await asyncio.sleep(0.1)
        return answer

    with FakeVllm(policy) as broken:
        broken.says = lambda answer, count: 500
        server.says = lambda answer, count: slow(answer)
        with engine_of(policy, broken, server, retries=1) as engine:
            ask(engine)


def test_a_server_that_comes_later_is_waited_for(policy, server, caplog):
    name, server.card["id"] = server.card["id"], "mine"
    thread = threading.Timer(0.5, lambda: server.card.update(id=name))
    thread.start()
    with engine_of(policy, server, wait_seconds=30) as engine:
        ask(engine)
    thread.join()
    assert f"waiting 30 s for a server of {policy.ref}: it serves mine" in caplog.text


def test_ctrl_c_ends_the_wait_for_a_server(policy):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine_of(policy, CLOSED, wait_seconds=60)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_as_many_connections_as_files_may_be_open(policy, server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        with engine_of(policy, server, concurrency=200):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_policy_that_no_server_takes_is_refused_before_one_is_asked(store, policy, server):
    setup = Setup(policy, Sampling(), (2,), 64, options={"urls": [server.url]})
    for fields, problem in (
        ({"policy": make_policy(store, "t5", "t5")}, "encoder-decoder"),
        ({"most_media": {"image": 1}}, "pictures"),
        ({"base": policy}, "adapter"),
    ):
        with pytest.raises(ConfigError, match=problem):
            VllmServerEngine(replace(setup, **fields))
    assert server.asked == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs options.urls"),
        ({"urls": "http://me:secret@host:8000"}, "urls: a list is expected"),
        ({"urls": ["http://me:secret@host:8000"]}, "has a user"),
        ({"urls": ["http://a:1", "http://a:1/v1/"]}, "a server is named twice"),
    ],
)
def test_urls_that_are_refused_at_once(options, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        parse(Config, {"engine": "vllm-server", "options": options}, "generate")
    assert "secret@" not in str(caught.value)
