"""A long run under random faults: it comes to its end, everything is there once, and nothing grows.

Bounds, a version of the policy more: 1 MB of memory, 0.05 open files, 4 kB on the disk beside the
versions and Prefect's own database.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from quiver.schemas.refs import KINDS
from quiver.stages.common.store import Store
from quiver.stages.common.store.failpoints import POINTS
from quiver.stages.common.verification import verify
from tests.faults.sizes import SHARE
from tests.flows.conftest import command_environment, left_behind, quiver, write_recipe
from tests.flows.test_embedded import SCRIPTED, states

ITERATIONS = max(10, round(200 * SHARE))
LONGEST_SECONDS = 600
"""Without a new policy."""


@dataclass
class Samples:
    """What a run's process held, by the number of the newest policy."""

    policies: list[int] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def take(self, pid: int, policies: int) -> None:
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return  # it has just ended
        self.policies.append(policies)
        self.memory_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.files.append(files)

    def slopes(self) -> tuple[float, float] | None:
        """Bytes and files a policy more, after the first two, in which libraries are imported; None
        where there are too few."""
        if not self.policies or self.policies[-1] - self.policies[0] < 8:
            return None
        late = np.array(self.policies) >= self.policies[0] + 2
        return tuple(
            float(np.polyfit(np.array(self.policies)[late], np.array(series)[late], 1)[0])
            for series in (self.memory_bytes, self.files)
        )


def policies(folder: Path) -> int:
    path = folder / "store/tiny/policy"
    return sum(name.startswith("v") for name in os.listdir(path)) if path.exists() else 0


def bytes_beside_versions(folder: Path) -> int:
    """Of the store: staging, leases, trash; not what each version adds for good."""
    store = folder / "store"
    return sum(
        path.stat().st_blocks * 512
        for path in store.rglob("*")
        if path.is_file() and not {".ledger", ".index"} & set(path.parts)
        if not any(part.startswith("v0") and part[1:].isdigit() for part in path.parts)
    )


def run_until(folder: Path, chance: random.Random) -> tuple[int, Samples, str]:
    """One `quiver run` that meets one fault, unless it comes to its end before: exit code, what it
    held, and what befell it."""
    fault = chance.choice(("kill", "kill", "terminate", "a place"))
    environment = command_environment(folder)
    if fault == "a place":
        environment["QUIVER_FAIL"] = f"{chance.choice(list(POINTS))}@{chance.randint(1, 3)}:kill"
    # after a number of policies, so that slow machines get on too; a place may never be reached
    goal = policies(folder) + chance.randint(1, 30)
    command = [sys.executable, "-m", "quiver.flows.cli", "run", "recipe.toml", *SCRIPTED]
    command += ["--set", f"iterations={ITERATIONS}"]
    samples = Samples()
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
        samples.take(running.pid, newest)
        if newest >= goal:
            time.sleep(chance.uniform(0, 5))
            os.killpg(running.pid, signal.SIGTERM if fault == "terminate" else signal.SIGKILL)
            goal = 10**9
    return running.returncode, samples, environment.get("QUIVER_FAIL", fault)


def attempts(folder: Path) -> Iterator[tuple[int, Samples, str]]:
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
    slopes, disk, codes, faults = [], [], [], 0
    for code, samples, fault in attempts(folder):
        faults += code != 0
        codes.append((fault, code))
        disk.append((policies(folder), bytes_beside_versions(folder)))
        if samples.slopes():
            slopes.append(samples.slopes())
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
    memory = [bytes_a_policy for bytes_a_policy, _ in slopes]
    files = [files_a_policy for _, files_a_policy in slopes]
    assert not slopes or np.median(memory) < 1e6, memory
    assert not slopes or np.median(files) < 0.05, files
    numbers, sizes = np.array(disk).T
    assert len(disk) < 3 or np.polyfit(numbers, sizes, 1)[0] < 4096, disk
    again = quiver(folder, "run", "recipe.toml", *SCRIPTED, "--set", f"iterations={ITERATIONS}")
    assert len(again["iterations"]) == ITERATIONS, "already done"
    assert store.numbers("tiny", "policy") == list(range(ITERATIONS + 1))
    record_property("soak: iterations", ITERATIONS)
    record_property("soak: faults", faults)
    record_property("soak: memory slope, kB a policy", round(float(np.median(memory or [0])) / 1e3))
    record_property(
        "soak: open files slope, in 1,000 policies", round(1000 * float(np.median(files or [0])))
    )
