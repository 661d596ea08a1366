"""The environment protocol: an environment is reset for a row, answers turns, and may pay rewards.

A user's class with a method `step` gets a `Turn` and returns a `Step` (or a mapping with its
fields, or the text alone):

    class Guess:
        def reset(self, seed, limit):                 # `seed`, and columns of the row, by name
            self.number = random.Random(seed).randrange(limit)

        def step(self, turn):
            guess = int(turn.text)
            text = "higher" if guess < self.number else "lower"
            return Step(text=text, done=guess == self.number)

The modules in `adapters` adapt other kinds (tools, gymnasium, OpenEnv) to the protocol
`Environment`. All user code runs in processes of its own. The `read_` functions check and normalize
what it returns.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import io
import json
import re
import threading
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple, Protocol

from quiver.schemas import outside
from quiver.schemas.errors import printable
from quiver.schemas.manifest import canonical
from quiver.schemas.outside import MEDIA, Message
from quiver.schemas.plain import problem_of
from quiver.stages.core.run.answering import no_copies
from quiver.stages.model.media import WORDS
from quiver.stages.turns.tool_schemas import ToolSchema, run_tool

Row = dict[str, Any]
"""The columns of one prompt, by name; `prompt` is its messages or its text."""
_MOST_INFO = 10_000
_OURS = "quiver_"
"""Prefix of Quiver's own members of `info`; users may not use it."""
_MOST_CHANNELS = 2
"""Channels of a clip; the decoder takes no more."""
_MOST_OUTSIDE = 0.01
"""Share of a clip's samples that may lie outside -1 and 1; they are clipped."""
_NO_JSON = re.compile("NaN|Infinity")


class Call(NamedTuple):
    """One tool call of the policy."""

    name: str
    arguments: dict[str, Any]


class Turn(NamedTuple):
    """One turn of the policy: its text and its tool calls."""

    text: str
    """Text of the turn; if it made calls, the text before them."""
    calls: tuple[Call, ...] = ()


class Step(NamedTuple):
    """An environment's answer to one turn."""

    messages: list[Message] | None = None
    """Messages that the policy reads next, {role, content} each. A tool's message has `name` too.
    One with pictures or clips has `images` or `audio`, which come before its content. None is the
    assistant's."""
    text: str | None = None
    """Shorthand for `messages` with one message of the user."""
    reward: float | None = None
    """Reward of this turn. Default: it has none."""
    done: bool = False
    info: dict[str, Any] | None = None
    """Data kept beside the turn, as JSON of at most 10 kB."""
    images: list[Any] | None = None
    """Pictures of the message of `text`: PIL images, or the bytes of a PNG, JPEG or WebP. Outside
    those processes they are base64."""
    audio: list[Any] | None = None
    """Its clips: (samples, rate) each, or the bytes of a WAV, FLAC or MP3. Samples are an array [n]
    or [n, channels] of floats between -1 and 1, or of int16."""

    @property
    def media(self) -> Message:
        """The members of a message that hold pictures and clips, if any."""
        files = {column: getattr(self, column) for column in MEDIA.values()}
        return {column: of_column for column, of_column in files.items() if of_column}

    def observation(self) -> list[Message]:
        """Return what the policy reads next, as messages."""
        if self.text is None and not self.media:
            return list(self.messages or [])
        message: Message = {"role": "user", "content": self.text or "", **self.media}
        return [*(self.messages or []), message]


class Environment(Protocol):
    """One episode's environment, in such a process."""

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Begin the episode and return its opening messages, which may be empty."""
        ...

    def step(self, turn: Turn) -> Step:
        """Answer a turn."""
        ...

    def finish(self) -> float | None:
        """Return the reward of the whole episode, or None if it has none."""
        ...

    def close(self) -> None:
        """Release the environment's resources."""
        ...


class Factory(NamedTuple):
    """Maker of one kind of environment, with the tools it offers."""

    make: Callable[[], Environment]
    tools: list[ToolSchema]
    """Schemas of the tools that the policy may call."""
    answers: bool
    """If true, a turn without calls is the policy's answer and ends the episode."""
    fingerprint: str = ""
    """Hash of the user's code."""


