"""Several ranks of one stage, started by a launcher (torchrun) on any number of hosts, or by this
host's own agent of torch.distributed.run.

    count = needed("optimize", config)       # 1 if there is nothing to start
    code = launch(command, answer, count)    # exit code; the stage's answer is in `answer`

Under a launcher each rank is a whole command. Without one the stage's own process becomes the
agent. The keeper watches it, so no rank outlives it, and it ends as its ranks did:

    keeper
    └── python -m quiver.stages optimize FOLDER             the agent
        ├── python -m quiver.stages optimize FOLDER --rank      RANK=0: writes the versions
        └── python -m quiver.stages optimize FOLDER --rank      RANK=1

Commands import this module early, so it imports nothing heavy before a function needs it.

Not of the spine: the output of a stage does not depend on how its ranks were started.
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

LAUNCHERS = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES")
"""Environment variables of launchers. If one is set, the ranks were started already."""
_LOST_PEER = re.compile(
    r"gloo/|NCCL|Dist(Network|Backend|Store)Error|Connection (reset|closed|refused)|Broken pipe"
)
"""Matches errors of a rank that lost its peer; with gloo, torch has no exception class for them."""
_PEERS = "the other ranks"
"""Object of an error that only says that they are gone."""


def are_launched() -> bool:
    """Return True if a launcher started this process as one of several ranks."""
    return any(os.environ.get(name) for name in LAUNCHERS)


def follows_rank_0() -> bool:
    """Return True if a launcher started this process as a rank beside rank 0, which speaks for all.

    A RANK that something else left in the environment counts for nothing.
    """
    return are_launched() and (os.environ.get("RANK") or "0") != "0"


def knows_ranks(stage: str) -> bool:
    """Return True if several ranks do `stage` together; rank 0 does any other stage alone."""
    from quiver.stages.core.run.stage import load_stage

    return getattr(load_stage(stage), "RANKS", False)


def needed(stage: str, config: Mapping[str, Any]) -> int:
    """Return the number of ranks to start for a call of `stage`.

    1 means that the work is not shared among ranks, or that a launcher has started them.
    """
    processes = config.get("processes")
    if not knows_ranks(stage) or are_launched() or not str(processes).isdecimal():
        return 1
    return int(processes)


def import_ahead() -> None:
    """Import what `launch` needs, before a call arrives."""
    import torch.distributed.launcher.api  # noqa: F401


def answer_of(answer: Path, rank: str | int) -> Path:
    """Return the file to which a rank writes its answer."""
    return answer.with_name(f"{answer.stem}-{rank}.json")


def as_lost(error: QuiverError) -> QuiverError:
    """Return `error`, or a ResourceError in its place if it only says that another rank is gone."""
    is_one_of_several = "RANK" in os.environ and error.code == "E-INTERNAL"
    if not is_one_of_several or not _LOST_PEER.search(error.message):
        return error
    return ResourceError(
        _PEERS,
        f"one has ended, or was silent for too long: {error.message}",
        state="finished shards and all versions are kept.",
        next="run the same command again, on every host",
    )


def launch(command: list[str], answer: Path, count: int) -> int:
    """Run `count` ranks, each by `command`, and write their answer to `answer`.

    The answer is the outcome of rank 0. Without one it is the first typed error of any rank, or
    else the first error that is not a lost connection, because that is only a consequence of an
    earlier failure. If a rank was killed, there is no answer, just as for a killed stage of one
    process.

    Returns:
        The exit code.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from quiver.stages.core.processes.subprocesses import GRACE_SECONDS, ending

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    # saves gloo from finding out the name by which other hosts know this one
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
    # the agent ends the remaining ranks by SIGTERM
    killed = [rank for rank in failures if rank.exitcode < 0 and -rank.exitcode != signal.SIGTERM]
    if killed and not typed and not defects:  # it may also end them by SIGKILL
        rank = killed[0].local_rank
        code = killed[0].exitcode
        print(f"rank {rank} of {count} was ended {ending(code)}", file=sys.stderr)
        return 128 - code
    for path in [*typed, *defects, *lost][:1]:
        path.replace(answer)
    return failures[0].exitcode if failures else 1
