"""The user's cache: hashes that are remembered unless a file may have changed, or they are to go
into a manifest; folders that are made once, whole or not at all, and never trusted blindly."""

import hashlib
import json
import logging
import os
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core import user_cache
from quiver.stages.core.files import sha256_of
from quiver.stages.core.run.runner import Call, find_outcome, run_stage
from quiver.stages.core.user_cache import hash_files
from quiver.stages.model import checkpoints
from quiver.stages.model.checkpoints import PolicyConfig
from tests.stages.conftest import LATER_NS
from tests.tiny import make_folder


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files outside a store whose bytes were read to hash them."""
    names = []

    def counted(path):
        if "store" not in path.parts:
            names.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(user_cache, "sha256_of", counted)
    return names


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"first")
    return path


def remembered(*paths):
    return hash_files(paths, remembered=True)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_bytes_are_read_once(cache, hashed, later, path):
    expected = [("weights.bin", sha256(b"first"))]
    assert [remembered(path) for _ in range(3)] == [expected] * 3
    assert hashed == ["weights.bin"]
    assert len(list(cache.iterdir())) == 1


def test_what_goes_into_a_manifest_is_computed_and_sets_the_memory_right(
    cache, hashed, later, path
):
    remembered(path)
    (entry,) = cache.iterdir()
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "content": "f" * 64}))
    assert remembered(path)[0][1] == "f" * 64
    assert hash_files([path])[0][1] == sha256(b"first") == remembered(path)[0][1]
    assert len(hashed) == 2


def test_who_waits_for_a_large_file_is_told_so_once(cache, later, path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="quiver")
    monkeypatch.setattr(user_cache, "_LARGE", 2**27)
    os.truncate(path, 2**27)
    for _ in range(2):
        remembered(path)
    assert caplog.messages == ["reading weights.bin (0.1 GB) for its hash"]


def test_a_changed_file_is_hashed_anew(cache, hashed, later, path):
    """Even of the same size, with the time of its last change put back: the inode's is not."""
    remembered(path)
    before = path.stat()
    path.write_bytes(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert remembered(path)[0][1] == sha256(b"other")
    replacement = path.with_name("new")
    replacement.write_bytes(b"third")
    replacement.replace(path)
    assert remembered(path)[0][1] == sha256(b"third")
    assert len(hashed) == 3


def test_a_file_that_changed_just_now_is_neither_remembered_nor_believed(
    cache, hashed, path, monkeypatch
):
    remembered(path)
    remembered(path)
    assert len(hashed) == 2 and not cache.exists()
    now = time.time_ns
    with monkeypatch.context() as patched:
        patched.setattr(user_cache.time, "time_ns", lambda: now() + LATER_NS)
        remembered(path)
    assert len(hashed) == 3 and cache.exists()
    remembered(path)
    assert len(hashed) == 4


def test_a_file_that_was_put_there_just_now_is_not_believed_whatever_its_old_date(
    cache, hashed, path
):
    """`cp -p` and `tar` write it now and put back the time of its last change."""
    os.utime(path, (0, 0))
    assert remembered(path) == remembered(path)
    assert len(hashed) == 2 and not cache.exists()


@pytest.mark.parametrize("text", ["{", "null", '{"content": "0"}'])
def test_a_broken_memory_is_none(cache, hashed, later, path, text):
    remembered(path)
    (entry,) = cache.iterdir()
    entry.write_text(text)
    assert remembered(path) == remembered(path) == [("weights.bin", sha256(b"first"))]
    assert len(hashed) == 2


def test_without_a_folder_for_it_nothing_is_remembered(tmp_path, later, path, monkeypatch, hashed):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert remembered(path) == remembered(path) == [("weights.bin", sha256(b"first"))]
    assert len(hashed) == 2


def test_a_link_is_the_file_that_it_leads_to(cache, hashed, later, path):
    link = path.with_name("link.bin")
    link.symlink_to(path)
    remembered(path)
    assert remembered(link) == [("link.bin", sha256(b"first"))] and len(hashed) == 1
    path.write_bytes(b"other")
    assert remembered(link) == [("link.bin", sha256(b"other"))]


def test_a_model_is_hashed_once_to_be_found_and_again_to_be_imported(
    store, cache, hashed, later, tmp_path
):
    folder = make_folder(tmp_path / "model")
    config = {"model": str(folder)}
    call = Call("policy", config, store.url, into="a")
    assert find_outcome(call) is None
    num_files = len(hashed)
    assert find_outcome(call) is None and len(hashed) == num_files
    run_stage("policy", config, store, into="a", in_process=True)
    assert len(hashed) == 2 * num_files
    assert find_outcome(call).ref == "a/policy@0" and len(hashed) == 2 * num_files


def test_a_model_that_changed_after_it_was_resolved_is_not_imported(store, tmp_path):
    folder = make_folder(tmp_path / "model")
    resolved = checkpoints.resolve(PolicyConfig(model=str(folder)))
    make_folder(folder, seed=1)
    with pytest.raises(ConfigError, match="hash expected"):
        run_stage("policy", resolved, store, into="a", in_process=True)
    with pytest.raises(ConfigError, match="hash expected"):
        checkpoints.resolve(resolved)
    assert list(store.versions()) == []


def test_what_is_resolved_is_found_without_the_model(store, tmp_path):
    folder = make_folder(tmp_path / "model")
    resolved = checkpoints.resolve(PolicyConfig(model=str(folder)))
    ref = run_stage("policy", resolved, store, into="a", in_process=True)
    folder.rename(tmp_path / "elsewhere")
    assert run_stage("policy", resolved, store, into="a", in_process=True) == ref


# -- folders

WHOLE = {"weights": b"w" * 1000, "config": b"c"}


@pytest.fixture
def models(cache) -> Path:
    return cache.with_name("models")


class Maker:
    """Writes two files and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "weights").write_bytes(b"w" * 1000)
        (folder / "config").write_text("c")


def filled(tmp_path: Path, name: str, make: Maker) -> dict[str, bytes]:
    """What a new folder holds, once it was filled."""
    folder = tmp_path / name
    folder.mkdir()
    user_cache.fill(folder, "models", "key", make)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_second_folder_is_a_copy(tmp_path, models):
    make = Maker()
    assert filled(tmp_path, "a", make) == filled(tmp_path, "b", make) == WHOLE
    (tmp_path / "b/weights").write_bytes(b"changed")  # a folder is its owner's
    assert filled(tmp_path, "c", make) == WHOLE and make.calls == 1
    user_cache.fill(tmp_path / "a", "models", "other", make)
    assert make.calls == 2 and sorted(os.listdir(models)) == ["key", "other"]


@pytest.mark.parametrize("damage", ["cut", "gone", "no hashes", "hashes cut"])
def test_a_damaged_folder_is_made_anew(tmp_path, models, damage):
    make = Maker()
    filled(tmp_path, "a", make)
    kept = models / "key"
    if damage == "cut":
        (kept / "weights").write_bytes(b"w" * 999)
    elif damage == "gone":
        (kept / "weights").unlink()
    elif damage == "no hashes":
        (kept / "sha256.json").unlink()
    else:
        (kept / "sha256.json").write_text("{")
    assert filled(tmp_path, "b", make) == WHOLE
    assert filled(tmp_path, "c", make) == WHOLE and make.calls == 2


def test_what_fails_leaves_nothing(tmp_path, models):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError("no such model")

    folder = tmp_path / "a"
    folder.mkdir()
    with pytest.raises(ValueError, match="no such model"):
        user_cache.fill(folder, "models", "key", fail)
    assert os.listdir(models) == [] and os.listdir(folder) == []


def test_without_a_usable_cache_it_is_made_in_place(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make = Maker()
    assert filled(tmp_path, "a", make) == filled(tmp_path, "b", make) == WHOLE
    monkeypatch.setenv("XDG_CACHE_HOME", "no/absolute/path")
    assert filled(tmp_path, "c", make) == WHOLE and make.calls == 3


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path, models):
    for name, age in (("old", 90_000), ("new", 60)):
        left = models / f"key-{name}.tmp"
        left.mkdir(parents=True)
        os.utime(left, (left.stat().st_mtime - age,) * 2)
    filled(tmp_path, "a", Maker())
    assert sorted(os.listdir(models)) == ["key", "key-new.tmp"]


def _fill_with_another(folder: Path, barrier) -> None:
    def make(work: Path) -> None:
        barrier.wait(20)  # both make it at the same time
        Maker()(work)

    folder.mkdir()
    user_cache.fill(folder, "models", "key", make)


def test_two_processes_at_once_both_have_it(tmp_path, models):
    context = get_context("fork")
    barrier = context.Barrier(2)
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [
        context.Process(target=_fill_with_another, args=(each, barrier)) for each in folders
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    for folder in folders:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == WHOLE
    assert os.listdir(models) == ["key"]
