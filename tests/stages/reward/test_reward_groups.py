"""Functions of scope `group`: each call holds one whole group in order, over shards, workers,
restarts and retries."""

import json
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError, RewardError
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.pool.scorer import FunctionScorer

SIZE = 5
GROUPS = 2 * ROWS_PER_SHARD // SIZE + 3

MINE = """
import json, os
from pathlib import Path

def rank(completions, rollout_ids, answer):
    # what each rollout is worth beside the others of its group; -1 unless the group is whole
    groups = [rollout_id.rpartition("-")[0] for rollout_id in rollout_ids]
    samples = [int(rollout_id.rpartition("-")[2]) for rollout_id in rollout_ids]
    is_whole = len(set(groups)) == 1 and samples == list(range(5)) and len(set(answer)) == 1
    lengths = [len(text) for text in completions]
    if not is_whole:
        return [-1.0] * len(completions)
    return [float(sorted(lengths).index(length)) for length in lengths]

async def rank_async(completions, rollout_ids, answer):
    return rank(completions, rollout_ids, answer)

def fails(completions, rollout_ids, answer):
    with open("calls", "a") as file:
        file.write(json.dumps(rollout_ids) + "\\n")
    if answer[0] == 1 and not Path("repaired").exists():
        raise ValueError("not this group")
    return rank(completions, rollout_ids, answer)

def one(completions):
    return [1.0]

def leaves(completions):
    os._exit(3)
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)


@pytest.fixture
def rollouts(sample):
    """Groups of five that lie across the borders of three shards, the last sample first."""
    texts = [["x" * (1 + (3 * at + group) % SIZE) for at in range(SIZE)] for group in range(GROUPS)]
    return sample(texts, {"answer": list(range(GROUPS))})


def of_group(use: str) -> dict:
    return {"use": f"mine.py:{use}", "scope": "group"}


EXPECTED = {
    f"{group}-{at}": float((3 * at + group) % SIZE) for group in range(GROUPS) for at in range(SIZE)
}


@pytest.mark.parametrize(("use", "workers"), [("rank", 1), ("rank", 3), ("rank_async", 3)])
def test_a_call_holds_one_whole_group_in_order(score, rollouts, column, use, workers):
    assert column(score(rollouts, of_group(use), workers=workers)) == EXPECTED


def test_a_group_that_fails_fails_whole_and_is_called_whole_again(score, rollouts, column):
    """Other rows keep what they had; those of the group come again together, after a restart that
    keeps finished shards and in a retry."""
    with pytest.raises(RewardError, match=r"rows failed so far(.|\n)*finished shards are kept"):
        score(rollouts, of_group("fails"), workers=1)
    version = score(rollouts, of_group("fails"), max_invalid=0.1)
    failed = {f"1-{at}" for at in range(SIZE)}
    assert {name for name, reward in column(version).items() if reward is None} == failed
    errors = column(version, "errors")
    assert all("not this group" in errors[name]["fails"] for name in failed)
    Path("repaired").touch()
    Path("calls").unlink()
    assert column(score(rollouts, of_group("fails"), retry=version)) == EXPECTED
    calls = {tuple(json.loads(line)) for line in Path("calls").read_text().splitlines()}
    assert calls == {tuple(f"0-sum-1-{at}" for at in range(SIZE))}


def test_what_fails_in_a_group_is_the_error_of_all_its_rows(score, sample, column):
    few = sample([["a"] * SIZE], {"answer": [1]})
    version = score(few, of_group("one"), of_group("leaves"), max_invalid=1.0)
    errors = column(version, "errors").values()
    assert len(errors) == SIZE
    for error in errors:
        assert "returned 1 values for 5 rows" in error["one"]
        assert "exit code 3" in error["leaves"]


def test_scope_group_is_refused_where_there_are_no_groups():
    with pytest.raises(ValueError, match="leave scope out"):
        FunctionConfig(**of_group("rank"), style="verl")
    with Pool(1) as pool:
        scorer = FunctionScorer(FunctionConfig(**of_group("one")), pool, 8)
        with pytest.raises(ConfigError, match="has scope group"):
            scorer.score({"completions": ["a"], "rollout_ids": ["0"]})
