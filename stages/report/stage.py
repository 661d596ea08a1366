"""report: one self-contained HTML file over a whole run, read from its versions; it decides nothing
and writes nothing else.

The same store gives the same bytes: no clock, no host. How well it went stands first, then what to
look at, then curves, iterations, answers before and after, and what everything was made of.
Refused: a run without a policy.

    path = write(Store("store"), "arith")            # store/arith/report.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from quiver.schemas.errors import LineageError
from quiver.schemas.manifest import Manifest
from quiver.stages.common.store import Store, storage

from . import samples
from .gather import STEP_COLUMNS, Gathered, Iteration, gather, latest, policy_number
from .plots import Panel
from .templates import Html, figure, folded, page, paragraph, section, table, text
from .words import counted, measured, number, size

FILE = "report.html"
_MOST_PARTS, _MOST_ROWS = 6, 200
_TIMED = ("prompt", "generate", "reward", "optimize")
_HEAD_BYTES = 2048


def write(store: Store, run: str, path: Path | str | None = None) -> Path:
    """Write the report of `run` to `path`, whole or not at all; None: `report.html` in the run's
    folder. LineageError, ResourceError."""
    target = Path(path) if path else store.path / run / FILE
    content = render(store, gather(store, run), latest(store, run)).encode()
    with storage.storage_errors(f"report {target}"):
        storage.write_bytes(target, content)
    return target


def is_current(store: Store, run: str) -> bool:
    """Whether the report in the run's folder tells of its newest versions."""
    path = store.path / run / FILE
    if not path.is_file():
        return False
    with path.open("rb") as opened:
        return f'content="{latest(store, run)}"'.encode() in opened.read(_HEAD_BYTES)


def render(store: Store, found: Gathered, newest: str) -> str:
    """The page as text."""
    sections = [
        section("Curves", _curves(found)),
        section("Iterations", _iterations(found)),
        section("Before and after", *_before_and_after(store, found)),
        section("Best and worst", *_best_and_worst(store, found)),
        section("Steps", figure(_steps(found), "step")),
        section("Audit", _audit(found)),
        section("Where the time went", _seconds(found)),
        section("What it was made of", *_made_of(found)),
    ]
    return page(f"{found.run} · report", newest, [*_verdict(found), *_warnings(found)], sections)


# -- how it went


def _verdict(found: Gathered) -> Iterator[Html]:
    made = counted(len(found.iterations), "iteration")
    line = f"{made}, from {found.base.ref}"
    line += (
        f" to {found.iterations[-1].policy.ref}."
        if found.iterations
        else "; nothing is trained yet."
    )
    yield paragraph(line, "soft")
    known = [each.rewards.metrics.get("reward_mean") for each in found.iterations if each.rewards]
    if found.evaluations:
        first, last = found.evaluations[0], found.evaluations[-1]
        after = (
            f"{measured(last.metrics['score'], last.metrics['stderr'])} "
            f"({counted(last.metrics['n'], 'prompt')})"
        )
        before = (
            f"{measured(first.metrics['score'], first.metrics['stderr'])} → "
            if last is not first
            else ""
        )
        yield paragraph(f"Held-out score {before}{after}.", "lead")
    if known:
        yield paragraph(f"Mean reward {number(known[0])} → {number(known[-1])}.", "lead")


def _warnings(found: Gathered) -> Iterator[Html]:
    """What somebody should look at, newest iteration first of each kind."""
    checks = (_left_out, _not_scored, _cut_short, _without_contrast, _far_from_the_engine)
    for check in checks:
        told = [line for each in reversed(found.iterations) if (line := check(each))]
        if told:
            more = (
                f" So in {len(told)} of {counted(len(found.iterations), 'iteration')}."
                if len(found.iterations) > 1
                else ""
            )
            yield paragraph(told[0] + more, "warn")
    if found.gone:
        named = ", ".join(found.gone[:_MOST_PARTS])
        yield paragraph(
            f"{counted(len(found.gone), 'version')} that the run names are gone: {named}.", "warn"
        )


def _left_out(each: Iteration) -> str:
    skipped = each.policy.metrics.get("skipped_steps")
    return (
        f"{each.policy.ref}: {counted(skipped, 'optimizer step')} left out, for a loss or "
        "gradient that is not finite."
        if skipped
        else ""
    )


def _not_scored(each: Iteration) -> str:
    missing = each.rewards.metrics.get("reward_null") if each.rewards else 0
    return (
        f"{each.rewards.ref}: {number(missing)} of {counted(each.rewards.rows, 'rollout')} have "
        "no reward."
        if missing
        else ""
    )


