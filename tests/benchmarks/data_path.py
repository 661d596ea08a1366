"""From the store to packed micro-batches, as optimize goes: 200,000 rollouts of 128 + 256 tokens,
rows a second and memory.

    python -m tests.benchmarks.data_path

Opening checks the hashes and maps the files; load joins, checks, weighs and gathers; packing deals
pieces out into micro-batches; laying out makes the tensors of each micro-batch. Goal: 50,000 rows/s
over all four. Private memory is what the process holds beyond the mapped files, sampled while each
step runs.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .made import RUN, make_rewards, make_rollouts, tiny_policy
from .side_by_side import answer, machine, make_parser, run_side, table, take_turns

ROWS, PROMPT, COMPLETION, BUDGET, GOAL = 200_000, 128, 256, 8192, 50_000
STEPS = ("open", "load", "pack", "lay out")


def main() -> None:
    """Make the rollouts in one process, read them in another."""
    arguments = make_parser(__doc__, ("make", "read")).parse_args()
    rows = ROWS // 20 if arguments.quick else ROWS
    if arguments.side:
        {"make": _make, "read": _read}[arguments.side](arguments, rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        run_side("data_path", "make", "--work", folder, *(["--quick"] if arguments.quick else []))
        found = min(
            take_turns("data_path", ["read"], arguments)["read"],
            key=lambda each: sum(each["seconds"].values()),
        )
    seconds = found["seconds"] | {"all": sum(found["seconds"].values())}
    lines = [
        {
            "step": step,
            "seconds": f"{seconds[step]:.2f}",
            "rows/s": f"{rows / seconds[step]:,.0f}",
            "private memory GB": f"{found['private_gb'][step]:.2f}"
            if step in STEPS
            else f"{max(found['private_gb'].values()):.2f}",
        }
        for step in seconds
    ]
    what = (
        f"{rows:,} rollouts of {PROMPT} + {COMPLETION} tokens, {found['micros']:,} micro-batches "
        f"of {BUDGET:,} tokens."
    )
    print(machine(), f"{what} Goal: {GOAL:,} rows/s over all.", table(lines), sep="\n\n")


def _make(arguments: argparse.Namespace, rows: int) -> None:
    from quiver.stages.core.store import Store

    store = Store(arguments.work / "store")
    make_rewards(store, make_rollouts(store, tiny_policy(store), rows, PROMPT, COMPLETION))
    answer()


def _read(arguments: argparse.Namespace, rows: int) -> None:
    """The steps of `make` of `quiver.stages.optimize.stage` up to the model."""
    from quiver.stages.core.store import Store
    from quiver.stages.model.forward.layout import make_layout
    from quiver.stages.model.forward.packing import pack
    from quiver.stages.model.forward.policy import pieces_of
    from quiver.stages.optimize import algorithms
    from quiver.stages.optimize.config import Config
    from quiver.stages.optimize.rollouts import load

    clock, store = Steps(), Store(arguments.work / "store")
    with clock.step("open"):
        inputs = {role: store.open(f"{RUN}/{kind}") for role, kind in _INPUTS.items()}
        for version in inputs.values():
            version.verify()
    with clock.step("load"):
        batch = load(Config().resolved(), algorithms.find_algorithm("grpo"), store, inputs).batch
    with clock.step("pack"):
        micros = pack(
            pieces_of(
                "shared",
                range(len(batch.groups)),
                batch.prompt_numbers,
                batch.sequences,
                BUDGET,
            ),
            BUDGET,
        )
    with clock.step("lay out"):
        tokens = sum(make_layout(micro, batch.sequences).ids.numel() for micro in micros)
    assert tokens >= rows * (COMPLETION - 1), "every completion is laid out"
    answer(seconds=clock.seconds, private_gb=clock.private_gb, micros=len(micros))


_INPUTS = {"policy": "policy@0", "rollouts": "rollouts@1", "rewards": "rewards@1"}


class Steps:
    """Seconds of each step, and the most private memory (GB) that the process held in it beyond
    what it held at first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.private_gb: dict[str, float] = {}
        self._before = _private()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure what is done inside."""
        done, highest = threading.Event(), [0]

        def watch() -> None:
            while not done.wait(0.02):
                highest[0] = max(highest[0], _private())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - start
            done.set()
            watcher.join()
        self.private_gb[name] = (max(highest[0], _private()) - self._before) / 1e9


def _private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
