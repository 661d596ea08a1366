"""Renders a chat template in a child process: messages in, text out.

A broken, hostile or endless template raises ConfigError. jinja2's sandbox keeps a template from
files and attributes; the separate process limits its time and memory.

Some templates read contents only as lists of parts and show nothing of a plain string. So each
sequence of roles is rendered once with marked contents: as strings, and if a mark is missing, as
parts. Messages are then given in the form that shows them.

Some templates show tool calls only beside a null content, or print arguments, which then have to be
JSON text. The form of calls is learned in the same way. So is whether tools need the wrapper
{"type": "function", "function": …}.

    with Template(source, variables) as template:
        messages = [{"role": "user", "content": "3 + four?"}]
        text = template.render("prompt sum-0017", messages, add_generation_prompt=True)
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, printable, reason
from quiver.schemas.manifest import digest
from quiver.schemas.plain import bad_text
from quiver.stages.core.files import read_file
from quiver.stages.core.processes.scripts import AskedScript

MEMORY = 2 * 1024**3
Messages = list[dict[str, Any]]


FILLER = " probez" * 300
"""Text after the marks of contents, so that a template that cuts contents does not show them."""
_PROBE_TOOL = "probeztool"
_PROBE_ARGUMENTS = {"probezkey": 1}
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Mark that transformers puts after a message to be continued. Its trailing space shows whether a
template trims contents."""


class _CallForm(NamedTuple):
    """The form in which a template reads messages with tool calls."""

    is_null: bool = False
    """If true, a content without text is null."""
    is_text: bool = False
    """If true, arguments are JSON text."""


class _Form(NamedTuple):
    """The form in which a template reads the contents of a sequence of messages."""

    as_parts: frozenset[int]
    """Positions of the string contents that it reads as a list of parts."""
    unseen: frozenset[int]
    """Positions of the messages that it does not show in full."""
    calls: _CallForm


