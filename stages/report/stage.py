"""report: one self-contained HTML file over a whole run, read from its versions; it decides nothing
and writes nothing else.

The same store gives the same bytes: no clock, no host. How well it went stands first, then what to
look at, then curves, iterations, answers before and after, and what everything was made of.
Refused: a run without a policy.

    path = write(Store("store"), "arith")            # store/arith/report.html
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from quiver.schemas.errors import ConfigError, LineageError, QuiverError, printable
from quiver.stages.common.store import Store, storage

from . import samples, templates
from .gather import STEP_COLUMNS, Gathered, Iteration, gather, latest, metric, policy_number
from .plots import Panel, draw, score_panel, step_panels
from .words import counted, number

FILE = "report.html"
_MOST_PARTS = 6
_HEAD_BYTES = 2048


def path_of(store: Store, run: str) -> Path:
    """Where the report of `run` lies unless it is told otherwise: in the run's folder."""
    return store.path / run / FILE


def write(store: Store, run: str, path: Path | str | None = None) -> Path:
    """Write the report of `run` to `path`, whole or not at all; None: `path_of`. ConfigError,
    LineageError, ResourceError."""
    target = Path(path) if path else path_of(store, run)
    content = render(store, gather(store, run)).encode()
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with storage.storage_errors(f"report {target}"):
            storage.write_bytes(target, content)
    except QuiverError:
        raise
    except OSError as error:
        raise ConfigError(
            f"report {printable(target)}",
            f"can not be written: {error.strerror}",
            next="name a file in a folder that there is",
        ) from None
    return target


def is_current(store: Store, run: str) -> bool:
    """Whether the report in the run's folder tells of its newest versions."""
    path = path_of(store, run)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'content="{latest(store, run)}"'.encode() in file.read(_HEAD_BYTES)


def render(store: Store, gathered: Gathered) -> str:
    """The page as text."""
    evaluations = gathered.evaluations
    last = gathered.iterations[-1] if gathered.iterations else None
    extremes = None
    if last and last.rollouts and last.rewards:
        with suppress(LineageError):  # their rows expired
            extremes = samples.best_and_worst(store, store.open(last.rewards.ref))
    compared = None
    if len(evaluations) > 1:
        with suppress(LineageError):  # the page says that the rollouts are gone
            compared = samples.before_and_after(store, evaluations[0], evaluations[-1])
    step_rows = [row for iteration in gathered.iterations for row in iteration.steps]
    return templates.render(
        "report.html.j2",
        **vars(gathered),
        last=last,
        warnings=warnings(gathered),
        curves=draw(_curves(gathered), "iteration"),
        steps=draw(step_panels(step_rows, STEP_COLUMNS), "step"),
        scores={policy_number(evaluation): evaluation.metrics for evaluation in evaluations},
        compared=compared,
        extremes=extremes,
        versions=[gathered.base, *(last.versions if last else []), *evaluations[-1:]],
        most_parts=_MOST_PARTS,
    )


def _curves(gathered: Gathered) -> list[Panel]:
    """Scores, rewards, lengths and contrast over the iterations."""
    iterations = gathered.iterations

    def curve(title: str, kind: str, *names: str) -> Panel:
        points = [
            (done.policy.version, metric(getattr(done, kind), *names), 0.0) for done in iterations
        ]
        return Panel(title, points)

    functions = sorted(
        {name for done in iterations for name in metric(done.rewards, "functions") or ()}
    )
    by_function = [
        curve(name, "rewards", "functions", name, "mean") for name in functions[:_MOST_PARTS]
    ]
    length_shares = [(done.policy.version, done.length_share, 0.0) for done in iterations]
    return [
        score_panel((policy_number(each), each.metrics) for each in gathered.evaluations),
        curve("mean reward", "rewards", "reward_mean"),
        *(by_function if len(functions) > 1 else ()),
        curve("tokens of a completion", "rollouts", "mean_completion_tokens"),
        Panel("share ended at the limit", length_shares),
        curve("groups without contrast", "rewards", "groups", "zero_variance"),
    ]


def warnings(gathered: Gathered) -> list[str]:
    """What somebody should look at: of each kind of trouble what the newest iteration that has it
    says, and how many have it."""
    num_iterations = len(gathered.iterations)
    sentences = []
    for of_one_kind in zip(*map(_troubles, reversed(gathered.iterations)), strict=True):
        troubles = list(filter(None, of_one_kind))
        if troubles and num_iterations > 1:
            of_all = counted(num_iterations, "iteration")
            sentences.append(f"{troubles[0]} So in {len(troubles)} of {of_all}.")
        else:
            sentences += troubles
    return sentences


def _troubles(iteration: Iteration) -> list[str]:
    """A sentence for each kind of trouble, empty where there is none."""
    policy = iteration.policy
    rewards = iteration.rewards
    skipped = metric(policy, "skipped_steps") or 0
    unscored = metric(rewards, "reward_null") or 0
    length_share = iteration.length_share or 0
    equal_share = metric(rewards, "groups", "zero_variance") or 0
    gap = metric(policy, "audit", "mean_gap") or 0
    clipped = metric(policy, "first_clip_fraction") or 0
    return [
        f"{policy.ref}: {counted(skipped, 'optimizer step')} left out, for a loss or gradient that "
        "is not finite."
        if skipped
        else "",
        f"{rewards.ref}: {number(unscored)} of {counted(rewards.rows, 'rollout')} have no reward."
        if unscored
        else "",
        f"{iteration.rollouts.ref}: {length_share:.0%} of the completions ended at the token limit."
        if length_share > 0.1
        else "",
        f"{rewards.ref}: in {equal_share:.0%} of the groups all rewards are equal, so they teach "
        "nothing."
        if equal_share > 0.5
        else "",
        f"{policy.ref}: trainer and engine differ by {number(gap)} nats a token on average."
        if gap > 0.05
        else "",
        f"{policy.ref}: the first step clipped {clipped:.2g} of its tokens, though no weight had "
        "changed: the ratio's denominator is off by numerics."
        if clipped
        else "",
    ]
