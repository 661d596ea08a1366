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

from quiver.schemas.errors import LineageError, RewardError
from quiver.schemas.refs import Ref
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import begin
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.pool.scorer import FunctionScorer

from .config import Config
from .fingerprints import model_entries, pinned
from .measures import summary
from .models.scorer import load as load_model
from .retry import require_same
from .scoring import Notice, Scorer
from .shards import Shards
from .together import Allowance

STAGE_VERSION = 1
log = logging.getLogger(__name__)


@contextmanager
def open_scorers(config: Config, prompts: Version | None = None) -> Iterator[list[Scorer]]:
    """`open_pinned`, of what nothing is known yet. ConfigError where a scorer has another
    fingerprint than `config` says, too."""
    with open_pinned(pinned(config, model_entries(config)), prompts=prompts) as scorers:
        yield scorers


@contextmanager
def open_pinned(
    config: Config,
    notice: Notice = lambda *_: None,
    prompts: Version | None = None,
    rollouts: Version | None = None,
) -> Iterator[list[Scorer]]:
    """The scorers that `config` names, in the order of their parts; what they hold is let go of at
    the end.

    `notice` hears at once of rows that failed; `prompts` and `rollouts` are what is to be scored,
    where that is known. ConfigError where one of them is not there.
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
    models = model_entries(config)
    config = pinned(config, models)
    with (
        open_pinned(config, allowance.notice, prompts, version) as scorers,
        begin(
            store,
            into or version.ref.run,
            "rewards",
            stage="reward",
            stage_version=STAGE_VERSION,
            config=config,
            models=models,
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
