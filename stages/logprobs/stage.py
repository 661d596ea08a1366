"""logprobs: saved completions scored again under a checkpoint, as columns that any number of
optimizer runs can use.

Role `ref`: under the reference policy, for the KL term; a sweep over `kl_coef` then loads no
reference model. Role `prox`: under the very weights that sampled, with the trainer's numerics, for
the ratio's denominator. Each row at its own temperature. Refused: `prox` under other weights than
those that sampled; a model to which an id is another token than to the one that sampled; greedy
rows, which have no probability; rows that the model can not read.

    ref = run(Config(role="ref"), store, rollouts="arith/rollouts@3", policy="arith/policy@0")
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from quiver.schemas import logprobs
from quiver.schemas.errors import ConfigError, LineageError, NumericError, printable
from quiver.schemas.refs import Ref
from quiver.stages.common.claims import each
from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import ROWS_PER_SHARD, Work, begin

if TYPE_CHECKING:
    from quiver.stages.common.forward.policy import Policy

STAGE_VERSION = 1
log = logging.getLogger(__name__)


class PassConfig(Base):
    """How the pass over the saved completions is made."""

    precision: Literal["auto", "fp32", "fp32_fast", "bf16", "bf16_pure"] = "auto"
    """Of the pass, as optimize has it. auto: bf16 on a GPU, fp32 on a CPU. fp32_fast: products as
    fast as float32 can have them here (TF32 on a GPU; oneDNN on a CPU, whose factors may be
    bfloat16). bf16: autocast, weights in float32. bf16_pure: weights in bfloat16 too, the pass of
    bf16_master and bf16_stochastic."""
    packing: Runtime[Literal["shared", "packed", "single"]] = "shared"
    """Most that is packed together; a simpler way is taken when the model needs it."""
    token_budget: Runtime[int | None] = Field(default=None, ge=1)
    """Tokens of one micro-batch. None: 8192 on a GPU, 2048 on a CPU."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to score."""
    other_special_tokens: Runtime[bool] = False
    """Accept a policy to which special tokens have other ids than to the one that sampled, such as
    a base model that knows no chat. All other tokens must be the same in any case."""


class Config(PassConfig):
    """Whose probability is asked for, and how the pass is made."""

    role: Literal["ref", "prox"] = "ref"
    """`ref`: the reference, for the KL term. `prox`: the policy that sampled, with the trainer's
    numerics."""


def run(
    config: Config,
    store: Store,
    *,
    rollouts: str | Ref,
    policy: str | Ref,
    into: str | None = None,
    force: bool = False,
    share: bool = False,
) -> Ref:
    """Score the completions of `rollouts` under `policy`, with `share` together with all who do the
    same. ConfigError, LineageError, NumericError."""
    saved, model = store.open(rollouts), store.open(policy)
    about = checkpoints.as_model(config.role, model)
    sampled = saved.manifest.model("policy")
    if config.role == "prox" and (sampled is None or sampled.weights != about.weights):
        found = f"{sampled.weights[:12]}… ({sampled.ref})" if sampled else "no policy"
        raise LineageError(
            str(saved.ref),
            f"sampled by weights {found}; proximal logprobs are of those weights, got "
            f"{about.weights[:12]}… ({model.ref})",
            next=f"give {sampled.ref if sampled else 'the policy that sampled'}",
        )
    with begin(
        store,
        into or saved.ref.run,
        "logprobs",
        stage="logprobs",
        stage_version=STAGE_VERSION,
        config=config,
        inputs={"rollouts": saved},
        models=(about,),
        force=force,
        share=share,
    ) as work:
        return work.done.ref if work.done else _score_shards(config, work, saved, model)
    return work.done.ref  # committed by another of those who share the work


def _require_same_tokens(config: Config, store: Store, rollouts: Version, model: Version) -> None:
    """LineageError unless every id is the same token to the policy that sampled `rollouts` and to
    `model`."""
    sampled, own = rollouts.manifest.model("policy"), checkpoints.as_model(config.role, model)
    if sampled is None or sampled.tokenizer == own.tokenizer:
        return
    first, second = (
        checkpoints.load_tokenizer(version) for version in (store.open(sampled.ref), model)
    )
    special = {
        id
        for each in (first, second)
        for id, token in each.added_tokens_decoder.items()
        if token.special
    }
    theirs = {id: token for token, id in second.get_vocab().items()}
    other = sorted(
        (id, token, theirs.get(id))
        for token, id in first.get_vocab().items()
        if theirs.get(id) != token
    )
    if config.other_special_tokens:
        other = [each for each in other if each[0] not in special]
    if not other:
        return
    id, token, found = other[0]
    alone = all(each[0] in special for each in other)
    raise LineageError(
        str(model.ref),
        f"its tokenizer is not that of {sampled.ref}, which sampled: {len(other)} "
        f"{'special ' if alone else ''}ids are other "
        f"tokens, such as {id}, expected {printable(repr(token))}, found "
        f"{'none' if found is None else printable(repr(found))}",
        next="set logprobs.other_special_tokens = true"
        if alone
        else f"score under a policy with the tokenizer of {sampled.ref}",
    )


