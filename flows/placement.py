"""The place of each stage: a child process, or a Prefect work pool, as [placement] says.

A pool without a named server is refused before anything runs. So is a store with a relative path,
which another host would resolve elsewhere.

    where = where_of(recipe.placement, "generate", online=recipe.online)
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from quiver.schemas.errors import ConfigError, ResourceError, printable
from quiver.stages.core import ranks
from quiver.stages.core.ranks import are_launched
from quiver.stages.core.run.call import Where
from quiver.stages.core.store.places import is_url
from quiver.stages.generate.engine import ENGINES

from .sections import Generate, Optimize, Placement

if TYPE_CHECKING:
    from .recipe import Recipe


class GivenUp(ResourceError):
    """Raised if no worker took the stage, or its run was cancelled; an automatic retry would not
    help."""


def where_of(placement: Placement, stage: str, *, online: bool = False) -> Where:
    """Return where a call of `stage` runs. Ranks that a launcher started stay in no pool."""
    are_placed = are_launched() and ranks.knows_ranks(stage)
    return Where(
        pool=None if are_placed else placement.pools.get(stage),
        workers=placement.fan_out,
        wait_seconds=placement.wait_seconds,
        python=placement.python.get(stage),
        timeout_seconds=placement.timeout_seconds.get(stage),
        online=online,
        slots=placement.slots,
        devices=placement.devices,
        concurrency_limit=placement.limits.get(stage),
        resident_engine=bool(placement.resident_engine) and stage == "generate",
    )


def keeps_engine(recipe: Recipe, num_gpus: int) -> bool:
    """Return True if the engine sleeps between its calls, on a host with this many GPUs.

    vLLM's CPU build never sleeps (see `check_resident`). It may be installed on any host.
    """
    is_asked = recipe.placement.resident_engine
    if is_asked is not None:
        return is_asked
    # vLLM refuses to start a reward model on a small card if less than its share is free
    judges = [model for model in recipe.reward.models if model.engine == "vllm"]
    is_shared = num_gpus == 1 and all(model.device == "cpu" for model in judges)
    problem = _resident_problem(recipe.placement, recipe.generate, recipe.optimize, recipe.media)
    return is_shared and recipe.generate.device != "cpu" and not problem


def check_resident(
    placement: Placement, generate: Generate, optimize: Optimize, media: set[str]
) -> None:
    """Raise ConfigError if `resident_engine` is set for an engine that cannot be resident.

    `media`: modalities of what prompts or environments may show.
    """
    if not placement.resident_engine:
        return
    name = "placement.resident_engine"
    problem = _resident_problem(placement, generate, optimize, media)
    if problem:
        raise ConfigError(name, problem, next=f"set {name} = false")
    if generate.engine == "vllm" and "generate" not in placement.python:
        from quiver.stages.model.vllm_env import require_reload

        require_reload(name)


def _resident_problem(
    placement: Placement, generate: Generate, optimize: Optimize, media: set[str]
) -> str:
    """Return why the engine cannot be resident, or an empty text."""
    lora = optimize.lora
    engine = generate.engine
    options = generate.options
    if pool := placement.generate:
        return f"placement.generate = {pool!r} starts a new process for each call"
    if engine == "vllm":
        if options.get("engine_args"):
            return "settings in generate.options.engine_args may not survive a change of weights"
        if media:
            return "an engine that reads pictures or clips does not sleep"
        if lora and (lora.save == "adapter" or options.get("lora")):
            return "an engine that serves an adapter beside the base's weights does not sleep"
    elif engine in ENGINES:
        return f"engine {engine} has nothing to keep from one policy to the next"
    return ""


def check_places(placement: Placement, store: str) -> None:
    """Raise ConfigError if an interpreter is missing here, or if a pool cannot be reached from here
    or would not see the store."""
    pools = placement.pools
    for stage, python in placement.python.items():
        if stage not in pools and shutil.which(python) is None:
            raise ConfigError(
                f"placement.python.{stage} {printable(python)}",
                "there is no such program here",
                next="name the interpreter of an environment in which Quiver is installed",
            )
    if not pools:
        return
    stage, pool = next(iter(pools.items()))
    require_server(f"placement.{stage} {pool}")
    if not is_url(store) and not Path(os.path.expanduser(store)).is_absolute():
        raise ConfigError(
            "store",
            f"{store!r} is a relative path, and placement.{stage} = {pool!r} runs on hosts with "
            "other folders",
            next="mount the store at the same path everywhere, e.g. --set "
            f"store={str(Path(store).absolute())!r}",
        )


def runs_here(placement: Placement, stage: str) -> bool:
    """True if `stage` runs on this host and under this interpreter; another one's needs cannot be
    checked here."""
    return stage not in placement.pools | placement.python


def require_server(name: str) -> None:
    """Raise ConfigError unless a Prefect server is named. `name` is the key that needs one.

    The embedded server has no pools and ends with its run.
    """
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        raise ConfigError(
            name,
            "it needs a permanent Prefect server, and PREFECT_API_URL is not set",
            next="prefect server start, then export PREFECT_API_URL=http://127.0.0.1:4200/api and "
            "run again",
        )
