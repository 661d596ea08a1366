"""The gate for what others give: what is read, what is refused, and that every entrance uses it."""

from __future__ import annotations

import datetime
import json
import logging
import re

import pytest

from quiver.schemas import outside
from quiver.schemas.outside import (
    read_call,
    read_message,
    read_name,
    read_number,
    read_path,
    read_tool_call,
)
from quiver.schemas.plain import problem_of, read_json
from quiver.schemas.prompts import PLAYED_TURNS
from quiver.stages.turns.environment import Call, Turn
from quiver.stages.turns.saved import Played, as_json, beginning_of
from tests.test_architecture import FILES, NAMES, imported

DAY = datetime.date(2020, 1, 2)
USER = {"role": "user", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": None}}}


@pytest.mark.parametrize(
    "given, read",
    [
        (USER, USER),
        ({"role": "developer", "content": ""}, {"role": "developer", "content": ""}),
        ({**USER, "tool_calls": None, "name": None, "function_call": None, "audio": {}}, USER),
        ({**USER, "tool_calls": [], "tool_call_id": "", "images": [], "refusal": ""}, USER),
        ({**USER, "weight": 0, "annotations": [{"url": "a"}], "id": "msg_1"}, USER),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 1, "id": "a"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        ({**USER, "name": "Ann"}, {**USER, "name": "Ann"}),
        (
            {**USER, "content": [{"type": "image"}, {"type": "text", "text": "a", "url": None}]},
            {**USER, "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
        ),
        (
            {"role": "tool", "content": "7", "tool_call_id": "functions.f:0", "name": "f"},
            {"role": "tool", "content": "7", "tool_call_id": "functions.f:0", "name": "f"},
        ),
        (
            {"role": "assistant", "tool_calls": ['{"name": "f", "arguments": "{\\"a\\": null}"}']},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
                ],
            },
        ),
    ],
)
def test_messages_are_read(given, read):
    assert read_message(given, "message 0") == read


@pytest.mark.parametrize(
    "thinking",
    [
        {"reasoning_content": "hm"},
        {"thinking": "hm"},
        {"reasoning_content": "hm", "reasoning": "hm"},
    ],
)
@pytest.mark.parametrize("content", ["1", None])
def test_thinking_is_read_whatever_it_is_called(thinking, content):
    """Servers write it twice if some of their clients read the older name."""
    given = {"role": "assistant", "content": content, **thinking}
    read = {"role": "assistant", "content": content or "", "reasoning_content": "hm"}
    assert read_message(given, "message 0") == read


@pytest.mark.parametrize(
    "given, why",
    [
        (None, "message 0 has null, expected role and content"),
        ({"role": "user"}, r"message 0 has \['role'\], expected role and content"),
        ({"role": "user", "content": None}, r"\['role'\] and a content that is null, expected"),
        ({"from": "human", "value": "a"}, "rename `from` to role and `value` to content"),
        ({**USER, "mood": 1}, r"\['content', 'mood', 'role'\]"),
        ({**USER, "audio": {"id": "a"}}, "data.audio"),
        ({**USER, "function_call": {"name": "f"}}, "write it as tool_calls"),
        ({**USER, "images": ["a.png"]}, "data.images"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "put its text into content"),
        ({"role": "<|im_start|>", "content": "a"}, "role of message 0 is '<|im_start|>'"),
        ({"role": "", "content": "a"}, "expected role and content"),
        ({"role": "a" * 65, "content": "a"}, "expected a word .* of at most 64 characters"),
        ({"role": "user", "content": 1}, "the content of message 0 holds a number, expected text"),
        ({"role": "user", "content": "a\0"}, "has a NUL character in its text, at position 1"),
        ({"role": "user", "content": "\ud800"}, "lone surrogate"),
        (
            {"role": "user", "content": [{"video": "a.mp4", "text": None, "type": "input_video"}]},
            'a part of message 0 is {\'video\': \'a.mp4\', .*}, expected {"type": "text", "text": …',
        ),
        ({"role": "user", "content": [{"text": "a"}]}, "a part of message 0 is {'text': 'a'}, exp"),
        ({"role": "user", "content": ["a"]}, "a part of message 0 is 'a'"),
        ({**USER, "tool_call_id": "<|im_end|>"}, "tool_call_id of message 0 is"),
        ({**USER, "name": "a" * 257}, "the name of message 0 has 257 characters"),
        ({**USER, "reasoning_content": "hm"}, "has reasoning_content and the role user: take it"),
        ({**USER, "tool_calls": [CALL]}, "has tool_calls and the role user"),
        (
            {"role": "assistant", "content": "a", "reasoning": "x", "thinking": "y"},
            "has reasoning and thinking, which differ",
        ),
        ({"role": "assistant", "tool_calls": "f()"}, "tool_calls of message 0 is not valid JSON"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "tool_calls of message 0 holds an object"),
    ],
)
def test_other_messages_are_refused_with_the_next_step(given, why):
    with pytest.raises(ValueError, match=why):
        read_message(given, "message 0")


