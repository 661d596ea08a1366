"""Calls of reward functions: whatever one returns or raises, a failure never becomes a number."""

import asyncio
import copy
import json
import os
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.user_process import Ended
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool import calls, jobs
from quiver.stages.reward.pool.calls import Function, call, call_together, describe, read
from quiver.stages.reward.scoring import EXTRA_BYTES, Part, require_columns

COLUMNS = {
    "prompts": ["p0", "p1", "p2"],
    "completions": ["a", "bb", "ccc"],
    "completion_ids": [[1], [1, 2], [1, 2, 3]],
    "finish_reason": ["stop"] * 3,
    "answer": [1, 2, 3],
}


def parts(function, columns=COLUMNS, extra=False, seconds=5.0, **arguments) -> list[Part]:
    """What a function, async or not, is found to say of three rows."""
    about = describe(function, "f", arguments)
    loaded = Function(function, arguments, about, extra)
    asked = {name: columns[name] for name in columns if about.takes is None or name in about.takes}
    rows = len(columns["completions"])
    if not about.is_async:
        return call(loaded, lambda: copy.deepcopy(asked), rows)[0]
    told: dict[int, Part] = {}
    together = call_together(loaded, copy.deepcopy(asked), rows, 2, seconds, told.__setitem__)
    asyncio.run(asyncio.wait_for(together, 10))
    return [told[row] for row in range(rows)]


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


def test_numbers_arrays_and_tensors_are_read():
    for returned, expected in GOOD:
        assert read(returned, 3) == ([Part(value) for value in expected], 3)


BAD_ROW = [
    float("nan"),
    float("-inf"),
    3.5e38,
    10**400,
    "1.0",
    b"1",
    [1.0],
    {"score": 1},
    Strange(),
    Decimal(1),
    torch.tensor([1.0]),
    torch.tensor(float("nan")),
    object,
]


def test_a_row_that_is_no_number_is_an_error_and_the_others_stay():
    for value in BAD_ROW:
        first, bad, last = parts(lambda completions, value=value: [1.0, value, None])
        assert (first, last, bad.value) == (Part(1.0), Part(), None)
        assert bad.error.startswith("returned")
        assert len(bad.error) <= 200 and bad.error.isprintable()


BAD_WHOLE = [
    None,
    1.0,
    "abc",
    {"a": 1, "b": 2, "c": 3},
    [],
    [1.0] * 4,
    torch.tensor(1.0),
    torch.ones(2),
    (x for x in (1.0, 2.0, 3.0)),
    range(3),
    Strange(),
]


def test_what_is_no_list_of_the_right_length_is_an_error_of_every_row():
    for returned in BAD_WHOLE:
        for part in parts(lambda completions, returned=returned: returned):
            assert part.value is None and part.error.startswith("returned")
    assert parts(lambda completions: [0.5]) == [Part(error="returned 1 values for 3 rows")] * 3
    drops = parts(lambda completions: [float(len(text)) for text in completions if text != "bb"])
    assert drops == [Part(1.0), Part(error="returned 0 values for 1 rows"), Part(3.0)]


def raise_for(row, error):
    def function(completions):
        if row in completions:
            raise error
        return [float(len(text)) for text in completions]

    return function


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_only_the_rows_that_raise_carry_the_error():
    for error, text in (
        (ValueError("bad\x1b[31m\nrow"), "ValueError: bad\\x1b[31m\\nrow"),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError(), "MemoryError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
    ):
        sync = raise_for("bb", error)

        async def later(completions, sync=sync):
            await asyncio.sleep(0)
            return sync(completions)

        for function in (sync, later):
            assert parts(function) == [Part(1.0), Part(None, text), Part(3.0)]
    assert len(parts(raise_for("bb", ValueError("x" * 10**7)))[1].error) == 200
    assert "Unprintable: <exception" in parts(raise_for("bb", Unprintable()))[1].error


def test_functions_get_what_they_ask_for_by_name():
    seen = {}

    def plain(completions, answer, factor=1, extra="default"):
        seen["plain"] = (completions, answer, factor, extra)
        return [factor * float(a) for a in answer]

    def everything(prompts, completions, completion_ids, **columns):
        seen["everything"] = sorted(columns)
        return [None] * len(prompts)

    assert [part.value for part in parts(plain, factor=2)] == [2.0, 4.0, 6.0]
    assert parts(everything) == [Part()] * 3
    assert seen == {
        "plain": (["a", "bb", "ccc"], [1, 2, 3], 2, "default"),
        "everything": ["answer", "finish_reason"],
    }


def test_rows_of_an_async_function_wait_together_but_not_more_than_allowed():
    inside, most, met = 0, 0, asyncio.Event()

    async def meets(completions):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 2:
            met.set()
        await met.wait()  # for ever, if rows were called in turn
        inside -= 1
        return [float(len(text)) for text in completions]

    assert [part.value for part in parts(meets)] == [1.0, 2.0, 3.0]
    assert most == 2


