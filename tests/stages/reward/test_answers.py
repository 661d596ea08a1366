"""Answers read from text, and the functions that come with Quiver: their doctests, and what is hard
to read."""

import doctest
from fractions import Fraction

import pytest

from quiver.stages.reward import functions
from quiver.stages.reward.functions import answers, plain_numbers
from tests.stages.reward import answer_table


@pytest.mark.parametrize("module", [answers, plain_numbers, functions])
def test_the_examples_in_the_docstrings(module):
    found = doctest.testmod(module)
    assert found.attempted >= 4
    assert found.failed == 0


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", None),
        ("no digits", None),
        ("7", 7),
        ("= -3", -3),
        ("(−3)", -3),
        ("10-3", 3),
        ("a 3-4", 4),
        ("+12", 12),
        ("3.50", Fraction(7, 2)),
        ("The answer is 12.", 12),
        ("1,000", 1000),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1, 2, 3", 3),
        ("12,34", Fraction(617, 50)),
        ("12,34,56", 56),
        ("(12,34)", 34),
        ("$1,250", 1250),
        ("-$5", -5),
        ("50%", 50),
        ("1/2", Fraction(1, 2)),
        ("-3/4 of it", Fraction(-3, 4)),
        ("5/0", None),
        ("1e-3", Fraction(1, 1000)),
        ("2E2", 200),
        ("x2", None),
        ("gpt4 says 9", 9),
        ("**12**", 12),
        ("\\boxed{12}", 12),
        ("7\n\n", 7),
        ("1" * 5000, None),
    ],
)
def test_the_last_number(text, expected):
    assert answers.last_number(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("\\boxed{}", ""),
        ("\\boxed{a{b}c} x", "a{b}c"),
        ("\\boxed{1} \\boxed{2", None),
        ("boxed{1}", None),
        ("\\boxed{ 5 }", "5"),
    ],
)
def test_boxed(text, expected):
    assert answers.boxed(text) == expected


def test_tagged_takes_the_last_pair():
    assert answers.tagged("<answer>1</answer><ANSWER>\n2\n</answer>") == "2"
    assert answers.tagged("<answer>1") is None
    assert (
        answers.tagged("I put it into <answer> tags: <answer>7</answer>, as <answer> wants") == "7"
    )
    assert answers.tagged("<answer>" * 100_000) is None  # read once, not once a tag


def test_numeric_reads_text_and_number_answers():
    assert functions.numeric(["is 72", "18.0", "0.1"], ["so 9*8 #### 72", 18, 0.1]) == [
        1.0,
        1.0,
        1.0,
    ]
    assert functions.numeric(["3.14", "3.2"], [3.14159, 3.14159], tolerance=0.001) == [1.0, 0.0]
    with pytest.raises(ValueError, match="no number"):
        functions.numeric(["1"], ["seven"])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na\n</think>\n\n<answer>b</answer> ", 1.0),
        ("<think>a</think>", 0.0),
        ("<answer>b</answer>", 0.0),
        ("x <think>a</think><answer>b</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a <answer>x</answer></think><answer>b</answer>", 0.0),
        ("<think>a <answer></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</think></answer>", 0.0),
        ("<think>" * 20000, 0.0),
    ],
)
def test_the_think_answer_form(text, expected):
    assert functions.format([text]) == [expected]


def test_format_by_a_pattern():
    assert functions.format(["12", "a 12"], pattern=r"\d+") == [1.0, 0.0]
    assert functions.format(["12", "a 12"], pattern=r"\d+", match="search") == [1.0, 1.0]
    assert functions.format(["A\nB"], pattern="a.b", flags="is") == [1.0]
    assert functions.format(["a\nb"], pattern="a.b", flags="") == [0.0]


def test_length_is_linear_between_target_and_target_plus_tolerance():
    ids = [[0] * n for n in (0, 8, 9, 10, 12, 100)]
    assert functions.length(ids, target=8, tolerance=4) == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert functions.length(ids, target=9) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_exact_match_extracts_and_compares_as_text():
    texts = [r"thus \boxed{3}", "<answer> Yes </answer>", "3"]
    assert functions.exact_match(texts, [3, "yes", 3]) == [0.0, 0.0, 1.0]
    assert functions.exact_match(texts, [3, "yes", 3], extract="boxed") == [1.0, 0.0, 0.0]
    assert functions.exact_match(texts, [3, "yes", None], extract="tag", ignore_case=True) == [
        0.0,
        1.0,
        None,
    ]


def scored(function, completion, answer, **arguments):
    """What a function gives for one row; BAD where it refuses the answer."""
    try:
        return function([completion], [answer], **arguments)[0]
    except ValueError as error:
        assert str(error).startswith("the answer "), error
        return answer_table.BAD


def test_answers_are_worth_what_the_table_says():
    wrong = []
    names = ("exact_match", "numeric", "math")
    for completion, answer, *rights in answer_table.ANSWERS:
        for name, right in zip(names, rights, strict=True):
            got = scored(functions.FUNCTIONS[name].function, completion, answer)
            if got != right:
                wrong.append(f"{name}({completion!r}, {answer!r}) is {got}, not {right}")
    assert len(answer_table.ANSWERS) >= 200
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("table", "function", "arguments"),
    [
        (answer_table.BOXED, functions.exact_match, {"extract": "boxed"}),
        (answer_table.CHOICES, functions.choice, {}),
    ],
)
def test_boxes_and_letters_are_worth_what_the_tables_say(table, function, arguments):
    wrong = []
    for completion, answer, right in table:
        got = scored(function, completion, answer, **arguments)
        if got != right:
            wrong.append(f"({completion!r}, {answer!r}) is {got}, not {right}")
    assert not wrong, "\n".join(wrong)
