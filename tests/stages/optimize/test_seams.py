"""What lies between a training and those who read its policy: what is hashed, by whom, and when."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from quiver.schemas.errors import CorruptError, ResourceError
from quiver.stages.core import user_cache
from quiver.stages.core.files import sha256_of
from quiver.stages.core.store import Store
from quiver.stages.core.store import storage as seam
from quiver.stages.core.store.disk import Disk
from quiver.stages.model.loading import load_model
from quiver.stages.optimize.optimizer import read_tensors
from tests.stages.conftest import LATER_NS

WEIGHTS = "model.safetensors"
STATE = "optimizer/state.safetensors"


@pytest.fixture
def hashed(cache, monkeypatch) -> list[str]:
    """Names of the tensors' files whose bytes were read for a hash. Files of any size count as
    large."""
    names = []

    def counted(path):
        if path.suffix == ".safetensors":
            names.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(user_cache, "_STORED_BYTES", 0)
    monkeypatch.setattr(user_cache, "sha256_of", counted)
    monkeypatch.setattr(seam, "sha256_of", counted)
    return names


def wait_a_while(monkeypatch) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + LATER_NS)


def read_all(store: Store, ref: object) -> None:
    """As the engine and the next training do, each in a process of its own."""
    for _ in range(2):
        policy = Store(store.url).open(str(ref))
        load_model(policy, dtype=torch.float32)
        read_tensors(policy, "optimizer")


def test_what_this_host_wrote_is_hashed_once(store, policy, train, hashed, monkeypatch):
    wait_a_while(monkeypatch)
    train()
    hashed.clear()
    done = train(seed=1)
    assert sorted(hashed) == [WEIGHTS, "state.safetensors"], "its own, not the starting policy's"
    hashed.clear()
    read_all(store, done.ref)
    assert hashed == []
    Store(store.url).open(done.ref).verify()
    assert sorted(hashed) == [WEIGHTS, "state.safetensors"], "asked for, every byte is read"


def test_what_another_host_wrote_is_hashed_by_its_first_reader(
    store, train, hashed, monkeypatch, tmp_path
):
    done = train()
    shutil.rmtree(tmp_path / "cache")
    hashed.clear()
    wait_a_while(monkeypatch)
    read_all(store, done.ref)
    assert sorted(hashed) == [WEIGHTS, "state.safetensors"]


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_a_file_that_was_damaged_since_is_noticed(store, train, hashed, monkeypatch, name):
    done = train()
    wait_a_while(monkeypatch)
    read_all(store, done.ref)
    path = done.files.folder / name
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptError, match="sha256"):
        read_all(store, done.ref)


def test_weights_are_flushed_and_hashed_while_the_moments_are_written(store, train, monkeypatch):
    """Whoever puts the weights waits here until the moments are there."""
    put, order = Disk.put_file, []

    def waits(disk: Disk, key: str, file: Path | None = None):
        if key.endswith(f"/{WEIGHTS}"):
            moments = disk.local(key).parent / STATE
            deadline = time.monotonic() + 60
            while not moments.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            order.append(moments.exists())
        return put(disk, key, file)

    monkeypatch.setattr(Disk, "put_file", waits)
    done = train()
    assert order == [True]
    Store(store.url).open(done.ref).verify()


def test_a_flush_that_fails_meanwhile_publishes_nothing(store, policy, train, monkeypatch):
    put = Disk.put_file

    def fails(disk: Disk, key: str, file: Path | None = None):
        if key.endswith(f"/{WEIGHTS}"):
            raise OSError(28, "No space left on device", key)
        return put(disk, key, file)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "put_file", fails)
        with pytest.raises(ResourceError):
            train()
    assert store.numbers("tiny", "policy") == [0]
    assert str(train().ref) == "tiny/policy@1"
