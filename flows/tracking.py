"""Hands evaluations to the trackers that [optimize] names; what a training has to tell, it tells
itself.

Trackers start in a process of their own: they bring torch along, threads, and servers that may not
answer. None of that may hold up or end a run.
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
"""How long trackers may take."""
log = logging.getLogger("quiver")


def track_evaluation(recipe: Recipe, ref: str) -> None:
    """Hand the evaluation `ref` to those of the recipe's trackers that have not got it. Never
    raises: a tracker that fails is a warning."""
    if not recipe.optimize.trackers:
        return
    folder = Path(recipe.optimize.tracker_folder)
    # it stands beside what was written there: who empties the folder has it filled again
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
    except OSError as error:  # TimeoutError too
        code = 1
        last_line = str(error)
    if code:
        log.warning("%s is not in %s: %s", ref, ", ".join(trackers), printable(last_line))
