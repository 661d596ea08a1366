"""The rows of one rewards version, shard by shard: which are to be scored, and what is written of
them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quiver.schemas.errors import RewardError, printable
from quiver.schemas.rewards import names_of
from quiver.stages.common.store.writer import ROWS_PER_SHARD, Writer

from . import tables
from .measures import failures
from .retry import aligned, merged
from .scoring import Batch, Part, Scorer
from .together import Allowance, TooMany, score_all

if TYPE_CHECKING:
    from .config import Config

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
        self._prompts = prompts.select(
            ["group_id", "messages", "prompt_text", "columns"]
        ).combine_chunks()
        self._order = tables.join(rollouts, self._prompts)
        had = [] if earlier is None else names_of(earlier, "extra")
        self._extras = [each.name for each in config.scorers if each.extra or each.name in had]
        self._earlier = (
            earlier
            if earlier is None
            else aligned(earlier, rollouts, config.part_names, self._extras)
        )
        self._starts = range(0, max(1, rollouts.num_rows), ROWS_PER_SHARD)
        self._shards = writer.claim(len(self._starts))
        self._counted: set[int] = set()
        """Shards whose failures the allowance knows."""

    def score(self, scorers: list[Scorer], allowance: Allowance) -> pa.Table:
        """Score the shards that are not there yet; the whole table. RewardError when too many rows
        failed."""
        self._scorers = scorers
        try:
            self._count_failures(allowance)
            columns = self._prompts.schema.field("columns").type
            for scorer in scorers if self._shards.unfinished() else ():
                scorer.require([field.name for field in columns])
            while self._shards.more():
                score_all(scorers, self._batches(allowance), allowance, self._write)
            self._count_failures(allowance)
        except TooMany:
            raise self._too_many(allowance) from None
        return pa.concat_tables([self._writer.read(index) for index in range(len(self._starts))])

    def _part(self, table: pa.Table | pa.Array, index: int) -> Any:
        return table.slice(self._starts[index], ROWS_PER_SHARD)

    def _rows(self, index: int) -> pa.Array:
        """Positions within shard `index` of the rows that are to be scored."""
        if self._earlier is None:
            return pa.array(range(len(self._part(self._rollouts, index))), pa.int64())
        missing = self._part(self._earlier, index).column("reward").is_null().to_pylist()
        return pa.array([row for row, null in enumerate(missing) if null], pa.int64())

    def _count_failures(self, allowance: Allowance) -> None:
        """Tell the allowance of what failed in shards that an earlier attempt, or another process,
        has finished."""
        found = set(range(len(self._starts))) - {*self._shards.unfinished(), *self._counted}
        for index in sorted(found):
            try:
                for failure in failures(self._writer.read(index)):
                    allowance.notice(*failure)
            except TooMany:
                self._writer.drop(
                    index
                )  # as if it had been scored here: it is done again when the scorer is mended
                raise
            except FileNotFoundError:
                continue  # another process has just come to the same end
            self._counted.add(index)

    def _batches(self, allowance: Allowance) -> Iterator[tuple[int, Batch]]:
        for index in iter(self._shards.take, None):
            self._count_failures(allowance)
            rows = self._rows(index)
            if len(rows) == 0:
                self._write(index, {name: [] for name in self._config.part_names})
                continue
            asked = self._prompts.take(self._part(self._order, index).take(rows))
            yield index, tables.Offered(self._part(self._rollouts, index).take(rows), asked)

    def _write(self, index: int, parts: dict[str, list[Part]]) -> None:
        config, rollouts = self._config, self._part(self._rollouts, index).take(self._rows(index))
        weights = {each.name: each.weight for each in config.scorers}
        penalty = config.overlong.model_dump() if config.overlong else None
        table = tables.as_rewards(
            rollouts, parts, weights, config.reward_clip, penalty, self._extras
        )
        if self._earlier is not None:
            table = merged(self._part(self._earlier, index), table)
        self._counted.add(index)
        self._writer.notes["scorers"] = self._own_seconds()
        self._writer.write(index, table)
        log.info("rewards: shard %d of %d", index + 1, len(self._starts))

    def _own_seconds(self) -> dict[str, float]:
        return {scorer.name: scorer.seconds for scorer in self._scorers}

    def seconds(self) -> dict[str, float]:
        """Time in each scorer, summed over its processes and over those that share the work."""
        self._writer.notes["scorers"] = self._own_seconds()
        told = [part.get("scorers", {}) for part in self._writer.parts()]
        return {
            tables.OVERLONG: 0.0,
            **{name: sum(each.get(name, 0.0) for each in told) for name in self._own_seconds()},
        }

    def _too_many(self, allowance: Allowance) -> RewardError:
        """The error for more failed rows than are allowed; it shows the first."""
        name, rollout, error = allowance.first
        kinds = {"model": self._config.models, "server": self._config.servers}
        kind = next(
            (kind for kind, found in kinds.items() if name in {each.name for each in found}),
            "function",
        )
        finished = sum(self._writer.has(index) for index in range(len(self._starts)))
        return RewardError(
            f"{self._writer.run}/rewards",
            f"{len(allowance.failed)} of {self._rollouts.num_rows} rows failed so far, more than "
            "reward.max_invalid allows; first: "
            f"{kind} {name}, rollout {printable(rollout)}: {error}",
            state=f"{finished} finished shards are kept, and taken up where [reward] and its code "
            "stay as they are; "
            "no version was written.",
            next=f"correct the {kind} and run again, or raise reward.max_invalid",
        )
