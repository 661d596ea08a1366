"""Jinja2 over the `*.j2` files of this folder: HTML and SVG in which everything foreign is escaped,
and markdown in which it is quoted.

What a model wrote may hold markup, script, pictures that a browser would fetch, control characters,
megabytes. The filter `foreign` keeps its lines, spells out every character that is not printable
and cuts it; Jinja2 escapes what remains. In markdown the filter `quoted` makes one code span of it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from quiver.schemas.errors import printable

from . import episodes, thumbnails, words
from .gather import metric

LIMIT = 1200
SPAN_LIMIT = 300
MOST_TURNS = 8
"""Of an episode on the page of a run."""


def render(name: str, **context: Any) -> str:
    """The template `name` filled in."""
    return _ENVIRONMENT.get_template(name).render(context)


def page(macro: str, *arguments: Any) -> str:
    """What a macro of `pages.md.j2` makes of `arguments`: markdown for one of Prefect's pages."""
    return getattr(_ENVIRONMENT.get_template("pages.md.j2").module, macro)(*arguments).strip()


def quoted(text: str, limit: int = SPAN_LIMIT) -> str:
    """Foreign text as one code span of at most `limit` characters, without a backtick that could
    end it, and an ellipsis where it was cut; nothing stays nothing."""
    shown = printable(text[: limit + 1], limit).replace("`", "ˋ")
    return f"`{shown}`" if shown else ""


def cell(content: Any) -> str:
    """A cell of a markdown table: our own words, a number, or what is `quoted`."""
    text = content if isinstance(content, str) else words.number(content)
    # how many backslashes keep a pipe from ending the cell, renderers do not agree on
    return text.replace("|", "∣")


def foreign(text: str, limit: int = LIMIT) -> str:
    """Foreign text with its lines, at most `limit` characters of it."""
    lines = "\n".join(printable(line, limit) for line in text[: limit + 1].split("\n"))
    return lines if len(lines) <= limit else lines[: limit - 1] + "…"


def as_json(plain: Any) -> str:
    """JSON for a person, its keys sorted."""
    return json.dumps(plain, indent=2, ensure_ascii=False, sort_keys=True, default=str)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(("html.j2", "svg.j2"), default=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {
    "cell": cell,
    "counted": words.counted,
    "data_url": thumbnails.data_url,
    "ends": episodes.ends_in_words,
    "episode": partial(episodes.parts_of, most=MOST_TURNS),
    "foreign": foreign,
    "json": as_json,
    "metric": metric,
    "number": words.number,
    "quoted": quoted,
    "printable": partial(printable, limit=LIMIT),
    "score": words.score_of,
    "share": episodes.share,
    "size": words.size,
    "unscored": words.unscored_of,
}
