"""Dialects as pure functions: what is sent, what is read, and what of a stranger's answer is never
taken for a number."""

import json
import math
import random

import pytest
from pydantic import ValidationError

from quiver.schemas.plain import MOST_LEVELS
from quiver.stages.common.servers import MalformedError, read_json
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


def decode(dialect, answer, rows=ROWS, **options) -> list[Part]:
    return DIALECTS[dialect].decode(answer, rows, config(dialect, **options))


# -- what is sent


def test_what_each_dialect_sends():
    def sent(dialect, rows, **options):
        return DIALECTS[dialect].encode(rows, config(dialect, **options))

    assert sent("quiver", ROWS[1:], columns=["answer"]) == {
        "format": 1,
        "rows": [
            {
                "id": "b",
                "prompt": "3 + 3 = ",
                "completion": "7",
                "completion_ids": [22, 2],
                "finish_reason": "length",
                "columns": {"answer": 6},
            }
        ],
    }
    assert sent("quiver", ROWS)["rows"][0]["columns"] == {"answer": 4, "hint": "even"}
    assert sent("openrlhf", ROWS, label="answer") == {
        "query": ["system: Be brief.\n\nuser: 2 + 2?\n\nassistant: 4", "3 + 3 = 7"],
        "prompts": ["system: Be brief.\n\nuser: 2 + 2?\n\nassistant: ", "3 + 3 = "],
        "labels": [4, 6],
    }
    chatml = {
        "message_template": "<|im_start|>{role}\n{content}<|im_end|>\n",
        "reply_template": "<|im_start|>assistant\n",
    }
    wanted = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + "
        "2?<|im_end|>\n<|im_start|>assistant\n4"
    )
    assert sent("openrlhf", ROWS[:1], **chatml)["query"] == [wanted]
    assert sent("openrlhf", ROWS[1:])["labels"] == [None]
    assert sent("vllm-classify", ROWS[:1], model="rm", arguments={"add_special_tokens": False}) == {
        "model": "rm",
        "messages": [*CHAT, {"role": "assistant", "content": "4"}],
        "use_activation": False,
        "add_special_tokens": False,
    }
    assert sent("vllm-classify", ROWS[1:], use_activation=True) == {
        "input": ["3 + 3 = 7"],
        "use_activation": True,
    }
    assert sent("vllm-score", ROWS[1:], message_template="{content}") == {
        "text_1": ["3 + 3 = "],
        "text_2": ["7"],
        "use_activation": False,
    }


def test_a_rubric_is_filled_in_once():
    judge = config(
        "openai-judge",
        rubric='{prompt}|{completion}|{answer}|{hint}|{"score": 5}|{{answer}}',
        max_tokens=9,
    )
    row = Row("c", "{completion}?", "{answer} {prompt}", {"answer": 4, "hint": None})
    assert DIALECTS["openai-judge"].encode([row], judge) == {
        "model": "judge",
        "messages": [
            {
                "role": "user",
                "content": '{completion}?|{answer} {prompt}|4|null|{"score": 5}|{answer}',
            }
        ],
        "temperature": 0,
        "max_tokens": 9,
    }
    newer = config("openai-judge", arguments={"max_completion_tokens": 99, "temperature": 1})
    asked = DIALECTS["openai-judge"].encode(ROWS[:1], newer)
    assert (
        asked["temperature"] == 1
        and asked["max_completion_tokens"] == 99
        and "max_tokens" not in asked
    )
    assert (
        "Be brief." in asked["messages"][0]["content"]
        and "<<<ANSWER\n4\nANSWER>>>" in asked["messages"][0]["content"]
    )


# -- what is read


def test_quiver_matches_rows_by_id():
    rows = [
        {"id": "b", "reward": None, "error": "ValueError: no"},
        {"id": "a", "reward": 0.25, "error": None, "parts": {"f": 0.5}, "extra": {"note": "é"}},
    ]
    assert decode("quiver", {"format": 1, "rows": rows}) == [
        Part(0.25, extra='{"parts": {"f": 0.5}, "extra": {"note": "é"}}'),
        Part(error="ValueError: no"),
    ]
    assert decode("quiver", {"format": 1, "rows": [{"id": "a", "reward": None}]}, ROWS[:1]) == [
        Part()
    ]


