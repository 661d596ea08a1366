"""Engine `vllm-server` before real servers of a tiny model: the ids and logprobs of engine `vllm`,
its check, one server that dies. Faults that a real one will not do are in
test_vllm_server_faults.py."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.checkpoints import as_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from tests.episodes import own_logprobs
from tests.stages.generate import guessing
from tests.stages.generate.making import random_prompts
from tests.tiny import make_policy
from tests.vllm_process import VllmProcess

pytestmark = pytest.mark.vllm
PLAIN = {"temperature": 1.0, "max_tokens": 40, "stop_token_ids": [*range(280, 290)]}
SHAPED = {
    "temperature": 0.7,
    "max_tokens": 40,
    "min_tokens": 5,
    "top_k": 50,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "stop": ["th", "o", "us us", "]hh"],
}


def num_answers(server: VllmProcess) -> int:
    return server.log.read_text().count('POST /inference/v1/generate HTTP/1.1" 200')


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A store with a policy, two servers of it, and one whose logprobs are raw. They start at
    once."""
    folder = tmp_path_factory.mktemp("servers")
    store = Store(folder / "store")
    policy = make_policy(store)
    name = as_model("policy", policy).weights
    arguments = ["--served-model-name", name, "--max-model-len", "256", "--enable-scale-out"]
    logprobs = {
        "first": "processed_logprobs",
        "second": "processed_logprobs",
        "raw": "raw_logprobs",
    }
    with ExitStack() as stack:
        servers = {}
        for server, mode in logprobs.items():
            log = folder / f"{server}.log"
            servers[server] = VllmProcess(
                policy.files.folder, log, *arguments, "--logprobs-mode", mode
            )
            stack.callback(servers[server].kill)
        for server in servers.values():
            server.wait()
        yield store, policy, servers


def sample(world, servers, sampling, *, force: bool = False, **options):
    store, policy, _ = world
    config = {"samples_per_prompt": 3, "dtype": "float32", "sampling": sampling}
    config |= {"rows_per_shard": 16}
    if servers:
        options |= {"urls": [server.url for server in servers], "concurrency": 6}
        config |= {"engine": "vllm-server", "options": options}
    refs = {"prompts": random_prompts(store, 16).ref, "policy": policy.ref}
    ref = run_stage("generate", config, store, in_process=bool(servers), force=force, **refs)
    return store.open(ref)


def assert_equal(version, expected) -> None:
    """The same ids, ends and texts; the same logprobs but for rounding."""
    rows = version.table().to_pylist()
    expected_rows = expected.table().to_pylist()
    assert len(rows) == len(expected_rows) == 48
    for row, expected_row in zip(rows, expected_rows, strict=True):
        for column in ("group_id", "seed", "completion_ids", "finish_reason", "stop_reason"):
            assert row[column] == expected_row[column]
        assert row["completion_text"] == expected_row["completion_text"]
        assert row["old_logprobs"] == pytest.approx(expected_row["old_logprobs"], abs=1e-5)


@pytest.mark.parametrize("sampling", [PLAIN, SHAPED], ids=["plain", "shaped"])
def test_rows_are_those_of_the_engine_in_a_process_of_its_own(world, sampling):
    servers = [world[2]["first"], world[2]["second"]]
    before = [num_answers(server) for server in servers]
    version = sample(world, servers, sampling)
    expected = sample(world, [], sampling)
    assert_equal(version, expected)
    reasons = {row["finish_reason"] for row in version.table().to_pylist()}
    assert reasons == {"stop", "length"}
    spread = [num_answers(server) - count for server, count in zip(servers, before, strict=True)]
    assert min(spread) > 5
    engine, local = version.manifest.metrics["engine"], expected.manifest.metrics["engine"]
    assert engine["version"] == local["version"] == "0.32.0"


def test_episodes_are_sampled_from_all_that_stood_before_each_turn(world):
    store, policy, servers = world
    names = guessing.write_game(store.path.parent / "game")
    prompts = guessing.render(store, policy, names)
    config = {
        "engine": "vllm-server",
        "samples_per_prompt": 4,
        "sampling": {"temperature": 0.7, "max_tokens": 24, "stop_token_ids": [*range(280, 300)]},
        "turns": {"environment": names["environment"], "max_turns": 4, "max_tokens": 48},
        "options": {"urls": [servers["first"].url]},
    }
    refs = {"prompts": prompts.ref, "policy": policy.ref}
    rows = store.open(run_stage("generate", config, store, in_process=True, **refs)).table()
    model = AutoModelForCausalLM.from_pretrained(policy.files.folder, dtype=torch.float32).eval()
    for row in rows.to_pylist():
        with torch.no_grad():
            expected = own_logprobs(model, row).numpy()
        assert np.abs(expected - row["old_logprobs"]).max() < 1e-4


def test_raw_logprobs_are_refused(world):
    with pytest.raises(ConfigError, match="its logprobs are not those of") as caught:
        sample(world, [world[2]["raw"]], PLAIN, force=True)
    assert "--logprobs-mode processed_logprobs" in caught.value.next


def test_what_a_server_refuses_is_told_in_its_words(world):
    with pytest.raises(ConfigError, match=r"answered 400: temperature must be in \[0, 2\]"):
        sample(world, [world[2]["first"]], {**PLAIN, "temperature": 3.0})


def test_a_server_that_is_killed_leaves_its_rows_to_the_other(world):
    """The last test: it ends one of them."""
    first, dying = world[2]["first"], world[2]["second"]
    sampling = {"temperature": 0.9, "max_tokens": 200, "ignore_eos": True}
    expected = sample(world, [first], sampling)
    before = num_answers(dying)
    versions = []
    thread = threading.Thread(
        target=lambda: versions.append(sample(world, [first, dying], sampling, force=True))
    )
    thread.start()
    while num_answers(dying) < before + 3:
        time.sleep(0.01)
        assert thread.is_alive()
    dying.kill()
    answered = num_answers(dying) - before
    thread.join()
    assert 3 <= answered < 40
    assert_equal(versions[0], expected)
    assert versions[0].ref != expected.ref
