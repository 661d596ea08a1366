"""A retry scores again only the rows without a reward, and takes the others over as they are; what
is kept beside a number."""

import json
from functools import partial
from pathlib import Path

import pyarrow.compute as pc
import pytest

from quiver.schemas.errors import ConfigError, LineageError, RewardError
from quiver.stages.common.store.writer import ROWS_PER_SHARD
from quiver.stages.reward.stage import Config
from tests.writing import run_here

run = partial(run_here, "reward")


MINE = """
import json, pathlib

def flaky(completions):
    # Fails for odd numbers until the file `repaired` is there; notes what it was called for.
    with open("calls.jsonl", "a") as log:
        log.write(json.dumps(completions) + "\\n")
    repaired = pathlib.Path("repaired").exists()
    values = [int(text.split()[-1]) for text in completions]
    if not repaired and any(value % 2 for value in values):
        raise ConnectionError("server is gone")
    return [value + (0.5 if repaired else 0.0) for value in values]

def skips(completions):
    return [None] * len(completions)

def judge(completions):
    return [{"reward": None if "skip" in text else 1.0, "why": text} for text in completions]
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def config(*uses, **options) -> Config:
    return Config(
        functions=[{"use": use} if isinstance(use, str) else use for use in uses], **options
    )


def calls(folder: Path) -> list[str]:
    """Completions that `flaky` was called for since the last time, each once."""
    path = folder / "calls.jsonl"
    found = (
        sorted({text for line in path.read_text().splitlines() for text in json.loads(line)})
        if path.exists()
        else []
    )
    path.unlink(missing_ok=True)
    return found


def numbers(rows: int) -> list[list[str]]:
    return [[f"it is {2 * row}", f"it is {2 * row + 1}"] for row in range(rows // 2)]


def test_only_rows_without_a_reward_are_scored_again(store, sample, mine):
    rows = 2 * ROWS_PER_SHARD + 10
    rollouts = sample(numbers(rows), {"n": list(range(rows // 2))})
    chosen = config("mine.py:flaky", overlong={"max_tokens": 9, "cache": 2}, max_invalid=0.6)
    first = store.open(run(chosen, store, rollouts=rollouts.ref))
    assert first.manifest.status == {"scored": rows // 2, "not_scored": 0, "failed": rows // 2}
    assert len(calls(mine)) == rows
    (mine / "repaired").touch()
    second = store.open(run(chosen, store, rollouts=rollouts.ref, retry=first.ref))
    assert second.ref.version == first.ref.version + 1
    assert {int(text.split()[-1]) % 2 for text in calls(mine)} == {1}
    kept = pc.is_valid(first.table()["reward"])
    assert second.table().filter(kept).equals(first.table().filter(kept))
    again = {row["rollout_id"]: row for row in second.table().filter(pc.invert(kept)).to_pylist()}
    texts = dict(
        zip(
            *(rollouts.table()[name].to_pylist() for name in ("rollout_id", "completion_text")),
            strict=True,
        )
    )
    assert {row["reward"] - int(texts[name].split()[-1]) for name, row in again.items()} == {0.5}
    assert second.table()["rollout_id"].equals(rollouts.table()["rollout_id"])
    manifest = second.manifest
    assert manifest.status == {"scored": rows, "not_scored": 0, "failed": 0}
    assert (manifest.metrics["retried"], manifest.metrics["recovered"]) == (rows // 2, rows // 2)
    assert {entry.role: entry.ref for entry in manifest.inputs}["retry"] == str(first.ref)
    assert run(chosen, store, rollouts=rollouts.ref, retry=first.ref) == second.ref  # done already
    assert (
        run(chosen, store, rollouts=rollouts.ref, retry=second.ref) == second.ref
    )  # nothing to do
    assert calls(mine) == []


def test_a_retry_that_fails_again_is_taken_up_where_it_stopped(store, sample, mine):
    """Rollouts stand in reverse order of their prompts: the odd one is in the last shard."""
    texts = [["it is 1"]] + [["it is 2"] for _ in range(ROWS_PER_SHARD)]
    rollouts = sample(texts, {"n": list(range(len(texts)))})
    half = store.open(run(config("mine.py:skips"), store, rollouts=rollouts.ref))
    named = {"use": "mine.py:flaky", "name": "skips"}
    with pytest.raises(
        RewardError,
        match=r"1 of 257 rows.*0-sum-0-0 of prompts, group sum-0: ConnectionError: server is gone",
    ) as caught:
        run(config(named), store, rollouts=rollouts.ref, retry=half.ref)
    assert "1 finished shards are kept" in caught.value.state
    calls(mine)
    (mine / "repaired").touch()
    run(config(named), store, rollouts=rollouts.ref, retry=half.ref)
    assert calls(mine) == ["it is 1"]


def test_what_can_not_be_taken_over_is_refused(store, sample):
    rollouts, others = (sample(numbers(4), {"answer": [1, 2]}) for _ in range(2))
    chosen = config("mine.py:flaky", "mine.py:skips", max_invalid=1)
    first = run(chosen, store, rollouts=rollouts.ref)
    renamed = sample([["it is 4"]], {"answer": [1]})
    with pytest.raises(
        LineageError, match=r"was made of arith/rollouts@1, not of arith/rollouts@3"
    ):
        run(chosen, store, rollouts=renamed.ref, retry=first)
    assert others.manifest.content_hash == rollouts.manifest.content_hash  # by content, not by name
    assert run(chosen, store, rollouts=others.ref, retry=first).version == first.version + 1
    with pytest.raises(
        ConfigError, match=r"weight of numeric was None there and is 1.0 in the recipe"
    ):
        run(config("mine.py:flaky", "numeric"), store, rollouts=rollouts.ref, retry=first)
    with pytest.raises(
        ConfigError, match=r"weight of flaky was 1.0 there and is 2.0 in the recipe"
    ):
        run(
            config({"use": "mine.py:flaky", "weight": 2}, "mine.py:skips"),
            store,
            rollouts=rollouts.ref,
            retry=first,
        )
    with pytest.raises(ConfigError, match=r"reward_clip was None there"):
        run(
            config("mine.py:flaky", "mine.py:skips", reward_clip=(0, 1)),
            store,
            rollouts=rollouts.ref,
            retry=first,
        )


def test_another_overlong_penalty_is_refused(store, sample):
    """Half of a group's rewards would bear the one, half the other."""
    rollouts = sample(numbers(4), {"answer": [1, 2]})
    before, after = (
        config("mine.py:flaky", max_invalid=1, overlong={"max_tokens": 9, "cache": cache})
        for cache in (2, 8)
    )
    first = run(before, store, rollouts=rollouts.ref)
    with pytest.raises(ConfigError, match=r"overlong was .* and is .* in the recipe"):
        run(after, store, rollouts=rollouts.ref, retry=first)


