"""Chat messages: their form in saved versions, and the untrusted texts in them and in variables.

A message has a role and a content. An assistant's message may also have `tool_calls`, and its
thinking as `reasoning_content`. A tool's message may have `tool_call_id` and `name`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

from quiver.schemas.outside import MEDIA

_WORD = re.compile(r"\w[\w$.-]{0,63}|\$\w{1,30}")
"""Pattern of words that are assumed to hold no control token. An added token whose text is such a
word keeps its id in the variables of a template."""
_NO_TEXTS = frozenset({"role", "type", "id", "tool_call_id"})
"""Members of a message whose values are words that Quiver itself allows (`read_word`)."""


def read_messages(saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of a saved version without null members and with tool_calls parsed."""
    messages = []
    for message in saved:
        members = {name: member for name, member in message.items() if member is not None}
        if "tool_calls" in members:
            members["tool_calls"] = json.loads(members["tool_calls"])
        messages.append(members)
    return messages


def save_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that a version saves; the reverse of `read_messages`."""
    return [
        {**message, "tool_calls": json.dumps(message["tool_calls"])}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with pictures or clips as templates take it: its content is a list of parts,
    these first."""
    parts: list[dict[str, Any]] = [
        {"type": modality} for modality, column in MEDIA.items() for _ in message.get(column) or ()
    ]
    if not parts:
        return message
    members = {name: member for name, member in message.items() if name not in MEDIA.values()}
    if message["content"]:
        parts.append({"type": "text", "text": message["content"]})
    return {**members, "content": parts}


def take_texts(
    messages: list[dict[str, Any]], variables: dict[str, Any] | None = None
) -> tuple[Any, list[str]]:
    """Split chat and template variables into a structure without texts and the list of texts.

    The texts are in order, those in `messages` first. In the arguments of a tool call, keys and all
    strings count as texts too. `variables` are values that others wrote, such as `tools`. Words in
    them that can hold no control token stay in the structure, because templates decide by them:
    keys, types, and short values that are no description.

    Returns:
        The structure as plain JSON, for `put_texts`, and the texts.
    """
    texts: list[str] = []
    chat = _take(messages, texts, "message")
    return ["list", chat, _take(variables or {}, texts, "variable")], texts


def _take(member: Any, texts: list[str], kind: Literal["message", "arguments", "variable"]) -> Any:
    """Take the texts out of `member`. Quiver itself chose the keys of a message."""
    if isinstance(member, str):
        if kind == "variable" and _WORD.fullmatch(member):
            return ["kept", member]
        texts.append(member)
        return "text"
    if isinstance(member, list):
        return ["list", *(_take(below, texts, kind) for below in member)]
    if not isinstance(member, dict):
        return ["kept", member]
    pairs = []
    for key, below in member.items():
        if kind != "message":
            pairs.append([_take(key, texts, kind), _take(below, texts, kind)])
        elif key in _NO_TEXTS:
            pairs.append([["kept", key], ["kept", below]])
        else:
            kind_below = "arguments" if key == "arguments" else kind
            pairs.append([["kept", key], _take(below, texts, kind_below)])
    return ["dict", *pairs]


def texts_of(
    messages: list[dict[str, Any]], is_meant: Callable[[dict[str, Any]], bool]
) -> set[int]:
    """Return the positions, among `take_texts`' texts, of texts in messages that `is_meant`
    accepts."""
    numbers: set[int] = set()
    count = 0
    for message in messages:
        _, texts = take_texts([message])
        if is_meant(message):
            numbers.update(range(count, count + len(texts)))
        count += len(texts)
    return numbers


def is_assistants(message: dict[str, Any]) -> bool:
    """True if the policy wrote the message, so that its markup stays (`Guard`)."""
    return message["role"] == "assistant"


def put_texts(structure: Any, texts: Iterator[str]) -> Any:
    """Rebuild messages and variables from the structure of `take_texts` and other texts."""
    if structure == "text":
        return next(texts)
    kind, *members = structure
    if kind == "kept":
        return members[0]
    if kind == "list":
        return [put_texts(below, texts) for below in members]
    return {put_texts(key, texts): put_texts(below, texts) for key, below in members}
