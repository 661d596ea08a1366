"""Render the Jinja2 templates (`*.j2`) of this folder: HTML and SVG with foreign text escaped,
markdown with foreign text quoted. Look here for what keeps a page safe.

A model's text may hold markup, script, pictures that a browser would fetch, control characters, or
megabytes. The filter `foreign` keeps its lines, spells out unprintable characters and cuts it;
Jinja2 escapes the rest. In markdown the filter `quoted` turns it into one code span.
"""

from __future__ import annotations

import base64
import io
import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from quiver.schemas.errors import printable

from . import episodes, words
from .gather import metric
from .lineage import origin_of

LIMIT = 1200
SPAN_LIMIT = 300
MOST_TURNS = 8
"""Turns shown of an episode on the page of a run."""
_SIDE = 192
"""Longest side of a small picture, in pixels."""
_RATE = 16_000
"""Samples a second of a clip in a page."""
_SECONDS = 20
"""Most seconds of one."""


def render(name: str, **context: Any) -> str:
    """Render the template `name`."""
    return _ENVIRONMENT.get_template(name).render(context)


def page(macro: str, *arguments: Any, template: str = "pages.md.j2") -> str:
    """Render a macro of a template with `arguments`; default: markdown for one of Prefect's
    pages."""
    return getattr(_ENVIRONMENT.get_template(template).module, macro)(*arguments).strip()


def lines(macro: str, *arguments: Any) -> list[str]:
    """Render a macro of `terminal.txt.j2`: lines for a terminal."""
    return page(macro, *arguments, template="terminal.txt.j2").splitlines()


def quoted(text: str, limit: int = SPAN_LIMIT) -> str:
    """Return foreign text as one code span of at most `limit` characters.

    Backticks, which could end the span, are replaced. Cut text ends in an ellipsis. Empty text
    stays empty.
    """
    shown = printable(text[: limit + 1], limit).replace("`", "ˋ")
    return f"`{shown}`" if shown else ""


def markdown_cell(content: Any) -> str:
    """Return a cell of a markdown table: a number as text, or text that is our own or `quoted`."""
    text = content if isinstance(content, str) else words.number(content)
    # a pipe ends the cell, and renderers disagree on how many backslashes prevent that
    return text.replace("|", "∣")


def foreign(text: str, limit: int = LIMIT) -> str:
    """Return at most `limit` characters of foreign text, with its line breaks."""
    lines = "\n".join(printable(line, limit) for line in text[: limit + 1].split("\n"))
    return lines if len(lines) <= limit else lines[: limit - 1] + "…"


def as_json(plain: Any) -> str:
    """Return indented JSON for a person, with sorted keys."""
    return json.dumps(plain, indent=2, ensure_ascii=False, sort_keys=True, default=str)


def data_url(image: dict[str, Any]) -> str:
    """Shrink a picture of prompts/2 and return it as a data URL, so that a page needs no other
    file."""
    from quiver.stages.model.media.decoder import open_image

    small = open_image(image["bytes"])
    small.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    small.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def clip_url(clip: dict[str, Any]) -> str:
    """Return the start of a clip of prompts/2 as a data URL, for a page's player."""
    if not find_spec("soundfile"):
        return "data:,"
    import soundfile

    from quiver.stages.model.media.decoder import open_clip

    samples, rate = open_clip(clip["bytes"], _RATE)
    content = io.BytesIO()
    soundfile.write(content, samples[: _SECONDS * rate], rate, format="FLAC")
    return f"data:audio/flac;base64,{base64.b64encode(content.getvalue()).decode()}"


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(("html.j2", "svg.j2"), default=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {
    "cell": markdown_cell,
    "counted": words.counted,
    "clip_url": clip_url,
    "data_url": data_url,
    "ending": episodes.ending,
    "ends": episodes.ends_in_words,
    "files": episodes.pieces_of_files,
    "foreign": foreign,
    "json": as_json,
    "metric": metric,
    "number": words.number,
    "origin": origin_of,
    "quoted": quoted,
    "printable": partial(printable, limit=LIMIT),
    "score": words.score_of,
    "share": words.share,
    "short_hashes": words.with_short_hashes,
    "size": words.size,
    "turns": partial(episodes.pieces_of_turns, most=MOST_TURNS),
    "unscored": words.unscored_of,
}
