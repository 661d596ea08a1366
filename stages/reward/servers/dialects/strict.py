"""Read untrusted JSON strictly: as in RFC 8259, shallow, no duplicate keys, numbers that are
numbers.

The same reader serves both sides: answers of servers that score for us, and requests to the server
that scores for others.

>>> read_json(b'{"score": 0.5}')
{'score': 0.5}
>>> read_json(b'[NaN]')
Traceback (most recent call last):
quiver.stages.reward.servers.dialects.strict.MalformedError: is not JSON: NaN is not JSON: '[NaN]'
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quiver.schemas import plain
from quiver.schemas.errors import printable
from quiver.schemas.outside import LARGEST, read_number
from quiver.stages.reward.scoring import Part, as_extra

_T = TypeVar("_T", bound=BaseModel)


class MalformedError(ValueError):
    """A message breaks its dialect; the text says what was expected and found."""


def read_json(raw: bytes) -> Any:
    """Parse `raw`. Raises MalformedError for invalid UTF-8, half a character, or anything that
    `plain.read_json` refuses."""
    try:
        text = raw.decode()
        document = plain.read_json(text)
        if "\\u" in text:  # \ud800 alone is half a character: no file and no wire can hold it
            json.dumps(document, ensure_ascii=False).encode()
    except ValueError as error:
        shown = printable(raw[:60].decode(errors="replace"), 60)
        raise MalformedError(
            f"is not JSON: {printable(error, 100)}: {shown!r}" if raw else "is empty"
        ) from None
    return document


def read_as(cls: type[_T], document: Any) -> _T:
    """Return `document` as a `cls`, without conversions. MalformedError names the place that is
    wrong."""
    try:
        return cls.model_validate(document, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the answer"
        raise MalformedError(printable(f"{place}: {problem['msg']}", 160)) from None


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
    low, high = config.range or (-LARGEST, LARGEST)
    value = None
    problem = None
    if isinstance(error, str) and error:
        problem = printable(error)
    elif number is not None or error is not None:
        try:
            value = read_number(number)
        except ValueError as refusal:
            problem = f"gave {refusal}"
    if value is not None and not low <= value <= high:
        problem = f"gave {value:g}, outside {low:g} to {high:g}"
        value = None
    if value is not None and config.rescale:
        value = (value - low) / (high - low)
    return Part(value, problem, None if extra is None else as_extra(extra))
