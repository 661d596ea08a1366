"""The store: versions appear whole or not at all, damage is found before it is parsed, nobody gets
a number twice."""

import json
import os
import re
import shutil
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.dataset
import pytest

from quiver.flows.verification import verify
from quiver.schemas import cells, logprobs, prompts
from quiver.schemas.errors import (
    BusyError,
    ConfigError,
    CorruptError,
    LineageError,
    OutcomeUnknownError,
    ResourceError,
    SchemaError,
)
from quiver.schemas.manifest import FORMAT, MAX_BYTES, ModelEntry, canonical, digest
from quiver.schemas.refs import Ref
from quiver.stages.core.config import Config, Runtime
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Store, disk
from quiver.stages.core.store.environment import environment
from quiver.stages.core.store.retention import Rule, collect
from quiver.stages.core.store.writer import MOST_SHARDS, ROWS_AT_ONCE, open_staging, shard_rows
from tests.faults.failing import failing
from tests.faults.seam import watched
from tests.writing import begin


class Settings(Config):
    seed: int = 0
    """Decides the outcome."""
    batch: Runtime[int] = 1
    """Does not."""


def table(start: int, rows: int = 2) -> pa.Table:
    ids = [f"r{index}" for index in range(start, start + rows)]
    return pa.table(
        {"rollout_id": ids, "logprobs": [[-1.0 * index] for index in range(rows)]},
        schema=logprobs.SCHEMA,
    )


def work_on(store, config=None, run="a", **options):
    about = {"stage": "logprobs", "stage_version": 1, "config": config or Settings(), "inputs": {}}
    return begin(store, run, "logprobs", **{**about, **options})


def commit(store, config=None, shards=2, **options):
    with work_on(store, config, **options) as work:
        if work.done:
            return work.done
        for index in range(shards):
            work.write(index, table(2 * index))
        return work.commit(metrics={"x": 1.5}, status={"scored": 4})


def shard(version, index: int) -> Path:
    """The path of a shard."""
    return version.files.path(version.files.names[index])


def staged(store, pattern: str) -> Path:
    """The path of a shard, or a note, of unfinished work."""
    (path,) = (Path(store.url) / "a/logprobs/.work").glob(f"*/{pattern}")
    return path


def test_shards_cut_from_a_struct_with_a_member_that_is_always_null(store):
    """Arrow's own cast of such a slice fails."""
    columns = pa.array([{"index": number, "answer": None} for number in range(4)])
    ids = pa.array([f"g{number}" for number in range(4)])
    kind = prompts.SCHEMA
    rows = {"group_id": ids, "prompt_text": ids, "prompt_ids": [[1]] * 4, "columns": columns}
    place = kind.get_field_index("columns")
    schema = kind.set(place, kind.field(place).with_type(columns.type))
    whole = pa.table({"messages": pa.nulls(4, kind.field("messages").type), **rows}, schema=schema)
    about = {"stage": "prompt", "stage_version": 1, "config": Settings(), "inputs": {}}
    with begin(store, "a", "prompts", **about) as work:
        for index in range(4):
            work.write(index, whole.slice(index, 1))
        version = work.commit()
    assert version.table()["columns"].to_pylist() == columns.to_pylist()


def test_a_version_reads_back_mapped_with_its_manifest(store):
    made = commit(store)
    opened = store.open("a/logprobs@latest")
    assert str(opened.ref) == str(made.ref) == "a/logprobs@1"
    assert opened.table()["rollout_id"].to_pylist() == ["r0", "r1", "r2", "r3"]
    assert opened.table(["rollout_id"]).column_names == ["rollout_id"]
    before = pa.total_allocated_bytes()
    kept = opened.table()
    assert pa.total_allocated_bytes() == before and kept.num_rows == 4
    manifest = opened.manifest
    assert (manifest.rows, manifest.metrics, manifest.status) == (4, {"x": 1.5}, {"scored": 4})
    assert [entry.rows for entry in manifest.files] == [2, 2]
    assert store.written == {"a/logprobs@1"}


def test_a_misspelt_column_is_not_corruption(store):
    version = commit(store)
    for columns in (["rollout_idd"], ["rollout_id", "rollout_idd"]):
        with pytest.raises(ConfigError, match="has no column rollout_idd; did you mean rollout_id"):
            version.table(columns)


