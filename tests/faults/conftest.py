"""Folders in memory, where a flush costs nothing, and the figures of a run at its end."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(scope="session")
def fast_path_factory() -> Iterator[Callable[[str], Path]]:
    """Makes folders by a name."""
    with tempfile.TemporaryDirectory(prefix="quiver-faults.", dir=IN_MEMORY) as folder:
        yield lambda name: Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder))


@pytest.fixture
def fast_path(fast_path_factory) -> Iterator[Path]:
    """A folder of the test's own."""
    path = fast_path_factory("test")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    """What the tests counted, summed over all of them."""
    figures = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, number in report.user_properties if report.when == "call" else []:
            if isinstance(number, int):  # other folders' tests tell other things
                figures[name] += number
    for name, number in figures.items():
        terminalreporter.write_line(f"{name}: {number:,}")
