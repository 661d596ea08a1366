"""What is done: one package a stage, each runs alone; no stage knows another, nor who runs it."""

from __future__ import annotations

import importlib

MODULES = {
    "policy": "stages.common.checkpoints:PolicyConfig",
    "prompt": "stages.prompt.stage:Config",
    "generate": "stages.generate.stage:Config",
    "reward": "stages.reward.stage:Config",
    "override": "stages.reward.override:Config",
    "logprobs": "stages.logprobs.stage:Config",
    "average": "stages.logprobs.average:Config",
    "optimize": "stages.optimize.stage:Config",
    "evaluate": "stages.evaluate.stage:Config",
}


def load(name: str):
    """The config class and the `run` function of a stage."""
    module, _, config = MODULES[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, config), loaded.run
