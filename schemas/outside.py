"""Readers for outside data: messages, tool calls, numbers, words and paths. One function per kind.

    read_message({"role": "user", "content": "3 + 4?", "weight": None}, "message 0")
    # {"role": "user", "content": "3 + 4?"}

Outside data comes from source rows, environments and tools, tool calls of the policy, imported
trajectories, and reward servers. Each function raises ValueError with what was found and expected;
its caller adds where the data came from.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import Field

from quiver.schemas.errors import printable
from quiver.schemas.plain import MOST_LEVELS, bad_text, problem_of, read_json

Message = dict[str, Any]
"""`role` and `content`; `name`, `tool_call_id`, `tool_calls` and `reasoning_content` if given."""
MORE = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Members that a message may have beside role and content."""
MEDIA = {"image": "images", "audio": "audio"}
"""For each modality, the column or member with files."""
CHARACTERS_OF_TOKEN = 128
"""Most characters per token: longer tokens are runs of white space alone.

Text with more characters than its token limit allows by this is cut or refused unencoded, because
encoding it could take minutes.
"""
_LARGEST = 3.4028234663852886e38
"""The largest number of a float32."""
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
"""The type of a model's field with a number that a float32 holds."""
THINKING = ("reasoning_content", "reasoning", "thinking")
"""Names that chats use for an assistant's thinking."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_UNUSED = frozenset({"annotations", "id", "refusal", "train", "weight"})
"""Members of a message that do not affect a prompt; `refusal` only if there is a content."""
_REFUSED = {
    "audio": "put clips into the column data.audio",
    "from": 'rename `from` to role and `value` to content, as under "Chats in ShareGPT\'s form" '
    "in deployments/docs/sources.md",
    "function_call": 'write it as tool_calls: [{"type": "function", "function": {…}}]',
    "refusal": "put its text into content",
    "images": "put pictures into the column data.images",
}
"""Members of a message that are refused, and the advice for each."""
_MOST_LEVELS_OF_ARGUMENTS = MOST_LEVELS - 4
"""The JSON in which prompts keep the turns of an episode has four levels around them."""
_LONGEST_WORD = 64
_WORD = re.compile(rf"[A-Za-z0-9_.:-]{{1,{_LONGEST_WORD}}}")
_LONGEST_NAME = 256
_LONGEST_PATH = 4096
_LONGEST_FILE_NAME = 255
_SHAPES = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}
log = logging.getLogger(__name__)


# -- messages


def read_message(given: Any, place: str) -> Message:
    """Read a message of a chat. Null and empty members are ignored, except an empty content."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} has {shape_of(given)}, expected role and content")
    content = given.get("content")
    members = {key: member for key, member in given.items() if member not in _EMPTY}
    unused = (_UNUSED - {"refusal"} if content is None else _UNUSED) & members.keys()
    for key in unused:
        del members[key]
    for_assistants = [name for name in (*THINKING, "tool_calls") if name in members]
    thinking = _read_thinking(members, place)
    if content is None and (members.get("tool_calls") or thinking):
        content = ""
    unknown = sorted(map(str, members.keys() - {"role", "content", *MORE}))
    if unknown or "role" not in members or content is None:
        shown = sorted(map(str, members.keys()))
        lack = " and a content that is null" if content is None and "content" in given else ""
        hint = next((f": {_REFUSED[key]}" for key in unknown if key in _REFUSED), "")
        raise ValueError(
            f"{place} has {printable(shown)}{lack}, expected role and content "
            f"(and {', '.join(MORE)}){hint}"
        )
    role = read_word(members["role"], f"role of {place}")
    if for_assistants and role != "assistant":
        raise ValueError(
            f"{place} has {for_assistants[0]} and the role {role}: take it out, or set role "
            "assistant"
        )
    message: Message = {"role": role, "content": read_content(content, place)}
    if "name" in members:
        message["name"] = read_name(members["name"], f"name of {place}")
    if "tool_call_id" in members:
        message["tool_call_id"] = read_word(members["tool_call_id"], f"tool_call_id of {place}")
    if thinking:
        message["reasoning_content"] = thinking
    if "tool_calls" in members:
        calls = members["tool_calls"]
        if isinstance(calls, str):
            calls = read_json_text(calls, f"tool_calls of {place}")
        if not isinstance(calls, list):
            raise ValueError(f"tool_calls of {place} holds {shape_of(calls)}, expected a list")
        message["tool_calls"] = [read_tool_call(call, f"a call of {place}") for call in calls]
    for key in unused:  # only now: what is no message, such as a row of the source, is refused
        _say_unused(key)
    return message


