"""Calls of reward functions: whatever one returns or raises, a failure never becomes a number."""

import asyncio
import copy
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from stages.reward import scoring
from stages.reward.scoring import Part, Scorer, read, score

BATCH = {
    "prompts": ["p0", "p1", "p2"],
    "completions": ["a", "bb", "ccc"],
    "completion_ids": [[1], [1, 2], [1, 2, 3]],
    "finish_reason": ["stop"] * 3,
    "answer": [1, 2, 3],
}


def scorer(function, name="f", **arguments) -> Scorer:
    takes, needs = scoring._parameters(function, name)
    return Scorer(name, function, 1.0, arguments, takes, needs, "")


def parts(function, **arguments) -> list[Part]:
    return score([scorer(function, **arguments)], BATCH)["f"]


class Strange:
    def __repr__(self):
        return "strange\x1b[31m\n" + "x" * 1000


GOOD = [
    ([1, 0.5, None], [1.0, 0.5, None]),
    ((1, 2, 3), [1.0, 2.0, 3.0]),
    ([True, False, None], [1.0, 0.0, None]),
    (np.array([0.25, 1, 2]), [0.25, 1.0, 2.0]),
    (torch.tensor([0.25, 1, 2]), [0.25, 1.0, 2.0]),
    ([torch.tensor(0.25), np.float32(1), np.int64(2)], [0.25, 1.0, 2.0]),
    ([3.4e38, -3.4e38, 0.0], [3.4e38, -3.4e38, 0.0]),
]


@pytest.mark.parametrize("returned, expected", GOOD)
def test_numbers_arrays_and_tensors_are_read(returned, expected):
    assert read(returned, 3) == [Part(value) for value in expected]


BAD_ROW = [
    float("nan"),
    float("inf"),
    float("-inf"),
    3.5e38,
    10**400,
    "1.0",
    "",
    b"1",
    [1.0],
    {"score": 1},
    Strange(),
    1j,
    Decimal(1),
    Fraction(1, 2),
    torch.tensor([1.0]),
    torch.tensor(float("nan")),
    np.array([1.0, 2.0]),
    object,
]


@pytest.mark.parametrize("value", BAD_ROW, ids=lambda value: type(value).__name__)
def test_a_row_that_is_no_number_is_an_error_and_the_others_stay(value):
    found = parts(lambda completions: [1.0, value, None])
    assert found[0] == Part(1.0)
    assert found[2] == Part(None, None)
    assert found[1].value is None
    assert found[1].error.startswith("returned")
    assert len(found[1].error) <= 200
    assert found[1].error.isprintable()


BAD_WHOLE = [
    None,
    1.0,
    "abc",
    {"a": 1, "b": 2, "c": 3},
    [],
    [1.0, 2.0],
    [1.0] * 4,
    torch.tensor(1.0),
    torch.ones(2),
    np.float64(1),
    (x for x in (1.0, 2.0, 3.0)),
    range(3),
    Strange(),
]


@pytest.mark.parametrize("returned", BAD_WHOLE, ids=lambda value: type(value).__name__)
def test_what_is_no_list_of_the_right_length_is_an_error_of_every_row(returned):
    found = parts(lambda completions: returned)
    assert [part.value for part in found] == [None] * 3
    assert all(part.error.startswith("returned") for part in found)