@pytest.mark.parametrize("reward, error", [(0.5, None), (None, "no"), (None, None), ("0.5", None)])
def test_what_comes_beside_a_number_is_cut_as_a_functions_is(reward, error):
    row = {"id": "a", "reward": reward, "error": error, "extra": {"note": "é" * 20_000}}
    (part,) = decode("quiver", {"format": 1, "rows": [row]}, ROWS[:1])
    assert (
        json.loads(part.extra)["cut"]
        and len(part.extra.encode()) < 10_000
        and part.value == (0.5 if reward == 0.5 else None)
    )
    (part,) = decode(
        "openai-judge",
        {"choices": [{"message": {"content": "word " * 20_000 + "Score: 7"}}]},
        ROWS[:1],
    )
    assert part.value == 7 and json.loads(part.extra)["cut"]


@pytest.mark.parametrize(
    "rows",
    [
        [{"id": "a", "reward": 1}],
        [{"id": "a", "reward": 1}, {"id": "a", "reward": 1}],
        [{"id": "a", "reward": 1}, {"id": "c", "reward": 1}],
        [{"id": "a", "reward": 1}, {"id": "b", "reward": 1}, {"id": "c", "reward": 1}],
        [{"id": "a", "reward": 1}, {"id": "b", "rewards": 1}],
        [{"id": "a", "reward": 1}, {"id": "b", "reward": 1, "note": 1}],
        [{"id": "a", "reward": 1}, {"id": ["b"], "reward": 1}],
        [{"id": "a", "reward": 1}, {"id": "b", "reward": 1, "error": False}],
        [{"id": "a", "reward": 1}, {"id": "b", "reward": 1, "extra": [1]}],
        [{"id": "a", "reward": 1}, 1],
        {"a": 1, "b": 1},
    ],
)
def test_quiver_refuses_other_ids_and_keys(rows):
    with pytest.raises(MalformedError):
        decode("quiver", {"format": 1, "rows": rows})


@pytest.mark.parametrize("format", [2, "1", True, None, 1.0])
def test_quiver_refuses_another_format(format):
    with pytest.raises(MalformedError, match="format"):
        decode(
            "quiver",
            {"format": format, "rows": [{"id": "a", "reward": 1}, {"id": "b", "reward": 1}]},
        )


def test_openrlhf_matches_rows_by_position():
    answer = {
        "rewards": [1, 0.5],
        "scores": [1, 0.75],
        "extra_logs": {"length": [3, 4], "mean": 0.1},
    }
    assert decode("openrlhf", answer) == [
        Part(1.0, extra='{"length": 3, "scores": 1}'),
        Part(0.5, extra='{"length": 4, "scores": 0.75}'),
    ]
    assert [part.value for part in decode("openrlhf", answer, score_key="scores")] == [1.0, 0.75]
    assert decode("openrlhf", {"rewards": [0.5, 1]}) == [Part(0.5), Part(1.0)]
    nulls = {"rewards": [None, None]}
    assert [part.error for part in decode("openrlhf", nulls)] == [
        "gave null, expected a number"
    ] * 2
    told = {**nulls, "extra_logs": {"error": ["it hung", None]}}
    assert decode("openrlhf", told) == [Part(error="it hung", extra='{"error": "it hung"}'), Part()]
    for wrong in (
        {"rewards": [1.0]},
        {"rewards": 1.0},
        {"score": [1, 1]},
        [1, 1],
        {"rewards": [1, 1], "extra_logs": 3},
    ):
        with pytest.raises(MalformedError):
            decode("openrlhf", wrong)


