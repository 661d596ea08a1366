"""Parsers of tool calls: what each format means, what is told back, what ends an episode; and that
no text at all makes one raise."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.schemas.errors import ConfigError
from quiver.stages.turns.config import Turns
from quiver.stages.turns.tool_calls import (
    PARSERS,
    PYTHON_TAG,
    Call,
    ParsedTurn,
    make_parser,
    parse_hermes,
    parse_llama,
    parse_python_tag,
)
from tests import tiny


def hermes(*calls: dict) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


ADD = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": None}]}}
SAY = {"name": "say", "arguments": {"text": "a </tool> \n <|im_end|> { é"}}
CALLS = (Call("add", ADD["arguments"]), Call("say", SAY["arguments"]))


@pytest.mark.parametrize(
    "parse, text, before, calls",
    [
        (parse_hermes, hermes(ADD, SAY), "Let me see.\n", CALLS),
        (parse_hermes, hermes(ADD), "<think><tool_call> is an idea</think>\n", CALLS[:1]),
        (parse_hermes, hermes({"name": "add", "arguments": '{"a": 1}'}, {"name": "now"}), "", (Call("add", {"a": 1}), Call("now", {}))),
        (parse_python_tag, f"{PYTHON_TAG}x = {{}}\nprint(x)<|eom_id|>", "I run it.", (Call("python", {"code": "x = {}\nprint(x)"}),)),
    ],
)  # fmt: skip
def test_calls_and_the_text_before_them_are_read(parse, text, before, calls):
    assert parse(before + text) == ParsedTurn(before, calls)


@pytest.mark.parametrize(
    "parse, text",
    [
        (parse_hermes, "The answer is 12."),
        (parse_hermes, "<think>I could use <tool_call></think>No tool is needed."),
        (parse_hermes, "<think>cut while I think of <tool_call>"),
        (parse_hermes, "\n<think>cut while I think of <tool_call>"),
        (parse_llama, "The answer is {12}."),
        (parse_llama, '{"answer": 12}'),
        (parse_llama, '{"answer": 5, "name": "Ann"}'),
        (parse_llama, '{"name": "Ann"}'),
        (parse_llama, '{"name": "Ann", "arguments": {"a": 1}}'),
        (parse_llama, '{"name": Ann}'),
        (parse_python_tag, "```python\nprint(1)\n```"),
    ],
)
def test_a_turn_without_calls_is_text(parse, text):
    assert parse(text) == ParsedTurn(text)


@pytest.mark.parametrize(
    "text, why",
    [
        ('<tool_call>{"name": "add", "arguments": {}</tool_call>', "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "list, expected a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'lacks "name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "is a list, expected"),
        (
            '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>',
            'the call of add has the key "parameters", expected only "name" and "arguments"',
        ),
        (hermes({**ADD, "id": "c1"}), 'the call of add has the key "id"'),
        (hermes({"name": "add", "arguments": None}), "is null, expected a JSON object"),
        (hermes({"name": "add", "arguments": ""}), "not valid JSON"),
        ('<tool_call>{"name": "add", "name": "say", "arguments": {}}</tool_call>', "twice"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
            "1e999 is more than a float holds",
        ),
        (
            hermes({"name": "add", "arguments": {"a": 10**300}}),
            "a number has 301 digits, at most 300 are read",
        ),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', "holds a number, expected text"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        (hermes(ADD) + "<tool_call>oh</tool_call>", "not valid JSON"),
    ],
)
def test_a_call_that_can_not_be_read_is_an_error_that_can_be_told(text, why):
    parsed = parse_hermes(text)
    assert why in parsed.error and not parsed.is_broken


@pytest.mark.parametrize(
    "parse, text",
    [
        (parse_hermes, 'So: <tool_call>{"name": "add", "argum'),
        (parse_hermes, hermes(ADD) + "\n<tool_call>"),
        (parse_hermes, "<tool_call><tool_call>{}</tool_call>"),
        (parse_hermes, "So </tool_call>"),
        (parse_hermes, "</tool_call>" + hermes(ADD)),
        (parse_hermes, hermes(ADD) + "</tool_call>"),
        (parse_llama, '{"name": "add", "parameters": {"a": "1'),
        (parse_llama, '<|python_tag|>{"name": "add", "parameters": {'),
    ],
)
def test_broken_framing_is_told_apart(parse, text):
    parsed = parse(text)
    assert parsed.is_broken and parsed.error and not parsed.calls


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize(
    "before", ["", "So: ", '<think>"one</think>', 'It is 5" <tool_call> </think>']
)
def test_tags_in_the_strings_of_a_call_are_text(tag, before):
    said = Call("say", {"text": f'the "{tag}" \n\\ tag'})
    text = before + hermes({"name": "say", "arguments": said.arguments}, ADD)
    assert parse_hermes(text) == ParsedTurn(before, (said, Call("add", ADD["arguments"])))
    text = json.dumps({"name": "say", "parameters": said.arguments})
    assert parse_llama(text).calls == (said,)
    assert parse_llama(f"So.<|python_tag|>{text}; {text}") == ParsedTurn("So.", (said, said))
    code = f"print('{tag}')"
    assert parse_python_tag(PYTHON_TAG + code).calls == (Call("python", {"code": code}),)


@pytest.mark.parametrize("text", [*[f'{tag}",' for tag in TAGS], "a}}"])
def test_tags_in_strings_hide_no_mistake(text):
    """A comma before the last brace; a quote that is missing."""
    parsed = parse_hermes(f'<tool_call>{{"name": "say", "arguments": "{text}}}</tool_call>')
    assert "not valid JSON" in parsed.error and not parsed.is_broken
    assert parse_hermes(json.dumps({"answer": text})).error is None


def test_a_call_before_an_end_of_thinking_that_was_not_begun_is_told():
    parsed = parse_hermes("So: " + hermes(ADD) + " then </think> x")
    assert parsed == ParsedTurn(
        "So: ",
        (),
        "a call comes before </think>: write calls after the thinking, not in it",
    )
    text = "I could " + hermes(SAY) + "</think>"
    assert parse_hermes(text + hermes(ADD)) == ParsedTurn(text, (Call("add", ADD["arguments"]),))
    for text in ("<think>" + hermes(ADD) + "</think> x", "I could use <tool_call> </think> x"):
        assert parse_hermes(text) == ParsedTurn(text)


@pytest.mark.parametrize("tag", ["", "<|python_tag|>", "I ask.<|python_tag|>"])
@pytest.mark.parametrize("end", ["", "<|eom_id|>", "\n<|eot_id|>"])
def test_llama_reads_objects_with_or_without_the_tag(tag, end):
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}'
    parsed = parse_llama(tag + text + end)
    assert parsed.calls == (Call("add", {"a": 1}), Call("now", {}))
    assert parsed.text == tag.partition("<|")[0]


def test_llama_knows_a_call_by_the_name_of_a_tool():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    parse = make_parser("llama", tools=tools)
    assert parse('{"name": "add", "parameters": {}}').calls == (Call("add", {}),)
    assert make_parser("llama")('{"name": "add"}').calls == ()
    assert parse('{"name": "add"}').error == 'the call of add lacks "parameters"'
    assert parse('{"answer": 5, "name": "Ann"}').calls == ()
    for text in (
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "add", "a": 1}',
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
    ):
        parsed = parse(text)
        assert parsed.calls == () and not parsed.is_broken
        assert parsed.error.startswith("the call of add has the key")
    assert "the braces" in parse('{"name": "add", "par').error
    assert parse('{"name": "Ann", "a').error is None


@pytest.mark.parametrize(
    "text, why",
    [
        ('{"name": "add", "parameters": {a: 1}}', "not valid JSON"),
        (PYTHON_TAG + '{"name": "add", "parameters": {a: 1}}', "not valid JSON"),
        (PYTHON_TAG + '{"type": "function", "name": "now"}', 'the call of now has the key "type"'),
        (f"{PYTHON_TAG} ", "no code"),
    ],
)
def test_llama_tells_what_is_wrong_with_a_call(text, why):
    parsed = parse_llama(text)
    assert why in parsed.error and not parsed.is_broken


@pytest.mark.parametrize(
    "code",
    [
        "print(1)",
        "{1, 2}",
        "{k: k*k for k in range(3)}",
        '{"a": 1}["a"]',
        '{"find": 1}.get(2)',
        "{}",
        "{'a': [1,",
    ],
)
def test_what_is_no_call_behind_the_tag_is_code_for_llama_too(code):
    parsed = ParsedTurn("<think>{</think>So.", (Call("python", {"code": code}),))
    text = f"{parsed.text}{PYTHON_TAG}{code}<|eom_id|>"
    assert make_parser("llama", tools=FIND)(text) == parsed


FORMS = {
    "hermes": '<tool_call>{"name": …, "arguments": {…}}</tool_call>',
    "llama": '{"name": …, "parameters": {…}} as the whole turn',
    "python_tag": "code behind <|python_tag|>",
}
FIND = [{"type": "function", "function": {"name": "find", "parameters": {}}}]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "find", "arguments": {"city": "Rome"}}]',
        '[TOOL_CALLS]find[ARGS]{"city": "Rome"}',
        '[TOOL_CALLS]find{"city": "Rome"}',
        '```json\n{"name": "find", "arguments": {"city": "Rome"}}\n```',
        '<TOOL_CALL>{"name": "find", "arguments": {}}</TOOL_CALL>',
        '<tool_calls>{"arguments": {}, "name": "find"}</tool_calls>',
        '[{"name": "find", "parameters": {"city": "Rome"}}]',
        'Sure. {"name": "find", "parameters": {"city": "Rome"}}',
        '<function=find>{"city": "Rome"}</function>',
        '<invoke name="find"><parameter name="city">Rome</parameter></invoke>',
        '{"type": "function", "function": {"name": "find", "parameters": {}}}',
        '{"function": "find", "parameters": {}}',
        "Sure: {'name': 'find', 'arguments': {}}",
        '[find(city="Rome")]',
        '<think>I find</think>[find(city="Rome"), find()]\n',
        'find(city="Rome")',
        "find('Rome')\nfind()",
        'Sure.\n```python\nfind(city="Rome")\n```\nI wait.',
        '```tool_code\nprint(find(city="Rome"))\n```',
        '<|python_start|>[find(city="Rome")]<|python_end|>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{}\n```",
        "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<|channel|>commentary to=functions.find <|constrain|>json<|message|>{}<|call|>",
        "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<start_function_call>call:find{city:<escape>Rome<escape>}<end_function_call>",
        'I ask:\n{"name": "find", "id": 7, "arguments": {"text": "a } or a {"}}\nand wait.',
        'Sure [{"name": "other", "arguments": {}}, {"name": "find", "arguments": "{}"}]',
        '{"tool_calls": [{"tool_name": "find", "parameters": {}}]} is my call.',
        'A column            {"name": "find", "arguments": {}} and another',
    ],
)
def test_a_known_tool_that_is_called_in_another_format_is_an_error(name, text):
    parsed = make_parser(name, tools=FIND)(text)
    assert parsed == ParsedTurn(text, (), f"find is called in another format than {FORMS[name]}")
    other = text.replace("find", "finder")
    assert make_parser(name, tools=FIND)(other) == ParsedTurn(other)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "text",
    [
        "I find that find(x) is 3.",
        '{"answer": "find", "arguments": 3}',
        '<think>{"name": "find", "arguments": {}}</think>It is 3.',
        '<think>{"name": "find", "arguments": {}}',
        '{"tools": ["find"], "parameters": {}}',
        "<find>Rome</find>",
        'The schema is {"name": "find", "parameters": {}}. My answer is 5.',
        'It is `[{"type": "function", "function": {"name": "find", "parameters": {}}}]`, I read.',
        'I have\n{"name": "find", "description": "Finds", "parameters": {"type": "object"}}',
        'I\'d call {"name": "find" with "arguments": nothing',
        'Either {"name": "find"} or {"arguments": {}}',
        'Both: {"one": {"name": "find"}, "two": {"arguments": {}}}',
        "find(x) = find(3)",
        '```python\nx = 3\n```\nfind(city="Rome") is 5.',
        "The recipient is functions.find, to=functions.finder.",
    ],
)
def test_an_answer_that_names_a_tool_is_no_call(name, text):
    assert make_parser(name, tools=FIND)(text) == ParsedTurn(text)


@pytest.mark.parametrize(
    "body",
    [
        "<function=find>\n<parameter=city>\nRome\n</parameter>\n</function>",
        "find\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>",
        'find(city="Rome")',
    ],
)
def test_a_call_of_another_format_between_the_tags_is_told_as_such(body):
    text = f"So: <tool_call>\n{body}\n</tool_call>"
    parsed = make_parser("hermes", tools=FIND)(text)
    error = f"find is called in another format than {FORMS['hermes']}"
    assert parsed == ParsedTurn("So: ", (), error)
    other = make_parser("hermes", tools=FIND)(text.replace("find", "finder"))
    assert "not valid JSON" in other.error
    unclosed = make_parser("hermes", tools=FIND)(text.removesuffix("</tool_call>"))
    assert unclosed == ParsedTurn("So: ", (), "<tool_call> is never closed", is_broken=True)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "piece",
    [
        '<|a|>[find("',
        "```\nfind(a=)",
        '\\"',
        '{"name": "find", ',
        '"arguments": {',
        "find() ",
        "<tool_call>find(",
        "to=",
        "<tool_call>",
        '{"name": "a", "parameters": {"a": ',
        "[" * 50,
        "</tool_call>",
    ],
)
def test_long_text_is_looked_through_once(name, piece):
    for text in (piece * 20_000 + " x", '{"name": ' + piece * 20_000):
        assert make_parser(name, tools=FIND)(text).calls == ()


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|eom_id|>", '{"name": "a"',
     '"name": "find"', "find(", "functions.find", "```\n", ', "arguments": ', ', "parameters": ', "{", "}", "[", "]", '"', "\\", ";", "NaN", "1e999", "\ud800", "\0", "\n"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=20).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_no_text_makes_a_parser_raise(name, text):
    for parsed in (PARSERS[name].parse(text), make_parser(name, tools=FIND)(text)):
        assert isinstance(parsed, ParsedTurn)
        assert text.startswith(parsed.text)
        assert not (parsed.is_broken and parsed.error is None)
        for call in parsed.calls:
            json.dumps(call.arguments, allow_nan=False)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.text("abc_", min_size=1), st.dictionaries(st.text("abc"), JSONS)),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_written_is_read_again(calls):
    expected = tuple(Call(*call) for call in calls)
    members = [{"name": name, "arguments": arguments} for name, arguments in calls]
    assert "</tool_call>" in hermes(*members)
    assert parse_hermes(hermes(*members)).calls == expected
    text = "; ".join(json.dumps({"name": name, "parameters": a}) for name, a in calls)
    assert parse_llama(text).calls == expected


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close": ["<call>", "<|im_end|>"]},
        "tool_calls": {
            "open": "<call>", "close": "</call>", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}  # fmt: skip


def test_the_tokenizers_own_response_template_reads_calls():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    with pytest.raises(ConfigError, match="no response template"):
        make_parser("tokenizer", tokenizer)
    tokenizer.response_template = RESPONSE_TEMPLATE
    call = "<call>" + json.dumps(ADD) + "</call>"
    for begun, texts in (("", ["So."]), ("<think>\n", [f"I may {call}.</think>\nSo."])):
        parse = make_parser("tokenizer", tokenizer, prefix=f"<|im_start|>assistant\n{begun}")
        for text in texts:
            assert parse(f"{text}{call}<|im_end|>") == ParsedTurn(text, CALLS[:1])
    thinking = f"I could write {call}.<|im_end|>"
    assert parse(thinking) == ParsedTurn(thinking), "a thought that the prompt begins"
    parse = make_parser("tokenizer", tokenizer, prefix="<|im_start|>assistant\n")
    assert parse("It is 12.<|im_end|>") == ParsedTurn("It is 12.<|im_end|>")
    assert parse("So.<call>oh</call>").error


# -- a parser of the user's own


def write_parser(folder, body: str) -> str:
    path = folder / "my_calls.py"
    path.write_text(f"def parse(text):\n    {body}\n")
    return f"{path}:parse"


RETURN = "from quiver.stages.turns.tool_calls import ParsedTurn; return ParsedTurn("


@pytest.mark.parametrize(
    "body, expected",
    [
        ("return [{'name': text, 'arguments': {}}]", ParsedTurn("go", (Call("go", {}),))),
        ("raise ValueError('say it again')", ParsedTurn("go", (), "say it again")),
        ("raise EOFError('cut')", ParsedTurn("go", (), "cut", is_broken=True)),
        ("raise ValueError", ParsedTurn("go", (), "ValueError")),
        ("return 7", ParsedTurn("go", (), "'int' object is not iterable")),
        ("return [{}]", ParsedTurn("go", (), 'the call lacks "name"')),
        (f"{RETURN}'so', [{{'name': 'a', 'arguments': {{}}}}])", ParsedTurn("so", (Call("a", {}),))),
        (f"{RETURN}'so', error='no')", ParsedTurn("so", (), "no")),
        (f"{RETURN}'so', [7])", ParsedTurn("go", (), "the call is a number, expected a JSON object")),
        (f"{RETURN}7)", ParsedTurn("go", (), "the text of the turn is a number, expected text")),
        (f"{RETURN}'so', error=7)", ParsedTurn("go", (), "the error of the turn is a number, expected text")),
    ],
)  # fmt: skip
def test_a_function_of_the_users_reads_calls(tmp_path, body, expected):
    assert make_parser(write_parser(tmp_path, body))("go") == expected


def test_an_edited_parser_is_another_key(tmp_path):
    first, second = (
        Turns(tools=["python"], parser=write_parser(tmp_path, body)).with_fingerprint().key()
        for body in ("return []", "return list()")
    )
    assert first["parser"] == second["parser"] and first != second
