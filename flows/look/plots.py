"""Draw small line charts as SVG text, without a network or a plotting library. Look here for the
curves of a report.

    picture = draw([Panel("mean reward", [(1, 0.2, 0.0), (2, 0.5, 0.0)])], "iteration")
    picture.svg, picture.words                   # "<svg …", "mean reward 0.2 → 0.5"

This module computes positions; the template `chart.svg.j2` draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import templates
from .words import number

MOST_POINTS = 200
_SHARES = ("clip_fraction",)
"""Columns of an updates table that hold shares."""
_MOST = 1e100
"""Numbers beyond it are not drawn, like infinity: their differences would overflow."""
# edges of a curve within its panel, in pixels; an SVG's y grows downwards
_LEFT = 66
_RIGHT = 346
_TOP = 30
_BOTTOM = 154


class Panel(NamedTuple):
    """One curve: points (x, y, half the length of its error bar), x rising, y None if missing.
    `beside` holds the points of another run, for comparison. The axis of a share begins at 0."""

    title: str
    points: Sequence[tuple[int, float | None, float]]
    beside: Sequence[tuple[int, float | None, float]] = ()
    is_share: bool = False


class Picture(NamedTuple):
    """Panels as SVG, and the same as text for readers who see no picture."""

    svg: str
    words: str


def score_panel(evaluations: Iterable[tuple[int, Mapping[str, Any]]]) -> Panel:
    """Return held-out scores with their standard errors, given (x, metrics)."""
    points = [(x, metrics["score"], metrics["stderr"] or 0.0) for x, metrics in evaluations]
    return Panel("held-out score", points)


def night_panel(evaluations: Iterable[tuple[int, Mapping[str, Any]]]) -> Panel:
    """Return the scores of nights beside their baselines' scores on the same rows, given (x,
    metrics). Each night has rows of its own."""
    measured = list(evaluations)
    baselines = [(x, metrics.get("baseline")) for x, metrics in measured]
    in_use = score_panel((x, baseline) for x, baseline in baselines if baseline)
    candidates = score_panel(measured)
    return Panel("held-out score; dashed: in use", candidates.points, in_use.points)


def step_panels(rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> list[Panel]:
    """Return one panel per column of an updates table, over `step`."""
    return [
        Panel(name, [(row["step"], row[name], 0.0) for row in rows], is_share=name in _SHARES)
        for name in columns
    ]


def draw(panels: Sequence[Panel], x_name: str) -> Picture | None:
    """Draw two panels per row. The chart has its own background, since a page may be dark or light.
    A panel without values is left out; returns None if no panel has one."""
    thinned = [
        panel._replace(points=_thinned(panel.points), beside=_thinned(panel.beside))
        for panel in panels
    ]
    drawn = [panel for panel in thinned if panel.points]
    if not drawn:
        return None
    svg = templates.render(
        "chart.svg.j2",
        charts=[_chart(panel) for panel in drawn],
        x_name=x_name,
        left=_LEFT,
        right=_RIGHT,
        bottom=_BOTTOM,
    )
    words = (
        f"{panel.title} {number(panel.points[0][1])} → {number(panel.points[-1][1])}"
        for panel in drawn
    )
    return Picture(svg, "; ".join(words))


def _thinned(points: Sequence[tuple[int, float | None, float]]) -> list[tuple[int, float, float]]:
    """Return at most `MOST_POINTS` points that can be drawn, evenly spaced, with the first and the
    last."""
    finite = [
        point
        for point in points
        if point[1] is not None and abs(point[1]) < _MOST and abs(point[2]) < _MOST
    ]
    last = len(finite) - 1
    count = min(len(finite), MOST_POINTS)
    return [finite[index * last // max(count - 1, 1)] for index in range(count)]


def _chart(panel: Panel) -> dict[str, Any]:
    """Return the coordinates that the template needs for one panel, in pixels."""
    points = [*panel.points, *panel.beside]
    first_x = min(x for x, _, _ in points)
    x_range = max(x for x, _, _ in points) - first_x
    lowest = min(y - error for _, y, error in points)
    highest = max(y + error for _, y, error in points)
    margin = (highest - lowest) * 0.05 or abs(highest) * 0.05
    if margin < 1 / _MOST:
        margin = 1.0
    floor = lowest - margin
    ceiling = highest + margin
    if panel.is_share:
        floor = 0.0
        ceiling = min(ceiling, 1.0)
    elif lowest >= 0:  # what was never negative has no room below 0
        floor = max(floor, 0.0)
    y_range = ceiling - floor

    def across(x: float) -> float:
        portion = (x - first_x) / x_range if x_range else 0.5
        return round(_LEFT + portion * (_RIGHT - _LEFT), 1)

    def down(y: float) -> float:
        return round(_BOTTOM - (y - floor) / y_range * (_BOTTOM - _TOP), 1)

    curves = filter(None, (panel.points, panel.beside))
    return {
        "title": panel.title,
        "levels": [(down(y), f"{y:.6g}") for y in ticks(floor, ceiling, 4)],
        "marks": [
            (across(x), round(x)) for x in ticks(first_x, first_x + x_range, 6, least_step=1)
        ],
        "error_bars": [
            (across(x), down(y + error), down(y - error)) for x, y, error in panel.points if error
        ],
        "curves": [[(across(x), down(y)) for x, y, _ in curve] for curve in curves],
    }


def ticks(low: float, high: float, most: int, least_step: float = 0.0) -> list[float]:
    """Return up to `most` + 1 round numbers from `low` to `high`. Their distance is 1, 2 or 5 times
    a power of ten, and at least `least_step`. Returns [`low`] if `high` is not above it."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = (power * factor for factor in (1, 2, 5, 10))
    step = max(next(step for step in steps if step * most >= high - low), least_step)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
