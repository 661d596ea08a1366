"""What a scorer is: something that says of each row a number, nothing, or why it failed. A failure
never becomes a number.

There are three kinds: functions (`pool`), models (`models`) and servers (`servers`). The stage
knows them by this protocol alone. This module is light, because each worker imports it.

Not of the spine: what scorers are is read when one writes another kind of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from quiver.schemas.errors import ConfigError, did_you_mean, printable, quoted_name
from quiver.stages.common.config import Config

OFFERED = (
    "prompts",
    "prompt_text",
    "prompt_ids",
    "completions",
    "completion_ids",
    "finish_reason",
    "rollout_ids",
)
"""What every scorer may ask for by name: `prompts` are messages, or text; `prompt_text` is the text
that was rendered of them, `prompt_ids` its token ids, as the policy read them."""
OF_TURNS = ("turns", "transcript", "end_reason")
"""What a function may ask for by name, where the rollouts have turns."""
OVERLONG = "overlong"
"""The penalty's column in `parts`."""
LARGEST = 3.4028234663852886e38  # of a float32
EXTRA_BYTES = 10_000
"""Most of what came beside the number that is kept."""
Batch = Mapping[str, list[Any]]
"""Lists of equal length, one item a row: OFFERED, and the user's columns by their names. Not to be
changed in place."""
Notice = Callable[[str, str, str], None]
"""Hears of a failed row at once: name of the scorer, rollout_id, error. What it raises ends the
scoring."""


def _in_order(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] >= ends[1]:
        raise ValueError(f"the low end must be below the high end, got {ends[0]} and {ends[1]}")
    return ends


Interval = Annotated[tuple[float, float], AfterValidator(_in_order)]
"""A low end and a high end above it."""


class ScorerConfig(Config):
    """What a recipe says of every scorer."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Its column in `parts`, unique. Empty: the function's own name, the last part of a model's, or
    a server's dialect."""
    weight: float = 1.0
    """Factor of its part in the reward."""
    extra: bool = False
    """Keep as JSON in `extra` what came beside the number: of a function the rest of a row's value,
    which may then be a mapping with the number under `reward`; of a classifier the values of all
    labels."""
    fingerprint: str = ""
    """Filled in by the stage: of the code, the weights or the section that decide the number. If
    set, the scorer must have it."""


class Part(NamedTuple):
    """What one scorer said of one row: a value, or an error, or neither (it does not apply
    there)."""

    value: float | None = None
    error: str | None = None
    extra: str | None = None
    """JSON text of what came beside the number."""


class Scorer(Protocol):
    """One source of rewards, with its column in `parts`.

    The stage calls `score` from one thread of its own, never twice at once. Whoever opened it may
    close what it holds from another thread while `score` waits; the call must end soon then, in
    whatever way.
    """

    name: str
    """Its column."""
    seconds: float
    """Time that scoring took so far, summed over processes."""

    def require(self, columns: Iterable[str]) -> None:
        """ConfigError unless everything that it needs is offered, or among the prompts'
        `columns`."""

    def score(self, batch: Batch) -> list[Part]:
        """One part a row; a failure is a part with an error. QuiverError only where no row at all
        can be scored."""


def as_extra(beside: Any) -> str:
    """JSON text of what came beside the number; beyond EXTRA_BYTES only the start is kept, and said
    to be. ValueError, RecursionError: it is no JSON."""
    text = json.dumps(beside, ensure_ascii=False, allow_nan=False)
    if len(text.encode(errors="replace")) > EXTRA_BYTES:
        shortened = {"cut": True, "length": len(text), "start": text[: EXTRA_BYTES // 8]}
        text = json.dumps(shortened, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def require_columns(owner: str, needs: Iterable[str], columns: Iterable[str]) -> None:
    """ConfigError unless everything that `owner` needs is offered, or a column."""
    columns = sorted(columns)
    for missing in sorted(set(needs) - {*OFFERED, *columns}):
        if missing == "images":
            raise ConfigError(
                owner,
                "needs images, and the prompts show none",
                next="name the column of pictures in data.images",
            )
        if missing in OF_TURNS:
            raise ConfigError(
                owner,
                f"needs {missing}, which episodes alone have",
                next="add [generate.turns] to the recipe, or name rollouts of several turns",
            )
        raise ConfigError(
            owner,
            f"needs {quoted_name(missing)}, which is neither a column of the prompts "
            f"({printable(', '.join(map(quoted_name, columns))) or 'none'}) nor one of "
            f"{', '.join(OFFERED)}{did_you_mean(missing, [*columns, *OFFERED])}",
            next="rename the column, or correct what asks for it in the recipe or the function",
        )
