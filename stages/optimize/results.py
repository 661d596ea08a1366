"""Writes the results of optimize: the policy folder with its optimizer state, advantages/1,
updates/1, and the manifests' numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import advantages as advantages_kind
from quiver.schemas import updates as updates_kind
from quiver.stages.core.files import storage_errors
from quiver.stages.core.store import Version
from quiver.stages.core.store.versions import OPTIMIZER_FOLDER
from quiver.stages.core.store.writer import Writer
from quiver.stages.model import checkpoints
from quiver.stages.model.loading import restore_dropout

from . import critic, lora, optimizer
from .losses import log_ratio

if TYPE_CHECKING:
    from .rollouts import Loaded
    from .trainer import Trainer

log = logging.getLogger(__name__)


def save(parent: Version, trainer: Trainer, writer: Writer | None) -> None:
    """Write the model and, if asked, the optimizer's state below it, into the folder of `writer`,
    which only rank 0 has. `trainer` and its model cannot be used after this."""
    if writer is None:
        trainer.gather(None)
        return
    config = trainer.config
    model = trainer.model
    with storage_errors(f"{writer.run}/policy"):
        trainer.optimizer.zero_grad(set_to_none=True)
        # outside the policy's folder: some file systems keep the name of an unlinked file, which
        # would then be published
        trainer.gather(writer.resume_folder)
        trainer.policy.set_mode("single")  # the block attention must not enter the saved config
        restore_dropout(model, parent)
        state = optimizer.optimizer_state(trainer.optimizer, model) if config.save_optimizer else {}
        is_adapter_alone = config.lora is not None and config.lora.save == "adapter"
        if config.lora:
            lora.save(model, writer.folder)
        if config.lora and not is_adapter_alone:
            lora.merge(model)
        is_rounded = config.saved_dtype(trainer.precision) == "bfloat16"
        if is_rounded and trainer.precision != "bf16_stochastic":
            rest = optimizer.round_weights(model)
            if not config.lora:
                state |= rest
        checkpoints.save_policy(None if is_adapter_alone else model, parent, writer.folder)
        for path in writer.folder.glob("*.safetensors"):
            writer.file_done(path)
        if trainer.critic is not None:
            critic.save(
                trainer.critic,
                trainer.optimizer,
                writer.folder,
                config.critic,
                moments=config.save_optimizer,
            )
        if trainer.accelerator.num_processes == 1:
            trainer.free()
        if state:
            folder = writer.folder / OPTIMIZER_FOLDER
            optimizer.write_tensors(folder, state, done=writer.file_done)


def finish(writers: Mapping[str, Writer], loaded: Loaded, trainer: Trainer) -> None:
    """Write advantages and updates, and finish all three versions with their metrics."""
    device = trainer.accelerator.device.type
    updates = pa.Table.from_pylist(
        [_finite(update) for update in trainer.updates], schema=updates_kind.SCHEMA
    )
    reasons = {"kept": loaded.summary["kept"], **loaded.summary["dropped"]}
    for writer, table, status in (
        (writers["advantages"], advantages_table(loaded, trainer), reasons),
        (writers["updates"], updates, {}),
    ):
        writer.write_table(table)
        writer.finish(status=status, device=device)
    metrics = metrics_of(loaded, trainer)
    writers["policy"].finish(metrics=_finite(metrics), device=device)


def metrics_of(loaded: Loaded, trainer: Trainer) -> dict[str, Any]:
    """Return the policy's metrics: its rollouts, its speed, the last step's numbers, and the
    coefficients that the next training continues with."""
    updates = trainer.updates
    tokens = sum(row["tokens"] for row in updates)
    # of the steps before a kill too, as their tokens are
    seconds = sum(row["seconds"] for row in updates)
    names = ["loss", "grad_norm", "entropy", "approx_kl", "clip_fraction"]
    names += ["value_loss", "explained_variance"] if trainer.algorithm.has_critic else []
    carried = ["entropy_coef", "last_entropy"] if trainer.objective.has_entropy_bonus else []
    carried += ["kl_coef"] if trainer.config.kl_target is not None else []
    return {
        **loaded.summary,
        **{name: updates[-1][name] for name in names if updates},
        "trainable_parameters": trainer.num_trained,
        **{name: getattr(trainer, name) for name in carried},
        "step": trainer.step,
        "steps": len(updates),
        "skipped_steps": sum(not row["applied"] for row in updates),
        "tokens": tokens,
        "prompt_tokens": sum(row["prompt_tokens"] for row in updates),
        "tokens_per_second": tokens / seconds if seconds else None,
        "packing": trainer.mode,
        "attention": trainer.kernel,
        "padding_share": trainer.padding / max(trainer.slots, 1),
        "precision": trainer.precision,
        "token_budget": trainer.budget,
        "activation_checkpointing": trainer.recomputes,
        "budget_halvings": trainer.halvings,
        "max_completion_tokens": loaded.batch.max_completion_tokens,
        "audit": trainer.audit_report,
        "first_clip_fraction": first_clip_fraction(trainer),
        "processes": trainer.accelerator.num_processes,
    }


def first_clip_fraction(trainer: Trainer) -> float | None:
    """Return the share of the first step's tokens whose loss a bound decided, although no weight
    has changed and every ratio should be 1. Logs a warning if it is above 0.

    None if there was no step, or if stale rollouts make ratios other than 1 legitimate.
    """
    batch = trainer.batch
    from_start = trainer.config.prox_of == "start" and batch.prox_logprobs is not None
    if not trainer.updates or (batch.has_stale and not from_start):
        return None
    share = trainer.updates[0]["clip_fraction"]
    if share > 0:
        log.warning(
            "the first step clipped %.2g of its tokens, although no weight had changed: the "
            "ratio's denominator differs numerically from the trainer's logprobs; [logprobs] prox "
            "= true takes it from the trainer, in the precision of [logprobs]",
            share,
        )
    return share


def advantages_table(loaded: Loaded, trainer: Trainer) -> pa.Table:
    """Return advantages/1, one row for each rollout of the dataset, in its order; with one
    advantage for each token if the algorithm has those.

    `mean_ratio` is the ratio to `old_logprobs`, even with proximal logprobs; the `clip_fraction` of
    updates/1 uses the ratio to the proximal ones.
    """
    batch = trainer.batch
    completions = batch.sequences.completions
    ratio = log_ratio(trainer.logprobs, batch.old_logprobs).exp()
    means = [completions.with_values(values).segment_mean() for values in (ratio, trainer.logprobs)]
    dropped = pa.array(loaded.reasons, pa.string())
    # the position of each rollout in the batch; null if it was dropped or has no loss
    places = pc.index_in(pa.array(range(len(dropped))), value_set=pa.array(loaded.rows.numpy()))
    places = pc.if_else(dropped.is_null(), places, None)
    schema = advantages_kind.SCHEMA
    advantages = pa.array(batch.advantages.numpy())
    if trainer.algorithm.advantage_of != "rollouts":
        schema = advantages_kind.PER_TOKEN
        advantages = completions.with_values(batch.advantages).to_arrow()
        advantages = advantages.cast(schema.field("advantage").type)
    columns = [advantages, *(pa.array(mean.numpy(), from_pandas=True) for mean in means)]
    advantage, *means = (column.take(places) for column in columns)
    return pa.Table.from_arrays(
        [loaded.ids.combine_chunks(), advantage, dropped.is_null(), dropped, *means],
        schema=schema,
    )


def _finite(value: Any) -> Any:
    """Return `value` with None for every number that is not finite, as JSON requires."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
