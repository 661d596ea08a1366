"""Messages of a row of a source: they are read by the entrance for all that comes from outside
(`schemas/outside.py`), and errors name the row."""

from __future__ import annotations

from typing import Any

from quiver.schemas import outside
from quiver.schemas.errors import ConfigError
from quiver.schemas.outside import Message

MEMBERS_BEYOND_TEXT = frozenset((*outside.MORE, *outside.THINKING))
"""What a message may have beside role and content."""


def read_message(name: str, number: int, message: Any) -> Message:
    """A message of row `name`. ConfigError."""
    try:
        return outside.read_message(message, f"message {number}")
    except ValueError as error:
        raise bad_row(name, str(error)) from None


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
    if shown:
        raise bad_row(name, f"shows {shown} pictures, and the row has {count}")
    if place is None:
        problem = f"has {count} pictures and no message of a user that could show them"
        raise bad_row(name, f'{problem}: add parts {{type: "image"}}')
    message = messages[place]
    parts = message["content"]
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    shown_first = {**message, "content": [{"type": "image"}] * count + parts}
    return [*messages[:place], shown_first, *messages[place + 1 :]]


def require_text(name: str, content: Any, place: str) -> str:
    """`content`, which is text that a template takes. ConfigError."""
    try:
        return outside.read_text(content, place)
    except ValueError as error:
        raise bad_row(name, str(error)) from None


def type_name(content: Any) -> str:
    """What `content` is, in a message."""
    return outside.shape_of(content)


def bad_row(name: str, message: str) -> ConfigError:
    """The error of a row that is wrong."""
    return ConfigError(name, message, next="correct the row, or take it out of the source")
