"""What a version's manifest says its making used."""

import multiprocessing
import subprocess
import sys
import time

import psutil
import pytest

from quiver.stages.core.store.leases import Leases
from quiver.stages.core.store.usage import totals_of
from tests.stages.core.store.test_store import Settings, table, work_on

BURN = "import time\nwhile time.process_time() < {}: pass"


def made(store, work=lambda: None, seed=0):
    """The usage of one version, whose `work` is done while it is written."""
    with work_on(store, Settings(seed=seed)) as writer:
        writer.write(0, table(0))
        work()
        return writer.commit().manifest.usage


def test_processor_seconds_are_those_of_the_process_and_its_children(store):
    def work():
        begin = time.process_time()
        while time.process_time() < begin + 0.2:
            pass
        subprocess.run([sys.executable, "-c", BURN.format(0.3)], check=True)

    idle = made(store)
    assert made(store, work, seed=1)["processor_seconds"] >= 0.45
    assert 0 <= idle["processor_seconds"] < 0.45


def test_processes_below_a_living_engine_count_too(store, tmp_path):
    """An engine's workers are its children, and live on when a version is committed."""
    done = tmp_path / "done"
    burn = f"{BURN.format(1.0)}\nopen({str(done)!r}, 'w')\ntime.sleep(600)"
    context = multiprocessing.get_context("spawn")
    command = [sys.executable, "-c", burn]
    engine = context.Process(target=subprocess.run, args=(command,))

    def work():
        engine.start()
        while not done.exists():
            time.sleep(0.05)

    try:
        used = made(store, work)["processor_seconds"]
        of_engine = sum(psutil.Process(engine.pid).cpu_times()[:2])
    finally:
        for process in psutil.Process(engine.pid).children():
            process.kill()
        engine.join()
    assert used >= of_engine + 0.9


@pytest.mark.gpu
def test_device_memory_of_earlier_work_does_not_count(store):
    import torch

    torch.empty(2**30, dtype=torch.uint8, device="cuda")
    assert made(store)["peak_device_memory"] < 2**30
    after = made(store, lambda: torch.empty(2**30, dtype=torch.uint8, device="cuda"), seed=1)
    assert after["peak_device_memory"] >= 2**30


def test_memory_is_the_largest_that_a_process_held(store):
    def work():
        code = "b = bytearray(600_000_000); b[::4096] = b[::4096]"
        subprocess.run([sys.executable, "-c", code], check=True)

    assert made(store, work)["peak_memory"] > 600_000_000


def test_what_several_processes_used_is_added_up_but_for_peaks_and_the_time_from_the_first(store):
    """A machine must hold the largest of them; `total` is that of the process that began first."""
    reports = [
        {"seconds": {"load": 2.0, "total": 9.0}, "usage": used(3.0, 700, 50)},
        {"seconds": {"load": 1.0, "wait": 0.5, "total": 4.0}, "usage": used(2.0, 900, 40)},
    ]
    lease = Leases(store.storage, "a/logprobs/.work/shared.leases").take("commit")
    assert totals_of(reports, lease) == {
        "seconds": {"load": 3.0, "wait": 0.5, "total": 9.0},
        "usage": used(5.0, 900, 50),
    }
    lease.release()


def used(processor_seconds: float, memory: int, device_memory: int) -> dict[str, float]:
    """The usage of one process."""
    peaks = {"peak_memory": memory, "peak_device_memory": device_memory}
    return {"processor_seconds": processor_seconds, **peaks}


def test_attempts_that_did_not_finish_are_counted(store):
    def fail():
        raise OSError("away")

    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            made(store, fail)
    assert made(store)["unfinished_attempts"] == 2
    assert "unfinished_attempts" not in made(store, seed=1)
