r"""The bridge between two turns: the template's text from the end of one turn to the next.

    prompt            turn               observation                               turn
    …assistant\n      12?<|im_end|>      \n<|im_start|>user\nhigher<|im_end|>\n…   13<|im_end|>
    rendered before   sampled ids        the bridge                                sampled ids

A sampled id is never decoded and encoded again. The bridge renders the new messages after a
placeholder turn, takes the text that follows the placeholder, and encodes only that. It encodes
through the guard, so that no tool's output can become a control id. The template's end of the turn
is left out if the policy sampled an end; text after that end (often a line feed) is kept.

`measure` uses probes, once, to check that a template written this way equals what it would have
written for the whole conversation.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.outside import CHARACTERS_OF_TOKEN, MEDIA
from quiver.stages.model.chat.control_tokens import Guard, Rendering
from quiver.stages.model.chat.messages import (
    as_parts,
    is_assistants,
    put_texts,
    take_texts,
    texts_of,
)
from quiver.stages.model.chat.template import FILLER, Template
from quiver.stages.model.media import WORDS
from quiver.stages.model.media.processor import Processor, Span
from quiver.stages.turns.environment import Message, cleaned, files_in
from quiver.stages.turns.tool_calls import ParsedTurn

_QUESTION = "probezquestion"
_TURN = "probezturn"
_ANSWER = "probezanswer"
_TOOL = "probeztool"
_THOUGHT = "probezthought"
_SHOWN = 60


class History(NamedTuple):
    """A template's treatment of earlier turns, for one role of the message that follows."""

    role: str
    appends: bool
    """True if turns stay unchanged when more messages follow."""
    keeps_thinking: bool
    """True if turns with thinking stay unchanged too."""
    difference: str = ""
    """A short description of the first difference between the text read and the text written."""


class Fitting(NamedTuple):
    """An observation that is short enough."""

    messages: list[Message]
    rendering: Rendering
    num_cut: int
    """Characters that were cut out of its contents to make it fit."""
    spans: list[Span]
    """Positions of its pictures and clips in its ids."""


