r"""What a turn's text asks for: calls of tools, in one of the formats that models are trained on.

    parse = make_parser("hermes")
    parse('Let me see.<tool_call>{"name": "look_up", "arguments": {"word": "elk"}}</tool_call>')
    # ParsedTurn(text="Let me see.", calls=(Call("look_up", {"word": "elk"}),), error=None, …)

No parser raises, whatever the policy wrote. A call that is not of its format (one with another key,
say) is an `error` and is not made: its text is for the policy, which may try again. Broken framing
(a tag that is opened and never closed, say) is `is_broken`: there is nothing that an answer could
stand behind. Thinking before `</think>` holds no calls, and a tag in a string of a call's JSON is
text. A known tool that is called in another format is an `error` too: the text would count as the
answer otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.outside import read_call, read_json_text
from quiver.schemas.plain import no_key_twice
from quiver.stages.common import plugins
from quiver.stages.common.environments.environment import Call
from quiver.stages.common.environments.tool_schemas import PYTHON_TOOL, ToolSchema
from quiver.stages.common.plugins import did_you_mean

PYTHON_TAG = "<|python_tag|>"
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_THOUGHT_START = "<think>"
_THOUGHT_END = "</think>"
_CALL_TAGS = (_OPEN, _CLOSE)
_NO_CALLS = "thinking holds no calls, write it behind the thinking"
_MARK = re.compile("|".join(map(re.escape, (*_CALL_TAGS, _THOUGHT_END, PYTHON_TAG))))
_MARK_OR_STRING = re.compile(rf'"(?:[^"\\\n]|\\.)*+"|\\.|{_MARK.pattern}')
"""A mark, or a string of JSON, in which marks are text."""
_ARGUMENTS_KEY = re.compile(r"""(["'])(?:arguments|parameters)\1\s*:""")
_OBJECT = re.compile(r"\s*\{")
_ENDS = ("<|eom_id|>", "<|eot_id|>")


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


class _Broken(ValueError):
    """Why the framing is broken."""


def parse_hermes(text: str) -> ParsedTurn:
    """Calls as Qwen and Hermes models write them: `<tool_call>{"name", "arguments"}</tool_call>`,
    any number of them."""
    start = _end_of_thought(text, _CALL_TAGS)
    marks = [mark for mark in _marks(text, start) if mark[0] in _CALL_TAGS]
    before = text[: marks[0].start()] if marks else text
    try:
        bodies = list(_between_tags(text, marks))
        calls = tuple(_read_call(read_json_text(body, "the call"), "arguments") for body in bodies)
    except ValueError as error:
        return ParsedTurn(before, (), str(error), isinstance(error, _Broken))
    if not marks and start and not _begins_with_thought(text):
        # the prompt may have begun the thinking, or nothing has: only the policy can tell
        ahead = parse_hermes(text[: start - len(_THOUGHT_END)])
        if ahead.calls:
            return ParsedTurn(ahead.text, (), f"a call stands before {_THOUGHT_END}: {_NO_CALLS}")
    return ParsedTurn(before, calls)


def _between_tags(text: str, tags: list[re.Match]) -> Iterator[str]:
    """What stands between each pair of tags. _Broken where they are no pairs."""
    opened = None
    for tag in tags:
        if tag[0] == _OPEN:
            if opened:
                raise _Broken(f"{_OPEN} inside another")
            opened = tag
        elif opened:
            yield text[opened.end() : tag.start()].strip()
            opened = None
        else:
            raise _Broken(f"{_CLOSE} stands without {_OPEN} before it")
    if opened:
        raise _Broken(f"{_OPEN} is never closed")


def parse_llama(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
    """Calls as Llama 3 models write them: the whole turn is `{"name", "parameters"}`, several with
    `;` or white space between them, with or without `<|python_tag|>` before.

    After that tag anything else is code for the tool `python`. Without the tag a JSON object is a
    call if it has these keys or the name of one of the `tools`, else it is an answer.
    """
    start, before, tag, tagged = _split_at_python_tag(text)
    body = _without_end(tagged if tag else before)
    if not body.startswith("{"):
        return parse_python_tag(text)
    names = [tool["function"]["name"] for tool in tools]
    before = text[:start] + (before if tag else "")
    calls: list[Call] = []
    try:
        while body:
            members, end = _read_object(body)
            is_call = members.keys() >= {"name", "parameters"} or members.get("name") in names
            if not (calls or tag or is_call):
                return ParsedTurn(text)
            call = _read_call(members, "parameters")
            if "parameters" not in members:
                raise ValueError(f'the call of {printable(call.name)} lacks "parameters"')
            calls.append(call)
            body = body[end:].lstrip().removeprefix(";").lstrip()
    except ValueError as error:
        keys = ('"name"', '"parameters"')
        is_call = all(key in body for key in keys) or any(f'"{name}"' in body for name in names)
        if calls or tag or is_call:
            return ParsedTurn(before, (), str(error), isinstance(error, _Broken))
        return ParsedTurn(text)
    return ParsedTurn(before, tuple(calls))


def _read_object(body: str) -> tuple[dict[str, Any], int]:
    """The JSON object that `body` begins with, and where it ends. ValueError."""
    try:
        members, end = json.JSONDecoder(object_pairs_hook=no_key_twice).raw_decode(body)
    except (ValueError, RecursionError) as error:
        if _is_cut(body):
            raise _Broken("the braces of a call are never closed") from None
        raise ValueError(f"the call is not valid JSON: {_shown(error)}") from None
    if not isinstance(members, dict):
        raise ValueError(f"a call is {type(members).__name__}, expected a JSON object")
    return members, end


def parse_python_tag(text: str) -> ParsedTurn:
    """Code behind `<|python_tag|>`, to the end of the turn: one call of the tool `python`."""
    start, before, tag, code = _split_at_python_tag(text)
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
        calls = tuple(_read_call(function, "arguments") for function in functions)
    except ValueError as error:
        return ParsedTurn(content, (), str(error))
    return ParsedTurn(content if calls else text, calls)


def parse_by(text: str, *, function: Callable[[str], Any]) -> ParsedTurn:
    """Calls by a user's function: it returns a list of {"name", "arguments"}, or a ParsedTurn.
    ValueError says what the policy did wrong, EOFError that the framing is broken."""
    try:
        returned = function(text)
        if isinstance(returned, ParsedTurn):
            return returned
        calls = tuple(_read_call(members, "arguments") for members in returned or ())
        return ParsedTurn(text, calls)
    except Exception as error:  # a user's code
        return ParsedTurn(text, (), _shown(error), isinstance(error, EOFError))


def parse_known(text: str, *, parse: Parse, form: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """Calls by `parse`. Without any, a call of one of `tools` in another format is an error; `form`
    says how it should be written."""
    parsed = parse(text)
    if parsed.calls or parsed.error:
        return parsed
    said = text[_end_of_thought(text, _CALL_TAGS) :]
    for tool in tools:
        name = tool["function"]["name"]
        if _calls_otherwise(name, said):
            why = f"{printable(name)} is called in another format than {form}"
            return ParsedTurn(text, (), why)
    return parsed


def _calls_otherwise(name: str, said: str) -> bool:
    """Whether a text calls a tool, in any format that models are trained on."""
    name = re.escape(name)
    is_named = re.search(rf"""(["'])(?:name|function)\1\s*:\s*(["']){name}\2""", said)
    if is_named and _ARGUMENTS_KEY.search(said):
        return True
    forms = (
        # <function=NAME> and <invoke name="NAME">
        rf"""<\w+(?:=|\s+name\s*=\s*)["']?{name}["']?\s*>""",
        # newer Mistral models
        rf"\[TOOL_CALLS\]\s*{name}\s*[\[{{]",
        # Python's syntax, as Llama 4 writes it
        rf"\A\s*\[\s*{name}\(.*\)\s*\]\s*\Z",
    )
    return any(re.search(form, said, re.DOTALL) for form in forms)


class Entry(NamedTuple):
    """A parser that comes along."""

    description: str
    parse: Parse
    form: str
    """How a call is written, for the policy."""


PARSERS = {
    "hermes": Entry(
        "<tool_call>{json}</tool_call>: Qwen, Hermes, SmolLM",
        parse_hermes,
        '<tool_call>{"name": …, "arguments": {…}}</tool_call>',
    ),
    "llama": Entry(
        "a JSON object, or <|python_tag|>: Llama 3",
        parse_llama,
        '{"name": …, "parameters": {…}} as the whole turn',
    ),
    "python_tag": Entry(
        "code behind <|python_tag|>", parse_python_tag, f"code behind {PYTHON_TAG}"
    ),
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
        _, parse, form = PARSERS[name]
        if name == "llama":
            parse = partial(parse_llama, tools=tools or [])
        return partial(parse_known, parse=parse, form=form, tools=tools or [])
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


def _begins_with_thought(text: str) -> bool:
    return text.lstrip().startswith(_THOUGHT_START)


def _end_of_thought(text: str, call_tags: Sequence[str]) -> int:
    """Where thinking ends and calls may begin. `call_tags`: what begins and ends a call."""
    if _begins_with_thought(text):
        end = text.find(_THOUGHT_END)
        return len(text) if end < 0 else end + len(_THOUGHT_END)
    for mark in _marks(text):
        if mark[0] == _THOUGHT_END:
            return mark.end()
        if mark[0] == PYTHON_TAG and PYTHON_TAG in call_tags:
            return 0  # all behind it is code
    return 0


def _marks(text: str, start: int = 0) -> Iterator[re.Match]:
    """The marks in `text`, but not those in the strings of a JSON object that `text` or a mark
    begins. Elsewhere quotes are prose."""
    position = start
    pattern = _MARK_OR_STRING if _begins_object(text, start) else _MARK
    while match := pattern.search(text, position):
        position = match.end()
        if _MARK.fullmatch(match[0]):
            yield match
            pattern = _MARK_OR_STRING if _begins_object(text, position) else _MARK


def _begins_object(text: str, position: int) -> bool:
    return _OBJECT.match(text, position) is not None


def _split_at_python_tag(text: str) -> tuple[int, str, str, str]:
    """Where thinking ends; then what is before the tag, the tag, and what is behind it."""
    start = _end_of_thought(text, (PYTHON_TAG,))
    for mark in _marks(text, start):
        if mark[0] == PYTHON_TAG:
            return start, text[start : mark.start()], PYTHON_TAG, text[mark.end() :]
    return start, text[start:], "", ""


def _without_end(text: str) -> str:
    text = text.strip()
    for end in _ENDS:
        text = text.removesuffix(end).rstrip()
    return text


def _read_call(members: Any, key: str) -> Call:
    """The call that {"name", key} is. ValueError."""
    return Call(*read_call(members, "the call", key))


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
