"""The base of every dialect: rows to send, their text for dialects without messages, and the parts
that answers become.

>>> messages = [{"role": "user", "content": "2 + 2?"}]
>>> as_text(messages, "{role}: {content}\\n")
'user: 2 + 2?\\n'
>>> fill("Q {prompt} A {answer}, not {{answer}}", {"prompt": "2 + 2?", "answer": 4})
'Q 2 + 2? A 4, not {answer}'
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from quiver.schemas.errors import printable
from quiver.schemas.outside import read_number
from quiver.stages.reward.scoring import Batch, Part, as_extra, cells_of

_FIELD = re.compile(r"\{\{(\w+(?:[.-]\w+)*)\}\}|\{(\w+(?:[ .-]\w+)*)\}")


class Row(NamedTuple):
    """One rollout to score. `prompt` is messages, or text. `completion_ids` and `finish_reason` are
    None if a dialect does not carry them."""

    id: str
    prompt: str | list[dict[str, Any]]
    completion: str
    columns: dict[str, Any]
    completion_ids: list[int] | None = None
    finish_reason: str | None = None


class Scored(NamedTuple):
    """The serving side's result for one row: a reward, or an error, or neither (nothing applies),
    and its parts."""

    reward: float | None
    error: str | None
    parts: dict[str, float | None]
    extra: dict[str, Any]


_LIST_OF = {
    "id": "rollout_ids",
    "prompt": "prompts",
    "completion": "completions",
    "completion_ids": "completion_ids",
    "finish_reason": "finish_reason",
}
"""The batch's list of each field of a row."""


def as_rows(batch: Batch, columns: Iterable[str]) -> list[Row]:
    """Return the rows of a batch, with the named user columns, or fields `a.b` of them."""
    cells = {name: cells_of(name, batch) for name in columns}
    return [
        Row(
            columns={name: column[place] for name, column in cells.items()},
            **{field: batch[name][place] for field, name in _LIST_OF.items()},
        )
        for place in range(len(batch["rollout_ids"]))
    ]


def as_batch(rows: list[Row]) -> dict[str, list[Any]]:
    """Reverse `as_rows`, for rows that have the same columns. A column never hides one of the
    batch's own lists."""
    columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
    lists = {name: [getattr(row, field) for row in rows] for field, name in _LIST_OF.items()}
    return columns | lists


def as_text(prompt: str | list[dict[str, Any]], message_template: str) -> str:
    """Return a prompt as text: itself, or its messages one after the other, each by the template.
    The calls of a message follow its content as JSON."""
    if isinstance(prompt, str):
        return prompt
    return "".join(fill(message_template, _with_calls(message)) for message in prompt)


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message or not message["tool_calls"]:
        return message
    calls = to_json([call["function"] for call in message["tool_calls"]])
    return {**message, "content": "\n".join(filter(None, [message["content"], calls]))}


def fields(template: str) -> set[str]:
    """Return the names that a template asks for. Names with a blank may be prose (`fill`)."""
    return {match[2] for match in _FIELD.finditer(template) if match[2]}


def of_several_words(template: str) -> set[str]:
    """Return what stands in braces with dots, dashes or blanks, escaped or not."""
    names = {match[1] or match[2] for match in _FIELD.finditer(template)}
    return {name for name in names if not re.fullmatch(r"\w+", name)}


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Replace each {name} of `template` in one pass, so that braces in a value stay unchanged;
    {{name}} gives {name}.

    A name is words with dots or dashes between them; with blanks too if `values` has it, since
    `{your score}` is prose. Text is inserted unchanged, any other value as JSON. Other braces stay,
    such as those of JSON.
    """

    def replace(match: re.Match[str]) -> str:
        escaped, name = match.groups()
        if escaped:
            return f"{{{escaped}}}"
        if " " in name and name not in values:
            return match[0]
        text = values[name]
        return text if isinstance(text, str) else to_json(text)

    return _FIELD.sub(replace, template)


def to_json(cell: Any) -> str:
    """Return JSON of a column's cell, with dates as ISO text. Raises ValueError or TypeError for
    NaN, bytes and other values without JSON."""
    return json.dumps(cell, ensure_ascii=False, allow_nan=False, default=_plain)


def without_json(cells: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason for each cell that has no JSON, by name.

    >>> without_json({"answer": 7, "picture": b"7", "rate": float("nan")})
    {'picture': 'bytes has no JSON', 'rate': 'NaN and infinite numbers have no JSON'}
    """
    problems = {}
    for name, cell in cells.items():
        try:
            to_json(cell).encode()
        except TypeError as error:
            problems[name] = str(error)
        except UnicodeError:
            problems[name] = "half a character has no JSON"
        except ValueError:
            problems[name] = "NaN and infinite numbers have no JSON"
    return problems


def _plain(cell: Any) -> str:
    if isinstance(cell, datetime.date | datetime.time):
        return cell.isoformat()
    raise TypeError(f"{type(cell).__name__} has no JSON")


def as_part(number: Any, config: Any, extra: Any = None, error: Any = "") -> Part:
    """Return the part of one row from a server with this `config`, with `extra` beside it.

    Text in `error` is the row's failure. If `error` and `number` are null, nothing applies.
    Otherwise the number counts. It must be finite as float32 and within `config.range`, which
    `config.rescale` maps linearly to 0 … 1; else the part has an error. Text that looks like a
    number is text, and true is not 1.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(range=(0, 10), rescale=True)
    >>> as_part(8, config).value, as_part("8", config).error, as_part(11, config).error
    (0.8, 'gave text, expected a number', 'gave 11, outside 0 to 10')
    """
    low, high = config.range or (-math.inf, math.inf)
    reward = None
    problem = None
    if isinstance(error, str) and error:
        problem = printable(error)
    elif number is not None or error is not None:
        try:
            reward = read_number(number)
        except ValueError as refusal:
            problem = f"gave {refusal}"
    if reward is not None and not low <= reward <= high:
        problem = f"gave {reward:g}, outside {low:g} to {high:g}"
        reward = None
    if reward is not None and config.rescale:
        reward = (reward - low) / (high - low)
    return Part(reward, problem, None if extra is None else as_extra(extra))
