"""Run by test_vllm_resident.py in a process of its own: a real vLLM is sent to sleep and given the
next policy, by the engine's own code, on whatever build there is. What it answers, as JSON on the
last line.

python -m tests.stages.generate.resident_checks STORE
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np

from quiver.stages.core.store import Store
from quiver.stages.generate.engine import Request, Setup
from quiver.stages.generate.engines import vllm
from quiver.stages.generate.options import Sampling


def answers(engine) -> list[list[float]]:
    """The logprobs of two rows of one prompt, greedily: the second has the first one's prefix."""
    prompt = np.array([1, *range(3, 43)], np.int32)
    requests = [Request(index, prompt, seed=1) for index in range(2)]
    done = {one.index: one.logprobs.tolist() for one in engine.generate(requests)}
    return [done[index] for index in range(2)]


def main() -> None:
    store = Store(sys.argv[1], create=False)
    policies = [store.open(ref) for ref in ("tiny/policy@0", "next/policy@0")]
    sampling = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    setups = [Setup(policy, sampling, (), 64, dtype="float32") for policy in policies]
    if on_gpu := not vllm.vllm_env.find_build("test").cpu:
        setups = [replace(setup, resident=True) for setup in setups]
    engine = vllm.VllmEngine(setups[0])
    if not on_gpu:  # as if it were one that may stay
        engine.cpu = False
        engine.setup = replace(engine.setup, resident=True)
        engine._architecture = vllm._architecture(policies[0])
    out = {"first": answers(engine), "slept": engine.sleep(), "taken": engine.take(setups[1])}
    out["second"] = answers(engine)
    engine.close()
    engine = vllm.VllmEngine(replace(setups[1], resident=False))
    out["fresh"] = answers(engine)
    engine.close()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
