"""reward: rollouts become rewards/1, by functions that a recipe names; null is "not scored", never 0.

Prompts are found through the rollouts' manifest and joined by group_id. A row where a function failed has no reward; more such
rows than `max_invalid` allows end the stage with RewardError, and finished shards are kept. The code of a user's functions
enters the run_key by the hash of its file, so an edited function scores anew.

    ref = run(Config(functions=[{"use": "numeric"}, {"use": "mine.py:polite", "weight": 0.2}]), store, rollouts="arith/rollouts@3")
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from schemas.errors import ConfigError, LineageError, RewardError, printable
from schemas.refs import Ref
from stages.common.config import Config as Base
from stages.common.config import Runtime
from stages.common.store import Store, Version
from stages.common.work import ROWS_PER_SHARD, Work, begin

from . import scoring, tables

STAGE_VERSION = 1
log = logging.getLogger(__name__)


class FunctionConfig(Base):
    """One reward function."""

    use: str = Field(min_length=1)
    """A function that comes with Quiver (`quiver rewards`), `module:function`, or `file.py:function` seen from the working
    directory."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Its column in `parts`, unique. Empty: the function's own name."""
    weight: float = 1.0
    """Factor of its part in the reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for every call; they come before columns of the same name."""
    fingerprint: str = ""
    """Filled in by the stage: which code scored. If set, the function must have it."""

    @model_validator(mode="before")
    @classmethod
    def _own_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("use"), str) and not data.get("name"):
            return {**data, "name": data["use"].rpartition(":")[2]}
        return data


class Overlong(Base):
    """A penalty for completions that come near a length: 0 up to max_tokens − cache, falling linearly to −1 at max_tokens."""

    max_tokens: int = Field(ge=1)
    """Completion tokens, end token included, from which the penalty is whole. Usually what generation allows."""
    cache: int = Field(ge=1)
    """Tokens before `max_tokens` over which it grows."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of it in the reward."""

    @model_validator(mode="after")
    def _fits(self) -> Overlong:
        if self.cache > self.max_tokens:
            raise ValueError(f"cache must be at most max_tokens = {self.max_tokens}, got {self.cache}")
        return self