def test_the_same_work_is_found_and_other_work_is_not(store):
    first = commit(store)
    assert commit(store, Settings(batch=64)).ref == first.ref
    assert str(commit(store, Settings(seed=1)).ref) == "a/logprobs@2"
    assert str(commit(store, force=True).ref) == "a/logprobs@3"
    assert str(commit(store, stage_version=2).ref) == "a/logprobs@4"
    assert str(commit(store, inputs={"other": first}).ref) == "a/logprobs@5"
    contents = {v.manifest.content_hash for v in store.versions("a")}
    assert len(contents) == 1, "the same rows are the same content, whoever made them"


def test_other_readers_read_the_files(store):
    version = commit(store)
    pattern = str(version.files.folder / "*.arrow")
    assert (
        pyarrow.dataset.dataset(
            sorted(map(str, version.files.folder.glob("*.arrow"))), format="ipc"
        ).count_rows()
        == 4
    )
    loaded = datasets.load_dataset(
        "arrow", data_files=pattern, cache_dir=str(Path(store.url).parent / "cache")
    )["train"]
    assert loaded["rollout_id"] == version.to_datasets()["rollout_id"] == ["r0", "r1", "r2", "r3"]


def test_cells_of_prompts_are_their_text_in_datasets(store):
    """Mixed ones, and maps, in lists too; others as they are."""
    mixed = cells.json_array([7, {"a": None}]).combine_chunks()
    kind = pa.map_(pa.string(), pa.int64())
    maps = cells.wrap(pa.chunked_array([pa.array([[("k", 1)], None], kind)])).combine_chunks()
    columns = {
        "answer": mixed,
        "answers": pa.ListArray.from_arrays(pa.array([0, 0, 2]), mixed),
        "map": maps,
        "plain": pa.array([1, 2]),
    }
    asked = pa.StructArray.from_arrays([*columns.values()], names=[*columns])
    row = {"messages": [{"role": "user", "content": "q"}], "prompt_text": "q", "prompt_ids": [1]}
    rows = [{"group_id": name, **row} for name in "ab"]
    table = prompts.table_of(rows, asked, prompts.SCHEMA)
    about = {"stage": "prompt", "stage_version": 1, "config": Settings(), "inputs": {}}
    with begin(store, "a", "prompts", **about) as work:
        work.write(0, table)
        version = work.commit()
    assert version.to_datasets()["columns"][:] == [
        {"answer": "7", "answers": [], "map": [{"key": "k", "value": 1}], "plain": 1},
        {"answer": '{"a": null}', "answers": ["7", '{"a": null}'], "map": None, "plain": 2},
    ]


def test_finished_shards_are_taken_up_and_a_changed_one_is_done_again(store):
    with work_on(store) as work:
        work.write(0, table(0))
        work.write(1, table(2))
    with work_on(store) as work:
        assert [work.is_finished(0), work.is_finished(1), work.is_finished(2)] == [
            True,
            True,
            False,
        ]
        path = staged(store, "part-00001-*.arrow")
        damaged = bytearray(path.read_bytes())
        damaged[100] ^= 1
        path.write_bytes(damaged)
        assert not work.is_finished(1)
        work.write(1, table(2))
        assert work.commit().manifest.rows == 4
    assert list((Path(store.url) / "a/logprobs/.work").iterdir()) == []


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_whole_table_is_written_in_large_shards(store, is_begun):
    """Also where a process began it that noted no plan, in shards of 256 rows."""
    rows = table(0, 2100)
    if is_begun:
        with pytest.raises(InterruptedError), work_on(store) as work:
            work.take_shards(9)
            work.write(0, rows.slice(0, 256))
            raise InterruptedError
    with work_on(store) as work:
        work.write_table(rows)
        version = work.commit()
    assert [entry.rows for entry in version.manifest.files] == [2048, 52]
    assert version.table().equals(rows.cast(version.table().schema))


def test_an_empty_table_is_one_empty_shard(store):
    with work_on(store) as work:
        work.write_table(table(0, rows=0))
        version = work.commit()
    assert [entry.rows for entry in version.manifest.files] == [0]
    assert version.table().equals(table(0, rows=0).cast(logprobs.SCHEMA))


