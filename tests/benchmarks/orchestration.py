"""What orchestration costs, and what overlapping gains.

    python -m tests.benchmarks.orchestration              # a run with nothing left to do, beside a bare Prefect flow
    python -m tests.benchmarks.orchestration --overlap    # overlap = 1 beside the serial order, on two workers

`noop`: the whole process of `quiver run` on a finished store (a tiny model), and of a flow whose
tasks return at once, of as many tasks, against the same Prefect server. What is beyond the bare
flow is ours: imports, the recipe, looking each version up. `overlap`: the demo's task without its
evaluation; generation and scoring in one pool, training in another, one process worker each with
half of the cores, as two hosts would be. Counted is from the first new policy to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from .side_by_side import ROOT, machine, prefect_home, python_path, table

REPEAT = 5
BARE = """
import sys
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

@task(cache_policy=NO_CACHE, persist_result=False)
def nothing(number):
    return number

@flow(persist_result=False)
def bare(count):
    for number in range(count):
        nothing(number)

bare(int(sys.argv[1]))
"""
DEPLOY = """
import sys
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.flows import EntrypointType
from quiver.flows.stage import stage

with get_client(sync_client=True) as client:
    for pool in sys.argv[1:]:
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        stage.to_deployment(pool, work_pool_name=pool, entrypoint_type=EntrypointType.MODULE_PATH).apply()
"""
POOLS = {"sampling": ("generate", "reward"), "training": ("optimize",)}


def main() -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--overlap", action="store_true", help="measure overlap = 1 instead of what a no-op costs"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: to see that it runs, not to be quoted"
    )
    parser.add_argument("--repeat", type=int, help="how often each side has its turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as env:
        rows = (_overlap if arguments.overlap else _noop)(Path(folder), env, arguments)
    print(machine(), table(rows), sep="\n\n")


# -- nothing left to do


def _noop(work: Path, env: dict[str, str], arguments: argparse.Namespace) -> list[dict[str, str]]:
    from tests.flows.conftest import write_recipe

    recipe, rows, per_iteration = write_recipe(work / "tiny") / "recipe.toml", [], {}
    counts = (1, 2) if arguments.quick else (1, 6)
    for iterations in reversed(
        counts
    ):  # each is measured after its last iteration, which the longer one is not
        _quiver(recipe, env, iterations)
    for iterations in counts:
        tasks = _quiver(recipe, env, iterations).stderr.count("already done")
        sides = {
            "quiver": lambda n=iterations: _quiver(recipe, env, n),
            "bare": lambda n=tasks: _run([sys.executable, "-c", BARE, str(n)], env, recipe.parent),
        }
        seconds = _in_turn(sides, arguments.repeat or (1 if arguments.quick else REPEAT))
        per_iteration[iterations] = seconds["quiver"] - seconds["bare"]
        rows.append(
            {
                "no-op run": f"{iterations} iteration{'s' if iterations > 1 else ''}, {tasks} "
                "tasks",
                "bare Prefect flow, s": f"{seconds['bare']:.2f}",
                "quiver run, s": f"{seconds['quiver']:.2f}",
                "ours, s": f"{per_iteration[iterations]:.2f}",
            }
        )
    each = (per_iteration[counts[1]] - per_iteration[counts[0]]) / (counts[1] - counts[0])
    further = dict.fromkeys(rows[0], "") | {
        "no-op run": "each further iteration",
        "ours, s": f"{each:.3f}",
    }
    return [*rows, further]


def _quiver(recipe: Path, env: dict[str, str], iterations: int) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "quiver.flows.cli.main",
        "run",
        str(recipe),
        "--json",
        "--iterations",
        str(iterations),
    ]
    return _run(command, env, recipe.parent)


def _in_turn(sides: dict, repeat: int) -> dict[str, float]:
    """Median seconds of each side; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, call in sides.items():
            started = time.monotonic()
            call()
            found[name].append(time.monotonic() - started)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


# -- sampling ahead


