"""Dialects as pure functions: what is sent, what is read, and what of a stranger's answer is never
taken for a number."""

import json
import math
import random

import pytest
from pydantic import ValidationError

from quiver.stages.core.servers import MalformedError, read_json
from quiver.stages.reward.scoring import Part
from quiver.stages.reward.servers.config import ServerConfig
from quiver.stages.reward.servers.dialects import DIALECTS, openrlhf, quiver
from quiver.stages.reward.servers.dialects.rows import Row, Scored, as_batch, as_rows

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
ROWS = [
    Row("a", CHAT, "4", {"answer": 4, "hint": "even"}, [19], "stop"),
    Row("b", "3 + 3 = ", "7", {"answer": 6, "hint": None}, [22, 2], "length"),
]


def config(dialect, **options) -> ServerConfig:
    if dialect == "openai-judge":
        options = {"model": "judge", "range": (0, 10), **options}
    return ServerConfig(dialect=dialect, urls=["http://127.0.0.1:1"], **options)


def encode(dialect, rows, **options):
    return DIALECTS[dialect].encode(rows, config(dialect, **options))


def decode(dialect, answer, rows=ROWS, **options) -> list[Part]:
    return DIALECTS[dialect].decode(answer, rows, config(dialect, **options))


# -- requests


def test_quiver_sends_rows_with_the_named_columns():
    (sent,) = encode("quiver", ROWS[1:], columns=["answer"])["rows"]
    assert sent == {**ROWS[1]._asdict(), "columns": {"answer": 6}}
    assert encode("quiver", ROWS)["rows"][0]["columns"] == {"answer": 4, "hint": "even"}


def test_openrlhf_sends_texts():
    assert encode("openrlhf", ROWS, label="answer") == {
        "query": ["system: Be brief.\n\nuser: 2 + 2?\n\nassistant: 4", "3 + 3 = 7"],
        "prompts": ["system: Be brief.\n\nuser: 2 + 2?\n\nassistant: ", "3 + 3 = "],
        "labels": [4, 6],
    }
    templates = {"message_template": "<{role}>{content}", "reply_template": "<assistant>"}
    sent = encode("openrlhf", ROWS[:1], **templates)
    assert sent["query"] == ["<system>Be brief.<user>2 + 2?<assistant>4"]
    assert sent["labels"] == [None]


def test_calls_of_tools_are_part_of_the_text():
    def chat(city, said=""):
        call = {"id": "1", "type": "function"}
        call["function"] = {"name": "book", "arguments": {"city": city}}
        asked = [{"role": "user", "content": "Go."}]
        told = {"role": "tool", "content": "done", "tool_call_id": "1"}
        return [*asked, {"role": "assistant", "content": said, "tool_calls": [call]}, told]

    def text(prompt, dialect="vllm-score", **options):
        return encode(dialect, [Row("a", prompt, "Yes", {})], **options)

    called = '[{"name": "book", "arguments": {"city": "Zürich"}}]'
    expected = f"user: Go.\n\nassistant: {called}\n\ntool: done\n\n"
    assert text(chat("Zürich"))["text_1"] == [expected]
    assert text(chat("Zürich"), "openrlhf")["prompts"] == [f"{expected}assistant: "]
    asked = text(chat("Zürich"), "openai-judge", rubric="{prompt}")["messages"][0]["content"]
    assert asked == expected.strip()
    said = text(chat("{role}", "Wait."), message_template="<{content}>")["text_1"]
    assert said == ['<Go.><Wait.\n[{"name": "book", "arguments": {"city": "{role}"}}]><done>']


def test_vllm_sends_messages_or_texts():
    arguments = {"add_special_tokens": False}
    assert encode("vllm-classify", ROWS[:1], model="rm", arguments=arguments) == {
        "model": "rm",
        "messages": [*CHAT, {"role": "assistant", "content": "4"}],
        "use_activation": False,
        "add_special_tokens": False,
    }
    sent = encode("vllm-classify", ROWS[1:], use_activation=True)
    assert sent == {"input": ["3 + 3 = 7"], "use_activation": True}
    sent = encode("vllm-score", ROWS[1:], message_template="{content}")
    assert sent == {"text_1": ["3 + 3 = "], "text_2": ["7"], "use_activation": False}


def test_a_rubric_is_filled_in_once():
    row = Row("c", "{completion}?", "{answer} {prompt}", {"answer": 4, "hint": None})
    rubric = '{prompt}|{completion}|{answer}|{hint}|{"score": 5}|{{answer}}'
    content = '{completion}?|{answer} {prompt}|4|null|{"score": 5}|{answer}'
    assert encode("openai-judge", [row], rubric=rubric, max_tokens=9) == {
        "model": "judge",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 9,
    }
    arguments = {"max_completion_tokens": 99, "temperature": 1}
    sent = encode("openai-judge", ROWS[:1], arguments=arguments)
    assert sent.items() >= arguments.items() and "max_tokens" not in sent
    content = sent["messages"][0]["content"]
    assert "Be brief." in content and "<<<ANSWER\n4\nANSWER>>>" in content


