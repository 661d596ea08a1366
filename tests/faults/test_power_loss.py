"""Power loss: each state of the disk that the calls of a scene allow is opened by the real store."""

import copy
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from random import Random

import pytest

from quiver.schemas.errors import QuiverError
from tests.faults import mutants
from tests.faults.power_loss import Recording, State, crash_states, record
from tests.faults.scenes import (
    SCENES,
    Known,
    expected_changes,
    require_invariants,
    require_next_run,
)
from tests.faults.sizes import SHARE


class Trial:
    """A scene that was recorded once."""

    def __init__(self, name: str, seed: int, folder, mutant: Callable = nullcontext) -> None:
        self.scene, self.seed, self._folder = SCENES[name], seed, folder
        path = folder / "store"
        self.scene.before(path, seed)
        self._known = Known.of(path, *expected_changes(name))
        path.mkdir(exist_ok=True)
        self.recording: Recording = record(path, self.scene, seed, mutant)

    def check(self, state: State) -> None:
        """The state is whole, and the next run does the rest."""
        path = self._folder / "state"
        path.mkdir()
        try:
            state.write(path)
            known = copy.deepcopy(self._known)
            require_invariants(path, known, list(state.acknowledged))
            require_next_run(path, self.scene, self.seed, known)
        finally:
            shutil.rmtree(path)

    def states(self) -> list[State]:
        """All states, in some order."""
        states = list(crash_states(self.recording))
        Random(self.seed).shuffle(states)
        return states


SCENES_ON_DISK = [
    name
    for name in SCENES
    if name != "renewed"  # its calls are those of `alone`
]


@pytest.mark.parametrize(
    "is_full",
    [pytest.param(False, id="short"), pytest.param(True, id="full", marks=pytest.mark.torture)],
)
@pytest.mark.parametrize("name", SCENES_ON_DISK)
def test_every_state_is_whole(fast_path, record_property, name, is_full):
    """Nothing lost that was acknowledged, nothing torn, and the next run succeeds."""
    count = 0
    for seed in range(3) if is_full else (1,):
        folder = fast_path / str(seed)
        folder.mkdir()
        trial = Trial(name, seed, folder)
        states = trial.states()
        for state in states[: math.ceil(SHARE * len(states)) if is_full else 4]:
            trial.check(state)
            count += 1
    record_property("states after a power loss", count)


@pytest.mark.parametrize("name", ["rm", "gc"])
def test_nothing_is_deleted_before_the_folder_that_it_left_is_flushed(fast_path, name):
    """Else a version might come back half deleted."""
    recording = Trial(name, 1, fast_path).recording
    moved = []
    for number, (what, *about) in enumerate(recording.events):
        changes = about[0] if what == "changed" else {}
        for (folder, entry), now in changes.items():
            version = recording.names.get(folder, {}).get(entry)
            if entry == "v000001" and now is None and version is not None:
                moved.append((number, folder, version))
    assert moved
    for number, folder, version in moved:
        later = recording.events[number:]
        deleted = [
            position
            for position, (what, *about) in enumerate(later)
            if what == "changed" and any(changed == version for changed, _ in about[0])
        ]
        assert deleted and ("flushed", folder) in later[: deleted[0]]


@pytest.mark.parametrize("mutant", mutants.NOTICED_BY_A_POWER_LOSS)
def test_a_mutant_is_noticed(fast_path, record_property, mutant):
    trial = Trial("alone", 1, fast_path, mutant)
    for state in trial.states():
        try:
            trial.check(state)
        except (AssertionError, QuiverError):
            record_property("protocol mutants noticed", 1)
            return
    pytest.fail("no state shows it")