def environment_seed(group_id: str) -> int:
    """Return a 63-bit seed for a prompt's environments, so that its whole group begins alike."""
    digest = hashlib.sha256(canonical(["environment", group_id])).digest()
    return int.from_bytes(digest[:8]) >> 1


# -- what users' code returns


def read_step(returned: Any) -> Step:
    """Return a `Step` of plain JSON from what a user's `step` returned.

    Raises ValueError with what is wrong.
    """
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
    required = [name for name in Step._fields if name not in MEDIA.values()]
    if not all(hasattr(returned, name) for name in required):
        raise ValueError(f"step returned {type(returned).__name__}, expected a Step")
    text = returned.text
    if text is not None and not isinstance(text, str):
        raise ValueError(f"text of the step is {type(text).__name__}, expected text")
    info = returned.info
    if info is not None:
        text_of_info = _as_json(info)
        if isinstance(info, Mapping) and len(text_of_info) > _MOST_INFO:
            text_of_info = json.dumps({"cut": text_of_info[:_MOST_INFO]})
        info = json.loads(text_of_info)
        if not isinstance(info, dict):
            raise ValueError(f"info of the step is {type(returned.info).__name__}, not a mapping")
        ours = next((name for name in info if name.startswith(_OURS)), None)
        if ours is not None:
            raise ValueError(
                f"info of the step has {printable(ours)}: names that begin with {_OURS} are taken"
            )
        problem = problem_of(info, with_texts=False)
        if problem:  # it could not be read again
            raise ValueError(f"info of the step: {problem}")
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
        *(read_media(each, getattr(returned, column, None)) for each, column in MEDIA.items()),
    )


def read_messages(returned: Any) -> list[Message]:
    """Return messages with a role and a content each, from what a user's code returned.

    A text becomes one message of the user; None and an empty text become no message. A content may
    be a list of parts, as in chats: pictures and clips, then texts. A `Step`, or a mapping with its
    fields, is accepted too. Raises ValueError.
    """
    if returned is None or isinstance(returned, str):
        return [{"role": "user", "content": clean(returned)}] if returned else []
    if isinstance(returned, Step | Mapping):
        return read_step(returned).observation()
    messages = []
    for number, given in enumerate(returned):
        members = dict(given) if isinstance(given, Mapping) else given
        media = {}
        if isinstance(members, dict):
            media = {each: members.pop(column, None) for each, column in MEDIA.items()}
            if isinstance(members.get("content"), list):
                members["content"], media = _read_parts(members["content"])
        message = outside.read_message(cleaned(members), f"message {number}")
        messages.append({**message, **_as_members(media)})
    return messages


def read_opening(returned: Any) -> list[Message]:
    """Read what `reset` returned with `read_messages`.

    Messages of the assistant are history and are not trained on. The last message must not be the
    assistant's, since the policy speaks next. Raises ValueError.
    """
    messages = read_messages(returned)
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError("the last message of reset is the assistant's, but the policy speaks next")
    return messages


def _read_parts(parts: list[Any]) -> tuple[str, dict[str, list[Any]]]:
    """Return the joined text of a list of content parts, and its files by modality.

    Raises ValueError if a file follows a text, or if a part is of another kind.
    """
    texts: list[str] = []
    media: dict[str, list[Any]] = {}
    for part in parts:
        modality = _modality_of(part)
        if modality is not None and not texts:
            media.setdefault(modality, []).append(part[modality])
        elif _is_text(part) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise ValueError(
                f"a part of a message is {printable(repr(part), 80)}, expected pictures "
                '{"type": "image", "image": …} and clips {"type": "audio", "audio": …}, then texts '
                '{"type": "text", "text": …}'
            )
    return "".join(texts), media


