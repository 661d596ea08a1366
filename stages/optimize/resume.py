"""The state of a running training, so that a killed one resumes in the middle; and the rollouts of
a step that was not finite.

    STORE/<run>/policy/.staging/KEY.resume/state-….safetensors    weights and moments
    STORE/<run>/policy/.staging/KEY.resume/progress               place, file and checksums
    STORE/<run>/policy/.not_finite/KEY-step-000007.arrow          rollouts of a broken step

The trainer is made as at the first start, with values and audit of the starting weights. Then the
weights and moments of the saved step replace the starting ones. On a CPU the following steps are
equal bit for bit to an uninterrupted training's. A state that is damaged or does not fit is
deleted, and the training starts over.

    progress = SavedProgress(plan, rollout_ids, saves=writer is not None)
    trainer.train(progress)
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from quiver.schemas.errors import ConfigError, CorruptError, printable
from quiver.stages.common.runtime.stage import Plan
from quiver.stages.common.store.notes import PROGRESS, note_of, read_note
from quiver.stages.common.store.storage import storage_errors

from .accelerator import of_all_ranks
from .optimizer import Bf16AdamW, like

if TYPE_CHECKING:
    from .trainer import Trainer

log = logging.getLogger(__name__)

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


class SavedProgress:
    """Saved state of one training while it runs."""

    def __init__(self, plan: Plan, rollout_ids: pa.Array, *, saves: bool) -> None:
        """`rollout_ids`: ids of the batch's rollouts, in its order. `saves`: true on the one rank
        that saves."""
        self.saves = saves
        self._storage = plan.store.storage
        self._name = plan.name
        self._prefix = f"{plan.name}/.staging/{plan.run_key}.resume"
        self._broken_prefix = f"{plan.name}/.not_finite/{plan.run_key[:12]}"
        self._rollout_ids = rollout_ids
        self._saved_at = time.monotonic()

    # -- resuming

    def load(self, trainer: Trainer) -> tuple[int, int, int]:
        """Put the saved state into the trainer.

        Returns:
            The epoch and mini-batch that come next, and the step at which that epoch began; (0, 0,
            the trainer's step) if nothing is saved.
        Raises:
            ConfigError: on all ranks, if they read different states.
        """
        state = None
        try:
            state = self._read(trainer)
        except (ValueError, TypeError, KeyError, OSError, CorruptError, SafetensorError) as error:
            log.warning(
                "the saved training state is not whole; the training starts over: %s",
                printable(error),
            )
        files = of_all_ranks(state[0]["file"] if state else "none")
        if len(set(files)) > 1:
            raise ConfigError(
                "optimize",
                f"the ranks would go on after different steps: {printable(', '.join(files))}",
                next="run the same command again, with a store that all hosts see alike",
            )
        if state is None:
            if self.saves:
                self._storage.delete(self._prefix)
            return 0, 0, trainer.step
        note, tensors = state
        trainer.load_state(tensors, json.loads(note["counters"]))
        log.info("the training goes on after step %d", trainer.step - 1)
        return note["epoch"], note["minibatch"], note["epoch_step"]

    def _read(self, trainer: Trainer) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the note and the tensors, or None if nothing is saved. Raises an error if they are
        damaged or do not fit `trainer`."""
        from safetensors.torch import load_file

        key = f"{self._prefix}/{PROGRESS}"
        if not self._storage.exists(key):
            return None
        note = read_note(self._storage, key)
        if note is None:
            raise ValueError("its note is not what was written")
        file = f"{self._prefix}/{note['file']}"
        if self._storage.sha256(file) != note["sha256"]:
            raise ValueError(f"{note['file']} is not what was written")
        tensors = load_file(self._storage.path(file))
        trainer.check_state(tensors)
        return note, tensors

    # -- saving

    def step_done(self, trainer: Trainer, epoch: int, minibatch: int, epoch_step: int) -> None:
        """Save the state if it is time. `epoch` and `minibatch` come next."""
        config = trainer.config
        minutes = (time.monotonic() - self._saved_at) / 60
        steps = config.resume_steps
        is_time = len(trainer.updates) % steps == 0 if steps else minutes >= config.resume_minutes
        if not trainer.agree(self.saves and is_time):
            return
        place = {"epoch": epoch, "minibatch": minibatch, "epoch_step": epoch_step}
        with storage_errors(self._name):
            if self.saves:
                self._storage.make_prefix(self._prefix)
            room = self._storage.path(self._prefix) if self.saves else None
            tensors, counters = trainer.state(room)
            if self.saves:
                self._save(trainer, place, tensors, counters)
        self._saved_at = time.monotonic()

    def _save(
        self,
        trainer: Trainer,
        place: dict[str, int],
        tensors: dict[str, Tensor],
        counters: dict[str, Any],
    ) -> None:
        from safetensors.torch import save_file

        file = f"state-{trainer.step:06d}-{len(trainer.updates):06d}.safetensors"
        key = f"{self._prefix}/{file}"
        save_file(tensors, self._storage.path(key))
        self._storage.settle(key)
        # the state must be durable before the note that names it
        self._storage.sync_names(self._prefix)
        # as text: the numbers of a skipped step are not finite, and strict JSON cannot hold them
        note = {**place, "file": file, "sha256": self._storage.sha256(key)}
        note["counters"] = json.dumps(counters)
        self._storage.write(f"{self._prefix}/{PROGRESS}", note_of(note))
        # the note must be durable before the older state is deleted
        self._storage.sync_names(self._prefix)
        for name in self._storage.list(self._prefix):
            if name not in (file, PROGRESS):
                self._storage.delete(f"{self._prefix}/{name}")

    def not_finite(self, trainer: Trainer, update: dict[str, Any], rows: list[int]) -> None:
        """Write the rollouts and logprobs of a step whose loss or gradient is not finite."""
        if not self.saves:
            return
        batch = trainer.batch
        completions = batch.sequences.completions
        logprobs = completions.with_values(trainer.logprobs).to_arrow()
        old_logprobs = completions.with_values(batch.old_logprobs).to_arrow()
        table = pa.table(
            {
                "rollout_id": self._rollout_ids.take(pa.array(rows)),
                "logprobs": logprobs.take(pa.array(rows)),
                "old_logprobs": old_logprobs.take(pa.array(rows)),
            }
        ).replace_schema_metadata({"update": json.dumps(update)})
        key = f"{self._broken_prefix}-step-{update['step']:06d}.arrow"
        with storage_errors(self._name):
            self._storage.make_prefix(key.rpartition("/")[0])
            with (
                self._storage.create(key) as file,
                pa.ipc.new_file(pa.PythonFile(file, "w"), table.schema) as arrow,
            ):
                arrow.write_table(table)
        log.warning("its rollouts are in %s", self._storage.path(key))
