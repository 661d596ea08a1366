r"""Parse tool calls out of a turn's text, in the formats that models are trained on.

    parse = make_parser("hermes")
    parse('Let me see.<tool_call>{"name": "look_up", "arguments": {"word": "elk"}}</tool_call>')
    # ParsedTurn(text="Let me see.", calls=(Call("look_up", {"word": "elk"}),), error=None, …)

No parser raises, for any text. A malformed call (one with another key, say) becomes an `error` and
is not made; the policy reads the error and may try again. Broken framing (a tag that is opened and
never closed, say) sets `is_broken`: no answer could follow such a turn. Thinking before `</think>`
contains no calls, and a tag in a string of a call's JSON is text. The parsers of `PARSERS` also
report an `error` if a known tool is called in another format, because the text would otherwise
count as the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from quiver.schemas import outside
from quiver.schemas.errors import ConfigError, did_you_mean, printable
from quiver.schemas.outside import shape_of
from quiver.schemas.plain import no_key_twice
from quiver.stages.core import plugins
from quiver.stages.turns.environment import Call
from quiver.stages.turns.tool_schemas import PYTHON_TOOL, ToolSchema

PYTHON_TAG = "<|python_tag|>"
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_THOUGHT_START = "<think>"
_THOUGHT_END = "</think>"
_CALL_TAGS = (_OPEN, _CLOSE)
_NO_CALLS = "write calls after the thinking, not in it"
_TAG = re.compile("|".join(map(re.escape, (*_CALL_TAGS, _THOUGHT_END, PYTHON_TAG))))
_STRING = r'"(?:[^"\\\n]|\\.)*+"'
_TAG_OR_STRING = re.compile(rf"{_STRING}|\\.|{_TAG.pattern}")
"""A tag, or a JSON string, in which tags are text. A backslash outside of strings hides the quote
after it."""
_OBJECT = re.compile(r"\s*\{")
_PYTHON_START = r"(?:\A|```\w*+\n|<tool_call>|<\|\w++\|>)\s*+"
_PYTHON_ARGUMENTS = r"(?:(?!```|<tool_call>|<\|).)*"
_PYTHON_END = r"\s*+(?:```|<|\Z)"
_FORMS = (
    # Qwen3-Coder's <function=NAME>, MiniMax's <invoke name="NAME">
    r"""<\w+(?:=|\s+name\s*=\s*)["']?(NAME)["']?\s*>""",
    # GLM
    r"<tool_call>\s*(NAME)\s*<",
    # newer Mistral models
    r"\[TOOL_CALLS\]\s*(NAME)\s*[\[{]",
    # DeepSeek
    r"<｜tool▁(?:call▁begin|sep)｜>\s*(NAME)(?![\w.-])",
    # gpt-oss, Kimi
    r"(?:\bto=|>)functions\.(NAME)(?![\w.-])",
    # FunctionGemma
    r"<start_function_call>\s*call:(NAME)\{",
    # Python's syntax, as Llama 4 and Gemma write it
    rf"{_PYTHON_START}\[\s*+(NAME)\({_PYTHON_ARGUMENTS}\)\s*+\]{_PYTHON_END}",
    rf"{_PYTHON_START}(?:print\()?(NAME)"
    rf"""\((?:\s*+(?:\w++\s*+=|["']){_PYTHON_ARGUMENTS})?\){_PYTHON_END}""",
)
"""Other formats of calls than JSON objects. NAME stands for the names of tools."""
_OF_OBJECTS = (
    r"""(["'])(?:name|function|tool_name)\1\s*+:\s*+(["'])(?P<tool>NAME)\2"""
    r"""|(["'])(?P<key>arguments|parameters|description)\4\s*+:"""
    rf"|{_STRING}|\\.|[{{}}]"
)
"""Matches the parts that identify a JSON object as a call: braces, and the keys of calls and
schemas."""
_WORD_BEFORE = re.compile(r"\w[ \t`(\[]*\Z")
_WORD_BEHIND = re.compile(r"[]})`]*[.,;:!?]*[ \t]+\w")
_ENDS = ("<|eom_id|>", "<|eot_id|>")


class ParsedTurn(NamedTuple):
    """The result of parsing one turn."""

    text: str
    """Text before the first call; all of it if there are no calls."""
    calls: tuple[Call, ...] = ()
    error: str | None = None
    """Why a call cannot be read; if set, none of the turn's calls is made."""
    is_broken: bool = False
    """True if the framing is broken, so that nothing can follow this turn."""


Parse = Callable[[str], ParsedTurn]


class _Broken(ValueError):
    """Raised if the framing is broken."""


