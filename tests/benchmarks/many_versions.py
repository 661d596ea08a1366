"""What a store costs that holds many versions of one kind: python -m tests.benchmarks.many_versions

Seconds, medians of five, with 100 versions and with 10,000 side by side: a look for a run_key that is
not there, for one that is, begin and commit of one more version, and what `quiver ls` asks. The
first look makes the index anew from the manifests.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from quiver.stages.core.store import Store
from tests.stages.core.store.test_store import Settings, commit, table, work_on

RUNS = 5


def fill(folder: Path, count: int) -> Store:
    """A store of `count` versions of a/logprobs, linked copies of one with other run_keys."""
    store = Store(folder)
    first = commit(store, Settings(seed=0), shards=1)
    for number in range(2, count + 1):
        copy = first.files.folder.with_name(f"v{number:06d}")
        copy.mkdir()
        os.link(first.files.path(first.files.names[0]), copy / first.files.names[0])
        changes = {"version": number, "run_key": f"{number:064x}"}
        manifest = first.manifest.model_copy(update=changes)
        (copy / "manifest.json").write_bytes(manifest.to_json())
    return store


def seconds(action: Callable[[int], object]) -> float:
    """The median of `RUNS` calls, each given its number."""
    times = []
    for number in range(RUNS):
        started_at = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - started_at)
    return statistics.median(times)


def write_one(store: Store, seed: int) -> None:
    """Begin and commit a version of one shard."""
    with work_on(store, Settings(seed=1000 + seed)) as work:
        work.write(0, table(0))
        work.commit()


def main() -> None:
    """Print one row a size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer versions, to see that it runs")
    sizes = (10, 100) if parser.parse_args().quick else (100, 10_000)
    print("| versions | first look | miss | hit | begin + commit | ls |")
    print("|---|---|---|---|---|---|")
    for count in sizes:
        with tempfile.TemporaryDirectory() as folder:
            store = fill(Path(folder) / "store", count)
            started_at = time.perf_counter()
            store.find("a", "logprobs", "f" * 64)
            row = [time.perf_counter() - started_at]
            row.append(seconds(lambda _, store=store: store.find("a", "logprobs", "f" * 64)))
            row.append(seconds(lambda _, store=store: store.find("a", "logprobs", f"{7:064x}")))
            row.append(seconds(lambda number, store=store: write_one(store, number)))
            row.append(seconds(lambda _, store=store: store.summaries("a", "logprobs")))
        print(f"| {count:,} | " + " | ".join(f"{value:.4f}" for value in row) + " |")


if __name__ == "__main__":
    main()