def _overlap(
    work: Path, env: dict[str, str], arguments: argparse.Namespace
) -> list[dict[str, str]]:
    recipe, settings = _demo(work, quick=arguments.quick)
    _run([sys.executable, "-c", DEPLOY, *POOLS], env, ROOT)
    cores = sorted(os.sched_getaffinity(0))
    halves = {"sampling": cores[: len(cores) // 2] or cores, "training": cores[len(cores) // 2 :]}
    found: dict[int, list[float]] = {0: [], 1: []}
    with ExitStack() as workers:
        for pool, own in halves.items():
            workers.enter_context(_worker(pool, env, own))
        for turn in range(arguments.repeat or 1):
            for overlap, seconds in found.items():
                store = work / f"store-{overlap}-{turn}"
                seconds.append(
                    _seconds_an_iteration(recipe, store, env, [*settings, f"overlap={overlap}"])
                )
    serial, ahead = (statistics.median(found[overlap]) for overlap in (0, 1))
    return [
        {"": name, "s an iteration": f"{seconds:.1f}", "times": f"{serial / seconds:.2f}"}
        for name, seconds in (("serial", serial), ("overlap = 1", ahead))
    ]


def _demo(work: Path, *, quick: bool) -> tuple[Path, list[str]]:
    """The recipe, and what is set over it for both sides."""
    if quick:
        from tests.flows.conftest import write_recipe

        folder, extra = write_recipe(work / "tiny"), ["iterations=3"]
        about = {"policy.model": "model", "data.source": "questions.jsonl"}
        extra += [f"{key}={str(folder / name)!r}" for key, name in about.items()]
        extra += [f"reward.functions=[{{use={str(folder / 'rewards.py') + ':evenness'!r}}}]"]
        recipe = folder / "recipe.toml"
    else:
        recipe = ROOT / "deployments/recipes/demo.toml"
        extra = ["iterations=4", "data.limit=32", "optimize.score_after=false"]
    placed = [f"placement.{stage}={pool}" for pool, stages in POOLS.items() for stage in stages]
    return recipe, [
        *extra,
        *placed,
        "data.held_out=null",
        "optimize.max_staleness=1",
        "placement.fan_out=1",
    ]


def _seconds_an_iteration(
    recipe: Path, store: Path, env: dict[str, str], settings: list[str]
) -> float:
    given = [
        part for setting in [*settings, f"store={str(store)!r}"] for part in ("--set", setting)
    ]
    done = _run(
        [sys.executable, "-m", "quiver.flows.cli.main", "run", str(recipe), "--json", *given],
        env,
        ROOT,
    )
    policies = [each["policy"] for each in json.loads(done.stdout.splitlines()[-1])["iterations"]]
    from quiver.stages.core.store import Store

    ends = [
        datetime.fromisoformat(Store(store).open(ref).manifest.created).timestamp()
        for ref in policies
    ]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


@contextmanager
def _worker(pool: str, env: dict[str, str], cores: list[int]) -> Iterator[None]:
    """A process worker that has only these cores."""
    own = {**env, "OMP_NUM_THREADS": str(len(cores)), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
    worker = subprocess.Popen(
        command, env=own, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.sched_setaffinity(worker.pid, cores)
    try:
        yield
    finally:
        worker.terminate()
        try:
            worker.wait(10)
        except (
            subprocess.TimeoutExpired
        ):  # it waits for a server's answer, or for longer than anybody would
            worker.kill()
            worker.wait()


# -- processes


@contextmanager
def _server(work: Path) -> Iterator[dict[str, str]]:
    """A Prefect server of one's own; yields the environment in which both sides run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_LEVEL": "WARNING",
    }
    env = {
        **os.environ,
        **quiet,
        **prefect_home(work),
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=1)
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit("Prefect's server ended as it started")
                time.sleep(0.1)
        yield {**env, "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    finally:
        server.terminate()
        server.wait(30)


def _run(command: list[str], env: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stderr[-4000:]}")
    return done


if __name__ == "__main__":
    main()
