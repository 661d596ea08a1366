"""prompt: the user's rows become prompts/1, rendered to ids by the policy's own tokenizer, before
any GPU.

Refused: rows without a prompt, group ids that stand twice, ids outside the vocabulary, prompts that
leave no room for the completion (nothing is ever cut), text that would become control tokens. Every
column of the source is kept untouched in `columns`. The weights do not matter here: the next policy
with the same tokenizer finds the same prompts finished.

    ref = run(Config(source="sums.jsonl", prompt="question"), store, policy="arith/policy@0")
"""

from __future__ import annotations

import difflib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import Model, digest
from quiver.schemas.refs import Ref
from quiver.stages.common.chat.template import bad_text
from quiver.stages.common.config import without_folder
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import ROWS_PER_SHARD, begin

from . import sources
from .sources import INPUTS, SourceConfig
from .templates import TemplateConfig

STAGE_VERSION = 1
log = logging.getLogger(__name__)


class Config(SourceConfig, TemplateConfig):
    """Where prompts come from, how they are rendered, and which of them an iteration takes."""

    seed: int = Field(default=0, ge=0)
    """Decides the shuffles. Without `limit` it decides nothing."""
    iteration: int = Field(default=0, ge=0)
    """Which `limit` rows to take. Without `limit` it decides nothing."""

    def key(self) -> dict[str, Any]:
        """As the source has it; a template's hash is that of the model that it stands in for."""
        return {
            **super().key(),
            **({"template": without_folder(self.template)} if self.template else {}),
        }


def run(
    config: Config, store: Store, *, policy: str | Ref, into: str | None = None, force: bool = False
) -> Ref:
    """Write the prompts that `config` names for `policy`'s tokenizer. ConfigError,
    SecurityError."""
    from .rows import Renderer, assistant_starts, render_rows

    version = store.open(policy)
    source = sources.read(config)
    resolved = _resolve(config, source, version)
    groups = _group_ids(resolved, source)
    chosen = choose(len(groups), resolved.limit, resolved.seed, resolved.iteration)
    template = _read_template(resolved)
    with begin(
        store,
        into or version.ref.run,
        "prompts",
        stage="prompt",
        stage_version=STAGE_VERSION,
        config=resolved,
        inputs={},
        models=(_model(version, template),),
        force=force,
    ) as work:
        if work.done:
            return work.done.ref
        shards = [
            chosen[start : start + ROWS_PER_SHARD]
            for start in range(0, len(chosen), ROWS_PER_SHARD)
        ]
        with work.phase("render"), Renderer(resolved, version, template) as renderer:
            for index, rows in enumerate(shards):
                if not work.has(index):
                    work.write(index, render_rows(resolved, source, rows, groups, renderer))
                log.info("prompts: shard %d of %d", index + 1, len(shards))
            tables = [
                work.read(index).select(["group_id", "messages", "prompt_ids"])
                for index in range(len(shards))
            ]
            table = pa.concat_tables(tables)
            starts = assistant_starts(table.column("messages"), renderer)
        return work.commit(
            **_summary(resolved, source, groups.take(pa.array(chosen)), table, starts)
        ).ref


