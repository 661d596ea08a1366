"""What a version's manifest says its making used."""

import subprocess
import sys
import time

import pytest

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


def test_memory_is_the_largest_that_a_process_held(store):
    def work():
        code = "b = bytearray(600_000_000); b[::4096] = b[::4096]"
        subprocess.run([sys.executable, "-c", code], check=True)

    assert made(store, work)["peak_memory"] > 600_000_000


def test_attempts_that_did_not_finish_are_counted(store):
    def fail():
        raise OSError("away")

    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            made(store, fail)
    assert made(store)["unfinished_attempts"] == 2
    assert "unfinished_attempts" not in made(store, seed=1)
