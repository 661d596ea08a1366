"""Where a stage runs: a child process of this one, or the workers of a Prefect work pool, as the
recipe's [placement] says.

What is done already is found in this process in either case, in milliseconds. Refused before
anything runs: a pool where no server is named, and a store by a relative path, which another host
would look for elsewhere.

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
"""What an iteration does, in this order."""


class GivenUp(ResourceError):
    """Nobody took the stage up, or somebody ended it: to try again by itself would not help."""


class StageCall(Config):
    """What to run on the worker's host, and how."""

    stage: str
    """Name of the stage: policy, prompt, generate, reward, logprobs, average, optimize or
    evaluate."""
    config: dict[str, Any]
    """Its section of the recipe."""
    store: str
    """Folder of the store, the same on every host."""
    store_id: str = ""
    """What store.json must say there, so that a folder that is not mounted is no new store. Empty:
    anything."""
    refs: dict[str, str | list[str]] = Field(default_factory=dict)
    """References of the versions that it reads, by role."""
    into: str | None = None
    """Run that the new version belongs to. None: that of its inputs."""
    force: bool = False
    """Do it anew, even where a finished version exists."""
    share: bool = False
    """Do it together with the other runs of the same call, shard by shard."""
    label: str = "stage"
    """What logs call it."""
    python: str | None = None
    """Interpreter of the child process. None: the worker's."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Wall-clock limit."""
    online: bool = False
    """Whether the stage may reach a model hub."""
    slots: int = Field(default=0, ge=0)
    """Heavy stages at once on a host without GPU. 0: any number."""
    devices: Literal["all"] | int | None = None
    """How many devices of the host the stage may use, by as many processes as they do for. None:
    one process."""
    limit: str | None = None
    """Global concurrency limit of the server of which the stage holds a slot."""
    expired: bool = False
    """A finished version whose files expired is an answer, too."""

    @property
    def runner_call(self) -> Call:
        """What the runner takes of it."""
        return Call(**{field.name: getattr(self, field.name) for field in fields(Call)})

    def for_workers(self) -> StageCall:
        """The same for the workers of a pool: the store by its absolute path and its id; shared
        where the stage can be, unless it is forced."""
        store = Store(self.store)
        share = getattr(load(self.stage), "SHARED", False) and not self.force
        update = {"store": str(store.path), "store_id": store.id, "share": share}
        return self.model_copy(update=update)

    def require_store(self) -> None:
        """ConfigError where this host has another store at the path, or none."""
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
    """The call of a stage of `recipe`, with what its [placement] says of the stage. `label`: what
    logs call it beside the run. `into`: None for the recipe's run. `expired`: see StageCall."""
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
    """ConfigError where a pool is named that cannot be reached from here, or could not see the
    store; or an engine is asked to stay that does not."""
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
    """[optimize], where it runs under this interpreter; what another needs cannot be told here."""
    is_elsewhere = "optimize" in recipe.placement.pools | recipe.placement.python
    return {} if is_elsewhere else {"optimize": recipe.optimize_config()}


def require_server(name: str) -> None:
    """ConfigError unless a Prefect server is named: the one that comes with a run has no pools, and
    ends with it. `name`: what of the recipe needs one."""
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        raise ConfigError(
            name,
            "it needs a Prefect server that stays, and PREFECT_API_URL names none",
            next="prefect server start, then export PREFECT_API_URL=http://127.0.0.1:4200/api and "
            "run again",
        )
