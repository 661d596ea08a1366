"""kill -9 at every operation of the store: nothing lost, torn or stuck."""

from functools import partial

import pytest

from quiver.stages.core.store.environment import environment
from tests.faults.failing import failing
from tests.faults.scenes import SCENES, Trial, killed
from tests.faults.sizes import LENGTHS, some


def places(name: str, trial: Trial) -> list[str]:
    """Before and after each operation of a scene."""
    if name == "renewed":  # the other operations are those of `alone`
        return [f"lease.renewed@{number}" for number in range(1, 7)]
    moments = []
    for moment in ("before", "after"):  # an operation that fails has no afterwards
        with trial.store() as path, failing(f"{moment}@1000000:kill") as counting:
            list(trial.steps(path))
        moments += [f"{moment}@{number}" for number in range(1, counting.passed + 1)]
    assert len(moments) > 10
    return moments


@pytest.mark.parametrize("is_full", LENGTHS)
@pytest.mark.parametrize("name", SCENES)
def test_kill_9_at_an_operation(fast_path, record_property, name, is_full):
    """A store with whatever is left of a killed process is whole, and the same call again does the
    rest."""
    environment()  # asks git once, for all children
    count = 0
    for seed in range(4) if is_full else (1,):
        trial = Trial(name, seed, fast_path / str(seed))
        for place in some(places(name, trial), 5, is_full):
            with trial.store() as path:
                trial.require(path, killed(partial(trial.steps, path), place))
            count += 1
    record_property("kill -9 trials", count)
