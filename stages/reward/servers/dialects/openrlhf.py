"""Dialect `openrlhf`: the remote reward server of OpenRLHF. Texts only, many rows per request,
matched by position.

    POST /get_reward
    {"query": ["2 + 2? 4"], "prompts": ["2 + 2? "], "labels": ["4"]}
    →  {"rewards": [1.0], "scores": [1.0], "extra_logs": {}}

`query` is prompt and completion in one. The protocol cannot express a failed row, so a null in
`rewards` is an error. This project's own server adds a list `error` to `extra_logs`: text there is
the row's failure, and null beside a null reward means that nothing applies to the row.

OpenRLHF decodes with special tokens, so its queries end in the policy's end token, and would never
equal the right answer. The answering side removes such tokens from the end and reports how many in
`extra_logs`.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quiver.stages.core.servers import MalformedError, read_as
from quiver.stages.reward.scoring import Part

from .rows import Row, Scored, as_part, as_text, fill

PATH = "/get_reward"
_END_TOKEN = re.compile(r"(?:<[|｜][^<>|｜]{1,40}[|｜]>|</s>|<eos>|<pad>|<end_of_turn>)\Z")
_LONGEST_END_TOKEN = 44
_ONE_TOKEN = re.compile(r"<[^<>]+>")

# -- the side that asks


def encode(rows: list[Row], config: Any) -> dict[str, Any]:
    """Return the request for `rows`; a conversation is written out by the config's templates."""
    prompts = []
    for row in rows:
        text = as_text(row.prompt, config.message_template)
        is_chat = not isinstance(row.prompt, str)
        prompts.append(text + fill(config.reply_template, {}) if is_chat else text)
    return {
        "query": [prompt + row.completion for prompt, row in zip(prompts, rows, strict=True)],
        "prompts": prompts,
        "labels": [row.columns[config.label] if config.label else None for row in rows],
    }


class _Answered(BaseModel):
    rewards: Any = None
    scores: Any = None
    extra_logs: dict[str, Any] | None = None


def decode(answer: Any, rows: list[Row], config: Any) -> list[Part]:
    """Return the parts of `rows`. Raises MalformedError if a list is missing or has another
    length."""
    num_rows = len(rows)
    answered = read_as(_Answered, answer)
    columns = {
        name: column
        for name, column in {**(answered.extra_logs or {}), "scores": answered.scores}.items()
        if isinstance(column, list) and len(column) == num_rows
    }
    key = config.score_key or "rewards"
    numbers = getattr(answered, key)
    if not isinstance(numbers, list) or len(numbers) != num_rows:
        raise MalformedError(f"{key} is not a list of {num_rows} items")
    parts = []
    for place, number in enumerate(numbers):
        extras = {name: column[place] for name, column in columns.items()}
        extra = {name: member for name, member in extras.items() if member is not None}
        parts.append(as_part(number, config, extra or None, extras.get("error", "")))
    return parts


# -- the side that answers


class Request(BaseModel):
    """Rows to score. Each query holds its prompt, at the beginning or after a token such as <s>;
    the rest is the completion."""

    model_config = ConfigDict(strict=True, extra="forbid")
    query: list[str] = Field(max_length=10_000)
    prompts: list[str] = Field(default_factory=list)
    labels: list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _even(self) -> Request:
        if not len(self.query) == len(self.prompts) == len(self.labels):
            raise ValueError("query, prompts and labels must have the same length")
        if not all(prompt in query for query, prompt in zip(self.query, self.prompts, strict=True)):
            raise ValueError("each query must hold its prompt")
        return self

    def completions(self) -> list[str]:
        """Return the text after the prompt in each query, end tokens included."""
        pairs = zip(self.query, self.prompts, strict=True)
        return [query[query.index(prompt) + len(prompt) :] for query, prompt in pairs]

    def as_rows(self, label: str, *, keeps_end_tokens: bool = False) -> list[Row]:
        """Return the rows to score; the labels become the column `label`."""
        return [
            Row(
                str(place),
                prompt,
                text if keeps_end_tokens else without_end_tokens(text),
                {label: column},
            )
            for place, (text, prompt, column) in enumerate(
                zip(self.completions(), self.prompts, self.labels, strict=True)
            )
        ]


def without_end_tokens(text: str) -> str:
    """Remove the special tokens at the end of `text`, and the white space around them. Text without
    them is unchanged. The time is linear in the length."""
    length = len(text)
    end = len(text.rstrip())
    while match := _END_TOKEN.search(text[max(0, end - _LONGEST_END_TOKEN) : end]):
        end -= len(match[0])
        while end and text[end - 1].isspace():
            end -= 1
        length = end
    return text[:length]


class Answer(BaseModel):
    """One item per row in each list. `extra_logs` holds `error` and one list per part."""

    rewards: list[float | None]
    scores: list[float | None]
    extra_logs: dict[str, list[Any]]


def answer(request: Request, rows: list[Row], scored: list[Scored]) -> dict[str, Any]:
    """Return the answer for `rows` of the request; empty lists for none."""
    rewards = [row.reward for row in scored]
    names = scored[0].parts if scored else []
    logs: dict[str, list[Any]] = {name: [row.parts[name] for row in scored] for name in names}
    logs["error"] = [row.error for row in scored]
    endings = [
        text.removeprefix(row.completion)
        for text, row in zip(request.completions(), rows, strict=True)
    ]
    if any(endings):
        logs["end_tokens_taken_off"] = [len(_ONE_TOKEN.findall(ending)) for ending in endings]
    return {"rewards": rewards, "scores": rewards, "extra_logs": logs}
