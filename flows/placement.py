"""The place of each stage: a child process, or a Prefect work pool, as [placement] says.

Look here for `StageCall`, which holds everything a stage run needs. A pool without a named server
is refused before anything runs. So is a store with a relative path, which another host would
resolve elsewhere.

    call = stage_call(recipe, "generate", recipe.generate_config(1), {"prompts": …, "policy": …})
    outcome = run_at(call, recipe.placement)    # of `dispatch`; or `here.run_here`
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from quiver.schemas.errors import ConfigError, ResourceError
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.runner import Call
from quiver.stages.common.runtime.stage import Refs, load
from quiver.stages.common.store import Store
from quiver.stages.generate.engine import ENGINES

from .recipe import Recipe

STAGES = ("prompt", "generate", "reward", "logprobs", "optimize", "evaluate")
"""The stages of an iteration, in order."""


class GivenUp(ResourceError):
    """Raised if no worker took the stage, or its run was cancelled; an automatic retry would not
    help."""


class StageCall(Config):
    """One run of a stage, as sent to the worker's host."""

    stage: str
    """Name of the stage: policy, prompt, generate, reward, logprobs, average, optimize or
    evaluate."""
    config: dict[str, Any]
    """The stage's section of the recipe."""
    store: str
    """Folder of the store, the same on every host."""
    store_id: str = ""
    """Id that store.json must hold, so that an unmounted folder is not taken for a new store.
    Empty: any id."""
    refs: dict[str, str | list[str]] = Field(default_factory=dict)
    """References of the versions to read, by role."""
    into: str | None = None
    """Run that the new version belongs to. Default: the inputs' run."""
    force: bool = False
    """Run again, even if a finished version exists."""
    share: bool = False
    """Share the shards with other runs of the same call."""
    label: str = "stage"
    """Name of the call in logs."""
    python: str | None = None
    """Interpreter of the child process. Default: the worker's."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Wall-clock limit, in seconds."""
    online: bool = False
    """If true, the stage may reach a model hub."""
    slots: int = Field(default=0, ge=0)
    """Heavy stages at once on a host without GPU. 0: any number."""
    devices: Literal["all"] | int | None = None
    """Number of the host's devices that the stage may use, with one process per model copy.
    Default: one process."""
    limit: str | None = None
    """Global concurrency limit of the server; the stage holds one slot of it."""
    expired: bool = False
    """Also accept a finished version whose files expired."""

    @property
    def runner_call(self) -> Call:
        """The part of the call that the runner takes."""
        return Call(**{field.name: getattr(self, field.name) for field in fields(Call)})

    def for_workers(self) -> StageCall:
        """Return the call for the workers of a pool: with the store's absolute path and its id.

        It is shared if the stage can be, unless it is forced.
        """
        store = Store(self.store)
        share = getattr(load(self.stage), "SHARED", False) and not self.force
        update = {"store": str(store.path), "store_id": store.id, "share": share}
        return self.model_copy(update=update)

    def require_store(self) -> None:
        """Raise ConfigError if this host has another store at the path, or none."""
        store_id = Store(self.store, create=False).id
        if self.store_id not in ("", store_id):
            raise ConfigError(
                f"store {self.store}",
                f"id expected {self.store_id}, found {store_id}: this host has another store there",
                next="mount the same folder at this path on every host",
            )


def stage_call(
    recipe: Recipe,
    stage: str,
    config: Config,
    refs: Refs,
    *,
    label: str = "",
    into: str | None = None,
    force: bool = False,
    expired: bool = False,
) -> StageCall:
    """Return the call of a stage of `recipe`, with the stage's settings from [placement].

    Args:
        recipe: Gives run, store and placement.
        stage: Name of the stage.
        config: Config of the stage.
        refs: References by role.
        label: Name in logs, after the run's name. Default: the stage.
        into: Run of the new version. Default: the recipe's.
        force: Run again, even if a finished version exists.
        expired: Also accept a finished version whose files expired.
    """
    placement = recipe.placement
    return StageCall(
        stage=stage,
        config=config.model_dump(mode="json"),
        store=recipe.store,
        refs=refs,
        into=into or recipe.run,
        force=force,
        label=f"{recipe.run} · {label or stage}",
        python=placement.python.get(stage),
        timeout_seconds=placement.timeout_seconds.get(stage),
        online=recipe.online,
        slots=placement.slots,
        devices=placement.devices,
        limit=placement.limits.get(stage),
        expired=expired,
    )


def check_placement(recipe: Recipe) -> None:
    """Raise ConfigError if a pool cannot be reached from here or would not see the store.

    The same if `resident_engine` is set for an engine that cannot stay.
    """
    if recipe.placement.resident_engine:
        _check_resident(recipe)
    pools = recipe.placement.pools
    if not pools:
        return
    stage, pool = next(iter(pools.items()))
    require_server(f"placement.{stage} {pool}")
    if not Path(os.path.expanduser(recipe.store)).is_absolute():
        raise ConfigError(
            "store",
            f"{recipe.store!r} is a relative path, and placement.{stage} = {pool!r} runs on hosts "
            "that have other folders",
            next="mount the store at the same path everywhere, e.g. --set "
            f"store={str(Path(recipe.store).absolute())!r}",
        )


def _check_resident(recipe: Recipe) -> None:
    name = "placement.resident_engine"
    placement, lora = recipe.placement, recipe.optimize.lora
    engine, options = recipe.generate.engine, recipe.generate.options
    problem = ""
    if placement.generate:
        problem = f"placement.generate = {placement.generate!r} has a process of its own each time"
    elif engine in ENGINES and engine != "vllm":
        problem = f"engine {engine} has nothing to keep from one policy to the next"
    elif engine == "vllm" and options.get("engine_args"):
        problem = "what generate.options.engine_args sets may not outlast a policy's weights"
    elif engine == "vllm" and recipe.data.images:
        problem = "an engine that sees pictures (data.images) does not sleep"
    elif engine == "vllm" and lora and (lora.save == "adapter" or options.get("lora")):
        problem = "an engine that serves an adapter beside the base's weights does not sleep"
    if problem:
        raise ConfigError(name, problem, next=f"set {name} = false")
    if engine == "vllm" and "generate" not in placement.python:
        from quiver.stages.common.models.vllm_env import require_reload

        require_reload(name)


def trained_here(recipe: Recipe) -> dict[str, Config]:
    """Return the config of optimize if it runs under this interpreter, else nothing.

    Another interpreter's needs cannot be checked here.
    """
    is_elsewhere = "optimize" in recipe.placement.pools | recipe.placement.python
    return {} if is_elsewhere else {"optimize": recipe.optimize_config()}


def require_server(name: str) -> None:
    """Raise ConfigError unless a Prefect server is named. `name` is the key that needs one.

    The embedded server has no pools and ends with its run.
    """
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        raise ConfigError(
            name,
            "it needs a Prefect server that stays, and PREFECT_API_URL names none",
            next="prefect server start, then export PREFECT_API_URL=http://127.0.0.1:4200/api and "
            "run again",
        )
