"""Show episodes of several turns to people: the parts of a turn, each with the voice that speaks,
and the counts of a version as text. Look here to change how turns are shown.

    for part in parts_of(joined.rows([0])[0]):
        print(part.voice, part.name, part.text)

Only the text that the policy sampled is trained on; an environment's answer is an `observation`.
All texts may be foreign.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from quiver.schemas.errors import printable
from quiver.schemas.plain import read_json
from quiver.stages.common.episodes import FAILURE_INFO, FAILURES, measure, read_calls
from quiver.stages.common.store import Version

from .shards import columns_of
from .words import counted, number

MOST_BYTES = 256 * 1024 * 1024
"""Bytes read of a version to count its episodes, from its first shards."""
FEW_BYTES = 12 * 1024 * 1024
"""The same limit when many versions are read."""
_LAST = 3
"""Turns shown from the end of a long episode."""


class Part(NamedTuple):
    """A piece of a turn."""

    voice: str
    """The speaker: `policy`, `observation` or `error`. Or Quiver itself: `title` of a turn,
    `restart` if a new sequence begins, `note`."""
    name: str
    text: str


# -- one episode


def told_of_turns(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace the ids in turns of rollouts/2 by their counts, `observation_tokens` and
    `restart_tokens`. The latter is None if no new sequence begins. `tool_calls` and `info` are
    parsed from JSON."""
    told = []
    for turn in turns:
        fields = dict(turn)
        restart_ids = fields.pop("restart_ids")
        fields["observation_tokens"] = len(fields.pop("observation_ids"))
        fields["restart_tokens"] = None if restart_ids is None else len(restart_ids)
        fields["tool_calls"] = read_calls(fields["tool_calls"])
        with suppress(ValueError):
            fields["info"] = None if fields["info"] is None else read_json(fields["info"])
        told.append(fields)
    return told


def parts_of(row: Mapping[str, Any], most: int | None = None) -> list[Part]:
    """Return the parts of all turns of a row, whose `turns` come from `told_of_turns`. If the row
    has more than `most` turns, return the first and the last ones."""
    parts = []
    for index in shown_turns(len(row["turns"]), most):
        if index is None:
            parts.append(left_out(len(row["turns"]), most))
        else:
            parts += parts_of_turn(row, index)
    return parts


def shown_turns(count: int, most: int | None) -> list[int | None]:
    """Return the indices of the turns to show, with None in place of turns that are left out.

    >>> shown_turns(9, 5)
    [0, 1, None, 6, 7, 8]
    """
    if most is None or count <= most:
        return list(range(count))
    return [*range(most - _LAST), None, *range(count - _LAST, count)]


def left_out(count: int, most: int) -> Part:
    """Return the part that stands for the turns that `shown_turns` leaves out."""
    return Part("note", "left out", counted(count - most, "turn"))


def parts_of_turn(row: Mapping[str, Any], index: int) -> list[Part]:
    """Return the parts of one turn: title, sampled text, tool calls, errors and observation."""
    turn = row["turns"][index]
    info = turn["info"]
    failure = None
    if isinstance(info, dict) and FAILURE_INFO in info:
        failure = info[FAILURE_INFO]
        info = {name: cell for name, cell in info.items() if name != FAILURE_INFO}
    parts = []
    if turn["restart_tokens"] is not None:
        begun = f"a new sequence begins with {counted(turn['restart_tokens'], 'token')}"
        parts.append(Part("restart", "restart", f"{begun}: the history was rewritten"))
    about = [f"{counted(turn['length'], 'token')}, {turn['finish_reason']}"]
    about += [*_reward(row, index), f"{number(turn['seconds'])} s"]
    if turn["observation_tokens"]:
        about.append(f"then {counted(turn['observation_tokens'], 'token')} of observation")
    parts += [
        Part("title", f"turn {index}", " · ".join(about)),
        Part("policy", "sampled", turn["text"]),
        Part("policy", "calls", "\n".join(map(_call, turn["tool_calls"]))),
        Part("error", "parse error", turn["parse_error"] or ""),
        Part("observation", "observation", turn["observation"]),
        Part("note", "info", _as_text(info) if info else ""),
        Part("error", "failure", "" if failure is None else _as_text(failure)),
    ]
    return [part for part in parts if part.text]


