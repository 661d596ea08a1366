"""The critic's weights: a value head, optionally on its own trunk, and how they are saved and
restored.

The head maps each hidden state to one number. It starts at 0, so the first values are 0 for every
model. On the policy's trunk (`critic = "trunk"`), head and moments are saved in `value_head/` below
the policy's folder. A critic with its own trunk (`"model"`), initially a copy of the starting
policy's, is saved whole in `critic/`. It is never at the top: engines load every *.safetensors
there, and a critic must not change the policy itself.

    save(critic, optimizer, folder, "model", moments=True)
    resume(critic, optimizer, version, "model", moments=True)

Not of the spine: only algorithms with a critic (ppo) use it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward import attention
from quiver.stages.common.store import Version

from . import optimizer as adamw
from . import state_folder
from .shards import like

FOLDERS = {"trunk": "value_head", "model": "critic"}


class ValueHead(nn.Module):
    """V = w · h + b in float32, for hidden states h [n, d] of any dtype -> [n] float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight[None], self.bias)[:, 0]


def trunk_of(model: nn.Module) -> nn.Module:
    """Return `model` without its output embedding, which no value needs; every remaining weight has
    a gradient."""
    # T5-like models hold encoder, decoder and output embedding side by side
    trunk = attention.trunk_of(model)
    if trunk is model:
        model.set_output_embeddings(None)
    return trunk


def with_trunk(head: ValueHead, trunk: nn.Module | None) -> nn.Module:
    """Return the module that is trained, saved and restored as the critic: the head, with its own
    trunk if it has one."""
    return head if trunk is None else nn.ModuleDict({"head": head, "trunk": trunk})


def save(
    critic: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, kind: str, *, moments: bool
) -> None:
    """Write weights and, if asked, AdamW's moments into the folder of this kind below `folder`."""
    tensors = {name: parameter.detach() for name, parameter in critic.named_parameters()}
    if moments:
        tensors |= adamw.state(optimizer, critic)
    state_folder.write(folder / FOLDERS[kind], tensors)


def restore(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    *,
    moments: bool,
) -> None:
    """Restore what `save` wrote: the weights and, if asked and present, the moments. Raises
    ConfigError if they belong to another model."""
    parameters = dict(critic.named_parameters())
    for name, parameter in parameters.items():
        shape = list(tensors[name].shape) if name in tensors else "nothing"
        if shape != list(parameter.shape):
            raise ConfigError(
                "critic",
                f"{name} was saved as {shape}, the model has {list(parameter.shape)}",
                next="start from the policy that it was trained with",
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(like(tensors[name], parameter))
    saved_moments = {name: tensors[name] for name in tensors if name not in parameters}
    if moments and saved_moments:
        adamw.load_state(optimizer, critic, saved_moments)


def resume(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: Version,
    kind: str,
    *,
    moments: bool,
) -> None:
    """Continue with the critic that `policy` was saved with, if any.

    A head from the policy's trunk continues on the copy of that trunk, with new moments: the values
    are the same at first. The other direction raises ConfigError, because the head was trained on
    other hidden states.
    """
    saved = next((kind for kind in FOLDERS if state_folder.holds(policy, FOLDERS[kind])), None)
    if saved is None:
        return
    if kind == "trunk" and saved == "model":
        raise ConfigError(
            str(policy.ref),
            "its critic is a model of its own, optimize.critic = 'trunk' asks for one on the "
            "policy's trunk",
            next='set optimize.critic = "model"',
        )
    tensors = state_folder.read(policy, FOLDERS[saved])
    is_alike = saved == kind
    restored = critic if is_alike else critic["head"]
    restore(restored, optimizer, tensors, moments=moments and is_alike)