# -- answers


def test_quiver_matches_rows_by_id():
    rows = [
        {"id": "b", "reward": None, "error": "ValueError: no"},
        {"id": "a", "reward": 0.25, "error": None, "parts": {"f": 0.5}, "extra": {"note": "é"}},
    ]
    assert decode("quiver", {"format": 1, "rows": rows}) == [
        Part(0.25, extra='{"parts": {"f": 0.5}, "extra": {"note": "é"}}'),
        Part(error="ValueError: no"),
    ]
    bare = [{"id": "a", "reward": None}]
    assert decode("quiver", {"format": 1, "rows": bare}, ROWS[:1]) == [Part()]


def test_long_extras_are_cut():
    row = {"id": "a", "reward": 0.5, "extra": {"note": "é" * 20_000}}
    (part,) = decode("quiver", {"format": 1, "rows": [row]}, ROWS[:1])
    assert json.loads(part.extra)["cut"] and len(part.extra.encode()) < 10_000
    assert part.value == 0.5


A = {"id": "a", "reward": 1}


@pytest.mark.parametrize(
    ("format", "rows"),
    [
        *((format, [A, {"id": "b", "reward": 1}]) for format in (2, True)),
        (1, [A]),
        (1, [A, A]),
        (1, [A, {"id": "c", "reward": 1}]),
        (1, [A, {"id": "b", "rewards": 1}]),
        (1, [A, {"id": ["b"], "reward": 1}]),
        (1, [A, {"id": "b", "reward": 1, "error": False}]),
        (1, {"a": 1, "b": 1}),
    ],
)
def test_quiver_refuses_another_format_or_other_ids_and_keys(format, rows):
    with pytest.raises(MalformedError):
        decode("quiver", {"format": format, "rows": rows})


def test_openrlhf_matches_rows_by_position():
    logs = {"length": [3, 4], "mean": 0.1}
    answer = {"rewards": [1, 0.5], "scores": [1, 0.75], "extra_logs": logs}
    assert decode("openrlhf", answer) == [
        Part(1.0, extra='{"length": 3, "scores": 1}'),
        Part(0.5, extra='{"length": 4, "scores": 0.75}'),
    ]
    assert [part.value for part in decode("openrlhf", answer, score_key="scores")] == [1.0, 0.75]
    nulls = {"rewards": [None, None]}
    assert decode("openrlhf", nulls) == [Part(error="gave null, expected a number")] * 2
    with_error = {**nulls, "extra_logs": {"error": ["it hung", None]}}
    parts = decode("openrlhf", with_error)
    assert parts == [Part(error="it hung", extra='{"error": "it hung"}'), Part()]


def test_vllm_matches_rows_by_index():
    two = [{"index": 1, "probs": [0.5]}, {"index": 0, "probs": [-2.5]}]
    assert decode("vllm-classify", {"data": two}) == [Part(-2.5), Part(0.5)]
    parts = decode("vllm-classify", CLASSES, ROWS[:1], score_key="1")
    assert parts == [Part(0.75, extra='{"label": "good", "probs": [0.25, 0.75]}')]
    scores = {"data": [{"index": 0, "score": 1.5}, {"index": 1, "score": 2}]}
    assert decode("vllm-score", scores) == [Part(1.5), Part(2.0)]


CLASSES = {"data": [{"index": 0, "probs": [0.25, 0.75], "label": "good"}]}


def judged(text, finish="stop"):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("dialect", "answer", "options"),
    [
        ("openrlhf", {"rewards": []}, {}),
        ("openrlhf", {"score": [1]}, {}),
        ("openrlhf", {"rewards": [1], "extra_logs": 3}, {}),
        ("vllm-classify", CLASSES, {}),
        ("vllm-classify", CLASSES, {"score_key": "2"}),
        ("vllm-classify", {"data": []}, {"score_key": "0"}),
        *(("vllm-score", {"data": [{"index": at, "score": 1.0}]}, {}) for at in (1, True)),
        ("vllm-score", {"data": [{"index": 0, "score": 1.0}] * 2}, {}),
        ("openai-judge", judged(None), {}),
        ("openai-judge", {"choices": []}, {}),
        ("openai-judge", {"choices": judged("Score: 1")["choices"] * 2}, {}),
        ("openai-judge", "Score: 1", {}),
    ],
)
def test_an_answer_that_breaks_its_dialect_is_refused(dialect, answer, options):
    with pytest.raises(MalformedError):
        decode(dialect, answer, ROWS[:1], **options)


