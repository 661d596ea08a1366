"""Several processes at one version of rollouts: the same bytes as one makes, whoever is killed,
hangs, fails or comes late."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from quiver.schemas.errors import CorruptError
from quiver.stages.common.runtime.runner import Call, find, perform, run_call
from quiver.stages.common.store import Store
from quiver.stages.common.store.notes import note_of
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
    return Call("generate", {**common, **ENGINES[engine], **changed}, store.path, REFS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """For each engine a store in which one process has made 84 rows in 14 shards, and one with
    nothing but what they need."""
    bare = Store(tmp_path_factory.mktemp("bare") / "store")
    make_policy(bare)
    random_prompts(bare, 28)
    stores = {"bare": bare}
    for engine in ENGINES:
        stores[engine] = copy(bare, tmp_path_factory.mktemp(engine))
        perform(call(stores[engine], engine))
    return stores


@pytest.fixture
def store(alone, tmp_path) -> Store:
    return copy(alone["bare"], tmp_path)


def notes(store: Store) -> list[Path]:
    return list((store.path / "tiny/rollouts/.staging").glob("*.notes/part-*.json"))


def held_by(store: Store, worker) -> list[Path]:
    """Shards that this process has leased."""
    leases = (store.path / "tiny/rollouts/.staging").glob("*.leases/shard-*/*")
    holders = [(path, json.loads(path.read_text() or "{}")) for path in leases]
    return [
        path
        for path, holder in holders
        if holder.get("owner", {}).get("pid") == worker.pid and not holder["released"]
    ]


def require_same(store: Store, alone, engine: str = "scripted") -> None:
    require_whole(store, "tiny", "rollouts")
    assert hashes(store, "tiny/rollouts@1") == hashes(alone[engine], "tiny/rollouts@1")
    mine, other = (each.open("tiny/rollouts@1").manifest for each in (store, alone[engine]))
    assert (mine.rows, mine.status, mine.content_hash) == (
        other.rows,
        other.status,
        other.content_hash,
    )
    assert mine.metrics["tokens"] == other.metrics["tokens"]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
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


def test_each_row_is_made_once_and_the_manifest_is_that_of_the_whole(store, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(DIARY)
    workers = start(call(store, options={"script": f"{script}:answer"}), 3)
    assert {worker.answer()["ref"] for worker in workers} == {"tiny/rollouts@1"}
    made = [line.split() for line in (tmp_path / "diary").read_text().splitlines()]
    assert len({pid for pid, _ in made}) == 3
    version = store.open("tiny/rollouts@1")
    assert sorted(int(seed) for _, seed in made) == sorted(version.table()["seed"].to_pylist())
    manifest = version.manifest
    assert manifest.metrics["workers"] == 3
    assert sum(manifest.status.values()) == manifest.rows == 84
    waiting = manifest.seconds[
        "generate"
    ]  # in each process up to the first row of the last to come: so a sum exceeds the whole
    assert waiting > 0 and manifest.seconds["total"] < sum(manifest.seconds.values())


@pytest.mark.parametrize("shards", [1, 3, 5, 7, 9])
def test_kill_9_of_one_is_nothing_to_the_others(store, alone, shards):
    workers = start(call(store, **SLOW), 3)
    wait(lambda: len(notes(store)) >= shards and held_by(store, workers[0]))
    workers[0].signal(signal.SIGKILL)
    assert workers[0].answer() is None
    assert {worker.answer()["ref"] for worker in workers[1:]} == {"tiny/rollouts@1"}
    require_same(store, alone)


def test_all_killed_and_one_alone_goes_on(store, alone):
    """Shards of a shared attempt are taken up by whoever comes, with another size of shard in
    mind."""
    workers = start(call(store, **SLOW), 2)
    wait(lambda: len(notes(store)) >= 4)
    for worker in workers:
        worker.signal(signal.SIGKILL)
        worker.answer()
    noted = {path.name.removesuffix(".json") for path in notes(store)}
    kept = {
        path.name: path.stat().st_ino
        for path in store.path.glob("tiny/rollouts/.staging/*/part-*.arrow")
        if path.name in noted
    }
    assert perform(call(store, rows_per_shard=17)).cached is False
    require_same(store, alone)
    version = store.open("tiny/rollouts@1").files.folder
    assert {name: (version / name).stat().st_ino for name in kept} == kept


def test_rows_that_are_too_few_are_not_committed_and_done_again(store, alone):
    """The plan of the shards says another size than those had that are finished, and its checksum
    is right."""
    (worker,) = start(call(store, **SLOW), 1)
    wait(lambda: len(notes(store)) >= 2)
    worker.signal(signal.SIGKILL)
    worker.answer()
    (plan,) = store.path.glob("tiny/rollouts/.staging/*.notes/plan")
    plan.write_bytes(note_of({"rows_per_shard": SHARD + 1}))
    with pytest.raises(CorruptError, match="were asked for") as caught:
        perform(call(store))
    assert caught.value.next == "run the same command again"
    assert store.numbers("tiny", "rollouts") == []
    assert perform(call(store)).cached is False
    require_same(store, alone)


def test_a_hung_one_is_done_without_and_changes_nothing_when_it_goes_on(store, alone):
    hung, other = start(call(store, **SLOW), 2, patience_seconds=0.5)
    wait(lambda: len(notes(store)) >= 2 and held_by(store, hung))
    hung.signal(signal.SIGSTOP)
    answer = other.answer()
    assert (answer["ref"], answer["cached"]) == ("tiny/rollouts@1", False)
    version = store.open("tiny/rollouts@1")
    before = {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in version.files.folder.iterdir()
    }
    hung.signal(signal.SIGCONT)
    answer = hung.answer()
    assert (answer["ref"], answer["cached"]) == ("tiny/rollouts@1", True)
    assert {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in version.files.folder.iterdir()
    } == before
    require_same(store, alone)


def test_processes_with_other_sizes_of_shard_agree(store, alone):
    first, second = start(call(store), 1), start(call(store, rows_per_shard=11), 1)
    assert {worker.answer()["ref"] for worker in first + second} == {"tiny/rollouts@1"}
    require_whole(store, "tiny", "rollouts")
    assert (
        store.open("tiny/rollouts@1")
        .table()
        .equals(alone["scripted"].open("tiny/rollouts@1").table())
    )
    assert {entry.rows for entry in store.open("tiny/rollouts@1").manifest.files[:-1]} in (
        {SHARD},
        {11},
    )


ONCE = """
import os
from pathlib import Path

