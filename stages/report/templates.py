"""The pieces of a page: HTML text in which everything foreign is escaped. No script, nothing
fetched; the page forbids both itself.

What a model wrote may hold markup, control characters, megabytes: it stands in `text` cut, with its
lines kept and every character that is not printable spelled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from quiver.schemas.errors import printable

from .plots import Panel, said, svg, thinned
from .words import number

LIMIT = 1200
_STYLE = """
:root { color-scheme: light dark;
  --ink: #1e293b; --soft: #64748b; --line: #e2e8f0; --ground: #ffffff; --shade: #f8fafc; --warn: #b45309; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --ground: #0f172a; --shade: #1e293b; --warn: #fbbf24; }
}
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1.5rem 4rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--ground); }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
nav a { margin-right: 1rem; } a { color: inherit; } .soft { color: var(--soft); } .lead { font-size: 1.1rem; }
.warn { border-left: 3px solid var(--warn); padding: .1rem .8rem; margin: .8rem 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; white-space: nowrap; } td.number { text-align: right; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; max-width: 34rem; }
details { margin: .4rem 0; } details pre { background: var(--shade); padding: .8rem; max-width: none; }
figure { margin: 0; } figure svg { max-width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
"""


class Html(str):
    """Text that is markup already."""


def text(foreign: object, limit: int = LIMIT) -> Html:
    """Foreign text, its lines kept."""
    whole = str(foreign)
    lines = "\n".join(printable(line, limit) for line in whole[: limit + 1].split("\n"))
    cut = lines if len(lines) <= limit else lines[: limit - 1] + "…"
    return Html(f"<pre>{escape(cut)}</pre>")


def cell(value: Any) -> str:
    """A cell of a table: markup as it is, numbers as a person reads them, all else escaped."""
    if isinstance(value, Html):
        return f"<td>{value}</td>"
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return f'<td class="number">{number(value)}</td>'
    return f"<td>{escape(printable(value, LIMIT))}</td>"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """A table that scrolls by itself where it is wider than the page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>\n" for row in rows)
    return Html(
        "<div "
        f'class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def figure(panels: Sequence[Panel], x_name: str) -> Html:
    """Curves, two a row, with the same in words for whoever sees none; nothing where there is
    nothing to draw."""
    shown = thinned(panels)
    if not shown:
        return Html("")
    return Html(
        f'<figure role="img" aria-label="{escape(said(shown))}">{svg(shown, x_name)}</figure>'
    )


def paragraph(words: str, kind: str = "") -> Html:
    """Our own words."""
    return Html(f'<p class="{kind}">{escape(words)}</p>' if kind else f"<p>{escape(words)}</p>")


def folded(title: str, inside: str) -> Html:
    """What is there for whoever opens it."""
    return Html(f"<details><summary>{escape(title)}</summary><pre>{escape(inside)}</pre></details>")


def section(name: str, *parts: Html) -> tuple[str, Html]:
    """A part of the page with its heading; nothing where it is empty."""
    inside = "\n".join(filter(None, parts))
    anchor = name.lower().replace(" ", "-")
    return name, Html(
        f'<section><h2 id="{anchor}">{escape(name)}</h2>\n{inside}</section>' if inside else ""
    )


def page(
    title: str, latest: str, lead: Sequence[Html], sections: Sequence[tuple[str, Html]]
) -> str:
    """The whole file. `latest` is what `stage.is_current` reads again."""
    shown = [(name, inside) for name, inside in sections if inside]
    links = "".join(
        f'<a href="#{name.lower().replace(" ", "-")}">{escape(name)}</a>' for name, _ in shown
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta name="quiver-latest" content="{escape(latest)}">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *lead,
            f"<nav>{links}</nav>",
            *(inside for _, inside in shown),
            "</body></html>\n",
        ]
    )
