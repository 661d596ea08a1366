"""What is said of vLLM's errors about memory, in the words that the installed vLLM has for them."""

import importlib.util
from pathlib import Path

import pytest

from quiver.schemas.errors import ResourceError
from quiver.stages.model.vllm_env import fatal

VLLM = Path(importlib.util.find_spec("vllm").origin).parent
ELSEWHERE = "run it again"
KNOWN = {
    "v1/worker/gpu_worker.py": ("Error in memory profiling. ", "another process freed GPU memory"),
    "v1/worker/utils.py": ("Free memory on device ", "a share of the total"),
    "v1/core/kv_cache_utils.py": (
        "Try increasing `gpu_memory_utilization` ",
        "raise gpu_memory_utilization",
    ),
}


def advice(message: str) -> str:
    with pytest.raises(ResourceError) as caught, fatal("vllm", "could not start", ELSEWHERE):
        raise AssertionError(message)
    return caught.value.next


@pytest.mark.parametrize("file", KNOWN)
def test_an_error_about_memory_says_what_to_do(file):
    words, expected = KNOWN[file]
    assert words in (VLLM / file).read_text(), "vLLM has other words now"
    assert expected in advice(f"{words}and more")
    assert ELSEWHERE not in advice(f"{words}and more")
    assert advice("CUDA error") == ELSEWHERE


def test_an_error_of_the_engines_own_process_says_what_to_look_for():
    words = "See root cause above. "
    assert words in (VLLM / "v1/engine/utils.py").read_text(), "vLLM has other words now"
    told = advice(f"Engine core initialization failed. {words}")
    assert ELSEWHERE in told
    for words, expected in KNOWN.values():
        assert words.strip(". ") in told and expected in told
