"""Engine `vllm-server` with real servers of a tiny model: the ids and logprobs of engine `vllm`, its
check, one server that dies. test_vllm_server_faults.py has the faults that a real one does not
show."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.checkpoints import as_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from tests.stages.generate.making import random_prompts
from tests.tiny import make_policy
from tests.vllm_process import VllmProcess

pytestmark = pytest.mark.vllm
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


def test_rows_are_those_of_the_engine_in_a_process_of_its_own(world):
    servers = [world[2]["first"], world[2]["second"]]
    version = sample(world, servers, SHAPED)
    expected = sample(world, [], SHAPED)
    assert_equal(version, expected)
    reasons = {row["finish_reason"] for row in version.table().to_pylist()}
    assert reasons == {"stop", "length"}
    assert min(map(num_answers, servers)) > 5
    engines = [side.manifest.metrics["engine"] for side in (version, expected)]
    assert engines[0]["version"] == engines[1]["version"] == "0.32.0"


def test_raw_logprobs_are_refused(world):
    with pytest.raises(ConfigError, match="its logprobs are not those of") as caught:
        sample(world, [world[2]["raw"]], SHAPED, force=True)
    assert "--logprobs-mode processed_logprobs" in caught.value.next


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
