"""Five optimizer steps of every algorithm on the tiny llama, on one CPU thread: `trace.json`, which
a refactor reproduces.

    python -m tests.golden.make_trace           # all anew; only where a number should change
    python -m tests.golden.make_trace gmpo      # of these alone

Prompts, completions and rewards come from Python's own generator, whose numbers no library's
version changes; the logprobs they are said to be sampled with are the model's own, moved by noise,
so that ratios differ from 1 and bounds are met. One group has equal rewards, one rollout has none,
one was cut by length. AdamW's `eps` is far above its default: a step is then nearly linear in the
gradient, where the default turns rounding noise in a tiny gradient into a whole step of another
sign.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.model.loading import load_model
from quiver.stages.optimize.algorithms import ALGORITHMS
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.tiny import EOS, make_policy

PATH = Path(__file__).with_name("trace.json")
STEPS = 5
GROUPS, EACH = 5, 4
COLUMNS = ("tokens", "rollouts", "loss", "grad_norm", "entropy", "approx_kl", "clip_fraction")
METRICS = ("reward_mean", "reward_std", "rollouts", "kept", "zero_advantage", "dropped")
MET = {
    "dppo": {"divergence_low": 1e-3, "divergence_high": 1e-3},
    "dppo_kl": {"divergence_low": 1e-4, "divergence_high": 1e-4},
    "pass_at_k": {"pass_k": 2},
}
"""Bounds that are met where the tiny policy's probabilities, of 1/300, meet none of the default's;
and a k below the size of the groups."""
OPTIONS = {
    "learning_rate": 5e-4,
    "eps": 1e-3,
    "epochs": STEPS,
    "device": "cpu",
    "audit": {"enabled": False},
}


def rollouts(policy) -> list[dict[str, Any]]:
    """Twenty rows in five groups, with reward: 4 to 9 random ids each, the last one the end token
    but for one that was cut."""
    numbers, model = random.Random(20), load_model(policy, dtype=torch.float64)
    rows = []
    for group in range(GROUPS):
        prompt = [numbers.randrange(3, 300) for _ in range(numbers.randrange(3, 8))]
        for index in range(EACH):
            ids = [numbers.randrange(3, 300) for _ in range(numbers.randrange(3, 9))] + [EOS]
            with torch.no_grad():
                table = (
                    model(input_ids=torch.tensor([prompt + ids]))
                    .logits[0, len(prompt) - 1 : -1]
                    .log_softmax(-1)
                )
            own = table.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
            cut = (group, index) == (2, 1)
            rows.append(
                {
                    "rollout_id": f"r-{group}-{index}",
                    "group_id": f"g-{group}",
                    "sample_index": index,
                    "prompt_ids": prompt,
                    "completion_ids": ids[:-1] if cut else ids,
                    "old_logprobs": [
                        min(p + numbers.gauss(0, 0.25), 0.0) for p in (own[:-1] if cut else own)
                    ],
                    "finish_reason": "length" if cut else "stop",
                    "stop_reason": None,
                    "completion_text": "",
                    "temperature": 1.0,
                    "seed": 0,
                }
            )
    return rows


def score(row: dict[str, Any]) -> float | None:
    """The share of even ids; group 1 is all equal, one rollout of group 3 has no reward."""
    if row["group_id"] == "g-1":
        return 0.5
    return None if row["rollout_id"] == "r-3-2" else world.even_share(row)


@cache
def inputs() -> tuple[tempfile.TemporaryDirectory, Store, dict[str, Any]]:
    """A folder, its store, and in it what is trained on."""
    folder = tempfile.TemporaryDirectory()
    store = Store(Path(folder.name) / "store")
    policy = make_policy(store)
    sampled = world.write_rollouts(store, policy, rollouts(policy))
    rewards = world.write_rewards(store, sampled, score)
    return folder, store, {"policy": policy.ref, "rollouts": sampled.ref, "rewards": rewards.ref}


def trace(algorithm: str, **options: Any) -> dict[str, Any]:
    """The steps and metrics of `algorithm`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _, store, refs = inputs()
        met = MET.get(algorithm, {})
        config = Config(algorithm=algorithm, **{**OPTIONS, **met, **options})
        ref = run_stage("optimize", config, store, in_process=True, force=True, **refs)
        metrics = store.open(ref).manifest.metrics
        steps = store.open(metrics["updates"]).table().to_pylist()
        return {
            "steps": [{name: row[name] for name in COLUMNS} for row in steps],
            "metrics": {name: metrics[name] for name in METRICS},
        }
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    golden = json.loads(PATH.read_text()) if sys.argv[1:] else {}
    golden |= {name: trace(name) for name in sys.argv[1:] or ALGORITHMS}
    PATH.write_text(json.dumps({name: golden[name] for name in ALGORITHMS}, indent=1) + "\n")
