"""Reports where a test run spent its processor seconds: by folder, beside what `budget.json` plans for
it, and by what the tests start (Prefect, vLLM, ranks).

A pytest plugin, loaded by conftest.py. Counted are this process, the children that it has waited
for, the forks of warm interpreters that it asked for (tests/warm), and the long-lived processes that
were named to `watch`. Over the budget is reported, not an error: processors differ by a factor of
two.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests import warm

BUDGET = Path(__file__).with_name("budget.json")
KINDS = {"prefect": "Prefect", "vllm": "vLLM", "dist": "ranks"}
"""What a test with this marker starts; a test with several markers counts for the first."""
_TICKS = os.sysconf("SC_CLK_TCK")
_watched: dict[int, str] = {}
"""When each watched process began, since another may get its id after it."""
_LAST = pytest.StashKey[float]()
_by_folder: Counter[str] = Counter()
_by_kind: Counter[str] = Counter()


def watch(process_id: int) -> None:
    """Count this process, and the children that it waits for, while it runs."""
    fields = _fields(process_id)
    if fields:
        _watched[process_id] = fields[19]


def processor_seconds() -> float:
    """User and system seconds of this process and of what it started, so far."""
    total = sum(os.times()[:4]) + warm.seconds_of_forks()
    for process_id, begun in _watched.items():
        fields = _fields(process_id)
        if fields and fields[19] == begun:  # else it has ended, and counts for who waited for it
            total += sum(map(int, fields[11:15])) / _TICKS
    return total


def _fields(process_id: int) -> list[str]:
    """Return the fields behind the name in /proc/ID/stat; none if there is no such process."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def folder_of(node_id: str) -> str:
    """The folder that a test counts for: one below `tests`, or two below it in `tests/stages`."""
    parts = node_id.partition("::")[0].split("/")[:-1]
    return "/".join(parts[: 3 if parts[1:2] == ["stages"] else 2])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Say in the last report of a test how many seconds have passed since the test before it."""
    report = yield
    report.spent = 0.0
    if call.when == "teardown":
        now, before = processor_seconds(), item.config.stash.get(_LAST, 0.0)
        report.spent = round(max(0.0, now - before), 3)  # less, if one that was watched has ended
        item.config.stash[_LAST] = now
    return report


def pytest_runtest_logreport(report):
    _by_folder[folder_of(report.nodeid)] += report.spent
    kind = next((KINDS[name] for name in KINDS if name in report.keywords), "everything else")
    _by_kind[kind] += report.spent


def pytest_terminal_summary(terminalreporter):
    if not _by_kind:
        return
    budget = json.loads(BUDGET.read_text())
    terminalreporter.section("processor seconds (budget)")
    for folder, seconds in sorted(_by_folder.items()):
        planned = budget.get(folder, 0)
        over = "  over its budget" if planned and seconds > planned else ""
        terminalreporter.write_line(f"{seconds:8.0f} ({planned})  {folder}{over}")
    kinds = ", ".join(f"{kind} {seconds:.0f}" for kind, seconds in _by_kind.most_common())
    terminalreporter.write_line(f"{sum(_by_kind.values()):8.0f}  in all: {kinds}")