def _modality_of(part: Any) -> str | None:
    """Return the modality of a part of a message that holds a file; None for anything else."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    is_file = isinstance(kind, str) and kind in MEDIA and part.get(kind) is not None
    return kind if is_file else None


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _as_members(media: Mapping[str, Any]) -> Message:
    """Return files by modality as members of a message. Raises ValueError."""
    read = {MEDIA[modality]: read_media(modality, files) for modality, files in media.items()}
    return {column: files for column, files in read.items() if files}


def read_media(modality: str, returned: Any) -> list[str] | None:
    """Return a message's pictures or clips as base64, or None if it has none. Raises ValueError."""
    if returned is None:
        return None
    if not isinstance(returned, list | tuple):
        raise ValueError(f"{MEDIA[modality]} are {type(returned).__name__}, expected a list")
    write = _write_picture if modality == "image" else _write_clip
    contents = [file if isinstance(file, bytes) else write(file) for file in returned]
    return [base64.b64encode(content).decode() for content in contents] or None


def _write_picture(image: Any) -> bytes:
    """Return a PIL image as PNG. Raises ValueError if it is none."""
    if not _is_image(image):
        raise ValueError(f"a picture is {type(image).__name__}, expected a PIL image or bytes")
    buffer = io.BytesIO()
    is_printed = image.mode in ("CMYK", "YCbCr", "HSV", "LAB")  # PNG has none of these
    (image.convert("RGB") if is_printed else image).save(buffer, "PNG")
    return buffer.getvalue()


