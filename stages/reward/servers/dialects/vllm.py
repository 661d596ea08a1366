"""Dialects `vllm-classify` and `vllm-score`: the pooling endpoints of a vLLM server.

    POST /classify
    {"messages": [… , {"role": "assistant", "content": "4"}], "use_activation": false}   a conversation, one a request: the
                                                                                         reward
                                                                                         model's own
                                                                                         template
                                                                                         renders it
    {"input": ["2 + 2? 4", …], "use_activation": false}                                  text prompts, many a request
    →  {"data": [{"index": 0, "label": "LABEL_0", "probs": [0.83], "num_classes": 1}]}

    POST /score
    {"text_1": ["2 + 2?"], "text_2": ["4"], "use_activation": false}  →  {"data": [{"index": 0,
    "score": 0.83}]}

`use_activation` is always sent, because the server's default squashes a scalar reward by a sigmoid.
With several classes `score_key` is the number of the one that counts. `model` may be left out where
the server has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quiver.stages.reward.scoring import Part

from .rows import Row, as_text
from .strict import MalformedError, as_dict, as_list, as_part, by_index

if TYPE_CHECKING:
    from ..config import ServerConfig

CLASSIFY, SCORE = "/classify", "/score"


def encode_classify(rows: list[Row], config: ServerConfig) -> dict[str, Any]:
    """The request for one conversation, or for rows whose prompts are text."""
    if isinstance(rows[0].prompt, str):
        asked: dict[str, Any] = {"input": [f"{row.prompt}{row.completion}" for row in rows]}
    else:
        (row,) = rows
        asked = {"messages": [*row.prompt, {"role": "assistant", "content": row.completion}]}
    return {**_common(config), **asked, **config.arguments}


def alone(row: Row) -> bool:
    """Whether a row needs a request of its own: a conversation does."""
    return not isinstance(row.prompt, str)


def decode_classify(answer: Any, rows: list[Row], config: ServerConfig) -> list[Part]:
    """The parts of `rows`. MalformedError: not one item a row, or no number for the class."""
    items = as_list(as_dict(answer, "the answer").get("data"), "data", len(rows))
    return [_class(item, config) for item in by_index(items, "data")]


def _class(item: dict[str, Any], config: ServerConfig) -> Part:
    numbers = as_list(item.get("probs"), "probs")
    if not config.score_key and len(numbers) != 1:
        raise MalformedError(
            f"the model has {len(numbers)} classes: say which one counts with score_key"
        )
    at = int(config.score_key or 0)
    if at >= len(numbers):
        raise MalformedError(
            f"the model has {len(numbers)} classes, score_key asks for number {at}"
        )
    extra = {"label": item.get("label"), "probs": numbers} if len(numbers) > 1 else None
    return as_part(numbers[at], config.range, config.rescale, extra)


def encode_score(rows: list[Row], config: ServerConfig) -> dict[str, Any]:
    """The request for `rows`: prompt against completion."""
    texts = [as_text(row.prompt, config.message_template) for row in rows]
    return {
        **_common(config),
        "text_1": texts,
        "text_2": [row.completion for row in rows],
        **config.arguments,
    }


def decode_score(answer: Any, rows: list[Row], config: ServerConfig) -> list[Part]:
    """The parts of `rows`. MalformedError: not one item a row."""
    items = as_list(as_dict(answer, "the answer").get("data"), "data", len(rows))
    return [
        as_part(item.get("score"), config.range, config.rescale) for item in by_index(items, "data")
    ]


def _common(config: ServerConfig) -> dict[str, Any]:
    return {"use_activation": config.use_activation} | (
        {"model": config.model} if config.model else {}
    )
