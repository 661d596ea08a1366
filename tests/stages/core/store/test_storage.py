"""What every storage must do: the store above it relies on this and on nothing else.

A second storage is one more entry of STORAGES.
"""

import errno
import hashlib
import os
import threading
from contextlib import contextmanager, suppress

import numpy as np
import pyarrow as pa
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from quiver.schemas.errors import CorruptError
from quiver.stages.core.files import MOST_BYTES, error_number
from quiver.stages.core.store.disk import Disk
from quiver.stages.core.store.storage import list_numbers, read_table, size_and_sha256
from tests.faults.seam import watched

STORAGES = {"posix": Disk}
TOKENS = "0123456789ab", "ba9876543210"


@pytest.fixture(params=STORAGES)
def storage(request, tmp_path):
    return STORAGES[request.param](tmp_path)


def test_an_object_is_read_as_it_was_written_last(storage):
    storage.put("run/kind/note", b"first")
    storage.put("run/kind/note", b"second, longer")
    assert storage.read("run/kind/note") == b"second, longer"
    sha256 = hashlib.sha256(b"second, longer").hexdigest()
    assert size_and_sha256(storage, "run/kind/note") == (14, sha256)


def test_an_object_that_is_not_there_is_said_not_to_be(storage):
    storage.put("object", b"")
    for key in ("nowhere", "nowhere/deep", "object/below"):
        for ask in (Disk.read, size_and_sha256, read_table):
            with pytest.raises(FileNotFoundError):
                ask(storage, key)
        assert storage.files(key) == {}
    assert storage.list("nowhere") == storage.list("nowhere/deep") == []
    with pytest.raises(CorruptError, match="is not a folder"):
        storage.list("object/below")
    stamp = storage.put("gone", b"")
    storage.delete("nowhere", "nowhere/deep", "nowhere/", "gone")
    assert storage.put("gone", b"", stamp) is None and storage.list("") == ["object"]


def test_a_prefix_and_an_object_that_is_too_large_are_no_small_objects(storage):
    storage.put("run/kind", b"x" * (MOST_BYTES + 1))
    with pytest.raises(CorruptError, match=r"has 8388609 bytes, at most 8388608"):
        storage.read("run/kind")
    storage.put("run/kind", b"x" * MOST_BYTES)
    assert len(storage.read("run/kind")) == MOST_BYTES
    for ask in (Disk.read, size_and_sha256):
        with pytest.raises(CorruptError, match="is not a file"):
            ask(storage, "run")


def test_an_object_under_way_is_not_seen_and_leaves_nothing_when_it_fails(storage):
    storage.put("note", b"old")
    failures = [errno.EIO]

    def around(name, path, call):
        if name == "fsync" and failures:
            assert storage.read("note") == b"old" and storage.list("") == ["note"]
            raise OSError(failures.pop(), "Input/output error")
        return call()

    for write in (storage.put, storage.put_if_absent):
        failures[:] = [errno.EIO]
        with watched(around), pytest.raises(OSError, match="Input/output"):
            write("note", b"new")
    assert storage.read("note") == b"old"
    assert [path.name for path in storage.local("").iterdir()] == ["note"]