@cache
def _say_unused(key: str) -> None:
    log.warning(
        "messages have a member %s, which is not used: take it out. Only what the policy samples "
        "is trained",
        key,
    )


def _read_thinking(members: dict[Any, Any], place: str) -> str:
    """Take the thinking out of `members` under any of its names."""
    names = [name for name in THINKING if name in members]
    texts = {name: read_text(members.pop(name), f"{name} of {place}") for name in names}
    if len(set(texts.values())) > 1:
        raise ValueError(f"{place} has {' and '.join(names)}, which differ: keep one of them")
    return texts[names[0]] if names else ""


def read_content(given: Any, place: str) -> str | list[dict[str, str]]:
    """Read a content: a text, or a list of parts.

    A part is {"type": "text", "text": …}, or {"type": "image"} or {"type": "audio"}, which stands
    for the next picture or clip.
    """
    if not isinstance(given, list):
        return read_text(given, f"content of {place}")
    parts: list[dict[str, str]] = []
    for part in given:
        members = part if isinstance(part, Mapping) else {}
        members = {key: member for key, member in members.items() if member is not None}
        if members in ({"type": "image"}, {"type": "audio"}):
            parts.append(members)
        elif members.keys() == {"type", "text"} and members["type"] == "text":
            text = read_text(members["text"], f"content of {place}")
            parts.append({"type": "text", "text": text})
        else:
            raise ValueError(
                f"a part of {place} is {printable(repr(part), 80)}, expected "
                '{"type": "text", "text": …}, or {"type": "image"} or {"type": "audio"}, whose '
                "files are in the columns data.images and data.audio"
            )
    return parts


# -- tool calls


def read_tool_call(given: Any, place: str) -> dict[str, Any]:
    """Read a tool call of a chat into the form that templates take.

    Accepts {"function": {"name", "arguments"}}, or these two members alone. Raises ValueError also
    if Arrow or JSON cannot store a text or number in it.
    """
    if isinstance(given, str):
        given = read_json_text(given, place)
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is {shape_of(given)}, expected {{name, arguments}}")
    call = {key: member for key, member in given.items() if member not in (None, "")}
    call_id = call.pop("id", None)
    kind = call.pop("type", "function")
    call.pop("index", None)  # the position in a stream
    function = call.pop("function", None)
    if function is None:
        function = call
    elif call:
        extra = printable(sorted(map(str, call)))
        raise ValueError(f"{place} has {extra} beside its function: take it out")
    if kind != "function":
        raise ValueError(f"{place} has the type {printable(kind)}, expected function")
    if isinstance(function, Mapping):  # some write "" or null if there are no arguments
        function = {key: member for key, member in function.items() if member not in (None, "")}
    name, arguments = read_call(function, place)
    problem = problem_of(arguments)
    if problem:
        raise ValueError(f"the arguments of {place}: {problem}")
    read: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call_id is not None:
        read["id"] = read_word(call_id, f"the id of {place}")
    return read