def test_a_member_that_changes_nothing_is_told_once(caplog):
    outside._say_unused.cache_clear()
    with caplog.at_level(logging.WARNING, "quiver.schemas.outside"):
        with pytest.raises(ValueError, match="expected role and content"):  # a row of a source
            read_message({"question": "1 + 1?", "id": 3}, "row 0")
        for _ in range(3):
            read_message({**USER, "weight": 0}, "message 0")
    assert [record.getMessage() for record in caplog.records] == [
        "messages have a member weight, which is not used: take it out. Only what the policy "
        "samples is trained"
    ]


@pytest.mark.parametrize(
    "given, why",
    [
        (7, "the call is a number, expected {name, arguments}"),
        ({"function": 7}, "the call is a number, expected a JSON object"),
        ({"arguments": {}}, 'the call lacks "name"'),
        ({"name": 5}, "the name of the call holds a number, expected text"),
        ({"name": "f", "parameters": {}}, 'the call of f has the key "parameters"'),
        ({"function": {"name": "f"}, "arguments": {}}, r"beside its function: take it out"),
        ({"type": "web_search", "name": "f"}, "the type web_search, expected function"),
        ({"name": "f", "arguments": [1]}, '"arguments" of f in the call is a list'),
        ({"name": "f", "arguments": "{"}, '"arguments" of f in the call is not valid JSON'),
        ({"name": "f", "arguments": '{"a": 1, "a": 2}'}, "a key occurs twice"),
        ({"name": "f", "arguments": '{"a": 1e400}'}, "more than a float holds"),
        ({"name": "f", "arguments": {"a": [float("inf")]}}, "a.0 is not a finite number"),
        ({"name": "f", "arguments": {"a": 10**300}}, "a is a number of more than 300 digits"),
        ({"name": "f", "arguments": {"a": "\0"}}, "a has a NUL character"),
        ({"name": "f", "arguments": {"a": DAY}}, "is not plain JSON: a is a date or time"),
        ({"name": "f", "arguments": {"b": {"\0": 1}}}, "b.a key has a NUL character"),
        ({"name": "f", "id": "a b"}, "the id of the call is 'a b'"),
    ],
)
def test_other_calls_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        read_tool_call(given, "the call")


@pytest.mark.parametrize("number", [10**300 - 1, 1 - 10**300])
@pytest.mark.parametrize("levels", [1, 95, 96])
def test_a_call_that_a_policy_may_write_can_be_read_again(number, levels):
    """Arguments are an object: one level of 96."""
    text = '{"a": ' + "[" * (levels - 1) + str(number) + "]" * (levels - 1) + "}"
    name, arguments = read_call({"name": "f", "arguments": text}, "the call")
    saved = {"name": name, "arguments": read_json(json.dumps(arguments))}
    assert read_tool_call(saved, "the call")["function"] == saved
    turn = Turn("", (Call(name, arguments),))
    column = as_json([Played(turn, "", 0, None)])
    assert beginning_of("g", {PLAYED_TURNS: column}).turns[0].turn == turn


