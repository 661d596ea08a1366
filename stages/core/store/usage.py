"""What the making of a version used: processor time, devices and memory, for its manifest.

Measured from the opening of its writer: the start of a process and its imports do not count. Each
process that shared the work reports for itself and its descendants, and `usage_of` sums it up.

Not of the spine: no output depends on it.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil


def processor_seconds() -> float:
    """Return the processor seconds of this process and its descendants up to now.

    Counted are those that have ended and were waited for, and children of `multiprocessing` that
    live on, such as the process of a resident engine.
    """
    total = 0.0
    for process in _family():
        with suppress(psutil.Error):  # it has ended
            total += sum(process.cpu_times()[:4])
    return total


def peaks() -> dict[str, int]:
    """Return `peak_memory`, the bytes of the largest process, and `peak_device_memory`, the bytes
    that torch allocated on the devices of this process, if it used any."""
    ended = max(
        resource.getrusage(who).ru_maxrss * 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    sizes = [ended]
    for process in _family():
        with suppress(psutil.Error):
            sizes.append(process.memory_info().rss)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {"peak_memory": max(sizes)}
    devices = range(torch.cuda.device_count())
    allocated = sum(torch.cuda.max_memory_allocated(device) for device in devices)
    return {"peak_memory": max(sizes), "peak_device_memory": allocated}


def usage_of(reports: Sequence[dict[str, Any]], devices: int) -> dict[str, float]:
    """Return the usage of all processes, from their reports.

    Args:
        devices: devices that each process held. 0: it worked on processors alone.
    """
    usages = [report["usage"] for report in reports]
    usage = {"processor_seconds": round(sum(one["processor_seconds"] for one in usages), 3)}
    for name in ("peak_memory", "peak_device_memory"):
        if sizes := [one[name] for one in usages if name in one]:
            usage[name] = max(sizes)
    if devices:
        seconds = sum(report["seconds"]["total"] for report in reports)
        usage |= {"devices": devices * len(reports), "device_seconds": round(devices * seconds, 3)}
    return usage


def _family() -> list[psutil.Process]:
    processes = []
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        with suppress(psutil.Error):  # it has ended
            processes.append(psutil.Process(pid))
    return processes
