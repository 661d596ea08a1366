"""Write one self-contained HTML file about a whole run, read from its versions. Look here for
`quiver report`; it decides nothing and writes nothing else.

The same store gives the same bytes: no clock, no host name. The page shows the result first, then
warnings, curves, iterations, answers before and after, and the lineage. A run without a policy is
refused.

    path = write(Store("store"), "arith")            # store/arith/report.html
    write(Store("store"), "arith", policy="arith/policy@3")    # another line than the run's own
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, LineageError, QuiverError, printable
from quiver.stages.core.files import storage_errors, write_bytes
from quiver.stages.core.store import Store
from quiver.stages.core.store.places import is_url, locate

from . import samples, templates
from .gather import (
    STEP_COLUMNS,
    Gathered,
    Iteration,
    gather,
    metric,
    policy_number,
)
from .nights import HEADER
from .plots import Panel, draw, night_panel, score_panel, step_panels
from .troubles import warnings

FILE = "report.html"
_MOST_PARTS = 6


def default_path(store: str, run: str, name: str = FILE) -> Path:
    """Return where a report of `run` is written: the file `name` in the run's folder. If the store
    is a bucket, the current folder gets it, under all of its URL, such as
    `s3+bucket+rl+arith+report.html`."""
    path = f"{locate(store)}/{run}/{name}"
    return Path(path.replace("://", "+").replace("/", "+") if is_url(store) else path).absolute()


def write(
    store: Store,
    run: str,
    path: Path | str | None = None,
    beside: str | None = None,
    difference: Sequence[str] = (),
    policy: str | None = None,
) -> Path:
    """Write the report of `run` atomically.

    Args:
        path: Default: see `default_path`.
        beside: Another run, whose curves and iterations are shown for comparison.
        difference: Sentences on how the two runs compare.
        policy: End of the line to report. Default: the end of the run's own line.

    Raises ConfigError, CorruptError, LineageError, ResourceError.
    """
    target = Path(path or default_path(store.url, run))
    other = gather(store, beside) if beside else None
    content = render(store, gather(store, run, policy), other, difference).encode()
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with storage_errors(f"report {target}"):
            write_bytes(target, content)
    except QuiverError:
        raise
    except OSError as error:
        raise ConfigError(
            f"report {printable(target)}",
            f"cannot be written: {error.strerror}",
            next="name a file in an existing folder",
        ) from None
    return target


def render(
    store: Store,
    gathered: Gathered,
    beside: Gathered | None = None,
    difference: Sequence[str] = (),
) -> str:
    """Return the page as text."""
    evaluations = gathered.evaluations
    last = gathered.iterations[-1] if gathered.iterations else None
    extremes = None
    groups: list[dict[str, Any]] = []
    if last and last.rollouts and last.rewards:
        with suppress(LineageError):  # their rows expired
            rewards = store.open(last.rewards.ref)
            extremes = samples.best_and_worst(store, rewards)
            groups = samples.groups(store, rewards)
    compared = None
    if len(evaluations) > 1:
        with suppress(LineageError):  # the page says that the rollouts are gone
            compared = samples.before_and_after(store, evaluations[0], evaluations[-1])

    def draw_each(panels_of: Callable[[Gathered], list[Panel]], x_name: str) -> list[Any]:
        others = {panel.title: panel.points for panel in panels_of(beside)} if beside else {}
        panels = [
            panel._replace(beside=others.get(panel.title, panel.beside))
            for panel in panels_of(gathered)
        ]
        return [draw([panel], x_name) for panel in panels]

    return templates.render(
        "report.html.j2",
        **vars(gathered),
        gathered=gathered,
        last=last,
        warnings=warnings(gathered),
        curves=draw_each(curves_of, "policy"),
        steps=draw_each(
            lambda side: step_panels(
                [row for iteration in side.iterations for row in iteration.steps], STEP_COLUMNS
            ),
            "step",
        ),
        nights_header=HEADER,
        beside=beside,
        difference=difference,
        compared=compared,
        extremes=extremes,
        groups=groups,
        sources=[gathered.base, *(last.versions if last else []), *evaluations[-1:]],
        most_parts=_MOST_PARTS,
    )


def curves_of(gathered: Gathered) -> list[Panel]:
    """Return panels of scores, rewards, lengths and contrast over the iterations."""
    iterations = gathered.iterations

    def curve(
        title: str, number_of: Callable[[Iteration], float | None], is_share: bool = False
    ) -> Panel:
        points = [(done.policy.version, number_of(done), 0.0) for done in iterations]
        return Panel(title, points, is_share=is_share)

    functions = {name for done in iterations for name in metric(done.rewards, "functions") or ()}
    by_function = [
        curve(name, lambda done, name=name: metric(done.rewards, "functions", name, "mean"))
        for name in sorted(functions)[:_MOST_PARTS]
    ]
    lengths = curve(
        "tokens of a completion", lambda done: metric(done.rollouts, "mean_completion_tokens")
    )
    rounds = curve("rounds of sampling", lambda done: len(done.of_kind("rollouts")))
    # held-out rows that change each night make a curve by policy meaningless
    evaluations = gathered.nightly or gathered.evaluations
    panel = night_panel if gathered.nightly else score_panel
    return [
        panel((policy_number(evaluation), evaluation.metrics) for evaluation in evaluations),
        curve("mean reward", lambda done: done.reward_mean),
        *(by_function if len(functions) > 1 else ()),
        lengths,
        curve("share ended at the limit", lambda done: done.length_share, is_share=True),
        curve("turns of an episode", lambda done: done.episodes and done.episodes["mean_turns"]),
        curve(
            "groups without contrast",
            lambda done: metric(done.rewards, "groups", "zero_variance"),
            is_share=True,
        ),
        *([rounds] if any(y > 1 for _, y, _ in rounds.points) else ()),
    ]
