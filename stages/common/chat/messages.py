"""Messages of a chat: as versions keep them, and the texts in them, and in what templates are given
beside them, that nobody may trust.

A message has a role and a content; one of an assistant may have `tool_calls` and its thinking as
`reasoning_content`, one of a tool `tool_call_id` and its `name`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_WORD = re.compile(r"\w[\w$.-]{0,63}|\$\w{1,30}")
"""Taken to hold no control token: an added token whose text is such a word keeps its id in the
variables of a template."""
_NO_TEXTS = frozenset({"role", "type", "id", "tool_call_id"})
"""Members of a message whose values are words that Quiver allows (`read_word`)."""


def read_messages(saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a version of prompts: without members that are null, tool_calls read."""
    messages = []
    for message in saved:
        members = {name: member for name, member in message.items() if member is not None}
        if "tool_calls" in members:
            members["tool_calls"] = json.loads(members["tool_calls"])
        messages.append(members)
    return messages


def save_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reverse of `read_messages`."""
    return [
        {**message, "tool_calls": json.dumps(message["tool_calls"])}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message that shows `images` as templates take it: with a content of parts, of which the
    pictures come first."""
    if not message.get("images"):
        return message
    members = {name: member for name, member in message.items() if name != "images"}
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in message["images"]]
    if message["content"]:
        parts.append({"type": "text", "text": message["content"]})
    return {**members, "content": parts}


def take_texts(
    messages: list[dict[str, Any]], variables: dict[str, Any] | None = None
) -> tuple[Any, list[str]]:
    """`messages` and `variables` as plain JSON without their texts, and these in order, those of
    the messages first.

    In the arguments of a call keys and all else are texts as well. `variables` are a template's, in
    others' words, such as `tools`. Of these, words that can hold no control token and by which
    templates decide stay: keys, types, and short values that are no description.
    """
    texts: list[str] = []
    structure = _take(messages, texts, is_ours=True)
    return ["list", structure, _take_variable(variables or {}, texts)], texts


def _take(member: Any, texts: list[str], *, is_ours: bool) -> Any:
    """`is_ours`: the keys are Quiver's own words."""
    if isinstance(member, str):
        texts.append(member)
        return "text"
    if isinstance(member, list):
        return ["list", *(_take(below, texts, is_ours=is_ours) for below in member)]
    if not isinstance(member, dict):
        return ["kept", member]
    pairs = []
    for key, below in member.items():
        if is_ours and key in _NO_TEXTS:
            pairs.append([["kept", key], ["kept", below]])
        else:
            shown_key = ["kept", key] if is_ours else _take(key, texts, is_ours=False)
            is_below_ours = is_ours and key != "arguments"
            pairs.append([shown_key, _take(below, texts, is_ours=is_below_ours)])
    return ["dict", *pairs]


def texts_of(
    messages: list[dict[str, Any]], is_meant: Callable[[dict[str, Any]], bool]
) -> set[int]:
    """Which of the texts that `take_texts` gives belong to messages that are meant."""
    numbers: set[int] = set()
    count = 0
    for message in messages:
        _, texts = take_texts([message])
        if is_meant(message):
            numbers.update(range(count, count + len(texts)))
        count += len(texts)
    return numbers


def is_assistants(message: dict[str, Any]) -> bool:
    """Whether a message is what a policy says: its markup stays (`Guard`)."""
    return message["role"] == "assistant"


def _take_variable(member: Any, texts: list[str]) -> Any:
    if isinstance(member, str):
        if _WORD.fullmatch(member):
            return ["kept", member]
        texts.append(member)
        return "text"
    if isinstance(member, list):
        return ["list", *(_take_variable(below, texts) for below in member)]
    if not isinstance(member, dict):
        return ["kept", member]
    pairs = [
        [_take_variable(key, texts), _take_variable(below, texts)] for key, below in member.items()
    ]
    return ["dict", *pairs]


def put_texts(structure: Any, texts: Iterator[str]) -> Any:
    """The reverse of `take_texts`, with other texts: messages and variables."""
    if structure == "text":
        return next(texts)
    kind, *members = structure
    if kind == "kept":
        return members[0]
    if kind == "list":
        return [put_texts(below, texts) for below in members]
    return {put_texts(key, texts): put_texts(below, texts) for key, below in members}
