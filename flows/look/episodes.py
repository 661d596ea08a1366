"""Show rollouts to people piece by piece, each piece with the voice that speaks, and the counts of
a version's episodes as text. Look here to change what is shown of a rollout.

    for piece in pieces_of(joined.rows([0])[0]):
        print(piece.voice, piece.name, piece.text)

Only the text that the policy sampled is trained on; an environment's answer is an `observation`.
All texts may be foreign.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from quiver.schemas.errors import printable, quoted_name
from quiver.schemas.outside import MEDIA
from quiver.schemas.plain import read_json
from quiver.stages.core.store import Version
from quiver.stages.model.media import WORDS
from quiver.stages.turns.statistics import FAILURE_INFO, FAILURES, measure, read_calls

from .shards import schema_of
from .words import cell, counted, number, share, size

MOST_BYTES = 256 * 1024 * 1024
"""Bytes read of a version to count its episodes, from its first shards."""
FEW_BYTES = 12 * 1024 * 1024
"""The same limit when many versions are read."""
MOST_FILES = 8
"""Pictures drawn of one prompt or observation, and clips played."""
_LAST = 3
"""Turns shown from the end of a long episode."""


class Piece(NamedTuple):
    """One field of a rollout, or a piece of a turn."""

    voice: str
    """The speaker: `sampled` or `policy`, `observation` or `error`. Or Quiver itself: `field` of a
    row, `picture` (or clip), `title` of a turn, `restart` if a new sequence begins, `note`."""
    name: str
    text: str
    turn: int | None = None
    """Index of the turn that it belongs to."""
    file: Mapping[str, Any] | None = None
    """The picture or clip, as in prompts/2, if it is to be drawn or played."""


# -- one rollout


def pieces_of(row: Mapping[str, Any], most_turns: int | None = None) -> list[Piece]:
    """Return a row of `Joined.rows` piece by piece: what was asked, what was sampled, how it ended,
    and what it earned. An empty text means that there is nothing to show."""
    columns = dict(row.get("columns") or {})
    columns.pop(row.get("reference_column"), None)
    # the prompt stands above, so its column is left out; another one may hold the same text
    asked = [name for name, text in columns.items() if text == row.get("prompt")]
    columns.pop(next(iter(asked), None), None)
    pieces = [Piece("field", "prompt", row.get("prompt"))]
    pieces += pieces_of_files(row)
    pieces += [Piece("field", "reference", row.get("reference"))]
    pieces += [Piece("field", "columns", quoted_cells(columns))]
    if "turns" in row:
        pieces += pieces_of_turns(row, most_turns)
    else:
        pieces.append(Piece("sampled", "completion", row.get("completion_text")))
    if "finish_reason" in row:
        ended = f"{ending(row)}{' and' if 'turns' in row else ', after'}"
        pieces.append(Piece("field", "ended by", f"{ended} {counted(row['tokens'], 'token')}"))
    for name in ("score", "reward"):
        if name in row:
            pieces.append(Piece("field", name, cell(row[name])))
    pieces.append(Piece("field", "parts", quoted_cells(row.get("parts") or {})))
    for name, message in (row.get("errors") or {}).items():
        if message is not None:
            pieces.append(Piece("error", "error", f"{name}: {message}"))
    if "kept" in row:
        advantage = f"{cell(row['advantage'])}, mean ratio {cell(row['mean_ratio'])}"
        dropped = f"dropped: {row['drop_reason']}"
        pieces.append(Piece("field", "advantage", advantage if row["kept"] else dropped))
    return pieces


def pieces_of_files(shown: Mapping[str, Any], turn: int | None = None) -> list[Piece]:
    """Return the pictures and clips of a row's prompt, or of a turn's observation."""
    lines = {"image": picture_line, "audio": clip_line}
    return [
        Piece("picture", WORDS[modality], line(file), turn, file if number < MOST_FILES else None)
        for modality, line in lines.items()
        for number, file in enumerate(shown.get(MEDIA[modality]) or ())
    ]


def picture_line(image: Mapping[str, Any]) -> str:
    """Return text such as `PNG, 40 × 20, 2.5 kB, 0.png` for a picture of prompts/2."""
    from PIL import Image

    with Image.open(io.BytesIO(image["bytes"])) as opened:
        pixels = f"{opened.width} × {opened.height}"
        facts = [opened.format, pixels, size(len(image["bytes"]))]
    return ", ".join([*facts, image["path"]] if image["path"] else facts)


def clip_line(clip: Mapping[str, Any]) -> str:
    """Return text such as `FLAC, 2.5 s, 16,000 Hz, 40 kB, 0.flac` for a clip of prompts/2."""
    facts = [size(len(clip["bytes"])), *([clip["path"]] if clip["path"] else [])]
    if find_spec("soundfile"):
        import soundfile

        about = soundfile.info(io.BytesIO(clip["bytes"]))
        facts = [about.format, f"{about.duration:.3g} s", f"{about.samplerate:,} Hz", *facts]
    return ", ".join(facts)


def quoted_cells(cells: Mapping[str, Any]) -> str:
    """Return `mean 0.25 · std 0.125`; the names come from a recipe or a source and are quoted."""
    return " · ".join(
        f"{quoted_name(name)} {cell(content)}"
        for name, content in cells.items()
        if content not in ([], {})
    )


def ending(row: Mapping[str, Any]) -> str:
    """Return why a rollout ended, such as `length`, or `max_turns, after 3 turns`."""
    if "turns" not in row:
        return row["finish_reason"]
    return f"{row['end_reason']}, after {counted(len(row['turns']), 'turn')}"


def turn_fields(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace the ids in turns of rollouts/2 by their counts, `observation_tokens` and
    `restart_tokens`. The latter is None if no new sequence begins. `tool_calls` and `info` are
    parsed from JSON."""
    rows = []
    for turn in turns:
        fields = dict(turn)
        restart_ids = fields.pop("restart_ids")
        fields["observation_tokens"] = len(fields.pop("observation_ids"))
        fields["restart_tokens"] = None if restart_ids is None else len(restart_ids)
        fields["tool_calls"] = read_calls(fields["tool_calls"])
        with suppress(ValueError):
            fields["info"] = None if fields["info"] is None else read_json(fields["info"])
        rows.append(fields)
    return rows


