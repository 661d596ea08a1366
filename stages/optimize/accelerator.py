"""Device, ranks and trackers of a training, by accelerate.

Not of the spine: it says where tensors are and which ranks take part, not what is computed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.common.launched import VARIABLES
from quiver.stages.common.models.devices import uses_gpu
from quiver.stages.common.models.loading import load_as_stored

from .agreement import check_plan
from .checks import check_trackers
from .config import Config

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from quiver.stages.common.runtime.stage import Plan
    from quiver.stages.common.store import Version

    from .trainer import Trainer


HOST_SILENCE = timedelta(hours=1)
"""Of ranks on several hosts: for how long one may not answer."""
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
    launched = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
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
        log.info("optimize.shard has no effect: one process has nobody to share weights with")
    from .trainer import Trainer

    return Trainer, None
