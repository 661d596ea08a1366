"""Rewards that a person replaces: a new version that says who and why, equal to the old one
everywhere else."""

import json

import pytest

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.config import parse
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from quiver.stages.reward import override
from quiver.stages.reward.override import Config
from tests.writing import run_here

WHY = {"author": "ada", "reason": "right, in another unit"}
FLAKY = """
def flaky(completions):
    if any("boom" in text for text in completions):
        raise ValueError("cannot score this")
    return [float(text) for text in completions]
"""


LAST = ROWS_PER_SHARD // 2 + 1


@pytest.fixture
def paid(score, sample, tmp_path, monkeypatch):
    """Rewards 0, 1, 2, … of more rollouts than a shard holds, in groups of two; the last row could
    not be scored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FLAKY)
    texts = [[str(2 * group), str(2 * group + 1)] for group in range(LAST)]
    rollouts = sample([*texts, [str(2 * LAST), "boom"]], {"n": list(range(LAST + 1))})
    return score(rollouts, "mine.py:flaky", max_invalid=0.1, workers=1)


@pytest.fixture
def replace(store):
    def run(rewards, overrides: dict, **who):
        config = Config(**{**WHY, **who}, overrides=overrides)
        return store.open(run_here("override", config, store, rewards=rewards.ref))

    return run


def test_the_named_rewards_are_replaced_and_nothing_else(paid, replace, column):
    expected = {"0-sum-1-0": -3.5, f"0-sum-{LAST}-1": 0.25}
    made = replace(paid, expected)
    old, new = (version.table().to_pylist() for version in (paid, made))
    assert [row | {"reward": expected.get(row["rollout_id"], row["reward"])} for row in old] == new
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 2
    manifest = made.manifest
    assert manifest.config == {**WHY, "overrides": expected}
    assert (manifest.stage, manifest.input("rewards").ref) == ("override", str(paid.ref))
    assert manifest.input("rollouts") == paid.manifest.input("rollouts")
    assert paid.manifest.status == {"scored": len(old) - 1, "not_scored": 0, "failed": 1}
    assert manifest.status == {"scored": len(old), "not_scored": 0, "failed": 0}
    values = column(made).values()
    assert manifest.metrics["reward_mean"] == pytest.approx(sum(values) / len(values))
    assert manifest.metrics["overridden"] == 2
    assert (len(paid.manifest.files), len(manifest.files)) == (2, 1), "a table is written at once"


def test_the_same_words_again_are_done_others_are_a_new_version(paid, replace, column):
    first = replace(paid, {"0-sum-0-0": 1.0, "0-sum-0-1": 2.0})
    assert replace(paid, {"0-sum-0-1": 2.0, "0-sum-0-0": 1.0}).ref == first.ref
    other = replace(paid, {"0-sum-0-0": 1.0, "0-sum-0-1": 2.0}, author="bob")
    assert other.ref.version == first.ref.version + 1
    again = column(replace(first, {"0-sum-0-0": 5.0}))
    assert (again["0-0"], again["0-1"]) == (5.0, 2.0)


def test_what_is_no_override():
    overrides = {"0-sum-0-0": 1.0}
    parse(Config, {**WHY, "overrides": overrides}, "--override")
    for changed in (
        {"author": ""},
        {"author": "  "},
        {"reason": ""},
        {"overrides": {}},
        *({"overrides": {"a": value}} for value in (float("nan"), float("inf"), 1e39, None)),
        {"date": "today"},
    ):
        with pytest.raises(ConfigError):
            parse(Config, {**WHY, "overrides": overrides, **changed}, "--override")


def test_unknown_rollouts_and_other_kinds_are_refused(store, paid, replace):
    why = r"override 0-sum-9999-0.*arith/rewards@1 has no such rollout"
    with pytest.raises(ConfigError, match=why):
        replace(paid, {"0-sum-0-0": 1.0, "0-sum-9999-0": 1.0})
    with pytest.raises(LineageError, match="is not a version of rewards"):
        replace(store.open("arith/rollouts@1"), {"0-sum-0-0": 1.0})
    assert store.numbers("arith", "rewards") == [1]


def test_a_retry_takes_over_what_was_scored_not_what_was_said(store, paid, replace, score):
    said = replace(paid, {"0-sum-0-0": 9.0})
    rollouts = store.open("arith/rollouts@1")
    why = r"it replaces rewards of arith/rewards@1"
    with pytest.raises(ConfigError, match=why) as caught:
        score(rollouts, "mine.py:flaky", retry=said, max_invalid=0.1)
    assert caught.value.next.startswith("--retry arith/rewards@1")


def test_a_file_of_overrides(tmp_path):
    path = tmp_path / "said.json"
    path.write_text(json.dumps({**WHY, "overrides": {"a": 1}}))
    assert override.load(path) == Config(**WHY, overrides={"a": 1.0})
    wrong = {
        '{"author": "ada", "author": "bob"}': "a key occurs twice",
        '{"author": "ada", "reason": "x", "overrides": {"a": NaN}}': "NaN is not JSON",
        '{"autor": "ada", "reason": "x", "overrides": {"a": 1}}': "did you mean author",
        "[]": "a table of keys",
        "{": "is not JSON",
    }
    for text, told in wrong.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            override.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        override.load(tmp_path / "nowhere.json")
