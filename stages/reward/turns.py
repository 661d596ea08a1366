"""Offer scorers the turns of rollouts, and split each reward over its turns.

transcripts(prompts, of_rows(rollouts))     # the messages of the prompt and of the turns
turn_rewards(config, rollouts, sums)        # one list per row, which adds up to its reward
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.outside import Message
from quiver.schemas.plain import read_json

from .config import Config

ENVIRONMENT = "environment"
"""Name of the shipped function that uses the environment's rewards."""


def has_turns(rollouts: pa.Table) -> bool:
    """True if they are rollouts/2."""
    return "turns" in rollouts.column_names


def of_rows(rollouts: pa.Table) -> list[list[dict[str, Any]]]:
    """Return the turns of each row, without ids, with JSON texts parsed."""
    flat = pa.Table.from_struct_array(pc.list_flatten(rollouts["turns"]))
    names = [name for name in flat.column_names if not name.endswith("_ids")]
    turns = (
        {**turn, "tool_calls": read(turn["tool_calls"]), "info": read(turn["info"])}
        for turn in flat.select(names).to_pylist()
    )
    counts = pc.list_value_length(rollouts["turns"]).to_pylist()
    return [list(itertools.islice(turns, count)) for count in counts]


def transcripts(
    prompts: list[str | list[Message]], turns: list[list[dict[str, Any]]]
) -> list[list[Message]]:
    """Return the messages of each row, from the prompt's on.

    Args:
        prompts: The messages of each row's prompt, or its text.
        turns: The turns of each row, as `of_rows` returns them.
    """
    chats = [
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    return [[*chat, *messages_of(row)] for chat, row in zip(chats, turns, strict=True)]


def read(text: str | None) -> Any:
    """Parse JSON text; return the text itself if it is not JSON."""
    try:
        return None if text is None else read_json(text)
    except ValueError:
        return text


def messages_of(turns: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages of the turns: the policy's, and those by its tools or the environment."""
    messages: list[Message] = []
    for turn in turns:
        calls = turn["tool_calls"]
        message = {"role": "assistant", "content": turn["text"]}
        messages.append(message if calls is None else {**message, "tool_calls": calls})
        if turn["observation"]:
            is_tools = calls is not None or turn["parse_error"] is not None
            role = "tool" if is_tools else "user"
            messages.append({"role": role, "content": turn["observation"]})
    return messages


def are_told(config: Config, rollouts: pa.Table) -> bool:
    """True if rewards of these rollouts include turn rewards."""
    uses = [function.use for function in config.functions]
    return has_turns(rollouts) and ENVIRONMENT in uses


def turn_rewards(
    config: Config, rollouts: pa.Table, sums: Sequence[float | None]
) -> list[list[float | None] | None]:
    """Return the turn rewards of each row, whose reward is in `sums`; None if the row is not
    scored.

    A turn earns the environment's reward, weighted as in the reward. The last turn gets the rest,
    so that they add up.
    """
    weight = sum(function.weight for function in config.functions if function.use == ENVIRONMENT)
    rows: list[list[float | None] | None] = []
    for turns, reward in zip(rollouts["turns"].to_pylist(), sums, strict=True):
        if reward is None:
            rows.append(None)
            continue
        earned = [None if turn["reward"] is None else weight * turn["reward"] for turn in turns]
        rows.append(with_rest(earned, reward))
    return rows


def with_rest(earned: Sequence[float | None], reward: float) -> list[float | None]:
    """Return `earned` per turn, with the last one changed so that they add up to `reward`.

    >>> with_rest([0.5, None, 0.25], 1.0)
    [0.5, None, 0.5]
    """
    before = list(earned[:-1])
    return [*before, reward - math.fsum(part for part in before if part is not None)]
