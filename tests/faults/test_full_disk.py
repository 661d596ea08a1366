"""Not one more byte can be written: what is in the way is told, and cleaning makes room."""

import os
import subprocess
from pathlib import Path

import pytest

from quiver.flows.verification import verify
from quiver.stages.core.store import Store
from quiver.stages.core.store.retention import Rule, collect
from tests.flows.conftest import command_line
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
                path = Path(store.url).parent / f"fill-{next(names)}"
                with open(path, "wb", buffering=0) as file:
                    if file.write(b"x" * size) < size:
                        raise OSError
                    os.fsync(file.fileno())
        except OSError:
            continue
    with pytest.raises(OSError, match="No space"):
        (Path(store.url) / "one").write_bytes(b"x")


def free(store: Store) -> int:
    status = os.statvfs(store.url)
    return status.f_bavail * status.f_frsize


def test_rm_says_that_a_mark_has_no_room_and_then_makes_some(store):
    for number in range(3):
        make_table(store, number)
    fill(store)
    command = [*command_line(), "rm", "a/logprobs@1", "--store", store.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7 and "E-RESOURCE" in done.stderr and "make room" in done.stderr
    assert len(visible(store)) == 3 and verify(store) == (3, [])
    (Path(store.url).parent / "fill-0").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert visible(store) == ["a/logprobs@2", "a/logprobs@3"] and verify(store)[1] == []
    assert not list(Path(store.url).glob("a/logprobs/v000001/*.arrow"))


def test_gc_deletes_abandoned_work_first_and_so_has_room_for_marks(store):
    for number in range(4):
        make_table(store, number)
    version = make_policy(store, 0)
    work = Path(store.url) / f"a/policy/.work/{version.manifest.run_key}.0.resume"
    work.mkdir(parents=True)
    (work / "state.safetensors").write_bytes(b"m" * MEGABYTE)
    fill(store)
    collect(store, Rule(keep=1, grace_seconds=0), apply=True)
    assert visible(store) == ["a/logprobs@4", "a/policy@0"]
    assert (
        len(list(Path(store.url).glob("a/logprobs/*/*.arrow"))) == 1 and free(store) > MEGABYTE / 2
    )
    assert not list(Path(store.url).glob("a/policy/.work/*")) and verify(store)[1] == []