@pytest.mark.parametrize(
    ("text", "value", "options"),
    [
        ("Score: 8", 0.8, {}),
        ("Score: 3\nNo, wait.\n**Score:** 8/10.", 0.8, {}),
        ("score = 0", 0.0, {}),
        ("Score (0-10): 8", 0.8, {}),
        ("**Score** (1-10): 8", None, {}),
        ("Score (1–10): 8/10", 0.8, {}),
        ("Score (7)", 0.7, {}),
        ("Score: 8-9", None, {}),
        ("Score: 8 – 9", None, {}),
        ("Score: 8 - good", 0.8, {}),
        ("Score: 8,5", None, {}),
        ("8", None, {}),
        ("Score:\n8", None, {}),
        ("Score: 11", None, {}),
        ("Score: -1", None, {}),
        ("", None, {}),
        ("<s>9</s>", 0.9, {"score_pattern": "<s>(.*?)</s>"}),
        ("<s>nan</s>", None, {"score_pattern": "<s>(.*?)</s>"}),
    ],
)
def test_the_judges_score(text, value, options):
    (part,) = decode("openai-judge", judged(text), ROWS[:1], rescale=True, **options)
    assert part.value == value and (part.error is None) == (value is not None)
    assert json.loads(part.extra) == {"answer": text}


def test_a_judge_that_was_cut_gave_no_score():
    (part,) = decode("openai-judge", judged("Score: 1", "length"), ROWS[:1])
    assert part.value is None and "cut" in part.error


@pytest.mark.parametrize("number", ["1.0", True, None, [], {}, 1e39, -1e39, 10**400, 1.5, -0.5])
def test_what_is_no_number_or_out_of_range_is_an_error(number):
    (part,) = decode("openrlhf", {"rewards": [number]}, ROWS[:1], range=(0, 1))
    assert part.value is None and part.error


# -- answers of strangers


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"rewards": [1.0',
        b'{"rewards": [NaN, 1]}',
        b'{"rewards": [1e400, 1]}',
        b'{"rewards": [1, 1], "rewards": [0, 0]}',
        b"[" * 100_000,
        b'{"why": "\\ud800"}',
        b'{"why": "\xff"}',
        b'\xef\xbb\xbf{"rewards": [1, 1]}',
        '{"rewards": [1, 1]}'.encode("utf-16"),
        b'{"rewards": [1, 1]} {}',
    ],
)
def test_json_that_is_not_strict_is_refused(raw):
    with pytest.raises(MalformedError):
        read_json(raw)


def test_escapes_of_whole_characters_are_read():
    assert read_json(b'"\\ud83d\\ude00"') == "😀"


GOOD = {
    "quiver": {
        "format": 1,
        "rows": [A, {"id": "b", "reward": None, "error": "x", "extra": {"k": [1]}}],
    },
    "openrlhf": {
        "rewards": [0.5, 1.0],
        "scores": [0.5, 1.0],
        "extra_logs": {"error": [None, None]},
    },
    "vllm-classify": {"data": [{"index": at, "probs": [0.5], "label": "x"} for at in (0, 1)]},
    "vllm-score": {"data": [{"index": 0, "score": 0.5}, {"index": 1, "score": 0.25}]},
    "openai-judge": judged("Fine. Score: 7"),
}
PIECES = [*rb'NaN 1e999 "1.0" null true [[ ] { " \ \u - 0 9 , :'.split(), b"\xff"]
SWAPS = [None, True, "1.0", -1, 7, 11, 1e39, 10**40, [], {}, [0.5], {"index": 0}, {"reward": 1}]


def mutated(raw: bytes, dice: random.Random) -> bytes:
    """`raw` with one wound or two: bytes flipped, pieces put in, cut out, doubled or moved."""
    for _ in range(dice.randint(1, 2)):
        at, length = dice.randrange(len(raw) + 1), dice.randint(0, 12)
        before, piece, after = raw[:at], raw[at : at + length], raw[at + length :]
        raw = dice.choice(
            [
                before + bytes([dice.randrange(256)]) + raw[at + 1 :],
                before + dice.choice(PIECES) + raw[at:],
                before + dice.choice(PIECES) + after,
                before + after,
                before,
                before + piece + piece + after,
                before + after + piece,
            ]
        )
    return raw


def swapped(document, dice: random.Random):
    """`document`, or something inside it, replaced by another piece of JSON."""
    if dice.random() < 0.3 or not isinstance(document, dict | list) or not document:
        return dice.choice(SWAPS)
    changed = document.copy()
    at = dice.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))
    changed[at] = swapped(changed[at], dice)
    return changed


