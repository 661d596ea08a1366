"""Strict reading of plain JSON: no duplicate key, NaN or number beyond a float, at most 100 levels.

    fields = read_json(raw)     # any problem is a ValueError

Not of the spine: it is a stricter `json.loads`.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable
from typing import Any

from .errors import printable

MOST_LEVELS = 100
"""Most levels of nesting. Libraries fail at some hundreds, each at another depth."""
_MOST_OF_PATH = 60
MOST_DIGITS = 300
"""Most digits of a whole number: a float ends at 1e308."""
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_BAD_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
"""Finds the escapes that can produce a NUL character or half a surrogate pair."""
_BAD_CHARACTER = re.compile("[\0\ud800-\udfff]")


def read_json(raw: bytes | str) -> Any:
    """Parse JSON text. Raises ValueError that says what is wrong with it."""
    text = raw if isinstance(raw, str) else raw.decode(json.detect_encoding(raw), "surrogatepass")
    zeros = text.encode(errors="surrogatepass").translate(_DIGITS_AS_ZEROS)
    has_long_number = b"0" * (MOST_DIGITS + 1) in zeros  # a search, since a parse hook is slow
    try:
        content = json.loads(
            text,
            object_pairs_hook=no_key_twice,
            parse_constant=no_constant,
            parse_int=_integer if has_long_number else int,
            parse_float=finite_float,
        )
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_too_deep(content):
        raise ValueError(TOO_DEEP)
    return content


def read_clean_json(text: str) -> Any:
    """Parse JSON for templates and tables.

    Like `read_json`, but raises ValueError also for a NUL or a lone surrogate in a text.
    """
    content = read_json(text)
    problem = problem_of(content) if _BAD_ESCAPE.search(text) else ""
    if problem:
        raise ValueError(problem)
    return content


TOO_DEEP = f"it is nested more than {MOST_LEVELS} levels deep"


def is_too_deep(content: Any) -> bool:
    """Return True if lists and objects are nested more than `MOST_LEVELS` deep."""
    containers = [content]
    for _ in range(MOST_LEVELS):
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


def problem_of(
    content: Any, *, bits: int = 0, with_texts: bool = True, levels: int = MOST_LEVELS
) -> str:
    """Describe the first problem in plain Python content, and its place; empty if there is none.

    A problem is a text, number or depth that `read_json`, or a consumer of its texts, would refuse.
    So is a date or time, which TOML reads: JSON makes a text of it on the way to another process.
    Other types are not checked.

    Args:
        bits: most bits of a whole number, including its sign. 0: at most `MOST_DIGITS` digits.
        with_texts: if true, texts are checked. JSON can escape the characters that they may not
            hold.
        levels: most levels of nesting.
    """
    waiting = [("", content, 0)]
    while waiting:
        path, node, level = waiting.pop()
        children: Iterable[tuple[Any, Any]] = ()
        problem = ""
        if isinstance(node, dict):
            children = [*node.items(), *(("a key", name) for name in node)]
        elif isinstance(node, list | tuple):
            children = enumerate(node)
        elif isinstance(node, str):
            problem = bad_text(node) if with_texts else ""
        elif isinstance(node, int) and bits and abs(node) >= 2 ** (bits - 1):
            problem = f"is a number of more than {bits} bits"
        elif isinstance(node, int) and abs(node) >= 10**MOST_DIGITS:
            problem = f"is a number of more than {MOST_DIGITS} digits"
        elif isinstance(node, float) and not math.isfinite(node):
            problem = "is not a finite number"
        elif isinstance(node, datetime.date | datetime.time):
            problem = "is a date or time: write it in quotes"
        if level >= levels and isinstance(node, dict | list | tuple):
            problem = f"is nested more than {levels} levels deep"
        if problem:
            return f"{printable(path, _MOST_OF_PATH) or 'it'} {problem}"
        waiting += [(f"{path}.{key}".strip("."), child, level + 1) for key, child in children]
    return ""


def bad_text(text: str) -> str:
    """Return why `text` cannot be rendered (NUL or a lone surrogate), or an empty string."""
    match = _BAD_CHARACTER.search(text)
    if match is None:
        return ""
    what = "NUL character" if match[0] == "\0" else f"lone surrogate {match[0]!a}"
    return f"has a {what} in its text, at position {match.start()}"


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse JSON objects with a duplicate key, as `object_pairs_hook`. Raises ValueError."""
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"a key occurs twice: {printable(twice, _MOST_OF_PATH)}")
    return data


def no_constant(name: str) -> float:
    """Refuse NaN and Infinity, as `parse_constant` for JSON. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > MOST_DIGITS:
        raise ValueError(f"a number has {digits} digits, at most {MOST_DIGITS} are read")
    return int(text)


def finite_float(text: str) -> float:
    """Refuse numbers beyond floats, such as 1e400, as `parse_float` for JSON. Raises ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is more than a float holds")
    return number


def flatten(node: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of `node` by their dotted path.

    Objects in a list are named by their role if they have unique ones, else by their position.
    """
    if isinstance(node, list) and node and all(isinstance(entry, dict) for entry in node):
        by_role = {str(entry.get("role", place)): entry for place, entry in enumerate(node)}
        node = by_role if len(by_role) == len(node) else dict(enumerate(node))
    if not isinstance(node, dict) or not node:
        return {path: node}
    leaves: dict[str, Any] = {}
    for name, child in node.items():
        leaves |= flatten(child, f"{path}.{name}" if path else name)
    return leaves


def without_nulls(node: Any) -> Any:
    """Return `node` without the members of objects that are null, at any depth."""
    if isinstance(node, dict):
        return {name: without_nulls(child) for name, child in node.items() if child is not None}
    return [without_nulls(child) for child in node] if isinstance(node, list) else node
