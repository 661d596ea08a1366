"""GPU slots of this machine: one stage per device; other stages wait, and log which stage holds it.

Look here for queueing between flows. A slot is a lock file in the folder for temporary files. The
kernel frees it when its holder dies, so flows on one machine queue, and nothing has to be cleaned
up. The devices are those named by CUDA_VISIBLE_DEVICES, else all of the machine, by number. The
child sees only the devices it was given. On a machine without a GPU, `[placement] slots` says how
many heavy stages run at once. Slots cover one user on one machine; for anything beyond,
`[placement] limits` names a limit of the Prefect server.

    with slots(call, "arith · generate 1/3") as env:
        run_call(call, env=env)
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from quiver.schemas.errors import ConfigError, SecurityError, printable
from quiver.stages.core import ranks
from quiver.stages.core.processes.subprocesses import Stopped
from quiver.stages.core.ranks import are_launched, follows_rank_0
from quiver.stages.core.run.call import Call
from quiver.stages.model.devices import engine_gpus

from .stopping import is_stopped

HEAVY = ("generate", "reward", "logprobs", "optimize")
_NO_GPU = ("scripted", "vllm-server")
"""Engines that use no GPU of this machine."""
_POLL_SECONDS = 0.2
log = logging.getLogger("quiver")


@contextmanager
def slots(call: Call, label: str) -> Iterator[dict[str, str]]:
    """Hold the devices that `call` needs, and yield environment variables for its child.

    Args:
        call: The call that needs devices. On a machine without GPU, its `where.slots` applies.
        label: Name of the call in other flows' logs.

    Raises:
        ConfigError: If the machine has fewer devices than the call needs.
        Stopped: If the work is stopped while it waits.
    """
    require_gpus(call)
    devices = visible_gpus()
    count = min(gpus_needed(call), len(devices))
    if are_launched() and ranks.knows_ranks(call.stage):
        # each rank takes the device of its number; the first of this host holds all
        devices = devices[:count]
        if os.environ.get("LOCAL_RANK", "0") != "0":
            yield {}
            return
    with ExitStack() as stack:
        env = {}
        if count:
            names = _take(stack, label, [f"gpu-{device}" for device in devices], count)
            if len(names) < len(devices):
                numbers = [name.removeprefix("gpu-") for name in names]
                env = {"CUDA_VISIBLE_DEVICES": ",".join(numbers)}
        elif call.where.slots and call.stage in HEAVY:
            _take(stack, label, [f"cpu-{number}" for number in range(call.where.slots)], 1)
        yield env


def gpus_needed(call: Call) -> int:
    """Return the number of devices the stage would use on a machine with enough GPUs."""
    config = call.config
    if call.stage == "reward":
        return sum(_model_gpus(call))
    on_cpu = config.get("device") == "cpu" or config.get("engine") in _NO_GPU
    if call.stage not in HEAVY or on_cpu:
        return 0
    if call.stage == "generate":
        return engine_gpus(config.get("options") or {})
    if call.stage == "optimize":
        return int(os.environ.get("LOCAL_WORLD_SIZE") or config.get("processes") or 1)
    return 1


def require_gpus(call: Call) -> None:
    """Raise ConfigError if the stage needs more devices than a child of this process would see.

    Several reward models share devices if there are too few; a single model cannot.
    """
    devices = visible_gpus()
    needed = max(_model_gpus(call), default=0) if call.stage == "reward" else gpus_needed(call)
    if devices and needed > len(devices):
        keys = {"optimize": "optimize.processes", "reward": "reward.models"}
        raise ConfigError(
            keys.get(call.stage, "generate.options"),
            f"{needed} GPUs are needed, and this machine has {len(devices)} "
            f"({printable(', '.join(devices))})",
            next="lower processes or tensor_parallel_size, or see whether CUDA_VISIBLE_DEVICES "
            "hides some",
        )


def _model_gpus(call: Call) -> list[int]:
    """Return the number of devices for each reward model that is not on the CPU."""
    models = call.config.get("models") or []
    on_gpus = [model for model in models if model.get("device") != "cpu"]
    return [engine_gpus(model) for model in on_gpus]


def visible_gpus() -> list[str]:
    """Return the devices that a child of this process would see, named as in
    CUDA_VISIBLE_DEVICES."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        names = [name.strip() for name in variable.split(",")]
        return [name for name in names if name not in ("", "-1", "NoDevFiles")]
    nodes = Path("/dev").glob("nvidia[0-9]*")
    count = sum(node.name.removeprefix("nvidia").isdecimal() for node in nodes)
    return [str(number) for number in range(count)]


def _take(stack: ExitStack, label: str, names: list[str], count: int) -> list[str]:
    """Take `count` of the slots `names`, and return theirs. Closing `stack` frees them.

    All are taken at once, so that no flow waits while holding half of its devices.
    """
    folder = Path(tempfile.gettempdir(), f"quiver-slots-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise SecurityError(
            str(folder),
            "belongs to another user",
            next="remove it, or set TMPDIR to a folder of yours",
        )
    files = [folder / name for name in names]
    last_message = ""
    while True:
        with ExitStack() as attempt:
            free = []
            for file in files:
                with suppress(Timeout):
                    attempt.enter_context(FileLock(file, blocking=False))
                    free.append(file)
                if len(free) == count:
                    stack.push(attempt.pop_all())
                    for slot in free:
                        slot.write_text(f"{label} (process {os.getpid()})", "utf-8")
                    return [slot.name for slot in free]
        message = "; ".join(
            f"{file.name} is held by {printable(holder)}"
            for file in files
            if file not in free and (holder := file.read_text("utf-8", "replace"))
        )
        if message != last_message:
            last_message = message
            log.info("%s waits: %s", label, message)
        if is_stopped():
            raise Stopped(label)
        time.sleep(_POLL_SECONDS)


def server_limit(name: str | None) -> AbstractContextManager[None]:
    """Return a context that holds a slot of the server's global concurrency limit `name`, if not
    None. Of a launcher's ranks only the first takes one.

    Raises ConfigError if the server has no such limit.
    """
    if name is None or follows_rank_0():
        return nullcontext()
    from prefect.client.orchestration import get_client
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            raise ConfigError(
                f"placement.limits {name}",
                "the server has no such global concurrency limit",
                next=f"prefect gcl create {name} --limit 1",
            ) from None
    return concurrency(name, strict=True, raise_on_lease_renewal_failure=False)
