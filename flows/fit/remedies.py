"""Settings that would make a stage fit, the mildest first; each is calculated again."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from quiver.stages.optimize.config import Config as OptimizeConfig

from ..recipe import Recipe
from .machines import Machine, this_host
from .needs import ROOM, Need, sampling, training
from .shapes import Shape
from .workload import Workload


def has_enough(need: Need, machine: Machine) -> bool:
    """True if the machine has as many devices as the stage needs. Any number of processes share a
    CPU."""
    return not need.on_gpu or need.devices <= machine.count


def fits(need: Need, machine: Machine) -> bool:
    """True if the machine can hold the stage.

    A GPU must hold its own share; this host's memory must hold all processes on its CPU.
    """
    if need.on_gpu:
        return has_enough(need, machine) and need.bytes <= ROOM * machine.memory
    return need.devices * need.bytes <= ROOM * this_host().memory


def remedies(
    need: Need, recipe: Recipe, shape: Shape, work: Workload, machine: Machine
) -> list[tuple[str, Need]]:
    """Return at most three settings with which the stage fits, each with its new need."""
    tried = []
    if need.stage == "generate" and recipe.generate.engine == "vllm" and need.on_gpu:
        options = recipe.generate.options
        for size in (2, 4, 8, 16):
            if size > options.get("tensor_parallel_size", 1) and shape.heads % size == 0:
                split = {**options, "tensor_parallel_size": size}
                setting = f"generate.options.tensor_parallel_size = {size}"
                tried.append((setting, sampling(shape, recipe, work, machine, split)))
    elif need.stage == "optimize":
        config = recipe.optimize_config()
        for changes in _changes(work, machine, config.processes or 1):
            with suppress(ValueError):  # Some settings do not go with others of the recipe.
                changed = OptimizeConfig.model_validate({**config.model_dump(), **changes})
                settings = [
                    f"optimize.{key} = {json.dumps(value)}" for key, value in changes.items()
                ]
                tried.append((", ".join(settings), training(shape, changed, work, machine)))
    return [(setting, changed) for setting, changed in tried if fits(changed, machine)][:3]


def _changes(work: Workload, machine: Machine, ranks: int) -> list[dict[str, Any]]:
    """Return changes of [optimize], the mildest first. `ranks` is the current number of
    processes."""
    smaller = {"token_budget": work.longest}
    cheaper = {**smaller, "activation_checkpointing": True}
    candidates = [{}, smaller, {"activation_checkpointing": True}, cheaper]
    if machine.count > 1:
        shared = {"processes": machine.count, "shard": True}
        candidates += [shared, {**shared, **cheaper}]
    lora = {"lora": {}}
    candidates += [lora, {**lora, **cheaper}, {"precision": "bf16_stochastic", **cheaper}]
    if machine.is_gpu and ranks > machine.count:  # Each rank needs its own GPU.
        return [{"processes": machine.count, **changes} for changes in candidates]
    return candidates[1:]
