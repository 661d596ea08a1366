"""Dialects `vllm-classify` and `vllm-score`: the pooling endpoints of a vLLM server.

    POST /classify
    {"messages": [… , {"role": "assistant", "content": "4"}], "use_activation": false}
    {"input": ["2 + 2? 4", …], "use_activation": false}
    →  {"data": [{"index": 0, "label": "LABEL_0", "probs": [0.83], "num_classes": 1}]}

    POST /score
    {"text_1": ["2 + 2?"], "text_2": ["4"], "use_activation": false}
    →  {"data": [{"index": 0, "score": 0.83}]}

A conversation is sent as `messages`, one per request, and the reward model's own template renders
it. Text prompts are sent as `input`, many per request. `use_activation` is always sent, because
the server's default applies a sigmoid to a scalar reward. With several classes `score_key` is the
number of the one to use. `model` may be left out if the server has one.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from quiver.stages.core.servers import MalformedError, read_as
from quiver.stages.reward.scoring import Part

from .rows import Row, as_part, as_text

CLASSIFY = "/classify"
SCORE = "/score"


class _Class(BaseModel):
    index: int
    probs: list[Any]
    label: Any = None


class _Classes(BaseModel):
    data: list[_Class]


class _Score(BaseModel):
    index: int
    score: Any = None


class _Scores(BaseModel):
    data: list[_Score]


def encode_classify(rows: list[Row], config: Any) -> dict[str, Any]:
    """Return the request for one conversation, or for rows whose prompts are text."""
    if isinstance(rows[0].prompt, str):
        texts = [f"{row.prompt}{row.completion}" for row in rows]
        return _request({"input": texts}, config)
    (row,) = rows
    reply = {"role": "assistant", "content": row.completion}
    return _request({"messages": [*row.prompt, reply]}, config)


def is_alone(row: Row) -> bool:
    """True if a row needs a request of its own: a conversation does."""
    return not isinstance(row.prompt, str)


def decode_classify(answer: Any, rows: list[Row], config: Any) -> list[Part]:
    """Return the parts of `rows`. Raises MalformedError unless each row has one item with a number
    for the class."""
    parts = []
    for row in _by_index(read_as(_Classes, answer).data, len(rows)):
        num_classes = len(row.probs)
        if not config.score_key and num_classes != 1:
            raise MalformedError(
                f"the model has {num_classes} classes: say which one counts with score_key"
            )
        number = int(config.score_key or 0)
        if number >= num_classes:
            raise MalformedError(
                f"the model has {num_classes} classes, score_key asks for number {number}"
            )
        extra = {"label": row.label, "probs": row.probs} if num_classes > 1 else None
        parts.append(as_part(row.probs[number], config, extra))
    return parts


def encode_score(rows: list[Row], config: Any) -> dict[str, Any]:
    """Return the request for `rows`: prompt against completion."""
    prompts = [as_text(row.prompt, config.message_template) for row in rows]
    return _request({"text_1": prompts, "text_2": [row.completion for row in rows]}, config)


def decode_score(answer: Any, rows: list[Row], config: Any) -> list[Part]:
    """Return the parts of `rows`. Raises MalformedError unless each row has one item."""
    ordered = _by_index(read_as(_Scores, answer).data, len(rows))
    return [as_part(row.score, config) for row in ordered]


def _by_index(items: list[Any], num_rows: int) -> list[Any]:
    ordered = sorted(items, key=lambda entry: entry.index)
    if [entry.index for entry in ordered] != list(range(num_rows)):
        raise MalformedError(f"index of its data must be each of 0 to {num_rows - 1} once")
    return ordered


def _request(texts: dict[str, Any], config: Any) -> dict[str, Any]:
    model = {"model": config.model} if config.model else {}
    return {"use_activation": config.use_activation, **model, **texts, **config.arguments}