class Bridge:
    """The template of one policy, prepared for episodes."""

    def __init__(
        self,
        template: Template,
        guard: Guard,
        *,
        end_token: str,
        tool_role: str = "auto",
        tools: list[dict[str, Any]] | None = None,
        processor: Processor | None = None,
    ) -> None:
        """Learn how the template writes messages after a turn.

        Args:
            template: The chat template.
            guard: Encodes text without control ids.
            end_token: Text of an end that the policy samples; "" if there is none.
            tool_role: Role of a message with a tool's output, see `Turns`.
            tools: Schemas that the template shows.
            processor: Given if the environment may show pictures or play clips.

        Raises ConfigError if the template cannot write such messages.
        """
        self._template = template
        self._guard = guard
        self._processor = processor
        self._end_token = end_token
        self._variables = {"tools": tools} if tools else {}
        chat = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _TURN},
        ]
        text = self._render("prompt.template", chat, add_generation_prompt=False)
        _, turn, self._plain_end = text.partition(_TURN)
        if not turn:
            raise ConfigError(
                "generate.turns",
                "the policy's chat template does not write the turns of an assistant",
                next="set prompt.template to one that does",
            )
        self.end_id = guard.first_control(self._plain_end)
        """The id with which the template ends a turn; None if it writes no such id."""
        self._needs_calls: dict[str, bool] = {}
        """Role → True if such a message must follow a turn with calls."""
        self._is_written: dict[str, bool] = {}
        """Role → True if the template writes such a message after a turn."""
        if tool_role == "auto":
            tool_role = "tool" if self._learn("tool") else "user"
        self.tool_role = tool_role
        for role in {tool_role, "user"}:
            if not self._learn(role):
                raise ConfigError(
                    "generate.turns",
                    f"the policy's chat template cannot write a message of the role {role} after "
                    "an assistant's",
                    next='set prompt.template to one that can, or generate.turns.tool_role = "user"'
                    if role == "tool"
                    else "set prompt.template to one that can",
                )
        self.opening = self._render("prompt.template", chat[:1])
        """A prompt's text; its end is what each of the policy's turns continues."""
        whole = self._render("prompt.template", chat)
        gap = whole.removeprefix(self.opening).partition(_TURN)[0]
        self.gap = "" if gap.strip() else gap
        """White space between the generation prompt and a turn's content.

        The template writes it, and the policy samples it as the beginning of its text.
        """

    # -- between two turns

    def observation(self, name: str, messages: list[Message], *, has_end: bool) -> Rendering:
        """Return text and ids of `messages` and the next generation prompt, after a sampled turn.

        `has_end` is true if the turn's last id is an end. Raises SecurityError, which names `name`.
        """
        # If the template writes no end, put one first while encoding: a tokenizer may treat the
        # first word of a text differently.
        lead = self._end_token if self.end_id is None else ""
        rendering = self._encode(name, messages, self._behind_turn, lead, is_whole=False)
        ids = rendering.ids[1:] if has_end or lead else rendering.ids
        return Rendering(rendering.text.removeprefix(lead), ids)

    def writes(self, role: str) -> bool:
        """Return True if the template writes messages of that role completely after a turn."""
        if role not in self._is_written:
            self._is_written[role] = self._learn(self.tool_role if role == "tool" else role)
        return self._is_written[role]

    def fitting(
        self,
        name: str,
        messages: list[Message],
        *,
        has_end: bool,
        most: int,
        seconds: float = float("inf"),
    ) -> Fitting | None:
        """Return the observation in at most `most` ids, or None if even empty contents do not fit.

        An observation that is too long is cut in the middle of its contents. Contents with more
        characters than `most` ids can hold are never encoded. Raises TimeoutError after `seconds`.
        """
        deadline = time.monotonic() + seconds
        if len(messages) > most:  # each takes at least one id
            return None
        longest = longest_content(messages, most)
        if not cut_to(messages, longest)[1]:
            whole = self._fitting(name, messages, 0, has_end=has_end)
            if len(whole.rendering.ids) <= most:
                return whole
        tried: dict[int, Fitting] = {}

        def is_too_long(length: int) -> bool:
            if time.monotonic() > deadline:
                raise TimeoutError
            tried[length] = self._fitting(name, *cut_to(messages, length), has_end=has_end)
            return len(tried[length].rendering.ids) > most

        length = bisect.bisect_left(range(longest), True, key=is_too_long)
        return tried.get(length - 1)  # the longest content that fits

    def _fitting(
        self, name: str, messages: list[Message], num_cut: int, *, has_end: bool
    ) -> Fitting:
        """Return an observation without cutting it, with all ids of its media."""
        rendering = self.observation(name, messages, has_end=has_end)
        contents = files_in(messages)
        if not contents:
            return Fitting(messages, rendering, num_cut, [])
        ids, spans = self._processor.expand(name, rendering.ids, contents)
        return Fitting(messages, Rendering(rendering.text, ids), num_cut, spans)

    def require_shown(self, modality: str) -> None:
        """Raise ConfigError if the template shows no picture, or no clip, in an environment's
        message."""
        column = MEDIA[modality]
        limit = f"max_{column}"
        name = f"generate.turns.{limit}"
        shown = {"role": self.tool_role, "content": _QUESTION, column: [""]}
        rendering = self.observation(name, [shown], has_end=True)
        if rendering.ids.count(self._processor.placeholder_ids[modality]) != 1:
            raise ConfigError(
                name,
                f"the policy's chat template shows no {WORDS[modality]} in a message of the role "
                f"{self.tool_role}",
                next=f"set prompt.template to one that shows each part of type {modality}, or "
                'generate.turns.tool_role = "user"',
            )

    # -- restarting with a rewritten history

    def restart(self, name: str, messages: list[Message]) -> Rendering:
        """Return a whole conversation as the template writes it, with the next generation
        prompt."""
        return self._encode(name, messages, self._render)

    def _encode(
        self,
        name: str,
        messages: list[Message],
        write: Callable[..., str],
        lead: str = "",
        *,
        is_whole: bool = True,
    ) -> Rendering:
        """Return text and ids of the messages, which `write` renders, after `lead`."""
        messages = [self._as_written(message) for message in messages]
        structure, texts = take_texts(messages, self._variables)

        def render(texts: list[str]) -> str:
            chat, variables = put_texts(structure, iter(texts))
            return lead + write(name, chat, **variables)

        key = (write.__name__, json.dumps(structure))
        trusted = texts_of(messages, is_assistants)
        return self._guard.encode(name, key, texts, render, trusted=trusted, is_whole=is_whole)

    def measure(self) -> list[History]:
        """Return how the template treats earlier turns, for each role that may follow one.

        A role is not measured if its message must follow a call, because the form of the calls
        depends on the policy.
        """
        histories = []
        for role in sorted({self.tool_role, "user"}):
            of_text = self._difference(role, thinks=False)
            of_thinking = self._difference(role, thinks=True)
            difference = of_text or of_thinking
            histories.append(History(role, not of_text, not of_thinking, difference))
        return histories

    def require(self, rewritten: str) -> list[History]:
        """Return the result of `measure`.

        Raises ConfigError if the template rewrites turns and `rewritten` is "refuse".
        """
        histories = self.measure()
        for history in histories:
            if rewritten == "refuse" and not (history.appends and history.keeps_thinking):
                what = "drops or rewrites the thinking of" if history.appends else "rewrites"
                raise ConfigError(
                    "generate.turns",
                    f"the policy's chat template {what} earlier turns when a message of the role "
                    f"{history.role} follows: {history.difference}",
                    next='set generate.turns.rewritten to "restart" or "append", or '
                    "prompt.template to one that leaves turns as they are",
                )
        return histories

    def _difference(self, role: str, *, thinks: bool) -> str:
        """Return the first difference between reading three turns one by one and rendering them at
        once.

        Returns "" if there is none.
        """
        name = "prompt.template"
        messages: list[Message] = [{"role": "user", "content": _QUESTION}]
        text = self._render(name, messages)
        prefill = "<think>\n" if text.rstrip().endswith("<think>") else ""
        for number in range(3):
            answer = f"{_ANSWER}{number}{FILLER}"
            if thinks:
                answer = f"<think>\n{_THOUGHT}{number}{FILLER}\n</think>\n\n{answer}"
            sampled = self.gap + answer.removeprefix(prefill)
            news = [{"role": role, "name": _TOOL, "content": f"{_QUESTION}{number}{FILLER}"}]
            if role == "tool":
                news[0]["tool_call_id"] = _call_id(0)
            messages = [*messages, {"role": "assistant", "content": answer}, *news]
            text += sampled + self._behind_turn(name, news)
            try:
                written = self._render(name, messages)
            except ConfigError:  # it must follow a call, and our text has none
                return "" if self._needs_calls[role] else "it refuses the conversation"
            if written != text:
                start = next(
                    (n for n, (a, b) in enumerate(zip(text, written, strict=False)) if a != b),
                    min(len(text), len(written)),
                )
                read_text = printable(repr(text[start:][:_SHOWN]), _SHOWN + 20)
                return f"read {read_text}, written {written[start:][:_SHOWN]!r}"
        return ""

    # -- pieces

    def _as_written(self, message: Message) -> Message:
        """Return a message with the template's role for a tool, and texts that a template
        accepts."""
        message = as_parts(message)
        if message["role"] == "tool" and self.tool_role != "tool":
            message = {"role": self.tool_role, "content": message["content"]}
        return {key: cleaned(member) for key, member in message.items()}

    def _behind_turn(self, name: str, messages: list[Message], **variables: Any) -> str:
        """Return the template's text after the content of an assistant's turn followed by
        `messages`.

        It begins with the turn's own end.
        """
        role = messages[0]["role"] if messages else "user"
        question = {"role": "user", "content": _QUESTION}
        if not self._needs_calls.get(role, False):
            turn: Message = {"role": "assistant", "content": _TURN}
            text = self._render(name, [question, turn, *messages], **variables)
            return text.partition(_TURN)[2]
        turn = {"role": "assistant", "content": "", "tool_calls": _probe_calls(len(messages))}
        before = self._render(name, [question, turn], add_generation_prompt=False, **variables)
        text = self._render(name, [question, turn, *messages], **variables)
        return self._plain_end + text[len(before) :]

    def _learn(self, role: str) -> bool:
        """Return True if the template writes messages of that role after an assistant's turn.

        Also records in `_needs_calls` if that turn must have calls.
        """
        content = _QUESTION + FILLER
        message = {"role": role, "name": _TOOL, "content": content, "tool_call_id": _call_id(0)}
        name = "prompt.template"
        for needs_calls in (False, True):
            self._needs_calls[role] = needs_calls
            try:
                behind = self._behind_turn(name, [message])
                if needs_calls:
                    turn = {"role": "assistant", "content": "", "tool_calls": _probe_calls(1)}
                    chat = [{"role": "user", "content": _QUESTION}, turn]
                    before = self._render(name, chat, add_generation_prompt=False)
                    whole = self._render(name, [*chat, message])
                    if not (whole.startswith(before) and before.endswith(self._plain_end)):
                        continue
            except ConfigError:
                continue
            if content in behind:
                return True
        return False

    def _render(self, name: str, messages: list[Message], **variables: Any) -> str:
        variables = {"add_generation_prompt": True, **self._variables, **variables}
        return self._template.render(name, messages, **variables)


