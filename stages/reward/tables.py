"""Tables in and out of scoring: rollouts are joined with their prompts, parts are weighted into
rewards.

A reward is made in this order, each part kept as its own column: raw parts, weights, clip, overlong
penalty.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import rewards
from quiver.schemas.errors import LineageError, NumericError, printable

from . import pictures, turns
from .config import Config
from .functions import overlong_penalty
from .scoring import LARGEST, OVERLONG, Batch, Part


def join(rollouts: pa.Table, prompts: pa.Table) -> pa.Array:
    """Return for each rollout the row of its prompt. Raises LineageError if a group has no
    prompt."""
    groups = rollouts.column("group_id").combine_chunks()
    order = pc.index_in(groups, value_set=prompts.column("group_id").combine_chunks())
    if order.null_count:
        unknown = groups.filter(pc.is_null(order))[0].as_py()
        raise LineageError(
            f"group {printable(unknown)}",
            "has rollouts but no prompt",
            next="generate rollouts of these prompts",
        )
    return order


def offered(rollouts: pa.Table, prompts: pa.Table) -> Batch:
    """Return the lists that scorers are offered, by name. A user's column never hides one of ours.

    Args:
        prompts: The prompt of each row of `rollouts`, in the same order.
    """
    columns = prompts.column("columns")
    batch = {
        field.name: column.to_pylist()
        for field, column in zip(columns.type, columns.flatten(), strict=True)
    }
    chats = prompts.column("messages").to_pylist()
    texts = prompts.column("prompt_text").to_pylist()
    if prompts.schema.field("messages").type.value_type.num_fields > 2:  # prompts/2
        chats = [chat and turns.beginning(chat, "") for chat in chats]
    ours = {
        "prompts": [
            text if chat is None else chat for chat, text in zip(chats, texts, strict=True)
        ],
        "prompt_text": texts,
        "completions": rollouts.column("completion_text").to_pylist(),
        "completion_ids": rollouts.column("completion_ids").to_pylist(),
        "finish_reason": rollouts.column("finish_reason").to_pylist(),
        "rollout_ids": rollouts.column("rollout_id").to_pylist(),
    }
    prompt_ids = PromptIds(rollouts)
    of_turns = turns.Offered(rollouts, prompts) if turns.has_turns(rollouts) else {}
    return ChainMap(ours, prompt_ids, of_turns, pictures.offered(prompts), batch)


class PromptIds(Mapping[str, list[list[int]]]):
    """`prompt_ids` of rollouts, converted on first use: prompts are long, and few scorers ask for
    their ids."""

    def __init__(self, rollouts: pa.Table) -> None:
        self._column = rollouts.column("prompt_ids")
        self._lists: list[list[int]] | None = None

    def __getitem__(self, name: str) -> list[list[int]]:
        if name != "prompt_ids":
            raise KeyError(name)
        if self._lists is None:
            self._lists = self._column.to_pylist()
        return self._lists

    def __iter__(self) -> Iterator[str]:
        yield "prompt_ids"

    def __len__(self) -> int:
        return 1

    def __contains__(self, name: object) -> bool:
        return name == "prompt_ids"


def as_rewards(
    config: Config, rollouts: pa.Table, parts: dict[str, list[Part]], extras: list[str]
) -> pa.Table:
    """Return rewards/1 for `rollouts`; rewards/2 if the environment's rewards are a part.

    Args:
        parts: One list of parts per scorer, in order of rows.
        extras: Scorers whose extra is written.
    """
    lengths = pc.list_value_length(rollouts.column("completion_ids")).to_pylist()
    parts = turns.without_failed(rollouts, parts)
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

    None if a scorer failed, or if none gave a value. Raises NumericError if R is not finite as
    float32.

    >>> weights = {"a": 1.0, "b": 2.0, "c": 9.0}
    >>> weigh({"a": Part(1.0), "b": Part(0.5), "c": Part()}, weights, (0.0, 1.5))
    1.5
    >>> weigh({"a": Part(1.0), "b": Part(error="ValueError")}, weights, None) is None
    True
    """
    weighted = [
        weights[name] * part.value for name, part in parts.items() if part.value is not None
    ]
    if not weighted or any(part.error is not None for part in parts.values()):
        return None
    total = math.fsum(weighted)
    if clip is not None:
        total = min(max(total, clip[0]), clip[1])
    return storable(total)


def storable(total: float) -> float:
    """Return `total` if a float32 can hold it. Raises NumericError."""
    if abs(total) > LARGEST:
        raise NumericError(
            "reward",
            f"the weighted sum {total:g} is not finite as float32",
            next="lower the weights, or set reward_clip",
        )
    return total
