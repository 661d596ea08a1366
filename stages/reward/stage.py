"""reward: turn rollouts into rewards/1 by the functions, models and servers of a recipe. Null means
"not scored", never 0 (evaluate has a rule of its own for answers that a limit cut).

Prompts are found through the rollouts' manifest and joined by group_id. The scorers are functions,
which run in processes of their own (`pool`), models, which run in this process (`models`), and
servers, which are asked over HTTP (`servers`).

A row's reward is the weighted sum of the scorers' numbers, clipped to `reward_clip`, plus the
`overlong` penalty. A function scores a batch at once; if it raises, hangs or crashes, each row is
scored in a call of its own, within `timeout_seconds`, so that only the row at fault fails. A scorer
that gives None for a row is left out of that row's sum. The reward is null if all scorers gave
None (those of weight 0 aside), if one of them failed, or if the row's episode failed. Only a failed
scorer makes a failed row. If more rows fail than `max_invalid` allows, the stage ends with
RewardError as soon as that is certain; finished shards are kept.

`with_fingerprints` fills in the fingerprint of each scorer (of a function, the hash of its file),
or raises if the config asks for another one. Fingerprints enter the run key, so an edited function
scores anew.

    config = Config(functions=[{"use": "numeric"}, {"use": "mine.py:polite", "weight": 0.2}])
    ref = run_stage("reward", config, store, rollouts="arith/rollouts@3")
    ref = run_stage("reward", config, store, rollouts="arith/rollouts@3", retry=ref)    # only nulls
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

from quiver.schemas.errors import RewardError
from quiver.stages.core.lineage import open_input
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import Writer

from .config import Config, with_fingerprints
from .measures import summary
from .models.scorer import ModelScorer, beginnings
from .pool.pool import open_pool
from .pool.scorer import FunctionScorer
from .scoring import Notice, Scorer
from .shards import Allowance, Shards, require_same
from .tables import Groups

STAGE_VERSION = 1
SHARED = True
log = logging.getLogger(__name__)


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the scoring of rollouts.

    Args:
        refs: "rollouts", and optionally "retry": earlier rewards. Then only rows without a reward
            are scored again; if every row has one, the earlier rewards are the result.

    Raises ConfigError, LineageError.
    """
    rollouts = store.open(refs["rollouts"])
    inputs = {"rollouts": rollouts, "prompts": open_input(store, rollouts, "prompts")}
    answer = None
    if refs.get("retry"):
        earlier = inputs["retry"] = store.open(refs["retry"])
        require_same(earlier, rollouts, config)
        if earlier.table(["reward"]).column("reward").null_count == 0:
            log.info("rewards: every row of %s has a reward, nothing to retry", earlier.ref)
            answer = earlier
    config, models = with_fingerprints(config)
    return Plan(
        store=store,
        stage="reward",
        stage_version=STAGE_VERSION,
        config=config,
        run=into or rollouts.ref.run,
        kinds=("rewards",),
        inputs=inputs,
        models=models,
        already_made=answer,
        patience_seconds=config.patience_seconds,
    )


def accept(plan: Plan, version: Version) -> None:
    """Raise RewardError if more rows failed in finished rewards than `max_invalid` allows now.

    The advice is to score all rows again: the newest version with this run key is the answer then.
    A retry has another run key, and would be no answer.
    """
    failed = version.manifest.status.get("failed", 0)
    rows = version.manifest.rows
    max_invalid = plan.config.max_invalid
    if failed > max_invalid * rows:
        raise RewardError(
            str(version.ref),
            f"{failed} of {rows} rows failed, more than reward.max_invalid = {max_invalid:g} "
            "allows",
            state="these rewards are kept; nothing was changed.",
            next=f"quiver reward RECIPE --retry {plan.inputs['retry'].ref} --force"
            if "retry" in plan.inputs
            else f"quiver reward RECIPE --rollouts {plan.inputs['rollouts'].ref} --force",
        )


def check(config: Config, columns: Iterable[str], prompts: Version | None = None) -> None:
    """Raise ConfigError unless each scorer exists and can be called with the prompts' `columns`.

    Args:
        prompts: If they exist already, reward models check them too.
    """
    config, _ = with_fingerprints(config)
    with open_scorers(config, prompts=prompts) as scorers:
        for scorer in scorers:
            scorer.require(columns)


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Score the rows that are not scored yet. Raises RewardError if more rows failed than
    `max_invalid` allows, ConfigError if a scorer is not the planned one."""
    config = plan.config
    # Only raises, if a scorer is not the planned one. No cached hash is used, because the planned
    # fingerprints go into a new manifest.
    with_fingerprints(config, remembered=False)
    writer = writers["rewards"]
    rollouts = plan.inputs["rollouts"]
    prompts = plan.inputs["prompts"]
    allowance = Allowance(config.max_invalid * rollouts.manifest.rows)
    with (
        open_scorers(config, allowance.notice, prompts, rollouts) as scorers,
        writer.phase("score"),
    ):
        shards = Shards(plan, writer, scorers, allowance)
        table = shards.score()
        metrics, status = summary(table, shards.seconds())
        metrics |= shards.devices()
    for name, function in metrics["functions"].items():
        # null in every row, and there are several rows
        if function["null"] == table.num_rows > 1:
            log.warning("rewards: %s gave no number in any of %d rows", name, table.num_rows)
    if shards.earlier is not None:
        retried = shards.earlier.column("reward").null_count
        recovered = retried - table.column("reward").null_count
        metrics |= {"retried": retried, "recovered": recovered}
    device = "cuda" if "devices" in metrics else "cpu"
    ids = rollouts.table(["rollout_id"])["rollout_id"]
    writer.finish(metrics=metrics, status=status, device=device, ids=ids)


@contextmanager
def open_scorers(
    config: Config,
    notice: Notice = lambda *_: None,
    prompts: Version | None = None,
    rollouts: Version | None = None,
) -> Iterator[list[Scorer]]:
    """Open the scorers of `config`, in the order of their parts, and close them at the end.

    Args:
        notice: Called at once for each row that failed.
        prompts, rollouts: The data to be scored, if it is known.

    Raises ConfigError if a scorer is missing.
    """
    with open_pool(config.workers, config.max_memory_gib) as pool, ExitStack() as stack:
        groups = Groups(rollouts, prompts) if rollouts and prompts else None
        scorers: list[Scorer] = [
            FunctionScorer(function, pool, config.batch_rows, notice, groups)
            for function in config.functions
        ]
        for model in config.models:
            scorers.append(stack.enter_context(closing(ModelScorer(model, prompts, rollouts))))
        for server in config.servers:
            from .servers.scorer import ServerScorer

            prefill = beginnings(server.begins_with, prompts, rollouts)
            scorers.append(stack.enter_context(closing(ServerScorer(server, notice, prefill))))
        yield scorers
