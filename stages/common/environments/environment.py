"""What an environment is: it is reset for a row, answers the policy's turns, and may pay for them.

A user's class with a method `step` gets a `Turn` and returns a `Step` (or a mapping with its
fields, or the text alone):

    class Guess:
        def reset(self, seed, limit):                 # `seed`, and columns of the row, by name
            self.number = random.Random(seed).randrange(limit)

        def step(self, turn):
            guess = int(turn.text)
            text = "higher" if guess < self.number else "lower"
            return Step(text=text, done=guess == self.number)

Whatever else can answer turns is adapted to the protocol `Environment` (see `adapters`). All of it
runs in worker processes alone.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import io
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from quiver.schemas import outside
from quiver.schemas.errors import printable
from quiver.schemas.manifest import canonical
from quiver.schemas.outside import Message
from quiver.stages.common.environments.tool_schemas import ToolSchema, run_tool
from quiver.stages.common.runtime.answering import no_copies

Row = dict[str, Any]
"""The columns of one prompt, by name; `prompt` is its messages or its text."""
_MOST_INFO = 10_000
_OURS = "quiver_"
"""What our own members of `info` begin with."""
_NO_JSON = re.compile("NaN|Infinity")


class Call(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


class Turn(NamedTuple):
    """What the policy did."""

    text: str
    """What it said; before its calls, where it made any."""
    calls: tuple[Call, ...] = ()


class Step(NamedTuple):
    """What came of a turn."""

    messages: list[Message] | None = None
    """What the policy reads next: {role, content} each, `name` too where it is a tool's, `images`
    too where it shows pictures, which stand before its content. None is the assistant's."""
    text: str | None = None
    """The same as one message of the user."""
    reward: float | None = None
    """Of this turn; None: it has none."""
    done: bool = False
    info: dict[str, Any] | None = None
    """Kept beside the turn, as JSON of at most 10 kB."""
    images: list[Any] | None = None
    """What the message of `text` shows: PIL images, or the bytes of a PNG, JPEG or WebP. Outside of
    the workers they are base64."""

    def observation(self) -> list[Message]:
        """What the policy reads next, as messages."""
        if self.text is None and not self.images:
            return list(self.messages or [])
        message: Message = {"role": "user", "content": self.text or ""}
        if self.images:
            message["images"] = self.images
        return [*(self.messages or []), message]


class Environment(Protocol):
    """One episode's environment, in a worker."""

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Begin; the opening messages, or none."""
        ...

    def step(self, turn: Turn) -> Step:
        """Answer a turn."""
        ...

    def finish(self) -> float | None:
        """The reward of the episode as it stands at its end, where there is one."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class Factory(NamedTuple):
    """What environments of one kind are made by."""

    make: Callable[[], Environment]
    tools: list[ToolSchema]
    """What the policy may call."""
    answers: bool
    """Whether a turn without calls is the policy's answer, and ends the episode."""
    fingerprint: str = ""
    """Hash of the user's code."""


def environment_seed(group_id: str) -> int:
    """The 63-bit seed of the environments of one prompt: they all begin alike."""
    digest = hashlib.sha256(canonical(["environment", group_id])).digest()
    return int.from_bytes(digest[:8]) >> 1


# -- what users' code returns


def read_step(returned: Any) -> Step:
    """A `Step` of plain JSON, whatever a user's `step` returned. ValueError says what is wrong."""
    if isinstance(returned, Mapping):
        unknown = sorted(set(map(str, returned)) - set(Step._fields))
        if unknown:
            raise ValueError(
                f"step returned the key {printable(unknown[0])}; a step has "
                f"{', '.join(Step._fields)}"
            )
        returned = Step(**returned)
    elif isinstance(returned, str):
        returned = Step(text=returned)
    if not all(hasattr(returned, name) for name in Step._fields if name != "images"):
        raise ValueError(f"step returned {type(returned).__name__}, expected a Step")
    text = returned.text
    if text is not None and not isinstance(text, str):
        raise ValueError(f"text of the step is {type(text).__name__}, expected text")
    info = returned.info
    if info is not None:
        info = json.loads(_as_json(info))
        if not isinstance(info, dict):
            raise ValueError(f"info of the step is {type(returned.info).__name__}, not a mapping")
        ours = next((name for name in info if name.startswith(_OURS)), None)
        if ours is not None:
            raise ValueError(
                f"info of the step has {printable(ours)}: names that begin with {_OURS} are taken"
            )
    messages = None if returned.messages is None else read_messages(returned.messages)
    if any(message["role"] == "assistant" for message in messages or ()):
        raise ValueError(
            "the step has a message of the role assistant, which only the policy speaks as: return "
            "it as user or tool"
        )
    return Step(
        messages,
        None if text is None else clean(text),
        read_reward(returned.reward),
        read_done(returned.done),
        info,
        read_images(getattr(returned, "images", None)),
    )


