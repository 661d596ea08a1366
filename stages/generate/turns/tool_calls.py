r"""What a turn's text asks for: calls of tools, in one of the formats that models are trained on.

    parse = make_parser("hermes")
    parse('Let me see.<tool_call>{"name": "look_up", "arguments": {"word": "elk"}}</tool_call>')
    # ParsedTurn(text="Let me see.", calls=(Call("look_up", {"word": "elk"}),), error=None, …)

No parser raises, whatever the policy wrote. A call that can not be read is an `error`: its text is
for the policy, which may try again. Broken framing (a tag that is opened and never closed, say) is
`is_broken`: there is nothing that an answer could stand behind. Thinking before `</think>` holds no
calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common import plugins
from quiver.stages.common.environments.environment import Call
from quiver.stages.common.environments.tool_schemas import PYTHON_TOOL
from quiver.stages.common.plugins import did_you_mean

PYTHON_TAG = "<|python_tag|>"
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_THOUGHT_START = "<think>"
_THOUGHT_END = "</think>"
_ENDS = ("<|eom_id|>", "<|eot_id|>")
_DEPTH = 100
"""Most objects and lists inside one another."""


class ParsedTurn(NamedTuple):
    """What was read from the text of one turn."""

    text: str
    """What stands before the first call; without calls all of it."""
    calls: tuple[Call, ...] = ()
    error: str | None = None
    """Why a call can not be read; none of the turn's calls is to be made then."""
    is_broken: bool = False
    """Whether the error is one of framing, so that nothing can follow this turn."""


Parse = Callable[[str], ParsedTurn]


class _Unreadable(Exception):
    """Why a call can not be read."""


class _Broken(_Unreadable):
    """Why the framing is broken."""


def parse_hermes(text: str) -> ParsedTurn:
    """Calls as Qwen and Hermes models write them: `<tool_call>{"name", "arguments"}</tool_call>`,
    any number of them."""
    start = _end_of_thought(text)
    position = text.find(_OPEN, start)
    before = text if position < 0 else text[:position]
    try:
        bodies = list(_between_tags(text[start:]))
        return ParsedTurn(
            before, tuple(_read_members(_as_json(body), "arguments") for body in bodies)
        )
    except _Unreadable as error:
        return ParsedTurn(before, (), str(error), isinstance(error, _Broken))


def _between_tags(text: str) -> Iterator[str]:
    """What stands between each pair of tags. _Broken where they are no pairs."""
    head, *pieces = text.split(_OPEN)
    if _CLOSE in head:
        raise _Broken(f"{_CLOSE} stands without {_OPEN} before it")
    for number, piece in enumerate(pieces, 1):
        body, *tails = piece.split(_CLOSE)
        if not tails:
            is_last = number == len(pieces)
            raise _Broken(f"{_OPEN} is never closed" if is_last else f"{_OPEN} inside another")
        if len(tails) > 1:
            raise _Broken(f"{_CLOSE} stands without {_OPEN} before it")
        yield body.strip()


def parse_llama(text: str) -> ParsedTurn:
    """Calls as Llama 3 models write them: the whole turn is `{"name", "parameters"}`, several with
    `;` or white space between them, with or without `<|python_tag|>` before.

    After that tag anything else is code for the tool `python`. A JSON object without a name is an
    answer, where no tag stands before it.
    """
    start = _end_of_thought(text)
    before, tag, tagged = text[start:].partition(PYTHON_TAG)
    body = _without_end(tagged if tag else before)
    if not body.startswith("{"):
        return parse_python_tag(text)
    before = text[:start] + (before if tag else "")
    calls: list[Call] = []
    try:
        while body:
            members, end = _read_object(body)
            key = "parameters" if "parameters" in members else "arguments"
            calls.append(_read_members(members, key))
            body = body[end:].lstrip().removeprefix(";").lstrip()
    except _Unreadable as error:
        if calls or tag or '"name"' in body:
            return ParsedTurn(before, (), str(error), isinstance(error, _Broken))
        return ParsedTurn(text)
    return ParsedTurn(before, tuple(calls))


def _read_object(body: str) -> tuple[dict[str, Any], int]:
    """The JSON object that `body` begins with, and where it ends. _Unreadable."""
    try:
        members, end = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError) as error:
        if _is_cut(body):
            raise _Broken("the braces of a call are never closed") from None
        raise _Unreadable(f"the call is not valid JSON: {_shown(error)}") from None
    if not isinstance(members, dict):
        raise _Unreadable(f"a call is {type(members).__name__}, expected a JSON object")
    return members, end


def parse_python_tag(text: str) -> ParsedTurn:
    """Code behind `<|python_tag|>`, to the end of the turn: one call of the tool `python`."""
    start = _end_of_thought(text)
    before, tag, code = text[start:].partition(PYTHON_TAG)
    if not tag:
        return ParsedTurn(text)
    before = text[:start] + before
    code = _without_end(code)
    if not code:
        return ParsedTurn(before, (), f"there is no code behind {PYTHON_TAG}")
    return ParsedTurn(before, (Call(PYTHON_TOOL, {"code": code}),))