class Config(Base):
    """How rollouts are scored."""

    functions: tuple[FunctionConfig, ...] = Field(min_length=1)
    """The reward is the weighted sum of their parts; a function that returns None is left out of it."""
    reward_clip: tuple[float, float] | None = None
    """Lowest and highest reward, applied to the sum before the overlong penalty."""
    overlong: Overlong | None = None
    """Penalty on long completions, added to the clipped sum; in `parts` as `overlong`. A row without a reward stays without.
    None: off."""
    max_invalid: float = Field(default=0.0, ge=0, le=1)
    """Largest share of rows in which a function may fail before the stage does."""
    batch_rows: Runtime[int] = Field(default=ROWS_PER_SHARD, ge=1)
    """Rows a call. What a function says of a row must not depend on the others in its call."""

    @field_validator("functions")
    @classmethod
    def _unique(cls, functions: tuple[FunctionConfig, ...]) -> tuple[FunctionConfig, ...]:
        names = [function.name for function in functions]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"name {twice[0]} stands twice: give each function a name of its own")
        return functions

    @model_validator(mode="after")
    def _own_column(self) -> Config:
        if self.overlong and any(function.name == tables.OVERLONG for function in self.functions):
            raise ValueError(f"name {tables.OVERLONG} is the penalty's column in parts: give that function another name")
        return self

    @field_validator("reward_clip")
    @classmethod
    def _ordered(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip and clip[0] >= clip[1]:
            raise ValueError(f"the low end must be below the high end, got {clip[0]} and {clip[1]}")
        return clip


def check_functions(config: Config, columns: Iterable[str]) -> None:
    """ConfigError unless each function exists and can be called with the prompts' `columns`: asked before any generation."""
    _scorers(config, columns)


def run(config: Config, store: Store, *, rollouts: str | Ref, into: str | None = None, force: bool = False) -> Ref:
    """Score `rollouts`. ConfigError, LineageError; RewardError when more rows failed than `max_invalid` allows."""
    version = store.open(rollouts)
    prompts = _prompts_of(store, version)
    asked = prompts.table(["group_id", "messages", "prompt_text", "columns"])
    scorers = _scorers(config, [field.name for field in asked.schema.field("columns").type])
    pinned = [f.model_copy(update={"fingerprint": s.fingerprint}) for f, s in zip(config.functions, scorers, strict=True)]
    with begin(
        store,
        into or version.ref.run,
        "rewards",
        stage="reward",
        stage_version=STAGE_VERSION,
        config=config.model_copy(update={"functions": tuple(pinned)}),
        inputs={"rollouts": version, "prompts": prompts},
        force=force,
    ) as work:
        if work.done:
            return work.done.ref
        with work.phase("score"):
            shards = _score_shards(config, work, scorers, version.table(), asked)
        whole = pa.concat_tables([work.read(index) for index in range(shards)])
        metrics, status = tables.summary(whole, {tables.OVERLONG: 0.0, **{scorer.name: scorer.seconds for scorer in scorers}})
        return work.commit(metrics=metrics, status=status).ref


def _scorers(config: Config, columns: Iterable[str]) -> list[scoring.Scorer]:
    columns = list(columns)
    made = []
    for function in config.functions:
        scorer = scoring.load(function.use, function.name, function.weight, function.arguments)
        scoring.require_columns(scorer, columns)
        if function.fingerprint not in ("", scorer.fingerprint):
            raise ConfigError(
                f"reward function {function.name}",
                f"fingerprint expected {printable(function.fingerprint)}, found {scorer.fingerprint}",
                next="restore the function's file, or take the fingerprint out of the recipe",
            )
        made.append(scorer)
    return made


def _prompts_of(store: Store, rollouts: Version) -> Version:
    entry = rollouts.manifest.input("prompts")
    if entry is None:
        raise LineageError(str(rollouts.ref), "its manifest names no prompts", next=f"quiver lineage {rollouts.ref}")
    prompts = store.open(entry.ref)
    if prompts.manifest.content_hash != entry.content_hash:
        raise LineageError(str(prompts.ref), f"is not what {rollouts.ref} was made of", next=f"quiver lineage {rollouts.ref}")
    return prompts


# -- shards -----------------------------------------------------------------------------------------------------------------


def _score_shards(config: Config, work: Work, scorers: list[scoring.Scorer], rollouts: pa.Table, prompts: pa.Table) -> int:
    """Score the shards that are not there yet; how many there are. RewardError instead of the shard beyond `max_invalid`."""
    prompts = prompts.combine_chunks()  # taking rows of many chunks would join them anew for each shard
    order = tables.join(rollouts, prompts)
    weights = {function.name: function.weight for function in config.functions}
    penalty = config.overlong.model_dump() if config.overlong else None
    starts = range(0, max(1, rollouts.num_rows), ROWS_PER_SHARD)
    failed = 0
    for index, start in enumerate(starts):
        if work.has(index):
            failed += tables.count_failed(work.read(index))
            continue
        shard = rollouts.slice(start, ROWS_PER_SHARD)
        asked = prompts.take(order.slice(start, ROWS_PER_SHARD))
        parts: dict[str, list[scoring.Part]] = {name: [] for name in weights}
        for row in range(0, shard.num_rows, config.batch_rows):
            batch = tables.as_batch(shard.slice(row, config.batch_rows), asked.slice(row, config.batch_rows))
            for name, found in scoring.score(scorers, batch).items():
                parts[name] += found
        table = tables.as_rewards(shard, parts, weights, config.reward_clip, penalty)
        failed += tables.count_failed(table)
        if failed > config.max_invalid * rollouts.num_rows:
            raise _too_many(work, table, failed, rollouts.num_rows, index)
        work.write(index, table)
        log.info("rewards: shard %d of %d", index + 1, len(starts))
    return len(starts)


def _too_many(work: Work, table: pa.Table, failed: int, rows: int, finished: int) -> RewardError:
    """The error for more failed rows than are allowed; it shows the first."""
    name, row, error = tables.first_error(table)
    return RewardError(
        f"{work.run}/rewards",
        f"{failed} of {rows} rows failed so far, more than reward.max_invalid allows; first: function {name}, rollout "
        f"{printable(table.column('rollout_id')[row].as_py())}: {error}",
        state=f"{finished} finished shards are kept and taken up again; no version was written.",
        next="correct the function and run again, or raise reward.max_invalid",
    )
