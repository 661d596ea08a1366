"""Small line charts as SVG text: nothing is fetched, nothing is installed for it.

    svg([Panel("mean reward", [(1, 0.2, 0.0), (2, 0.5, 0.0)])], "iteration")

`said` says the same in words, for whoever sees no picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from .words import number

MOST_POINTS = 200
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 180, 66, 14, 30, 26
_INK, _LINE, _GRID = "#334155", "#2563eb", "#e2e8f0"


class Panel(NamedTuple):
    """One curve: points (x, y, half the length of its error bar), x rising; y None where there is
    no value."""

    title: str
    points: Sequence[tuple[int, float | None, float]]


def thinned(panels: Sequence[Panel]) -> list[Panel]:
    """Those panels that have a value, with the points that have one: at most `MOST_POINTS`."""
    shown = [panel._replace(points=_thinned(panel.points)) for panel in panels]
    return [panel for panel in shown if panel.points]


def said(panels: Sequence[Panel]) -> str:
    """`mean reward 0.2 → 0.5`, panel by panel."""
    return "; ".join(
        f"{panel.title} {number(panel.points[0][1])} → {number(panel.points[-1][1])}"
        for panel in panels
    )


def svg(panels: list[Panel], x_name: str) -> str:
    """The picture itself, on a ground of its own, since a page may be dark or light."""
    across = min(2, len(panels))
    width, height = across * _WIDTH, math.ceil(len(panels) / across) * _HEIGHT
    drawn = "".join(
        f'<g transform="translate({index % across * _WIDTH} '
        f'{index // across * _HEIGHT})">{_panel(panel, x_name)}</g>'
        for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 '
        f'{width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{_INK}">'
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>{drawn}</svg>'
    )


def _thinned(points: Sequence[tuple[int, float | None, float]]) -> list[tuple[int, float, float]]:
    """Those with a finite value, at most `MOST_POINTS`, evenly spaced, first and last among
    them."""
    known = [point for point in points if point[1] is not None and math.isfinite(point[1])]
    if len(known) <= MOST_POINTS:
        return known
    return [known[index * (len(known) - 1) // (MOST_POINTS - 1)] for index in range(MOST_POINTS)]


def _panel(panel: Panel, x_name: str) -> str:
    xs = [x for x, _, _ in panel.points]
    low = min(y - error for _, y, error in panel.points)
    high = max(y + error for _, y, error in panel.points)
    levels = (low, (low + high) / 2, high) if high > low else (low,)
    room = (high - low) * 0.05 or 1.0
    low, high = low - room, high + room
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / (xs[-1] - xs[0]) if xs[-1] > xs[0] else 0.5
        return round(_LEFT + across * (right - _LEFT), 1), round(
            bottom - (y - low) / (high - low) * (bottom - _TOP), 1
        )

    parts = [
        f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600">{escape(panel.title)}</text>'
    ]
    for y in levels:
        place = at(xs[0], y)[1]
        parts.append(f'<path d="M{_LEFT} {place}H{right}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{place + 4}" text-anchor="end">{y:.3g}</text>')
    for x, anchor in (
        {xs[0]: "start", xs[-1]: "end"}.items() if len(xs) > 1 else {xs[0]: "middle"}.items()
    ):
        parts.append(
            f'<text x="{at(x, low)[0]}" y="{_HEIGHT - 9}" text-anchor="{anchor}">{escape(x_name)} '
            f"{x}</text>"
        )
    for x, y, error in panel.points:
        if error:
            (place, above), (_, below) = at(x, y + error), at(x, y - error)
            parts.append(
                f'<path d="M{place} {above}V{below}" stroke="{_LINE}" stroke-opacity="0.5"/>'
            )
    places = [at(x, y) for x, y, _ in panel.points]
    line = " ".join(f"{x},{y}" for x, y in places)
    parts.append(
        f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="2" '
        'stroke-linejoin="round"/>'
    )
    if len(places) <= 30:
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{_LINE}"/>' for x, y in places]
    return "".join(parts)
