"""What is done: one package a stage, each runs alone; no stage knows another, nor who runs it."""

from __future__ import annotations

import importlib

MODULES = {
    "policy": "quiver.stages.common.models.checkpoints:PolicyConfig",
    "prompt": "quiver.stages.prompt.stage:Config",
    "generate": "quiver.stages.generate.stage:Config",
    "reward": "quiver.stages.reward.stage:Config",
    "override": "quiver.stages.reward.override:Config",
    "logprobs": "quiver.stages.logprobs.stage:Config",
    "average": "quiver.stages.logprobs.average:Config",
    "optimize": "quiver.stages.optimize.stage:Config",
    "evaluate": "quiver.stages.evaluate.stage:Config",
}


def load(name: str):
    """The config class and the `run` function of a stage."""
    module, _, config = MODULES[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, config), loaded.run
