"""What a person wants to see of new rewards: statistics function by function, and which rollouts
were worth most and least."""

from __future__ import annotations

from typing import Any

from prefect.artifacts import Artifact, TableArtifact

from quiver.schemas.rewards import names_of
from quiver.stages.common.store import Store, Version
from quiver.stages.report import samples
from quiver.stages.report.words import number, rounded

from . import rollouts
from .text import key, quoted

_COLUMNS = ("mean", "std", "min", "max", "null", "null_rate", "errors", "seconds")
_MOST_PARTS, _MOST_PAIRS = 10, 6


def views(store: Store, version: Version) -> list[Artifact]:
    """A table of statistics, and a table of the best and the worst rollouts."""
    manifest, run = version.manifest, version.ref.run
    counts = ", ".join(
        f"{name.replace('_', ' ')} {number(count)}" for name, count in manifest.status.items()
    )
    description = (
        f"**{version.ref}**, {number(manifest.rows)} rollouts: "
        f"{counts}{_correlations(manifest.metrics)}"
    )
    statistics = TableArtifact(
        key=key("rewards", run), table=reward_rows(manifest.metrics), description=description
    )
    return [statistics, _best_and_worst(store, version)]


def reward_rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a function, and a last one for the reward that they make together; None where too few
    rows have a value."""
    each = [
        {"function": quoted(name), **{column: rounded(found.get(column)) for column in _COLUMNS}}
        for name, found in metrics["functions"].items()
    ]
    whole = {column: rounded(metrics.get(f"reward_{column}")) for column in _COLUMNS}
    return [*each, {"function": "reward", **whole}]


def _correlations(metrics: dict[str, Any]) -> str:
    """The strongest few, of any number of pairs."""
    known = [
        (pair, value)
        for pair, value in (metrics.get("correlation") or {}).items()
        if value is not None
    ]
    strongest = sorted(known, key=lambda each: -abs(each[1]))[:_MOST_PAIRS]
    return "".join(f"; correlation {quoted(pair)} {value:.2f}" for pair, value in strongest)


def _best_and_worst(store: Store, version: Version) -> TableArtifact:
    """Up to `samples.ROWS` rollouts by falling reward: half of them from the top, half from the
    bottom."""
    sampled = store.open(version.manifest.input("rollouts").ref)
    found = samples.best_and_worst(version, sampled, rollouts.COLUMNS)
    rewards, texts = found.rewards, found.texts
    asked = samples.questions(
        store, sampled.manifest, [texts["group_id"][row].as_py() for _, row in found.places]
    )
    rows = [
        {
            "reward": rounded(rewards["reward"][index].as_py()),
            **(
                {"parts": _parts(rewards["parts"][index].as_py())}
                if len(names_of(rewards)) > 1
                else {}
            ),
            **rollouts.answer(texts, row, asked),
        }
        for index, row in found.places
    ]
    half = samples.ROWS // 2
    which = "all" if len(rows) == found.known else f"the {half} best and the {half} worst of"
    looked_at = samples.among(min(len(texts), len(rewards)), version.manifest.rows)
    description = (
        f"**{version.ref}** by reward: {which} {number(found.known)} rollouts with a "
        f"reward{looked_at}"
    )
    return TableArtifact(
        key=key("best-and-worst", version.ref.run), table=rows, description=description
    )


def _parts(parts: dict[str, float | None]) -> str:
    return "\n".join(
        f"{quoted(name)} {number(value)}" for name, value in list(parts.items())[:_MOST_PARTS]
    )
