"""Rewards that a person replaces: a new version that says who and why, equal to the old one
everywhere else."""

import json
from functools import partial

import pytest
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common.store.writer import ROWS_PER_SHARD
from quiver.stages.reward import override
from quiver.stages.reward.override import Config
from quiver.stages.reward.stage import Config as RewardConfig
from tests.writing import run_here

score = partial(run_here, "reward")


WHY = {"author": "ada", "reason": "right, in another unit"}
FLAKY = """
def flaky(completions):
    if any("boom" in text for text in completions):
        raise ValueError("cannot score this")
    return [float(text) for text in completions]
"""


@pytest.fixture
def paid(store, sample, tmp_path, monkeypatch):
    """Rewards 0, 1, 2, … of more rollouts than a shard holds, in groups of two; the last row could
    not be scored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FLAKY)
    rows = ROWS_PER_SHARD + 4
    texts = [
        [str(2 * group), "boom" if group == rows // 2 - 1 else str(2 * group + 1)]
        for group in range(rows // 2)
    ]
    rollouts = sample(texts, {"n": list(range(rows // 2))})
    config = RewardConfig(functions=[{"use": "mine.py:flaky"}], max_invalid=0.1, workers=1)
    return store.open(score(config, store, rollouts=rollouts.ref))


def test_the_named_rewards_are_replaced_and_nothing_else(store, paid):
    last = f"0-sum-{ROWS_PER_SHARD // 2 + 1}-1"
    config = Config(**WHY, overrides={"0-sum-1-0": -3.5, last: 0.25})
    ref = run_here("override", config, store, rewards=paid.ref)
    made = store.open(ref)
    old, new = (version.table().to_pylist() for version in (paid, made))
    expected = {"0-sum-1-0": -3.5, last: 0.25}
    assert [row | {"reward": expected.get(row["rollout_id"], row["reward"])} for row in old] == new
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 2
    manifest = made.manifest
    assert manifest.config == {**WHY, "overrides": expected}
    assert (manifest.stage, manifest.input("rewards").ref) == ("override", str(paid.ref))
    assert manifest.input("rollouts") == paid.manifest.input("rollouts")
    assert paid.manifest.status == {"scored": ROWS_PER_SHARD + 3, "not_scored": 0, "failed": 1}
    assert manifest.status == {"scored": ROWS_PER_SHARD + 4, "not_scored": 0, "failed": 0}
    values = [row["reward"] for row in new]
    assert manifest.metrics["reward_mean"] == pytest.approx(sum(values) / len(values))
    assert manifest.metrics["overridden"] == 2
    assert (len(paid.manifest.files), len(manifest.files)) == (2, 1), "a table is written at once"


def test_the_same_words_again_are_done_others_are_a_new_version(store, paid):
    first = Config(**WHY, overrides={"0-sum-0-0": 1.0, "0-sum-0-1": 2.0})
    ref = run_here("override", first, store, rewards=paid.ref)
    assert (
        run_here(
            "override",
            Config(**WHY, overrides={"0-sum-0-1": 2.0, "0-sum-0-0": 1.0}),
            store,
            rewards=paid.ref,
        )
        == ref
    )
    other = run_here(
        "override", first.model_copy(update={"author": "bob"}), store, rewards=paid.ref
    )
    assert other.version == ref.version + 1
    again = store.open(
        run_here("override", Config(**WHY, overrides={"0-sum-0-0": 5.0}), store, rewards=ref)
    )
    assert [
        row["reward"]
        for row in again.table().to_pylist()
        if row["rollout_id"].startswith("0-sum-0-")
    ] == [2.0, 5.0]


@pytest.mark.parametrize(
    "changed",
    [
        {"author": ""},
        {"author": "  "},
        {"reason": ""},
        {"overrides": {}},
        {"overrides": {"0-sum-0-0": float("nan")}},
        {"overrides": {"0-sum-0-0": float("inf")}},
        {"overrides": {"0-sum-0-0": 1e39}},
        {"overrides": {"0-sum-0-0": None}},
        {"date": "today"},
    ],
)
def test_what_is_no_override(changed):
    Config(**WHY, overrides={"0-sum-0-0": 1.0})
    with pytest.raises(ValidationError):
        Config(**{**WHY, "overrides": {"0-sum-0-0": 1.0}, **changed})


def test_unknown_rollouts_and_other_kinds_are_refused(store, paid):
    config = Config(**WHY, overrides={"0-sum-0-0": 1.0, "0-sum-9999-0": 1.0})
    with pytest.raises(
        ConfigError, match=r"override 0-sum-9999-0.*arith/rewards@1 has no such rollout"
    ):
        run_here("override", config, store, rewards=paid.ref)
    with pytest.raises(LineageError, match="is no rewards version"):
        run_here("override", config, store, rewards="arith/rollouts@1")
    assert store.numbers("arith", "rewards") == [1]


def test_a_retry_takes_over_what_was_scored_not_what_was_said(store, paid, tmp_path):
    ref = run_here("override", Config(**WHY, overrides={"0-sum-0-0": 9.0}), store, rewards=paid.ref)
    config = RewardConfig(functions=[{"use": "mine.py:flaky"}], max_invalid=0.1, workers=1)
    with pytest.raises(
        ConfigError, match=r"a person replaced rewards of arith/rewards@1"
    ) as caught:
        score(config, store, rollouts="arith/rollouts@1", retry=ref)
    assert caught.value.next.startswith("--retry arith/rewards@1")


def test_a_file_of_overrides(tmp_path):
    path = tmp_path / "said.json"
    path.write_text(json.dumps({**WHY, "overrides": {"a": 1}}))
    assert override.load(path) == Config(**WHY, overrides={"a": 1.0})
    wrong = {
        '{"author": "ada", "author": "bob"}': "a key stands twice",
        '{"author": "ada", "reason": "x", "overrides": {"a": NaN}}': "NaN is not JSON",
        '{"autor": "ada", "reason": "x", "overrides": {"a": 1}}': "did you mean author",
        "[]": "valid dictionary",
        "{": "is not JSON",
    }
    for text, told in wrong.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            override.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        override.load(tmp_path / "nowhere.json")
