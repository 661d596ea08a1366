"""How full vLLM stays while an environment takes its time: the same episodes with steps of 0 to
200 ms and of none.

    python -m tests.benchmarks.slow_environment

SmolLM2-135M-Instruct, 64 episodes of four turns with 33 sampled tokens each, 16 of them decoded at
once. What is sampled is the same on both sides. Tokens per second are those of the stage's
manifest: sampled ids over the seconds between the engine's start and the last answer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from .made import real_policy
from .side_by_side import answer, machine, make_parser, median, table, take_turns

SIDES = ("slow", "at_once")
PROMPTS, SAMPLES, AT_ONCE, TURNS = 16, 4, 16, 4


class Sleeping:
    """Answers any turn with a word, after up to `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def step(self, turn) -> str:
        """As long as the turn's text decides."""
        share = sum(map(ord, turn.text)) % 101 / 100
        time.sleep(self._seconds * share)
        return "Go on."


def main() -> None:
    """Compare, or be one side of a comparison."""
    arguments = make_parser(__doc__, SIDES, repeat=3).parse_args()
    if arguments.side:
        _run(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        found = take_turns("slow_environment", SIDES, arguments)
    speeds = {side: median(found[side], "tokens_per_second") for side in SIDES}
    rows = [
        {
            "environment": side,
            "sampled tokens": found[side][0]["tokens"],
            "tokens/s": f"{speeds[side]:.1f}",
            "of at_once": f"{speeds[side] / speeds['at_once']:.2f}",
        }
        for side in SIDES
    ]
    print(machine(), table(rows), sep="\n\n")


def _run(arguments: argparse.Namespace) -> None:
    from quiver.stages.core.store import Store
    from tests.writing import run_here

    store = Store(arguments.work / f"{arguments.side}-{time.time_ns()}")
    policy = real_policy(store)
    environment = {
        "environment": "tests.benchmarks.slow_environment:Sleeping",
        "arguments": {"seconds": 0.2 if arguments.side == "slow" else 0.0},
    }
    count = 4 if arguments.quick else PROMPTS
    prompts = run_here(
        "prompt",
        {
            "source": "quiver.deployments.recipes.larger:rows",
            "arguments": {"split": "train"},
            "group_id": "group_id",
            "prompt": "question",
            "limit": count,
            "turns": environment,
        },
        store,
        policy=policy.ref,
    )
    config = {
        "samples_per_prompt": SAMPLES,
        "dtype": "float32",
        # a turn ends with the first space behind its 32nd token
        "sampling": {"min_tokens": 32, "max_tokens": 64, "stop": [" "], "ignore_eos": True},
        "options": {"max_num_seqs": AT_ONCE},
        "turns": {**environment, "max_turns": TURNS, "max_tokens": 4096, "processes": 8},
    }
    ref = run_here("generate", config, store, prompts=prompts, policy=policy.ref)
    metrics = store.open(ref).manifest.metrics
    names = ("tokens", "tokens_per_second", "environment_seconds", "mean_turns")
    answer(**{name: metrics[name] for name in names})


if __name__ == "__main__":
    main()
