"""Engine `vllm-server` with real servers of a tiny model: the ids and logprobs of engine `vllm`, and
its check. test_vllm_server_faults.py has all that needs no real one."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.model.checkpoints import model_entry
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


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A store with a policy, and the URLs of two servers of it, of which one reports raw logprobs."""
    folder = tmp_path_factory.mktemp("servers")
    store = Store(folder / "store")
    policy = make_policy(store)
    arguments = ["--served-model-name", model_entry("policy", policy).weights]
    arguments += ["--max-model-len", "256", "--enable-scale-out", "--logprobs-mode"]
    with ExitStack() as stack:
        servers = {}
        for mode in ("processed_logprobs", "raw_logprobs"):
            log = folder / f"{mode}.log"
            servers[mode] = VllmProcess(policy.files.folder, log, *arguments, mode)
            stack.callback(servers[mode].kill)
        for server in servers.values():
            server.wait()
        yield store, policy, {mode: server.url for mode, server in servers.items()}


def sample(store, policy, url=None, *, force=False):
    config = {"samples_per_prompt": 3, "dtype": "float32", "rows_per_shard": 16}
    config |= {"sampling": SHAPED}
    if url:
        config |= {"engine": "vllm-server", "options": {"urls": [url], "concurrency": 6}}
    refs = {"prompts": random_prompts(store, 16).ref, "policy": policy.ref}
    return store.open(
        run_stage("generate", config, store, in_process=bool(url), force=force, **refs)
    )


def test_rows_are_those_of_the_engine_in_a_process_of_its_own(world):
    store, policy, urls = world
    versions = [sample(store, policy, urls["processed_logprobs"]), sample(store, policy)]
    assert versions[0].ref != versions[1].ref
    rows, expected_rows = (version.table().to_pylist() for version in versions)
    assert len(rows) == len(expected_rows) == 48
    columns = ("group_id", "seed", "completion_ids", "finish_reason", "stop_reason")
    for row, expected in zip(rows, expected_rows, strict=True):
        for column in (*columns, "completion_text"):
            assert row[column] == expected[column]
        assert row["old_logprobs"] == pytest.approx(expected["old_logprobs"], abs=1e-5)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    engines = [version.manifest.metrics["engine"]["version"] for version in versions]
    assert engines == ["0.32.0", "0.32.0"]


def test_raw_logprobs_are_refused(world):
    store, policy, urls = world
    with pytest.raises(ConfigError, match="its logprobs do not belong to") as caught:
        sample(store, policy, urls["raw_logprobs"], force=True)
    assert "--logprobs-mode processed_logprobs" in caught.value.next
