"""Folders that the user's cache keeps: made once, whole or not at all, and never trusted blindly."""

import os
import shutil
from multiprocessing import get_context
from pathlib import Path

import pytest

from quiver.stages.common.models import user_cache


class Maker:
    """Writes two files and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "weights").write_bytes(b"w" * 1000)
        (folder / "config").write_text("c")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/quiver/models"


def filled(tmp_path: Path, name: str, make: Maker) -> dict[str, bytes]:
    """What a new folder holds, once it was filled."""
    folder = tmp_path / name
    folder.mkdir()
    user_cache.fill(folder, "models", "key", make)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WHOLE = {"weights": b"w" * 1000, "config": b"c"}


def test_the_second_folder_is_a_copy(tmp_path, cache):
    make = Maker()
    assert filled(tmp_path, "a", make) == filled(tmp_path, "b", make) == WHOLE
    assert make.calls == 1
    (tmp_path / "b/weights").write_bytes(b"changed")  # a folder is its owner's
    assert filled(tmp_path, "c", make) == WHOLE and make.calls == 1


def test_another_key_is_made_itself(tmp_path, cache):
    make = Maker()
    filled(tmp_path, "a", make)
    user_cache.fill(tmp_path / "a", "models", "other", make)
    assert make.calls == 2 and sorted(os.listdir(cache)) == ["key", "other"]


@pytest.mark.parametrize("damage", ["cut", "gone", "no hashes", "hashes cut"])
def test_a_damaged_folder_is_made_anew(tmp_path, cache, damage):
    make = Maker()
    filled(tmp_path, "a", make)
    kept = cache / "key"
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


def test_what_fails_leaves_nothing(tmp_path, cache):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError("no such model")

    folder = tmp_path / "a"
    folder.mkdir()
    with pytest.raises(ValueError, match="no such model"):
        user_cache.fill(folder, "models", "key", fail)
    assert os.listdir(cache) == [] and os.listdir(folder) == []


def test_without_a_usable_cache_it_is_made_in_place(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make = Maker()
    assert filled(tmp_path, "a", make) == filled(tmp_path, "b", make) == WHOLE
    monkeypatch.setenv("XDG_CACHE_HOME", "no/absolute/path")
    assert filled(tmp_path, "c", make) == WHOLE and make.calls == 3


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path, cache):
    for name, age in (("old", 90_000), ("new", 60)):
        left = cache / f"key-{name}.tmp"
        left.mkdir(parents=True)
        os.utime(left, (left.stat().st_mtime - age,) * 2)
    filled(tmp_path, "a", Maker())
    assert sorted(os.listdir(cache)) == ["key", "key-new.tmp"]


def _fill_with_another(folder: Path, barrier) -> None:
    def make(work: Path) -> None:
        barrier.wait(20)  # both make it at the same time
        Maker()(work)

    folder.mkdir()
    user_cache.fill(folder, "models", "key", make)


def test_two_processes_at_once_both_have_it(tmp_path, cache):
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
    assert os.listdir(cache) == ["key"]
    shutil.rmtree(cache)
