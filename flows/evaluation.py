"""Measurement of a policy on the held-out rows: generate, reward, and the estimators.

Prompts, rollouts and rewards go to `<run>.eval`, so that `latest` in the training run does not
move. The evaluation itself, with score, standard error and n, goes to `<run>`, and to the trackers
in [optimize]; training reports its own metrics itself.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from quiver.schemas.errors import printable
from quiver.schemas.metrics import score_numbers
from quiver.stages.core.config import Config
from quiver.stages.core.processes.subprocesses import Process
from quiver.stages.core.run.call import Outcome
from quiver.stages.core.store import Store

from .calls import check_stages, perform
from .recipe import Recipe
from .sections import Optimize

SECONDS = 120.0
"""Time limit for the trackers, in seconds."""
log = logging.getLogger("quiver")


def measure(
    recipe: Recipe,
    policy: str,
    iteration: int,
    forced: Collection[str] = (),
    baseline: str | None = None,
    before: Callable[[], None] = lambda: None,
) -> Outcome | None:
    """Measure `policy` on the held-out rows.

    Tasks are named after the policy, since one iteration may measure several.

    Args:
        recipe: The resolved recipe.
        policy: Reference of the policy.
        iteration: Iteration that the tasks are tagged with.
        forced: Stages to run again; only "evaluate" matters here.
        baseline: An evaluation of another policy on the same rows. The metrics then hold the
            difference to it.
        before: Called before anything is sampled; it may refuse to begin.

    Returns:
        The outcome of the evaluate stage (metrics: score, stderr, n, …), with the seconds of all
        its stages. None if there are no held-out rows.
    """
    if recipe.data.held_out is None:
        return None
    name = policy.removeprefix(f"{recipe.run}/")

    def run(stage: str, config: Config, into: str = f"{recipe.run}.eval", **refs: str) -> Outcome:
        return perform(
            stage,
            config,
            refs,
            label=f"evaluate {name}: {stage}",
            into=into,
            force="evaluate" in forced and stage != "prompt",
            iteration=iteration,
            before=check if stage == "generate" else lambda: None,
        )

    def check() -> None:
        before()
        check_stages({"reward": recipe.reward}, prompts.ref, recipe.offered_columns)

    prompts = run("prompt", recipe.prompt_config(0, evaluation=True), policy=policy)
    config = recipe.generate_config(0, evaluation=True)
    rollouts = run("generate", config, prompts=prompts.ref, policy=policy)
    rewards = run("reward", recipe.reward, rollouts=rollouts.ref)
    refs = {"rollouts": rollouts.ref, "rewards": rewards.ref}
    if baseline:
        refs["baseline"] = baseline
    evaluation = run("evaluate", recipe.evaluate_config(), recipe.run, **refs)
    # Also for a finished evaluation: an earlier attempt may have ended before this line.
    python = recipe.placement.python.get("optimize", sys.executable)
    track_evaluation(recipe.optimize, recipe.store, evaluation.ref, python)
    seconds = sum(outcome.seconds for outcome in (prompts, rollouts, rewards, evaluation))
    return replace(evaluation, seconds=round(seconds, 3))


def printed_evaluation(outcome: Outcome | None) -> dict[str, Any] | None:
    """Return score, standard error and n of an evaluation, what it leaves out, and its
    reference."""
    return outcome and {**score_numbers(outcome.metrics), "ref": outcome.ref}


def track_evaluation(
    optimize: Optimize, store: str, ref: str, python: str = sys.executable
) -> None:
    """Send the evaluation `ref` to the trackers of [optimize] that do not have it yet.

    They run in a process of their own: they load torch, start threads, and use servers that may not
    answer. None of that may delay or end a run, so a tracker that fails is only a warning.
    """
    if not optimize.trackers:
        return
    folder = Path(optimize.tracker_folder)
    # The list is kept beside the trackers' files, so that an emptied folder is filled again.
    list_file = folder / f"evaluations-{Store(store).id[:8]}.txt"
    tracked = list_file.read_text().splitlines() if list_file.is_file() else []
    trackers = [name for name in optimize.trackers if f"{name} {ref}" not in tracked]
    if not trackers:
        return
    call = {"trackers": trackers, "folder": str(folder), "store": store, "ref": ref}
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
        log.warning("%s was not sent to %s: %s", ref, ", ".join(trackers), printable(last_line))
