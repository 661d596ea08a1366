"""Saved episodes of eight turns through reward, logprobs and optimize, beside single completions of
as many forwarded tokens.

    python -m tests.benchmarks.turns

10,000 rows in groups of 8, of a tiny model, so that our own code is most of the work: prompts of 64
ids, and 240 behind each, which are one completion, or eight turns of 16 with seven observations of
16 between them. Seconds are a stage's whole, without its imports.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.schemas import rollouts as rollouts_kind
from quiver.stages.model.checkpoints import model_entry

from .made import RUN, make_prompts, rollouts_table, tiny_policy, write_version
from .side_by_side import answer, machine, make_parser, median, table, take_turns

SIDES = ("turns", "single")
STAGES = ("reward", "logprobs", "optimize")
ROWS, GROUP, PROMPT, TURNS, LENGTH = 10_000, 8, 64, 8, 16
READ = TURNS * LENGTH + (TURNS - 1) * LENGTH


def main() -> None:
    """Compare, or be one side of a comparison."""
    arguments = make_parser(__doc__, SIDES, repeat=3).parse_args()
    if arguments.side:
        _run(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        found = take_turns("turns", SIDES, arguments)
    rows = []
    for stage in STAGES:
        seconds = {side: median(found[side], stage) for side in SIDES}
        forwarded = found["single"][0]["rows"] * READ
        rows.append(
            {
                "stage": stage,
                **{
                    f"{side}, forwarded tokens/s": f"{forwarded / seconds[side]:.0f}"
                    for side in SIDES
                },
                "turns / single": f"{seconds['single'] / seconds['turns']:.2f}",
            }
        )
    print(machine(), table(rows), sep="\n\n")


def _run(arguments: argparse.Namespace) -> None:
    from quiver.stages.core.store import Store
    from tests.writing import run_here

    store = Store(arguments.work / f"{arguments.side}-{time.time_ns()}")
    policy = tiny_policy(store)
    count = 160 if arguments.quick else ROWS
    prompts = make_prompts(store, count // GROUP)
    rows = rollouts_table(count, PROMPT, READ, GROUP)
    if arguments.side == "turns":
        rows = with_turns(rows)
    models = (model_entry("policy", policy),)
    rollouts = write_version(store, "rollouts", "generate", rows, {"prompts": prompts}, models)
    calls: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "reward": (
            {
                "functions": [
                    {"use": "exact_match"},
                    {"use": "quiver.stages.reward.functions:lot"},
                ]
            },
            {"rollouts": rollouts.ref},
        ),
        "logprobs": ({"role": "ref"}, {"rollouts": rollouts.ref, "policy": policy.ref}),
        "optimize": (
            {"audit": {"enabled": False}, "minibatches": 4},
            {
                "policy": policy.ref,
                "rollouts": rollouts.ref,
                "rewards": f"{RUN}/rewards@1",
            },
        ),
    }
    _warm_up(store)
    numbers = {}
    for stage, (config, refs) in calls.items():
        started = time.monotonic()
        run_here(stage, config, store, **refs)
        numbers[stage] = time.monotonic() - started
    answer(rows=count, **numbers)


def _warm_up(store: Any) -> None:
    """Import what the stages need."""
    import quiver.stages.logprobs.stage
    import quiver.stages.optimize.stage
    import quiver.stages.reward.stage  # noqa: F401


def with_turns(single: pa.Table) -> pa.Table:
    """The same rows as episodes: of each completion the ids of the turns, and between them those
    that nobody sampled."""
    count = len(single)
    ids = single["completion_ids"].combine_chunks().values.to_numpy().reshape(count, READ)
    logprobs = single["old_logprobs"].combine_chunks().values.to_numpy().reshape(count, READ)
    is_sampled = np.arange(READ) // LENGTH % 2 == 0
    observed = ids[:, ~is_sampled].reshape(count, TURNS - 1, LENGTH).tolist()
    turn = {
        "length": LENGTH,
        "text": "12",
        "restart_ids": None,
        "finish_reason": "stop",
        "tool_calls": None,
        "parse_error": None,
        "observation": "lower",
        "reward": 0.5,
        "info": None,
        "seconds": 0.0,
    }
    turns = [
        [{**turn, "observation_ids": ids} for ids in [*observations, []]]
        for observations in observed
    ]
    columns = {
        **{name: single[name] for name in single.column_names},
        "completion_ids": list(ids[:, is_sampled]),
        "old_logprobs": list(logprobs[:, is_sampled]),
        "turns": turns,
        "end_reason": ["max_turns"] * count,
    }
    return pa.table(columns, schema=rollouts_kind.OF_TURNS)


if __name__ == "__main__":
    main()
