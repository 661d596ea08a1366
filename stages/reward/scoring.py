"""The protocol of a scorer: for each row it returns a number, nothing, or an error. A failure never
becomes a number.

There are three kinds: functions (`pool`), models (`models`) and servers (`servers`). The stage
knows them by this protocol alone. This module is light, because each process of a pool imports it.

Not of the spine: read it when you write another kind of scorer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from quiver.schemas.errors import ConfigError, did_you_mean, printable, quoted_name
from quiver.schemas.outside import MEDIA
from quiver.stages.core.config import Config

OFFERED = (
    "prompts",
    "prompt_text",
    "prompt_ids",
    "completions",
    "completion_ids",
    "finish_reason",
    "rollout_ids",
)
"""Names that every scorer may ask for. `prompts` are messages, or text; `prompt_text` is the text
rendered from them; `prompt_ids` are its token ids, as the policy read them."""
OF_TURNS = ("turns", "transcript", "end_reason")
"""Names that a function may also ask for if the rollouts have turns."""
OVERLONG = "overlong"
"""The penalty's column in `parts`."""
EXTRA_BYTES = 10_000
"""Most bytes kept of the data beside a number."""
Batch = Mapping[str, list[Any]]
"""Lists of equal length, one item per row: OFFERED, and the user's columns by name. Must not be
changed in place."""
Notice = Callable[[str, str, str], None]
"""Called at once for a failed row with the scorer's name, the rollout_id and the error. An
exception it raises ends the scoring."""


def _in_order(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] >= ends[1]:
        raise ValueError(f"the low end must be below the high end, got {ends[0]} and {ends[1]}")
    return ends


Interval = Annotated[tuple[float, float], AfterValidator(_in_order)]
"""A low end and a high end above it."""


class ScorerConfig(Config):
    """Settings that every scorer has."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Column in `parts`, unique. Empty: the function's own name, the last part of a model's, or a
    server's dialect."""
    weight: float = 1.0
    """Factor of its part in the reward."""
    extra: bool = False
    """Keep the data beside the number as JSON in `extra`. For a function this is the rest of a
    row's value, which may then be a mapping with the number under `reward`. For a classifier it is
    the values of all labels."""
    fingerprint: str = ""
    """Hash of the code, the weights or the section that decide the number, filled in by the stage.
    If set, the scorer must match it."""


class Part(NamedTuple):
    """A scorer's result for one row: a value, or an error, or neither (it does not apply)."""

    value: float | None = None
    error: str | None = None
    extra: str | None = None
    """JSON text of the data beside the number."""


class Scorer(Protocol):
    """One function, model or server that gives numbers, with its column in `parts`.

    The stage calls `score` from one thread of its own, never twice at once. The opener may close
    the scorer's resources from another thread while `score` waits; the call must then end soon, in
    any way.
    """

    name: str
    """Its column."""
    seconds: float
    """Seconds of scoring so far, summed over processes."""
    gpus: Sequence[int]
    """Numbers of the GPUs that it has taken so far."""

    def require(self, columns: Iterable[str]) -> None:
        """Raise ConfigError unless everything that it needs is offered, or among the prompts'
        `columns`."""

    def score(self, batch: Batch) -> list[Part]:
        """Return one part per row; a failure is a part with an error. Raises QuiverError only if no
        row at all can be scored."""


def as_extra(beside: Any) -> str:
    """Return JSON text of the data beside a number. Beyond EXTRA_BYTES only the start is kept, and
    the text says so. Raises ValueError or RecursionError if it has no JSON."""
    text = json.dumps(beside, ensure_ascii=False, allow_nan=False)
    if len(text.encode(errors="replace")) > EXTRA_BYTES:
        shortened = {"cut": True, "length": len(text), "start": text[: EXTRA_BYTES // 8]}
        text = json.dumps(shortened, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def require_columns(
    owner: str, needs: Iterable[str], columns: Iterable[str], next: str = ""
) -> None:
    """Raise ConfigError unless everything that `owner` needs is offered, or a column, or a field
    `a.b` of a column a.

    Args:
        columns: Names. A mapping also gives the fields of each (see `fields_of` of schemas.cells).
        next: Further advice about a missing column.
    """
    fields = dict(columns) if isinstance(columns, Mapping) else {}
    columns = sorted(columns)
    named = {*OFFERED, *columns}
    dotted = {need for need in needs if need not in named and need.partition(".")[0] in named}
    for missing in sorted(set(needs) - named - dotted):
        if missing in MEDIA.values():
            raise ConfigError(
                owner,
                f"needs {missing}, and the prompts show none",
                next=f"name the column of the files in data.{missing}",
            )
        if missing in OF_TURNS:
            raise ConfigError(
                owner,
                f"needs {missing}, which only episodes have",
                next="add [generate.turns] to the recipe, or name rollouts of several turns",
            )
        raise ConfigError(
            owner,
            f"needs {quoted_name(missing)}, which is neither a column of the prompts "
            f"({printable(', '.join(map(quoted_name, columns))) or 'none'}) nor one of "
            f"{', '.join(OFFERED)}{did_you_mean(missing, [*columns, *OFFERED])}",
            next="rename the column, or correct what asks for it in the recipe or the function"
            + next,
        )
    for column in sorted(dotted):
        outer, *inner = column.split(".")
        known = fields.get(outer)
        for field in inner:
            if known is None:
                break
            if field not in known:
                raise ConfigError(
                    owner,
                    f"needs {printable(column)}, but {printable(outer)} has no field "
                    f"{printable(field)}{did_you_mean(field, known)}"
                    if known
                    else f"needs {printable(column)}, but {printable(outer)} holds no objects",
                    next="correct what asks for it in the recipe, or the source",
                )
            outer, known = f"{outer}.{field}", known[field]


def cells_of(column: str, batch: Batch) -> list[Any] | None:
    """Return the cells of a column of `batch`, or of a field `a.b` of column a; None if there is no
    such column. A cell that is no object, or lacks the field, gives None. JSON text is parsed, as a
    CSV file holds it.
    """
    if column in batch:
        return batch[column]
    outer, dot, field = column.rpartition(".")
    cells = cells_of(outer, batch) if dot else None
    if cells is None:
        return None
    objects = map(_parsed, cells)
    return [cell.get(field) if isinstance(cell, Mapping) else None for cell in objects]


def _parsed(cell: Any) -> Any:
    """Return what JSON text holds; any other cell unchanged."""
    with suppress(TypeError, ValueError, RecursionError):
        return json.loads(cell) if isinstance(cell, str) else cell
    return None
