"""`import quiver`: what a user needs, under one name. Nothing is imported before it is asked for.

    import quiver

    store = quiver.Store("store")
    rollouts = store.open("arith/rollouts@latest")
    rollouts.manifest.metrics
    rollouts.to_datasets()
    quiver.rows(store, rollouts.ref)

    quiver.run(quiver.Recipe.load("recipe.toml"))
    quiver.optimize.Config(algorithm="dapo")

The rooms lie below it: `quiver.schemas`, `quiver.stages`, `quiver.flows`, `quiver.deployments`.
"""

from __future__ import annotations

import importlib
from typing import Any

from quiver.stages import MODULES

_OBJECTS = {
    "Store": "quiver.stages.core.store",
    "Version": "quiver.stages.core.store",
    "Recipe": "quiver.flows.recipe",
    "run_stage": "quiver.stages.core.run.runner",
    "rows": "quiver.flows.look.joined",
}
_ERRORS = (
    "QuiverError",
    "ConfigError",
    "CorruptError",
    "BusyError",
    "ConflictError",
    "LineageError",
    "SchemaError",
    "RewardError",
    "RemoteError",
    "ResourceError",
    "NumericError",
    "OutcomeUnknownError",
    "SecurityError",
)
__all__ = [*_OBJECTS, *MODULES, *_ERRORS, "__version__", "run"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """The object `name`, imported now (PEP 562)."""
    if name in _OBJECTS:
        return getattr(importlib.import_module(_OBJECTS[name]), name)
    if name in MODULES:
        return importlib.import_module(MODULES[name])
    if name in _ERRORS:
        return getattr(importlib.import_module("quiver.schemas.errors"), name)
    if name == "run":
        return importlib.import_module("quiver.flows.post_train").post_train
    if name == "__version__":
        from importlib.metadata import version

        return version("quiver-rl")
    raise AttributeError(f"module 'quiver' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