def raise_for(row, error):
    def function(completions):
        if row in completions:
            raise error
        return [float(len(text)) for text in completions]

    return function


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("bad\x1b[31m\nrow"), "ValueError: bad\\x1b[31m\\nrow"),
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(3), "SystemExit: 3"),
        (RecursionError("deep"), "RecursionError: deep"),
        (MemoryError(), "MemoryError"),
        (AssertionError(), "AssertionError"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_only_the_rows_that_raise_carry_the_error(error, text, waits):
    sync = raise_for("bb", error)

    async def later(completions):
        await asyncio.sleep(0)
        return sync(completions)

    assert parts(later if waits else sync) == [Part(1.0), Part(None, text), Part(3.0)]


def test_long_and_unprintable_errors():
    assert len(parts(raise_for("bb", ValueError("x" * 10**7)))[1].error) == 200
    assert "Unprintable" in parts(raise_for("bb", Unprintable()))[1].error


def test_a_user_who_interrupts_is_obeyed():
    with pytest.raises(KeyboardInterrupt):
        parts(raise_for("bb", KeyboardInterrupt()))


def test_functions_get_what_they_ask_for_by_name():
    seen = {}

    def plain(completions, answer, factor=1, extra="default"):
        seen["plain"] = (completions, answer, factor, extra)
        return [factor * float(a) for a in answer]

    def everything(prompts, completions, completion_ids, **columns):
        seen["everything"] = sorted(columns)
        return [None] * len(prompts)

    found = score([scorer(plain, "plain", factor=2), scorer(everything, "everything")], BATCH)
    assert [part.value for part in found["plain"]] == [2.0, 4.0, 6.0]
    assert seen == {"plain": (["a", "bb", "ccc"], [1, 2, 3], 2, "default"), "everything": ["answer", "finish_reason"]}
    assert found["everything"] == [Part()] * 3


def test_async_functions_of_a_batch_wait_together():
    met = []

    async def first(completions):
        met.append("first in")
        while "second in" not in met:
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def second(completions):
        met.append("second in")
        while "first in" not in met:
            await asyncio.sleep(0)
        return [2.0] * len(completions)

    found = score([scorer(first, "first"), scorer(second, "second")], BATCH)
    assert found == {"first": [Part(1.0)] * 3, "second": [Part(2.0)] * 3}


def test_inside_a_running_loop_and_around_one():
    async def later(completions):
        return [1.0] * len(completions)

    def runs_its_own(completions):
        return asyncio.run(later(completions))

    async def notebook():
        return score([scorer(later)], BATCH)

    assert asyncio.run(notebook()) == {"f": [Part(1.0)] * 3}
    assert parts(runs_its_own) == [Part(1.0)] * 3


def test_callable_objects(capsys):
    class Judge:
        async def __call__(self, completions):
            print("noise")
            return [0.5] * len(completions)

    assert parts(Judge()) == [Part(0.5)] * 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "noise\n"


def test_what_a_function_changes_in_place_no_other_sees():
    def spoils(prompts, completions, completion_ids, **columns):
        prompts[0][0]["content"] = "spoiled"
        prompts[0].pop()
        completions.clear()
        completion_ids[1].append(9)
        columns["options"][0]["list"].append(9)
        columns["limits"].append(9)
        raise RuntimeError("and fails")

    seen = []

    def looks(**batch):
        seen.append(batch)
        return [1.0, 1.0]

    batch = {
        "prompts": [[{"role": "user", "content": "ask"}], [{"role": "user", "content": "ask"}]],
        "completions": ["a", "b"],
        "completion_ids": [[1], [2]],
        "finish_reason": ["stop", "stop"],
        "options": [{"list": [1]}, {"list": []}],
    }
    clean, limits = copy.deepcopy(batch), [1, 2]
    found = score([scorer(spoils, "spoils", limits=limits), scorer(looks, "looks")], batch)
    assert [part.value for part in found["spoils"]] == [None, None]
    assert seen == [clean] and limits == [1, 2]


# -- which function ---------------------------------------------------------------------------------------------------------


def test_shipped_functions_are_found_by_name_and_misspelt_ones_explained():
    assert scoring.load("numeric", "numeric", 1.0, {}).fingerprint == "quiver:1"
    with pytest.raises(ConfigError, match="did you mean numeric"):
        scoring.load("numerc", "n", 1.0, {})
    with pytest.raises(ConfigError, match="did you mean tolerance"):
        scoring.load("numeric", "n", 1.0, {"tolerence": 0.1})
    with pytest.raises(ConfigError, match="needs target, which is neither"):
        scoring.require_columns(scoring.load("length", "length", 1.0, {}), ["answer"])
    scoring.require_columns(scoring.load("length", "length", 1.0, {"target": 5}), [])


def test_positional_only_parameters_are_refused():
    with pytest.raises(ConfigError, match="positional-only"):
        scoring._parameters(lambda completions, /: [], "f")
