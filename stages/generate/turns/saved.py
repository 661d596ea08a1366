"""What saved episodes say of what was played: where an environment began, and which turns it had
answered.

    beginning = beginning_of("sum-0017", {"answer": 7})          # of a prompt
    before_calls = text_before_calls(store, rollouts)
    turns_answered(row["rollout_id"], row["turns"], row["end_reason"], before_calls)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from quiver.schemas.errors import LineageError, SchemaError, SecurityError, printable
from quiver.schemas.plain import read_json
from quiver.schemas.prompts import PLAYED_GROUP, PLAYED_TURNS
from quiver.stages.common.environments.environment import Row, Turn, environment_seed
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Store, Version
from quiver.stages.generate.turns.tool_calls import RESPONSE_TEMPLATE, Call, Parse, make_parser

_NOT_ASKED = ("answered", "max_tool_calls")
"""End reasons of episodes whose last turn the environment did not see."""


class Beginning(NamedTuple):
    """Where the episodes of a prompt begin."""

    row: Row
    """What the environment is reset with."""
    group: str
    """The group that gives its seed."""
    turns: tuple[Turn, ...] = ()
    """What it answers before the first turn that is sampled, where the prompt is the beginning of a
    saved episode."""

    @property
    def seed(self) -> int:
        """What the environment is reset with beside the row."""
        return environment_seed(self.group)


def beginning_of(group_id: str, columns: Mapping[str, Any]) -> Beginning:
    """Of the prompt with these columns. SchemaError where the turns before it can not be read."""
    row = dict(columns)
    played = row.pop(PLAYED_TURNS, None)
    group = row.pop(PLAYED_GROUP, None) or group_id
    if played is None:
        return Beginning(row, group)
    try:
        turns = tuple(
            Turn(
                turn["text"], tuple(Call(call["name"], call["arguments"]) for call in turn["calls"])
            )
            for turn in read_json(played)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"prompt {printable(group_id)}",
            f"column {PLAYED_TURNS} is no list of turns: {printable(error)}",
            next="leave that column out of the prompts",
        ) from None
    return Beginning(row, group, turns)


def as_json(turns: Sequence[Turn]) -> str:
    """Turns as the column `quiver_turns` has them."""
    return json.dumps(
        [{"text": turn.text, "calls": [call._asdict() for call in turn.calls]} for turn in turns],
        ensure_ascii=False,
    )


def calls_of(name: str, turn: Mapping[str, Any]) -> tuple[Call, ...]:
    """The calls that were read from a turn of rollout `name`. SchemaError where they are none."""
    try:
        calls = read_json(turn["tool_calls"] or "[]")
        return tuple(Call(call["name"], call["arguments"]) for call in calls)
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"rollout {printable(name)}",
            f"tool_calls are no list of {{name, arguments}}: {printable(error)}",
            next="look at the turns of that rollout",
        ) from None


def turns_answered(
    name: str,
    turns: Sequence[Mapping[str, Any]],
    end_reason: str | None,
    before_calls: Callable[[str], str],
) -> list[Turn | None]:
    """Of each turn of rollout `name` what the environment was given to answer; None where it was
    not asked: a turn that could not be read was refused without it, and the last one may be the
    answer, or have been cut. `end_reason` None: more turns follow these. SchemaError."""
    answered: list[Turn | None] = []
    for number, turn in enumerate(turns, 1):
        is_asked = turn["parse_error"] is None
        if number == len(turns) and end_reason is not None:
            is_asked &= turn["finish_reason"] == "stop" and end_reason not in _NOT_ASKED
        calls = calls_of(name, turn) if is_asked else ()
        text = before_calls(turn["text"]) if calls else turn["text"]
        answered.append(Turn(text, calls) if is_asked else None)
    return answered


def ids_before(row: Mapping[str, Any], number: int) -> list[int]:
    """All that the policy read of a rollout before turn `number`, since its sequence began."""
    ids = list(row["prompt_ids"])
    start = 0
    for turn in row["turns"][:number]:
        if turn["restart_ids"] is not None:
            ids = list(turn["restart_ids"])
        end = start + turn["length"]
        ids += row["completion_ids"][start:end] + turn["observation_ids"]
        start = end
    restart_ids = row["turns"][number]["restart_ids"]
    return ids if restart_ids is None else restart_ids


def text_before_calls(store: Store, rollouts: Version) -> Callable[[str], str]:
    """From the text of a turn with calls to what stands before them, by the parser that the
    manifest names; it is made when there is such a turn. ConfigError, LineageError, SecurityError.
    """
    name = rollouts.manifest.config_section("turns").get("parser")
    sampler = rollouts.manifest.require_model("policy")

    @cache
    def parser() -> Parse:
        if ":" in str(name):
            refuse_foreign_code(store, rollouts)
        is_tokenizers = name == RESPONSE_TEMPLATE
        tokenizer = checkpoints.load_tokenizer(store.open(sampler.ref)) if is_tokenizers else None
        return make_parser(name, tokenizer)

    return lambda text: text if name is None else parser()(text).text


def refuse_foreign_code(store: Store, rollouts: Version) -> None:
    """SecurityError where the store is somebody else's: what it names as code is not run."""
    if store.storage.is_foreign:
        raise SecurityError(
            str(rollouts.ref),
            "its manifest names the code that would run, and the store is somebody else's",
            next="copy the store, once you have read that code",
        )


def require_episodes(rollouts: Version) -> None:
    """LineageError where the version holds no episodes of several turns."""
    if rollouts.manifest.kind_schema != "rollouts/2":
        raise LineageError(
            str(rollouts.ref),
            f"holds {rollouts.manifest.kind_schema}, expected rollouts/2, which are episodes",
            next=f"quiver show {rollouts.ref}",
        )