def test_parts_in_another_order_are_taken_over_by_name(store, sample, mine):
    rollouts = sample(numbers(4), {"n": [1, 2]})
    first = run(
        config("mine.py:skips", "mine.py:flaky", max_invalid=0.5), store, rollouts=rollouts.ref
    )
    (mine / "repaired").touch()
    second = store.open(
        run(config("mine.py:flaky", "mine.py:skips"), store, rollouts=rollouts.ref, retry=first)
    ).table()
    parts = dict(zip(second["rollout_id"].to_pylist(), second["parts"].to_pylist(), strict=True))
    assert parts["0-sum-1-0"] == {"flaky": 2.0, "skips": None} and parts["0-sum-1-1"] == {
        "flaky": 3.5,
        "skips": None,
    }


# -- extra


def test_extra_is_a_column_only_where_a_function_may_give_it(store, sample):
    rollouts = sample([["good", "skip"]], {"answer": [1]})
    judge = {"use": "mine.py:judge", "extra": True}
    found = store.open(run(config(judge, "mine.py:skips"), store, rollouts=rollouts.ref)).table()
    texts = dict(
        zip(
            rollouts.table()["rollout_id"].to_pylist(),
            rollouts.table()["completion_text"].to_pylist(),
            strict=True,
        )
    )
    for row in found.to_pylist():
        assert set(row["extra"]) == {"judge"} and json.loads(row["extra"]["judge"]) == {
            "why": texts[row["rollout_id"]]
        }
    assert sorted(found["reward"].to_pylist(), key=str) == [1.0, None]
    with pytest.raises(RewardError, match="extra = true lets it return mappings"):
        run(config("mine.py:judge"), store, rollouts=rollouts.ref)
    plain = store.open(run(config("mine.py:skips"), store, rollouts=rollouts.ref)).table()
    assert plain.column_names == ["rollout_id", "group_id", "reward", "parts", "errors"]


def test_a_retry_keeps_the_extra_of_the_rows_it_takes_over(store, sample, mine):
    rollouts = sample([["good", "skip"]], {"answer": [1]})
    first = store.open(
        run(config({"use": "mine.py:judge", "extra": True}), store, rollouts=rollouts.ref)
    )
    source = (mine / "mine.py").read_text()
    (mine / "mine.py").write_text(
        source + "\ndef judge(completions):\n    return [0.0] * len(completions)\n"
    )
    second = store.open(run(config("mine.py:judge"), store, rollouts=rollouts.ref, retry=first.ref))
    kept = pc.is_valid(first.table()["reward"])
    assert second.table().filter(kept).equals(first.table().filter(kept))
    assert second.table().filter(pc.invert(kept)).to_pylist()[0]["extra"] == {"judge": None}
    assert second.manifest.metrics["recovered"] == 1
