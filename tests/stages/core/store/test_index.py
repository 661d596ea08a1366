"""The index of a kind: found in it what the manifests say, trusted no further, made anew from them."""

import builtins
import json
import multiprocessing
import os
import shutil
import time
import zlib

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import CorruptError
from quiver.stages.core.store import Store
from quiver.stages.core.store import storage as storage_module
from quiver.stages.core.store.ledger import Ledger
from quiver.stages.core.store.retention import quarantine, remove
from tests.stages.core.store.test_store import Settings, commit


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Keys of the objects that are read."""
    keys = []
    real = storage_module.Storage.read

    def read(self, key, *limits):
        keys.append(key)
        return real(self, key, *limits)

    monkeypatch.setattr(storage_module.Storage, "read", read)
    return keys


def test_finding_opens_as_few_files_with_many_versions_as_with_few(store, reads):
    counts = []
    for number in (3, 12):
        while len(store.numbers("a", "logprobs")) < number:
            commit(store, Settings(seed=len(store.numbers("a", "logprobs"))), shards=1)
        version = store.open("a/logprobs@2")
        reads.clear()
        assert store.find("a", "logprobs", version.manifest.run_key).ref == version.ref
        assert store.find("a", "logprobs", "0" * 64) is None
        counts.append(len(reads))
    assert counts == [3, 3], "the index twice, and the one manifest"


def test_a_commit_opens_as_few_files_with_many_versions_as_with_few(store, reads, monkeypatch):
    counts = []
    opened = []
    real = builtins.open
    monkeypatch.setattr(
        builtins,
        "open",
        lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more),
    )
    for number in (3, 12):
        while len(store.numbers("a", "logprobs")) < number:
            commit(store, Settings(seed=len(store.numbers("a", "logprobs"))), shards=1)
        reads.clear()
        opened.clear()
        commit(store, Settings(seed=100 + number), shards=1)
        counts.append((len(reads), len(opened)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "damage",
    [
        "lost",
        "torn",
        "flipped",
        "state",
        "number",
        "nested",
        "no file",
        "no folder",
        "resealed",
    ],
)
def test_it_is_made_anew_from_the_manifests(store, damage):
    versions = [commit(store, Settings(seed=seed), shards=1) for seed in range(3)]
    path = store.path / "a/logprobs/.index/versions"
    before = path.read_text()
    time.sleep(0.2)  # the folder's time is no longer of just now
    if damage == "lost":
        shutil.rmtree(path.parent)
    elif damage == "torn":
        path.write_text(before[: len(before) // 2])
    elif damage == "flipped":
        path.write_text(before.replace(versions[1].manifest.run_key, "f" * 64))
    elif damage == "state":
        path.write_text(before.replace('"folder"', '"folded"'))
    elif damage == "number":
        path.write_text(before.replace("[2, ", "[7, "))
    elif damage == "nested":
        path.write_text("[" * 200_000)
    elif damage == "no file":
        path.unlink()
        path.mkdir()
    elif damage == "no folder":
        shutil.rmtree(path.parent)
        path.parent.touch()
    else:  # resealed: as nobody writes it, and with the checksum that fits
        *lines, last = before.splitlines()
        lines = "\n".join(lines).replace('"whole", ', "") + "\n"
        state = {**json.loads(last), "crc32": zlib.crc32(lines.encode())}
        path.write_text(f"{lines}{json.dumps(state)}\n")
    for version in versions:
        found = Store(store.path).find("a", "logprobs", version.manifest.run_key)
        assert found.ref == version.ref
    entries = {entry.number: entry.run_key for _, entry in store.entries("a")}
    assert entries == {v.ref.version: v.manifest.run_key for v in versions}


def test_versions_that_come_or_go_by_hand_are_seen(store):
    versions = [commit(store, Settings(seed=seed), shards=1) for seed in range(3)]
    folder = versions[1].files.folder
    run_key = versions[1].manifest.run_key
    elsewhere = store.path.with_name("elsewhere")
    shutil.move(folder, elsewhere)
    assert store.find("a", "logprobs", run_key) is None
    shutil.move(elsewhere, folder)
    assert store.find("a", "logprobs", run_key).ref == versions[1].ref


def test_two_changes_within_one_tick_of_a_coarse_clock_are_two(store, monkeypatch):
    """A file system that counts whole seconds: the folder's times are the same after a version more
    has come."""
    versions = [commit(store, Settings(seed=seed), shards=1) for seed in range(2)]
    run_keys = [version.manifest.run_key for version in versions]
    elsewhere = store.path.with_name("elsewhere")
    second = 1_000_000_000
    tick = (time.time_ns() - second // 2) // second * second
    monkeypatch.setattr(storage_module.Storage, "stamp", lambda *_: (tick, tick, 1))
    shutil.move(versions[1].files.folder, elsewhere)
    assert [bool(store.find("a", "logprobs", key)) for key in run_keys] == [True, False]
    shutil.move(elsewhere, versions[1].files.folder)
    assert [bool(store.find("a", "logprobs", key)) for key in run_keys] == [True, True]


def test_a_version_that_comes_between_two_looks_is_seen(store, monkeypatch):
    """Its process dies before it notes it, so nobody else would."""
    commit(store, Settings(seed=0), shards=1)
    kept = store.path.parent / "kept"
    second = commit(store, Settings(seed=1), shards=1)
    shutil.move(second.files.folder, kept)
    (store.path / "a/logprobs/.index/versions").unlink()
    looks = []
    real = storage_module.Storage.stamp

    def stamp(self, key):
        looks.append(key)
        if looks.count("a/logprobs") == 2 and kept.exists():  # the first finds no index
            shutil.move(kept, second.files.folder)
        return real(self, key)

    monkeypatch.setattr(storage_module.Storage, "stamp", stamp)
    index = store.index("a", "logprobs")
    assert [entry.number for entry in index.entries()] == [1]
    assert not kept.exists()
    time.sleep(0.15)  # until then each look lists the folder
    assert [entry.number for entry in index.entries()] == [1, 2]


def test_a_manifest_that_was_torn_and_mended_is_seen(store):
    version = commit(store, shards=1)
    run_key = version.manifest.run_key
    path = version.files.folder / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    ((_, entry),) = store.entries("a")
    assert entry.error.startswith("E-CORRUPT a/logprobs@1")
    assert store.find("a", "logprobs", run_key) is None
    shutil.rmtree(store.path / "a/logprobs/.index")
    assert store.find("a", "logprobs", run_key) is None
    path.write_bytes(whole)
    assert store.find("a", "logprobs", run_key).ref == version.ref
    ((_, entry),) = store.entries("a")
    assert entry.error == "" and entry.rows == 2


def test_a_store_that_can_not_be_written_is_read(store, monkeypatch):
    version = commit(store, shards=1)
    assert not (store.path / "a/logprobs/.index").exists(), "nobody has asked yet"

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(storage_module, "make_folder", refuse)
    assert store.find("a", "logprobs", version.manifest.run_key).ref == version.ref


def test_versions_are_seen_beside_an_older_copy_that_was_put_back(store):
    """`cp -a` brings the folder's old modification time and the old index."""
    commit(store, Settings(seed=0), shards=1)
    store.find("a", "logprobs", "0" * 64)
    copy = store.path.with_name("copy")
    shutil.copytree(store.path, copy)
    second = commit(store, Settings(seed=1), shards=1)
    shutil.copytree(copy, store.path, dirs_exist_ok=True)
    time.sleep(0.2)  # the folder's time is no longer of just now
    assert store.find("a", "logprobs", second.manifest.run_key).ref == second.ref
    assert [ref.version for ref, _ in store.entries("a")] == [1, 2]
    assert commit(store, Settings(seed=2), shards=1).ref.version == 3


