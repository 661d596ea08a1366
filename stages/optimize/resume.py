"""The state of a running training, so that a killed one resumes in the middle; and the rollouts of
a step that was not finite.

    STORE/<run>/policy/.work/KEY.0.resume/state-….safetensors    weights and moments
    STORE/<run>/policy/.work/KEY.0.resume/progress               place, file and checksums
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
from safetensors import SafetensorError
from torch import Tensor

from quiver.schemas.errors import ConfigError, CorruptError, printable
from quiver.stages.core.files import storage_errors
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store.notes import PROGRESS, read_note
from quiver.stages.core.store.storage import size_and_sha256, use_local, with_checksum

from .accelerator import of_all_ranks

if TYPE_CHECKING:
    from .trainer import Trainer

log = logging.getLogger(__name__)


class SavedProgress:
    """Saved state of one training while it runs."""

    def __init__(self, plan: Plan, rollout_ids: pa.Array, *, saves: bool) -> None:
        """`rollout_ids`: ids of the batch's rollouts, in its order, to name those of a step that
        was not finite. `saves`: true on the one rank that saves."""
        self.saves = saves
        self._storage = plan.store.storage
        self._name = plan.name
        self._prefix = f"{plan.work}.resume"
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
        # no other OSError: a disk that fails for a moment still has the state
        except (
            *(ValueError, TypeError, KeyError, FileNotFoundError),
            *(CorruptError, SafetensorError),
        ) as error:
            log.warning(
                "the saved training state is incomplete; the training starts over: %s",
                printable(error),
            )
        files = of_all_ranks(state[0]["file"] if state else "none")
        if len(set(files)) > 1:
            raise ConfigError(
                "optimize",
                f"the ranks would continue after different steps: {printable(', '.join(files))}",
                next="run the same command again, with a store that all hosts see alike",
            )
        if state is None:
            if self.saves:
                self._storage.delete(f"{self._prefix}/")
            return 0, 0, trainer.step
        note, tensors = state
        trainer.load_state(tensors, json.loads(note["counters"]))
        log.info("the training continues after step %d", trainer.step - 1)
        return note["epoch"], note["minibatch"], note["epoch_step"]

    def _read(self, trainer: Trainer) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the note and the tensors, or None if nothing is saved. Raises an error if they are
        damaged or do not fit `trainer`."""
        from safetensors.torch import load_file

        if PROGRESS not in self._storage.list(self._prefix):
            return None
        note = read_note(self._storage, f"{self._prefix}/{PROGRESS}")
        if note is None:
            raise ValueError("its note is not what was written")
        file = f"{self._prefix}/{note['file']}"
        if size_and_sha256(self._storage, file)[1] != note["sha256"]:
            raise ValueError(f"{note['file']} is not what was written")
        tensors = use_local(self._storage, file, load_file)
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
        storage = self._storage
        with storage_errors(self._name):
            room = storage.folder(self._prefix) if self.saves else None
            tensors, counters = trainer.state(room)
            if self.saves:
                from safetensors.torch import save_file

                file = f"state-{trainer.step:06d}-{len(trainer.updates):06d}.safetensors"
                save_file(tensors, room / file)
                # the state must be durable before the note that names it
                _, sha256 = storage.put_file(f"{self._prefix}/{file}")
                note = {"file": file, "sha256": sha256, "epoch": epoch}
                note |= {"minibatch": minibatch, "epoch_step": epoch_step}
                # as text: numbers of a skipped step are not finite, which strict JSON cannot hold
                note["counters"] = json.dumps(counters)
                # the note must be durable before the older state is deleted
                storage.put(f"{self._prefix}/{PROGRESS}", with_checksum(note))
                storage.flush(self._prefix)
                for name in storage.list(self._prefix):
                    if name not in (file, PROGRESS):
                        storage.delete(f"{self._prefix}/{name}")
        self._saved_at = time.monotonic()

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
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, table.schema) as arrow:
                arrow.write_table(table)
            self._storage.put(key, sink.getvalue())
        log.warning("its rollouts are in %s/%s", self._storage.url, key)