def test_a_row_of_an_async_function_that_takes_too_long_costs_itself():
    async def slow(completions):
        try:
            await asyncio.sleep(60 if completions == ["bb"] else 0)
        except asyncio.CancelledError:
            await asyncio.sleep(60)  # refuses
        return [1.0]

    late = Part(error="TimeoutError: no answer within 0.05 s")
    assert parts(slow, seconds=0.05) == [Part(1.0), late, Part(1.0)]


def test_rows_that_were_answered_before_the_process_ended_are_not_called_again():
    config = FunctionConfig(use="exact_match")
    job = jobs.Job(jobs.Function(config, 8, lambda *_: None), {}, ["r0", "r1", "r2"])
    job.function.about = describe(lambda completions: completions, "f", {})
    rows = range(3)
    job.put(1, Part(1.0))
    job.spoiled(rows, Ended("ended by SIGKILL"))
    assert [job.take((0, 0.0), 1) for _ in range(2)] == [range(1), range(2, 3)]
    assert job.num_missing == 2


def test_functions_with_a_loop_of_their_own_and_callable_objects():
    class Judge:
        async def __call__(self, completions):
            return [0.5] * len(completions)

    assert parts(Judge()) == [Part(0.5)] * 3
    assert parts(lambda completions: asyncio.run(Judge()(completions))) == [Part(0.5)] * 3


def test_what_a_function_changes_in_place_its_next_call_does_not_see():
    seen = []

    def spoils(prompts, completions, limits):
        seen.append(copy.deepcopy((prompts, completions, limits)))
        prompts[0][0]["content"] = "spoiled"
        completions.clear()
        limits.append(9)
        raise RuntimeError("and fails")

    asks = [[{"role": "user", "content": text}] for text in ("first", "second")]
    found = parts(spoils, {"prompts": asks, "completions": ["a", "b"]}, limits=[1, 2])
    assert [part.error for part in found] == ["RuntimeError: and fails"] * 2
    assert seen[1:] == [([asks[0]], ["a"], [1, 2]), ([asks[1]], ["b"], [1, 2])]


def test_surroundings_are_put_back(tmp_path, monkeypatch):
    def moves(completions):
        import os
        import sys

        os.chdir("/")
        os.environ.clear()
        os.environ["CHANGED"] = "1"
        sys.stdout = None
        return [1.0] * len(completions)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEPT", "1")
    before = (os.getcwd(), dict(os.environ), sys.stdout)
    assert parts(moves) == [Part(1.0)] * 3
    assert (os.getcwd(), dict(os.environ), sys.stdout) == before


# -- extra


def test_what_comes_beside_the_number_is_kept_where_asked():
    def judge(completions):
        return [
            {"reward": 1, "why": "gut ✓", "n": np.int64(3), "nan": float("nan")},
            {"reward": None, "why": "skip"},
            0.5,
        ]

    first, second, third = parts(judge, extra=True)
    assert (first.value, json.loads(first.extra)) == (1.0, {"why": "gut ✓", "n": 3, "nan": "nan"})
    assert (second, third) == (Part(extra='{"why": "skip"}'), Part(0.5))
    assert {part.error for part in parts(judge)[:2]} == {
        "returned dict, expected a float or None; extra = true lets it return mappings"
    }


CIRCLE: dict = {"reward": 1.0}
CIRCLE["self"] = CIRCLE


def test_extra_is_json_of_bounded_size_beside_a_number():
    mapping = "returned a mapping under the key reward, expected a float or None"
    nan = "returned nan, which is not finite as float32"
    for value, expected in (
        ({"why": "no number"}, Part(error="returned dict without a key reward")),
        ({"reward": {"reward": 1}}, Part(error=mapping)),
        ({"reward": float("nan")}, Part(error=nan, extra="{}")),
        ({"reward": 1, "of": {"b", "a", "c"}}, Part(1.0, extra='{"of": ["a", "b", "c"]}')),
    ):
        assert read([value], 1, extra=True)[0] == [expected]
    for beside in (
        {"x": "y" * 10**6},
        {"x": ["\x00é\ud800"] * 5000},
        {"x": object()},
        CIRCLE,
    ):
        ((part,), _) = read([{"reward": 1.0, **beside}], 1, extra=True)
        assert part.value == 1.0 and len(part.extra.encode()) <= EXTRA_BYTES
        assert isinstance(json.loads(part.extra), dict)


# -- which function


def test_shipped_functions_are_found_by_name_and_misspelt_ones_explained():
    assert calls.load("numeric", "numeric", {}).about.fingerprint == "quiver:5"
    with pytest.raises(ConfigError, match="did you mean numeric"):
        calls.load("numerc", "n", {})
    with pytest.raises(ConfigError, match="did you mean tolerance"):
        calls.load("numeric", "n", {"tolerence": 0.1})
    with pytest.raises(ConfigError, match="needs target, which is neither"):
        require_columns("length", calls.load("length", "length", {}).about.needs, ["answer"])
    require_columns("length", calls.load("length", "length", {"target": 5}).about.needs, [])


def test_positional_only_parameters_are_refused():
    with pytest.raises(ConfigError, match="positional-only"):
        describe(lambda completions, /: [], "f", {})
