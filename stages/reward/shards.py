"""Score the rows of one rewards version shard by shard, and write them. Look here for retries,
shared work and the count of failures.

All scorers run at once. Each has a thread, goes through the shards in order, and at most AHEAD
shards are scored at a time. A failed row is counted as soon as it is known. Once more have failed
than are allowed, nothing further is scored.

A retry takes over rewards from an earlier version of the same rollouts, and scores only the rows
without one. Rewards, parts, errors and extra are taken over byte for byte. So the recipe must name
the same parts with the same weights. A function's code and arguments may differ, since fixing them
is the purpose of a retry.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import rewards
from quiver.schemas.cells import fields_of
from quiver.schemas.errors import ConfigError, LineageError, RewardError, printable
from quiver.schemas.rewards import names_of
from quiver.stages.core.config import parse
from quiver.stages.core.lineage import prompt_rows
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Version
from quiver.stages.core.store.writer import ROWS_PER_SHARD, Writer, shard_rows

from . import media, tables, turns
from .config import SCORERS, Config
from .measures import failures
from .preview import column_of_reference, source_row
from .scoring import OF_TURNS, OFFERED, Batch, Part, Scorer

log = logging.getLogger(__name__)
AHEAD = 2  # shards scored at a time


class Shards:
    """The rollouts in shards. Shards that an earlier process wrote are not scored again."""

    def __init__(
        self, plan: Plan, writer: Writer, scorers: list[Scorer], allowance: Allowance
    ) -> None:
        self._config = plan.config
        self._writer = writer
        self._scorers = scorers
        self._allowance = allowance
        self._rollouts = plan.inputs["rollouts"].table()
        self._prompts = tables.prompts_of(plan.inputs["prompts"])
        self._prompts_config = plan.inputs["prompts"].manifest.config
        self._columns = [field.name for field in self._prompts.schema.field("columns").type]
        """The user's columns."""
        self._prompt_rows = prompt_rows(self._rollouts, self._prompts)
        earlier = plan.inputs["retry"].table() if "retry" in plan.inputs else None
        earlier_extras = [] if earlier is None else names_of(earlier, "extra")
        self._extras = [
            scorer.name
            for scorer in plan.config.scorers
            if scorer.extra or scorer.name in earlier_extras
        ]
        self.earlier = earlier
        """Rewards from which rows are taken over."""
        if earlier is not None:
            names = plan.config.part_names
            of_turns = turns.are_told(plan.config, self._rollouts)
            self.earlier = aligned(earlier, self._rollouts, names, self._extras, of_turns=of_turns)
        num_rows = self._rollouts.num_rows
        # the media of a shard are held in memory
        has_media = not {*media.OFFERED}.isdisjoint(self._prompts.column_names)
        self._size = ROWS_PER_SHARD if has_media else shard_rows(num_rows)
        self._starts = range(0, max(1, num_rows), self._size)
        self._handout = writer.hand_out(len(self._starts))
        self._counted: set[int] = set()
        """Shards whose failures the allowance has counted."""

    def score(self) -> pa.Table:
        """Score the shards that are not there yet and return the whole table. Raises RewardError if
        too many rows failed."""
        try:
            self._count_failures()
            if self._handout.unfinished():
                for hidden in sorted({*self._columns} & {*OFFERED}):
                    log.warning(
                        "rewards: the column %s of the prompts is not used, because scorers get "
                        "another list under that name: rename it in the source",
                        hidden,
                    )
                columns = fields_of(self._prompts["columns"]) or {}
                of_turns = OF_TURNS if turns.has_turns(self._rollouts) else ()
                shown = {*media.OFFERED} & {*self._prompts.column_names}
                columns |= dict.fromkeys([*of_turns, *shown], ())
                for scorer in self._scorers:
                    scorer.require(columns)
            while self._handout.wait_for_work():
                for index, parts in score_all(self._scorers, self._batches(), self._allowance):
                    self._write(index, parts)
            self._count_failures()
        except TooMany:
            raise self._too_many() from None
        return pa.concat_tables([self._writer.read(index) for index in range(len(self._starts))])

    def _shard(self, table: pa.Table | pa.Array, index: int) -> Any:
        return table.slice(self._starts[index], self._size)

    def _rows_to_score(self, index: int) -> pa.Array:
        """Return the positions within shard `index` of the rows to be scored."""
        if self.earlier is None:
            return pa.array(range(len(self._shard(self._rollouts, index))), pa.int64())
        return pc.indices_nonzero(self._shard(self.earlier, index).column("reward").is_null())

    def _count_failures(self) -> None:
        """Add the failures in shards that an earlier process or another process finished to the
        allowance."""
        uncounted = set(range(len(self._starts))) - {*self._handout.unfinished(), *self._counted}
        for index in sorted(uncounted):
            try:
                for failure in failures(self._writer.read(index)):
                    self._allowance.notice(*failure)
            except TooMany:
                # drop the shard, as if scoring had failed here, so that it is scored again with a
                # mended scorer
                self._writer.drop(index)
                raise
            except FileNotFoundError:
                continue  # another process has just dropped the shard too
            self._counted.add(index)

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        for index in iter(self._handout.take, None):
            self._count_failures()
            rows = self._rows_to_score(index)
            if len(rows) == 0:
                self._write(index, {name: [] for name in self._config.part_names})
                continue
            prompts = self._prompts.take(self._shard(self._prompt_rows, index).take(rows))
            yield index, tables.offered(self._shard(self._rollouts, index).take(rows), prompts)

    def _write(self, index: int, parts: dict[str, list[Part]]) -> None:
        rollouts = self._shard(self._rollouts, index).take(self._rows_to_score(index))
        table = tables.as_rewards(self._config, rollouts, parts, self._extras)
        if self.earlier is not None:
            table = merged(self._shard(self.earlier, index), table)
        self._counted.add(index)
        self._note_scorers()
        self._writer.write(index, table)
        num_done = self._starts[index] + table.num_rows
        log.info("rewards: %d of %d rows", num_done, len(self._rollouts))

    def _note_scorers(self) -> None:
        seconds = {scorer.name: scorer.seconds for scorer in self._scorers}
        gpus = {gpu for scorer in self._scorers for gpu in scorer.gpus}
        self._writer.report_fields |= {"scorers": seconds, "gpus": len(gpus)}

    def seconds(self) -> dict[str, float]:
        """Return seconds in each scorer, summed over its processes and the processes that share the
        work."""
        self._note_scorers()
        seconds: Counter[str] = Counter()
        for report in self._writer.reports():
            seconds.update(report.get("scorers", {}))
        return seconds

    def devices(self) -> dict[str, int]:
        """Return {"devices": n} if the scorers of a process took at most n GPUs; {} if none did."""
        self._note_scorers()
        most = max(report.get("gpus", 0) for report in self._writer.reports())
        return {"devices": most} if most else {}

    def _too_many(self) -> RewardError:
        """Return the error for more failed rows than are allowed, with the first failure."""
        failed = dict(self._allowance.failed)  # scorers that still run may add to it
        rollout_id, (name, error) = next(iter(failed.items()))
        kind, scorer = next(
            (kind.removesuffix("s"), scorer)
            for kind in SCORERS
            for scorer in getattr(self._config, kind)
            if scorer.name == name
        )
        column = None
        if kind == "function":
            column = column_of_reference(scorer, self._columns)
        correct = (
            f"{kind} {name}"
            if column is None
            else f"column {printable(column)} of that row, or the {kind} {name},"
        )
        row = self._rollouts["rollout_id"].index(rollout_id).as_py()
        place = source_row(self._prompts_config, self._rollouts["group_id"][row].as_py())
        finished = sum(self._writer.is_finished(index) for index in range(len(self._starts)))
        return RewardError(
            f"{self._writer.run}/rewards",
            f"{len(failed)} of {self._rollouts.num_rows} rows failed so far, "
            f"more than reward.max_invalid allows; first: {kind} {name}, rollout "
            f"{printable(rollout_id)} of {place}: {error}",
            state=f"no version was written; {finished} finished shards are kept, for a run with "
            "the same [reward] and code.",
            next=f"correct {correct} and run again, or raise reward.max_invalid",
        )


