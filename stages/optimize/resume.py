"""Saved state of a running training, so that a killed training resumes in the middle; and the
rollouts of a step that was not finite.

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
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from torch import Tensor

from quiver.schemas import updates as updates_kind
from quiver.schemas.errors import ConfigError, CorruptError, SchemaError, printable
from quiver.schemas.manifest import digest
from quiver.schemas.plain import read_json
from quiver.stages.common.runtime.stage import Plan
from quiver.stages.common.store.notes import PROGRESS
from quiver.stages.common.store.storage import storage_errors

from .agreement import of_all_ranks

if TYPE_CHECKING:
    from .trainer import Trainer

log = logging.getLogger(__name__)


_NOT_WHOLE = (
    *(ValueError, TypeError, KeyError, ArithmeticError, RecursionError),
    *(CorruptError, SchemaError, SafetensorError, pa.ArrowException),
)
"""Errors of reading a saved state that is damaged."""


class _Progress(BaseModel):
    """Content of the progress note."""

    file: str = Field(pattern=r"^state-[0-9]+-[0-9]+\.safetensors$")
    sha256: str
    epoch: int = Field(ge=0)
    minibatch: int = Field(ge=0)
    epoch_step: int = Field(ge=0)
    counters: str


class _Counters(BaseModel):
    """A trainer's counters, which are saved beside its tensors."""

    step: int = Field(ge=0)
    updates: list[dict[str, Any]]
    audit_report: dict[str, Any]
    padding: int = Field(ge=0)
    places: int = Field(ge=0)
    entropy_coef: float
    last_entropy: float | None
    kl_coef: float


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
        try:
            note, tensors, counters = self._read(trainer)
        except FileNotFoundError:
            note = None
        except _NOT_WHOLE as error:
            log.warning(
                "the saved training state is not whole; the training starts over: %s",
                printable(error),
            )
            note = None
        files = of_all_ranks(note.file if note else "none")
        if len(set(files)) > 1:
            raise ConfigError(
                "optimize",
                f"the ranks would go on after different steps: {printable(', '.join(files))}",
                next="run the same command again, with a store that all hosts see alike",
            )
        if note is None:
            if self.saves:
                self._storage.delete(self._prefix)
            return 0, 0, trainer.step
        trainer.load_state(tensors, counters.model_dump())
        log.info("the training goes on after step %d", trainer.step - 1)
        return note.epoch, note.minibatch, note.epoch_step

    def _read(self, trainer: Trainer) -> tuple[_Progress, dict[str, Tensor], _Counters]:
        """Return the note, the tensors and the counters. Raises FileNotFoundError if nothing is
        saved, or an error of `_NOT_WHOLE` if it is damaged or does not fit `trainer`."""
        from safetensors.torch import load_file

        if self._storage.is_linked(self._prefix):
            raise ValueError("its folder is a link")
        fields = read_json(self._storage.read(f"{self._prefix}/{PROGRESS}"))
        if not isinstance(fields, dict) or fields.pop("checksum", None) != digest(fields):
            raise ValueError("its checksum is another")
        note = _Progress.model_validate(fields)
        key = f"{self._prefix}/{note.file}"
        if self._storage.sha256(key) != note.sha256:
            raise ValueError(f"the sha256 of {note.file} is another")
        counters = _Counters.model_validate(json.loads(note.counters))
        updates = pa.Table.from_pylist(counters.updates, schema=updates_kind.SCHEMA)
        updates_kind.check(updates)
        num_applied = pc.sum(updates["applied"]).as_py() or 0
        config = trainer.config
        is_within = note.epoch < config.epochs and note.minibatch <= config.minibatches
        if not is_within or counters.step != trainer.step + num_applied:
            raise ValueError("its place and its steps do not go together")
        tensors = load_file(self._storage.path(key))
        trainer.check_state(tensors)
        return note, tensors, counters

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
        line = json.dumps({**note, "checksum": digest(note)})
        self._storage.write(f"{self._prefix}/{PROGRESS}", line.encode())
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