def _write_clip(clip: Any) -> bytes:
    """Return (samples, rate) as WAV of 16 bits. Raises ValueError if it is something else."""
    is_clip = isinstance(clip, list | tuple) and len(clip) == 2 and hasattr(clip[0], "dtype")
    if not is_clip:
        raise ValueError(
            f"a clip is {type(clip).__name__}, expected (samples, rate) with an array, or bytes"
        )
    import numpy as np
    import soundfile

    samples, rate = np.asarray(clip[0]), clip[1]
    is_float = samples.dtype.kind == "f"
    problem = ""
    if not isinstance(rate, Integral) or rate < 1:
        problem = f"the rate {printable(repr(rate), 80)}"
    elif samples.ndim not in (1, 2) or (samples.ndim == 2 and samples.shape[1] > _MOST_CHANNELS):
        problem = f"samples of shape {samples.shape}"
    elif not is_float and samples.dtype != np.int16:
        problem = f"samples of type {samples.dtype}"
    elif is_float and not np.isfinite(samples).all():
        problem = "samples that are no finite numbers"
    elif is_float and np.count_nonzero(np.abs(samples) > 1) > _MOST_OUTSIDE * samples.size:
        problem = f"samples up to {np.abs(samples).max():g}"
    if problem:
        raise ValueError(
            f"a clip has {problem}, expected (samples, rate): samples of shape [n] or "
            f"[n, channels], with at most {_MOST_CHANNELS} channels, as floats between -1 and 1 or "
            "as int16, and their rate in Hz, a whole number above 0"
        )
    buffer = io.BytesIO()
    written = samples.astype(np.float64) if is_float else samples
    soundfile.write(buffer, written, int(rate), format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def files_in(messages: list[Message]) -> dict[str, list[bytes]]:
    """Return the bytes of all pictures and clips in the messages, in order, by modality."""
    files = {
        modality: [
            base64.b64decode(file) for message in messages for file in message.get(column, ())
        ]
        for modality, column in MEDIA.items()
    }
    return {modality: contents for modality, contents in files.items() if contents}


def for_people(messages: list[Message]) -> str:
    """Return the contents as text for display; a file becomes a mark with a short hash."""
    lines = []
    for message in messages:
        marks = [
            f"[{WORDS[modality]} {_short_hash(file)}]"
            for modality, column in MEDIA.items()
            for file in message.get(column, ())
        ]
        lines += marks
        if message["content"] or not marks:
            lines.append(message["content"])
    return "\n".join(lines)


def without_files(messages: list[Message]) -> list[Message]:
    """Return the messages with short hashes in place of pictures and clips.

    They are small, and equal if the files are equal.
    """
    return [
        {
            name: [*map(_short_hash, member)] if name in MEDIA.values() else member
            for name, member in message.items()
        }
        for message in messages
    ]


def _short_hash(file: str) -> str:
    return hashlib.sha256(base64.b64decode(file)).hexdigest()[:12]


def read_reward(returned: Any) -> float | None:
    """Return a finite number that a float32 holds, or None.

    True and False become 1 and 0, as for reward functions. Raises ValueError.
    """
    if hasattr(returned, "item"):  # a scalar of numpy or torch
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
    """Return True if the episode ended. Raises ValueError if `returned` is not a bool."""
    if hasattr(returned, "item"):  # a scalar of numpy or torch
        returned = returned.item()
    if not isinstance(returned, bool):
        raise ValueError(f"done of the step is {printable(repr(returned))}, expected True or False")
    return returned


def read_text(returned: Any) -> str:
    """Return a tool's result as text: text unchanged, None as empty, anything else as JSON."""
    if returned is None:
        return ""
    return clean(returned if isinstance(returned, str) else _as_json(returned))


def clean(text: str) -> str:
    """Return `text` without NUL and lone surrogates, so that UTF-8 can hold it."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def cleaned(member: Any) -> Any:
    """Apply `clean` to all texts in nested lists and dicts, keys included."""
    if isinstance(member, str):
        return clean(member)
    if isinstance(member, list):
        return [cleaned(below) for below in member]
    if isinstance(member, dict):
        return {cleaned(key): cleaned(below) for key, below in member.items()}
    return member


def _as_json(returned: Any) -> str:
    """Return JSON; see `_said` for other types than its own."""
    text = json.dumps(returned, ensure_ascii=False, default=_said)
    if _NO_JSON.search(text):
        text = json.dumps(json.loads(text, parse_constant=str), ensure_ascii=False)
    return text


def _said(member: Any) -> Any:
    """Return the numbers of arrays and tensors, a set as a sorted list, and else the text of an
    object that JSON cannot hold. Raises TypeError if it has none."""
    if isinstance(member, set | frozenset):  # its own order differs from process to process
        return sorted(member, key=_as_json)
    numbers = member.tolist() if hasattr(member, "tolist") else None
    if isinstance(numbers, bool | int | float | list):
        return numbers
    text = str(member)
    if " at 0x" in text:  # an address changes from run to run and says nothing
        raise TypeError(f"a {type(member).__name__} is not text, and cannot be written as JSON")
    return text


# -- how users' code is called


def call_reset(reset: Callable[..., Any], row: Row, seed: int) -> Any:
    """Call `reset(**columns)` with the columns it takes, and return the result.

    `seed` is passed too if `reset` takes it; a column of that name takes precedence.
    """
    columns = {"seed": seed, **row}
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        return waited(reset(**(columns if "seed" in names else {**row})))
    return waited(reset(**{p.name: columns[p.name] for p in parameters if p.name in columns}))


def call_tool(tools: Mapping[str, Callable[..., Any]], call: Call) -> Message:
    """Run one tool call and return its result as a tool message.

    If the tool raises, or no tool has the name, the message holds the error for the policy to read.
    """
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
    """Return content and files of a tool's result: a picture or clip, parts of a message, or
    text."""
    listed = list(returned) if isinstance(returned, list | tuple) else [returned]
    parts = [_as_part(part) for part in listed]
    if not any(map(_modality_of, parts)):
        return {"content": read_text(returned)}
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    parts.sort(key=_is_text)
    content, media = _read_parts(parts)
    return {"content": clean(content), **_as_members(media)}


def _is_image(thing: Any) -> bool:
    """True for PIL images; checked by attributes, as PIL need not be installed."""
    return hasattr(thing, "save") and hasattr(thing, "mode")


def _as_part(thing: Any) -> Any:
    """Return bytes of a file, and a PIL image, as a part of a message, and other things
    unchanged."""
    if _is_image(thing):
        return {"type": "image", "image": thing}
    if not isinstance(thing, bytes):
        return thing
    # a frame of an MP3 begins with 11 bits of 1, a JPEG with ff d8
    is_mp3 = thing.startswith(b"ID3") or (thing[:1] == b"\xff" and thing[1:2] >= b"\xe0")
    is_clip = is_mp3 or thing.startswith(b"fLaC") or thing[8:12] == b"WAVE"
    modality = "audio" if is_clip else "image"
    return {"type": modality, modality: thing}


class _Runners(threading.local):
    """An event loop of each thread, for all its calls: what a user's code opens belongs to it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()


_runners = _Runners()


def waited(returned: Any) -> Any:
    """Return the result of an awaitable; return any other value unchanged."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return _runners.runner.run(wait())