def read_messages(returned: Any) -> list[Message]:
    """Messages of a role and a content each. A text is one message of the user, None is none.
    A content may be a list of parts, as chats have them: pictures, then texts. What a step may
    return is taken too. ValueError."""
    if returned is None or isinstance(returned, str):
        return [{"role": "user", "content": clean(returned)}] if returned else []
    if isinstance(returned, Step | Mapping):
        return read_step(returned).observation()
    messages = []
    for number, given in enumerate(returned):
        members = dict(given) if isinstance(given, Mapping) else given
        images = None
        if isinstance(members, dict):
            images = members.pop("images", None)
            if isinstance(members.get("content"), list):
                members["content"], images = _read_parts(members["content"])
        message = outside.read_message(cleaned(members), f"message {number}")
        messages.append({**message, "images": read_images(images)} if images else message)
    return messages


def read_opening(returned: Any) -> list[Message]:
    """What `reset` returned, as `read_messages` reads it. Messages of the assistant are history,
    which is not trained on; the last message is not one, since the policy speaks next.
    ValueError."""
    messages = read_messages(returned)
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError("the last message of reset is the assistant's, but the policy speaks next")
    return messages


def _read_parts(parts: list[Any]) -> tuple[str, list[Any]]:
    """The text of a content of parts, and its pictures. ValueError where one stands behind a
    text."""
    texts: list[str] = []
    images = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image" and part.get("image") is not None and not texts:
            images.append(part["image"])
        else:
            raise ValueError(
                f"a part of a message is {outside.shape_of_part(part)}, expected pictures "
                '{"type": "image", "image": …}, then texts {"type": "text", "text": …}'
            )
    return "".join(texts), images


def read_images(returned: Any) -> list[str] | None:
    """The pictures of a message, as base64. ValueError."""
    if returned is None:
        return None
    if not isinstance(returned, list | tuple):
        raise ValueError(f"images are {type(returned).__name__}, expected a list")
    encoded = []
    for image in returned:
        if not _is_picture(image):
            raise ValueError(f"a picture is {type(image).__name__}, expected a PIL image or bytes")
        content = image
        if not isinstance(image, bytes):
            buffer = io.BytesIO()
            is_printed = image.mode in ("CMYK", "YCbCr", "HSV", "LAB")  # PNG has none of these
            (image.convert("RGB") if is_printed else image).save(buffer, "PNG")
            content = buffer.getvalue()
        encoded.append(base64.b64encode(content).decode())
    return encoded or None


def pictures_in(messages: list[Message]) -> list[bytes]:
    """The bytes of their pictures, one after another."""
    return [base64.b64decode(image) for message in messages for image in message.get("images", ())]


def for_people(messages: list[Message]) -> str:
    """Their contents; of each picture a mark with the beginning of its hash."""
    lines = []
    for message in messages:
        lines += [f"[picture {_short_hash(image)}]" for image in message.get("images", ())]
        if message["content"] or not message.get("images"):
            lines.append(message["content"])
    return "\n".join(lines)


def without_pictures(messages: list[Message]) -> list[Message]:
    """Messages with the beginnings of hashes in place of their pictures: small, and equal where
    these are."""
    return [
        {**message, "images": [_short_hash(image) for image in message["images"]]}
        if "images" in message
        else message
        for message in messages
    ]


def _short_hash(image: str) -> str:
    return hashlib.sha256(base64.b64decode(image)).hexdigest()[:12]


