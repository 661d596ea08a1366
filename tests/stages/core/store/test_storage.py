"""What every storage must do: the store above it relies on this and on nothing else.

A second storage is one more entry of STORAGES.
"""

import errno
import hashlib
import threading

import numpy as np
import pyarrow as pa
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from quiver.schemas.errors import CorruptError
from quiver.stages.core.store.storage import Storage, error_number
from tests.faults.seam import watched

STORAGES = {"posix": Storage}


@pytest.fixture(params=STORAGES)
def storage(request, tmp_path):
    return STORAGES[request.param](tmp_path)


def test_an_object_is_read_as_it_was_written_last(storage):
    storage.make_prefix("run/kind")
    storage.write("run/kind/note", b"first")
    storage.write("run/kind/note", b"second, longer")
    assert storage.read("run/kind/note") == b"second, longer"
    assert storage.size("run/kind/note") == 14
    assert storage.sha256("run/kind/note") == hashlib.sha256(b"second, longer").hexdigest()


def test_an_object_that_is_not_there_is_said_not_to_be(storage):
    storage.write("object", b"")
    for key in ("nowhere", "nowhere/deep", "object/below"):
        assert not storage.exists(key)
        assert storage.stamp(key) is None
        for ask in (storage.read, storage.size, storage.sha256, storage.read_table):
            with pytest.raises(FileNotFoundError):
                ask(key)
    assert storage.list("nowhere") == storage.list("nowhere/deep") == []
    with pytest.raises(CorruptError, match="is not a folder"):
        storage.list("object/below")
    assert storage.renew("nowhere") is False
    storage.delete("nowhere")
    storage.delete_tree("nowhere")


def test_a_prefix_is_no_object(storage):
    storage.make_prefix("run/kind")
    assert storage.exists("run/kind")
    with pytest.raises(CorruptError, match="is not a file"):
        storage.read("run/kind")
    with pytest.raises(CorruptError, match="is not a file"):
        storage.write("run/kind", b"")


def test_an_object_under_way_is_not_seen_and_leaves_nothing_when_it_fails(storage):
    storage.write("note", b"old")
    with pytest.raises(OSError, match="no space"), storage.create("note") as file:
        file.write(b"half")
        assert storage.read("note") == b"old" and storage.list("") == ["note"]
        raise OSError(errno.ENOSPC, "no space")
    assert storage.read("note") == b"old"
    assert storage.list("") == ["note"]


def test_a_writer_knows_size_and_sha256_of_what_it_wrote(storage):
    with storage.create("note") as file:
        file.write(b"one ")
        file.write(memoryview(b"two"))
    assert file.bytes == storage.size("note") == 7
    assert file.sha.hexdigest() == storage.sha256("note")


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
    assert outcomes.count(True) == 1
    assert storage.read("leases/1") == bodies[outcomes.index(True)]
    with pytest.raises(FileExistsError), storage.create("leases/1", if_absent=True) as file:
        file.write(b"late")
    assert storage.read("leases/1") == bodies[outcomes.index(True)]
    assert storage.list("leases") == ["1"]


def test_a_stamp_changes_with_each_write_and_renewal(storage):
    storage.write("lease", b"same")
    stamps = {storage.stamp("lease")}
    storage.write("lease", b"same")
    stamps.add(storage.stamp("lease"))
    assert storage.renew("lease") is True
    stamps.add(storage.stamp("lease"))
    assert len(stamps) == 3
    assert storage.read("lease") == b"same"
    assert storage.stamp("lease") == storage.stamp("lease")


def test_names_are_listed_one_level_or_all(storage):
    for key in ("kind/b/two", "kind/a", "kind/b/deep/one"):
        storage.make_prefix(key.rpartition("/")[0])
        storage.write(key, b"")
    assert storage.list("kind") == ["a", "b"]
    assert storage.list_files("kind") == ["a", "b/deep/one", "b/two"]


def test_a_copy_outlives_its_original(storage):
    storage.make_prefix("folder")
    storage.write("original", b"bytes")
    storage.copy_into("original", "folder/copy")
    storage.delete("original")
    assert storage.read("folder/copy") == b"bytes"


def test_what_is_published_is_there_at_once_and_only_where_nothing_is(storage):
    for staged in ("staged-1", "staged-2"):
        storage.make_prefix(f"{staged}/model")
        storage.write(f"{staged}/manifest.json", staged.encode())
        storage.write(f"{staged}/model/weights", b"weights")
        storage.sync_folders(staged)
    assert storage.publish("staged-1", "v1") is True
    assert storage.publish("staged-2", "v1") is False
    assert storage.list_files("v1") == ["manifest.json", "model/weights"]
    assert storage.read("v1/manifest.json") == b"staged-1"
    assert not storage.exists("staged-1")
    assert storage.exists("staged-2/manifest.json")


def test_what_is_deleted_is_gone_with_all_below(storage):
    for key in ("kind/v1/manifest", "kind/v2/manifest"):
        storage.make_prefix(key.rpartition("/")[0])
        storage.write(key, b"")
    storage.delete_tree("kind/v1")
    assert storage.list("kind") == ["v2"]
    storage.delete("kind/v2/manifest")
    assert storage.list_files("kind") == []
    storage.delete("kind/v2")
    assert storage.list("kind") == []


def test_a_folder_that_another_makes_just_then_is_deleted_too(storage):
    def around(name, path, call):
        if name == "unlink":
            storage.make_prefix("a/b")
        return call()

    with watched(around):
        storage.delete("a/b")
    assert storage.list("a") == []


def test_a_table_that_can_not_be_parsed_is_an_arrow_error(storage):
    table = pa.table({"ids": [1, 2, 3]})
    with storage.create("part") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert storage.read_table("part") == table
    storage.write("torn", storage.read("part")[:-20])
    with pytest.raises(pa.ArrowException):
        storage.read_table("torn")


def test_a_link_to_elsewhere_is_told(storage, tmp_path):
    storage.write("object", b"")
    assert not storage.is_linked("object")
    storage.path("link").symlink_to(tmp_path.parent)
    storage.path("loop").symlink_to("loop")
    assert storage.is_linked("link/object")
    assert storage.is_linked("loop")
    for ask in (storage.read, storage.list):
        with pytest.raises(CorruptError, match="is not a f"):
            ask("loop")


def test_the_number_of_a_systems_error_is_read_from_what_safetensors_says(tmp_path):
    with pytest.raises(SafetensorError) as caught:
        save_file({"weight": np.zeros(1)}, tmp_path / "nowhere/model.safetensors")
    assert error_number(caught.value) == errno.ENOENT
