"""reward: rollouts become rewards/1, by functions, models and servers that a recipe names; null is
"not scored", never 0.

Prompts are found through the rollouts' manifest and joined by group_id. Functions run in worker
processes (`workers`), models in this one (`models`), servers are asked over HTTP (`servers`). A row
where one failed has no reward; more such rows than `max_invalid` allows end the stage with
RewardError as soon as that is certain, and finished shards are kept. The code of a user's functions
enters the run_key by the hash of its file, so an edited function scores anew.

    ref = run(Config(functions=[{"use": "numeric"}, {"use": "mine.py:polite", "weight": 0.2}]),
    store, rollouts="arith/rollouts@3") ref = run(config, store, rollouts="arith/rollouts@3", retry=ref)      # only what has no reward yet
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pydantic import Field, field_validator, model_validator

from quiver.schemas.errors import ConfigError, LineageError, RewardError, printable
from quiver.schemas.refs import Ref
from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import ROWS_PER_SHARD, begin
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.pool.scorer import FunctionConfig, FunctionScorer, Notice

from . import tables
from .measures import summary
from .models.config import ModelConfig
from .models.scorer import ModelScorer
from .models.scorer import load as load_model
from .retry import require_same
from .scoring import Scorer
from .servers.config import ServerConfig
from .shards import Shards
from .together import Allowance

STAGE_VERSION = 1
SCORERS = ("functions", "models", "servers")
"""The lists of scorers in Config, in the order of their parts."""
log = logging.getLogger(__name__)


class Overlong(Base):
    """A penalty for completions that come near a length: 0 up to max_tokens − cache, falling
    linearly to −1 at max_tokens."""

    max_tokens: int = Field(ge=1)
    """Completion tokens, end token included, from which the penalty is whole. Usually what
    generation allows."""
    cache: int = Field(ge=1)
    """Tokens before `max_tokens` over which it grows."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of it in the reward."""

    @model_validator(mode="after")
    def _fits(self) -> Overlong:
        if self.cache > self.max_tokens:
            raise ValueError(
                f"cache must be at most max_tokens = {self.max_tokens}, got {self.cache}"
            )
        return self


