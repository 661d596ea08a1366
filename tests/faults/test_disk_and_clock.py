"""A disk that fails or is full at any moment, and clocks that jump."""

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import BusyError, QuiverError
from quiver.stages.core.store import leases, marks, writer
from quiver.stages.core.store.retention import Rule, collect
from tests.faults.failing import Failure
from tests.faults.scenes import (
    SCENES,
    Acknowledged,
    Known,
    Trial,
    killed,
    require_invariants,
    require_next_run,
    written,
)
from tests.faults.seam import Around, watched
from tests.stages.core.store.test_store import Settings, work_on


@pytest.mark.parametrize(
    ("code", "step"),
    [
        pytest.param(errno.EIO, 7, id="short"),
        *(
            pytest.param(code, 1, id=f"full, {errno.errorcode[code]}", marks=pytest.mark.torture)
            for code in (errno.EIO, errno.ENOSPC, errno.EACCES)
        ),
    ],
)
@pytest.mark.parametrize("name", ["new store", "alone", "shared", "checkpoint", "tag", "rm", "gc"])
def test_any_operation_may_fail(fast_path, record_property, name, code, step):
    """Nothing is lost; a flush that failed is told, and not tried again; and the same process may
    do it all again: it holds no lease that it has forgotten."""
    trial, number = Trial(name, 1, fast_path), 0
    while True:
        failure = Failure(f"before@{number * step + 1}:raise={code}")
        with trial.store() as path, ExitStack() as unflushed:
            acknowledged, error = attempt(trial.steps(path), flushed_once(failure, unflushed))
            if not failure.failed_call:
                break
            # a collection without room for a mark deletes what is due, and then has room
            makes_room = (name, code) == ("gc", errno.ENOSPC)
            assert error or failure.failed_call != "fsync" or makes_room, "it was not told"
            trial.require(path, acknowledged)
        number += 1
    assert number
    record_property("failed operations", number)


def attempt(
    steps: Iterator[Acknowledged], around: Around
) -> tuple[list[Acknowledged], QuiverError | None]:
    """What was acknowledged, and the error that ended it."""
    acknowledged: list[Acknowledged] = []
    try:
        with watched(around):
            for step in steps:
                acknowledged.append(step)
    except QuiverError as error:
        return acknowledged, error
    return acknowledged, None


def flushed_once(failure: Failure, unflushed: ExitStack) -> Around:
    """As the failure, but a file whose flush failed must not be flushed again."""
    handles = []

    def around(name: str, path: str, call: Callable[[], Any]) -> Any:
        if name == "fsync":
            assert not any(os.path.samefile(path, handle) for handle in handles), "flushed again"
        try:
            return failure.around(name, path, call)
        except OSError:
            if name == "fsync" and os.path.isfile(path):
                # open, so that no other file gets its inode
                handles.append(os.open(path, os.O_RDONLY))
                unflushed.callback(os.close, handles[-1])
            raise

    return around


