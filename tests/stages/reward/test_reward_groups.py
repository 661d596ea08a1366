"""Functions of scope `group`: each call holds one whole group in order, over shards, workers,
processes that share the work, restarts and retries."""

import json
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, RewardError
from quiver.stages.common.runtime.runner import Call
from quiver.stages.common.store.writer import ROWS_PER_SHARD
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.pool.scorer import FunctionScorer
from quiver.stages.reward.stage import Config
from tests.stages.sharing import start
from tests.writing import run_here

run = partial(run_here, "reward")
SIZE = 5
GROUPS = 2 * ROWS_PER_SHARD // SIZE + 3

MINE = """
import json, os, time
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

def slow(completions, rollout_ids, answer):
    time.sleep(0.002)
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


def config(use, **options) -> Config:
    names = {"max_invalid", "workers"} & options.keys()
    of_stage = {name: options.pop(name) for name in names}
    return Config(functions=[{"use": use, "scope": "group", **options}], **of_stage)


def expected() -> dict[str, float]:
    return {
        f"0-sum-{group}-{at}": float((3 * at + group) % SIZE)
        for group in range(GROUPS)
        for at in range(SIZE)
    }


def rewards(store, ref) -> dict[str, float | None]:
    return {row["rollout_id"]: row["reward"] for row in store.open(ref).table().to_pylist()}


@pytest.mark.parametrize("use", ["mine.py:rank", "mine.py:rank_async"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_call_holds_one_whole_group_in_order(store, rollouts, use, workers):
    ref = run(config(use, workers=workers), store, rollouts=rollouts.ref)
    assert rewards(store, ref) == expected()


def test_processes_that_share_the_work_call_whole_groups(store, rollouts):
    options = config("mine.py:slow", workers=1).model_dump(mode="json", exclude_defaults=True)
    call = Call("reward", options, store.path, {"rollouts": str(rollouts.ref)})
    refs = {worker.answer()["ref"] for worker in start(call, 2)}
    assert refs == {"arith/rewards@1"}
    assert rewards(store, "arith/rewards@1") == expected()


def test_a_group_that_fails_fails_whole_and_is_called_whole_again(store, rollouts):
    """Other rows keep what they had; those of the group come again together."""
    with pytest.raises(RewardError, match="rows failed so far"):
        run(config("mine.py:fails"), store, rollouts=rollouts.ref)
    ref = run(config("mine.py:fails", max_invalid=0.1), store, rollouts=rollouts.ref)
    failed = {f"0-sum-1-{at}" for at in range(SIZE)}
    assert {key for key, reward in rewards(store, ref).items() if reward is None} == failed
    errors = [row["errors"]["fails"] for row in store.open(ref).table().to_pylist()]
    assert sum(error is not None and "not this group" in error for error in errors) == SIZE
    Path("repaired").touch()
    Path("calls").unlink()
    again = run(config("mine.py:fails"), store, rollouts=rollouts.ref, retry=ref)
    assert rewards(store, again) == expected()
    calls = {tuple(json.loads(line)) for line in Path("calls").read_text().splitlines()}
    assert calls == {tuple(f"0-sum-1-{at}" for at in range(SIZE))}


def test_a_restart_calls_whole_groups(store, rollouts):
    """Finished shards are kept; a group across their border is called whole for the next one."""
    Path("mine.py").write_text(
        MINE + "\ndef breaks(completions, rollout_ids, answer):\n"
        "    if answer[0] < 3 and not Path('repaired').exists():\n"
        "        raise ValueError('broken')\n"
        "    return rank(completions, rollout_ids, answer)\n"
    )
    with pytest.raises(RewardError, match=r"\d finished shards are kept"):
        run(config("mine.py:breaks", workers=1), store, rollouts=rollouts.ref)
    Path("repaired").touch()
    ref = run(config("mine.py:breaks", workers=1), store, rollouts=rollouts.ref)
    assert rewards(store, ref) == expected()


@pytest.mark.parametrize(
    ("use", "says"),
    [("mine.py:one", "returned 1 values for 5 rows"), ("mine.py:leaves", "exit code 3")],
)
def test_what_fails_in_a_group_is_the_error_of_all_its_rows(store, sample, use, says):
    few = sample([["a"] * SIZE], {"answer": [1]})
    ref = run(config(use, max_invalid=1.0), store, rollouts=few.ref)
    errors = [row["errors"][use.partition(":")[2]] for row in store.open(ref).table().to_pylist()]
    assert len(errors) == SIZE and all(says in error for error in errors)


def test_scope_group_is_refused_where_there_are_no_groups():
    with pytest.raises(ValidationError, match="leave scope out"):
        FunctionConfig(use="mine.py:rank", scope="group", style="verl")
    with Pool(1) as pool:
        scorer = FunctionScorer(FunctionConfig(use="mine.py:one", scope="group"), pool, 8)
        with pytest.raises(ConfigError, match="has scope group"):
            scorer.score({"completions": ["a"], "rollout_ids": ["0"]})