class Template:
    """A compiled template in its child process. If a rendering ends the child, the next rendering
    starts another."""

    def __init__(
        self,
        source: str,
        variables: dict[str, Any],
        seconds: float = 10.0,
        name: str = "prompt.template",
    ) -> None:
        """Start the child and compile the template. Raises ConfigError.

        Args:
            source: The jinja2 text.
            variables: Variables that the template sees beside `messages`.
            seconds: Time limit of one rendering.
            name: Subject of errors about the template itself.
        """
        self.source = source
        self._name = name
        self._variables = variables
        self._seconds = seconds
        self._forms: dict[tuple, _Form] = {}
        self._wraps_tools: bool | None = None
        """True if only wrapped tools are shown; None until that is known."""
        self._script = AskedScript(Path(__file__).with_name("jinja_worker.py"), MEMORY)
        try:
            self._ask(name, None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and wait for it."""
        self._script.close()

    def render(self, name: str, messages: Messages, **variables: Any) -> str:
        """Return the text of `messages`, with further `variables` for this rendering.

        Raises ConfigError, which names the prompt and what was raised.
        """
        form = self._form(name, messages, variables)
        messages = _with_parts(_with_calls(messages, form.calls), form.as_parts)
        return self._render(name, messages, variables)

    def probe(self, messages: Messages, generation: bool) -> str:
        """Return the text of messages made up to learn from, not of a row. Raises ConfigError."""
        return self.render(self._name, messages, add_generation_prompt=generation)

    def render_to_continue(self, name: str, messages: Messages, **variables: Any) -> str:
        """Return the text of `messages` up to the end of the last content, to be continued.

        This is the text that transformers gives for `continue_final_message`. Raises ConfigError.
        """
        marked = copy.deepcopy(messages)
        last = marked[-1]
        content = last["content"]
        if isinstance(content, str):
            last["content"] = content + _CONTINUED
        else:
            texts = [part for part in content if "text" in part]
            if not texts:
                texts = [{"type": "text", "text": ""}]
                last["content"] += texts
            content = texts[-1]["text"]
            texts[-1]["text"] += _CONTINUED
        variables = {**variables, "add_generation_prompt": False}
        text = self.render(name, marked, **variables)
        mark = _CONTINUED.strip()
        if content.strip() not in text or mark not in text:
            raise ConfigError(
                name,
                "the chat template does not show the last message, an assistant's, as it is, so "
                "the policy cannot continue it",
                next="set prompt.template to one that does, or take the message out of the chat",
            )
        before = text[: text.rindex(mark)]
        if text[len(before) :].startswith(_CONTINUED):
            return before
        return before.rstrip()  # the template trims contents

    def unseen(self, name: str, messages: Messages, **variables: Any) -> frozenset[int]:
        """Return the positions of messages that no form shows in full. Raises ConfigError."""
        return self._form(name, messages, variables).unseen

    def missing_header(self, name: str, messages: Messages, text: str, **variables: Any) -> str:
        """Return the header of an assistant's message after `messages` if `text` lacks it.

        `text` is the generation prompt. Empty if it already has part of the header.
        """
        variables = {**variables, "add_generation_prompt": False}
        answer = {"role": "assistant", "content": "probezanswer"}
        try:
            before, shown, _ = self.render(name, [*messages, answer], **variables).partition(
                answer["content"]
            )
            without_header = self.render(name, messages, **variables)
        except ConfigError:  # the template refuses the answer
            return ""
        header = before.removeprefix(text.rstrip()).strip()
        is_missing = text == without_header and shown and header != before.strip()
        return header if is_missing else ""

    def _form(self, name: str, messages: Messages, variables: dict[str, Any]) -> _Form:
        """Return the form in which the template shows most of `messages`; strings on a tie."""
        shapes = tuple((message["role"], _shape(message)) for message in messages)
        # templates check whether a variable exists; its value is assumed not to change the form
        key = shapes, tuple(sorted(name for name, value in variables.items() if value))
        if key not in self._forms:
            self._forms[key] = self._learn_form(name, messages, variables)
        return self._forms[key]

    def _learn_form(self, name: str, messages: Messages, variables: dict[str, Any]) -> _Form:
        marked = [_marked(message, f"probez{n}z") for n, message in enumerate(messages)]
        calls = self._learn_call_form(name, marked, variables)
        marked = _with_calls(marked, calls)
        strings = {n for n, each in enumerate(marked) if isinstance(each.get("content"), str)}
        unseen = self._unseen(name, marked, variables)
        best = _Form(frozenset(), frozenset(unseen or ()), calls)
        if unseen is not None and not unseen:
            return best
        for as_parts in ((unseen or strings) & strings, strings):
            still_unseen = self._unseen(name, _with_parts(marked, as_parts), variables)
            if still_unseen is not None and (unseen is None or still_unseen < unseen):
                unseen = still_unseen
                best = _Form(frozenset(as_parts), frozenset(unseen), calls)
        return best

    def _learn_call_form(self, name: str, marked: Messages, variables: dict[str, Any]) -> _CallForm:
        """Return the form in which the template shows calls, and shows them without Python's
        spelling of null and of objects."""
        if not any("tool_calls" in message for message in marked):
            return _CallForm()
        probes = [_with_probe_calls(message) for message in marked]
        texts = {}
        for is_text, is_null in product((False, True), (True, False)):
            form = _CallForm(is_null, is_text)
            text = self._render_or_none(name, _with_calls(probes, form), variables)
            if text is not None:
                texts[form] = text

        def badness(form: _CallForm) -> tuple[bool, bool, int]:
            text = texts[form]
            return _PROBE_TOOL not in text, str(_PROBE_ARGUMENTS) in text, text.count("None")

        return min(texts, key=badness, default=_CallForm())

    def _unseen(self, name: str, marked: Messages, variables: dict[str, Any]) -> set[int] | None:
        """Return the positions of messages with a mark that the rendering lacks.

        Returns None if the template refuses the messages. Raises ConfigError if its process died.
        """
        text = self._render_or_none(name, marked, variables)
        if text is None:
            return None
        hidden = set()
        for n, message in enumerate(marked):
            content = message.get("content") or ""
            parts = [{"text": content}] if isinstance(content, str) else content
            marks = [part for part in parts if part.get("text", "").strip()]
            # a template that takes only strings prints the Python spelling of a part
            if any(part["text"] not in text or str(part) in text for part in marks):
                hidden.add(n)
        return hidden

    def _render_or_none(
        self, name: str, messages: Messages, variables: dict[str, Any]
    ) -> str | None:
        """Return the text, or None if the template refuses the messages.

        Raises ConfigError if its process died.
        """
        try:
            return self._render(name, messages, variables)
        except ConfigError:
            if self._script.pid is None:
                raise
            return None

    def _render(self, name: str, messages: Messages, variables: dict[str, Any]) -> str:
        shown = []
        for message in messages:
            thinking = message.get("reasoning_content")
            names = () if thinking is None else ("reasoning", "thinking")  # as templates read it
            shown.append({**message, **dict.fromkeys(names, thinking)})
        given = {**self._variables, **self._with_wrapped_tools(variables), "messages": shown}
        return self._ask(name, given)

    def _with_wrapped_tools(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Return `variables` with each bare tool in its wrapper if the template shows no other."""
        tools = variables.get("tools")
        has_bare = isinstance(tools, list) and any(map(_is_bare, tools))
        if not has_bare or self._wraps_tools is False:
            return variables
        if self._wraps_tools is None:
            self._wraps_tools = False  # the probes are given as they are
            of_x = {"properties": {"x": {"type": "string", "description": "?"}}, "required": ["x"]}
            tool = {"name": _PROBE_TOOL, "description": "?"}
            tool["parameters"] = {"type": "object", **of_x}
            question = [{"role": "user", "content": "?"}]
            as_is, wrapped = (
                self._render_or_none(self._name, question, {"tools": [probe]}) or ""
                for probe in (tool, _wrapped(tool))
            )
            self._wraps_tools = _PROBE_TOOL in wrapped and _PROBE_TOOL not in as_is
            return self._with_wrapped_tools(variables)
        wrapped = [_wrapped(tool) if _is_bare(tool) else tool for tool in tools]
        return {**variables, "tools": wrapped}

    def _ask(self, name: str, variables: dict[str, Any] | None) -> str:
        question = {"template": self.source, "seconds": self._seconds, "variables": variables}
        late = f"it did not end within {self._seconds:g} seconds (template_seconds)"
        answer = self._script.ask(json.dumps(question).encode() + b"\n", late)
        text = answer.get("text", "")
        wrong = bad_text(text.replace("\0", ""))  # text of a policy may hold a NUL
        if wrong or "error" in answer:
            raise ConfigError(
                name,
                f"the chat template failed: {printable(answer.get('error', f'its text {wrong}'))}",
                next="correct the template or the row",
            )
        return text


def _is_bare(tool: Any) -> bool:
    return isinstance(tool, dict) and "name" in tool and "function" not in tool


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": tool}


def _with_calls(messages: Messages, form: _CallForm) -> Messages:
    """Return a copy of `messages` whose tool calls have the form `form`."""
    shown = copy.deepcopy(messages)
    for message in shown:
        if "tool_calls" not in message:
            continue
        if form.is_null and not message.get("content"):
            message["content"] = None
        for call in message["tool_calls"] if form.is_text else ():
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return shown


def _with_probe_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its calls replaced by calls of a tool whose name can be found again."""
    if "tool_calls" not in message:
        return message
    function = {"name": _PROBE_TOOL, "arguments": _PROBE_ARGUMENTS}
    calls = [{**call, "function": function} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a message with `mark` and FILLER in place of each text of its content; blank texts
    stay."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": mark + FILLER} if content.strip() else message
    parts = [
        {**part, "text": f"{mark}{n}z{FILLER}"} if part.get("text", "").strip() else part
        for n, part in enumerate(content)
    ]
    return {**message, "content": parts}


def _shape(message: dict[str, Any]) -> Any:
    """Return the properties that decide, beside the role, how a message is read: the types of its
    content's parts and the names of its other members."""
    content = message.get("content") or ""
    if isinstance(content, str):
        kinds: Any = bool(content.strip())
    else:
        kinds = tuple((part["type"], bool(part.get("text", "").strip())) for part in content)
    return kinds, tuple(name for name, member in message.items() if member)


def _with_parts(messages: Messages, positions: Collection[int]) -> Messages:
    """Return `messages` with the strings at `positions` as lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if n in positions
        else message
        for n, message in enumerate(messages)
    ]


def first_variables(tokenizer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of every prompt: the tokenizer's special tokens, and `arguments`, which
    override them. Each prompt may set its own tools and documents."""
    return {
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **tokenizer.special_tokens_map,
        **arguments,
    }


def read_template(path: str | None, key: str, sha256: str = "") -> str | None:
    """Return the text of the template file that `key` names; None for the model's own template.

    Raises ConfigError if it cannot be read or its digest is not `sha256`.
    """
    if path is None:
        return None
    try:
        template = read_file(Path(os.path.expanduser(path))).decode()
        if sha256 not in ("", digest(template)):
            raise ValueError("it has changed since the stage was planned")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key} {printable(path)}",
            reason(error),
            next="name a jinja file in UTF-8, and leave it as it is during a run",
        ) from None
    return template
