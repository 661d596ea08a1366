"""Hand-over of evaluations to the trackers in [optimize]; training reports its own metrics itself.

Trackers run in their own process: they load torch, start threads, and use servers that may not
answer. None of that may delay or end a run.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from quiver.schemas.errors import printable
from quiver.stages.common.runtime.subprocesses import Process
from quiver.stages.common.store import Store

from .recipe import Recipe

SECONDS = 120.0
"""Time limit for the trackers, in seconds."""
log = logging.getLogger("quiver")


def track_evaluation(recipe: Recipe, ref: str) -> None:
    """Send the evaluation `ref` to the recipe's trackers that do not have it yet.

    Never raises: a tracker that fails is a warning.
    """
    if not recipe.optimize.trackers:
        return
    folder = Path(recipe.optimize.tracker_folder)
    # The list is kept beside the trackers' files, so that an emptied folder is filled again.
    list_file = folder / f"evaluations-{Store(recipe.store).id[:8]}.txt"
    tracked = list_file.read_text().splitlines() if list_file.is_file() else []
    trackers = [name for name in recipe.optimize.trackers if f"{name} {ref}" not in tracked]
    if not trackers:
        return
    call = {"trackers": trackers, "folder": str(folder), "store": recipe.store, "ref": ref}
    python = recipe.placement.python.get("optimize", sys.executable)
    command = [python, "-P", "-m", "quiver.stages.optimize.tracking"]
    last_line = "no answer"
    try:
        with Process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            process.stdin.write(json.dumps(call).encode())
            process.stdin.close()
            for line in process.lines(SECONDS):
                last_line = line
            code = process.wait()
        if not code:
            with list_file.open("a") as file:
                file.writelines(f"{name} {ref}\n" for name in trackers)
    except OSError as error:  # Includes TimeoutError.
        code = 1
        last_line = str(error)
    if code:
        log.warning("%s is not in %s: %s", ref, ", ".join(trackers), printable(last_line))
