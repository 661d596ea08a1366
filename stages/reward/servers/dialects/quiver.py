"""Dialect `quiver`, format 1: many rows a request, matched by id; numbers, nulls and errors kept
apart.

    POST /v1/score
    {"format": 1, "rows": [{"id": "a", "prompt": [{"role": "user", "content": "2 + 2?"}],
    "completion": "4",
                            "completion_ids": [19], "finish_reason": "stop", "columns": {"answer":
                            4}}]}
    →
    {"format": 1, "rows": [{"id": "a", "reward": 1.0, "error": null, "parts": {"numeric": 1.0},
    "extra": {}}]}

`prompt` is messages or text. `completion_ids` and `finish_reason` may be null; every row of a
request has the same `columns`. Rows of the answer come in any order, each id once. `reward` is a
number; or null with an `error` (the row failed); or null without one (nothing applies to the row,
which is not 0). `error`, `parts` and `extra` may be left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quiver.schemas.errors import printable
from quiver.stages.reward.scoring import Part, as_extra

from .rows import Row, Scored
from .strict import MalformedError, as_dict, as_list, as_part, shape

if TYPE_CHECKING:
    from ..config import ServerConfig

FORMAT = 1
PATH = "/v1/score"
_KEYS = {"id", "reward", "error", "parts", "extra"}

# -- the side that asks


def encode(rows: list[Row], config: ServerConfig) -> dict[str, Any]:
    """The request for `rows`."""
    return {"format": FORMAT, "rows": [_encode_row(row, config.columns) for row in rows]}


def _encode_row(row: Row, chosen: tuple[str, ...] | None) -> dict[str, Any]:
    columns = row.columns if chosen is None else {name: row.columns[name] for name in chosen}
    return {**row._asdict(), "columns": columns}


def decode(answer: Any, rows: list[Row], config: ServerConfig) -> list[Part]:
    """The parts of `rows`. MalformedError: another format, or ids that are not those asked for,
    each once."""
    found = as_dict(answer, "the answer")
    if type(found.get("format")) is not int or found["format"] != FORMAT:
        raise MalformedError(
            f"format is {printable(repr(found.get('format')), 40)}, expected {FORMAT}"
        )
    told: dict[str, dict[str, Any]] = {}
    for item in as_list(found.get("rows"), "rows", len(rows)):
        row = as_dict(item, "an item of rows")
        if not isinstance(row.get("id"), str) or row["id"] in told:
            raise MalformedError(
                f"id {printable(repr(row.get('id')), 80)} is not text, or stands twice"
            )
        told[row["id"]] = row
    missing = [row.id for row in rows if row.id not in told]
    if missing:
        raise MalformedError(f"no row has id {printable(missing[0], 80)}")
    return [_decode_row(told[row.id], config) for row in rows]


def _decode_row(row: dict[str, Any], config: ServerConfig) -> Part:
    unknown = sorted(row.keys() - _KEYS)
    if unknown or "reward" not in row:
        raise MalformedError(
            f"a row has unknown key {printable(unknown[0], 40)}"
            if unknown
            else "a row has no reward"
        )
    if not isinstance(row.get("error"), str | None):
        raise MalformedError(f"error is {shape(row['error'])}, expected text or null")
    extra = {name: as_dict(row[name], name) for name in ("parts", "extra") if row.get(name)} or None
    return part_or_error(row["reward"], {"error": None, **row}, config, extra)


def part_or_error(value: Any, told: dict[str, Any], config: ServerConfig, extra: Any) -> Part:
    """What one row got. Text as `error` in `told`: its failure. Null beside a null error: nothing
    applies. Else: a number."""
    error = told.get("error", "")
    beside = None if extra is None else as_extra(extra)
    if isinstance(error, str) and error:
        return Part(error=printable(error), extra=beside)
    if value is None and error is None:
        return Part(extra=beside)
    return as_part(value, config.range, config.rescale, extra)


# -- the side that answers


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Message(_Strict):
    """One message of a conversation."""

    role: str
    content: str


class RequestRow(_Strict):
    """One completion to score."""

    id: str = Field(max_length=512)
    prompt: str | list[Message]
    completion: str
    completion_ids: list[int] | None = None
    finish_reason: str | None = None
    columns: dict[str, Any] = Field(default_factory=dict)


class Request(_Strict):
    """Rows to score: ids differ, columns have the same names."""

    format: Literal[1]
    rows: list[RequestRow] = Field(min_length=1, max_length=10_000)

    @model_validator(mode="after")
    def _even(self) -> Request:
        if len({row.id for row in self.rows}) != len(self.rows):
            raise ValueError("an id stands twice")
        if any(row.columns.keys() != self.rows[0].columns.keys() for row in self.rows):
            raise ValueError("every row of a request must have the same columns")
        return self

    def as_rows(self) -> list[Row]:
        """The rows as they are scored."""
        return [Row(**row.model_dump()) for row in self.rows]


class AnswerRow(_Strict):
    """What is said of one completion: a number, or an error, or neither (nothing applies to it)."""

    id: str
    reward: float | None
    error: str | None
    parts: dict[str, float | None]
    extra: dict[str, Any]


class Answer(_Strict):
    """Each row of the request once."""

    format: Literal[1]
    rows: list[AnswerRow]


def answer(rows: list[Row], scored: list[Scored]) -> dict[str, Any]:
    """The answer for `rows`."""
    told = [{"id": row.id, **found._asdict()} for row, found in zip(rows, scored, strict=True)]
    return {"format": FORMAT, "rows": told}
