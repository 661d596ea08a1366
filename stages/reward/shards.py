"""Score the rows of one rewards version shard by shard, and write them. Look here for retries,
shared work and the count of failures."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import RewardError, printable
from quiver.schemas.rewards import names_of
from quiver.stages.common.runtime.stage import Plan
from quiver.stages.common.store.writer import ROWS_PER_SHARD, Writer

from . import pictures, tables, turns
from .config import SCORERS
from .groups import prompts_of
from .measures import failures
from .references import column_of_reference, source_row
from .retry import aligned, merged
from .scoring import OF_TURNS, OFFERED, Batch, Part, Scorer
from .together import Allowance, TooMany, score_all

log = logging.getLogger(__name__)


class Shards:
    """Shards of ROWS_PER_SHARD rollouts. Shards that an earlier attempt wrote are not scored
    again."""

    def __init__(
        self, plan: Plan, writer: Writer, scorers: list[Scorer], allowance: Allowance
    ) -> None:
        self._config = plan.config
        self._writer = writer
        self._scorers = scorers
        self._allowance = allowance
        self._rollouts = plan.inputs["rollouts"].table()
        self._prompts = prompts_of(plan.inputs["prompts"])
        self._prompts_config = plan.inputs["prompts"].manifest.config
        self._prompt_rows = tables.join(self._rollouts, self._prompts)
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
        self._starts = range(0, max(1, self._rollouts.num_rows), ROWS_PER_SHARD)
        self._handout = writer.shards_of(len(self._starts))
        self._counted: set[int] = set()
        """Shards whose failures the allowance has counted."""

    def score(self) -> pa.Table:
        """Score the shards that are not there yet and return the whole table. Raises RewardError if
        too many rows failed."""
        try:
            self._count_failures()
            if self._handout.unfinished():
                columns = [field.name for field in self._prompts.schema.field("columns").type]
                for hidden in sorted({*columns} & {*OFFERED}):
                    log.warning(
                        "rewards: the column %s of the prompts is not used: by that name scorers "
                        "are offered another list; rename it in the source",
                        hidden,
                    )
                columns += OF_TURNS if turns.has_turns(self._rollouts) else ()
                columns += pictures.offered(self._prompts.slice(0, 0))
                for scorer in self._scorers:
                    scorer.require(columns)
            while self._handout.more():
                for index, parts in score_all(self._scorers, self._batches(), self._allowance):
                    self._write(index, parts)
            self._count_failures()
        except TooMany:
            raise self._too_many() from None
        return pa.concat_tables([self._writer.read(index) for index in range(len(self._starts))])

    def _shard(self, table: pa.Table | pa.Array, index: int) -> Any:
        return table.slice(self._starts[index], ROWS_PER_SHARD)

    def _rows_to_score(self, index: int) -> pa.Array:
        """Return the positions within shard `index` of the rows to be scored."""
        if self.earlier is None:
            return pa.array(range(len(self._shard(self._rollouts, index))), pa.int64())
        return pc.indices_nonzero(self._shard(self.earlier, index).column("reward").is_null())

    def _count_failures(self) -> None:
        """Add the failures in shards that an earlier attempt or another process finished to the
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
        self._note_seconds()
        self._writer.write(index, table)
        num_done = self._starts[index] + table.num_rows
        log.info("rewards: %d of %d rows", num_done, len(self._rollouts))

    def _note_seconds(self) -> None:
        self._writer.notes["scorers"] = {scorer.name: scorer.seconds for scorer in self._scorers}

    def seconds(self) -> dict[str, float]:
        """Return seconds in each scorer, summed over its processes and the processes that share the
        work."""
        self._note_seconds()
        seconds: Counter[str] = Counter()
        for notes in self._writer.reports():
            seconds.update(notes.get("scorers", {}))
        return seconds

    def _too_many(self) -> RewardError:
        """Return the error for more failed rows than are allowed, with the first failure."""
        failed = dict(self._allowance.failed)  # scorers that still run may add to it
        rollout_id, (name, error) = next(iter(failed.items()))
        scorers = {
            scorer.name: (kind.removesuffix("s"), scorer)
            for kind in SCORERS
            for scorer in getattr(self._config, kind)
        }
        kind, scorer = scorers[name]
        column = None
        if kind == "function":
            columns = [field.name for field in self._prompts.schema.field("columns").type]
            column = column_of_reference(scorer, columns)
        correct = (
            kind if column is None else f"column {printable(column)} of that row, or the {kind},"
        )
        row = self._rollouts["rollout_id"].index(rollout_id).as_py()
        place = source_row(self._prompts_config, self._rollouts["group_id"][row].as_py())
        finished = sum(self._writer.has(index) for index in range(len(self._starts)))
        return RewardError(
            f"{self._writer.run}/rewards",
            f"{len(failed)} of {self._rollouts.num_rows} rows failed so far, "
            f"more than reward.max_invalid allows; first: {kind} {name}, rollout "
            f"{printable(rollout_id)} of {place}: {error}",
            state=f"{finished} finished shards are kept, and taken up where [reward] and its code "
            "stay as they are; no version was written.",
            next=f"correct {correct} and run again, or raise reward.max_invalid",
        )
