"""The flow `post-train` for schedules and events: each run has work left to do.

    scheduled(recipe)            # `iterations` more than are finished, unless [schedule] says else

An unchanged recipe would be finished from the second run on. So the run adds iterations, or starts
again under another name. A run without work left ends in a state of that name.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import TypeAdapter, ValidationError

from quiver import flows
from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store

from .calls import NotFinished, calls_of
from .post_train import Chain, post_train
from .recipe import Recipe
from .retention import Retention
from .rounds import Iteration
from .sections import RunName

_MANY = 1_000_000
NOTHING_LEFT = "Nothing left to do"
"""Name of the final state if nothing was made."""


@flow(name="post-train", flow_run_name="{recipe.run} · post-train", persist_result=False)
def scheduled(recipe: Recipe) -> Any:
    """Improve the recipe's policy as [schedule] says: further, again from the base, or not twice.

    Args:
        recipe: The whole recipe, with the sections of its TOML file.

    Returns:
        The object that `quiver run --json` prints. If nothing was made, a state named "Nothing left
        to do" with that object.
    """
    num_made = flows.num_made
    answer = post_train.fn(recipe_for(recipe, flow_run.scheduled_start_time))
    if flows.num_made > num_made:
        return answer
    message = "the store has all that the recipe asks for; [schedule] each says what each run does"
    return Completed(name=NOTHING_LEFT, message=message, data=answer)


def recipe_for(recipe: Recipe, due: datetime) -> Recipe:
    """Return the recipe for a run that was due at this time, in UTC.

    A run that goes on has `iterations` more than exactly this recipe has finished in the store. A
    run that starts again is named by the time. Its seed is raised by one more than the number of
    earlier such runs. Raises ConfigError if its name gets too long.
    """
    if recipe.schedule.each == "same":
        return recipe
    if recipe.schedule.each == "go on":
        resolved = recipe.resolved()
        finished: list[Iteration] = []
        endless = resolved.model_copy(update={"iterations": _MANY, "retention": Retention()})
        with suppress(NotFinished), calls_of(endless, None, expired=True):
            chain = Chain(endless)
            base = chain.import_policy()
            chain.improve(base, base, finish=finished.append)
        return resolved.model_copy(update={"iterations": len(finished) + recipe.iterations})
    run = f"{recipe.run}-{due:%Y-%m-%d-%H%M}"
    try:
        TypeAdapter(RunName).validate_python(run)
    except ValidationError:
        raise ConfigError(
            f"run {recipe.run}",
            f"schedule.each is 'again', which makes runs like {run}: {len(run)} letters are too "
            "many",
            next="give the run a shorter name",
        ) from None
    is_earlier = re.compile(rf"{re.escape(recipe.run)}-\d{{4}}-\d\d-\d\d-\d{{4}}").fullmatch
    earlier = [name for name in Store(recipe.store).runs() if is_earlier(name) and name < run]
    return recipe.model_copy(update={"run": run, "seed": recipe.seed + len(earlier) + 1})