def read_reward(returned: Any) -> float | None:
    """A number that a float32 holds, or None; True and False are 1 and 0, as of reward functions.
    ValueError."""
    if hasattr(returned, "item"):  # of numpy or torch
        returned = returned.item()
    if isinstance(returned, bool):
        returned = int(returned)
    try:
        return None if returned is None else outside.read_number(returned)
    except ValueError:
        raise ValueError(
            f"the reward is {printable(repr(returned))}, expected a finite number"
        ) from None


def read_done(returned: Any) -> bool:
    """Whether the episode ended. ValueError where that is no truth value."""
    if hasattr(returned, "item"):  # of numpy or torch
        returned = returned.item()
    if not isinstance(returned, bool):
        raise ValueError(f"done of the step is {printable(repr(returned))}, expected True or False")
    return returned


def read_text(returned: Any) -> str:
    """What a tool returned, as text: text as it is, None as nothing, anything else as JSON."""
    if returned is None:
        return ""
    return clean(returned if isinstance(returned, str) else _as_json(returned))


def clean(text: str) -> str:
    """`text` as UTF-8 can hold it, without NUL."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def cleaned(member: Any) -> Any:
    """All texts in plain content as UTF-8 can hold them, without NUL."""
    if isinstance(member, str):
        return clean(member)
    if isinstance(member, list):
        return [cleaned(below) for below in member]
    if isinstance(member, dict):
        return {cleaned(key): cleaned(below) for key, below in member.items()}
    return member


def _as_json(returned: Any) -> str:
    """As JSON; what JSON has no word for is there as text, and what is too long is cut to text."""
    text = json.dumps(returned, ensure_ascii=False, default=_said)
    if _NO_JSON.search(text):
        text = json.dumps(json.loads(text, parse_constant=str), ensure_ascii=False)
    if isinstance(returned, Mapping) and len(text) > _MOST_INFO:
        return json.dumps({"cut": text[:_MOST_INFO]}, ensure_ascii=False)
    return text


def _said(member: Any) -> str:
    """A thing that JSON has no word for. TypeError where it has no text of its own either."""
    text = str(member)
    if " at 0x" in text:  # where it lies says nothing, and changes from run to run
        raise TypeError(f"a {type(member).__name__} is no text, and cannot be written as JSON")
    return text


# -- how users' code is called


def call_reset(reset: Callable[..., Any], row: Row, seed: int) -> Any:
    """`reset(**columns)` with those columns that it takes; `seed` too, where it takes that and no
    column has the name."""
    columns = {"seed": seed, **row}
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        return waited(reset(**(columns if "seed" in names else {**row})))
    return waited(reset(**{p.name: columns[p.name] for p in parameters if p.name in columns}))


def call_tool(tools: Mapping[str, Callable[..., Any]], call: Call) -> Message:
    """What a tool says to one call. What it raises is told to the policy, as is a name that no
    tool has."""
    name = clean(call.name)
    tool = tools.get(call.name)
    message = {"role": "tool", "name": name}
    if tool is None:
        names = ", ".join(sorted(tools))
        return {**message, "content": f"Error: there is no tool {name}; there is {names or 'none'}"}
    try:
        with no_copies():
            returned = waited(run_tool(tool, call.arguments))
        return {**message, **read_answer(returned)}
    except (Exception, SystemExit) as error:
        return {**message, "content": clean(f"Error: {type(error).__name__}: {error}")}


def read_answer(returned: Any) -> Message:
    """Content and images of what a tool returned: a picture, parts of a message, or text."""
    listed = list(returned) if isinstance(returned, list | tuple) else [returned]
    parts = [{"type": "image", "image": part} if _is_picture(part) else part for part in listed]
    if not any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts):
        return {"content": read_text(returned)}
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    parts.sort(key=lambda part: isinstance(part, Mapping) and part.get("type") == "text")
    content, images = _read_parts(parts)
    return {"content": clean(content), "images": read_images(images)}


def _is_picture(thing: Any) -> bool:
    """Whether it is one of PIL's, which need not be installed, or bytes."""
    return isinstance(thing, bytes) or (hasattr(thing, "save") and hasattr(thing, "mode"))


def waited(returned: Any) -> Any:
    """What an async function came to; anything else as it is."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())
