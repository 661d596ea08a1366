"""The most memory that a stage's process had at once, for test_fit.py."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig

from quiver.stages.common.store import Store, Version
from tests.stages.generate.making import make_prompts
from tests.stages.optimize import world
from tests.tiny import make_folder
from tests.writing import run_here

SIZES = {
    "small": LlamaConfig(
        vocab_size=32000, hidden_size=256, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
    ),
    "medium": LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=1024, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""16 and 74 million weights."""
PROMPTS, SAMPLES, PROMPT, COMPLETION = 3, 8, 128, 64
_RUN = """
import json, resource, sys
from quiver import run_stage
call, refs = map(json.loads, sys.argv[1:])
run_stage(*call, **refs)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def make_rollouts(store: Store, policy: Version) -> tuple[Version, Version]:
    """Rollouts of random ids and their rewards."""
    draw = random.Random(0)
    rows = []
    for group in range(PROMPTS):
        prompt = [draw.randrange(3, 300) for _ in range(PROMPT)]
        rows += [
            {
                "rollout_id": f"{group}-{sample}",
                "group_id": f"g{group}",
                "sample_index": sample,
                "prompt_ids": prompt,
                "completion_ids": [draw.randrange(3, 300) for _ in range(COMPLETION)],
                "old_logprobs": [-10.0] * COMPLETION,
                "completion_text": "",
                "finish_reason": "length",
                "temperature": 1.0,
                "seed": 0,
            }
            for sample in range(SAMPLES)
        ]
    sampled = {"max_tokens": COMPLETION}
    rollouts = world.write_rollouts(store, policy, rows, "tiny", sampling=sampled)
    return rollouts, world.write_rewards(store, rollouts, lambda row: draw.random(), run="tiny")


def prepare(place: Path, size: str, stage: str) -> tuple[Store, dict[str, str]]:
    """A store in `place` with a policy of that size, and the refs of what the stage reads."""
    folder = make_folder(place / "model")
    AutoModelForCausalLM.from_config(SIZES[size]).save_pretrained(folder)
    store = Store(place / "store")
    policy = store.open(run_here("policy", {"model": str(folder)}, store, into="tiny"))
    refs = {"policy": policy.ref}
    if stage == "generate":
        draw = random.Random(0)
        ids = [[draw.randrange(3, 300) for _ in range(PROMPT)] for _ in range(PROMPTS)]
        refs["prompts"] = make_prompts(store, ids, "tiny").ref
    else:
        rollouts, rewards = make_rollouts(store, policy)
        refs |= {"rollouts": rollouts.ref}
        refs |= {"rewards": rewards.ref} if stage == "optimize" else {}
    return store, {role: str(ref) for role, ref in refs.items()}


def measure(store: Store, stage: str, config: dict, refs: dict[str, str]) -> int:
    """The most bytes that the stage's process had at once: a small one starts it, and measures."""
    call = json.dumps([stage, config, str(store.path)])
    command = [sys.executable, "-c", _RUN, call, json.dumps(refs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])
