"""Check the messages of a source's row.

`schemas/outside.py`, which reads all data from outside, does the checks; here errors name the row.
"""

from __future__ import annotations

from typing import Any

from quiver.schemas import outside
from quiver.schemas.errors import ConfigError
from quiver.schemas.outside import Message

MEMBERS_BEYOND_TEXT = frozenset((*outside.MORE, *outside.THINKING))
"""Keys that a message may have besides role and content."""


def read_message(name: str, number: int, message: Any) -> Message:
    """Return a checked message of row `name`. Raises ConfigError."""
    try:
        return outside.read_message(message, f"message {number}")
    except ValueError as error:
        raise bad_row(name, str(error)) from None


def text_of(content: str | list[dict[str, str]]) -> str:
    """Return the text of a content, without its pictures."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def show_images(name: str, messages: list[Message], count: int) -> list[Message]:
    """Return `messages` with `count` parts of type image.

    If they have no such parts, all are put before the text of the first user message. Raises
    ConfigError if they have another number.
    """
    shown = sum(
        part["type"] == "image"
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    )
    if shown == count:
        if not count:  # many templates accept only text
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
    """Return `content` if it is text that a template accepts. Raises ConfigError otherwise."""
    try:
        return outside.read_text(content, place)
    except ValueError as error:
        raise bad_row(name, str(error)) from None


def type_name(content: Any) -> str:
    """Return the kind of `content`, for an error."""
    return outside.shape_of(content)


def bad_row(name: str, message: str) -> ConfigError:
    """Return the error for an incorrect row."""
    return ConfigError(name, message, next="correct the row, or take it out of the source")
