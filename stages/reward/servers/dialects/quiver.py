"""Dialect `quiver`, format 1: many rows per request, matched by id; numbers, nulls and errors are
kept apart.

    POST /v1/score
    {"format": 1, "rows": [
        {"id": "a", "prompt": [{"role": "user", "content": "2 + 2?"}], "completion": "4",
         "completion_ids": [19], "finish_reason": "stop", "columns": {"answer": 4}}]}
    →  {"format": 1, "rows": [
        {"id": "a", "reward": 1.0, "error": null, "parts": {"numeric": 1.0}, "extra": {}}]}

`prompt` is messages or text. `completion_ids` and `finish_reason` may be null. Every row of a
request has the same `columns`. Rows of the answer come in any order, each id once. `reward` is a
number; or null with an `error` (the row failed); or null without one (nothing applies to the row,
which is not 0). `error`, `parts` and `extra` may be left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from quiver.schemas import outside
from quiver.stages.core.servers import MalformedError, read_as
from quiver.stages.reward.scoring import Part

from .rows import Row, Scored, as_part

FORMAT = 1
PATH = "/v1/score"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


# -- the side that asks


def encode(rows: list[Row], config: Any) -> dict[str, Any]:
    """Return the request for `rows`."""
    names = rows[0].columns if config.columns is None else config.columns
    encoded = [
        {**row._asdict(), "columns": {name: row.columns[name] for name in names}} for row in rows
    ]
    return {"format": FORMAT, "rows": encoded}


class _AnsweredRow(_Strict):
    """A row of an answer; `as_part` checks `reward`, so that a bad one costs only its row."""

    id: str
    reward: Any
    error: str | None = None
    parts: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


class _Answered(_Strict):
    format: int = Field(ge=FORMAT, le=FORMAT)  # not Literal[1], which accepts true and 1.0
    rows: list[_AnsweredRow]


def decode(answer: Any, rows: list[Row], config: Any) -> list[Part]:
    """Return the parts of `rows`. Raises MalformedError for another format, or if the answer does
    not have each requested id once."""
    answered = read_as(_Answered, answer).rows
    row_of = {row.id: row for row in answered}
    if len(answered) != len(rows) or row_of.keys() != {row.id for row in rows}:
        raise MalformedError("its rows must have the requested ids, each once")
    parts = []
    for row in rows:
        answer_row = row_of[row.id]
        members_of = {"parts": answer_row.parts, "extra": answer_row.extra}
        extra = {name: members for name, members in members_of.items() if members}
        parts.append(as_part(answer_row.reward, config, extra or None, answer_row.error))
    return parts


# -- the side that answers


Message = Annotated[
    dict[str, Any], BeforeValidator(lambda message: outside.read_message(message, "a message"))
]
"""One message of a conversation."""


class RequestRow(_Strict):
    """One completion to score."""

    id: str = Field(max_length=512)
    prompt: str | list[Message]
    completion: str
    completion_ids: list[int] | None = None
    finish_reason: str | None = None
    columns: dict[str, Any] = Field(default_factory=dict)


class Request(_Strict):
    """Rows to score. All ids differ; all rows have the same columns."""

    format: Literal[1]
    rows: list[RequestRow] = Field(min_length=1, max_length=10_000)

    @model_validator(mode="after")
    def _even(self) -> Request:
        if len({row.id for row in self.rows}) != len(self.rows):
            raise ValueError("an id occurs twice")
        if any(row.columns.keys() != self.rows[0].columns.keys() for row in self.rows):
            raise ValueError("every row of a request must have the same columns")
        return self

    def as_rows(self) -> list[Row]:
        """Return the rows to score."""
        return [Row(**row.model_dump()) for row in self.rows]


class AnswerRow(_Strict):
    """The result for one completion: a number, or an error, or neither (nothing applies to it)."""

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
    """Return the answer for `rows`."""
    answered = [
        {"id": row.id, **reward._asdict()} for row, reward in zip(rows, scored, strict=True)
    ]
    return {"format": FORMAT, "rows": answered}