def turns_and_end(row: Mapping[str, Any]) -> str:
    """Return text such as `max_turns, after 3 turns`."""
    return f"{row['end_reason']}, after {counted(len(row['turns']), 'turn')}"


def _reward(row: Mapping[str, Any], index: int) -> list[str]:
    """Return the turn's reward from the rewards that are shown, else from the environment."""
    earned = row.get("turn_rewards")
    if earned is not None and len(earned) == len(row["turns"]):
        return [f"reward {number(earned[index])}"]
    given = row["turns"][index]["reward"]
    return [] if given is None else [f"environment's reward {number(given)}"]


def _call(call: Any) -> str:
    """Return text such as `look_up {"word": "elk"}`."""
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return f"{call['name']} {_as_text(call.get('arguments', {}))}"
    return _as_text(call)


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


# -- a whole version


def numbers_of(version: Version, most_bytes: int = MOST_BYTES) -> dict[str, Any] | None:
    """Count the episodes in the first shards of a rollouts version. None if it has no turns. Raises
    CorruptError, LineageError."""
    if version.ref.kind != "rollouts" or "turns" not in columns_of(version):
        return None
    return measure(version.head(["turns", "end_reason"], most_bytes))


def in_words(numbers: Mapping[str, Any], num_rows: int) -> Iterable[tuple[str, str]]:
    """Yield the counts of a version of `num_rows` rows as (name, text)."""
    num_counted = numbers["rollouts"]
    if num_counted < num_rows:
        yield "episodes", f"the first {num_counted:,} of {num_rows:,} are counted"
    if not num_counted:
        return
    yield "turns", f"{number(numbers['mean_turns'])} on average, {numbers['max_turns']:,} at most"
    yield "ended by", ends_in_words(numbers)
    of_each = f"{number(numbers['mean_tool_calls'])} an episode"
    yield "tool calls", f"{numbers['tool_calls']:,}, {of_each}"
    of_turns = f"{numbers['parse_errors']:,} of {counted(numbers['turns'], 'turn')}"
    yield "parse error", f"in {of_turns} ({share(numbers['parse_error_share'])})"
    failed = f"{numbers['failed']:,} of {counted(num_counted, 'episode')}"
    yield "failed", f"{failed} ({share(numbers['failed_share'])})"
    longest = f"{counted(numbers['max_observation_tokens'], 'token')} at most after a turn"
    mean = number(numbers["mean_observation_tokens"])
    yield "observation", f"{mean} tokens an episode, {longest}"
    if numbers["restarts"]:
        yield "restarts", f"{counted(numbers['restarts'], 'sequence')} begun anew"
    slowest = f"{number(numbers['max_seconds'])} s at most in one turn"
    mean = numbers["environment_seconds"] / num_counted
    yield "environment", f"{number(mean)} s an episode, {slowest}"


def ends_in_words(numbers: Mapping[str, Any]) -> str:
    """Return text such as `answered 9 (75.0%) · timeout 3 (25.0%)`."""
    return " · ".join(
        f"{printable(reason)} {count:,} ({share(count / numbers['rollouts'])})"
        for reason, count in numbers["end_reasons"].items()
    )


def share(part: float | None) -> str:
    """Return a share in percent; a dash for None."""
    return number(None) if part is None else f"{part:.1%}"


def share_of_ends(numbers: Mapping[str, Any], reasons: Iterable[str]) -> float:
    """Return the share of episodes that ended for one of `reasons`."""
    num_ended = sum(numbers["end_reasons"].get(reason, 0) for reason in reasons)
    return num_ended / numbers["rollouts"] if numbers["rollouts"] else 0.0


def failures_in_words(numbers: Mapping[str, Any]) -> str:
    """Return text such as `2 timeout, 1 environment_error`."""
    counts = {reason: numbers["end_reasons"].get(reason, 0) for reason in FAILURES}
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
