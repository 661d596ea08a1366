"""Who may use a GPU now: one stage a device, and the next one waits and says for whom.

A slot is a lock file that the system frees when its holder dies, however it dies; so two flows on
one machine queue, and nothing has to be cleaned up. Devices are those that CUDA_VISIBLE_DEVICES
names, or else all that the machine has, by their number; the child sees only those that it got. On
a machine without a GPU `[placement] slots` says how many heavy stages run at once. Locks are those
of one user of one machine; `[placement] limits` names a limit of the Prefect server, for everything
beyond that.

    with slots(call, "arith · generate 1/3", cpu=1) as env:
        run_call(call, env=env)
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.runtime.runner import Call
from quiver.stages.common.runtime.subprocesses import Stopped

HEAVY = ("generate", "reward", "logprobs", "optimize")
_POLL_SECONDS = 0.2
log = logging.getLogger("quiver")


@contextmanager
def slots(
    call: Call,
    label: str,
    cpu: int = 0,
    limit: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, str]]:
    """Hold what `call` needs; yields what its child's environment needs to know of it. Stopped when
    `stopped()` is true first.

    `cpu`: heavy stages at once on a machine without GPU, 0 for any number. `limit`: a global
    concurrency limit of the server.
    """
    count, devices = gpus_needed(call), visible_gpus()
    with _limit(limit), ExitStack() as held:
        if count and devices:
            chosen = _take(held, label, [f"gpu-{name}" for name in devices], count, stopped)
            own = [name.removeprefix("gpu-") for name in chosen]
            yield {"CUDA_VISIBLE_DEVICES": ",".join(own)} if own != devices else {}
        else:
            if cpu and call.stage in HEAVY:
                _take(held, label, [f"cpu-{number}" for number in range(cpu)], 1, stopped)
            yield {}


def gpus_needed(call: Call) -> int:
    """How many devices the stage would use where there are any."""
    config = call.config
    if call.stage == "reward":
        return int(any(model.get("device") != "cpu" for model in config.get("models") or []))
    if (
        call.stage not in HEAVY
        or config.get("device") == "cpu"
        or config.get("engine") == "scripted"
    ):
        return 0
    return (
        int((config.get("options") or {}).get("tensor_parallel_size") or 1)
        if call.stage == "generate"
        else 1
    )


def visible_gpus() -> list[str]:
    """The devices that a child of this process would see, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [
            name.strip()
            for name in named.split(",")
            if name.strip() not in ("", "-1", "NoDevFiles")
        ]
    found = [
        path
        for path in Path("/dev").glob("nvidia[0-9]*")
        if path.name.removeprefix("nvidia").isdecimal()
    ]
    return [str(number) for number in range(len(found))]


def _take(
    held: ExitStack, label: str, names: list[str], count: int, stopped: Callable[[], bool]
) -> list[str]:
    """`count` of the slots `names` (or all, if they are fewer), all at once, so that nobody waits
    with half of what he needs."""
    folder = Path(tempfile.gettempdir(), f"quiver-slots-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    told = ""
    while True:
        with ExitStack() as attempt:
            mine = []
            for name in names:
                if len(mine) < count and _lock(attempt, folder / name, label):
                    mine.append(name)
            if len(mine) == min(count, len(names)):
                held.push(attempt.pop_all())
                return mine
        holders = "; ".join(
            f"{name} is held by {_holder(folder / name)}" for name in names if name not in mine
        )
        if holders != told:
            told = holders
            log.info("%s waits: %s", label, holders)
        if stopped():
            raise Stopped(label)
        time.sleep(_POLL_SECONDS)


def _lock(attempt: ExitStack, path: Path, label: str) -> bool:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    attempt.callback(os.close, handle)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{label} (process {os.getpid()})".encode(), 0)
    return True


def _holder(path: Path) -> str:
    return printable(path.read_text(errors="replace")) or "another process"


def _limit(name: str | None):
    """A slot of the server's global concurrency limit `name`. ConfigError where there is no such
    limit."""
    if name is None:
        return nullcontext()
    from prefect.client.orchestration import get_client
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            what = "the server has no such global concurrency limit"
            raise ConfigError(
                f"placement.limits {name}", what, next=f"prefect gcl create {name} --limit 1"
            ) from None
    return concurrency(name, strict=True, raise_on_lease_renewal_failure=False)