def read_call(given: Any, place: str, key: str = "arguments") -> tuple[str, dict[str, Any]]:
    """Read name and arguments of a call {"name": …, key: {…}} with no other member.

    The arguments may be the text of a JSON object; missing arguments mean {}.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is {shape_of(given)}, expected a JSON object")
    if given.get("name") in (None, ""):
        raise ValueError(f'{place} lacks "name"')
    name = read_name(given["name"], f"name of {place}")
    unknown = sorted(map(str, given.keys() - {"name", key}))
    if unknown:
        raise ValueError(
            f'{place} of {printable(name)} has the key "{printable(unknown[0])}", expected '
            f'only "name" and "{key}"'
        )
    arguments = given.get(key, {})
    place = f'"{key}" of {printable(name)} in {place}'
    if isinstance(arguments, str):  # JSON inside JSON, as in OpenAI's interface
        arguments = read_json_text(arguments, place)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{place} is {shape_of(arguments)}, expected a JSON object")
    arguments = dict(arguments)
    problem = problem_of(arguments, with_texts=False, levels=_MOST_LEVELS_OF_ARGUMENTS)
    if problem:
        raise ValueError(f"{place} is not plain JSON: {problem}")
    try:
        json.dumps(arguments)
    except TypeError as error:  # a date from Arrow, or an object from a user's function
        raise ValueError(f"{place} is not plain JSON: {printable(error)}") from None
    return name, arguments


def read_json_text(text: str, place: str) -> Any:
    """Parse JSON text. A ValueError names the `place`."""
    try:
        return read_json(text)
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON: {printable(error)}") from None


# -- texts, words, numbers, paths


def read_text(given: Any, place: str) -> str:
    """Read a text that UTF-8 and templates can hold."""
    if not isinstance(given, str):
        raise ValueError(f"the {place} holds {shape_of(given)}, expected text")
    problem = bad_text(given)
    if problem:
        raise ValueError(f"the {place} {problem}")
    return given


def count_characters(given: Any) -> int:
    """Count the characters of all texts in plain content; pictures and clips have none."""
    media = MEDIA.values()
    waiting = [given]
    count = 0
    while waiting:
        member = waiting.pop()
        if isinstance(member, str):
            count += len(member)
        elif isinstance(member, list):
            waiting += member
        elif isinstance(member, Mapping):
            waiting += [below for key, below in member.items() if key not in media]
    return count


def read_word(given: Any, place: str) -> str:
    """Read a role or an id. Templates insert it verbatim, so it must not spell a control token."""
    if not isinstance(given, str) or not _WORD.fullmatch(given):
        raise ValueError(
            f"{place} is {printable(repr(given))}, expected a word of A-Z a-z 0-9 _ . : - of at "
            f"most {_LONGEST_WORD} characters"
        )
    return given


def read_name(given: Any, place: str) -> str:
    """Read the name of a tool or of a speaker."""
    name = read_text(given, place)
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"the {place} has {len(name)} characters, at most {_LONGEST_NAME} are read"
        )
    return name


def read_number(given: Any) -> float:
    """Read a number that a float32 holds. Text and booleans are refused."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ValueError(f"{shape_of(given)}, expected a number")
    if not is_finite(given):
        raise ValueError("a number that is not finite as float32")
    return float(given)


def is_finite(number: float) -> bool:
    """Return True if a float32 can hold `number`: large integers and floats become infinite."""
    return abs(number) <= _LARGEST  # False for NaN too


def read_path(given: Any, place: str) -> str:
    """Read a file path within the system's limits."""
    path = read_text(given, place)
    if len(path.encode()) > _LONGEST_PATH:
        raise ValueError(f"the {place} has more than {_LONGEST_PATH} bytes")
    if any(len(name.encode()) > _LONGEST_FILE_NAME for name in path.split("/")):
        raise ValueError(f"the {place} has a name of more than {_LONGEST_FILE_NAME} bytes")
    return path


def shape_of(given: Any) -> str:
    """Describe the type of `given` for an error message."""
    if isinstance(given, float) and not math.isfinite(given):
        return "no finite number"
    return _SHAPES.get(type(given), f"a {type(given).__name__}")