def parse_hermes(text: str) -> ParsedTurn:
    """Parse the calls of Qwen and Hermes models: `<tool_call>{"name", "arguments"}</tool_call>`.

    A turn may have any number of them.
    """
    start = _end_of_thought(text, _CALL_TAGS)
    tags = [tag for tag in _tags(text, start) if tag[0] in _CALL_TAGS]
    before = text[: tags[0].start()] if tags else text
    try:
        bodies = list(_between_tags(text, tags))
        calls = tuple(
            _read_call(outside.read_json_text(body, "the call"), "arguments") for body in bodies
        )
    except ValueError as error:
        return ParsedTurn(before, (), str(error), isinstance(error, _Broken))
    if not tags and start and not _begins_with_thought(text):
        # The prompt may have begun the thinking, or there is none: only the policy can tell.
        ahead = parse_hermes(text[: start - len(_THOUGHT_END)])
        if ahead.calls:
            return ParsedTurn(ahead.text, (), f"a call comes before {_THOUGHT_END}: {_NO_CALLS}")
    return ParsedTurn(before, calls)


def _between_tags(text: str, tags: list[re.Match]) -> Iterator[str]:
    """Yield the text between each pair of tags. Raises _Broken if they do not form pairs."""
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
            raise _Broken(f"{_CLOSE} comes without {_OPEN} before it")
    if opened:
        raise _Broken(f"{_OPEN} is never closed")


