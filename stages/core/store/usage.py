"""What the making of a version used, for its manifest: seconds, processor time and memory.

Measured from the opening of its writer: the start of a process and its imports do not count. Each
process that shares the work reports for itself and the processes below it.

Not of the spine: no output depends on it.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import psutil

from .leases import Lease


class Meter:
    """Measures what this process and those below it use from now on."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._processor_before = _processor_seconds()
        if cuda := _cuda_in_use():
            for device in range(cuda.device_count()):
                cuda.reset_peak_memory_stats(device)

    def report(self, phases: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields of a report.

        seconds: of each phase, and `total`
        usage: `processor_seconds`; `peak_memory`, since the processes started; and, if torch used a
            device, `peak_device_memory`
        """
        usage = {"processor_seconds": _processor_seconds() - self._processor_before}
        usage["peak_memory"] = max(
            *(resource.getrusage(who).ru_maxrss * 1024 for who in _WHO),
            *_of_each(lambda process: process.memory_info().rss),
        )
        if cuda := _cuda_in_use():
            devices = range(cuda.device_count())
            usage["peak_device_memory"] = sum(map(cuda.max_memory_allocated, devices))
        total = time.monotonic() - self._started_at
        return {"seconds": {**phases, "total": total}, "usage": usage}


def totals_of(reports: Sequence[Mapping[str, Any]], lease: Lease) -> dict[str, Any]:
    """Return `seconds` and `usage` of a manifest from the reports of all processes.

    Seconds of a phase are summed over processes. `total` is their maximum, so it is the time of the
    process that started first. Memory is the largest process's. `unfinished_attempts` counts the
    processes that held the lease before.
    """
    seconds = [report["seconds"] for report in reports]
    names = dict.fromkeys(name for of_process in seconds for name in of_process)
    summed = {name: sum(of_process.get(name, 0.0) for of_process in seconds) for name in names}
    summed["total"] = max(of_process.get("total", 0.0) for of_process in seconds)
    usage: dict[str, float] = {}
    for report in reports:
        for name, amount in report["usage"].items():
            before = usage.get(name, 0)
            usage[name] = max(before, amount) if name.startswith("peak") else before + amount
    if lease.name == "work" and lease.number > 1:
        usage["unfinished_attempts"] = lease.number - 1
    return {
        "seconds": {name: round(amount, 3) for name, amount in summed.items()},
        "usage": {name: round(amount, 3) for name, amount in usage.items()},
    }


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _cuda_in_use() -> ModuleType | None:
    """Return `torch.cuda` if this process has initialized it."""
    cuda = sys.modules.get("torch.cuda")
    return cuda if getattr(cuda, "is_initialized", lambda: False)() else None


def _processor_seconds() -> float:
    """Return the processor seconds used until now by this process, by children that ended and were
    waited for, and by living ones that `multiprocessing` started, such as a resident engine and its
    workers."""
    return sum(_of_each(lambda process: sum(process.cpu_times()[:4])))


def _of_each(measured: Callable[[psutil.Process], float]) -> list[float]:
    """Measure this process, and the living children that `multiprocessing` started with all
    processes below them."""
    processes = [psutil.Process()]
    for child in multiprocessing.active_children():
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(child.pid)
            processes += [process, *process.children(recursive=True)]
    amounts = []
    for process in processes:
        with suppress(psutil.Error):
            amounts.append(measured(process))
    return amounts
