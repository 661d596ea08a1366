"""The flow `stage`: one stage in a child process on the host of a pool's worker.

The deployment `stage/POOL` holds it, and `pool.run_in_pool` starts its runs. Hosts share the store;
the flow refuses a store that is not the caller's. The message of its last state holds the outcome
or error as one line of JSON, since Prefect's results are turned off.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

from prefect import flow
from prefect.states import Completed, Failed

from quiver.schemas.errors import ConfigError, QuiverError
from quiver.stages.core.run.call import Call
from quiver.stages.core.store import Store

from .dispatch import run_at
from .progress import progress


@flow(name="stage", persist_result=False)
def stage(call: Call) -> dict[str, Any]:
    """Run one stage in a child process and return its outcome.

    Args:
        call: The stage, its store, and the versions to read.
    """
    try:
        require_store(call)
        with progress(call, logging.getLogger(f"quiver.{call.stage}").info) as on_line:
            outcome = run_at(call, on_line=on_line)
    except QuiverError as error:
        return Failed(message=f"{error}\n{json.dumps({'error': error.to_dict()})}", data=error)
    answer = {"ref": outcome.ref, "cached": outcome.cached}
    return Completed(message=f"{outcome.ref}\n{json.dumps(answer)}", data=asdict(outcome))


def require_store(call: Call) -> None:
    """Raise ConfigError if this host has another store at the call's path, or none."""
    expected, actual = call.where.store_id, Store(call.store, create=False).id
    if expected not in ("", actual):
        raise ConfigError(
            f"store {call.store}",
            f"id expected {expected}, found {actual}: this host has another store there",
            next="mount the same folder at this path on every host",
        )
