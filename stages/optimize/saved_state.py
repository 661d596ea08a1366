"""The part of a trainer that is saved while it runs, and restored on resume: weights and moments as
named tensors, and counters.

    tensors, counters = trainer.state(folder)
    trainer.check_state(tensors); trainer.load_state(tensors, counters)

Not of the spine: it is the trainer's own tensors, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .bf16 import Bf16AdamW
from .shards import like

_COUNTERS = ("step", "updates", "audit_report", "padding", "places")
_COUNTERS += ("entropy_coef", "last_entropy", "kl_coef")
"""Attributes that are saved beside the tensors."""


class SavedState:
    """Base class of trainers that saves and restores their state."""

    step: int
    logprobs: Tensor
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def state(self, room: Path | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and counters that the next step depends on; counters are plain JSON.
        `room`: a folder on disk for copies, if one rank's memory cannot hold them."""
        tensors = {"logprobs": self.logprobs}
        for number, parameter in enumerate(self.parameters):
            tensors[f"weight.{number}"] = parameter.detach()
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{number}"] = tensor
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return self.copies(tensors, room), counters

    def copies(self, tensors: Mapping[str, Tensor], room: Path | None) -> dict[str, Tensor]:
        """Return whole copies on the CPU, for the rank that saves them."""
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        return {name: copy.contiguous() for name, copy in copies.items()}

    def agree(self, is_time: bool) -> bool:
        """Return True if this rank takes part in saving. Sharded trainers decide together."""
        return is_time

    def gather(self, room: Path | None) -> None:
        """Make sharded tensors whole before they are saved; see sharding.py."""

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `tensors` have the names, shapes and dtypes of this trainer's
        `state`."""
        expected = {"logprobs": (self.logprobs.shape, self.logprobs.dtype)}
        for number, parameter in enumerate(self.parameters):
            expected[f"weight.{number}"] = (parameter.shape, parameter.dtype)
            if f"step.{number}" in tensors:
                expected[f"step.{number}"] = (torch.Size(), torch.float32)
                for key in ("exp_avg", "exp_avg_sq"):
                    expected[f"{key}.{number}"] = (parameter.shape, torch.float32)
        if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} != expected:
            raise ValueError("its tensors are not those of this training")

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.logprobs.copy_(tensors["logprobs"])
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                parameter.copy_(like(tensors[f"weight.{number}"], parameter))
        for name, tensor in tensors.items():
            key, _, number = name.partition(".")
            if number and key != "weight":
                parameter = self.parameters[int(number)]
                self.optimizer.state[parameter][key] = like(tensor, parameter)
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        if isinstance(self.optimizer, Bf16AdamW):
            self.optimizer.number = self.step