def pieces_of_turns(row: Mapping[str, Any], most: int | None = None) -> list[Piece]:
    """Return title, sampled text, tool calls, errors and observation of each turn of a row, whose
    `turns` come from `turn_fields`. Of more than `most` turns, the first and the last ones."""
    turns = row["turns"]
    num_hidden = 0 if most is None else max(len(turns) - most, 0)
    first_hidden = len(turns) if most is None else most - _LAST
    earned = row.get("turn_rewards")
    has_rewards = earned is not None and len(earned) == len(turns)
    pieces = []
    for index, turn in enumerate(turns):
        if num_hidden and index == first_hidden:
            pieces.append(Piece("note", "left out", counted(num_hidden, "turn")))
        if num_hidden and first_hidden <= index < len(turns) - _LAST:
            continue
        facts = [f"{counted(turn['length'], 'token')}, {turn['finish_reason']}"]
        if has_rewards:
            facts.append(f"reward {number(earned[index])}")
        elif turn["reward"] is not None:
            facts.append(f"environment's reward {number(turn['reward'])}")
        facts.append(f"{number(turn['seconds'])} s")
        if turn["observation_tokens"]:
            facts.append(f"then {counted(turn['observation_tokens'], 'token')} of observation")
        restart = failure = ""
        if turn["restart_tokens"] is not None:
            num_tokens = counted(turn["restart_tokens"], "token")
            restart = f"a new sequence begins with {num_tokens}: the history was rewritten"
        info = turn["info"]
        if isinstance(info, dict) and FAILURE_INFO in info:
            failure = _as_text(info[FAILURE_INFO])
            info = {name: note for name, note in info.items() if name != FAILURE_INFO}
        calls = [
            f"{call['name']} {_as_text(call.get('arguments', {}))}"
            if isinstance(call, dict) and isinstance(call.get("name"), str)
            else _as_text(call)
            for call in turn["tool_calls"]
        ]
        pieces += [
            Piece("restart", "restart", restart, index),
            Piece("title", f"turn {index}", " · ".join(facts), index),
            Piece("sampled", "sampled", turn["text"], index),
            Piece("policy", "calls", "\n".join(calls), index),
            Piece("error", "parse error", turn["parse_error"] or "", index),
            Piece("observation", "observation", turn["observation"], index),
            *pieces_of_files(turn, index),
            Piece("note", "info", _as_text(info) if info else "", index),
            Piece("error", "failure", failure, index),
        ]
    return pieces


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


# -- a whole version


def numbers_of(version: Version, most_bytes: int = MOST_BYTES) -> dict[str, Any] | None:
    """Count the episodes in the first shards of a rollouts version. None if it has no turns. Raises
    CorruptError, LineageError."""
    if version.ref.kind != "rollouts" or "turns" not in schema_of(version).names:
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
    yield (
        "tool calls",
        f"{numbers['tool_calls']:,}, {number(numbers['mean_tool_calls'])} an episode",
    )
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
    yield (
        "environment",
        f"{number(numbers['environment_seconds'] / num_counted)} s an episode, {slowest}",
    )


def ends_in_words(numbers: Mapping[str, Any]) -> str:
    """Return text such as `answered 9 (75.0%) · timeout 3 (25.0%)`."""
    return " · ".join(
        f"{printable(reason)} {count:,} ({share(count / numbers['rollouts'])})"
        for reason, count in numbers["end_reasons"].items()
    )


def failures_in_words(numbers: Mapping[str, Any]) -> str:
    """Return text such as `2 timeout, 1 environment_error`."""
    counts = {reason: numbers["end_reasons"].get(reason, 0) for reason in FAILURES}
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
