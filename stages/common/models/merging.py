"""Merges a policy that holds only an adapter with its base, in memory.

The merged weights are never written (`optimize.lora.save = "adapter"`).

    base = base_of(store, policy)                  # None if the policy has weights of its own
    model = load_model(policy, base=base, dtype=torch.float32)

Not of the spine: only recipes with `[optimize.lora]` make such policies.
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
    """Return the version with the weights that `policy` lacks; None if it has its own.

    Raises LineageError.
    """
    return adapter_base(store, policy) if is_adapter_alone(policy) else None


def put_adapter_on(model: nn.Module, exact: nn.Module, policy: Version) -> None:
    """Write base weights plus the adapter of `policy` into `model`, rounded to its dtype.

        W + (alpha / rank) · B A, as peft merges

    Args:
        model: Model to change.
        exact: The base model in float32; may be `model` itself.
        policy: Version with the adapter.

    Raises:
        ConfigError: The adapter belongs to another model.
    """
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
