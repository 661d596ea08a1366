"""Dialect `quiver`, format 1: many rows a request, matched by id; numbers, nulls and errors kept
apart.

    POST /v1/score
    {"format": 1, "rows": [
        {"id": "a", "prompt": [{"role": "user", "content": "2 + 2?"}], "completion": "4",
         "completion_ids": [19], "finish_reason": "stop", "columns": {"answer": 4}}]}
    →  {"format": 1, "rows": [
        {"id": "a", "reward": 1.0, "error": null, "parts": {"numeric": 1.0}, "extra": {}}]}

`prompt` is messages or text. `completion_ids` and `finish_reason` may be null; every row of a
request has the same `columns`. Rows of the answer come in any order, each id once. `reward` is a
number; or null with an `error` (the row failed); or null without one (nothing applies to the row,
which is not 0). `error`, `parts` and `extra` may be left out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quiver.schemas.errors import printable
from quiver.stages.reward.scoring import Part, as_extra

from .rows import Row, Scored
from .strict import MalformedError, as_dict, as_part, list_at, shape

FORMAT = 1
PATH = "/v1/score"
_KEYS = {"id", "reward", "error", "parts", "extra"}

# -- the side that asks


def encode(rows: list[Row], config: Any) -> dict[str, Any]:
    """The request for `rows`."""
    names = rows[0].columns if config.columns is None else config.columns
    encoded = [
        {**row._asdict(), "columns": {name: row.columns[name] for name in names}} for row in rows
    ]
    return {"format": FORMAT, "rows": encoded}


def decode(answer: Any, rows: list[Row], config: Any) -> list[Part]:
    """The parts of `rows`. MalformedError: another format, or ids that are not those asked for,
    each once."""
    version = as_dict(answer, "the answer").get("format")
    if type(version) is not int or version != FORMAT:
        raise MalformedError(f"format is {printable(repr(version), 40)}, expected {FORMAT}")
    parts: dict[str, Part] = {}
    for document in list_at(answer, "rows", len(rows)):
        row = as_dict(document, "an item of rows")
        row_id = row.get("id")
        if not isinstance(row_id, str) or row_id in parts:
            raise MalformedError(f"id {printable(repr(row_id), 80)} is not text, or stands twice")
        parts[row_id] = _decode_row(row, config)
    for row in rows:
        if row.id not in parts:
            raise MalformedError(f"no row has id {printable(row.id, 80)}")
    return [parts[row.id] for row in rows]


def _decode_row(row: dict[str, Any], config: Any) -> Part:
    for unknown in sorted(row.keys() - _KEYS):
        raise MalformedError(f"a row has unknown key {printable(unknown, 40)}")
    if "reward" not in row:
        raise MalformedError("a row has no reward")
    error = row.get("error")
    if not isinstance(error, str | None):
        raise MalformedError(f"error is {shape(error)}, expected text or null")
    extra = {name: as_dict(row[name], name) for name in ("parts", "extra") if row.get(name)}
    return part_or_error(row["reward"], error, config, extra or None)


def part_or_error(number: Any, error: Any, config: Any, extra: Any) -> Part:
    """What one row got. Text in `error`: its failure. Null beside a null error: nothing applies.
    Else: a number."""
    if isinstance(error, str) and error:
        message = printable(error)
    elif number is None and error is None:
        message = None
    else:
        return as_part(number, config.range, config.rescale, extra)
    return Part(error=message, extra=None if extra is None else as_extra(extra))


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
    answered = [
        {"id": row.id, **reward._asdict()} for row, reward in zip(rows, scored, strict=True)
    ]
    return {"format": FORMAT, "rows": answered}
