"""The flow `stage`: one stage on the host of a work pool's worker, in a child process. Deployment
`stage/POOL` holds it.

The store is what hosts have in common: the flow refuses one that is not the asker's. Its last
state's message says in one line of JSON what came of it, an outcome or an error, since Prefect's
results stay off. `pool.run_in_pool` starts such runs.
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
    """Run one stage in a child process and say which version came of it.

    Args:
        call: What to run, where the store is, and which versions are read.
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
    """What `stage` says in its last state: {"ref", "cached"} or {"error": QuiverError}; None when
    it did not come to that."""
    try:
        answer = json.loads((message or "").rpartition("\n")[2])
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    return {"error": from_dict(answer["error"])} if "error" in answer else answer
