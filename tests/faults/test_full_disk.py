"""Not one more byte can be written: versions can still be deleted, and so make room."""

import os
import subprocess

import pytest

from quiver.flows.verification import verify
from quiver.stages.core.store import Store
from quiver.stages.core.store.collection import Rule, collect
from tests.flows.conftest import CLI
from tests.stages.core.store.histories import make_policy, make_table, visible

MEGABYTE = 1_000_000


@pytest.fixture(params=["tmpfs", "ext4"])
def store(request, tmp_path):
    """On a file system of 20 MB of its own."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    image = tmp_path / "image"
    commands = [["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", mounted]]
    if request.param == "ext4":
        image.touch()
        os.truncate(image, 20 * MEGABYTE)
        make = ["mkfs.ext4", "-q", "-m", "0", image]
        commands = [make, ["mount", "-o", "loop", image, mounted]]
    for command in commands:
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"{command[0]} is not permitted here")
    yield Store(mounted / "store")
    subprocess.run(["umount", mounted], check=True)


def fill(store: Store) -> None:
    """Until not one byte more fits."""
    names = iter(range(100_000))
    for size in (MEGABYTE, 4096, 1):
        try:
            while True:
                path = store.path.parent / f"fill-{next(names)}"
                with open(path, "wb", buffering=0) as file:
                    if file.write(b"x" * size) < size:
                        raise OSError
                    os.fsync(file.fileno())
        except OSError:
            continue
    with pytest.raises(OSError, match="No space"):
        (store.path / "one").write_bytes(b"x")


def free(store: Store) -> int:
    status = os.statvfs(store.path)
    return status.f_bavail * status.f_frsize


def test_rm_makes_room(store):
    for number in range(3):
        make_table(store, number)
    fill(store)
    before = free(store)
    command = [*CLI, "rm", "a/logprobs@1"]
    done = subprocess.run(
        [*command, "--store", str(store.path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert visible(store) == ["a/logprobs@2", "a/logprobs@3"] and free(store) > before
    assert store.ledger("a", "logprobs").has_tombstone(1) and verify(store)[1] == []
    assert not list(store.path.glob(".trash/*/*"))


def test_gc_makes_room_in_two_runs(store):
    for number in range(4):
        version = make_policy(store, number)
        (version.files.folder / "optimizer/state.safetensors").write_bytes(b"m" * MEGABYTE)
    for number in range(120):
        make_table(store, number)
    fill(store)
    rule = Rule(keep=1, moments=1, grace_seconds=0)
    collected = collect(store, rule, apply=True)
    assert collected.versions, "some went to the trash"
    for _ in range(8):
        collect(store, rule, apply=True)
    assert visible(store) == ["a/logprobs@120", "a/policy@3"]
    assert free(store) > 3 * MEGABYTE and (store.path / ".reserve").stat().st_size == 256 * 1024
    assert not list(store.path.glob(".trash/*/*"))


def test_a_store_without_a_reserve_has_its_indexes_for_that(store):
    for kind in ("logprobs", "policy"):
        for number in range(2):
            make_policy(store, number) if kind == "policy" else make_table(store, number)
    for run in "bcdefg":
        make_table(store, 0, run=run)
    (store.path / ".reserve").unlink()
    list(store.entries())
    fill(store)
    collect(store, Rule(), apply=True)  # the first policy's optimizer state
    assert not (store.path / "a/policy/v000000/optimizer").exists()
    assert len(list(store.entries())) == 10