def test_5000_wounded_bodies_are_read_or_refused_by_name():
    dice = random.Random(0)
    num_read = num_refused = 0
    for number in range(5000):
        dialect = dice.choice(sorted(GOOD))
        rows = ROWS[:1] if dialect == "openai-judge" else ROWS
        if number % 2:
            raw = json.dumps(swapped(GOOD[dialect], dice)).encode()
        else:
            raw = mutated(json.dumps(GOOD[dialect]).encode(), dice)
        try:
            parts = decode(dialect, read_json(raw), rows, range=(0, 10))
        except MalformedError as error:
            num_refused += 1
            assert len(str(error)) < 400 and str(error).isprintable()
            continue
        num_read += 1
        assert len(parts) == len(rows)
        for part in parts:
            assert part.value is None or (
                math.isfinite(part.value) and 0 <= part.value <= 10 and part.error is None
            )
            assert part.extra is None or part.extra.encode()
    assert num_read > 500 and num_refused > 2000


# -- the side that answers


def test_each_side_reads_what_the_other_writes():
    scored = [
        Scored(0.5, None, {"f": 0.5}, {"f": {"n": 1}}),
        Scored(None, "f: it hung", {"f": None}, {}),
    ]
    expected = [(0.5, None), (None, "f: it hung")]
    rows = quiver.Request(**read_json(json.dumps(encode("quiver", ROWS)).encode())).as_rows()
    assert rows == ROWS
    assert [part[:2] for part in decode("quiver", quiver.answer(rows, scored))] == expected
    asked = openrlhf.Request(**encode("openrlhf", ROWS, label="answer"))
    rows = asked.as_rows("answer")
    assert [row.completion for row in rows] == ["4", "7"]
    assert [row.columns for row in rows] == [{"answer": 4}, {"answer": 6}]
    assert [
        part[:2] for part in decode("openrlhf", openrlhf.answer(asked, rows, scored))
    ] == expected


def test_openrlhf_finds_prompts_in_queries():
    asked = openrlhf.Request(query=["<s>2 + 2? 4"], prompts=["2 + 2? "], labels=["4"])
    assert [row.completion for row in asked.as_rows("answer")] == ["4"]
    for wrong in ({"query": ["5 4"]}, {"labels": []}, {"prompts": ["2 + 2? ", ""]}):
        with pytest.raises(ValidationError):
            openrlhf.Request(**{**asked.model_dump(), **wrong})


def test_a_conversation_with_calls_arrives_as_it_was_sent():
    function = {"name": "f", "arguments": {"a": None}}
    calls = [{"type": "function", "id": "c1", "function": function}]
    row = ROWS[0]._replace(
        prompt=[
            {"role": "user", "content": "weather in Rome?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I look.",
                "tool_calls": calls,
            },
            {"role": "tool", "content": "sunny", "name": "f", "tool_call_id": "c1"},
        ]
    )
    asked = read_json(json.dumps(encode("quiver", [row])).encode())
    assert quiver.Request(**asked).as_rows() == [row]


def test_what_is_no_message_is_refused_by_the_side_that_answers():
    row = {"id": "a", "prompt": [{"role": "<|im_end|>", "content": "a"}], "completion": "4"}
    with pytest.raises(ValidationError):
        quiver.Request(format=1, rows=[row])


def test_rows_and_batches_are_each_others_reverse():
    batch = as_batch(ROWS)
    assert batch["prompts"][0] == CHAT and batch["answer"] == [4, 6]
    assert as_rows(batch, ["answer", "hint"]) == ROWS
    hidden = ROWS[0]._replace(columns={"prompts": "mine", "completions": "mine"})
    assert as_batch([hidden])["prompts"] == [CHAT] and as_batch([hidden])["completions"] == ["4"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a<|im_end|>", "a"),
        ("a \n<|im_end|> </s><｜end｜>\n", "a"),
        ("a  ", "a  "),
        ("a<|im_end|>b", "a<|im_end|>b"),
        ("a<|" + "x" * 40 + "|>", "a"),
        ("a<|" + "x" * 41 + "|>", "a<|" + "x" * 41 + "|>"),
        ("<eos><pad>", ""),
        # the time is linear in white space that a model samples for long
        ("a" + " " * 500_000 + "b", "a" + " " * 500_000 + "b"),
        ("a" + " " * 500_000 + "</s>", "a"),
        ("a" + " </s>" * 200_000, "a"),
    ],
)
def test_end_tokens_are_taken_off(text, answer):
    assert openrlhf.without_end_tokens(text) == answer