# -- all scorers at once


class TooMany(Exception):
    """More rows failed than are allowed."""


class Allowance:
    """Number of rows that may fail. `notice` may be called from any thread, and repeatedly for a
    row."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.failed: dict[str, tuple[str, str]] = {}
        """Scorer and error of the first failure by rollout_id, in the order of notice."""

    def notice(self, name: str, rollout_id: str, error: str) -> None:
        """Count a failed row. Raises TooMany as soon as that is one too many."""
        self.failed.setdefault(rollout_id, (name, error))  # atomic, so threads may race
        if len(self.failed) > self.most:
            raise TooMany


def score_all(
    scorers: list[Scorer], shards: Iterable[tuple[int, Batch]], allowance: Allowance
) -> Iterator[tuple[int, dict[str, list[Part]]]]:
    """Score each shard's batch, none of them empty. Yields its index and each scorer's parts, in
    order of shards.

    An exception of a scorer is raised at once, and so is TooMany of `allowance`.
    """
    remaining = iter(shards)
    outcomes = queue.SimpleQueue()
    queues = [queue.SimpleQueue() for _ in scorers]
    for scorer, batches in zip(scorers, queues, strict=True):
        # a daemon thread, so that it does not keep the process alive on exit
        threading.Thread(
            target=_score_batches,
            args=(scorer, batches, outcomes, allowance),
            daemon=True,
            name=f"score {scorer.name}",
        ).start()
    under_way: dict[int, dict[str, list[Part]]] = {}
    try:
        while True:
            while len(under_way) < AHEAD and (shard := next(remaining, None)):
                under_way[shard[0]] = {}
                for batches in queues:
                    batches.put(shard)
            if not under_way:
                return
            index, name, outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            under_way[index][name] = outcome
            # complete before any later shard, since scorers go in order
            if len(under_way[index]) == len(scorers):
                parts = under_way.pop(index)
                yield index, {scorer.name: parts[scorer.name] for scorer in scorers}
    finally:
        for batches in queues:
            batches.put(None)


def _score_batches(
    scorer: Scorer,
    batches: queue.SimpleQueue[tuple[int, Batch] | None],
    outcomes: queue.SimpleQueue[tuple[int, str, list[Part] | BaseException]],
    allowance: Allowance,
) -> None:
    """Score batches until None comes, and put each result or exception into `outcomes`."""
    for index, batch in iter(batches.get, None):
        try:
            outcome = scorer.score(batch)
            for rollout_id, part in zip(batch["rollout_ids"], outcome, strict=True):
                if part.error is not None:
                    allowance.notice(scorer.name, rollout_id, part.error)
        except BaseException as error:
            outcome = error
        outcomes.put((index, scorer.name, outcome))


# -- a retry


def require_same(earlier: Version, rollouts: Version, config: Config) -> None:
    """Check that `earlier` fits.

    Raises:
        LineageError: It was not made from `rollouts`.
        ConfigError: It is an override, or its parts or weights differ from those in `config`.
    """
    entry = earlier.manifest.input("rollouts")
    if entry is None or entry.content_hash != rollouts.manifest.content_hash:
        raise LineageError(
            str(earlier.ref),
            f"was made of {entry.ref if entry else 'no rollouts'}, not of {rollouts.ref}",
            next=f"name rewards of {rollouts.ref}, or leave --retry out",
        )
    if earlier.manifest.stage == "override":
        replaced = earlier.manifest.require_input("rewards").ref
        raise ConfigError(
            f"--retry {earlier.ref}",
            f"it replaces rewards of {replaced}: score those again instead",
            next=f"--retry {replaced}, then override again",
        )
    before = _arithmetic(parse(Config, earlier.manifest.config, str(earlier.ref)))
    after = _arithmetic(config)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"--retry {earlier.ref}",
                f"{name} was {before.get(name)} there and is {after.get(name)} in the recipe: the "
                "rewards of one group would not be comparable",
                next="restore [reward] as it was, or leave --retry out to score all rows",
            )


def _arithmetic(config: Config) -> dict[str, Any]:
    """Return the settings that turn parts into rewards."""
    weights = {f"weight of {scorer.name}": scorer.weight for scorer in config.scorers}
    overlong = config.overlong and config.overlong.model_dump()
    return {**weights, "reward_clip": config.reward_clip, "overlong": overlong}


def aligned(
    earlier: pa.Table, rollouts: pa.Table, names: list[str], extras: list[str], *, of_turns: bool
) -> pa.Table:
    """Return the earlier rewards in the order of `rollouts`, joined by id, with parts in the order
    of `names`. `of_turns`: with turn rewards. Raises LineageError if a rollout has no row."""
    order = pc.index_in(
        rollouts.column("rollout_id").combine_chunks(),
        earlier.column("rollout_id").combine_chunks(),
    )
    if order.null_count:
        raise LineageError(
            "--retry",
            f"{order.null_count} rollouts have no row in these rewards",
            next="leave --retry out",
        )
    schema = rewards.schema_for(names, extras, of_turns=of_turns)
    rows = earlier.take(order).to_pylist()
    if extras and "extra" not in earlier.column_names:  # `extra` of a function was false
        rows = [{**row, "extra": dict.fromkeys(extras)} for row in rows]
    return pa.Table.from_pylist(rows, schema)


def merged(earlier: pa.Table, again: pa.Table) -> pa.Table:
    """Return `earlier` with the rows of `again` in place of the rows without a reward; both in the
    same order."""
    scored = earlier.filter(earlier.column("reward").is_valid())
    table = pa.concat_tables([scored, again]).combine_chunks()
    ids = earlier.column("rollout_id").combine_chunks()
    return table.take(pc.index_in(ids, table.column("rollout_id").combine_chunks()))
