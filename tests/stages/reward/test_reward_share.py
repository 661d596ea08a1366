"""Several processes score one version together: the bytes of one process, and the same number of
rows may fail."""

import json
import signal
from pathlib import Path

import pytest

from quiver.stages.core.run.runner import Call, find_or_make
from quiver.stages.core.run.stage_process import run_call
from quiver.stages.core.store import Store
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from tests.faults.scenes import killed
from tests.faults.sizes import sizes
from tests.stages.sharing import copy, hashes, require_whole, start, wait

MINE = """
import pathlib, time

def slow(completions):
    time.sleep(0.1)
    return [float(len(text)) for text in completions]

def sometimes(completions):
    return [None if text.endswith("3") else 2.0 for text in completions]

def breaks(completions):
    # Fails for every 64th rollout until the file `repaired` is there.
    if pathlib.Path("repaired").exists():
        return [1.0] * len(completions)
    return [1.0 if int(text.split()[-1]) % 64 else "no number" for text in completions]
"""
SHARDS = 5


@pytest.fixture
def rollouts(store, sample, tmp_path, monkeypatch) -> Store:
    """A store with rollouts of five shards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    rows = SHARDS * ROWS_PER_SHARD - 7
    sample([[f"it is {row}"] for row in range(rows)], {"answer": list(range(rows))})
    return store


def call(store: Store, *uses: str, **options) -> Call:
    config = {"functions": [{"use": use} for use in uses], "workers": 1, **options}
    return Call("reward", config, store.url, {"rollouts": "arith/rollouts@1"})


def require_same(store: Store, other: Store) -> None:
    require_whole(store, "arith", "rewards")
    assert hashes(store, "arith/rewards@1") == hashes(other, "arith/rewards@1")
    mine, alone = (each.open("arith/rewards@1").manifest for each in (store, other))
    for manifest in (mine, alone):
        for function in manifest.metrics["functions"].values():
            assert function.pop("seconds") > 0
    workers = mine.metrics.pop("workers")
    assert workers in (1, 2, 3)
    assert (mine.metrics, mine.status) == (alone.metrics, alone.status)


def test_any_number_scores_what_one_scores(rollouts, tmp_path):
    uses = "numeric", "mine.py:sometimes", "mine.py:slow"
    other = copy(rollouts, tmp_path / "alone")
    find_or_make(call(other, *uses))
    answers = [worker.answer() for worker in start(call(rollouts, *uses), 3)]
    assert [answer["ref"] for answer in answers] == ["arith/rewards@1"] * 3
    assert [answer["cached"] for answer in answers].count(False) == 1
    require_same(rollouts, other)


def test_kill_9_of_one_is_nothing_to_the_other(rollouts, tmp_path):
    other = copy(rollouts, tmp_path / "alone")
    find_or_make(call(other, "mine.py:slow"))
    killed, left = start(call(rollouts, "mine.py:slow"), 2)
    work = Path(rollouts.url) / "arith/rewards/.work"

    def has_a_shard(pid: int) -> bool:
        holders = [json.loads(path.read_text() or "{}") for path in work.glob("*.leases/shard-*/*")]
        return any(holder.get("owner", {}).get("pid") == pid for holder in holders)

    wait(lambda: has_a_shard(killed.pid))
    killed.signal(signal.SIGKILL)
    assert killed.answer() is None
    assert left.answer()["ref"] == "arith/rewards@1"
    require_same(rollouts, other)


@pytest.mark.parametrize("trials", sizes(short=1, full=50))
@pytest.mark.parametrize("place", ["worker.answered", "flow.answered"])
def test_kill_9_with_an_answer_at_hand(rollouts, tmp_path, record_property, place, trials):
    """The answer of a worker, which is in no shard yet; or that of a stage, whose version is there:
    no finished shard is done again, and no version is made twice."""
    for trial in range(trials):
        store = copy(rollouts, tmp_path / str(trial))
        scored = call(store, "mine.py:slow" if trial % 2 else "numeric")
        run = find_or_make if place == "worker.answered" else run_call
        time = 2 + trial % 4 if place == "worker.answered" else 1

        def steps(run=run, scored=scored):
            run(scored)
            yield from ()

        killed(steps, f"{place}@{time}")
        folder = Path(store.url) / "arith/rewards"
        noted = [json.loads(note.read_bytes()) for note in folder.glob(".work/*.notes/part-*.json")]
        inodes = {
            note["name"]: next(folder.glob(f".work/*/{note['name']}")).stat().st_ino
            for note in noted
        }
        outcome = run(scored)
        assert (outcome.ref, outcome.cached) == ("arith/rewards@1", place == "flow.answered")
        version = store.open(outcome.ref)
        assert {name: version.files.path(name).stat().st_ino for name in inodes} == inodes
        assert version.manifest.rows == SHARDS * ROWS_PER_SHARD - 7
        require_whole(store, "arith", "rewards")
    record_property("kill -9 trials", trials)


def test_rows_that_fail_are_counted_over_all_processes(rollouts, tmp_path):
    """20 rows fail, 4 in each shard: where 19 may, every process says so; once that is mended, what
    is kept is taken up."""
    few = call(rollouts, "mine.py:breaks", max_invalid=19 / (SHARDS * ROWS_PER_SHARD - 7))
    errors = [worker.answer()["error"] for worker in start(few, 2)]
    assert {error["code"] for error in errors} == {"E-REWARD"}
    assert all("20 of 1273 rows failed so far" in error["message"] for error in errors)
    assert rollouts.numbers("arith", "rewards") == []
    (tmp_path / "repaired").touch()
    assert [worker.answer()["ref"] for worker in start(few, 2)] == ["arith/rewards@1"] * 2
    status = rollouts.open("arith/rewards@1").manifest.status
    assert status["failed"] in (4, 8, 12, 16), "of the shards that were kept"
    assert status["scored"] + status["failed"] == 1273
    require_whole(rollouts, "arith", "rewards")