def parse_llama(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
    """Parse the calls of Llama 3 models: the whole turn is `{"name", "parameters"}`.

    Several calls are separated by `;` or white space. `<|python_tag|>` may come first. A JSON
    object is a call if it has these keys or the name of one of the `tools`; after the tag, any
    object with a name is one. Anything else is an answer or, after the tag, code for the tool
    `python`.
    """
    before, tag, behind = _split_at_python_tag(text)
    body = _without_end(behind)
    if not body.startswith("{"):
        return parse_python_tag(text)
    names = [tool["function"]["name"] for tool in tools]
    calls: list[Call] = []
    # For an object that cannot be parsed, only its text can show that it is a call.
    is_call = all(key in body for key in ('"name"', '"parameters"')) or any(
        re.search(rf'"name"\s*:\s*"{re.escape(name)}"', body) for name in names
    )
    try:
        while body:
            members, end = _read_object(body)
            is_call = members.keys() >= {"name", "parameters"} or members.get("name") in names
            is_call |= bool(tag) and "name" in members
            if not (calls or is_call):
                return parse_python_tag(text)
            call = _read_call(members, "parameters")
            if "parameters" not in members:
                raise ValueError(f'the call of {printable(call.name)} lacks "parameters"')
            calls.append(call)
            body = body[end:].lstrip().removeprefix(";").lstrip()
    except ValueError as error:
        if not (calls or is_call):
            return parse_python_tag(text)
        return ParsedTurn(before, (), str(error), isinstance(error, _Broken))
    return ParsedTurn(before, tuple(calls))


def _read_object(body: str) -> tuple[dict[str, Any], int]:
    """Return the JSON object at the start of `body`, and the index of its end. Raises
    ValueError."""
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
    """Parse the code after `<|python_tag|>`, up to the end of the turn: one call of the tool
    `python`."""
    before, tag, behind = _split_at_python_tag(text)
    if not tag:
        return ParsedTurn(text)
    code = _without_end(behind)
    if not code:
        return ParsedTurn(before, (), f"there is no code after {PYTHON_TAG}")
    return ParsedTurn(before, (Call(PYTHON_TOOL, {"code": code}),))


def parse_response(text: str, *, tokenizer: Any, prefix: str, tools: list[dict]) -> ParsedTurn:
    """Parse calls with the tokenizer's own response template, through transformers.

    `prefix` is the prompt's end, in which the template may have begun the turn.
    """
    try:
        message = tokenizer.parse_response(text, prefix=prefix, tools=tools or None)
        functions = [entry["function"] for entry in message.get("tool_calls") or []]
    except Exception as error:  # a template's expressions may raise anything
        return ParsedTurn(text, (), f"the turn cannot be read: {_shown(error)}")
    # What precedes the calls, as the policy wrote it: with its thought and the tags around it.
    texts = [field for field in message.values() if isinstance(field, str) and field in text]
    before = text[: max((text.rfind(field) + len(field) for field in texts if field), default=0)]
    try:
        calls = tuple(_read_call(function, "arguments") for function in functions)
    except ValueError as error:
        return ParsedTurn(before, (), str(error))
    return ParsedTurn(before if calls else text, calls)


def parse_by(text: str, *, function: Callable[[str], Any]) -> ParsedTurn:
    """Parse calls with a user's function, which returns a list of {"name", "arguments"} or a
    ParsedTurn.

    Its ValueError says what the policy did wrong; its EOFError means that the framing is broken.
    """
    try:
        returned = function(text)
        parsed = returned if isinstance(returned, ParsedTurn) else ParsedTurn(text, returned or ())
        for name, member in (("text", parsed.text), ("error", parsed.error or "")):
            if not isinstance(member, str):
                raise ValueError(f"the {name} of the turn is {shape_of(member)}, expected text")
        calls = (call._asdict() if isinstance(call, Call) else call for call in parsed.calls)
        return parsed._replace(calls=tuple(_read_call(call, "arguments") for call in calls))
    except Exception as error:  # a user's code
        return ParsedTurn(text, (), _shown(error), isinstance(error, EOFError))


def parse_known(text: str, *, parse: Parse, form: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """Parse calls with `parse`. If there are none, a call of one of `tools` in another format is an
    error.

    `form` is the expected format, for the error.
    """
    parsed = parse(text)
    if parsed.calls or parsed.is_broken or not tools:
        return parsed
    names = [tool["function"]["name"] for tool in tools]
    said = text[_end_of_thought(text, _CALL_TAGS) :]
    name = _called_otherwise(names, said, in_objects=parsed.error is None)
    if name:
        error = f"{printable(name)} is called in another format than {form}"
        return parsed._replace(error=error)
    return parsed


def _called_otherwise(names: Sequence[str], said: str, *, in_objects: bool) -> str:
    """Return the tool that the text calls in one of `_FORMS` or, if `in_objects`, in a JSON object;
    else "".

    An object with a description is a schema, and one in the middle of a sentence is a quotation.
    """
    alternatives = "|".join(map(re.escape, names))
    for form in _FORMS:
        if match := re.search(form.replace("NAME", alternatives), said, re.DOTALL):
            return match[1]
    opened: list[dict[str, Any]] = []
    tokens = re.finditer(_OF_OBJECTS.replace("NAME", alternatives), said) if in_objects else ()
    for token in tokens:
        if token[0] == "{":
            opened.append({"start": token.start()})
        elif opened and token[0] == "}":
            members = opened.pop()
            is_call = members.keys() & {"arguments", "parameters"} and "tool" in members
            if is_call and "description" not in members:
                start = (opened or [members])[0]["start"]
                if not (
                    _WORD_BEFORE.search(said, max(start - 9, 0), start)
                    and _WORD_BEHIND.match(said, token.end())
                ):
                    return members["tool"]
        elif opened and (token["tool"] or token["key"]):
            opened[-1][token["key"] or "tool"] = token["tool"]
    return ""


class Entry(NamedTuple):
    """A shipped parser."""

    description: str
    parse: Parse
    form: str
    """The format of a call, as shown to the policy."""


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
"""The name of the parser that uses the tokenizer's own template."""


def check_parser(name: str) -> None:
    """Raise ConfigError if the name is neither a shipped parser nor a path to a function.

    Does not check that the function exists.
    """
    names = [*PARSERS, RESPONSE_TEMPLATE]
    if ":" not in name and name not in names:
        raise ConfigError(
            f"generate.turns.parser {printable(repr(name))}",
            f"no such parser, expected one of {', '.join(names)}, or file.py:function of your own"
            + did_you_mean(name, names),
            next="correct generate.turns.parser",
        )


def make_parser(
    name: str, tokenizer: Any = None, *, prefix: str = "", tools: list[dict] | None = None
) -> Parse:
    """Return the parser with that name.

    Raises ConfigError if there is none, or if the tokenizer has no response template.
    """
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
    """Return the index where thinking ends and calls may begin. `call_tags` begin and end a
    call."""
    if _begins_with_thought(text):
        end = text.find(_THOUGHT_END)
        return len(text) if end < 0 else end + len(_THOUGHT_END)
    for tag in _tags(text):
        if tag[0] == _THOUGHT_END:
            return tag.end()
        if tag[0] == PYTHON_TAG and PYTHON_TAG in call_tags:
            return 0  # everything after it is code
    return 0


def _tags(text: str, start: int = 0) -> Iterator[re.Match]:
    """Yield the tags in `text`, except those in the strings of a JSON object.

    Such an object starts the text or follows a tag. Elsewhere quotes are prose.
    """
    position = start
    pattern = _TAG_OR_STRING if _begins_object(text, start) else _TAG
    while match := pattern.search(text, position):
        position = match.end()
        if _TAG.fullmatch(match[0]):
            yield match
            pattern = _TAG_OR_STRING if _begins_object(text, position) else _TAG


def _begins_object(text: str, position: int) -> bool:
    return _OBJECT.match(text, position) is not None


def _split_at_python_tag(text: str) -> tuple[str, str, str]:
    """Split at `<|python_tag|>` into the text before it, the tag, and the text after it.

    Without the tag: the thinking, "", and the rest.
    """
    start = _end_of_thought(text, (PYTHON_TAG,))
    for tag in _tags(text, start):
        if tag[0] == PYTHON_TAG:
            return text[: tag.start()], PYTHON_TAG, text[tag.end() :]
    return text[:start], "", text[start:]


def _without_end(text: str) -> str:
    text = text.strip()
    for end in _ENDS:
        text = text.removesuffix(end).rstrip()
    return text


def _read_call(members: Any, key: str) -> Call:
    """Return the call in {"name", key}. Raises ValueError."""
    return Call(*outside.read_call(members, "the call", key))


def _is_cut(body: str) -> bool:
    """Return True if a JSON text ends inside a string or before its brackets are closed."""
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
