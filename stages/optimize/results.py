"""What optimize leaves behind: the policy folder with its optimizer state, advantages/1, updates/1,
and the manifest's numbers.

Optimizer state is safetensors and JSON in a folder below the policy's, never a pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from quiver.schemas import advantages as advantages_kind
from quiver.schemas import updates as updates_kind
from quiver.schemas.errors import ConfigError
from quiver.stages.common.models import checkpoints
from quiver.stages.common.models.loading import restore_dropout
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.store import Version, storage
from quiver.stages.common.store.writer import ROWS_PER_SHARD, Writer

from . import lora, optimizer, value_head
from .losses import log_ratio

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from .config import Config
    from .rollouts import Loaded
    from .trainer import Outcome, Trainer

_FORMAT = 1
_FOLDER = checkpoints.OPTIMIZER_FOLDER


def save(
    config: Config, parent: Version, model: nn.Module, trainer: Trainer, writer: Writer
) -> None:
    """Write the model directory and, if asked, the optimizer's state below it, into the folder of
    `writer`. `model` and `trainer` are of no use after this."""
    from safetensors.torch import save_file

    with storage.storage_errors(f"{writer.run}/policy"):
        trainer.policy.set_mode("single")  # the block attention is no business of the saved config
        restore_dropout(model, parent)
        state = optimizer.state(trainer.optimizer, model) if config.save_optimizer else {}
        if config.lora:
            lora.save_and_merge(model, writer.folder)
        checkpoints.save_policy(model, parent, writer.folder)
        if trainer.critic is not None:
            value_head.save(
                trainer.critic,
                trainer.optimizer,
                writer.folder,
                config.critic,
                moments=config.save_optimizer,
            )
        if trainer.accelerator.num_processes == 1:
            trainer.free()
        if state:
            folder = writer.folder / _FOLDER
            folder.mkdir()
            save_file(state, folder / "state.safetensors")
            about = {"format": _FORMAT, "optimizer": "adamw", "step": trainer.step}
            storage.write_bytes(folder / "state.json", json.dumps(about).encode())


def load_optimizer(policy: Version) -> dict[str, torch.Tensor] | None:
    """The state that `save` wrote into this policy, checked against its hashes; None when it holds
    none. ConfigError."""
    from safetensors.torch import load_file

    if f"{_FOLDER}/state.json" not in policy.files.names:
        return None
    policy.verify(f"{_FOLDER}/")
    about = json.loads(policy.files.read(f"{_FOLDER}/state.json"))
    if (about.get("format"), about.get("optimizer")) != (_FORMAT, "adamw"):
        raise ConfigError(
            str(policy.ref),
            f"its optimizer state is {about}, expected adamw",
            next="set optimize.load_optimizer = false",
        )
    return load_file(policy.files.path(f"{_FOLDER}/state.safetensors"))


def finish(
    writers: Mapping[str, Writer], loaded: Loaded, outcome: Outcome, accelerator: Accelerator
) -> None:
    """Write advantages and updates, and say what the three manifests tell."""
    device = accelerator.device.type
    kept_and_dropped = {"kept": loaded.summary["kept"], **loaded.summary["dropped"]}
    tables = {
        "advantages": (advantages_table(loaded, outcome), kept_and_dropped),
        "updates": (updates_table(outcome), {}),
    }
    for kind, (table, status) in tables.items():
        for index in writers[kind].unfinished(max(1, math.ceil(len(table) / ROWS_PER_SHARD))):
            writers[kind].write(index, table.slice(index * ROWS_PER_SHARD, ROWS_PER_SHARD))
        writers[kind].finish(status=status, device=device)
    seconds = writers["policy"].seconds.get("steps", 0.0)
    metrics = metrics_of(loaded, outcome, seconds)
    metrics["processes"] = accelerator.num_processes
    writers["policy"].finish(metrics=_finite(metrics), device=device)


def metrics_of(loaded: Loaded, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """The policy's metrics: what was learned from, how fast, and the last step's numbers."""
    tokens = sum(row["tokens"] for row in outcome.updates)
    names = ["loss", "grad_norm", "entropy", "approx_kl", "clip_fraction"]
    names += ["value_loss", "explained_variance"] if outcome.advantages is not None else []
    last = {key: outcome.updates[-1][key] for key in names} if outcome.updates else {}
    return {
        **loaded.summary,
        **last,
        "trainable_parameters": outcome.trainable,
        "step": outcome.step,
        "steps": len(outcome.updates),
        "skipped_steps": outcome.skipped,
        "tokens": tokens,
        "prompt_tokens": sum(row["prompt_tokens"] for row in outcome.updates),
        "tokens_per_second": tokens / seconds if seconds else None,
        "packing": outcome.mode,
        "attention": outcome.kernel,
        "padding_share": outcome.padding_share,
        "precision": outcome.precision,
        "max_completion_tokens": loaded.config.max_completion_tokens,
        "audit": outcome.audit,
    }


def advantages_table(loaded: Loaded, outcome: Outcome) -> pa.Table:
    """advantages/1, one row for each rollout of the dataset, in its order; with a critic one
    advantage a token. The ratio is to `old_logprobs`."""
    completions = loaded.batch.sequences.completions
    rows = loaded.rows
    means = torch.full((2, len(loaded.reasons)), torch.nan)
    means[0, rows] = Ragged(
        log_ratio(outcome.logprobs, loaded.batch.old_logprobs).exp(), completions.offsets
    ).segment_mean()
    means[1, rows] = completions.with_values(outcome.logprobs).segment_mean()
    weights = torch.full((len(loaded.reasons),), torch.nan)
    weights[rows] = loaded.advantages[rows]
    columns = [
        pa.array(values.numpy(), from_pandas=True) for values in (weights, *means)
    ]  # from_pandas: NaN becomes null
    dropped = pa.array(loaded.reasons, pa.string())
    schema = advantages_kind.SCHEMA
    if outcome.advantages is not None:
        places = (
            torch.full((len(loaded.reasons),), -1)
            .index_copy(0, rows, torch.arange(len(rows)))
            .numpy()
        )
        lists = (
            completions.with_values(outcome.advantages)
            .to_arrow()
            .take(pa.array(places, mask=places < 0))
        )
        schema, columns[0] = (
            advantages_kind.PER_TOKEN,
            lists.cast(advantages_kind.PER_TOKEN.field("advantage").type),
        )
    return pa.Table.from_arrays(
        [loaded.ids.combine_chunks(), columns[0], dropped.is_null(), dropped, *columns[1:]],
        schema=schema,
    )


def updates_table(outcome: Outcome) -> pa.Table:
    """updates/1, one row a step."""
    rows = [
        {**row, **{key: _finite(value) for key, value in row.items()}} for row in outcome.updates
    ]
    return pa.Table.from_pylist(rows, schema=updates_kind.SCHEMA)


def _finite(value: Any) -> Any:
    """`value` with null for every number that is not finite, as JSON wants it."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
