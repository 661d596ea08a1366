"""Several ranks of one stage on this host, started by the elastic agent of torch.distributed.run.

    count = needed("optimize", config)        # 1 where there is nothing to start
    code = launch(command, answer, count)     # exit code; the stage's answer lies in `answer`

The stage's own process becomes the agent. It is the one that the keeper watches, so no rank
outlives it, and it ends as the ranks did:

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
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quiver.stages.common.runtime.stage import load
from quiver.stages.common.runtime.subprocesses import GRACE_SECONDS

LAUNCHED = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES")
"""What a launcher sets. Where one is set the ranks are there already."""


def needed(stage: str, config: Mapping[str, Any]) -> int:
    """How many ranks a call of `stage` is to be started as. 1: its work is not shared among ranks,
    or a launcher has started them."""
    if not getattr(load(stage), "RANKS", False) or any(name in os.environ for name in LAUNCHED):
        return 1
    processes = config.get("processes")
    return int(processes) if str(processes).isdecimal() else 1


def prepare() -> None:
    """Import what `launch` needs, before there is a call."""
    import torch.distributed.launcher.api  # noqa: F401


def answer_of(answer: Path, rank: str | int) -> Path:
    """The file in which a rank says what it came to."""
    return answer.with_name(f"{answer.stem}-{rank}.json")


def launch(command: list[str], answer: Path, count: int) -> int:
    """Run `count` ranks of `command` and put what they came to into `answer`; the exit code.

    That is the outcome of rank 0. Without one it is the first typed error of any rank: what the
    others met after it, a lost connection say, tells nothing. Where a rank was killed there is no
    answer, as where a stage of one process was.
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
        return 128 + error.sigval
    written = [path for rank in range(count) if (path := answer_of(answer, rank)).exists()]
    written.sort(key=lambda path: path.stat().st_mtime_ns)
    answers = {path: json.loads(path.read_text()) for path in written}
    errors = [path for path in written if "error" in answers[path]]
    typed = [path for path in errors if answers[path]["error"]["code"] != "E-INTERNAL"]
    # the agent ends those that are left by SIGTERM
    killed = [each for each in failures if each.exitcode < 0 and -each.exitcode != signal.SIGTERM]
    outcomes = [path for path in written if path == answer_of(answer, 0) and path not in errors]
    if killed and not outcomes and not typed:
        name = signal.Signals(-killed[0].exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        print(f"rank {killed[0].local_rank} of {count} was ended by {name}{hint}", file=sys.stderr)
        return 128 - killed[0].exitcode
    for path in [*outcomes, *typed, *errors][:1]:
        path.replace(answer)
    if outcomes:
        return 0
    return failures[0].exitcode if failures else 1