def parse_response(text: str, *, tokenizer: Any, prefix: str, tools: list[dict]) -> ParsedTurn:
    """Calls by the tokenizer's own response template, which transformers reads; `prefix`: the
    prompt's end, where the template may have begun the turn."""
    try:
        message = tokenizer.parse_response(text, prefix=prefix, tools=tools or None)
        functions = [entry["function"] for entry in message.get("tool_calls") or []]
        content = str(message.get("content") or "")
    except Exception as error:  # a template's expressions may raise anything
        return ParsedTurn(text, (), f"the turn can not be read: {_shown(error)}")
    try:
        calls = tuple(_read_members(function, "arguments") for function in functions)
    except _Unreadable as error:
        return ParsedTurn(content, (), str(error))
    return ParsedTurn(content if calls else text, calls)


def parse_by(text: str, *, function: Callable[[str], Any]) -> ParsedTurn:
    """Calls by a user's function: it returns a list of {"name", "arguments"}, or a ParsedTurn.
    ValueError says what the policy did wrong, EOFError that the framing is broken."""
    try:
        returned = function(text)
        if isinstance(returned, ParsedTurn):
            return returned
        calls = tuple(_read_members(members, "arguments") for members in returned or ())
        return ParsedTurn(text, calls)
    except Exception as error:  # a user's code
        return ParsedTurn(text, (), _shown(error), isinstance(error, EOFError))


class Entry(NamedTuple):
    """A parser that comes along."""

    description: str
    parse: Parse


PARSERS = {
    "hermes": Entry("<tool_call>{json}</tool_call>: Qwen, Hermes, SmolLM", parse_hermes),
    "llama": Entry("a JSON object, or <|python_tag|>: Llama 3", parse_llama),
    "python_tag": Entry("code behind <|python_tag|>", parse_python_tag),
}
RESPONSE_TEMPLATE = "tokenizer"
"""The name of the parser that is the tokenizer's own."""


def check_parser(name: str) -> None:
    """ConfigError where it is neither one of ours nor the name of a function; whether that exists
    is not looked at."""
    names = [*PARSERS, RESPONSE_TEMPLATE]
    if ":" not in name and name not in names:
        raise ConfigError(
            f"generate.turns.parser {printable(repr(name))}",
            f"no such parser, expected one of {', '.join(names)}, or file.py:function of your own"
            + did_you_mean(name, names),
            next="correct generate.turns.parser",
        )


def make_parser(
    name: str, tokenizer: Any = None, prefix: str = "", tools: list[dict] | None = None
) -> Parse:
    """The parser of that name. ConfigError: there is none, or the tokenizer brings none along."""
    check_parser(name)
    if name in PARSERS:
        return PARSERS[name].parse
    if name == RESPONSE_TEMPLATE:
        if getattr(tokenizer, "response_template", None) is None:
            raise ConfigError(
                "generate.turns.parser",
                "the policy's tokenizer has no response template",
                next=f"set generate.turns.parser to one of {', '.join(PARSERS)}",
            )
        return partial(parse_response, tokenizer=tokenizer, prefix=prefix, tools=tools or [])
    function, _ = plugins.load(name, "generate.turns.parser")
    return partial(parse_by, function=function)


# -- pieces


def _end_of_thought(text: str) -> int:
    """Where thinking ends and calls may begin."""
    end = text.find(_THOUGHT_END)
    if end >= 0:
        return end + len(_THOUGHT_END)
    return len(text) if text.lstrip().startswith(_THOUGHT_START) else 0


def _without_end(text: str) -> str:
    text = text.strip()
    for end in _ENDS:
        text = text.removesuffix(end).rstrip()
    return text


def _read_members(members: Any, key: str) -> Call:
    """The call that {"name", key} is. _Unreadable."""
    if not isinstance(members, dict):
        raise _Unreadable(f"a call is {type(members).__name__}, expected a JSON object")
    name = members.get("name")
    if not isinstance(name, str) or not name:
        raise _Unreadable('a call lacks "name"')
    arguments = members.get(key)
    place = f'"{key}" of {printable(name)}'
    if isinstance(arguments, str):  # some models write JSON inside JSON
        arguments = _as_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _Unreadable(f"{place} is {type(arguments).__name__}, expected a JSON object")
    if not _is_plain(arguments, _DEPTH):
        raise _Unreadable(f"{place} is no plain JSON: too deep, or no finite number")
    return Call(name, arguments)


def _as_json(text: str) -> Any:
    """_Unreadable."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"the call is not valid JSON: {_shown(error)}") from None


def _is_plain(member: Any, depth: int) -> bool:
    """Whether it can be written as strict JSON, at most so deep."""
    if isinstance(member, dict):
        member = list(member.values())
    if isinstance(member, list):
        return depth > 0 and all(_is_plain(below, depth - 1) for below in member)
    if isinstance(member, float):
        return abs(member) < float("inf")
    return member is None or isinstance(member, str | int)


def _is_cut(body: str) -> bool:
    """Whether a JSON text ends inside a string or before its brackets are closed."""
    depth = 0
    is_string = False
    is_escaped = False
    for character in body:
        if is_string:
            is_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        else:
            is_string = character == '"'
            depth += (character in "{[") - (character in "}]")
    return is_string or depth > 0


def _shown(error: Exception) -> str:
    try:
        return printable(error) or type(error).__name__
    except Exception:  # its text may raise too
        return type(error).__name__
