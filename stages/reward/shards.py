"""The rows of one rewards version, shard by shard: which are to be scored, and what is written of
them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import RewardError, printable
from quiver.schemas.rewards import names_of
from quiver.stages.common.store.writer import ROWS_PER_SHARD, Writer

from . import tables
from .config import SCORERS, Config
from .measures import failures
from .retry import aligned, merged
from .scoring import OVERLONG, Batch, Part, Scorer
from .together import Allowance, TooMany, score_all

log = logging.getLogger(__name__)


class Shards:
    """Shards of ROWS_PER_SHARD rollouts; those that an earlier attempt wrote are not scored
    again."""

    def __init__(
        self,
        config: Config,
        writer: Writer,
        rollouts: pa.Table,
        prompts: pa.Table,
        earlier: pa.Table | None,
    ) -> None:
        """`earlier`: rewards from which rows are taken over."""
        self._config = config
        self._writer = writer
        self._rollouts = rollouts
        names = ["group_id", "messages", "prompt_text", "columns"]
        self._prompts = prompts.select(names).combine_chunks()
        self._prompt_rows = tables.join(rollouts, self._prompts)
        earlier_extras = [] if earlier is None else names_of(earlier, "extra")
        self._extras = [
            scorer.name
            for scorer in config.scorers
            if scorer.extra or scorer.name in earlier_extras
        ]
        self._earlier = earlier
        if earlier is not None:
            self._earlier = aligned(earlier, rollouts, config.part_names, self._extras)
        self._starts = range(0, max(1, rollouts.num_rows), ROWS_PER_SHARD)
        self._claim = writer.claim(len(self._starts))
        self._counted: set[int] = set()
        """Shards whose failures the allowance has counted."""

    def score(self, scorers: list[Scorer], allowance: Allowance) -> pa.Table:
        """Score the shards that are not there yet; the whole table. RewardError when too many rows
        failed."""
        self._scorers = scorers
        try:
            self._count_failures(allowance)
            if self._claim.unfinished():
                columns = [field.name for field in self._prompts.schema.field("columns").type]
                for scorer in scorers:
                    scorer.require(columns)
            while self._claim.more():
                score_all(scorers, self._batches(allowance), allowance, self._write)
            self._count_failures(allowance)
        except TooMany:
            raise self._too_many(allowance) from None
        return pa.concat_tables([self._writer.read(index) for index in range(len(self._starts))])

    def _shard(self, table: pa.Table | pa.Array, index: int) -> Any:
        return table.slice(self._starts[index], ROWS_PER_SHARD)

    def _rows_to_score(self, index: int) -> pa.Array:
        """Positions within shard `index` of the rows that are to be scored."""
        if self._earlier is None:
            return pa.array(range(len(self._shard(self._rollouts, index))), pa.int64())
        return pc.indices_nonzero(self._shard(self._earlier, index).column("reward").is_null())

    def _count_failures(self, allowance: Allowance) -> None:
        """Have the allowance count what failed in shards that an earlier attempt, or another
        process, has finished."""
        uncounted = set(range(len(self._starts))) - {*self._claim.unfinished(), *self._counted}
        for index in sorted(uncounted):
            try:
                for failure in failures(self._writer.read(index)):
                    allowance.notice(*failure)
            except TooMany:
                # as if it had been scored here: it is done again when the scorer is mended
                self._writer.drop(index)
                raise
            except FileNotFoundError:
                continue  # another process has just come to the same end
            self._counted.add(index)

    def _batches(self, allowance: Allowance) -> Iterator[tuple[int, Batch]]:
        for index in iter(self._claim.take, None):
            self._count_failures(allowance)
            rows = self._rows_to_score(index)
            if len(rows) == 0:
                self._write(index, {name: [] for name in self._config.part_names})
                continue
            prompts = self._prompts.take(self._shard(self._prompt_rows, index).take(rows))
            yield index, tables.offered(self._shard(self._rollouts, index).take(rows), prompts)

    def _write(self, index: int, parts: dict[str, list[Part]]) -> None:
        rollouts = self._shard(self._rollouts, index).take(self._rows_to_score(index))
        table = tables.as_rewards(self._config, rollouts, parts, self._extras)
        if self._earlier is not None:
            table = merged(self._shard(self._earlier, index), table)
        self._counted.add(index)
        self._note_seconds()
        self._writer.write(index, table)
        log.info("rewards: shard %d of %d", index + 1, len(self._starts))

    def _note_seconds(self) -> None:
        self._writer.notes["scorers"] = {scorer.name: scorer.seconds for scorer in self._scorers}

    def seconds(self) -> dict[str, float]:
        """Time in each scorer, summed over its processes and over those that share the work."""
        self._note_seconds()
        processes = [notes.get("scorers", {}) for notes in self._writer.reports()]
        seconds = {OVERLONG: 0.0}
        for scorer in self._scorers:
            seconds[scorer.name] = sum(process.get(scorer.name, 0.0) for process in processes)
        return seconds

    def _too_many(self, allowance: Allowance) -> RewardError:
        """The error for more failed rows than are allowed; it shows the first."""
        name, rollout_id, error = allowance.first
        kind = next(
            kind.removesuffix("s")
            for kind in SCORERS
            if name in {config.name for config in getattr(self._config, kind)}
        )
        finished = sum(self._writer.has(index) for index in range(len(self._starts)))
        return RewardError(
            f"{self._writer.run}/rewards",
            f"{len(allowance.failed)} of {self._rollouts.num_rows} rows failed so far, more than "
            f"reward.max_invalid allows; first: {kind} {name}, rollout {printable(rollout_id)}: "
            f"{error}",
            state=f"{finished} finished shards are kept, and taken up where [reward] and its code "
            "stay as they are; no version was written.",
            next=f"correct the {kind} and run again, or raise reward.max_invalid",
        )
