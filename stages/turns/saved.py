"""Read saved episodes: where an environment began, and which turns it answered.

    beginning = beginning_of("sum-0017", {"answer": 7})          # a prompt's
    before_calls = text_before_calls(store, rollouts)
    turns_answered(row["rollout_id"], row["turns"], row["end_reason"], before_calls)

Look here for the functions that sampling, `branch` and `reenact` share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quiver.schemas.errors import LineageError, SchemaError, SecurityError, printable
from quiver.schemas.plain import read_json
from quiver.schemas.prompts import OPENING, OURS, PLAYED_TURNS
from quiver.schemas.rollouts import OF_EPISODES
from quiver.stages.core.store import Store, Version
from quiver.stages.model import checkpoints
from quiver.stages.turns.bridge import answers_of_calls, cut_by, turn_message
from quiver.stages.turns.environment import Message, Row, Step, Turn, environment_seed, for_people
from quiver.stages.turns.statistics import CUT_INFO, read_info
from quiver.stages.turns.tool_calls import RESPONSE_TEMPLATE, Call, Parse, ParsedTurn, make_parser

_NOT_ASKED = ("answered", "max_tool_calls")
"""End reasons of episodes whose last turn the environment did not see."""


class Played(NamedTuple):
    """A turn that an environment has answered, with its answer."""

    turn: Turn
    observation: str
    cut: int
    """Characters that were cut out of the observation."""
    reward: float | None

    def is_answered_by(self, step: Step) -> bool:
        """Return True if the environment gives the same answer, and does not end."""
        said = text_of(step, self.cut), as_float32(step.reward), step.done
        return said == (self.observation, as_float32(self.reward), False)


class Beginning(NamedTuple):
    """The state in which the episodes of a prompt begin."""

    row: Row
    """The row that the environment is reset with."""
    group: str
    """The group that the environment's seed is derived from."""
    opening: list[Message] | None = None
    """The environment's opening messages; None if they are unknown."""
    turns: tuple[Played, ...] = ()
    """Turns to replay before the first sampled one, if the prompt is the beginning of a saved
    episode."""

    @property
    def seed(self) -> int:
        """The seed that the environment is reset with, besides the row."""
        return environment_seed(self.group)


def beginning_of(group_id: str, columns: Mapping[str, Any]) -> Beginning:
    """Return the beginning of the prompt with these columns.

    Raises SchemaError if its earlier turns cannot be read.
    """
    row = dict(columns)
    saved_turns, group, opening = (row.pop(name, None) for name in OURS)
    try:
        opening = None if opening is None else list(read_json(opening))
        turns = tuple(map(_as_played, read_json(saved_turns or "[]")))
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"prompt {printable(group_id)}",
            f"columns {PLAYED_TURNS} and {OPENING} do not say how it begins: {printable(error)}",
            next="leave these columns out of the prompts",
        ) from None
    return Beginning(row, group or group_id, opening, turns)


def _as_played(saved: Mapping[str, Any]) -> Played:
    calls = tuple(Call(call["name"], call["arguments"]) for call in saved["calls"])
    turn = Turn(saved["text"], calls)
    return Played(turn, saved["observation"], saved["cut"], saved["reward"])


def as_json(turns: Sequence[Played]) -> str:
    """Return the turns in the format of the column `quiver_turns`."""
    saved = [
        {
            "text": turn.text,
            "calls": [call._asdict() for call in turn.calls],
            "observation": observation,
            "cut": cut,
            "reward": reward,
        }
        for turn, observation, cut, reward in turns
    ]
    return json.dumps(saved, ensure_ascii=False)


def text_of(step: Step, cut: int) -> str:
    """Return the text of an observation without the `cut` characters in its middle."""
    messages = step.observation()
    if cut > 0:
        messages = cut_by(messages, cut)
    return for_people(messages)


def cut_of(turn: Mapping[str, Any]) -> int:
    """Return how many characters of a saved turn's observation were cut."""
    cut = read_info(turn).get(CUT_INFO)
    return cut if isinstance(cut, int) else 0


def as_float32(reward: float | None) -> np.float32 | None:
    """Return a reward with the precision of rollouts."""
    return None if reward is None else np.float32(reward)


def calls_of(name: str, turn: Mapping[str, Any]) -> tuple[Call, ...]:
    """Return the calls read from a turn of rollout `name`. Raises SchemaError if they are
    malformed."""
    try:
        calls = read_json(turn["tool_calls"] or "[]")
        return tuple(Call(call["name"], call["arguments"]) for call in calls)
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"rollout {printable(name)}",
            f"tool_calls are not a list of {{name, arguments}}: {printable(error)}",
            next="look at the turns of that rollout",
        ) from None


def turns_answered(
    name: str,
    turns: Sequence[Mapping[str, Any]],
    end_reason: str | None,
    before_calls: Callable[[str], str],
) -> list[Turn | None]:
    """Return what the environment was asked to answer for each turn of rollout `name`.

    An entry is None if the environment was not asked. A turn that could not be read was refused
    without it, and the last turn may be the answer or have been cut. `end_reason` None means that
    more turns follow. Raises SchemaError.
    """
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
    """Return the ids that the policy read before turn `number`, since its sequence began."""
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
    """Return a function from a turn's text to the text before its calls.

    It uses the parser that the manifest names, and loads it at the first call. Raises ConfigError,
    LineageError or SecurityError.
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


def messages_of_turn(
    name: str, turn: Mapping[str, Any], before_calls: Callable[[str], str]
) -> tuple[Message, list[Message]]:
    """Return the message of a turn of rollout `name`, and the messages that answered it, as a
    version saves them. Raises SchemaError."""
    calls = calls_of(name, turn)
    content = before_calls(turn["text"]) if calls else turn["text"]
    message: Message = {"role": "assistant", "content": content}
    names = [call.name for call in calls]
    if calls:
        made = turn_message(ParsedTurn(content, calls))["tool_calls"]
        message["tool_calls"] = json.dumps(made, ensure_ascii=False)
    elif turn["parse_error"] is not None:
        names = ["error"]
    return message, _answers(turn["observation"], names)


def _answers(observation: str, names: list[str]) -> list[Message]:
    """Return the messages that followed a turn which called tools of these `names`, if any.

    The outputs of several tools are joined line by line. For longer outputs it is unknown which
    lines belong to which tool, so they stay one text.
    """
    if not names:
        return [{"role": "user", "content": observation}] if observation else []
    lines = observation.split("\n")
    contents = lines if len(lines) == len(names) else [observation]
    pairs = zip(names, contents, strict=False)
    return answers_of_calls(
        [{"role": "tool", "name": name, "content": content} for name, content in pairs]
    )


def refuse_foreign_code(store: Store, rollouts: Version) -> None:
    """Raise SecurityError if the store belongs to another user: code that it names is not run."""
    if store.storage.is_foreign:
        raise SecurityError(
            str(rollouts.ref),
            "its manifest names code that would run here, and the store belongs to another user",
            next="read that code, then copy the store",
        )


def require_episodes(rollouts: Version) -> None:
    """Raise LineageError if the version holds no episodes of several turns."""
    if rollouts.manifest.kind_schema not in OF_EPISODES:
        raise LineageError(
            str(rollouts.ref),
            f"holds {rollouts.manifest.kind_schema}, expected episodes, {' or '.join(OF_EPISODES)}",
            next=f"quiver show {rollouts.ref}",
        )
