"""Two processes with a vLLM engine each share one version: the same ids as one process, its
logprobs but for rounding."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from quiver.stages.common.runtime.runner import Call, run_call
from tests.stages.generate.making import random_prompts
from tests.stages.sharing import copy, require_whole
from tests.tiny import make_policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]  # three engine starts


def test_two_engines_make_what_one_makes(store, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd(), prepend=os.pathsep)
    make_policy(store)
    random_prompts(store, 30)
    config = {
        "samples_per_prompt": 4, "rows_per_shard": 10, "dtype": "float32", "options": {"max_num_seqs": 8},
        "sampling": {"max_tokens": 48, "ignore_eos": True},
    }  # fmt: skip
    shared = Call(
        "generate",
        config,
        store.path,
        {"prompts": "tiny/prompts@1", "policy": "tiny/policy@0"},
        share=True,
    )
    other = copy(store, tmp_path / "alone")
    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(run_call, [shared, shared]))
    assert [outcome.ref for outcome in outcomes] == ["tiny/rollouts@1"] * 2
    require_whole(store, "tiny", "rollouts")
    run_call(replace(shared, store=other.path, share=False))
    made, whole = (each.open("tiny/rollouts@1").table() for each in (store, other))
    exact = [name for name in whole.column_names if name != "old_logprobs"]
    assert made.select(exact).equals(whole.select(exact))
    a, b = (np.array(each["old_logprobs"].combine_chunks().flatten()) for each in (made, whole))
    assert np.abs(a - b).max() < 1e-5
