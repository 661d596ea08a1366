"""Checks that all ranks train the same thing, from one store, starting at the same step.

Ranks of one launcher may run different commands, and a folder of the same name may be a different
one on each host. Their gradients would still be summed, so the ranks compare what they have before
the first step; if it differs, each of them raises.

    check_plan(plan)                       # every rank calls it
    names = of_all_ranks(name)             # each rank's value, in order of the ranks
"""

from __future__ import annotations

import os
import socket
import time
from typing import TypeVar

import torch.distributed

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.runtime.runner import quiver_version
from quiver.stages.common.runtime.stage import Plan

_SECONDS = 10.0  # a network file system may show a new file this late
T = TypeVar("T")


def of_all_ranks(mine: T) -> list[T]:
    """Return each rank's value, in order of the ranks. All ranks must call it."""
    if not torch.distributed.is_initialized():
        return [mine]
    gathered: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def check_plan(plan: Plan) -> None:
    """Raise ConfigError on every rank if one would make another version, runs another Quiver, or
    does not see the store that rank 0 writes to."""
    ours = {"run_key": plan.run_key, "Quiver": quiver_version()}
    hosts = of_all_ranks(socket.gethostname())
    for rank, theirs in enumerate(everyone := of_all_ranks(ours)):
        for name, first in everyone[0].items():
            if theirs[name] != first:
                raise ConfigError(
                    "optimize",
                    f"the ranks do not train the same thing: {name} of rank 0, on "
                    f"{printable(hosts[0])}, is {first}, and of rank {rank}, on "
                    f"{printable(hosts[rank])}, {printable(theirs[name])}",
                    next="run the same command, with the same Quiver and files, on every host",
                )
    lease = None
    if os.environ.get("RANK", "0") == "0":
        lease = _newest_lease(plan)
    lease = of_all_ranks(lease)[0]
    deadline = time.monotonic() + _SECONDS
    while not (sees := _sees(plan, lease)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for rank, is_shared in enumerate(of_all_ranks(sees)):
        if not is_shared:
            raise ConfigError(
                f"store {plan.store.path}",
                f"rank {rank}, on {printable(hosts[rank])}, does not see the store of the first "
                f"one, on {printable(hosts[0])}",
                next="give a store in a folder that all hosts share",
            )


def _newest_lease(plan: Plan) -> tuple[str, bytes]:
    """Return key and content of the lease under which rank 0 writes; every lease is unique."""
    storage = plan.store.storage
    prefix = f"{plan.name}/.staging/{plan.run_key}.leases"
    key = f"{prefix}/{max(storage.list_files(prefix))}"
    return key, storage.read(key)


def _sees(plan: Plan, lease: tuple[str, bytes]) -> bool:
    """Return True if the lease is in this rank's store. It is read by name, since a network file
    system may show an outdated listing for a minute."""
    key, content = lease
    try:
        return plan.store.storage.read(key) == content
    except FileNotFoundError:
        return False
