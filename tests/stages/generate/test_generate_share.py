"""Several processes at one version of rollouts make the same bytes as one, also if one is killed,
stopped or fails."""

import json
import signal
from pathlib import Path

import pytest

from quiver.schemas.errors import CorruptError
from quiver.stages.core.run.runner import Call, find_or_make
from quiver.stages.core.store import Store
from quiver.stages.core.store.storage import with_checksum
from tests.stages.generate.making import random_prompts
from tests.stages.sharing import copy, hashes, require_whole, start, wait
from tests.tiny import make_policy

REFS = {"prompts": "tiny/prompts@1", "policy": "tiny/policy@0"}
SHARD = 6
ENGINES = {
    "scripted": {"engine": "scripted"},
    "transformers": {"engine": "transformers", "dtype": "float32", "options": {"batch_size": 4}},
}
SLOW = {"options": {"seconds_per_row": 0.01}}


def call(store: Store, engine: str = "scripted", **changed) -> Call:
    common = {
        "samples_per_prompt": 3,
        "rows_per_shard": SHARD,
        "sampling": {"max_tokens": 8, "temperature": 0.7},
    }
    return Call("generate", {**common, **ENGINES[engine], **changed}, store.url, REFS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """For each engine a store in which one process made 84 rows in 14 shards; `bare`: a store with
    only prompts and policy."""
    bare = Store(tmp_path_factory.mktemp("bare") / "store")
    make_policy(bare)
    random_prompts(bare, 28)
    stores = {"bare": bare}
    for engine in ENGINES:
        stores[engine] = copy(bare, tmp_path_factory.mktemp(engine))
        find_or_make(call(stores[engine], engine))
    return stores


@pytest.fixture
def store(alone, tmp_path) -> Store:
    return copy(alone["bare"], tmp_path)


def notes(store: Store) -> list[Path]:
    return list((Path(store.url) / "tiny/rollouts/.work").glob("*.notes/part-*.json"))


def held_by(store: Store, worker) -> list[Path]:
    """Shards that this process has leased."""
    leases = (Path(store.url) / "tiny/rollouts/.work").glob("*.leases/shard-*/*")
    holders = [(path, json.loads(path.read_text() or "{}")) for path in leases]
    return [
        path
        for path, holder in holders
        if holder.get("owner", {}).get("pid") == worker.pid and not holder["released"]
    ]


def require_same(store: Store, alone, engine: str = "scripted") -> None:
    require_whole(store, "tiny", "rollouts")
    assert hashes(store, "tiny/rollouts@1") == hashes(alone[engine], "tiny/rollouts@1")
    mine, other = (side.open("tiny/rollouts@1").manifest for side in (store, alone[engine]))
    assert (mine.status, mine.content_hash) == (other.status, other.content_hash)
    assert mine.metrics["tokens"] == other.metrics["tokens"]


@pytest.mark.parametrize(("engine", "count"), [("scripted", 3), ("transformers", 2)])
def test_any_number_makes_what_one_makes(store, alone, engine, count):
    answers = [worker.answer() for worker in start(call(store, engine), count)]
    assert [answer["ref"] for answer in answers] == ["tiny/rollouts@1"] * count
    assert [answer["cached"] for answer in answers].count(False) == 1
    assert len({str(answer["metrics"]) for answer in answers}) == 1
    require_same(store, alone, engine)


DIARY = """
import os, time
from pathlib import Path

def answer(prompt_ids, seed):
    # Note who made which row; the first row of each process waits for the others' first.
    diary = Path(__file__).with_name("diary")
    with open(diary, "a") as out:
        out.write(f"{os.getpid()} {seed}\\n")
    while len({line.split()[0] for line in diary.read_text().splitlines()}) < 3:
        time.sleep(0.01)
    return prompt_ids
"""


def test_each_row_is_made_once_and_the_manifest_counts_the_whole(store, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(DIARY)
    workers = start(call(store, options={"script": f"{script}:answer"}), 3)
    assert {worker.answer()["ref"] for worker in workers} == {"tiny/rollouts@1"}
    lines = [line.split() for line in (tmp_path / "diary").read_text().splitlines()]
    version = store.open("tiny/rollouts@1")
    assert sorted(int(seed) for _, seed in lines) == sorted(version.table()["seed"].to_pylist())
    assert version.manifest.metrics["workers"] == 3
    assert sum(version.manifest.status.values()) == version.manifest.rows == 84


def kill_early(store: Store, count: int = 1, shards: int = 2) -> None:
    """Start processes, and kill all of them once some shards are finished."""
    workers = start(call(store, **SLOW), count)
    wait(lambda: len(notes(store)) >= shards)
    for worker in workers:
        worker.signal(signal.SIGKILL)
        assert worker.answer() is None


def test_the_others_finish_the_work_of_one_that_was_killed(store, alone):
    workers = start(call(store, **SLOW), 3)
    wait(lambda: len(notes(store)) >= 3 and held_by(store, workers[0]))
    workers[0].signal(signal.SIGKILL)
    assert workers[0].answer() is None
    assert {worker.answer()["ref"] for worker in workers[1:]} == {"tiny/rollouts@1"}
    require_same(store, alone)


def test_a_later_process_keeps_the_shards_of_those_that_were_killed(store, alone):
    """It keeps their size of a shard, too."""
    kill_early(store, count=2, shards=4)
    names = {json.loads(path.read_bytes())["name"] for path in notes(store)}
    finished = {
        path.name: path.stat().st_ino
        for path in Path(store.url).glob("tiny/rollouts/.work/*/part-*.arrow")
        if path.name in names
    }
    assert find_or_make(call(store, rows_per_shard=17)).cached is False
    require_same(store, alone)
    folder = store.open("tiny/rollouts@1").files.folder
    assert {name: (folder / name).stat().st_ino for name in finished} == finished


def test_shards_of_another_size_than_their_note_says_are_made_again(store, alone):
    kill_early(store)
    (cut,) = Path(store.url).glob("tiny/rollouts/.work/*.notes/cut")
    cut.write_bytes(with_checksum({"rows_per_shard": SHARD + 1}))
    with pytest.raises(CorruptError, match="not the requested ones") as caught:
        find_or_make(call(store))
    assert caught.value.next == "run the same command again"
    assert store.numbers("tiny", "rollouts") == []
    assert find_or_make(call(store)).cached is False
    require_same(store, alone)


def test_a_stopped_process_is_not_waited_for_and_changes_nothing_later(store, alone):
    stopped, other = start(call(store, **SLOW), 2, patience_seconds=0.5)
    wait(lambda: len(notes(store)) >= 2 and held_by(store, stopped))
    stopped.signal(signal.SIGSTOP)
    assert other.answer()["cached"] is False

    def files():
        folder = store.open("tiny/rollouts@1").files.folder
        return {
            path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()
        }

    before = files()
    stopped.signal(signal.SIGCONT)
    assert stopped.answer()["cached"] is True
    assert files() == before
    require_same(store, alone)


ONCE = """
import os
from pathlib import Path

def answer(prompt_ids, seed):
    # The first call fails; the others answer as "sample" does.
    from quiver.stages.generate.engines.scripted import sample
    try:
        os.close(os.open(Path(__file__).with_name("failed"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return sample(prompt_ids, seed)
    raise MemoryError("only here")
"""


def test_an_error_in_one_process_does_not_end_the_others(store, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(ONCE)
    workers = start(call(store, options={"script": f"{script}:answer"}), 3)
    answers = [worker.answer() for worker in workers]
    codes = [answer["error"]["code"] for answer in answers if "error" in answer]
    # The others may commit before the failed process can report its error.
    assert codes in ([], ["E-RESOURCE"])
    assert [answer.get("ref") for answer in answers].count("tiny/rollouts@1") == 3 - len(codes)
    require_whole(store, "tiny", "rollouts")