def test_of_many_who_put_an_object_at_once_one_does(storage):
    """The first byte tells whose it is: it is nobody else's, and whole."""
    bodies = [bytes([number]) * 10_000 for number in range(8)]
    outcomes = [None] * len(bodies)
    barrier = threading.Barrier(len(bodies))

    def put(number):
        barrier.wait()
        outcomes[number] = storage.put_if_absent("leases/1", bodies[number])

    threads = [threading.Thread(target=put, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (stamp,) = filter(None, outcomes)
    assert storage.put_if_absent("leases/1", b"late") is None
    assert storage.read("leases/1") == bodies[outcomes.index(stamp)]
    assert storage.put("leases/1", b"again", stamp)
    assert storage.list("leases") == ["1"]


@pytest.mark.parametrize("moment", ["before it is there", "after"])
@pytest.mark.parametrize("name", [False, True])
def test_an_object_is_put_where_another_process_deletes_the_folder_just_then(storage, name, moment):
    deletions = [1, 1]

    def around(call_name, path, call):
        if call_name == ("unlink" if moment == "after" else "link") and deletions:
            deletions.pop()
            if moment == "after":
                call()
            storage.delete("a/b/")
            if moment == "after":
                return None
        return call()

    with watched(around):
        assert storage.put_if_absent("a/b/object", b"bytes", flush_name=name)
    assert storage.read("a/b/object") == b"bytes"


def test_with_a_stamp_an_object_is_replaced_that_was_not_changed_since(storage):
    first = storage.put("lease", b"first")
    second = storage.put("lease", b"second", first)
    assert storage.put("lease", b"late", first) is None
    storage.put("lease", b"third")
    assert storage.put("lease", b"late", second) is None
    assert storage.read("lease") == b"third"


def test_names_are_listed_one_level_or_all(storage):
    for key in (
        "kind/b/two",
        "kind/a",
        "kind/b/deep/000002",
        "kind/b/deep/000010.json",
        "kind/b/deep/1000003.json",
    ):
        storage.put(key, b"x")
    storage.put("kind.tmp", b"a name that a user chose")
    assert storage.list("") == ["kind", "kind.tmp"] and storage.list("kind") == ["a", "b"]
    assert list_numbers(storage, "kind/b/deep") == [2]
    assert list_numbers(storage, "kind/b/deep", ".json") == [10, 1000003]
    files = storage.files("kind")
    assert list(files) == [
        "a",
        "b/deep/000002",
        "b/deep/000010.json",
        "b/deep/1000003.json",
        "b/two",
    ]
    assert {size for size, _ in files.values()} == {1}
    os.utime(storage.local("kind/b/deep/000002"), (2**31, 2**31))
    assert storage.files("kind/b/deep")["000002"] == (1, 2**31)


@contextmanager
def flushes():
    """A list of the paths that are flushed, in this order."""
    paths = []

    def around(name, path, call):
        if name == "fsync":
            paths.append(path)
        return call()

    with watched(around):
        yield paths


def test_a_file_that_a_library_wrote_is_flushed_with_its_name(storage):
    path = storage.folder("kind/work") / "weights"
    path.write_bytes(b"ww")
    with flushes() as paths:
        assert storage.put_file("kind/work/weights") == (2, hashlib.sha256(b"ww").hexdigest())
    assert paths == [str(path), str(path.parent)]


def test_a_file_from_elsewhere_is_copied(storage, tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "file"
    path.write_bytes(b"its bytes")
    expected = 9, hashlib.sha256(b"its bytes").hexdigest()
    assert storage.put_file("a/b/file", path) == expected
    assert storage.read("a/b/file") == path.read_bytes() == b"its bytes"


def test_names_that_other_processes_made_are_flushed(storage):
    storage.put("kind/object", b"")
    with flushes() as paths:
        storage.flush("kind")
        storage.flush("nowhere")
    assert paths == [str(storage.local("kind"))]


def test_a_store_of_another_user_is_foreign(storage, monkeypatch):
    storage.put("store.json", b"{}")
    assert not storage.is_foreign
    monkeypatch.setattr(os, "geteuid", lambda: storage.local("store.json").stat().st_uid + 1)
    assert storage.is_foreign


def test_what_is_deleted_is_gone_with_all_below(storage):
    for key in ("kind/v1/manifest", "kind/v2/manifest"):
        storage.put(key, b"")
    storage.delete("kind/v1/")
    assert storage.list("kind") == ["v2"]
    storage.delete("kind/v2/manifest")
    assert storage.files("kind") == {} and storage.list("kind") == ["v2"]


def test_what_a_process_left_that_died_while_it_deleted_is_deleted(storage):
    def die(name, path, call):
        if name == "unlink":
            raise KeyboardInterrupt
        return call()

    storage.put("kind/v1/manifest", b"")
    with watched(die), pytest.raises(KeyboardInterrupt):
        storage.delete("kind/v1/")
    (name,) = storage.list("kind")
    assert name.endswith(".gone")
    storage.delete(f"kind/{name}/")
    assert storage.list("kind") == []


# -- versions


def sizes(storage, prefix):
    return {name: size for name, (size, _) in storage.files(prefix).items()}


def publish(storage, token=TOKENS[0], target="kind/v1", **sizes):
    return storage.publish("kind/work", token, target, token.encode(), sizes or {"weights": 2})


def test_what_is_published_is_there_at_once_and_only_where_nothing_is(storage):
    """What is no part of it is thrown away."""
    for token in TOKENS:
        storage.put("kind/work/weights", b"ww")
        storage.put("kind/work/left-over", b"")
        assert publish(storage, token) is (token == TOKENS[0])
    assert sizes(storage, "kind/v1") == {"manifest.json": 12, "weights": 2}
    assert storage.read("kind/v1/manifest.json") == TOKENS[0].encode()
    assert publish(storage, TOKENS[1], "kind/v2") is True
    assert sizes(storage, "kind/v2") == {"manifest.json": 12, "weights": 2}
    assert storage.list("kind") == ["v1", "v2"]


def test_a_version_is_flushed_with_the_names_of_its_kind_and_run(storage):
    storage.put("run/kind/work/deep/weights", b"ww")
    with flushes() as paths:
        storage.publish("run/kind/work", TOKENS[0], "run/kind/v1", b"{}", {"deep/weights": 2})
    closed = f"run/kind/work.{TOKENS[0]}"
    _, *folders = [os.path.relpath(path, storage.local("")) for path in paths]
    assert folders == [f"{closed}/deep", closed, "run", ".", "run/kind"]


def test_what_was_taken_away_is_not_published(storage):
    with pytest.raises(FileNotFoundError):
        publish(storage)
    storage.put("kind/work/weights", b"w")
    for sizes in ({"weights": 2}, {"weights": 1, "more": 1}):
        with pytest.raises(FileNotFoundError, match="taken away"):
            publish(storage, **sizes)
    assert storage.list("kind") == ["work"], "who works on it now has it back"
    assert publish(storage, weights=1)


def test_a_sleeper_takes_back_nothing_that_another_publishes(storage):
    """It finds that its own files were taken away when the other is about to publish them."""

    def wake(name, path, call):
        if name == "rename" and path.endswith("/v1"):
            storage.put("kind/work/late", b"")
            with pytest.raises(FileNotFoundError, match="taken away"):
                publish(storage, TOKENS[1])
        return call()

    storage.put("kind/work/weights", b"ww")
    with watched(wake):
        assert publish(storage) is True


@pytest.mark.parametrize("moment", range(6))
def test_what_the_dead_left_of_a_publication_is_taken_back(storage, moment):
    """Also by a second process, if the first one dies while it takes it back."""

    def dying_at(moment):
        calls = []

        def around(name, path, call):
            calls.append(name)
            if name == "rename" and calls.count("rename") > moment:
                raise KeyboardInterrupt
            return call()

        return watched(around)

    storage.put("kind/work/shard-1", b"1")
    storage.put("kind/work/shard-2", b"2")
    with dying_at(1), pytest.raises(KeyboardInterrupt):
        storage.publish(
            "kind/work", TOKENS[0], "kind/v1", b"manifest", {"shard-1": 1, "shard-2": 1}
        )
    storage.put("kind/work/shard-3", b"3")
    with dying_at(moment), suppress(KeyboardInterrupt):
        storage.reclaim("kind/work")
    storage.reclaim("kind/work")
    files = storage.files("kind/work")
    assert storage.list("kind") == ["work"] and files.keys() >= {"shard-1", "shard-2", "shard-3"}


def test_a_table_that_cannot_be_parsed_is_an_arrow_error(storage):
    table = pa.table({"ids": [1, 2, 3]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    storage.put("part", sink.getvalue())
    assert read_table(storage, "part") == table
    storage.put("torn", storage.read("part")[:-20])
    with pytest.raises(pa.ArrowException):
        read_table(storage, "torn")


@pytest.mark.parametrize("target", ["folder", "nowhere", "link"])
def test_a_folder_that_is_a_link_is_told(storage, target):
    storage.put("folder/deep/object", b"")
    storage.local("link").symlink_to(target)
    for ask, key in (
        (storage.list, "link"),
        (storage.files, "link"),
        (storage.list, "link/deep"),
        (storage.files, "link/deep"),
        (storage.read, "link/deep/object"),
    ):
        with pytest.raises(CorruptError, match=r"^E-CORRUPT link: is a link"):
            ask(key)
    with pytest.raises(CorruptError, match="is not a file"):
        storage.read("link")


def test_the_store_may_be_in_a_folder_that_is_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    storage = Disk(tmp_path / "link")
    storage.put("kind/object", b"")
    assert storage.list("") == ["kind"]
    assert storage.list("kind") == list(storage.files("kind")) == ["object"]
    assert storage.read("kind/object") == b""


def test_the_number_of_a_systems_error_is_read_from_what_safetensors_says(tmp_path):
    with pytest.raises(SafetensorError) as caught:
        save_file({"weight": np.zeros(1)}, tmp_path / "nowhere/model.safetensors")
    assert error_number(caught.value) == errno.ENOENT