def answer(prompt_ids, seed):
    # Whoever comes first fails; the others answer as "sample" does.
    from quiver.stages.generate.engines.scripted import sample
    try:
        os.close(os.open(Path(__file__).with_name("failed"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return sample(prompt_ids, seed)
    raise MemoryError("only here")
"""


def test_an_error_of_one_is_its_own(store, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(ONCE)
    answers = [
        worker.answer() for worker in start(call(store, options={"script": f"{script}:answer"}), 3)
    ]
    failed = [answer["error"]["code"] for answer in answers if "error" in answer]
    assert failed in ([], ["E-RESOURCE"]), "none, where the others were done before it could tell"
    assert len([answer for answer in answers if answer.get("ref") == "tiny/rollouts@1"]) == 3 - len(
        failed
    )
    require_whole(store, "tiny", "rollouts")


def test_a_bad_row_is_everybodys_error(store):
    """Each of them comes to it; what is finished is kept."""
    workers = start(call(store, engine="scripted"), 3, engine="tests.stages.generate.making:Late")
    errors = [worker.answer()["error"] for worker in workers]
    assert {error["code"] for error in errors} == {"E-NUMERIC"}
    assert all("row 80: logprob nan" in error["message"] for error in errors)
    assert store.numbers("tiny", "rollouts") == []
    assert len(notes(store)) == 13


def test_another_config_is_other_work(store):
    workers = [*start(call(store), 1), *start(call(store, iteration=1), 1)]
    assert {worker.answer()["cached"] for worker in workers} == {False}
    assert store.numbers("tiny", "rollouts") == [1, 2]


def test_a_late_one_finds_it_done(store):
    given = call(store)
    first, late = start(given, 1), None
    assert first[0].answer()["cached"] is False
    late = start(given, 1)
    assert late[0].answer()["cached"] is True
    assert sorted(os.listdir(store.path / "tiny/rollouts")) == [
        ".index",
        ".ledger",
        ".staging",
        "v000001",
    ]


def test_stages_of_their_own_share_a_call(store, alone, monkeypatch):
    """As a flow starts them: each in a child process, with a spec; one that comes when all is done
    has nothing to start."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd(), prepend=os.pathsep)
    shared = replace(call(store), share=True)
    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(run_call, [shared, shared]))
    assert [outcome.ref for outcome in outcomes] == ["tiny/rollouts@1"] * 2
    assert sorted(outcome.cached for outcome in outcomes) == [False, True]
    assert outcomes[0].metrics == outcomes[1].metrics
    assert find(shared).cached is True
    require_same(store, alone)
