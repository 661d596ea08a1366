"""`make mutants`: put each bug into a copy of the repository, and see whether its tests notice.

The tests pass without a bug, which is tried first. So a mutant is caught when a test fails, when
the tests cannot be collected, when the process dies, or when it does not end.
caught.json names the test that caught each mutant, and that test is tried alone at first: all tests
of the file run only if it passes. It says true if no single test can be named, false for a survivor.
The exit status is 1 when one that caught.json calls caught is not caught any more.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import TOO_LONG, Mutant, StaleTable, Target, every_mutant

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("caught.json")
ROOMS = ("schemas", "stages", "flows", "deployments")
PYTEST = ("-x", "-v", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not torture")
Tests = tuple[str, ...]
Record = dict[str, str | bool]
"""By the name of a mutant: the test that caught it, True for an unnamed one, False for none."""
PASSED = 0
"""The exit status of pytest when every test passes."""
LEAST_LIMIT_SECONDS = 60
LIMIT_FACTOR = 4
"""Tests that take this many times as long as without a bug, and the seconds above, do not end."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py::.*?)(?: - .*)?$", re.MULTILINE)
"""A line of pytest's summary: the failed test, and what it raised."""
BEGUN = re.compile(r"^(\S+?\.py::.*\S) *\Z", re.MULTILINE)
"""The end of pytest's output while a test runs: its name, and no result behind it."""


@dataclass(frozen=True)
class Outcome:
    """What one run of pytest gave."""

    status: int | None
    """Exit status; None where it ran past the limit."""
    seconds: float
    output: str

    @property
    def caught(self) -> str | bool:
        """The test that failed or did not end; True if pytest names none, False if all passed."""
        pattern = BEGUN if self.status is None else FAILED
        named = pattern.search(self.output)
        return named[1] if named else self.status != PASSED


class Copy:
    """A copy of the repository's files to write bugs into, and to run tests in."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "repository"
        self.importable = folder / "importable"
        self.made_by_tests = folder / "made"
        self.log = folder / "pytest.log"
        for name in _files(root):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.root / name, follow_symlinks=False)
        if (root / ".servers").is_dir():
            (self.root / ".servers").symlink_to(root / ".servers")
        self._link_package()
        self.forks = self._start_forks()

    def _link_package(self) -> None:
        """The folder `quiver` as an editable install would show it, of links into the copy."""
        api = self.root / "stages/api"
        package = self.importable / "quiver"
        package.mkdir(parents=True)
        for entry in sorted(api.iterdir()) if api.is_dir() else ():
            (package / entry.name).symlink_to(entry)
        for room in ROOMS if api.is_dir() else ():
            (package / room).symlink_to(self.root / room)

    def run(self, target: Target, source: str, tests: Tests, limit: float | None) -> Outcome:
        """Run tests with `source` as the target's text; afterwards the copy is as it was."""
        path = self.root / target.path
        before = path.read_text()
        try:
            self._write(path, source)
            return self._pytest(tests, limit)
        finally:
            self._write(path, before)

    def _write(self, path: Path, source: str) -> None:
        """Python takes bytecode of the same second and size for the file's own, so it goes."""
        path.write_text(source)
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            bytecode.unlink()

    def _start_forks(self) -> subprocess.Popen[str]:
        """Plugins are left out: no test here needs one, and they take seconds to import."""
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.importable}{os.pathsep}{self.root}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forks"],
            cwd=self.root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _pytest(self, tests: Tests, limit: float | None) -> Outcome:
        left_out = [f"--deselect={test}" for test in TOO_LONG]
        arguments = [*PYTEST, f"--basetemp={self.made_by_tests}", *left_out, *tests]
        started = time.monotonic()
        request = {"arguments": arguments, "log": str(self.log), "limit": limit}
        self.forks.stdin.write(json.dumps(request) + "\n")
        self.forks.stdin.flush()
        status = json.loads(self.forks.stdout.readline())
        return Outcome(status, time.monotonic() - started, self.log.read_text())