@pytest.fixture
def disk(tmp_path):
    """Mounts a real file system of so many kB, or gives it that size."""
    mounted = tmp_path / "disk"
    mounted.mkdir()

    def mount(kilobytes: int) -> Path:
        is_there = os.path.ismount(mounted)
        options = f"{'remount,' if is_there else ''}size={kilobytes}k"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small tmpfs is not permitted here")
        return mounted

    yield mount
    while os.path.ismount(mounted):
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.parametrize(
    "step", [pytest.param(24, id="short"), pytest.param(4, id="full", marks=pytest.mark.torture)]
)
@pytest.mark.parametrize("name", ["alone", "checkpoint", "tag", "rm"])
def test_a_disk_that_is_full_at_any_moment_loses_nothing(disk, record_property, name, step):
    """A page more at each trial, until all fits; then there is room again, and the same call goes
    on."""
    scene, trials, error = SCENES[name], 0, True
    while error:
        mounted = disk(10_000)
        path = mounted / "store"
        scene.before(path, 1)
        known = Known.of(path, scene)
        used = os.statvfs(mounted)
        disk((used.f_blocks - used.f_bfree) * used.f_frsize // 1024 + trials * step)
        acknowledged, error = attempt(scene.steps(path, 1), lambda name, path, call: call())
        assert not error or (error.exit_code == 7 and "the disk is full" in error.message)
        require_invariants(path, known, acknowledged)
        disk(10_000)
        require_next_run(path, scene, 1, known)
        subprocess.run(["umount", mounted], check=True)
        trials += 1
    assert trials > 1
    record_property("full disks", trials)


# -- clocks

DAY = 86400


def shifted_clock(seconds: float) -> SimpleNamespace:
    """The module `time`, but for what o'clock it is."""
    return SimpleNamespace(**{**vars(time), "time": lambda: time.time() + seconds})


def shifted_date(seconds: float) -> type[datetime]:
    """`datetime`, but for what o'clock it is."""

    class Clock(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(seconds=seconds)

    return Clock


@pytest.mark.parametrize("seconds", [-10 * DAY, 10 * DAY])
def test_numbers_go_on_whatever_the_clock_says(store, monkeypatch, seconds):
    """The clock is before the versions that are there, or long after."""
    first = written(Path(store.url), 1, 1)
    monkeypatch.setattr(writer, "datetime", shifted_date(seconds))
    second = written(Path(store.url), 2, 1)
    assert (second.manifest.created < first.manifest.created) == (seconds < 0)
    assert store.open("a/logprobs@latest").ref == second.ref
    folder = Path(store.url) / "a/logprobs"
    os.utime(folder, times=(time.time() + seconds,) * 2)
    third = written(Path(store.url), 3, 1)
    assert third.ref.version == 3 and written(Path(store.url), 1, 1).ref == first.ref
    assert verify(store) == (3, [])


@pytest.mark.parametrize("seconds", [-DAY, DAY])
def test_a_clock_that_jumps_takes_no_lease_from_the_living(store, monkeypatch, seconds):
    """The holder says that it is there; by the clock of whoever waits that was a day ago, or will
    be."""
    monkeypatch.setattr(leases, "SECONDS_TO_LIVE", 2.0)
    monkeypatch.setattr(leases, "SECONDS_BETWEEN_RENEWALS", 0.2)
    monkeypatch.setattr(leases, "_thread", None)
    with work_on(store, Settings(seed=1)) as work:
        monkeypatch.setattr(leases, "time", shifted_clock(seconds))
        with (
            pytest.raises(BusyError, match="is already doing this work"),
            work_on(store, Settings(seed=1)),
        ):
            pass
        assert work.staging.lease.is_held()


@pytest.mark.parametrize("seconds", [-DAY, DAY])
def test_a_clock_that_jumps_does_not_wait_for_the_dead(store, monkeypatch, seconds):
    killed(lambda: SCENES["alone"].steps(Path(store.url), 1), "shard.noted")
    monkeypatch.setattr(leases, "time", shifted_clock(seconds))
    monkeypatch.setattr(leases, "SECONDS_TO_LIVE", DAY)
    require_next_run(Path(store.url), SCENES["alone"], 1, Known())


def test_a_clock_that_is_put_back_deletes_nothing_early(store, monkeypatch):
    for seed in (1, 2):
        written(Path(store.url), seed, 1)
    data = list(Path(store.url).glob("a/logprobs/v000001/*.arrow"))
    monkeypatch.setattr(marks, "datetime", shifted_date(365 * DAY))
    collect(store, Rule(keep=1), apply=True)
    for seconds, is_there in ((0, True), (366 * DAY - 60, True), (366 * DAY + 60, False)):
        monkeypatch.setattr(marks, "datetime", shifted_date(seconds))
        collect(store, Rule(keep=1), apply=True)
        assert [file.exists() for file in data] == [is_there]