@pytest.mark.parametrize(
    ("rows", "saved", "whole"),
    [
        (0, 256, 2048),
        (65_536, 256, 2048),
        (65_537, 512, 2048),
        (524_289, 2304, 4096),
        (1_000_000, 4096, 4096),
        (10**9, 3_906_304, 3_907_584),
    ],
)
def test_shards_grow_so_that_there_are_few(rows, saved, whole):
    assert (shard_rows(rows), shard_rows(rows, ROWS_AT_ONCE)) == (saved, whole)
    assert -(-rows // saved) <= MOST_SHARDS and -(-rows // whole) <= MOST_SHARDS


def test_a_million_rows_written_at_once_are_few_files(store):
    ids = pa.array(range(1_000_000)).cast(pa.string())
    rows = pa.table(
        [ids, pa.array([[]] * len(ids), logprobs.SCHEMA.types[1])], logprobs.SCHEMA.names
    )
    with work_on(store) as work:
        work.write_table(rows.cast(logprobs.SCHEMA))
        version = work.commit()
    assert len(version.manifest.files) == 245 and version.manifest.rows == 1_000_000
    assert version.table(["rollout_id"])["rollout_id"].combine_chunks().equals(ids)


def test_shards_that_no_note_makes_count_are_not_published(store):
    """Their process died before it wrote the notes, or while it wrote a shard."""
    with work_on(store) as work:
        for index in range(3):
            work.write(index, table(index, rows=1))
        path = staged(store, "part-00000-*.arrow")
        path.with_name(f"{path.name}.1-01234567-0123.tmp").write_bytes(b"half")
        for index in range(3):
            work.drop(index)
    with work_on(store) as work:
        work.write(0, table(0, rows=3))
        version = work.commit()
    assert version.manifest.rows == 3
    assert {path.name for path in version.files.folder.iterdir()} == {
        "manifest.json",
        *version.files.names,
    }


def test_force_begins_anew(store):
    with work_on(store, force=True) as work:
        work.write(0, table(0))
    with work_on(store, force=True) as work:
        assert not work.is_finished(0)


def test_a_file_too_many_is_found(store):
    version = commit(store)
    copy = version.files.path("part-00002-01234567.arrow")
    copy.write_bytes(shard(version, 1).read_bytes())
    _, bad = verify(store)
    assert f"{copy.name}: is not a file of this version" in str(bad[0])
    subprocess.run(bad[0].next, shell=True, check=True)
    assert verify(store) == (1, [])


@pytest.mark.parametrize("share", [False, True])
def test_an_unclear_outcome_is_said(store, share):
    """The version is renamed into place, but its folder cannot be flushed."""

    def around(name, path, call):
        if name == "fsync" and path.endswith("/logprobs") and store.has_manifest(made):
            raise OSError(5, "Input/output error")
        return call()

    made = Ref("a", "logprobs", 1)
    with (
        pytest.raises(OutcomeUnknownError, match="v000001: it is visible") as caught,
        work_on(store, share=share) as work,
        watched(around),
    ):
        for index in work.take_shards(1):
            work.write(index, table(0))
        work.commit()
    assert caught.value.exit_code == 9
    assert store.open(made).table().num_rows == 2


@pytest.mark.parametrize(("count", "second"), [(None, 2), (1, 1), (3, 1)])
def test_a_gap_between_shards_and_fewer_or_more_of_them_are_not_committed(store, count, second):
    with work_on(store) as work:
        if count:
            work.take_shards(count)
        work.write(0, table(0))
        work.write(second, table(2))
        with pytest.raises(CorruptError, match=r"found shards \["):
            work.commit()
    assert store.numbers("a", "logprobs") == []


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 1, 2, 4]])
def test_other_rows_than_were_asked_for_are_not_committed_and_done_again(store, order):
    """As many, in another order or with another id."""
    asked = table(0, rows=4)
    ids = asked["rollout_id"]
    with work_on(store) as work:
        work.write_table(table(0, rows=5).take(order))
        with pytest.raises(CorruptError, match="not the requested ones"):
            work.commit(ids=ids)
    with work_on(store) as work:
        work.write_table(asked)
        assert work.commit(ids=ids).table().equals(asked)
    assert verify(store) == (1, [])


def test_an_id_in_two_shards_is_not_committed(store):
    with work_on(store) as work:
        work.write(0, table(0))
        work.write(1, table(1))
        with pytest.raises(SchemaError, match="'r1' occurs more than once"):
            work.commit()


