"""Device, ranks and trackers of a training, by accelerate; and whether all ranks train the same.

Ranks of one launcher may run different commands, and a folder of the same name may be a different
one on each host. Their gradients would still be summed, so the ranks compare what they have before
the first step; if it differs, each of them raises.

Not of the spine: it says where tensors are and which ranks take part, not what is computed.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.plain import read_json
from quiver.stages.core.ranks import LAUNCHERS
from quiver.stages.core.run.call import quiver_version
from quiver.stages.core.store.leases import Leases
from quiver.stages.model.devices import uses_gpu
from quiver.stages.model.loading import load_as_stored

from .checks import check_trackers
from .config import Config

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from quiver.stages.core.run.stage import Plan
    from quiver.stages.core.store import Version
    from quiver.stages.core.store.storage import Storage

    from .trainer import Trainer


HOST_SILENCE = timedelta(hours=1)
"""Ranks on several hosts may not answer for this long."""
_SECONDS = 10.0  # a network file system may show a new file this late
T = TypeVar("T")
log = logging.getLogger(__name__)


def make_accelerator(config: Config, plan: Plan | None = None) -> Accelerator:
    """Return accelerate's object for device, ranks and, with a `plan`, trackers, which log the
    plan's numbers. Nothing else is taken from accelerate's environment.

    Raises ConfigError if accelerate gives another device, another number of processes, or another
    way to distribute than plain ranks; or if the ranks of a `plan` do not train the same thing.
    """
    from accelerate import Accelerator, InitProcessGroupKwargs

    check_trackers(config.trackers, config.tracker_folder)
    cpu = not uses_gpu("optimize.device", config.device)
    if cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    # The others wait while rank 0 hashes and writes terabytes. If a rank of this host dies, the
    # process that started the ranks ends the others; a dead host is noticed by its silence.
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1) if is_one_host else HOST_SILENCE)
    accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[patience])
    # accelerate's state is global: a second run in this process keeps the first one's device
    device = "cpu" if cpu else "cuda"
    if accelerator.device.type != device:
        raise ConfigError(
            "optimize.device",
            f"expected {device}, found {accelerator.device.type}: there is none, or this process "
            "trained elsewhere before",
            next='set optimize.device = "auto", or start a new process',
        )
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ConfigError(
            "optimize",
            f"expected plain ranks, found {accelerator.distributed_type.value}",
            next="launch with torchrun, and with no variable ACCELERATE_USE_* set",
        )
    launched = {name: os.environ[name] for name in LAUNCHERS if os.environ.get(name)}
    processes = config.processes or int(next(iter(launched.values()), 1))
    if accelerator.num_processes != processes:
        told = ", ".join(f"{name} = {count}" for name, count in launched.items())
        raise ConfigError(
            "optimize.processes",
            f"expected {processes} processes, found {accelerator.num_processes}"
            + (f": {told} in the environment says that a launcher started them" if told else ""),
            next="launch with torchrun --nproc-per-node N (accelerate launch starts one on a "
            "CPU), or unset these variables",
        )
    if plan and accelerator.num_processes > 1:
        check_plan(plan)
    if plan and config.trackers and accelerator.is_main_process:
        from . import tracking

        accelerator.trackers = tracking.start(config.trackers, config.tracker_folder, plan)
    return accelerator


def trainer_of(
    config: Config, accelerator: Accelerator
) -> tuple[type[Trainer], Callable[[Version], nn.Module] | None]:
    """Return the trainer class for these ranks and, if it needs the model on the CPU, the loader
    for that. A single rank never shards."""
    if config.shard and accelerator.num_processes > 1:
        from .sharding import ShardedTrainer

        return ShardedTrainer, load_as_stored
    if config.shard:
        log.info("optimize.shard has no effect: there is only one process to hold the weights")
    from .trainer import Trainer

    return Trainer, None


# -- ranks that train the same


def of_all_ranks(mine: T) -> list[T]:
    """Return each rank's value, in order of the ranks. All ranks must call it."""
    if not torch.distributed.is_initialized():
        return [mine]
    gathered: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def _token(storage: Storage, key: str) -> str:
    """Return the token of a lease; empty if it cannot be read."""
    with suppress(FileNotFoundError, ValueError):
        return read_json(storage.read(key))["token"]
    return ""


def check_plan(plan: Plan) -> None:
    """Raise ConfigError on every rank if one would make another version, runs another Quiver, or
    does not see the store that rank 0 writes to."""
    hosts = [printable(host) for host in of_all_ranks(socket.gethostname())]
    works = of_all_ranks({"run_key": plan.run_key, "Quiver": quiver_version()})
    for rank, work in enumerate(works):
        for name, first in works[0].items():
            if work[name] != first:
                raise ConfigError(
                    "optimize",
                    f"the ranks do not train the same: {name} of rank 0, on {hosts[0]}, is "
                    f"{first}, and of rank {rank}, on {hosts[rank]}, {printable(work[name])}",
                    next="run the same command, with the same Quiver and files, on every host",
                )
    storage = plan.store.storage
    lease = None
    if os.environ.get("RANK", "0") == "0":  # it writes under a lease, and every lease is unique
        leases = Leases(storage, f"{plan.work}.leases")
        key = leases.key("work", leases.top("work").number)
        lease = key, _token(storage, key)
    key, token = of_all_ranks(lease)[0]
    deadline = time.monotonic() + _SECONDS
    # by name: a network file system may show an outdated listing for a minute
    while not (is_seen := _token(storage, key) == token):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for rank, is_shared in enumerate(of_all_ranks(is_seen)):
        if not is_shared:
            raise ConfigError(
                f"store {plan.store.url}",
                f"rank {rank}, on {hosts[rank]}, does not see the store of the first one, on "
                f"{hosts[0]}",
                next="give a store in a folder that all hosts share",
            )
