"""Power loss: each state of the disk that the calls of a scene allow is opened by the real store."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from quiver.schemas.errors import QuiverError
from tests.faults import mutants
from tests.faults.power_loss import Recording, State, crash_states, record
from tests.faults.scenes import SCENES, Trial
from tests.faults.sizes import LENGTHS, some


def recorded(trial: Trial, mutant: Callable = nullcontext) -> Recording:
    with trial.store() as path:
        path.mkdir(exist_ok=True)
        return record(path, trial.scene, trial.seed, mutant)


def check(trial: Trial, state: State) -> None:
    """The state is whole, and the next run does the rest."""
    path = trial.folder / "state"
    path.mkdir()
    try:
        state.write(path)
        trial.require(path, list(state.acknowledged))
    finally:
        shutil.rmtree(path)


SCENES_ON_DISK = [
    name
    for name in SCENES
    if name != "renewed"  # its calls are those of `alone`
]


@pytest.mark.parametrize("is_full", LENGTHS)
@pytest.mark.parametrize("name", SCENES_ON_DISK)
def test_every_state_is_whole(fast_path, record_property, name, is_full):
    """Nothing lost that was acknowledged, nothing torn, and the next run succeeds."""
    count = 0
    for seed in range(3) if is_full else (1,):
        trial = Trial(name, seed, fast_path / str(seed))
        for state in some(list(crash_states(recorded(trial))), 4, is_full):
            check(trial, state)
            count += 1
    record_property("states after a power loss", count)


@pytest.mark.parametrize("mutant", mutants.NOTICED_BY_A_POWER_LOSS)
def test_a_mutant_is_noticed(fast_path, record_property, mutant):
    trial = Trial(mutants.NOTICED_BY_A_POWER_LOSS[mutant], 1, fast_path)
    states = list(crash_states(recorded(trial, mutant)))
    for state in some(states, len(states), False):
        try:
            check(trial, state)
        except (AssertionError, QuiverError):
            record_property("protocol mutants noticed", 1)
            return
    pytest.fail("no state shows it")
