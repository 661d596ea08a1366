"""The critic's head: one number from each last hidden state, and its life beside the policy.

It starts at 0, so the first values are 0 whatever the model is. Its weights and moments lie in `value_head/` below the policy's
folder, never at the top: engines load every *.safetensors there, and the policy is no other model for having a critic.

    save(head, optimizer, folder, moments=True); restore(head, optimizer, load(version), moments=True)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from schemas.errors import ConfigError
from stages.common import files
from stages.common.store import Version

from . import optimizer as adamw

FOLDER = "value_head"
_FORMAT = 1
_WEIGHTS = ("weight", "bias")


class ValueHead(nn.Module):
    """V = w · h + b in float32, for hidden states h [n, d] of any dtype -> [n] float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight[None], self.bias)[:, 0]


def save(head: ValueHead, optimizer: torch.optim.Optimizer, folder: Path, *, moments: bool) -> None:
    """Write weights and, if asked, AdamW's moments into `value_head/` below `folder`."""
    from safetensors.torch import save_file

    tensors = {name: getattr(head, name).detach().cpu().contiguous() for name in _WEIGHTS}
    tensors |= adamw.state(optimizer, head) if moments else {}
    (folder / FOLDER).mkdir()
    save_file(tensors, folder / FOLDER / "state.safetensors")
    files.write_bytes(folder / FOLDER / "state.json", json.dumps({"format": _FORMAT, "width": len(head.weight)}).encode())


def load(policy: Version) -> dict[str, torch.Tensor] | None:
    """What `save` wrote into this policy, checked against its hashes; None when it has no value head. ConfigError."""
    from safetensors.torch import load_file

    if not any(entry.name.startswith(f"{FOLDER}/") for entry in policy.manifest.files):
        return None
    policy.verify(f"{FOLDER}/")
    about = json.loads((policy.path / FOLDER / "state.json").read_bytes())
    if about.get("format") != _FORMAT:
        raise ConfigError(str(policy.ref), f"its value head is {about}, expected format {_FORMAT}", next="take a newer Quiver")
    return load_file(policy.path / FOLDER / "state.safetensors")


def restore(head: ValueHead, optimizer: torch.optim.Optimizer, found: Mapping[str, torch.Tensor], *, moments: bool) -> None:
    """Take up what `load` gave: the weights and, if asked and there, the moments. ConfigError when the width is another."""
    if found["weight"].shape != head.weight.shape:
        message = f"made for {len(found['weight'])} hidden units, the model has {len(head.weight)}"
        raise ConfigError("value head", message, next="start from the policy that it was trained with")
    with torch.no_grad():
        for name in _WEIGHTS:
            getattr(head, name).copy_(found[name])
    rest = {name: value for name, value in found.items() if name not in _WEIGHTS}
    if moments and rest:
        adamw.load_state(optimizer, head, rest)
