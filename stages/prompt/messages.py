"""Messages as a source has them, read strictly: a role, a content, and where tools were called what
belongs to that."""

from __future__ import annotations

import json
import re
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.chat.template import bad_text

MORE = frozenset({"tool_calls", "tool_call_id", "name"})
"""What a message may have beside role and content."""
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Message = dict[str, Any]


def read_message(name: str, number: int, message: Any) -> Message:
    """A message of row `name`. ConfigError."""
    entries: dict[str, Any] = {}
    if isinstance(message, dict):
        entries = {key: entry for key, entry in message.items() if entry is not None}
    if entries.get("tool_calls"):
        entries.setdefault("content", "")
    if entries.keys() - MORE != {"role", "content"}:
        raise bad_row(
            name,
            f"message {number} has {printable(sorted(entries) or type_name(message))}, expected "
            f"role and content (and {', '.join(sorted(MORE))})",
        )
    place = f"message {number}"
    content = entries["content"]
    if isinstance(content, list):
        content = [_read_part(name, part, place) for part in content]
    else:
        content = require_text(name, content, f"the content of {place}")
    read: Message = {
        "role": _require_word(name, entries["role"], f"role of {place}"),
        "content": content,
    }
    if "name" in entries:
        read["name"] = require_text(name, entries["name"], f"the name of {place}")
    if "tool_call_id" in entries:
        read["tool_call_id"] = _require_word(
            name, entries["tool_call_id"], f"tool_call_id of {place}"
        )
    if entries.get("tool_calls"):
        calls = _as_json(name, entries["tool_calls"], f"tool_calls of {place}")
        if not isinstance(calls, list):
            raise bad_row(name, f"tool_calls of {place} holds {type_name(calls)}, expected a list")
        read["tool_calls"] = [_read_call(name, call, f"a call of {place}") for call in calls]
    return read


def _read_part(name: str, part: Any, place: str) -> dict[str, str]:
    """A part of a content: {"type": "text", "text": …}, or {"type": "image"}, which stands for the
    next picture of the row."""
    members = part if isinstance(part, dict) else {}
    members = {key: member for key, member in members.items() if member is not None}
    if members == {"type": "image"}:
        return members
    if members.keys() == {"type", "text"} and members["type"] == "text":
        text = require_text(name, members["text"], f"a part of {place}")
        return {"type": "text", "text": text}
    raise bad_row(
        name,
        f"a part of {place} has {printable(sorted(members) or type_name(part))}, expected "
        '{type: "text", text} or {type: "image"}, whose pictures are in the column data.images',
    )


def text_of(content: str | list[dict[str, str]]) -> str:
    """The text of a content, without its pictures."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def show_images(name: str, messages: list[Message], count: int) -> list[Message]:
    """`messages` with `count` parts of type image: those that they have, or where they have none,
    before the text of the first message of a user. ConfigError where they have another number."""
    shown = sum(
        part["type"] == "image"
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    )
    if shown == count:
        if not count:  # many templates take a text alone
            return [{**each, "content": text_of(each["content"])} for each in messages]
        return messages
    place = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if shown or place is None:
        raise bad_row(name, f"shows {shown} pictures, and the row has {count}")
    message = messages[place]
    parts = message["content"]
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    shown_first = {**message, "content": [{"type": "image"}] * count + parts}
    return [*messages[:place], shown_first, *messages[place + 1 :]]


def _read_call(name: str, call: Any, place: str) -> dict[str, Any]:
    """A call as templates take it, of {"function": {"name", "arguments"}} or these two alone."""
    call = _as_json(name, call, place)
    call = call if isinstance(call, dict) else {}
    function = call.get("function") or call
    arguments = _as_json(name, function.get("arguments") or {}, f"the arguments of {place}")
    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise bad_row(name, f"{place} is no name with arguments")
    problem = bad_text(json.dumps([function["name"], arguments], ensure_ascii=False))
    if problem:
        raise bad_row(name, f"{place} {problem}")
    read = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if call.get("id") is not None:
        read["id"] = _require_word(name, call["id"], f"the id of {place}")
    return read


def require_text(name: str, content: Any, place: str) -> str:
    """`content`, which is text that a template takes. ConfigError."""
    if not isinstance(content, str):
        raise bad_row(name, f"{place} holds {type_name(content)}, expected text")
    problem = bad_text(content)
    if problem:
        raise bad_row(name, f"{place} {problem}")
    return content


def type_name(content: Any) -> str:
    """What `content` is, in a message."""
    return "nothing" if content is None else f"a {type(content).__name__}"


def bad_row(name: str, message: str) -> ConfigError:
    """The error of a row that is wrong."""
    return ConfigError(name, message, next="correct the row, or take it out of the source")


def _require_word(name: str, word: Any, place: str) -> str:
    if not isinstance(word, str) or not _WORD.fullmatch(word):
        raise bad_row(
            name, f"{place} is {printable(repr(word))}, expected a word of A-Z a-z 0-9 _ . -"
        )
    return word


def _as_json(name: str, cell: Any, place: str) -> Any:
    """What JSON text says; anything else as it is."""
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise bad_row(name, f"{place}: {printable(error)}") from None