def _cut_short(each: Iteration) -> str:
    share = _length_share(each)
    return (
        f"{each.rollouts.ref}: {share:.0%} of the completions ended at the token limit."
        if (share or 0) > 0.1
        else ""
    )


def _without_contrast(each: Iteration) -> str:
    share = each.rewards.metrics.get("groups", {}).get("zero_variance") if each.rewards else 0
    return (
        f"{each.rewards.ref}: in {share:.0%} of the groups all rewards are equal, so they teach "
        "nothing."
        if (share or 0) > 0.5
        else ""
    )


def _far_from_the_engine(each: Iteration) -> str:
    gap = (each.policy.metrics.get("audit") or {}).get("mean_gap")
    return (
        f"{each.policy.ref}: trainer and engine differ by {number(gap)} nats a token on average."
        if (gap or 0) > 0.05
        else ""
    )


def _length_share(each: Iteration) -> float | None:
    if each.rollouts is None or not each.rollouts.rows:
        return None
    return each.rollouts.status.get("length", 0) / each.rollouts.rows


# -- curves and tables


def _curves(found: Gathered) -> Html:
    def curve(title: str, of: Any) -> Panel:
        return Panel(title, [(each.number, of(each), 0.0) for each in found.iterations])

    def metric(kind: str, *names: str) -> Any:
        def of(each: Iteration) -> float | None:
            value: Any = getattr(each, kind).metrics if getattr(each, kind) else None
            for name in names:
                value = value.get(name) if isinstance(value, dict) else None
            return value

        return of

    scores = [
        (policy_number(each), each.metrics["score"], each.metrics["stderr"] or 0.0)
        for each in found.evaluations
    ]
    parts = sorted(
        {
            name
            for each in found.iterations
            if each.rewards
            for name in each.rewards.metrics.get("functions", {})
        }
    )
    panels = [
        Panel("held-out score", scores),
        curve("mean reward", metric("rewards", "reward_mean")),
        *(
            curve(name, metric("rewards", "functions", name, "mean"))
            for name in parts[:_MOST_PARTS]
            if len(parts) > 1
        ),
        curve("tokens of a completion", metric("rollouts", "mean_completion_tokens")),
        curve("share ended at the limit", _length_share),
        curve("groups without contrast", metric("rewards", "groups", "zero_variance")),
    ]
    return figure(panels, "iteration")


def _steps(found: Gathered) -> list[Panel]:
    rows = [row for each in found.iterations for row in each.steps]
    return [Panel(name, [(row["step"], row[name], 0.0) for row in rows]) for name in STEP_COLUMNS]


def _iterations(found: Gathered) -> Html:
    scores = {
        policy_number(each): measured(each.metrics["score"], each.metrics["stderr"])
        for each in found.evaluations
    }
    rows = (
        [[0, found.base.ref, "", None, None, None, None, scores.get(found.base.version, "")]]
        if found.iterations
        else []
    )
    for each in found.iterations[-_MOST_ROWS:]:
        rewards, numbers = each.rewards.metrics if each.rewards else {}, each.policy.metrics
        rows.append(
            [
                each.number,
                each.policy.ref,
                each.rollouts.ref if each.rollouts else "gone",
                rewards.get("reward_mean"),
                rewards.get("reward_std"),
                numbers.get("approx_kl"),
                numbers.get("clip_fraction"),
                scores.get(each.number, ""),
            ]
        )
    columns = [
        "",
        "policy",
        "learned from",
        "mean reward",
        "std",
        "approx. KL",
        "clipped",
        "held-out score",
    ]
    return table(columns, rows) if rows else Html("")


def _audit(found: Gathered) -> Html:
    names = ("mean_gap", "max_gap", "kl_k3", "outside_clip", "effective_sample_size", "tokens")
    rows = [
        [each.number, *(audit.get(name) for name in names)]
        for each in found.iterations[-_MOST_ROWS:]
        if (audit := each.policy.metrics.get("audit"))
    ]
    columns = [
        "",
        "mean gap, nats",
        "largest gap",
        "KL(engine ‖ trainer)",
        "outside the clip range",
        "effective sample",
        "tokens",
    ]
    return table(columns, rows) if rows else Html("")


def _seconds(found: Gathered) -> Html:
    rows = []
    for each in found.iterations[-_MOST_ROWS:]:
        spent = {stage: manifest.seconds.get("total", 0.0) for stage, manifest in each.made()}
        bytes_written = sum(manifest.bytes.get("data", 0) for _, manifest in each.made())
        speed = each.rollouts.metrics.get("tokens_per_second") if each.rollouts else None
        rows.append(
            [
                each.number,
                *(spent.get(stage) for stage in _TIMED),
                sum(spent.values()),
                speed,
                size(bytes_written),
            ]
        )
    columns = [
        "",
        *(f"{stage}, s" for stage in _TIMED),
        "together, s",
        "sampled tokens/s",
        "written",
    ]
    return table(columns, rows) if rows else Html("")


