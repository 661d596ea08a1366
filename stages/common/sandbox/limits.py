"""Limits of a sandboxed program, and the prlimit options that enforce them."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass

from quiver.schemas.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Resources that one program may use. Raises ConfigError if a value is out of range."""

    seconds: float = 10.0
    """Wall-clock time from the start of its interpreter; also the CPU time of each process."""
    memory_mib: int = 512
    """Address space of each process, and resident memory of all processes together."""
    processes: int = 16
    """Processes and threads at once (isolation "full" only)."""
    files_mib: int = 16
    """Space in its /tmp, and size of the largest file it may write."""
    open_files: int = 64
    """File descriptors of each process."""
    output_kib: int = 64
    """KiB kept of stdout, and of stderr; the rest is read and discarded."""

    def __post_init__(self) -> None:
        for name, least in {
            "seconds": 0.01,
            "memory_mib": 64,
            "processes": 2,
            "files_mib": 1,
            "open_files": 16,
            "output_kib": 1,
        }.items():
            number = getattr(self, name)
            kinds = (int, float) if name == "seconds" else int
            if not isinstance(number, kinds) or not least <= number <= 1 << 20:
                whole = "" if name == "seconds" else "a whole number "
                raise ConfigError(
                    f"limits.{name}",
                    f"must be {whole}between {least} and {1 << 20}, got {number!r}",
                    next=f"correct limits.{name}",
                )


def limit_options(limits: Limits, pids: int | None = None) -> list[str]:
    """Return prlimit's options; none is above the hard limit of this process.

    Args:
        limits: Limits of the program.
        pids: Limit of processes. Pass it only if a user namespace counts the program's processes
            apart from others. Default: not limited.
    """
    seconds = math.ceil(limits.seconds)
    bounds = {
        "as": (limits.memory_mib << 20,) * 2,
        "core": (1, 1),  # with 0 the kernel would still pipe a core to the host's handler
        "cpu": (
            seconds,
            seconds + 1,
        ),  # SIGXCPU names the cause, SIGKILL ends it a second later
        "fsize": (limits.files_mib << 20,) * 2,
        "memlock": (0, 0),
        "msgqueue": (0, 0),
        "nofile": (limits.open_files,) * 2,
        "rtprio": (0, 0),
    }
    if pids is not None:
        bounds["nproc"] = (pids, pids)
    options = []
    for name, (soft, hard) in bounds.items():
        allowed = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        if allowed == resource.RLIM_INFINITY:
            allowed = hard
        options.append(f"--{name}={min(soft, allowed)}:{min(hard, allowed)}")
    return options