class Config(Base):
    """How rollouts are scored."""

    functions: tuple[FunctionConfig, ...] = ()
    """The reward is the weighted sum of all parts; a function that returns None is left out of
    it."""
    models: tuple[ModelConfig, ...] = ()
    """Reward models, each with a part of its own."""
    servers: tuple[ServerConfig, ...] = ()
    """Servers that score over HTTP, each with a part of its own."""
    reward_clip: tuple[float, float] | None = None
    """Lowest and highest reward, applied to the sum before the overlong penalty."""
    overlong: Overlong | None = None
    """Penalty on long completions, added to the clipped sum; in `parts` as `overlong`. A row
    without a reward stays without. None: off."""
    max_invalid: Runtime[float] = Field(default=0.0, ge=0, le=1)
    """Largest share of rows in which a function may fail before the stage does. Rewards that were
    made with a larger one are refused too, not made anew; with a larger one the finished shards of
    a stage that failed count."""
    workers: Runtime[int | None] = Field(default=None, ge=1)
    """Processes in which functions run. None: one a core."""
    max_memory_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Private memory of each of these processes; beyond it a call fails with MemoryError. None: no
    limit."""
    batch_rows: Runtime[int] = Field(default=ROWS_PER_SHARD, ge=1)
    """Most rows a call. What a function says of a row must not depend on the others in its call."""
    patience_seconds: Runtime[float | None] = Field(default=None, ge=0)
    """Processes that share the work: how long an idle one waits for another's shard before it
    scores that shard too. None: twice as long as the slowest shard took so far, and at least 30
    s."""

    @property
    def scorers(self) -> tuple[FunctionConfig | ModelConfig | ServerConfig, ...]:
        """Everything that scores, of every kind."""
        return tuple(each for kind in SCORERS for each in getattr(self, kind))

    @property
    def part_names(self) -> list[str]:
        """The fields of `parts`, in order."""
        return [
            *(each.name for each in self.scorers),
            *([tables.OVERLONG] if self.overlong else []),
        ]

    @model_validator(mode="after")
    def _own_columns(self) -> Config:
        names = [each.name for each in self.scorers]
        if not names:
            raise ValueError(
                "nothing scores: name something under [[reward.functions]], [[reward.models]] or "
                "[[reward.servers]]"
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"name {twice[0]} stands twice: give each a name of its own")
        if self.overlong and tables.OVERLONG in names:
            raise ValueError(
                f"name {tables.OVERLONG} is the penalty's column in parts: give what scores "
                "another name"
            )
        return self

    @field_validator("reward_clip")
    @classmethod
    def _ordered(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip and clip[0] >= clip[1]:
            raise ValueError(f"the low end must be below the high end, got {clip[0]} and {clip[1]}")
        return clip


@contextmanager
def open_scorers(
    config: Config,
    notice: Notice = lambda *_: None,
    prompts: Version | None = None,
    rollouts: Version | None = None,
) -> Iterator[list[Scorer]]:
    """The scorers that `config` names, in the order of their parts; what they hold is let go of at
    the end.

    `notice` hears at once of rows that failed; `prompts` and `rollouts` are what is to be scored,
    where that is known. ConfigError where one of them is not there, or has another fingerprint than
    `config` says.
    """
    with Pool(config.workers, config.max_memory_gib) as pool:
        scorers: list[Scorer] = []
        try:
            for each in config.functions:
                scorers.append(FunctionScorer(each, pool, config.batch_rows, notice))
            scorers += [load_model(each, prompts, rollouts) for each in config.models]
            for each in config.servers:
                from .models.template import beginnings
                from .servers.scorer import ServerScorer

                scorers.append(
                    ServerScorer(each, notice, beginnings(each.begins_with, prompts, rollouts))
                )
            _require_fingerprints(config, scorers)
            yield scorers
        finally:
            for scorer in scorers:
                scorer.close()


def check_functions(config: Config, columns: Iterable[str], prompts: Version | None = None) -> None:
    """ConfigError unless each scorer exists and can be called with the prompts' `columns`: asked
    before any generation.

    `prompts`, where they are there already: reward models look at them too.
    """
    columns = list(columns)
    with open_scorers(config, prompts=prompts) as scorers:
        _pinned(config, scorers)
        for scorer in scorers:
            scorer.require(columns)


def run(
    config: Config,
    store: Store,
    *,
    rollouts: str | Ref,
    retry: str | Ref | None = None,
    into: str | None = None,
    force: bool = False,
    share: bool = False,
) -> Ref:
    """Score `rollouts`. ConfigError, LineageError; RewardError when more rows failed than
    `max_invalid` allows.

    `share`: together with all processes that do the same.

    `retry`: earlier rewards of these rollouts. Only rows without a reward are scored again, the
    rest is taken over into the new version; where every row has one, that is said, and the
    reference returned is `retry`'s own.
    """
    version = store.open(rollouts)
    prompts = _prompts_of(store, version)
    earlier = None if retry is None else store.open(retry)
    if earlier:
        require_same(earlier, version, config.part_names, config.model_dump(mode="json"))
        if earlier.table(["reward"]).column("reward").null_count == 0:
            log.info(
                "rewards: every row of %s has a reward, there is nothing to retry", earlier.ref
            )
            return earlier.ref
    allowance = Allowance(config.max_invalid * version.manifest.rows)
    with (
        open_scorers(config, allowance.notice, prompts, version) as scorers,
        begin(
            store,
            into or version.ref.run,
            "rewards",
            stage="reward",
            stage_version=STAGE_VERSION,
            config=_pinned(config, scorers),
            models=tuple(scorer.about for scorer in scorers if isinstance(scorer, ModelScorer)),
            inputs={
                "rollouts": version,
                "prompts": prompts,
                **({"retry": earlier} if earlier else {}),
            },
            force=force,
            share=share,
            patience=config.patience_seconds,
        ) as work,
    ):
        if work.done:
            _require_few(work.done, config.max_invalid)
            return work.done.ref
        with work.phase("score"):
            shards = Shards(
                config, work, version.table(), prompts.table(), earlier.table() if earlier else None
            )
            whole = shards.score(scorers, allowance)
        metrics, status = summary(whole, shards.seconds())
        if earlier:
            retried = earlier.table().column("reward").null_count
            metrics |= {
                "retried": retried,
                "recovered": retried - whole.column("reward").null_count,
            }
        return work.commit(metrics=metrics, status=status).ref
    return work.done.ref  # committed by another of those who share the work


def _require_few(rewards: Version, max_invalid: float) -> None:
    """RewardError where more rows failed in finished rewards than `max_invalid` allows now."""
    failed, rows = rewards.manifest.status.get("failed", 0), rewards.manifest.rows
    if failed > max_invalid * rows:
        raise RewardError(
            str(rewards.ref),
            f"{failed} of {rows} rows failed, more than reward.max_invalid = {max_invalid:g} "
            "allows",
            state="these rewards are kept; nothing was changed.",
            next=f"quiver reward RECIPE --retry {rewards.ref}",
        )


def _require_fingerprints(config: Config, scorers: list[Scorer]) -> None:
    """ConfigError where `config` asks for another code or model than there is."""
    for each, scorer in zip(config.scorers, scorers, strict=True):
        if each.fingerprint and each.fingerprint != scorer.fingerprint:
            raise ConfigError(
                f"reward {each.name}",
                f"fingerprint expected {printable(each.fingerprint)}, found {scorer.fingerprint}",
                next="restore what scored then, or take the fingerprint out of the recipe",
            )


def _pinned(config: Config, scorers: list[Scorer]) -> Config:
    """`config` with the fingerprints of what scores."""
    found = {scorer.name: scorer.fingerprint for scorer in scorers}

    def pin(each):
        return each.model_copy(update={"fingerprint": found[each.name]})

    return config.model_copy(
        update={kind: tuple(map(pin, getattr(config, kind))) for kind in SCORERS}
    )


def _prompts_of(store: Store, rollouts: Version) -> Version:
    entry = rollouts.manifest.input("prompts")
    if entry is None:
        raise LineageError(
            str(rollouts.ref),
            "its manifest names no prompts",
            next=f"quiver lineage {rollouts.ref}",
        )
    prompts = store.open(entry.ref)
    if prompts.manifest.content_hash != entry.content_hash:
        raise LineageError(
            str(prompts.ref),
            f"is not what {rollouts.ref} was made of",
            next=f"quiver lineage {rollouts.ref}",
        )
    return prompts
