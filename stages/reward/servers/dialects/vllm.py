"""Dialects `vllm-classify` and `vllm-score`: the pooling endpoints of a vLLM server.

    POST /classify
    {"messages": [… , {"role": "assistant", "content": "4"}], "use_activation": false}
    {"input": ["2 + 2? 4", …], "use_activation": false}
    →  {"data": [{"index": 0, "label": "LABEL_0", "probs": [0.83], "num_classes": 1}]}

    POST /score
    {"text_1": ["2 + 2?"], "text_2": ["4"], "use_activation": false}
    →  {"data": [{"index": 0, "score": 0.83}]}

A conversation goes as `messages`, one a request, and the reward model's own template renders it;
text prompts go as `input`, many a request. `use_activation` is always sent, because the
server's default squashes a scalar reward by a sigmoid. With several classes `score_key` is the
number of the one that counts. `model` may be left out where the server has one.
"""

from __future__ import annotations

from typing import Any

from quiver.stages.reward.scoring import Part

from .rows import Row, as_text
from .strict import MalformedError, as_list, as_part, by_index, list_at

CLASSIFY, SCORE = "/classify", "/score"


def encode_classify(rows: list[Row], config: Any) -> dict[str, Any]:
    """The request for one conversation, or for rows whose prompts are text."""
    if isinstance(rows[0].prompt, str):
        texts = [f"{row.prompt}{row.completion}" for row in rows]
        return _request({"input": texts}, config)
    (row,) = rows
    reply = {"role": "assistant", "content": row.completion}
    return _request({"messages": [*row.prompt, reply]}, config)


def is_alone(row: Row) -> bool:
    """Whether a row needs a request of its own: a conversation does."""
    return not isinstance(row.prompt, str)


def decode_classify(answer: Any, rows: list[Row], config: Any) -> list[Part]:
    """The parts of `rows`. MalformedError: not one item a row, or no number for the class."""
    parts = []
    for row in by_index(list_at(answer, "data", len(rows)), "data"):
        numbers = as_list(row.get("probs"), "probs")
        num_classes = len(numbers)
        if not config.score_key and num_classes != 1:
            raise MalformedError(
                f"the model has {num_classes} classes: say which one counts with score_key"
            )
        number = int(config.score_key or 0)
        if number >= num_classes:
            raise MalformedError(
                f"the model has {num_classes} classes, score_key asks for number {number}"
            )
        extra = {"label": row.get("label"), "probs": numbers} if num_classes > 1 else None
        parts.append(as_part(numbers[number], config.range, config.rescale, extra))
    return parts


def encode_score(rows: list[Row], config: Any) -> dict[str, Any]:
    """The request for `rows`: prompt against completion."""
    prompts = [as_text(row.prompt, config.message_template) for row in rows]
    return _request({"text_1": prompts, "text_2": [row.completion for row in rows]}, config)


def decode_score(answer: Any, rows: list[Row], config: Any) -> list[Part]:
    """The parts of `rows`. MalformedError: not one item a row."""
    ordered = by_index(list_at(answer, "data", len(rows)), "data")
    return [as_part(row.get("score"), config.range, config.rescale) for row in ordered]


def _request(texts: dict[str, Any], config: Any) -> dict[str, Any]:
    model = {"model": config.model} if config.model else {}
    return {"use_activation": config.use_activation, **model, **texts, **config.arguments}