# -- answers


def _before_and_after(store: Store, found: Gathered) -> Iterator[Html]:
    """The same held-out prompts, answered by the first and by the last policy that was measured."""
    if len(found.evaluations) < 2:
        return
    first, last = found.evaluations[0], found.evaluations[-1]
    try:
        earlier, later = (_answers(store, each) for each in (first, last))
        sampled = store.open(last.input("rollouts").ref).manifest
    except LineageError:
        yield paragraph("The rollouts of an evaluation are gone.")
        return
    both = [group for group in later if group in earlier]
    chosen = [both[index] for index in samples.evenly(len(both))]
    asked = samples.questions(store, sampled, chosen)
    rows = [
        [text(asked.get(group, group)), *_cells(earlier[group]), *_cells(later[group])]
        for group in chosen
    ]
    names = [each.model("policy").ref for each in (first, last)]
    yield paragraph("The first answer to some of the held-out prompts, evenly chosen.", "soft")
    yield table(["prompt", names[0], "score", names[1], "score"], rows)


def _cells(answer: tuple[str, float | None]) -> tuple[Html, float | None]:
    return text(answer[0]), answer[1]


def _answers(store: Store, evaluation: Manifest) -> dict[str, tuple[str, float | None]]:
    """By group the text and the score of its first sample, of the first shards."""
    rollouts = samples.head(
        store.open(evaluation.input("rollouts").ref),
        ["group_id", "sample_index", "completion_text"],
    )
    rows = samples.head(store.open(evaluation.ref), ["group_id", "sample_index", "score"])
    texts, scores = (each.filter(pc.equal(each["sample_index"], 0)) for each in (rollouts, rows))
    score = dict(zip(scores["group_id"].to_pylist(), scores["score"].to_pylist(), strict=True))
    pairs = zip(texts["group_id"].to_pylist(), texts["completion_text"].to_pylist(), strict=True)
    return {group: (answer, score.get(group)) for group, answer in pairs}


def _best_and_worst(store: Store, found: Gathered) -> Iterator[Html]:
    """Of the last iteration's rollouts, as far as their first shards go."""
    last = found.iterations[-1] if found.iterations else None
    if last is None or last.rollouts is None or last.rewards is None:
        return
    columns = ["rollout_id", "group_id", "completion_text", "finish_reason"]
    ranked = samples.best_and_worst(
        store.open(last.rewards.ref), store.open(last.rollouts.ref), columns
    )
    answers = [samples.row(ranked.texts, at) for _, at in ranked.places]
    asked = samples.questions(store, last.rollouts, [answer["group_id"] for answer in answers])
    rows = []
    for (index, _), answer in zip(ranked.places, answers, strict=True):
        paid = samples.row(ranked.rewards, index)
        parts = "\n".join(
            f"{name} {number(value)}" for name, value in list(paid["parts"].items())[:_MOST_PARTS]
        )
        question = text(asked.get(answer["group_id"], answer["group_id"]))
        rows.append(
            [
                paid["reward"],
                text(parts),
                question,
                text(answer["completion_text"]),
                answer["finish_reason"],
            ]
        )
    yield paragraph(
        f"{last.rewards.ref}: {len(rows)} of {counted(ranked.known, 'rollout')} with a reward, "
        "from both ends.",
        "soft",
    )
    yield table(["reward", "parts", "prompt", "completion", "ended by"], rows)


# -- what it was made of


def _made_of(found: Gathered) -> Iterator[Html]:
    last = found.iterations[-1] if found.iterations else None
    manifests = [found.base, *(manifest for _, manifest in last.made())] if last else [found.base]
    manifests += found.evaluations[-1:]
    rows = [
        [
            each.ref,
            each.stage,
            ", ".join(f"{entry.role} {entry.ref}" for entry in each.inputs),
            each.rows or None,
            each.content_hash[:12],
        ]
        for each in manifests
    ]
    yield table(["version", "stage", "made of", "rows", "content"], rows)
    for each in manifests:
        yield folded(
            f"{each.ref}: config of {each.stage}",
            json.dumps(each.config, indent=2, ensure_ascii=False, sort_keys=True),
        )
    yield folded(
        "environment",
        json.dumps(
            manifests[-1].environment, indent=2, ensure_ascii=False, sort_keys=True, default=str
        ),
    )