def test_a_lower_number_that_is_made_again_does_not_hide_the_highest(store):
    versions = [commit(store, Settings(seed=seed), shards=1) for seed in range(3)]
    index = store.index("a", "logprobs")
    index.numbers_with("0" * 64)
    folder = versions[0].files.folder
    shutil.move(folder, store.path / "first")
    index.numbers_with("0" * 64)
    shutil.move(store.path / "first", folder)
    index.add(versions[0].manifest)
    assert [entry.number for entry in index.entries()] == [1, 2, 3]
    assert commit(store, Settings(seed=3), shards=1).ref.version == 4


def test_a_deleted_version_that_is_made_again_has_its_number(store):
    """So what was made of it is still whole, and `latest` is what it was."""
    first = commit(store, Settings(seed=0), shards=1)
    for shards in (2, 3):
        commit(store, Settings(seed=shards), shards=shards, inputs={"other": first})
    shutil.rmtree(first.files.folder)
    assert [ref.version for ref, _ in store.entries("a")] == [2, 3]
    assert [error.code for error in verify(store)[1]] == ["E-LINEAGE"] * 2
    assert str(commit(store, Settings(seed=3), shards=4).ref) == "a/logprobs@4"
    assert commit(store, Settings(seed=0), shards=1).ref == first.ref
    assert [ref.version for ref, _ in store.entries("a")] == store.numbers("a", "logprobs")
    assert verify(store) == (4, [])
    assert str(store.resolve("a/logprobs@latest")) == "a/logprobs@4"
    assert str(commit(store, Settings(seed=0), shards=1, force=True).ref) == "a/logprobs@5"


