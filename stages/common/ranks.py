"""Several ranks of one stage: those that a launcher started, torchrun say, on any number of hosts,
or else those that this host's own agent of torch.distributed.run starts.

    count = needed("optimize", config)       # 1 where there is nothing to start
    code = launch(command, answer, count)    # exit code; the stage's answer lies in `answer`

Under a launcher each rank is a whole command. Without one the stage's own process becomes the
agent. It is the one that the keeper watches, so no rank outlives it, and it ends as the ranks did:

    keeper
    └── python -m quiver.stages optimize …              the agent
        ├── python -m quiver.stages optimize … --rank   RANK=0: writes the versions
        └── python -m quiver.stages optimize … --rank   RANK=1

Not of the spine: what a stage makes does not depend on who started its ranks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quiver.schemas.errors import QuiverError, ResourceError
from quiver.stages.common.runtime.stage import load
from quiver.stages.common.runtime.subprocesses import GRACE_SECONDS

LAUNCHED = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES")
"""What a launcher sets. Where one is set the ranks are there already."""
_LOST_PEER = re.compile(
    r"gloo/|NCCL|Dist(Network|Backend|Store)Error|Connection (reset|closed|refused)|Broken pipe"
)
"""In what a rank meets whose peer is gone; torch has no class for it with gloo."""
_PEERS = "the other ranks"
"""What an error is about that only says that they are gone."""


def are_launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return any(name in os.environ for name in LAUNCHED)


def can_share(stage: str) -> bool:
    """Whether several ranks do the work of `stage`; any other is done by the first rank alone."""
    return getattr(load(stage), "RANKS", False)


def needed(stage: str, config: Mapping[str, Any]) -> int:
    """How many ranks a call of `stage` is to be started as. 1: its work is not shared among ranks,
    or a launcher has started them."""
    processes = config.get("processes")
    if not can_share(stage) or are_launched() or not str(processes).isdecimal():
        return 1
    return int(processes)


def prepare() -> None:
    """Import what `launch` needs, before there is a call."""
    import torch.distributed.launcher.api  # noqa: F401


def answer_of(answer: Path, rank: str | int) -> Path:
    """The file in which a rank says what it came to."""
    return answer.with_name(f"{answer.stem}-{rank}.json")


def as_lost(error: QuiverError) -> QuiverError:
    """`error`; where it only says that another rank is gone, a ResourceError that tells that."""
    is_one_of_several = "RANK" in os.environ and error.code == "E-INTERNAL"
    if not is_one_of_several or not _LOST_PEER.search(error.message):
        return error
    return ResourceError(
        _PEERS,
        f"one is gone, or was silent for too long: {error.message}",
        state="finished shards and all versions are kept.",
        next="run the same command again, on every host",
    )


def launch(command: list[str], answer: Path, count: int) -> int:
    """Run `count` ranks, which are `command`, and put what they came to into `answer`; the exit
    code.

    That is the outcome of rank 0. Without one it is the first typed error of any rank, or else its
    first defect: what the others met after it, a lost connection say, tells nothing. Where a rank
    was killed there is no answer, as where a stage of one process was.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    # gloo need not find out by which name other hosts would know this one
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=int(GRACE_SECONDS),
    )
    failures = []
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
    except SignalException as error:
        return 128 + int(error.sigval)
    written = sorted(
        answer.parent.glob(f"{answer.stem}-*.json"), key=lambda path: path.stat().st_mtime_ns
    )
    errors = {path: json.loads(path.read_text()).get("error") for path in written}
    first = answer_of(answer, 0)
    if first in errors and errors[first] is None:
        first.replace(answer)
        return 0
    typed, defects, lost = [], [], []
    for path, error in errors.items():
        if error is not None:
            is_typed = error["code"] != "E-INTERNAL"
            (lost if error["object"] == _PEERS else typed if is_typed else defects).append(path)
    # the agent ends those that are left by SIGTERM
    killed = [one for one in failures if one.exitcode < 0 and -one.exitcode != signal.SIGTERM]
    if killed and not typed:
        name = signal.Signals(-killed[0].exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        print(f"rank {killed[0].local_rank} of {count} was ended by {name}{hint}", file=sys.stderr)
        return 128 - killed[0].exitcode
    for path in [*typed, *defects, *lost][:1]:
        path.replace(answer)
    return failures[0].exitcode if failures else 1