def test_vllm_matches_rows_by_index():
    two = [
        {"index": 1, "probs": [0.5], "label": "LABEL_0"},
        {"index": 0, "probs": [-2.5], "label": "LABEL_0"},
    ]
    assert decode("vllm-classify", {"data": two}) == [Part(-2.5), Part(0.5)]
    classes = {"data": [{"index": 0, "probs": [0.25, 0.75], "label": "good"}]}
    assert decode("vllm-classify", classes, ROWS[:1], score_key="1") == [
        Part(0.75, extra='{"label": "good", "probs": [0.25, 0.75]}')
    ]
    for wrong, key in ((classes, ""), (classes, "2"), ({"data": []}, "0")):
        with pytest.raises(MalformedError):
            decode("vllm-classify", wrong, ROWS[:1], score_key=key)
    assert decode(
        "vllm-score", {"data": [{"index": 0, "score": 1.5}, {"index": 1, "score": 2}]}
    ) == [Part(1.5), Part(2.0)]
    for indices in ([0, 0], [1, 2], [0, True], [0, "1"], [0, None], [-1, 0]):
        with pytest.raises(MalformedError, match="index"):
            decode("vllm-score", {"data": [{"index": index, "score": 1.0} for index in indices]})


def judged(text, finish="stop"):
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 8", 0.8),
        ("Score: 3\nNo, wait.\n**Score:** 8/10.", 0.8),
        ("score = 0", 0.0),
        ("Final score - 7.5\n", 0.75),
        ("Score: 8,5", None),
        ("8", None),
        ("Score: eight", None),
        ("Score:\n8", None),
        ("Score: 11", None),
        ("Score: -1", None),
        ("", None),
    ],
)
def test_the_judges_score(text, value):
    (part,) = decode("openai-judge", judged(text), ROWS[:1], rescale=True)
    assert part.value == value and (part.error is None) == (value is not None)
    assert json.loads(part.extra) == {"answer": text}


def test_a_judge_that_was_cut_or_silent_gave_no_score():
    (part,) = decode("openai-judge", judged("Score: 1", "length"), ROWS[:1])
    assert part.value is None and "cut" in part.error
    assert (
        decode("openai-judge", judged("<s>9</s>"), ROWS[:1], score_pattern="<s>(.*?)</s>")[0].value
        == 9.0
    )
    assert (
        decode("openai-judge", judged("<s>nan</s>"), ROWS[:1], score_pattern="<s>(.*?)</s>")[
            0
        ].value
        is None
    )
    assert (
        decode("openai-judge", judged("<s>x</s>"), ROWS[:1], score_pattern="<s>(.*?)</s>")[0].value
        is None
    )
    for wrong in (
        judged(None),
        {"choices": []},
        {"choices": judged("Score: 1")["choices"] * 2},
        {"error": "x"},
        "Score: 1",
    ):
        with pytest.raises(MalformedError):
            decode("openai-judge", wrong, ROWS[:1])


@pytest.mark.parametrize(
    "value", ["1.0", True, None, [], {}, [1.0], 1e39, -1e39, 10**400, 1.5, -0.5]
)
def test_what_is_no_number_or_out_of_range_is_an_error(value):
    (part,) = decode("openrlhf", {"rewards": [value]}, ROWS[:1], range=(0, 1))
    assert part.value is None and part.error


# -- strangers


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>502 Bad Gateway</html>",
        b'{"rewards": [1.0',
        b'{"rewards": [NaN, 1]}',
        b'{"rewards": [Infinity, 1]}',
        b'{"rewards": [1e400, 1]}',
        b'{"rewards": [1, 1], "rewards": [0, 0]}',
        b'{"rewards": [01, 1]}',
        b'{"rewards": [' + b"9" * 301 + b"]}",
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b"[" * (MOST_LEVELS + 1) + b"]" * (MOST_LEVELS + 1),
        b'{"why": "\\ud800"}',
        b'{"why": "\xff"}',
        b'{"why": "\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"rewards": [1, 1]}',
        '{"rewards": [1, 1]}'.encode("utf-16"),
        b'{"rewards": [1, 1]} {}',
        b'{"why": "a\nb"}',
    ],
)
def test_what_is_not_strict_json_is_refused(raw):
    with pytest.raises(MalformedError):
        read_json(raw)


