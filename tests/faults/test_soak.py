"""A long run under random faults: it comes to its end, everything is there once, and nothing grows.

Bounds, a version of the policy more: 1 MB of memory, 0.05 open files, 4 kB on the disk beside the
versions and Prefect's own database.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.flows.verification import verify
from quiver.schemas.refs import KINDS
from quiver.stages.core.store import Store
from tests.faults import failing
from tests.faults.sizes import SHARE
from tests.flows.conftest import (
    command_environment,
    command_line,
    left_behind,
    quiver,
    write_recipe,
)
from tests.flows.test_embedded import SCRIPTED, states

ITERATIONS = max(10, round(200 * SHARE))
LONGEST_SECONDS = 600
"""Without a new policy."""


Sample = tuple[int, int, int]
"""Number of the newest policy; bytes and open files of the process of a run at that time."""


def sample(pid: int, newest: int) -> list[Sample]:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return [(newest, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")))]
    except OSError:
        return []  # it has just ended


def slopes(samples: list[Sample]) -> list[np.ndarray]:
    """Bytes and files a policy more, after the first two, in which libraries are imported; none
    where there are too few."""
    if not samples or samples[-1][0] - samples[0][0] < 8:
        return []
    late = np.array([sample for sample in samples if sample[0] >= samples[0][0] + 2], float)
    return [np.polyfit(late[:, 0], late[:, 1:], 1)[0]]


def policies(folder: Path) -> int:
    path = folder / "store/tiny/policy"
    return sum(name.startswith("v") for name in os.listdir(path)) if path.exists() else 0


def bytes_beside_versions(folder: Path) -> int:
    """Of the store: work, leases; not what each version adds for good."""
    store = folder / "store"
    return sum(
        path.stat().st_blocks * 512
        for path in store.rglob("*")
        if path.is_file() and path.name != ".index"
        if not any(part.startswith("v0") and part[1:].isdigit() for part in path.parts)
    )


def run_until(folder: Path, chance: random.Random) -> tuple[int, list[Sample], str]:
    """One `quiver run` that meets one fault, unless it comes to its end before: exit code, what it
    held, and what befell it."""
    fault = chance.choice(("kill", "kill", "terminate", "an operation"))
    environment = command_environment(folder)
    if fault == "an operation":
        fault = f"{chance.choice(('before', 'after'))}@{chance.randint(1, 150)}:kill"
        environment |= failing.environment(fault)
    # after a number of policies, so that slow machines get on too; an operation may never be reached
    goal = policies(folder) + chance.randint(1, 30)
    command = [*command_line(), "run", "recipe.toml", *SCRIPTED]
    command += ["--set", f"iterations={ITERATIONS}"]
    samples: list[Sample] = []
    with open(folder / "log", "ab") as log:
        running = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    newest, changed_at = policies(folder), time.monotonic()
    while running.poll() is None:
        time.sleep(0.5)
        if policies(folder) != newest:
            newest, changed_at = policies(folder), time.monotonic()
        assert time.monotonic() - changed_at < LONGEST_SECONDS, "it hangs"
        samples += sample(running.pid, newest)
        if newest >= goal:
            time.sleep(chance.uniform(0, 5))
            os.killpg(running.pid, signal.SIGTERM if fault == "terminate" else signal.SIGKILL)
            goal = 10**9
    return running.returncode, samples, fault


def attempts(folder: Path) -> Iterator[tuple[int, list[Sample], str]]:
    """Runs, one after another, until one comes to the end."""
    chance = random.Random(0)
    for _ in range(20 + 4 * ITERATIONS):
        code, samples, fault = run_until(folder, chance)
        assert left_behind(folder) == [], f"after {fault}"
        yield code, samples, fault
        if code == 0:
            return
    pytest.fail("it never came to its end")


@pytest.mark.torture
@pytest.mark.prefect
def test_a_long_run_under_random_faults(tmp_path, record_property):
    folder = write_recipe(tmp_path / "soak")
    grown, disk, codes, faults = [], [], [], 0
    for code, samples, fault in attempts(folder):
        faults += code != 0
        codes.append((fault, code))
        disk.append((policies(folder), bytes_beside_versions(folder)))
        grown += slopes(samples)
    assert faults, "nothing befell it"
    expected = {0, -signal.SIGKILL, 143, 7}
    assert {code for _, code in codes} <= expected, codes
    store = Store(folder / "store")
    for kind in KINDS:
        begin = 0 if kind == "policy" else 1
        if store.numbers("tiny", kind):
            assert store.numbers("tiny", kind) == list(range(begin, ITERATIONS + 1)), kind
    assert verify(store)[1] == []
    assert states(folder) <= {"COMPLETED", "CRASHED", "FAILED", "CANCELLED"}, "some stay Running"
    memory, files = np.median(grown or [[0, 0]], axis=0)
    assert memory < 1e6 and files < 0.05, grown
    numbers, sizes = np.array(disk[1:] or disk).T  # the first run makes what stays for good
    assert np.ptp(numbers) == 0 or np.polyfit(numbers, sizes, 1)[0] < 4096, disk
    again = quiver(folder, "run", "recipe.toml", *SCRIPTED, "--set", f"iterations={ITERATIONS}")
    assert len(again["iterations"]) == ITERATIONS, "already done"
    assert store.numbers("tiny", "policy") == list(range(ITERATIONS + 1))
    record_property("soak: iterations", ITERATIONS)
    record_property("soak: faults", faults)
    record_property("soak: memory slope, kB a policy", round(memory / 1e3))
    record_property("soak: open files slope, in 1,000 policies", round(1000 * files))
