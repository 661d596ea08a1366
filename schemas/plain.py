"""Plain JSON, read strictly: no key twice, no NaN, no number that a float can not hold, no nesting
without end.

    fields = read_json(raw)     # ValueError, whatever is wrong

Not of the spine: it is `json.loads`, which refuses more.
"""

from __future__ import annotations

import json
import math
from typing import Any

MOST_LEVELS = 100
"""Of nesting. Libraries give up at some hundreds, each at another depth."""
_MOST_DIGITS = 300
"""Of a number: a float holds 308."""


def read_json(raw: bytes | str) -> Any:
    """What JSON text holds. ValueError says what is wrong with it."""
    try:
        content = json.loads(
            raw,
            object_pairs_hook=no_key_twice,
            parse_constant=no_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_too_deep(content):
        raise ValueError(TOO_DEEP)
    return content


TOO_DEEP = f"it is nested more than {MOST_LEVELS} levels deep"


def is_too_deep(content: Any) -> bool:
    """Whether lists and objects in it hold one another on more than `MOST_LEVELS` levels."""
    containers = [content]
    for _ in range(MOST_LEVELS + 1):
        containers = [
            child
            for parent in containers
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not containers:
            return False
    return True


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for JSON that refuses an object with the same key twice.
    ValueError."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands twice")
    return data


def no_constant(name: str) -> float:
    """A `parse_constant` for JSON that refuses NaN and Infinity. ValueError."""
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, at most {_MOST_DIGITS} are read")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is more than a float holds")
    return number