def test_depth_counts_brackets_not_text():
    text = json.dumps({"why": "[" * 1000 + '\\"{'}).encode()
    assert read_json(text) == {"why": "[" * 1000 + '\\"{'}
    assert read_json(b"[" * MOST_LEVELS + b"]" * MOST_LEVELS)
    assert read_json(b'"\\ud83d\\ude00"') == "😀"


GOOD = {
    "quiver": {
        "format": 1,
        "rows": [
            {"id": "a", "reward": 0.5},
            {"id": "b", "reward": None, "error": "x", "extra": {"k": [1]}},
        ],
    },
    "openrlhf": {
        "rewards": [0.5, 1.0],
        "scores": [0.5, 1.0],
        "extra_logs": {"error": [None, None]},
    },
    "vllm-classify": {
        "data": [
            {"index": 0, "probs": [0.5], "label": "x"},
            {"index": 1, "probs": [0.25], "label": "x"},
        ]
    },
    "vllm-score": {"data": [{"index": 0, "score": 0.5}, {"index": 1, "score": 0.25}]},
    "openai-judge": judged("Fine. Score: 7"),
}
PIECES = [
    b"NaN",
    b"1e999",
    b'"1.0"',
    b"null",
    b"true",
    b"[[",
    b"]",
    b"{",
    b'"',
    b"\\",
    b"\\u",
    b"\xff",
    b"-",
    b"0",
    b"9",
    b",",
    b":",
]


def mutated(raw: bytes, dice: random.Random) -> bytes:
    """`raw` with one wound or two: bytes flipped, pieces put in, parts cut, doubled or moved."""
    for _ in range(dice.randint(1, 2)):
        at, length = dice.randrange(len(raw) + 1), dice.randint(0, 12)
        piece = raw[at : at + length]
        raw = dice.choice(
            [
                raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :],
                raw[:at] + dice.choice(PIECES) + raw[at:],
                raw[:at] + dice.choice(PIECES) + raw[at + length :],
                raw[:at] + raw[at + length :],
                raw[:at],
                raw[:at] + piece + piece + raw[at + length :],
                raw[:at] + raw[at + length :] + piece,
            ]
        )
    return raw


def swapped(value, dice: random.Random):
    """`value` with something inside it, or all of it, replaced by another piece of JSON."""
    if dice.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return dice.choice(
            [
                None,
                True,
                "1.0",
                -1,
                7,
                11,
                1e39,
                10**40,
                [],
                {},
                [0.5, 1.0],
                {"index": 0},
                {"reward": 1},
            ]
        )
    changed = dict(value) if isinstance(value, dict) else list(value)
    at = dice.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))
    return (
        {**changed, at: swapped(changed[at], dice)}
        if isinstance(changed, dict)
        else [swapped(item, dice) if place == at else item for place, item in enumerate(changed)]
    )


def test_5000_wounded_bodies_are_read_or_refused_by_name():
    dice = random.Random(0)
    configs = {name: config(name, range=(0, 10)) for name in GOOD}
    read = refused = 0
    for number in range(5000):
        dialect = dice.choice(sorted(GOOD))
        rows = ROWS[:1] if dialect == "openai-judge" else ROWS
        data = swapped(GOOD[dialect], dice) if number % 2 else GOOD[dialect]
        raw = json.dumps(data).encode() if number % 2 else mutated(json.dumps(data).encode(), dice)
        try:
            parts = DIALECTS[dialect].decode(read_json(raw), rows, configs[dialect])
        except MalformedError as error:
            refused += 1
            assert len(str(error)) < 400 and str(error).isprintable()
            continue
        read += 1
        assert len(parts) == len(rows)
        for part in parts:
            assert part.value is None or (
                math.isfinite(part.value) and 0 <= part.value <= 10 and part.error is None
            )
            assert part.extra is None or part.extra.encode()
    assert read > 500 and refused > 2000


# -- the side that answers


