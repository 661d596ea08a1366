"""The logprobs stage: the logprobs of saved completions under a checkpoint, for any number of
optimizer runs.

Role `ref` takes the reference policy, for the KL term; a sweep over `kl_coef` then loads no
reference model. Role `prox` takes exactly the weights that sampled, or the weights that a training
starts from (`prox_of`), with the trainer's numerics, for the ratio's denominator. Each row has its
own temperature.

Refused: `prox` under other weights than the sampling ones, unless `prox_of` is "start"; a model
whose tokenizer has another token for some id than the sampling policy's (special tokens may differ
with `other_special_tokens`); greedy rows, which have no probability; rows that the model cannot
read.

    run_stage("logprobs", Config(role="ref"), store, rollouts="arith/rollouts@3",
        policy="arith/policy@0")
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import LineageError, NumericError
from quiver.schemas.manifest import ModelEntry
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import Writer, shard_rows
from quiver.stages.model import checkpoints
from quiver.stages.model.loading import base_of, check_rows, short_of_memory
from quiver.stages.model.same_tokens import require_same_tokens

from .config import Config

STAGE_VERSION = 1
SHARED = True
log = logging.getLogger(__name__)


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the logprobs of the completions of `refs["rollouts"]` under `refs["policy"]`.

    Raises LineageError.
    """
    rollouts = store.open(refs["rollouts"])
    policy = store.open(refs["policy"])
    model = checkpoints.model_entry(config.role, policy)
    sampler = rollouts.manifest.model("policy")
    if config.is_of_sampler and (sampler is None or sampler.weights != model.weights):
        sampled_by = f"{sampler.weights[:12]}… ({sampler.ref})" if sampler else "no policy"
        raise LineageError(
            str(rollouts.ref),
            f"sampled by weights {sampled_by}; proximal logprobs must be of the same weights, got "
            f"{model.weights[:12]}… ({policy.ref})",
            next=f"give {sampler.ref if sampler else 'the policy that sampled'}",
        )
    return Plan(
        store=store,
        stage="logprobs",
        stage_version=STAGE_VERSION,
        config=config,
        run=into or rollouts.ref.run,
        kinds=("logprobs",),
        inputs={"rollouts": rollouts},
        models=(model,),
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Compute the missing shards.

    Raises ConfigError, LineageError, NumericError or SchemaError.
    """
    from quiver.stages.model.media.dataset import load_media

    from .forward_pass import LogprobPass

    writer = writers["logprobs"]
    policy = plan.store.open(plan.models[0].ref)
    rollouts = plan.inputs["rollouts"]
    table = rollouts.table()
    check_rows(table, str(rollouts.ref), policy)
    sampler = rollouts.manifest.model("policy")
    if sampler is not None:
        require_tokens_of(plan.config, sampler, plan.store.open, policy)
    num_tokens = 0
    size = shard_rows(len(table))
    forward_pass = media = None
    with short_of_memory("logprobs", "lower logprobs.token_budget"):
        for index in writer.take_shards(max(1, -(-len(table) // size))):
            if forward_pass is None:  # loads nothing if no shard is missing
                with writer.phase("load"):
                    forward_pass = LogprobPass(plan.config, policy, base_of(plan.store, policy))
                    media = load_media(plan.store, rollouts, table, policy)
            start = index * size
            rows = table.slice(start, size)
            with writer.phase("pass"):
                shard = forward_pass.compute_logprobs(rows, media and media.slice(start, len(rows)))
            is_finite = pc.is_finite(shard["logprobs"].combine_chunks().flatten())
            if not pc.all(is_finite, min_count=0).as_py():
                raise NumericError(
                    str(policy.ref),
                    f"gives a logprob that is not finite, in row {start} or one of the next",
                    next="set logprobs.precision = 'fp32'",
                )
            num_tokens += _count_tokens(shard["logprobs"])
            writer.report_fields.update(
                forward_pass.methods, tokens=num_tokens, device=forward_pass.device.type
            )
            writer.write(index, shard)
            log.info("logprobs: %d of %d rows", start + len(rows), len(table))
    reports = [report for report in writer.reports() if report.get("tokens")]
    first_report = reports[0] if reports else {}
    speed = sum(report["tokens"] / report["seconds"]["pass"] for report in reports)
    metrics = {
        "tokens": _count_tokens(table["completion_ids"]),
        "tokens_per_second": round(speed, 1) if reports else None,
        **{name: first_report.get(name) for name in ("token_budget", "packing", "attention")},
    }
    device = first_report.get("device", "cpu")
    writer.finish(metrics=metrics, device=device, ids=table["rollout_id"])


def _count_tokens(column: pa.ChunkedArray) -> int:
    return pc.sum(pc.list_value_length(column)).as_py() or 0


def require_tokens_of(
    config: Config, sampler: ModelEntry, open: Callable[[str], Version], policy: Version
) -> None:
    """Raise LineageError unless each id is the same token for the `sampler` and for `policy`.

    `open` opens the sampler, if its tokenizer's files are others. `other_special_tokens` exempts
    special tokens.
    """
    require_same_tokens(
        sampler,
        open,
        policy,
        next=f"take a policy with the tokenizer of {sampler.ref}",
        next_if_special="set logprobs.other_special_tokens = true",
        ignore_special=config.other_special_tokens,
    )
