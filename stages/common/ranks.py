"""Several ranks of one stage, started by the elastic agent of torch.distributed.run: on this host,
or on several of which each runs the same command (`rendezvous`).

    count = needed("optimize", config)      # of all hosts; 1 where there is nothing to start
    code = launch(command, answer, call)    # exit code; the stage's answer lies in `answer`

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
import re
import signal
import sys
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quiver.schemas.errors import ConfigError, ResourceError
from quiver.schemas.manifest import digest
from quiver.stages.common.rendezvous import (
    Rendezvous,
    Watch,
    address_towards,
    interface_of,
    ranks_a_host,
    several_hosts,
)
from quiver.stages.common.runtime.runner import quiver_version
from quiver.stages.common.runtime.stage import load
from quiver.stages.common.runtime.subprocesses import GRACE_SECONDS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

LAUNCHED = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES")
"""What a launcher sets. Where one is set the ranks are there already."""
_LOST_PEER = re.compile(
    r"gloo/|NCCL|Dist(Network|Backend|Store)Error|Connection (reset|closed|refused)|Broken pipe"
)
"""In what a rank meets whose peer is gone; torch has no class for it with gloo."""


def needed(stage: str, config: Mapping[str, Any]) -> int:
    """How many ranks a call of `stage` is to be started as, on all hosts together. 1: its work is
    not shared among ranks, or a launcher has started them."""
    if not getattr(load(stage), "RANKS", False) or any(name in os.environ for name in LAUNCHED):
        return 1
    try:
        rendezvous = several_hosts()
    except ConfigError:
        return 2  # `launch` says what is wrong
    processes = config.get("processes")
    if str(processes).isdecimal():
        return max(int(processes), rendezvous.nodes if rendezvous else 1)
    return rendezvous.nodes * rendezvous.ranks if rendezvous else 1


def prepare() -> None:
    """Import what `launch` needs, before there is a call."""
    import torch.distributed.launcher.api  # noqa: F401


def answer_of(answer: Path, rank: str | int) -> Path:
    """The file in which a rank says what it came to."""
    return answer.with_name(f"{answer.stem}-{rank}.json")


def launch(command: list[str], answer: Path, call: Mapping[str, Any]) -> int:
    """Run this host's share of the ranks, which are `command`, and put what they came to into
    `answer`; the exit code.

    That is the outcome of rank 0, or of any where rank 0 is on another host. Without one it is the
    first typed error of any rank, or else its first defect: what the others met after it, a lost
    connection say, tells nothing. Where a rank was killed there is no answer, as where a stage of
    one process was.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        rendezvous = several_hosts()
        config, share = _agent(rendezvous, call)
    except ConfigError as error:
        return _say(answer, error)

    def give_up(problem: str) -> None:
        outcomes = _Answers.of(answer, is_alone=False).outcomes
        for path in outcomes[:1]:
            path.replace(answer)
        os._exit(0 if outcomes else _say(answer, problem))  # the keeper ends the ranks

    with Watch(rendezvous, config.run_id, give_up) if rendezvous else nullcontext() as watch:
        failures, problem, signal_number = _run(config, command, watch)
        if signal_number:
            return 128 + signal_number
        told = _Answers.of(answer, is_alone=rendezvous is None)
        # the agent ends those that are left by SIGTERM
        killed = [one for one in failures if one.exitcode < 0 and -one.exitcode != signal.SIGTERM]
        if failures and watch is not None and not told.outcomes:
            # that a connection was lost is no defect where the other host was
            reasons = [*told.typed, *told.defects, *killed]
            problem = "" if reasons else watch.why_lost()
            if not problem:
                watch.tell_failure()
    if problem and not told.outcomes:
        return _say(answer, problem)
    if killed and not told.outcomes and not told.typed:
        name = signal.Signals(-killed[0].exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        print(f"rank {killed[0].local_rank} of {share} was ended by {name}{hint}", file=sys.stderr)
        return 128 - killed[0].exitcode
    for path in [*told.outcomes, *told.typed, *told.defects, *told.errors][:1]:
        path.replace(answer)
    if told.outcomes:
        return 0
    return failures[0].exitcode if failures else 1


def _run(
    config: LaunchConfig, command: list[str], watch: Watch | None
) -> tuple[list[ProcessFailure], str, int]:
    """Start the ranks and wait for them. Which failed, the first one first; what became of other
    hosts; the signal that ended all for no fault of theirs, or 0."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        return sorted(error.failures.values(), key=lambda failure: failure.timestamp), "", 0
    except SignalException as error:
        if watch is None or not watch.problem:
            return [], "", int(error.sigval)
        return [], watch.problem, 0
    except SystemExit:  # SIGTERM before there are ranks
        if watch is None or not watch.problem:
            raise
        return [], watch.problem, 0
    except RendezvousError as error:
        if watch is None:
            raise
        return [], watch.problem_of(error), 0
    return [], "", 0


class _Answers(NamedTuple):
    """Files in which ranks of this host said what they came to, the oldest first."""

    outcomes: list[Path]
    """Those that say that there is a version."""
    errors: list[Path]
    typed: list[Path]
    """Errors that say what to do."""
    defects: list[Path]
    """Errors of the rank's own: a connection that was lost is none."""

    @classmethod
    def of(cls, answer: Path, *, is_alone: bool) -> _Answers:
        """`is_alone`: there is no other host, so the first rank is here, and its outcome counts."""
        written = sorted(
            answer.parent.glob(f"{answer.stem}-*.json"), key=lambda path: path.stat().st_mtime_ns
        )
        answers = {path: json.loads(path.read_text()) for path in written}
        errors = [path for path in written if "error" in answers[path]]
        outcomes = [path for path in written if path not in errors]
        if is_alone:
            outcomes = [path for path in outcomes if path == answer_of(answer, 0)]
        typed = [path for path in errors if answers[path]["error"]["code"] != "E-INTERNAL"]
        defects = [
            path for path in errors if not _LOST_PEER.search(answers[path]["error"]["message"])
        ]
        return cls(outcomes, errors, typed, defects)


def _agent(rendezvous: Rendezvous | None, call: Mapping[str, Any]) -> tuple[LaunchConfig, int]:
    """How the agent of this host starts its ranks, and how many. ConfigError."""
    from torch.distributed.launcher.api import LaunchConfig

    nodes = rendezvous.nodes if rendezvous else 1
    share = ranks_a_host(call["config"].get("processes"), rendezvous)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // share)))
    settings: dict[str, Any] = {}
    endpoint = "localhost:0"
    address = "localhost"
    run_id = uuid.uuid4().hex
    if rendezvous is None:
        # gloo need not find out by which name other hosts would know this one
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        address, is_host = address_towards(rendezvous)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface_of(address) or "")
        patience = rendezvous.settings["join_timeout"]
        settings = {**rendezvous.settings, "read_timeout": patience}
        if not ip_address(address.partition("%")[0]).is_loopback:  # to try it on one machine
            settings["is_host"] = is_host
        endpoint = f"{rendezvous.host}:{rendezvous.port}"
        # whether the process stays is its caller's affair, and so is where a host mounts the store
        # of a meeting that has a name
        equal_parts = {**call, "stay": None}
        if rendezvous.id:
            equal_parts["store"] = None
        run_id = "-".join(filter(None, [rendezvous.id, digest(equal_parts)]))
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=share,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs=settings,
        local_addr=address,
        max_restarts=0,
        shutdown_timeout=int(GRACE_SECONDS),
    )
    return config, share


def _say(answer: Path, problem: str | ConfigError) -> int:
    """Answer with an error of this host's agent; its exit code."""
    error = problem
    if isinstance(problem, str):
        error = ResourceError(
            "ranks on several hosts",
            problem,
            state="finished shards and all versions are kept.",
            next="run the same command again on every host",
        )
    answer.write_text(json.dumps({"error": error.to_dict(), "quiver": quiver_version()}))
    return error.exit_code
