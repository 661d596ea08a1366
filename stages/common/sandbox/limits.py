"""What one program may use, and how util-linux's prlimit is told."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass

from quiver.schemas.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What one program may use. ConfigError when a value is out of range."""

    seconds: float = 10.0
    """Wall-clock time from the start of its interpreter, and CPU time of each of its processes."""
    memory_mib: int = 512
    """Address space of each process, and resident memory of all together."""
    processes: int = 16
    """Processes and threads at once (isolation "full" only)."""
    files_mib: int = 16
    """Space in its /tmp, and the largest file that it may write."""
    open_files: int = 64
    """File descriptors of each process."""
    output_kib: int = 64
    """How much is kept of its stdout, and of its stderr; the rest is read and thrown away."""

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
    """prlimit's options, none above what this process is allowed; `pids` only where a user
    namespace counts them apart from others."""
    seconds = math.ceil(limits.seconds)
    bounds = {
        "as": (limits.memory_mib << 20,) * 2,
        "core": (1, 1),  # at 0 the kernel still pipes a core to a handler of the host's
        "cpu": (seconds, seconds + 1),  # SIGXCPU tells, SIGKILL a second later ends it
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