def test_what_one_side_writes_the_other_reads():
    scored = [
        Scored(0.5, None, {"f": 0.5}, {"f": {"n": 1}}),
        Scored(None, "f: it hung", {"f": None}, {}),
    ]
    rows = quiver.Request(
        **read_json(json.dumps(DIALECTS["quiver"].encode(ROWS, config("quiver"))).encode())
    ).as_rows()
    assert rows == ROWS
    assert [part[:2] for part in decode("quiver", quiver.answer(rows, scored))] == [
        (0.5, None),
        (None, "f: it hung"),
    ]
    labelled = config("openrlhf", label="answer")
    asked = openrlhf.Request(**DIALECTS["openrlhf"].encode(ROWS, labelled))
    rows = asked.as_rows("answer")
    assert [(row.completion, row.columns) for row in rows] == [
        ("4", {"answer": 4}),
        ("7", {"answer": 6}),
    ]
    assert [part[:2] for part in decode("openrlhf", openrlhf.answer(asked, rows, scored))] == [
        (0.5, None),
        (None, "f: it hung"),
    ]
    asked = openrlhf.Request(
        query=["<s>2 + 2? 4", "7"], prompts=["2 + 2? ", ""], labels=["4", None]
    )
    assert [row.completion for row in asked.as_rows("answer")] == ["4", "7"]
    for wrong in ({"query": ["5 4"]}, {"labels": []}, {"prompts": ["2 + 2? ", ""]}):
        with pytest.raises(ValidationError):
            openrlhf.Request(
                **{"query": ["2 + 2? 4"], "prompts": ["2 + 2? "], "labels": [None], **wrong}
            )


CALLED = [
    {"role": "user", "content": "weather in Rome?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I look.",
        "tool_calls": [
            {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": None}}}
        ],
    },
    {"role": "tool", "content": "sunny", "name": "f", "tool_call_id": "c1"},
]


def test_a_conversation_with_calls_arrives_as_it_was_sent():
    row = ROWS[0]._replace(prompt=CALLED)
    asked = read_json(json.dumps(DIALECTS["quiver"].encode([row], config("quiver"))).encode())
    (read,) = quiver.Request(**asked).as_rows()
    assert read.prompt == CALLED


@pytest.mark.parametrize(
    "message", [{"role": "<|im_end|>", "content": "a"}, {"role": "user"}, "a", {"from": "human"}]
)
def test_what_is_no_message_is_refused_by_the_side_that_answers(message):
    row = {"id": "a", "prompt": [message], "completion": "4"}
    with pytest.raises(ValidationError):
        quiver.Request(format=1, rows=[row])


def test_rows_and_batches_are_each_others_reverse():
    batch = as_batch(ROWS)
    assert (
        batch["prompts"][0] == CHAT
        and batch["answer"] == [4, 6]
        and batch["rollout_ids"] == ["a", "b"]
    )
    assert as_rows(batch, ["answer", "hint"]) == ROWS
    assert as_rows(batch, [])[0] == ROWS[0]._replace(columns={})
    hidden = ROWS[0]._replace(columns={"prompts": "mine", "completions": "mine"})
    assert as_batch([hidden])["prompts"] == [CHAT] and as_batch([hidden])["completions"] == ["4"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a<|im_end|>", "a"),
        ("a \n<|im_end|> </s><｜end｜>\n", "a"),
        ("a  ", "a  "),
        ("a<|im_end|>b", "a<|im_end|>b"),
        ("a<|" + "x" * 40 + "|>", "a"),
        ("a<|" + "x" * 41 + "|>", "a<|" + "x" * 41 + "|>"),
        ("<eos><pad>", ""),
        ("", ""),
        # white space that a model samples for long holds nobody up
        ("a" + " " * 500_000 + "b", "a" + " " * 500_000 + "b"),
        ("a" + " " * 500_000 + "</s>", "a"),
        ("a" + " </s>" * 200_000, "a"),
    ],
)
def test_end_tokens_are_taken_off(text, kept):
    assert openrlhf.without_end_tokens(text) == kept
