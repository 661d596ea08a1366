"""What a stranger sent, read strictly: JSON as RFC 8259 has it, shallow, no key twice; numbers that
are numbers.

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
import math
import re
from typing import Any

from quiver.schemas.errors import printable
from quiver.schemas.manifest import no_key_twice
from quiver.stages.reward.scoring import LARGEST, Part, as_extra

MAX_DEPTH = 64
_TEXT = re.compile(
    r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL
)  # possessive: linear in whatever comes, closed or not
_BRACKET = re.compile(r"[\[\]{}]")


class MalformedError(ValueError):
    """What came is not of its dialect; the message says what was expected and found."""


def read_json(raw: bytes) -> Any:
    """The value in `raw`. MalformedError: no UTF-8, no JSON, NaN, 1e400, a key twice, half a
    character, too deep nesting."""
    try:
        text = raw.decode()
        _refuse_depth(text)
        data = json.loads(
            text, object_pairs_hook=no_key_twice, parse_constant=_no_constant, parse_float=_finite
        )
        if "\\u" in text:
            json.dumps(
                data, ensure_ascii=False
            ).encode()  # \ud800 alone is half a character: no file and no wire can hold it
    except ValueError as error:
        shown = printable(raw[:60].decode(errors="replace"), 60)
        raise MalformedError(
            f"is not JSON: {printable(error, 100)}: {shown!r}" if raw else "is empty"
        ) from None
    return data


def _refuse_depth(text: str) -> None:
    """Counted before parsing, so that no parser descends into it."""
    depth = 0
    for bracket in _BRACKET.finditer(_TEXT.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{printable(text, 20)} is beyond every float")
    return value


def as_dict(value: Any, what: str) -> dict[str, Any]:
    """`value` where it is an object. MalformedError."""
    if not isinstance(value, dict):
        raise MalformedError(f"{what} is {shape(value)}, expected an object")
    return value


def as_list(value: Any, what: str, length: int | None = None) -> list[Any]:
    """`value` where it is a list, of `length` items if that is given. MalformedError."""
    if not isinstance(value, list):
        raise MalformedError(f"{what} is {shape(value)}, expected a list")
    if length is not None and len(value) != length:
        raise MalformedError(f"{what} has {len(value)} items, expected {length}")
    return value


def by_index(items: list[Any], what: str) -> list[dict[str, Any]]:
    """Objects in the order of their `index`, which must be each of 0 … n−1 once. MalformedError."""
    found: dict[int, dict[str, Any]] = {}
    for item in items:
        index = as_dict(item, f"an item of {what}").get("index")
        if type(index) is not int or not 0 <= index < len(items) or index in found:
            raise MalformedError(
                f"{what} has index {printable(repr(index), 40)}, expected each of 0 to "
                f"{len(items) - 1} once"
            )
        found[index] = item
    return [found[index] for index in range(len(items))]


def as_part(
    value: Any, low_high: tuple[float, float] | None, rescale: bool = False, extra: Any = None
) -> Part:
    """`value` as the part of one row; an error unless it is a number, finite as float32 and within
    `low_high`.

    `rescale` maps `low_high` linearly to 0 … 1. Text that looks like a number is text, and true is
    not 1.

    >>> as_part(8, (0, 10), rescale=True).value, as_part("8", None).error, as_part(11, (0, 10)).error
    (0.8, 'gave text, expected a number', 'gave 11, outside 0 to 10')
    """
    told = None if extra is None else as_extra(extra)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Part(error=f"gave {shape(value)}, expected a number", extra=told)
    if not abs(value) <= LARGEST:
        return Part(error="gave a number that is not finite as float32", extra=told)
    if low_high is not None and not low_high[0] <= value <= low_high[1]:
        return Part(error=f"gave {value:g}, outside {low_high[0]:g} to {low_high[1]:g}", extra=told)
    if rescale and low_high is not None:
        value = (value - low_high[0]) / (low_high[1] - low_high[0])
    return Part(float(value), extra=told)


def shape(value: Any) -> str:
    """What kind of JSON `value` is, in a word."""
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), "null")