def turn_message(parsed: ParsedTurn, gap: str = "") -> Message:
    """Return a sampled turn as a message, for a history that is rendered again.

    `gap` is the white space that the template writes before the content.
    """
    content = parsed.text.removeprefix(gap)
    message: Message = {"role": "assistant"}
    thought, tag, answer = content.partition("</think>")
    if tag:
        message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
        content = answer.lstrip("\n")
    message["content"] = content
    if parsed.calls:
        message["tool_calls"] = [
            {"id": _call_id(number), "type": "function", "function": call._asdict()}
            for number, call in enumerate(parsed.calls)
        ]
    return message


def answers_of_calls(messages: list[Message]) -> list[Message]:
    """Return the messages, with consecutive call ids in the tools' messages."""
    numbers = iter(range(len(messages)))
    return [
        {**message, "tool_call_id": _call_id(next(numbers))}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def _call_id(number: int) -> str:
    """Return an id of nine letters and digits, as Mistral's templates require."""
    return f"call{number:05d}"


def _probe_calls(count: int) -> list[dict[str, Any]]:
    function = {"name": _TOOL, "arguments": {}}
    return [
        {"id": _call_id(number), "type": "function", "function": function}
        for number in range(count)
    ]


def longest_content(messages: list[Message], most: int) -> int:
    """Return the content length to cut to, so that `most` ids can stand for all contents."""
    lengths = [len(message["content"]) for message in messages]

    def total(longest: int) -> int:
        return sum(min(length, longest) for length in lengths)

    limits = range(max(lengths, default=0) + 1)
    return bisect.bisect_right(limits, most * CHARACTERS_OF_TOKEN, key=total) - 1


def cut_to(messages: list[Message], longest: int) -> tuple[list[Message], int]:
    """Return the messages with at most `longest` characters of each content, from both ends, and
    the number of characters cut."""
    cut_messages = []
    total = 0
    for message in messages:
        content = message["content"]
        num_cut = len(content) - longest
        if num_cut > 0:
            total += num_cut
            tail = content[len(content) - longest // 2 :]
            content = f"{content[: longest - len(tail)]}\n[… {num_cut} characters cut …]\n{tail}"
        cut_messages.append({**message, "content": content})
    return cut_messages, total


def cut_by(messages: list[Message], num_cut: int) -> list[Message]:
    """Cut `num_cut` characters in total from the contents, as an observation that is too long is
    cut.

    Longer contents are cut to one common length. Returns the messages unchanged if no length gives
    that number.
    """
    lengths = [len(message["content"]) for message in messages]

    def left_over(most: int) -> int:
        return -sum(max(length - most, 0) for length in lengths)

    most = bisect.bisect_left(range(max(lengths, default=0)), -num_cut, key=left_over)
    return cut_to(messages, most)[0] if left_over(most) == -num_cut else messages
