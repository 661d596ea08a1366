"""What a person wants to see of new rollouts: how many, how fast, how they ended, and ten of
them."""

from __future__ import annotations

import pyarrow as pa
from prefect.artifacts import Artifact, TableArtifact

from quiver.stages.common.store import Store, Version
from quiver.stages.report import samples
from quiver.stages.report.words import number, size

from .text import key, wrapped

_PROMPT_LIMIT, _PROMPT_WIDTH = 160, 40
COLUMNS = ["rollout_id", "group_id", "completion_text", "completion_ids", "finish_reason"]


def views(store: Store, version: Version) -> list[Artifact]:
    """One table of sample rollouts, with the numbers of all of them above it."""
    manifest, table = version.manifest, samples.head(version, COLUMNS)
    chosen = samples.evenly(len(table))
    asked = samples.questions(
        store, manifest, [table["group_id"][index].as_py() for index in chosen]
    )
    rows = [answer(table, index, asked) for index in chosen]
    numbers = manifest.metrics
    ends = (
        ", ".join(f"{name} {number(count)}" for name, count in manifest.status.items()) or "nothing"
    )
    description = (
        f"**{version.ref}**: {number(manifest.rows)} rollouts, {number(numbers.get('tokens'))} "
        "tokens, "
        f"{number(numbers.get('tokens_per_second'))} tokens/s, {size(manifest.bytes['data'])}; "
        f"ended by {ends}. "
        f"{len(chosen)} samples{samples.among(len(table), manifest.rows)}:"
    )
    return [
        TableArtifact(key=key("rollouts", version.ref.run), table=rows, description=description)
    ]


def answer(table: pa.Table, index: int, asked: dict[str, str]) -> dict[str, str | int]:
    """The columns of a page that say what one rollout is, those of long lines last."""
    return {
        "tokens": len(table["completion_ids"][index]),
        "finish_reason": table["finish_reason"][index].as_py(),
        "prompt": wrapped(
            asked.get(table["group_id"][index].as_py(), ""), _PROMPT_LIMIT, _PROMPT_WIDTH
        ),
        "completion": wrapped(table["completion_text"][index].as_py()),
    }