def test_a_manifest_that_nobody_could_read_is_not_published(store):
    with work_on(store) as work:
        work.write(0, table(0))
        with pytest.raises(SchemaError, match=r"its manifest has 8\d{6} bytes, at most 8388608"):
            work.commit(metrics={"note": "x" * MAX_BYTES})
    assert store.numbers("a", "logprobs") == [] and verify(store) == (0, [])
    assert str(commit(store, shards=1).ref) == "a/logprobs@1"


@pytest.mark.parametrize("damage", ["flip", "cut", "extend", "remove", "swap"])
def test_damage_is_found_before_parsing_and_named(store, damage):
    version = commit(store)
    first, second = shard(version, 0), shard(version, 1)
    data = bytearray(first.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
        first.write_bytes(data)
    elif damage == "cut":
        first.write_bytes(data[:-9])
    elif damage == "extend":
        first.write_bytes(data + b"\0")
    elif damage == "remove":
        first.unlink()
    else:
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
    with pytest.raises(CorruptError, match=f"a/logprobs@1 {first.name}") as caught:
        store.open("a/logprobs@1").table()
    assert caught.value.next == "quiver verify a/logprobs@1"
    checked, bad = verify(store)
    assert (checked, len(bad)) == (1, 1)


def test_verify_says_what_helps_and_what_refers_to_what_is_lost(store):
    """Rollouts have their policy among the models, not among the inputs."""
    first = commit(store)
    model = ModelEntry(role="policy", ref=str(first.ref), weights="w", tokenizer="t", template="m")
    commit(store, Settings(seed=1), inputs={"other": first})
    commit(store, Settings(seed=2), models=(model,))
    store.tag("a", "prod", first.ref)
    shard(first, 0).write_bytes(b"")
    for ref in ("a/logprobs@1", "a/logprobs@prod", None):
        error = verify(store, ref)[1][0]
        assert error.next == "quiver verify a/logprobs@1 --quarantine"
        assert error.state.endswith(
            "tags and versions that refer to this one: tag prod, a/logprobs@2, a/logprobs@3."
        )
    first.files.path("manifest.json").write_bytes(b"")
    assert "--quarantine" in verify(store, "a/logprobs@1")[1][0].next


def test_what_another_quiver_wrote_is_not_to_be_deleted(store):
    path = commit(store).files.path("manifest.json")
    data = json.loads(path.read_bytes())
    del data["checksum"]
    data["format"] = FORMAT + 1
    path.write_bytes(canonical({**data, "checksum": digest(data)}))
    (error,) = verify(store)[1]
    assert f"format {FORMAT + 1}, expected {FORMAT}" in error.message
    assert error.next == "read it with the Quiver that wrote it"


def test_latest_is_none_that_a_sweep_made_unless_sweeps_made_all(store):
    """A sweep that is typed again with `rollouts@latest` would learn from what its cells sampled."""
    of_sweep = "sweep 0123456789ab, cell 1 (0.01)"
    first = commit(store, note=of_sweep)
    assert store.resolve("a/logprobs@latest") == first.ref
    own = commit(store, Settings(seed=1), note="sweep it")
    commit(store, Settings(seed=2), note=of_sweep)
    assert store.resolve("a/logprobs@latest") == own.ref


def test_latest_never_falls_back_in_silence(store):
    """The next run makes the version again, whether its manifest is torn or a bit of it flips."""
    commit(store)
    torn = commit(store, Settings(seed=1)).files.path("manifest.json")
    torn.write_bytes(b"")
    with pytest.raises(CorruptError, match="a/logprobs@2"):
        store.open("a/logprobs@latest")
    assert store.open("a/logprobs@1").table().num_rows == 4
    again = commit(store, Settings(seed=1))
    flipped = bytearray(again.files.path("manifest.json").read_bytes())
    flipped[-20] ^= 1
    again.files.path("manifest.json").write_bytes(flipped)
    numbers = [again.ref.version, commit(store, Settings(seed=1)).ref.version]
    assert numbers == [3, 4]
    assert [error.object for error in verify(store)[1]] == ["a/logprobs@2", "a/logprobs@3"]


def test_a_version_moved_elsewhere_is_not_believed(store):
    version = commit(store)
    version.files.folder.rename(version.files.folder.with_name("v000009"))
    with pytest.raises(CorruptError, match="expected a/logprobs@9, found a/logprobs@1"):
        store.open("a/logprobs@9")


def test_a_linked_version_is_refused(store):
    version = commit(store)
    (Path(store.url) / "b/logprobs").mkdir(parents=True)
    (Path(store.url) / "b/logprobs/v000001").symlink_to(version.files.folder)
    with pytest.raises(CorruptError, match="is a link"):
        store.open("b/logprobs@1")


def test_references_that_lead_nowhere_say_what_there_is(store):
    commit(store)
    for ref in ("a/logprobs@2", "a/rollouts@latest", "b/logprobs@latest", "a/logprobs@prod"):
        with pytest.raises(LineageError) as caught:
            store.open(ref)
        assert caught.value.exit_code == 5
    with pytest.raises(LineageError, match=r"there are a/logprobs@1"):
        store.open("a/logprobs@2")


def test_two_at_the_same_work_one_is_busy(store):
    with work_on(store) as work:
        with pytest.raises(BusyError, match=f"process {os.getpid()}"), work_on(store):
            pass
        work.write(0, table(0))
        work.commit()
    assert commit(store).ref.version == 1


def test_a_file_of_the_stages_own_that_is_missing_is_not_anothers_work(store):
    with pytest.raises(FileNotFoundError), work_on(store):
        (Path(store.url).parent / "nowhere").read_bytes()


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 300 kB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", mounted],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield mounted
    subprocess.run(["umount", mounted], check=True)


def test_a_full_disk_loses_nothing(small_disk):
    store = Store(small_disk / "store")
    commit(store, shards=1)
    big = pa.table({"rollout_id": ["big"], "logprobs": [[-1.0] * 200_000]}, schema=logprobs.SCHEMA)
    with work_on(store, Settings(seed=1)) as work:
        work.write(0, table(0))
        with pytest.raises(ResourceError, match="the disk is full") as caught:
            work.write(1, big)
    assert caught.value.exit_code == 7
    assert verify(store) == (1, [])
    with work_on(store, Settings(seed=1)) as work:
        assert work.is_finished(0) and not work.is_finished(1)
        work.write(1, table(2))
        assert str(work.commit().ref) == "a/logprobs@2"


def test_work_that_ends_on_a_full_disk_is_free_at_once(small_disk):
    store = Store(small_disk / "store")
    filler = small_disk / "filler"
    with pytest.raises(ResourceError, match="the disk is full"), work_on(store) as work:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(512))
        work.write(0, table(0))
    filler.unlink()
    assert commit(store).manifest.rows == 4