def test_so_has_one_whose_manifest_was_torn_before_it_was_deleted(store):
    versions = [commit(store, Settings(seed=shards), shards=shards) for shards in (1, 2, 3)]
    (versions[1].files.folder / "manifest.json").write_bytes(b"{")
    commit(store, Settings(seed=4), shards=4)
    shutil.rmtree(versions[0].files.folder)
    assert [entry.state for _, entry in store.entries("a")] == ["torn", "whole", "whole"]
    shutil.rmtree(versions[1].files.folder)
    for version, shards in ((versions[1], 2), (versions[0], 1)):
        assert commit(store, Settings(seed=shards), shards=shards).ref == version.ref


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_number_is_never_given_to_other_content(store, is_lost):
    """Also the highest one, whose folder was deleted by hand; also where the ledger was lost, so
    that nothing but the versions themselves says what was given."""
    versions = [commit(store, Settings(seed=shards), shards=shards) for shards in (1, 2)]
    if is_lost:
        shutil.rmtree(store.path / "a/logprobs/.ledger")
        shutil.rmtree(store.path / "a/logprobs/.index", ignore_errors=True)
        store.find("a", "logprobs", "0" * 64)
    shutil.rmtree(versions[1].files.folder)
    shutil.rmtree(store.path / "a/logprobs/.index", ignore_errors=True)
    assert str(commit(store, Settings(seed=3), shards=3).ref) == "a/logprobs@3"
    assert commit(store, Settings(seed=2), shards=2).ref == versions[1].ref
    assert commit(store, Settings(seed=1), shards=1, force=True).ref.version == 4


def test_nor_is_that_of_a_version_of_which_all_is_deleted(store):
    """As `find -name 'v000002*' -delete` does."""
    for shards in (1, 2):
        commit(store, Settings(seed=shards), shards=shards)
    store.find("a", "logprobs", "0" * 64)
    folder = store.path / "a/logprobs"
    shutil.rmtree(folder / "v000002")
    for path in folder.glob(".ledger/v000002*"):
        path.unlink()
    assert [ref.version for ref, _ in store.entries("a")] == [1]
    assert commit(store, Settings(seed=3), shards=3).ref.version == 3
    assert [path.name for path in folder.glob(".ledger/highest*")] == ["highest-000003"]
    assert verify(store) == (2, [])


def test_the_highest_number_may_have_more_digits(store):
    commit(store, Settings(seed=1), shards=1)
    (store.path / "a/logprobs/.ledger/highest-000001").rename(
        store.path / "a/logprobs/.ledger/highest-1000000"
    )
    assert commit(store, Settings(seed=2), shards=2).ref.version == 1_000_001


def test_a_process_that_dies_before_it_notes_its_number_leaves_that_to_the_next(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "note", lambda *_: os._exit(9))
        context = multiprocessing.get_context("fork")
        process = context.Process(
            target=commit, args=(store, Settings(seed=1)), kwargs={"shards": 1}
        )
        process.start()
        process.join()
    assert process.exitcode == 9
    made = store.open("a/logprobs@1")
    commit(store, Settings(seed=2), shards=2)
    shutil.rmtree(made.files.folder)
    assert str(commit(store, Settings(seed=3), shards=3).ref) == "a/logprobs@3"


def test_a_copy_of_a_version_under_another_number_takes_no_tombstone_back(store, tmp_path):
    """Its manifest names the number of the one that was deleted."""
    first, second = (commit(store, Settings(seed=shards), shards=shards) for shards in (1, 2))
    shutil.copytree(first.files.folder, tmp_path / "copy")
    remove(store, "a/logprobs@1")
    shutil.copytree(tmp_path / "copy", store.path / "a/logprobs/v000009")
    ref, _ = quarantine(store, "a/logprobs@9")
    assert ref.version == 9
    assert store.ledger("a", "logprobs").tombstone(1) is not None
    assert verify(store) == (1, [])
    assert commit(store, Settings(seed=3), shards=3).ref.version == 10
    assert store.open("a/logprobs@2").manifest == second.manifest


def test_a_copy_under_the_highest_number_is_told_before_anything_is_committed(store):
    first = commit(store, Settings(seed=1), shards=1)
    shutil.copytree(first.files.folder, store.path / "a/logprobs/v999999999999")
    with pytest.raises(CorruptError, match="is the highest number") as caught:
        commit(store, Settings(seed=2), shards=2)
    assert caught.value.next == "quiver verify a/logprobs@999999999999 --quarantine"
    quarantine(store, "a/logprobs@999999999999")
    assert commit(store, Settings(seed=2), shards=2).ref.version == 2
