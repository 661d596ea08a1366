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
from pydantic import Field

from quiver.schemas.errors import ConfigError, QuiverError, from_dict
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.runner import Call
from quiver.stages.common.store import Store

from . import logs
from .placement import Place, run_here
from .progress import progress

logs.attach()


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
    limit: str | None = None
    """Global concurrency limit of the server of which the stage holds a slot."""

    @classmethod
    def of(cls, call: Call, where: Place, label: str) -> StageCall:
        """`call` for a worker of the pool of `where`."""
        told = {
            name: getattr(where, name)
            for name in ("python", "timeout_seconds", "online", "slots", "limit")
        }
        store = Store(call.store)
        about = {**call.__dict__, "store": str(store.path), "store_id": store_id(store)}
        return cls(**about, **told, label=label)

    def here(self) -> tuple[Place, Call]:
        """Place and call on this host. ConfigError where the store is another one, or none."""
        store = Store(self.store, create=False)
        if self.store_id not in ("", found := store_id(store)):
            raise ConfigError(
                f"store {self.store}",
                f"id expected {self.store_id}, found {found}: this host has another store there",
                next="mount the same folder at this path on every host",
            )
        names = ("stage", "config", "store", "refs", "into", "force", "share")
        place = Place(
            **{
                name: getattr(self, name)
                for name in ("python", "timeout_seconds", "online", "slots", "limit")
            }
        )
        return place, Call(**{name: getattr(self, name) for name in names})


@flow(name="stage", persist_result=False)
def stage(call: StageCall) -> dict[str, Any]:
    """Run one stage in a child process and say which version came of it.

    Args:
        call: What to run, where the store is, and which versions are read.
    """
    try:
        place, work = call.here()
        with progress(work, logging.getLogger(f"quiver.{work.stage}").info) as on_line:
            outcome = run_here(place, work, call.label, on_line=on_line)
    except QuiverError as error:
        return Failed(message=f"{error}\n{json.dumps({'error': error.to_dict()})}", data=error)
    told = asdict(outcome)
    return Completed(
        message=f"{outcome.ref}\n{json.dumps({'ref': outcome.ref, 'cached': outcome.cached})}",
        data=told,
    )


def told(message: str | None) -> dict[str, Any] | None:
    """What `stage` says in its last state: {"ref", "cached"} or {"error": QuiverError}; None when
    it did not come to that."""
    try:
        answer = json.loads((message or "").rpartition("\n")[2])
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    return {"error": from_dict(answer["error"])} if "error" in answer else answer


def store_id(store: Store) -> str:
    """What tells this store from every other."""
    return json.loads((store.path / "store.json").read_bytes()).get("id", "")
