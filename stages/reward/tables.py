"""Tables in and out of scoring: rollouts are joined with their prompts and offered to scorers, row
by row or as whole groups; parts are weighted into rewards.

A reward is made in this order, each part kept as its own column: raw parts, weights, clip, overlong
penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import rewards
from quiver.schemas.errors import NumericError
from quiver.schemas.outside import is_finite
from quiver.schemas.prompts import MEDIA, most_media, with_large_files
from quiver.stages.core.lineage import prompt_rows
from quiver.stages.core.store import Version
from quiver.stages.model.chat.messages import read_messages
from quiver.stages.turns.statistics import FAILURES

from . import media, turns
from .config import Config
from .functions import overlong_penalty
from .scoring import OVERLONG, Batch, Part


class Lists(Mapping[str, list[Any]]):
    """Lists by name, each made when it is first asked for: token ids and turns are long, and few
    scorers ask for them."""

    def __init__(self, makers: Mapping[str, Callable[[], list[Any]]]) -> None:
        self._makers = makers
        self._lists: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._lists:
            self._lists[name] = self._makers[name]()
        return self._lists[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers


def offered(rollouts: pa.Table, prompts: pa.Table) -> Batch:
    """Return the lists that scorers are offered, by name. A user's column never hides one of ours.

    Args:
        prompts: The prompt of each row of `rollouts`, in the same order.
    """
    columns = prompts.column("columns")
    makers = {
        field.name: column.to_pylist
        for field, column in zip(columns.type, columns.flatten(), strict=True)
    }
    lists = Lists(makers)
    for name in media.OFFERED:
        if name in prompts.column_names:
            makers[name] = partial(media.lists_of, name, prompts[name])
    if turns.has_turns(rollouts):
        makers["turns"] = partial(turns.of_rows, rollouts)
        makers["transcript"] = lambda: turns.transcripts(lists["prompts"], lists["turns"])
        makers["end_reason"] = rollouts["end_reason"].to_pylist
    makers["prompts"] = lambda: [
        row["prompt_text"] if row["messages"] is None else read_messages(row["messages"])
        for row in prompts.select(["messages", "prompt_text"]).to_pylist()
    ]
    makers["prompt_text"] = prompts["prompt_text"].to_pylist
    makers["prompt_ids"] = rollouts["prompt_ids"].to_pylist
    makers["completions"] = rollouts["completion_text"].to_pylist
    makers["completion_ids"] = rollouts["completion_ids"].to_pylist
    makers["finish_reason"] = rollouts["finish_reason"].to_pylist
    makers["rollout_ids"] = rollouts["rollout_id"].to_pylist
    return lists


def prompts_of(prompts: Version) -> pa.Table:
    """Read the columns of prompts that scorers are offered, in one chunk; pictures and clips only
    if some row has any."""
    names = ["group_id", "messages", "prompt_text", "columns"]
    if prompts.manifest.kind_schema == "prompts/2":
        names += media.OFFERED
    table = with_large_files(prompts.table(names)).combine_chunks()
    shown = [MEDIA[modality] for modality in most_media(table)]
    return table.select([name for name in names if name in shown or name not in media.OFFERED])


class Whole(NamedTuple):
    """The groups of some rows, one after the other."""

    batch: Batch
    sizes: list[int]
    """Number of rows in each group."""
    rows: list[int]
    """Positions of the rows in the batch."""


class Groups:
    """The groups of a rollouts version, for functions of scope `group`. A shard may hold only some
    rows of a group, and a retry asks only for rows without a reward.

        whole = Groups(rollouts, prompts).of(["r-4", "r-9"])
    """

    def __init__(self, rollouts: Version, prompts: Version) -> None:
        """The tables are read when groups are first asked for."""
        self._versions = rollouts, prompts

    @cached_property
    def _tables(self) -> tuple[pa.Table, pa.Table]:
        """The rollouts by group and `sample_index`, and the prompts."""
        rollouts, prompts = self._versions
        keys = [("group_id", "ascending"), ("sample_index", "ascending")]
        return with_large_files(rollouts.table()).sort_by(keys), prompts_of(prompts)

    def of(self, rollout_ids: Sequence[str]) -> Whole:
        """Return the whole groups of these rollouts. Within each, rows are sorted by
        `sample_index`."""
        rollouts, prompts = self._tables
        asked = pa.array(rollout_ids, pa.string())
        named = rollouts.filter(pc.is_in(rollouts["rollout_id"], asked))["group_id"].unique()
        rollouts = rollouts.filter(pc.is_in(rollouts["group_id"], named))
        sizes = pc.value_counts(rollouts["group_id"]).field("counts").to_pylist()
        rows = pc.index_in(asked, rollouts["rollout_id"].combine_chunks()).to_pylist()
        batch = offered(rollouts, prompts.take(prompt_rows(rollouts, prompts)))
        return Whole(batch, sizes, rows)


def as_rewards(
    config: Config, rollouts: pa.Table, parts: dict[str, list[Part]], extras: list[str]
) -> pa.Table:
    """Return rewards/1 for `rollouts`; rewards/2 if the environment's rewards are a part.

    Args:
        parts: One list of parts per scorer, in order of rows.
        extras: Scorers whose extra is written.
    """
    lengths = pc.list_value_length(rollouts.column("completion_ids")).to_pylist()
    if turns.has_turns(rollouts):
        # the true reward of a failed episode is unknown, even if a scorer returned a value
        failed = [reason in FAILURES for reason in rollouts["end_reason"].to_pylist()]
        parts = {
            name: [
                part._replace(value=None) if has_failed else part
                for part, has_failed in zip(column, failed, strict=True)
            ]
            for name, column in parts.items()
        }
    parts, sums = weigh_rows(config, parts, lengths)
    of_turns = turns.are_told(config, rollouts)
    schema = rewards.schema_for(config.part_names, extras, of_turns=of_turns)
    columns = {name: rollouts.column(name) for name in ("rollout_id", "group_id")}
    columns["reward"] = pa.array(sums, pa.float32())
    if of_turns:
        kind = schema.field("turn_rewards").type
        columns["turn_rewards"] = pa.array(turns.turn_rewards(config, rollouts, sums), kind)
    for column, part_field in (("parts", "value"), ("errors", "error"), ("extra", "extra")):
        if column in schema.names:
            fields = list(schema.field(column).type)
            arrays = [
                pa.array([getattr(part, part_field) for part in parts[field.name]], field.type)
                for field in fields
            ]
            columns[column] = pa.StructArray.from_arrays(arrays, fields=fields)
    return pa.table(columns, schema=schema)


def weigh_rows(
    config: Config, parts: dict[str, list[Part]], lengths: list[int]
) -> tuple[dict[str, list[Part]], list[float | None]]:
    """Return the parts and the rewards of rows.

    Args:
        lengths: Completion tokens of each row, for the overlong penalty, which becomes a part.
    """
    weights = {scorer.name: scorer.weight for scorer in config.scorers}
    sums = [
        weigh(dict(zip(parts, row_parts, strict=True)), weights, config.reward_clip)
        for row_parts in zip(*parts.values(), strict=True)
    ]
    if config.overlong:
        overlong = config.overlong
        penalties = [overlong_penalty(n, overlong.max_tokens, overlong.cache) for n in lengths]
        parts = {**parts, OVERLONG: [Part(penalty) for penalty in penalties]}
        sums = [
            None if reward is None else storable(reward + overlong.weight * penalty)
            for reward, penalty in zip(sums, penalties, strict=True)
        ]
    return parts, sums


def weigh(
    parts: dict[str, Part], weights: dict[str, float], clip: tuple[float, float] | None
) -> float | None:
    """Return the reward of one row, R = clip(Σ_f weight_f · part_f) over the scorers that gave a
    value.

    None if a scorer failed, or if none gave a value. A scorer of weight 0 is only observed: its
    value does not make a reward, unless all weights are 0. Raises NumericError if R is not finite
    as float32.

    >>> weights = {"a": 1.0, "b": 2.0, "c": 9.0}
    >>> weigh({"a": Part(1.0), "b": Part(0.5), "c": Part()}, weights, (0.0, 1.5))
    1.5
    >>> weigh({"a": Part(1.0), "b": Part(error="ValueError")}, weights, None) is None
    True
    """
    counting = {name for name, weight in weights.items() if weight} or weights.keys()
    weighted = [
        weights[name] * part.value
        for name, part in parts.items()
        if name in counting and part.value is not None
    ]
    if not weighted or any(part.error is not None for part in parts.values()):
        return None
    total = math.fsum(weighted)
    if clip is not None:
        total = min(max(total, clip[0]), clip[1])
    return storable(total)


def storable(total: float) -> float:
    """Return `total` if a float32 can hold it. Raises NumericError."""
    if not is_finite(total):
        raise NumericError(
            "reward",
            f"the weighted sum {total:g} is not finite as float32",
            next="lower the weights, or set reward_clip",
        )
    return total