def test_a_call_that_could_not_be_read_again_is_refused():
    text = '{"a": ' + "[" * 96 + "]" * 96 + "}"
    for read in (read_call, read_tool_call):
        with pytest.raises(ValueError, match="is nested more than 96 levels deep"):
            read({"name": "f", "arguments": text}, "the call")


@pytest.mark.parametrize("leaf", ["", "1"])
def test_every_reader_stops_at_the_same_depth(leaf):
    for levels, is_read in ((100, True), (101, False)):
        text = "[" * levels + leaf + "]" * levels
        assert (problem_of(json.loads(text)) == "") == is_read
        if is_read:
            assert read_json(text) == json.loads(text)
        else:
            with pytest.raises(ValueError, match="more than 100 levels deep"):
                read_json(text)


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_of_a_chat_may_have_no_arguments_and_no_id(arguments):
    read = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert read_tool_call({"id": "", "name": "f", "arguments": arguments}, "the call") == read
    assert read_tool_call({"function": {"name": "f"}}, "the call") == read


def test_a_call_has_the_keys_of_its_format():
    call = {"name": "f", "parameters": {"a": "\0"}}
    assert read_call(call, "the call", "parameters") == ("f", {"a": "\0"})
    with pytest.raises(ValueError, match='expected only "name" and "arguments"'):
        read_call(call, "the call")


@pytest.mark.parametrize(
    "given, why",
    [
        (True, "true or false, expected a number"),
        ("1", "text, expected a number"),
        (float("nan"), "not finite as float32"),
        (1e39, "not finite as float32"),
        (10**400, "not finite as float32"),
    ],
)
def test_what_is_no_number_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        read_number(given)


def test_names_and_paths():
    assert read_number(3) == 3.0 and read_name("a/b", "name") == "a/b"
    assert read_path("pictures/a (1).png", "path") == "pictures/a (1).png"
    for path, why in [
        ("a\0", "NUL"),
        ("\ud800", "surrogate"),
        (7, "a number, expected text"),
        ("a/" * 3000, "more than 4096 bytes"),
        ("a" * 300, "a name of more than 255 bytes"),
    ]:
        with pytest.raises(ValueError, match=why):
            read_path(path, "path")


ENTRANCES = {
    "read_message": {
        "flows.doubts",
        "stages.turns.environment",
        "stages.prompt.rows",
        "stages.turns.trajectories",
        "stages.reward.servers.dialects.quiver",
    },
    "read_call": {"stages.turns.tool_calls"},
    "read_tool_call": {"stages.turns.trajectories"},
    "read_number": {
        "stages.turns.environment",
        "stages.reward.servers.dialects.rows",
    },
    "Number": {
        "stages.reward.override",
        "stages.reward.pool.pool",
        "stages.turns.trajectories",
    },
    "is_finite": {
        "stages.reward.pool.calls",
        "stages.reward.tables",
        "stages.turns.episode",
        "stages.turns.trajectories",
    },
    "read_path": {"stages.prompt.media"},
    "read_name": {"stages.turns.tool_schemas"},
}
"""Who reads what others gave, by the function that reads it."""


def callers(function: str) -> set[str]:
    return {
        NAMES[path].removeprefix("quiver.")
        for path in FILES
        if f"quiver.schemas.outside.{function}" in imported(path)
        or f"outside.{function}(" in path.read_text()
    }


@pytest.mark.parametrize("function", ENTRANCES)
def test_the_entrances_are_these(function):
    assert callers(function) == ENTRANCES[function]


def test_no_other_module_looks_for_a_role_that_may_not_be_there():
    """Behind the gate a message has its role, and nobody asks whether."""
    pattern = re.compile(r"""\.get\(\s*["'](role|tool_calls|tool_call_id)["']""")
    found = {NAMES[path] for path in FILES if pattern.search(path.read_text())}
    assert found == {
        "quiver.schemas.outside",
        "quiver.schemas.plain",  # the role of an input in a manifest
        "quiver.stages.turns.tool_calls",  # what a tokenizer's response template gave
        "quiver.stages.optimize.rollouts",  # the role of a model in a manifest
    }