def choose(rows: int, limit: int | None, seed: int, iteration: int) -> list[int]:
    """Positions that `iteration` takes: the next `limit` of seeded shuffles that follow one
    another, none of them twice.

    Where an iteration goes over the end of an epoch, the next shuffle's first rows are those that
    it does not hold yet. The generator is numpy's legacy one, whose stream is frozen: the same seed
    means the same rows on every version.
    """
    if limit is None:
        return list(range(rows))
    size = min(limit, rows)
    order: list[int] = []
    for epoch in range((iteration + 1) * size // rows + 1):
        shuffle = np.random.RandomState([seed % 2**32, epoch]).permutation(rows).tolist()
        begun = len(order) % size
        held = set(order[len(order) - begun :]) if begun else set()
        fresh = [row for row in shuffle if row not in held][: size - begun] if begun else []
        first = set(fresh)
        order += fresh + [row for row in shuffle if row not in first]
    return order[iteration * size : (iteration + 1) * size]


# -- what decides the outcome


def _resolve(config: Config, source: sources.Source, policy: Version) -> Config:
    """`config` with all that was left open: the column, the hash of the source, the longest
    prompt."""
    if config.source_sha256 not in ("", source.sha256):
        raise ConfigError(
            f"prompt.source {printable(config.source)}",
            f"sha256 expected {config.source_sha256[:12]}…, found {source.sha256[:12]}…",
            next="restore the source, or take source_sha256 out of the recipe",
        )
    columns = source.table.column_names
    given = next((name for name in INPUTS if getattr(config, name)), None)
    kind = given or next((name for name in INPUTS if name in columns), None)
    if kind is None:
        raise ConfigError(
            f"source {printable(config.source)}",
            f"has none of the columns {', '.join(INPUTS)}; it has {printable(', '.join(columns))}",
            next="set prompt.messages, prompt.prompt or prompt.prompt_ids to one of them",
        )
    for field in (kind, "group_id"):
        wanted = getattr(config, field) or (kind if field == kind else None)
        if wanted is not None and wanted not in columns:
            near = difflib.get_close_matches(wanted, columns, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"prompt.{field} {printable(wanted)}",
                f"the source has no such column; it has {printable(', '.join(columns))}{hint}",
                next=f"set prompt.{field} to one of them",
            )
    context = checkpoints.context_length(policy)
    reserved = (
        0 if checkpoints.is_encoder_decoder(policy) else config.reserve_tokens
    )  # a decoder has a context of its own
    bounds = [
        bound
        for bound in (config.max_prompt_tokens, context and context - reserved)
        if bound is not None
    ]
    if bounds and min(bounds) < 1:
        raise ConfigError(
            "prompt.reserve_tokens",
            f"{config.reserve_tokens} leaves no room for a prompt in the context of {context} "
            "tokens",
            next="lower reserve_tokens (or the completion's length)",
        )
    unused = {"iteration": 0, "seed": 0} if config.limit is None else {}
    return config.model_copy(
        update={
            kind: getattr(config, kind) or kind,
            "source_sha256": source.sha256,
            "max_prompt_tokens": min(bounds, default=None),
            **unused,
        }
    )


def _group_ids(config: Config, source: sources.Source) -> pa.Array:
    """One unique name a row of the source, as text."""
    if config.group_id is None:
        digits = max(6, len(str(source.table.num_rows - 1)))
        return pa.array(
            [f"{config.group_prefix}{row:0{digits}d}" for row in range(source.table.num_rows)]
        )
    values = source.table.column(config.group_id).to_pylist()
    names = [f"{config.group_prefix}{value}" for value in values]
    seen: dict[str, int] = {}
    for row, (value, group) in enumerate(zip(values, names, strict=True)):
        first = seen.setdefault(group, row)
        wrong = (
            "is empty"
            if value in (None, "")
            else f"stands in row {first + 1} too"
            if first != row
            else ""
        )
        wrong = wrong or bad_text(group)
        if wrong:
            raise ConfigError(
                f"source {printable(source.name)} row {row + 1}",
                f"group id {printable(repr(value))} {wrong}",
                next="make the group ids unique, or leave prompt.group_id out",
            )
    return pa.array(names)


def _read_template(config: Config) -> str | None:
    if config.template is None:
        return None
    try:
        return Path(config.template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompt.template {printable(config.template)}",
            printable(error),
            next="name a jinja file in UTF-8",
        ) from None


def _model(policy: Version, template: str | None) -> Model:
    """The policy by its tokenizer and template alone: other weights make the same prompts."""
    model = checkpoints.as_model("policy", policy)
    changed = {"weights": ""} if template is None else {"weights": "", "template": digest(template)}
    return model.model_copy(update=changed)


def _summary(
    config: Config,
    source: sources.Source,
    groups: pa.Array,
    table: pa.Table,
    starts: dict[str, str | None],
) -> dict[str, Any]:
    """What the manifest says: lengths, which prompts were left out, where answers begin.
    ConfigError when none is left."""
    kept = table.column("group_id")
    dropped = groups.filter(pc.invert(pc.is_in(groups, kept.combine_chunks()))).to_pylist()
    if not table.num_rows:
        raise ConfigError(
            f"source {printable(config.source)}",
            f"all {len(dropped)} prompts are longer than {config.max_prompt_tokens} tokens",
            next="raise prompt.max_prompt_tokens, lower prompt.reserve_tokens, or take a model "
            "with a longer context",
        )
    lengths = pc.list_value_length(table.column("prompt_ids"))
    tokens = {
        "min": pc.min(lengths).as_py(),
        "mean": pc.mean(lengths).as_py(),
        "max": pc.max(lengths).as_py(),
    }
    metrics = {
        "prompt_tokens": tokens,
        "source_rows": source.table.num_rows,
        "dropped_group_ids": dropped,
    }
    metrics["assistant_starts"] = starts
    return {"metrics": metrics, "status": {"kept": table.num_rows, "dropped": len(dropped)}}
