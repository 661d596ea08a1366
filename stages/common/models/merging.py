"""A policy that holds an adapter alone, as the plain model that it is: its base with the adapter on
it, which is never written down (`optimize.lora.save = "adapter"`).

    base = base_of(store, policy)                  # None where the policy has weights of its own
    model = load_model(policy, base=base, dtype=torch.float32)

Not of the spine: only a recipe with `[optimize.lora]` makes such a policy.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from quiver.stages.common.models.checkpoints import (
    ADAPTER_FOLDER,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    adapter_base,
    is_adapter_alone,
)
from quiver.stages.common.models.folder import load_errors
from quiver.stages.common.store import Store, Version

if TYPE_CHECKING:
    from torch import nn


def base_of(store: Store, policy: Version) -> Version | None:
    """The version that has the weights which `policy` lacks; None where it has its own.
    LineageError."""
    return adapter_base(store, policy) if is_adapter_alone(policy) else None


def put_adapter_on(model: nn.Module, exact: nn.Module, policy: Version) -> None:
    """Make the weights of `model` those of `exact`, its base in float32, with the adapter of
    `policy` on them, rounded to the dtype of `model`: W + (alpha / rank) · B A, as peft merges.
    Both may be one. ConfigError where the adapter is of another model."""
    import torch
    from safetensors.torch import load_file
    from transformers.pytorch_utils import Conv1D

    policy.verify(f"{ADAPTER_FOLDER}/")
    with load_errors(str(policy.ref)), torch.no_grad():
        config = json.loads(policy.files.read(f"{ADAPTER_FOLDER}/adapter_config.json"))
        matrices = load_file(policy.files.path(ADAPTER_WEIGHTS))
        for name, a in matrices.items():
            if not name.endswith(".lora_A.weight"):
                continue
            path = name.removeprefix(ADAPTER_PREFIX).removesuffix(".lora_A.weight")
            layer = exact.get_submodule(path)
            change = matrices[name.replace(".lora_A.", ".lora_B.")] @ a
            change = change.T if isinstance(layer, Conv1D) else change
            merged = layer.weight + change.to(layer.weight.device) * (
                config["lora_alpha"] / config["r"]
            )
            model.get_submodule(path).weight.copy_(merged)
