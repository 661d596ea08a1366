"""The critic's weights: a head that makes one number of each hidden state, maybe a trunk of its
own, and their life beside the policy.

The head starts at 0, so the first values are 0 whatever the model is. On the policy's trunk
(`critic = "trunk"`) head and moments lie in `value_head/` below the policy's folder; a critic that
is a model of its own (`"model"`), which begins as a copy of the policy that it starts beside, lies
whole in `critic/`. Never at the top: engines load every *.safetensors there, and the policy is no
other model for having a critic.

    save(critic, optimizer, folder, "model", moments=True); resume(critic, optimizer, version,
    "model", moments=True)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from quiver.schemas.errors import ConfigError
from quiver.stages.common.store import Version, storage

from . import optimizer as adamw

FOLDERS = {"trunk": "value_head", "model": "critic"}
_FORMAT = 1


class ValueHead(nn.Module):
    """V = w · h + b in float32, for hidden states h [n, d] of any dtype -> [n] float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight[None], self.bias)[:, 0]


def trunk_of(model: nn.Module) -> nn.Module:
    """`model` without its output embedding, which no value needs: each weight that is left has a
    gradient."""
    if (
        model.base_model is model
    ):  # T5 and its kin hold encoder, decoder and output embedding side by side
        model.set_output_embeddings(None)
    return model.base_model


def with_trunk(head: ValueHead, trunk: nn.Module | None) -> nn.Module:
    """What is trained, saved and restored as the critic: the head, with its trunk where it has one
    of its own."""
    return head if trunk is None else nn.ModuleDict({"head": head, "trunk": trunk})


def save(
    critic: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, kind: str, *, moments: bool
) -> None:
    """Write weights and, if asked, AdamW's moments into the folder of this kind below `folder`."""
    from safetensors.torch import save_file

    tensors = {name: value.detach().cpu().contiguous() for name, value in critic.named_parameters()}
    tensors |= adamw.state(optimizer, critic) if moments else {}
    own = folder / FOLDERS[kind]
    own.mkdir()
    save_file(tensors, own / "state.safetensors")
    storage.write_bytes(own / "state.json", json.dumps({"format": _FORMAT}).encode())


def holds(policy: Version, kind: str) -> bool:
    """Whether this policy was saved with a critic of this kind."""
    return any(entry.name.startswith(f"{FOLDERS[kind]}/") for entry in policy.manifest.files)


def load(policy: Version, kind: str) -> dict[str, torch.Tensor] | None:
    """What `save` wrote into this policy, checked against its hashes; None when it has no critic of
    this kind. ConfigError."""
    from safetensors.torch import load_file

    if not holds(policy, kind):
        return None
    folder = FOLDERS[kind]
    policy.verify(f"{folder}/")
    about = json.loads((policy.files.folder / folder / "state.json").read_bytes())
    if about.get("format") != _FORMAT:
        raise ConfigError(
            str(policy.ref),
            f"its critic is {about}, expected format {_FORMAT}",
            next="take a newer Quiver",
        )
    return load_file(policy.files.folder / folder / "state.safetensors")


def restore(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    found: dict[str, torch.Tensor],
    *,
    moments: bool,
) -> None:
    """Take up what `load` gave: the weights and, if asked and there, the moments. ConfigError when
    they are another model's."""
    own = dict(critic.named_parameters())
    for name, value in own.items():
        if name not in found or found[name].shape != value.shape:
            had = list(found[name].shape) if name in found else "nothing"
            message = f"{name} was saved as {had}, the model has {list(value.shape)}"
            raise ConfigError(
                "critic", message, next="start from the policy that it was trained with"
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(found[name])
    rest = {name: value for name, value in found.items() if name not in own}
    if moments and rest:
        adamw.load_state(optimizer, critic, rest)


def resume(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: Version,
    kind: str,
    *,
    moments: bool,
) -> None:
    """Go on with the critic that `policy` was saved with, if any.

    A head that was on the policy's trunk goes on upon the copy of that trunk, with new moments: the
    values are the same at first. The other way there is no going on, because the head was trained
    on other hidden states: ConfigError.
    """
    if kind == "trunk" and holds(policy, "model"):
        message = (
            "its critic is a model of its own, optimize.critic = 'trunk' asks for one on the "
            "policy's trunk"
        )
        raise ConfigError(str(policy.ref), message, next='set optimize.critic = "model"')
    if found := load(policy, kind):
        restore(critic, optimizer, found, moments=moments)
    elif kind == "model" and (head := load(policy, "trunk")):
        restore(critic["head"], optimizer, head, moments=False)
