"""Jinja2 over the `*.j2` files of this folder: HTML and SVG in which everything foreign is escaped.

What a model wrote may hold markup, control characters, megabytes. The filter `foreign` keeps its
lines, spells out every character that is not printable and cuts it; Jinja2 escapes what remains.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from quiver.schemas.errors import printable

from . import words
from .gather import metric

LIMIT = 1200


def render(name: str, **context: Any) -> str:
    """The template `name` filled in."""
    return _ENVIRONMENT.get_template(name).render(context)


def foreign(text: str) -> str:
    """Foreign text with its lines, at most `LIMIT` characters of it."""
    lines = "\n".join(printable(line, LIMIT) for line in text[: LIMIT + 1].split("\n"))
    return lines if len(lines) <= LIMIT else lines[: LIMIT - 1] + "…"


def as_json(plain: Any) -> str:
    """JSON for a person, its keys sorted."""
    return json.dumps(plain, indent=2, ensure_ascii=False, sort_keys=True, default=str)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {
    "counted": words.counted,
    "foreign": foreign,
    "json": as_json,
    "metric": metric,
    "number": words.number,
    "printable": partial(printable, limit=LIMIT),
    "score": words.score_of,
    "size": words.size,
}
