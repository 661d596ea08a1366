"""Engine `vllm-server` before servers that are wrong or fail: a small one that speaks as vLLM does.
What only a real one can show is in test_vllm_server.py."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from quiver.schemas.errors import ConfigError, LineageError, NumericError, ResourceError
from quiver.stages.common.config import parse
from quiver.stages.common.models.checkpoints import as_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from quiver.stages.generate.config import Config
from quiver.stages.generate.engine import Request, Setup
from quiver.stages.generate.engines import server_identity, server_wire
from quiver.stages.generate.engines.server_identity import Expected
from quiver.stages.generate.engines.vllm_server import VllmServerEngine
from quiver.stages.generate.options import Sampling
from tests.stages.generate import guessing
from tests.stages.generate.fake_vllm import WORDS, FakeVllm, completion
from tests.stages.generate.making import random_prompts
from tests.stages.reward.fake_server import FakeServer, Flood
from tests.tiny import make_policy


@pytest.fixture
def policy(store):
    return make_policy(store)


@pytest.fixture
def server(policy):
    with FakeVllm(policy) as fake:
        yield fake


def sample(store, policy, servers, **options):
    """A version of 24 rows, by these servers, in shards of four."""
    given = {
        "engine": "vllm-server",
        "samples_per_prompt": 4,
        "sampling": {"max_tokens": 8, "stop_token_ids": [7]},
        "rows_per_shard": 4,
        "options": {
            "urls": [server if isinstance(server, str) else server.url for server in servers],
            "concurrency": 3,
            "down_seconds": 0.6,
            **options,
        },
    }
    refs = {"prompts": random_prompts(store, 6).ref, "policy": policy.ref}
    return store.open(run_stage("generate", given, store, in_process=True, **refs))


def assert_right(version) -> None:
    """Every row is what its seed says, whoever answered it and however often it was asked."""
    rows = version.table().to_pylist()
    assert len(rows) == 24
    for row in rows:
        ids, logprobs = completion(row["prompt_ids"], row["seed"])
        assert row["completion_ids"] == ids
        assert row["old_logprobs"] == logprobs


def changed(answer, **fields):
    """A copy of an answer with these fields of its choice."""
    answer = copy.deepcopy(answer)
    answer["choices"][0] |= fields
    return answer


def test_rows_are_asked_for_with_all_that_shapes_them(store, policy, server):
    version = sample(store, policy, [server])
    assert_right(version)
    assert version.manifest.metrics["engine"] == {
        "name": "vllm-server",
        "version": "0.32.0",
        "dtype": "unknown",
        "device": "server",
        "logprobs_mode": "processed_logprobs",
        "weights_proved_by": "name",
    }
    parameters = server.bodies[0]["sampling_params"]
    assert parameters["stop_token_ids"] == [2, 7]
    assert (parameters["ignore_eos"], parameters["max_tokens"], parameters["n"]) == (True, 8, 1)
    assert parameters["watermarking"] is False
    assert {body["sampling_params"]["seed"] for body in server.bodies} == {
        row["seed"] for row in version.table().to_pylist()
    }


ONCE = {
    "other ids": lambda answer: changed(answer, token_ids=[9, 9, 9]),
    "another request": lambda answer: {**answer, "request_id": "generate-tokens-quiver-0"},
    "another model": lambda answer: {**answer, "model": "another"},
    "other weights": lambda answer: changed(answer, weight_versions=[{"version": "later"}]),
    "no word of weights": lambda answer: changed(answer, weight_versions=None),
    "two weights": lambda answer: changed(
        answer, weight_versions=[{"version": "default"}, {"version": "later"}]
    ),
    "aborted": lambda answer: changed(answer, finish_reason="abort"),
    "no logprobs": lambda answer: changed(answer, logprobs=None),
    "no choices": lambda answer: {**answer, "choices": []},
    "text": lambda answer: ["text"],
    "a list as model": lambda answer: {**answer, "model": ["x"]},
    "an object as model": lambda answer: {**answer, "model": {}},
    "ids in lists": lambda answer: changed(
        answer, token_ids=[[3]], logprobs={"content": [{"token_id": [3], "logprob": -1.0}]}
    ),
    "ids as text": lambda answer: changed(
        answer, token_ids=["3"], logprobs={"content": [{"token_id": "3", "logprob": -1.0}]}
    ),
    "another prompt": lambda answer: {**answer, "usage": {"prompt_tokens": 1}},
    "cut": lambda answer: b'{"request_id": "gen',
    "closed": lambda answer: None,
    "500": lambda answer: 500,
    "503": lambda answer: 503,
    "429": lambda answer: 429,
}


@pytest.mark.parametrize("fault", ONCE)
def test_a_row_that_fails_is_asked_for_again(store, policy, server, fault):
    server.says = lambda answer, count: ONCE[fault](answer) if count in (2, 9) else answer
    assert_right(sample(store, policy, [server]))
    assert server.num_rows >= 26


@pytest.mark.parametrize("fault", ["other ids", "500", "closed", "cut"])
def test_a_row_that_always_fails_ends_the_stage(store, policy, server, fault):
    def says(answer, count):
        return ONCE[fault](answer) if count > 8 else answer

    server.says = says
    with pytest.raises(ResourceError, match=r"row \d+ failed 3 times, at last at") as caught:
        sample(store, policy, [server], retries=2)
    assert server.url in caught.value.message
    assert (WORDS in caught.value.message) == (fault == "500")
    assert store.numbers("tiny", "rollouts") == []
    server.says = lambda answer, count: answer
    done_before = server.num_rows
    assert_right(sample(store, policy, [server]))
    assert server.num_rows - done_before <= 24


def test_what_a_server_refuses_is_told_in_its_words(store, policy, server):
    server.says = lambda answer, count: 400
    with pytest.raises(ConfigError, match=f"answered 400: {WORDS}"):
        sample(store, policy, [server])
    assert store.numbers("tiny", "rollouts") == []


@pytest.mark.parametrize("logprob", [-9999.0, float("nan"), float("-inf"), None])
def test_a_logprob_that_is_no_number_ends_the_stage(store, policy, server, logprob):
    def says(answer, count):
        entries = answer["choices"][0]["logprobs"]["content"]
        entries[-1]["logprob"] = logprob if count == 3 else entries[-1]["logprob"]
        return answer

    server.says = says
    with pytest.raises(NumericError, match="is no number"):
        sample(store, policy, [server])


def test_a_row_that_takes_too_long_is_given_up(store, policy, server):
    server.says = lambda answer, count: time.sleep(0.5) or answer
    with pytest.raises(ResourceError, match=r"no whole answer within 0\.1 s"):
        sample(store, policy, [server], row_seconds=0.1, retries=1)


def test_an_answer_without_an_end_is_given_up(store, policy, server, monkeypatch):
    """One may have so much for each token that was asked for."""
    monkeypatch.setattr(server_wire, "_MOST_BYTES", 2000)
    longer = {True: "x" * 8 * 1024, False: "x" * (8 * 1024 + 2000)}
    server.says = lambda answer, count: {**answer, "padding": longer[count < 12]}
    with pytest.raises(ResourceError, match="its answer has more than 10192 bytes"):
        sample(store, policy, [server], retries=0)
    assert server.num_rows > 12


@pytest.mark.parametrize(
    "flood, problem",
    [
        (Flood(b"[" * 2**16), "its answer has more than 4194304 bytes"),
        (Flood(b"[" * 2**16, 2**21), "its answer is no JSON"),
        (Flood(b" ", seconds_between=0.05), "no whole answer within 0.5 s"),
    ],
    ids=["large", "deep", "slow"],
)
def test_a_server_that_floods_what_it_is_asked_first_is_none(
    store, policy, monkeypatch, flood, problem
):
    monkeypatch.setattr(server_identity, "_SECONDS", 0.5 if flood.seconds_between else 30.0)
    with FakeServer(flood) as server, pytest.raises(ResourceError, match=problem):
        sample(store, policy, [server.url])
    assert 0 < flood.bytes_sent < 2**24


@pytest.mark.parametrize("says", ["404", "the new name"])
def test_another_model_in_the_middle_publishes_nothing(store, policy, server, says):
    """A server that was started anew refuses the old name; one behind a balancer may answer."""

    def replaced(answer, count):
        if count < 9:
            return answer
        server.card["id"] = "f" * 64
        return 404 if says == "404" else {**answer, "model": "f" * 64}

    server.says = replaced
    with pytest.raises(LineageError, match=f"it serves {'f' * 64}"):
        sample(store, policy, [server])
    assert store.numbers("tiny", "rollouts") == []


def test_the_others_go_on_without_a_server_that_serves_another_model(store, policy, server):
    with FakeVllm(policy) as replaced:

        def says(answer, count):
            if count == 4:
                replaced.card["id"] = "another"
            return answer

        replaced.says = says
        assert_right(sample(store, policy, [replaced, server]))


def test_rows_spread_over_the_servers(store, policy, server):
    with FakeVllm(policy) as second:
        assert_right(sample(store, policy, [server, second, "http://127.0.0.1:9"]))
        assert min(server.num_rows, second.num_rows) > 3


def refused(store, policy, server, kind, match):
    with pytest.raises(kind, match=match) as caught:
        sample(store, policy, [server])
    assert server.num_rows == 0
    return caught.value


def test_other_weights_are_refused_with_the_command_that_starts_the_right_ones(store, policy):
    other = make_policy(store, "other", seed=1)
    with FakeVllm(other) as fake:
        error = refused(store, policy, fake, LineageError, "expected the weights of tiny/policy@0")
    weights = as_model("policy", policy).weights
    assert error.next == (
        f"python -m vllm.entrypoints.openai.api_server --model {policy.files.folder} "
        f"--served-model-name {weights} --logprobs-mode processed_logprobs --enable-scale-out "
        f"--max-model-len 64 --port {fake.url.rpartition(':')[2]}"
    )


def test_logprobs_before_temperature_and_the_rest_are_refused(store, policy, server):
    server.probe_logprob = -5.5
    error = refused(store, policy, server, ConfigError, r"has \[-5\.5, -5\.5\], expected 0\.0")
    assert "--logprobs-mode processed_logprobs" in error.next


def test_a_context_that_is_too_short_is_refused(store, policy, server):
    server.card["max_model_len"] = 12
    refused(store, policy, server, ConfigError, "max_model_len is 12")


def test_weights_that_were_loaded_later_count_by_their_label_alone(store, policy, server):
    server.label = "step 7"
    refused(store, policy, server, LineageError, "loaded later, as step 7")
    server.card["id"] = "trained"
    server.label = as_model("policy", policy).weights
    version = sample(store, policy, [server])
    assert_right(version)
    assert version.manifest.metrics["engine"]["weights_proved_by"] == "label"


def test_a_name_does_not_count_where_the_folder_is_another_versions(store, policy, server):
    server.card["root"] = str(make_policy(store, "other", seed=1).files.folder)
    refused(store, policy, server, LineageError, "other/policy.*whatever its name says")
    server.card["root"] = str(policy.files.folder)
    assert_right(sample(store, policy, [server]))


def test_one_file_of_several_says_that_a_version_is_another(policy, tmp_path):
    expected = Expected.of(Setup(policy, Sampling(max_tokens=8), (2,), 64))
    expected = replace(expected, files={"first.safetensors": "0" * 64, **expected.files})
    names = [{"name": name, "sha256": sha256} for name, sha256 in expected.files.items()]
    (tmp_path / "manifest.json").write_text(json.dumps({"files": names}))
    assert not expected.is_contradicted_by(tmp_path)
    names[1]["sha256"] = "1" * 64
    (tmp_path / "manifest.json").write_text(json.dumps({"files": names}))
    assert expected.is_contradicted_by(tmp_path)


@pytest.fixture
def clocks_agree(monkeypatch):
    """A server's clock and the file system's may differ by 0.2 s only, so that a test need not wait."""
    monkeypatch.setattr(server_identity, "_SLACK", 0.2)


def by_path(fake, path) -> None:
    fake.card |= {"id": str(path), "root": str(path)}


def test_the_folder_of_the_policy_proves_its_weights(store, policy, server, tmp_path):
    by_path(server, policy.files.folder)
    version = sample(store, policy, [server])
    assert version.manifest.metrics["engine"]["weights_proved_by"] == "path"


@pytest.mark.usefixtures("clocks_agree")
def test_a_link_to_the_folder_counts_while_it_is_older_than_the_server(
    store, policy, server, tmp_path
):
    (tmp_path / "outer").symlink_to(tmp_path / "inner")
    server.started = time.time()
    time.sleep(0.4)  # no test can set when a link was made
    (tmp_path / "now").symlink_to(policy.files.folder)
    (tmp_path / "here").symlink_to(tmp_path)
    by_path(server, tmp_path / "here" / "now")
    refused(store, policy, server, LineageError, "here was moved or changed after its start")
    (tmp_path / "inner").symlink_to(policy.files.folder)
    by_path(server, tmp_path / "outer")
    refused(store, policy, server, LineageError, "inner was moved or changed after its start")
    server.started = time.time() + 1
    assert_right(sample(store, policy, [server]))


def test_a_folder_that_is_younger_than_the_server_proves_nothing(store, policy, server):
    """A store that was made anew under the same path."""
    by_path(server, policy.files.folder)
    server.started -= 3600
    refused(store, policy, server, LineageError, "was started before that was tiny/policy@0")


def engine_of(policy, *servers, **options) -> VllmServerEngine:
    given = {"urls": [server.url for server in servers], "concurrency": 3, **options}
    return VllmServerEngine(Setup(policy, Sampling(max_tokens=8), (2,), 64, options=given))


def asked(engine, num_rows: int) -> list[int]:
    """The indices of the rows that came, in order."""
    requests = [Request(i, np.array([3, 4, 5], np.int32), 1000 + i) for i in range(num_rows)]
    return sorted(completion.index for completion in engine.generate(requests))


@pytest.mark.parametrize("now", ["the policy", "other"])
def test_a_server_that_was_started_anew_while_idle_proves_its_weights_again(
    store, policy, server, tmp_path, now
):
    link = tmp_path / "serving"
    link.symlink_to(policy.files.folder)
    by_path(server, link)
    server.started = time.time() + 1
    engine = engine_of(policy, server)
    try:
        assert asked(engine, 6) == [*range(6)]
        if now == "other":
            link.unlink()
            link.symlink_to(make_policy(store, "other", seed=1).files.folder)
        server.restart()
        if now == "other":
            with pytest.raises(LineageError, match=r"it serves .*serving; expected the weights"):
                asked(engine, 6)
        else:
            assert asked(engine, 6) == [*range(6)]
    finally:
        engine.close()


@pytest.mark.usefixtures("clocks_agree")
def test_a_folder_that_was_moved_there_after_the_start_proves_nothing(store, tmp_path):
    served = make_policy(Store(tmp_path / "now" / "store"), seed=6)
    make_policy(Store(tmp_path / "later" / "store"), seed=5)
    with FakeVllm(served) as fake:
        by_path(fake, served.files.folder)
        time.sleep(0.4)  # no test can set when a folder was moved
        (tmp_path / "now").rename(tmp_path / "old")
        (tmp_path / "later").rename(tmp_path / "now")
        policy = Store(tmp_path / "now" / "store").open("tiny/policy@0")
        with pytest.raises(LineageError, match="was moved or changed after its start") as caught:
            engine_of(policy, fake)
        assert "--served-model-name" in caught.value.next
        fake.started = time.time()
        engine_of(policy, fake).close()


@pytest.mark.usefixtures("clocks_agree")
def test_files_that_come_into_a_folder_on_the_way_leave_the_proof(store, policy, server):
    by_path(server, policy.files.folder)
    time.sleep(0.4)
    for folder in (store.path, store.path / "tiny", store.path.parent):
        (folder / "new").mkdir()
    engine_of(policy, server).close()


@pytest.mark.parametrize("root", ["/a\0b", ["x"], {}])
def test_a_root_of_an_odd_kind_proves_nothing(store, policy, server, root):
    server.card |= {"id": root if isinstance(root, str) else "mine", "root": root}
    refused(store, policy, server, LineageError, "it serves")


def test_a_server_without_a_start_proves_nothing_by_path(store, policy, server):
    by_path(server, policy.files.folder)
    server.started = float("nan")
    refused(store, policy, server, LineageError, "does not say when it was started")


def test_weights_that_change_in_the_probe_are_refused(store, policy, server):
    for later in ("step 7", as_model("policy", policy).weights):  # the first ids are of others
        server.later_label = later
        refused(store, policy, server, LineageError, f"loaded later, as default, {later}")


def test_a_row_is_kept_away_from_the_server_that_failed_it(policy, server):
    """The one that fails at once would else have used up every attempt."""
    with FakeVllm(policy) as broken:
        broken.says = lambda answer, count: 500
        server.says = lambda answer, count: time.sleep(0.1) or answer
        engine = engine_of(policy, broken, server, retries=1)
        try:
            assert asked(engine, 24) == [*range(24)]
        finally:
            engine.close()


def test_a_short_overload_does_not_end_the_stage(policy, server):
    overloaded_at = []

    def says(answer, count):
        overloaded_at.append(time.monotonic())
        return 503 if overloaded_at[-1] - overloaded_at[0] < 2.5 else answer

    server.says = says
    engine = engine_of(policy, server)
    try:
        assert asked(engine, 12) == [*range(12)]
    finally:
        engine.close()


@pytest.mark.parametrize("card", [{"id": "mine"}, {"id": "v0", "root": "v0"}, {"root": None}])
def test_a_name_that_says_nothing_proves_nothing(store, policy, server, card):
    by_path(server, policy.files.folder)
    server.card |= card
    refused(store, policy, server, LineageError, "it serves")


def test_an_adapter_of_the_name_is_not_the_model(store, policy, server):
    server.card["parent"] = "base"
    refused(store, policy, server, ResourceError, "names no model")


def test_a_server_that_comes_later_is_waited_for(store, policy, caplog):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ResourceError, match="no server answers; http"):
        sample(store, policy, [url])
    with FakeVllm(make_policy(store, "other", seed=1)) as fake:

        def turn() -> None:
            time.sleep(0.5)
            fake.card["id"] = as_model("policy", policy).weights

        thread = threading.Thread(target=turn)
        thread.start()
        assert_right(sample(store, policy, [fake], wait_seconds=30))
        thread.join()
    assert f"waiting 30 s for a server of {policy.ref}: {fake.url}: it serves" in caplog.text


def test_ctrl_c_ends_the_wait_for_a_server(store, policy):
    def interrupt(*_):
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(30)
        raise KeyboardInterrupt

    def give_up(*_):
        raise AssertionError("still waits for a server")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            sample(store, policy, ["http://127.0.0.1:9"], wait_seconds=3600)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_as_many_connections_as_files_may_be_open(store, policy, server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
        with pytest.raises(ConfigError, match="600 connections at once and 512 other files"):
            sample(store, policy, [server], concurrency=600)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        assert_right(sample(store, policy, [server], concurrency=200))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (712, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_token_is_sent_and_never_shown(store, policy, server, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "a-long-secret")
    server.says = lambda answer, count: 400
    with pytest.raises(ConfigError) as caught:
        sample(store, policy, [server], token="env:MY_TOKEN")
    assert "a-long-secret" not in str(caught.value) and "***" in caught.value.message
    assert all(headers["Authorization"] == "Bearer a-long-secret" for headers in server.headers)


def test_no_proxy_of_the_environment_is_used(store, policy, server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert os.environ["HTTP_PROXY"]
    assert_right(sample(store, policy, [server]))


def test_what_no_server_takes_is_refused_before_one_is_asked(store, policy, server):
    t5 = make_policy(store, "t5", "t5")
    server.card["id"] = as_model("policy", t5).weights
    with pytest.raises(ConfigError, match="encoder-decoder") as caught:
        sample(store, t5, [server])
    assert caught.value.next == 'set generate.engine = "transformers"'
    setup = Setup(policy, Sampling(), (2,), 64, options={"urls": [server.url]})
    for fields, problem in ({"most_pictures": 1}, "pictures"), ({"base": policy}, "adapter"):
        with pytest.raises(ConfigError, match=problem):
            VllmServerEngine(replace(setup, **fields))
    assert server.headers == []


def test_where_and_how_fast_is_no_part_of_the_run_key():
    def key(**options):
        given = {"engine": "vllm-server", "options": options}
        return parse(Config, given, "generate").key()

    first = key(urls=["http://127.0.0.1:8000"])
    assert first == key(
        urls=["https://a:1", "https://b:2"], token="env:T", concurrency=9, retries=0, row_seconds=9
    )
    assert first["engine"] == "vllm-server"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs options.urls"),
        ({"urls": ["http://me:secret@host:8000"]}, "has a user"),
        ({"urls": ["http://host:8000"], "token": "env:T"}, "in the clear"),
        ({"urls": ["http://host:8000"], "token": "secret"}, "must be env:NAME"),
        ({"urls": ["host:8000"]}, "must be http"),
        ({"urls": ["http://a:1", "http://a:1/v1/"]}, "a server is named twice"),
    ],
)
def test_urls_and_tokens_that_are_refused_at_once(options, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        parse(Config, {"engine": "vllm-server", "options": options}, "generate")
    assert "secret@" not in str(caught.value) and "'secret'" not in str(caught.value)


def test_turns_of_an_episode_follow_one_another(store, policy, server):
    names = guessing.write_game(store.path.parent / "game")
    prompts = guessing.render(store, policy, names)
    given = {
        "engine": "vllm-server",
        "samples_per_prompt": 2,
        "sampling": {"max_tokens": 8, "stop_token_ids": [*range(3, 320)]},
        "turns": {"environment": names["environment"], "max_turns": 3, "max_tokens": 24},
        "options": {"urls": [server.url], "concurrency": 4},
    }
    # a turn that is cut at its length ends the episode
    server.says = lambda answer, count: changed(answer, finish_reason="stop")
    refs = {"prompts": prompts.ref, "policy": policy.ref}
    version = store.open(run_stage("generate", given, store, in_process=True, **refs))
    rows = version.table().to_pylist()
    assert server.num_rows == sum(len(row["turns"]) for row in rows) > len(rows)
