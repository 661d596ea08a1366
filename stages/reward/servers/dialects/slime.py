"""Dialect `slime`: the remote reward model of slime. One row a request; the answer is any JSON, and
a key says where the number is.

    POST URL
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "response": "4", "label": "4"}
    →  {"reward": 1.0, "why": "equal"}

With `score_key = "reward"` that is 1.0; `score_key = "a.0.b"` goes down objects by name and lists
by position; without one the answer itself is the number. A null there is an error, unless the
answer has an `error` beside it, as this project's own server writes it: text is the row's failure,
null means that nothing applies to the row.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from quiver.schemas.errors import printable
from quiver.stages.reward.scoring import Part

from .quiver import Message
from .rows import Row, Scored
from .strict import MalformedError, as_part

PATH = "/slime"

# -- the side that asks


def encode(rows: list[Row], config: Any) -> dict[str, Any]:
    """The request for the one row of `rows`."""
    (row,) = rows
    label = row.columns[config.label] if config.label else None
    return {"prompt": row.prompt, "response": row.completion, "label": label}


def decode(answer: Any, rows: list[Row], config: Any) -> list[Part]:
    """The part of the one row. MalformedError: nothing stands at the key."""
    number = answer
    for step in config.score_key.split(".") if config.score_key else ():
        if isinstance(number, list) and step.isdecimal() and int(step) < len(number):
            number = number[int(step)]
        elif isinstance(number, dict) and step in number:
            number = number[step]
        else:
            raise MalformedError(
                f"the answer has nothing at key {config.score_key}: {printable(repr(answer), 80)}"
            )
    error = answer.get("error", "") if isinstance(answer, dict) else ""
    extra = answer if isinstance(answer, dict | list) else None
    return [as_part(number, config, extra, error)]


# -- the side that answers


class Request(BaseModel):
    """One row to score."""

    model_config = ConfigDict(strict=True, extra="forbid")
    prompt: str | list[Message]
    response: str
    label: Any = None

    def as_rows(self, label: str) -> list[Row]:
        """The row as it is scored; `label` is the column that the label becomes."""
        return [Row("0", self.model_dump()["prompt"], self.response, {label: self.label})]


class Answer(BaseModel):
    """A number, or an error, or neither (nothing applies to the row)."""

    reward: float | None
    error: str | None
    parts: dict[str, float | None]
    extra: dict[str, Any]


def answer(rows: list[Row], scored: list[Scored]) -> dict[str, Any]:
    """The answer for the one row."""
    return scored[0]._asdict()
