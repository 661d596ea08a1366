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

from quiver.schemas.errors import QuiverError, from_dict

from . import logs  # noqa: F401  lines go to Prefect's pages
from .here import run_here
from .placement import StageCall
from .progress import progress


@flow(name="stage", persist_result=False)
def stage(call: StageCall) -> dict[str, Any]:
    """Run one stage in a child process and return its outcome.

    Args:
        call: The stage, its store, and the versions to read.
    """
    try:
        call.require_store()
        with progress(call.runner_call, logging.getLogger(f"quiver.{call.stage}").info) as on_line:
            outcome = run_here(call, on_line=on_line)
    except QuiverError as error:
        return Failed(message=f"{error}\n{json.dumps({'error': error.to_dict()})}", data=error)
    answer = {"ref": outcome.ref, "cached": outcome.cached}
    return Completed(message=f"{outcome.ref}\n{json.dumps(answer)}", data=asdict(outcome))


def answer_in(message: str | None) -> dict[str, Any] | None:
    """Parse the last state's message of `stage`: {"ref", "cached"} or {"error": QuiverError}.

    None if the run ended before it wrote one.
    """
    try:
        answer = json.loads((message or "").rpartition("\n")[2])
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    return {"error": from_dict(answer["error"])} if "error" in answer else answer
