"""kill -9 at each labelled place of the store: nothing lost, torn or stuck."""

import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from quiver.stages.common.store import storage
from quiver.stages.common.store.environment import environment
from quiver.stages.common.store.failpoints import POINTS
from tests.faults.scenes import (
    SCENES,
    Known,
    expected_changes,
    in_child,
    require_invariants,
    require_next_run,
)
from tests.faults.sizes import sizes

STORE_POINTS = [name for name in POINTS if name not in ("worker.answered", "flow.answered")]
SEEDS = range(4)


@pytest.fixture(scope="module")
def beginnings(fast_path_factory) -> dict[tuple[str, int], Path]:
    """The store with which each scene begins."""
    environment()  # asks git once, for all children
    folder = fast_path_factory("beginnings")
    paths = {}
    for number, (name, scene) in enumerate(SCENES.items()):
        for seed in SEEDS:
            paths[name, seed] = folder / f"{number}-{seed}"
            scene.before(paths[name, seed], seed)
    return paths


def begun(beginnings, name: str, seed: int, path: Path) -> Path:
    """A copy of the store with which a scene begins."""
    if beginnings[name, seed].exists():
        shutil.copytree(beginnings[name, seed], path)
    return path


@pytest.fixture(scope="module")
def passages(beginnings, fast_path_factory) -> dict[str, list[tuple[str, int, int]]]:
    """Of each place: scene, seed and time at which it is passed."""
    patterns = {name: re.compile(f"{event} .*{key}") for name, (event, key, _) in POINTS.items()}
    passages = {name: [] for name in POINTS}
    for (name, seed), beginning in beginnings.items():
        path = begun(beginnings, name, seed, fast_path_factory("passages") / beginning.name)
        events = []
        with patch.object(
            storage, "failpoint", lambda event, key, events=events: events.append(f"{event} {key}")
        ):
            list(SCENES[name].steps(path, seed))
        shutil.rmtree(path)
        for point, pattern in patterns.items():
            if point == "lease.renewed" and name != "renewed":
                continue  # a thread does it now and then: only that scene waits for it
            count = sum(map(bool, map(pattern.fullmatch, events)))
            passages[point] += [(name, seed, time) for time in range(1, min(count, 6) + 1)]
    return passages


@pytest.mark.parametrize("trials", sizes(short=1, full=50))
@pytest.mark.parametrize("point", STORE_POINTS)
def test_kill_9_at_a_place(beginnings, passages, fast_path, record_property, point, trials):
    """A store with whatever is left of a killed process is whole, and the same call again does the
    rest."""
    counts = Counter()
    # far apart, so that few trials see several scenes too
    step = max(1, len(passages[point]) * 7 // 18)
    for trial in range(trials):
        name, seed, time = passages[point][trial * step % len(passages[point])]
        path = begun(beginnings, name, seed, fast_path / f"store-{trial}")
        known = Known.of(path, *expected_changes(name))
        code, acknowledged = in_child(
            lambda path=path, name=name, seed=seed: SCENES[name].steps(path, seed),
            f"{point}@{time}:kill",
        )
        assert code == -signal.SIGKILL, f"{point} was not reached in scene {name}, seed {seed}"
        require_invariants(path, known, acknowledged)
        require_next_run(path, SCENES[name], seed, known)
        shutil.rmtree(path)
        counts[name] += 1
    record_property("kill -9 trials", trials)
    record_property("kill -9 places", 1)


def test_there_are_enough_places():
    assert len(STORE_POINTS) >= 24