def _files(root: Path) -> list[str]:
    """The repository's files, new ones that git does not ignore too, as they are on the disk."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


class Runner:
    """Runs tests in as many copies side by side as there are jobs."""

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self.root = root
        self.jobs = jobs
        self.copies: queue.Queue[Copy] = queue.Queue()
        for number in range(jobs):
            self.copies.put(Copy(root, folder / str(number)))

    def caught(self, mutants: list[Mutant], recorded: Record) -> Record:
        """Try the recorded test of each mutant first, and all tests of its file if that passes."""
        named = {
            mutant: (test,)
            for mutant in mutants
            if isinstance(test := recorded.get(mutant.name), str)
        }
        found = self._outcomes(named, self._limits(named))
        every = {mutant: mutant.target.tests for mutant in mutants if not found.get(mutant.name)}
        limits = self._limits(every)
        for target in {mutant.target for mutant in every} - limits.keys():
            raise SystemExit(f"the tests of {target.path} fail without a bug")
        return found | self._outcomes(every, limits)

    def _limits(self, tests: dict[Mutant, Tests]) -> dict[Target, float]:
        """How long each target's tests may take; a target is left out if they fail without a bug.

        A recorded test that exists no more fails as well, and so its target's mutants get all tests.
        """
        of_target: dict[Target, dict[str, None]] = {}
        for mutant, names in tests.items():
            of_target.setdefault(mutant.target, {}).update(dict.fromkeys(names))

        def clean(target: Target) -> Outcome:
            source = (self.root / target.path).read_text()
            return self._run(target, source, tuple(of_target[target]), None)

        limits = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            for target, outcome in zip(of_target, pool.map(clean, of_target), strict=True):
                if outcome.status == PASSED:
                    limits[target] = LEAST_LIMIT_SECONDS + LIMIT_FACTOR * outcome.seconds
                    print(f"{target.path}: {outcome.seconds:.1f} s without a bug", flush=True)
                else:
                    print(outcome.output)
        return limits

    def _outcomes(self, tests: dict[Mutant, Tests], limits: dict[Target, float]) -> Record:
        """For each mutant's name what caught it, where its target has a limit."""

        def try_one(mutant: Mutant) -> tuple[str, str | bool]:
            limit = limits[mutant.target]
            outcome = self._run(mutant.target, mutant.new_source, tests[mutant], limit)
            word = "caught" if outcome.caught else "passed"
            print(f"{word} {outcome.seconds:6.1f} s  {mutant.name}", flush=True)
            return mutant.name, outcome.caught

        with ThreadPoolExecutor(self.jobs) as pool:
            return dict(pool.map(try_one, (mutant for mutant in tests if mutant.target in limits)))

    def _run(self, target: Target, source: str, tests: Tests, limit: float | None) -> Outcome:
        copy = self.copies.get()
        try:
            return copy.run(target, source, tests, limit)
        finally:
            self.copies.put(copy)


def _report(mutants: list[Mutant], caught: Record, recorded: Record) -> bool:
    """Print what survives and each file's share; whether nothing is lost against the record."""
    survivors = [mutant for mutant in mutants if not caught[mutant.name]]
    lost = [mutant for mutant in survivors if recorded.get(mutant.name)]
    for mutant in survivors:
        if mutant not in lost:
            print(f"\nsurvives: {mutant.name}\n{mutant.difference()}")
    for mutant in lost:
        print(f"\nNOT CAUGHT ANY MORE: {mutant.name}\n{mutant.difference()}")
    print()
    for path in dict.fromkeys(mutant.target.path for mutant in mutants):
        own = [bool(caught[mutant.name]) for mutant in mutants if mutant.target.path == path]
        print(f"{sum(own):3d} of {len(own):3d} caught  {path}")
    print(f"{sum(map(bool, caught.values())):3d} of {len(caught):3d} caught")
    unknown = [mutant for mutant in mutants if mutant.name not in recorded]
    if unknown:
        print(f"{len(unknown)} of them are not in {RECORD.name}: --update writes it")
    return not lost


def _read_record() -> Record:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def _write_record(caught: Record, known: set[str]) -> None:
    """Put the outcomes into the record; mutants that do not exist any more leave it."""
    merged = {name: value for name, value in _read_record().items() if name in known} | caught
    RECORD.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--only", metavar="FILE_STEM", help="only the mutants of this file")
    parser.add_argument("--missing", action="store_true", help=f"only those not in {RECORD.name}")
    parser.add_argument("--sample", metavar="N", type=int, help="only N of them, chosen by --seed")
    parser.add_argument("--seed", metavar="S", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, choices=(1, 2), help="copies side by side")
    parser.add_argument("--update", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository to mutate")
    return parser.parse_args()


def _asked_for(mutants: list[Mutant], asked: argparse.Namespace) -> list[Mutant]:
    """The mutants that the options name, in their order."""
    if asked.only:
        stems = ", ".join(dict.fromkeys(mutant.target.stem for mutant in mutants))
        mutants = [mutant for mutant in mutants if mutant.target.stem == asked.only]
        if not mutants:
            raise SystemExit(f"--only {asked.only}: expected one of {stems}")
    if asked.missing:
        recorded = _read_record()
        mutants = [mutant for mutant in mutants if mutant.name not in recorded]
    if asked.sample is not None:
        size = min(asked.sample, len(mutants))
        places = sorted(random.Random(asked.seed).sample(range(len(mutants)), size))
        mutants = [mutants[place] for place in places]
    return mutants


def main() -> int:
    asked = _arguments()
    root = asked.root.resolve()
    try:
        every = every_mutant(root)
    except StaleTable as error:
        raise SystemExit(str(error)) from None
    mutants = _asked_for(every, asked)
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.name}\n{mutant.difference()}\n")
        print(f"{len(mutants)} mutants")
        return 0
    recorded = _read_record()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(root, Path(folder), asked.jobs)
        caught = runner.caught(mutants, recorded)
    nothing_lost = _report(mutants, caught, recorded)
    print(f"{(time.monotonic() - started) / 60:.0f} minutes with {asked.jobs} jobs")
    if asked.update:
        _write_record(caught, {mutant.name for mutant in every})
    return 0 if nothing_lost else 1


if __name__ == "__main__":
    sys.exit(main())
