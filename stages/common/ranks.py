"""Several ranks of one stage, started by the elastic agent of torch.distributed.run.

They run on this host, or on several hosts that each run the same command (`rendezvous`).

    count = needed("optimize", config)      # over all hosts; 1 if there is nothing to start
    code = launch(command, answer, call)    # exit code; the stage's answer is in `answer`

The stage's own process becomes the agent. The keeper watches it, so no rank outlives it, and it
ends as its ranks did:

    keeper
    └── python -m quiver.stages optimize …              the agent
        ├── python -m quiver.stages optimize … --rank   RANK=0: writes the versions
        └── python -m quiver.stages optimize … --rank   RANK=1

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
"""Environment variables of launchers. If one is set, the ranks were started already."""
_LOST_PEER = re.compile(
    r"gloo/|NCCL|Dist(Network|Backend|Store)Error|Connection (reset|closed|refused)|Broken pipe"
)
"""Matches errors of a rank that lost its peer; with gloo, torch has no exception class for them."""


def needed(stage: str, config: Mapping[str, Any]) -> int:
    """Return the number of ranks to start for a call of `stage`, over all hosts.

    1 means that the work is not shared among ranks, or that a launcher has started them.
    """
    if not getattr(load(stage), "RANKS", False) or any(name in os.environ for name in LAUNCHED):
        return 1
    try:
        rendezvous = several_hosts()
    except ConfigError:
        return 2  # `launch` reports the error
    processes = config.get("processes")
    if str(processes).isdecimal():
        return max(int(processes), rendezvous.nodes if rendezvous else 1)
    return rendezvous.nodes * rendezvous.ranks if rendezvous else 1


def prepare() -> None:
    """Import what `launch` needs, before a call arrives."""
    import torch.distributed.launcher.api  # noqa: F401


def answer_of(answer: Path, rank: str | int) -> Path:
    """Return the file to which a rank writes its answer."""
    return answer.with_name(f"{answer.stem}-{rank}.json")


def launch(command: list[str], answer: Path, call: Mapping[str, Any]) -> int:
    """Run this host's ranks, each by `command`, and write their answer to `answer`.

    The answer is the outcome of rank 0, or of any rank here if rank 0 is on another host. Without
    an outcome it is the first typed error of any rank, or else the first error that is not a lost
    connection, because that is only a consequence of an earlier failure. If a rank was killed,
    there is no answer, just as for a killed stage of one process.

    Returns:
        The exit code.
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
        # the agent ends the remaining ranks by SIGTERM
        killed = [one for one in failures if one.exitcode < 0 and -one.exitcode != signal.SIGTERM]
        if failures and watch is not None and not told.outcomes:
            # a lost connection is not a rank's own failure if the other host was lost
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
    """Start the ranks and wait for them.

    Returns:
        The failed ranks, the first one first; a problem with other hosts, or ""; and the signal
        that ended the ranks from outside, or 0.
    """
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
    except SystemExit:  # SIGTERM before the ranks exist
        if watch is None or not watch.problem:
            raise
        return [], watch.problem, 0
    except RendezvousError as error:
        if watch is None:
            raise
        return [], watch.problem_of(error), 0
    return [], "", 0


class _Answers(NamedTuple):
    """Answer files of this host's ranks, the oldest first."""

    outcomes: list[Path]
    """Answers with a version."""
    errors: list[Path]
    typed: list[Path]
    """Errors with a code other than E-INTERNAL, which say what to do."""
    defects: list[Path]
    """Errors of the rank itself, not from a lost connection."""

    @classmethod
    def of(cls, answer: Path, *, is_alone: bool) -> _Answers:
        """Read the answers written so far.

        Args:
            is_alone: there is no other host, so rank 0 is here, and only its outcome counts.
        """
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
    """Return the launch config of this host's agent, and the number of its ranks.

    Raises ConfigError.
    """
    from torch.distributed.launcher.api import LaunchConfig

    nodes = rendezvous.nodes if rendezvous else 1
    share = ranks_a_host(call["config"].get("processes"), rendezvous)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // share)))
    settings: dict[str, Any] = {}
    endpoint = "localhost:0"
    address = "localhost"
    run_id = uuid.uuid4().hex
    if rendezvous is None:
        # saves gloo from finding out the name by which other hosts know this one
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        address, is_host = address_towards(rendezvous)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface_of(address) or "")
        patience = rendezvous.settings["join_timeout"]
        settings = {**rendezvous.settings, "read_timeout": patience}
        if not ip_address(address.partition("%")[0]).is_loopback:  # a trial on one machine
            settings["is_host"] = is_host
        endpoint = f"{rendezvous.host}:{rendezvous.port}"
        # these may differ between equal calls: if the process stays, and, with a meeting id, the
        # folder of the store on each host
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
    """Write an error of this host's agent as the answer; return its exit code."""
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