def test_a_folder_with_other_things_is_no_store(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other things"):
        Store(tmp_path)
    with pytest.raises(ConfigError, match="no store here"):
        Store(tmp_path / "nowhere", create=False)
    (tmp_path / "half").mkdir()
    (tmp_path / "half/store.json.123.tmp").write_text("")
    assert Store(tmp_path / "half").runs() == [], (
        "a creation that was killed does not block the next"
    )
    (tmp_path / "store").mkdir()
    (tmp_path / "store/store.json").write_text("{")
    with pytest.raises(CorruptError) as caught:
        Store(tmp_path / "store")
    (tmp_path / "store/store.json").write_text(re.search("{.*}", caught.value.next)[0])
    assert Store(tmp_path / "store").runs() == []
    for other in (FORMAT - 1, FORMAT + 1, str(FORMAT), None):
        (tmp_path / "store/store.json").write_text(json.dumps({"format": other, "id": "x"}))
        with pytest.raises(CorruptError, match=f"format {other}, expected {FORMAT}") as caught:
            Store(tmp_path / "store")
        assert caught.value.next.startswith("take the Quiver that wrote it")


def test_a_folder_with_a_name_that_no_run_has_is_no_run(store):
    version = commit(store)
    for name in ("a.tmp", "a..old", "A copy"):
        shutil.copytree(Path(store.url) / "a", Path(store.url) / name)
    assert list(store.refs()) == [version.ref] and verify(store) == (1, [])


def test_a_commit_where_git_is_not_installed(store, monkeypatch):
    environment.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit(store).manifest.environment["git_commit"] == ""
    environment.cache_clear()


def test_verify_finds_a_missing_input(store):
    first = commit(store)
    commit(store, Settings(seed=1), inputs={"other": first})
    first.files.folder.rename(first.files.folder.with_name("v000077"))
    _, bad = verify(store, "a/logprobs@2")
    assert [error.code for error in bad] == ["E-LINEAGE"]
    assert bad[0].object == "a/logprobs@2" and bad[0].message == "its input a/logprobs@1 is gone"


def test_others_may_read_what_a_library_wrote_for_its_owner_alone(store):
    about = {"stage": "policy", "stage_version": 1, "config": Settings(), "inputs": {}}
    with begin(store, "a", "policy", **about) as work:
        (work.folder / "model.safetensors").write_bytes(b"weights")
        (work.folder / "model.safetensors").chmod(0o600)
        version = work.commit()
    assert version.files.path("model.safetensors").stat().st_mode & 0o777 == 0o644


def test_two_that_make_a_store_at_once_agree_on_its_id(tmp_path, monkeypatch):
    path = tmp_path / "new"
    others = []
    real = disk.make_folder

    def make_folder(folder):
        real(folder)
        monkeypatch.undo()
        others.append(Store(path))

    monkeypatch.setattr(disk, "make_folder", make_folder)
    assert Store(path).id == others[0].id == Store(path).id


def unfinished(store, kind: str) -> list[str]:
    return sorted(path.name for path in (Path(store.url) / "a" / kind / ".work").iterdir())


def test_nothing_stays_of_a_process_that_died_between_publishing_and_clearing(store):
    pid = os.fork()
    if not pid:
        with work_on(store) as work, failing("commit.renamed:kill"):
            work.write(0, table(0))
            work.commit()
    os.waitpid(pid, 0)
    assert store.numbers("a", "logprobs") == [1] and unfinished(store, "logprobs") != []
    collect(store, Rule(), apply=True)
    assert unfinished(store, "logprobs") == []


def test_forced_work_at_what_is_finished_is_left_alone(store):
    first = commit(store)
    with work_on(store, force=True) as forced:
        forced.write(0, table(0))
        commit(store, Settings(seed=1))
        assert forced.commit().ref.version == 3
    assert store.numbers("a", "logprobs") == [first.ref.version, 2, 3]


def test_the_unfinished_work_of_every_kind_is_cleared(store):
    plan = Plan(store, "logprobs", 1, Settings(), "a", ("rollouts", "logprobs"))
    with open_staging(plan) as staging:
        staging.writers["rollouts"].write_note("cut", {"rows_per_shard": 1})
    assert unfinished(store, "rollouts") == [f"{plan.run_key}.0.notes"]
    commit(store)
    with open_staging(plan) as staging:
        assert staging.committed
    assert unfinished(store, "rollouts") == unfinished(store, "logprobs") == []


def asleep(ending: str, act):
    """Let this process sleep once, right before it renames a folder to a name with this ending;
    others do `act` meanwhile."""
    acts = [act]

    def around(name, path, call):
        if name == "rename" and acts and re.fullmatch(f".*{ending}", path):
            acts.pop()()
        return call()

    return watched(around)


CLOSING, PUBLISHING = r"/\.work/[0-9a-f]{64}\.0\.[0-9a-f]{12}", "/v000001"


@pytest.mark.parametrize("ending", [CLOSING, PUBLISHING])
def test_of_a_sleeper_and_the_process_that_took_over_one_commits(store, ending):
    """The other has begun, and found the shards, when the sleeper wakes. It either publishes them
    in time, and the other finds that; or they were taken back."""

    def take_over():
        work.staging.lease.release()
        other.append(stack.enter_context(work_on(store)))
        assert other[0].is_finished(0) and other[0].is_finished(1)

    other = []
    with ExitStack() as stack:
        with suppress(BusyError), work_on(store) as work, asleep(ending, take_over):
            for index in range(2):
                work.write(index, table(2 * index))
            work.commit()
        assert bool(work.done) == (ending == CLOSING)
        other[0].commit()
    assert other[0].done.ref.version == 1 and other[0].done.table().num_rows == 4
    assert verify(store) == (1, []) and unfinished(store, "logprobs") == []


def test_who_slept_before_the_last_look_at_its_shards_is_told_and_throws_nothing_away(store):
    with ExitStack() as stack:
        with pytest.raises(BusyError, match="took over this work"), work_on(store) as work:
            work.write(0, table(0))
            work.write(1, table(2))
            work.staging.lease.release()
            other = stack.enter_context(work_on(store))
            other.drop(1)
            work.take_shards(2)
            work.commit()
        assert other.is_finished(0)