def _score_shards(config: Config, work: Work, rollouts: Version, model: Version) -> Ref:
    import torch

    from quiver.stages.common.forward.policy import Policy
    from quiver.stages.common.forward.precision import resolve
    from quiver.stages.common.models.loading import check_rows, load_model, short_of_memory

    table = rollouts.table(
        ["rollout_id", "group_id", "prompt_ids", "completion_ids", "temperature"]
    )
    check_rows(table, str(rollouts.ref), model)
    _require_same_tokens(config, work.store, rollouts, model)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "logprobs.device", "expected cuda, there is none", next='set logprobs.device = "auto"'
        )
    cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
    device = torch.device("cuda" if cuda else "cpu")
    memory = partial(short_of_memory, "logprobs", "lower logprobs.token_budget")
    with memory(), work.phase("load"):
        loaded = load_model(model, dtype=torch.float32, device=device)
        precision = resolve(config.precision, device)
        policy = Policy(loaded, autocast=precision == "bf16", fast=precision == "fp32_fast")
    chosen, tokens = None, 0
    for index in each(work.claims(max(1, -(-len(table) // ROWS_PER_SHARD)))):
        start = index * ROWS_PER_SHARD
        with memory(), work.phase("score"):
            part, chosen = _score(config, policy, table.slice(start, ROWS_PER_SHARD), chosen)
        if pc.any(
            pc.invert(pc.is_finite(part["logprobs"].combine_chunks().flatten())), min_count=0
        ).as_py():
            raise NumericError(
                str(model.ref),
                f"gives a logprob that is not finite in rows {start} and on",
                next="set logprobs.precision = 'fp32'",
            )
        tokens += _tokens(part["logprobs"])
        work.told = {**(chosen or {}), "tokens": tokens}
        work.write(index, part)
        log.info("logprobs: %d of %d rows", min(start + ROWS_PER_SHARD, len(table)), len(table))
    parts = [part for part in work.parts() if part.get("tokens")]
    speeds = [part["tokens"] / part["seconds"]["score"] for part in parts]
    metrics = {
        "tokens": _tokens(table["completion_ids"]),
        "tokens_per_second": round(sum(speeds), 1) if speeds else None,
        **{key: next((part[key] for part in parts), None) for key in ("packing", "attention")},
    }
    return work.commit(metrics=metrics, device=device.type).ref


def _tokens(column: pa.ChunkedArray) -> int:
    return pc.sum(pc.list_value_length(column)).as_py() or 0


def _score(
    config: Config, policy: Policy, table: pa.Table, chosen: dict[str, str] | None
) -> tuple[pa.Table, dict[str, str] | None]:
    """logprobs/1 of these rows; and, tried out with the first rows, the right way of packing and
    the kernel of attention."""
    import numpy as np
    import torch

    from quiver.stages.common.forward.layout import Sequences, prompt_numbers
    from quiver.stages.common.forward.policy import score, token_budget
    from quiver.stages.common.forward.precision import narrow
    from quiver.stages.common.forward.verify import choose_kernel, choose_mode
    from quiver.stages.common.ragged import Ragged

    everyone = torch.arange(len(table))
    prompts, completions = (
        Ragged.from_arrow(table[name]).take(everyone) for name in ("prompt_ids", "completion_ids")
    )
    temperature = torch.from_numpy(
        np.array(table["temperature"].combine_chunks(), dtype=np.float32)
    )
    data = Sequences(prompts, completions, temperature)
    rows = [row for row, length in enumerate(completions.lengths.tolist()) if length]
    numbers = prompt_numbers(prompts, table["group_id"].to_pylist())
    found = torch.zeros(len(completions.values))
    if rows:
        mode = chosen["packing"] if chosen else choose_mode(policy, data, numbers, config.packing)
        policy.set_mode(mode)
        if config.precision == "bf16_pure":
            narrow(policy.model)
        micros = policy.microbatches(
            rows, numbers, data, config.token_budget or token_budget(policy.device)
        )
        if not chosen:
            with torch.no_grad():
                chosen = {"packing": mode, "attention": choose_kernel(policy, micros[0], data)}
        found = score(policy, micros, data)
    column = completions.with_values(found.clamp(max=0.0)).to_arrow()
    return pa.Table.from_arrays(
        [table["rollout_id"].combine_chunks(), column], schema=logprobs.SCHEMA
    ), chosen
