"""kill -9, or a long sleep, at every operation of the store: nothing lost, torn, doubled or stuck."""

import signal
from functools import partial

import pytest

from quiver.stages.core.store import Store, leases
from quiver.stages.core.store.environment import environment
from tests.faults import mutants
from tests.faults.failing import failing
from tests.faults.scenes import SCENES, Trial, in_child, killed, noted_shards, shards_in, verified
from tests.faults.sizes import LENGTHS, some


def places(name: str, trial: Trial) -> list[str]:
    """Before and after each operation of a scene."""
    environment()  # asks git once, for all children
    if name == "renewed":  # the other operations are those of `alone`
        return [f"lease.renewed@{number}" for number in range(1, 7)]
    moments = []
    for moment in ("before", "after"):  # an operation that fails has no afterwards
        with trial.store() as path, failing(f"{moment}@1000000:kill") as counting:
            list(trial.steps(path))
        moments += [f"{moment}@{number}" for number in range(1, counting.passed + 1)]
    assert len(moments) > 5
    return moments


def kill(trial: Trial, place: str) -> None:
    """Whatever is left of a killed process is whole, and the same call again does the rest."""
    with trial.store() as path:
        acknowledged = killed(partial(trial.steps, path), place)
        told = verified(Store(path))[1]
        assert told == [], told
        assert noted_shards(path) <= shards_in(path).keys(), "it counts, and is not there"
        trial.require(path, acknowledged)


@pytest.mark.parametrize("is_full", LENGTHS)
@pytest.mark.parametrize("name", SCENES)
def test_kill_9_at_an_operation(fast_path, record_property, name, is_full):
    count = 0
    for seed in range(4) if is_full else (1,):
        trial = Trial(name, seed, fast_path / str(seed))
        for place in some(places(name, trial), 5, is_full):
            kill(trial, place)
            count += 1
    record_property("kill -9 trials", count)


@pytest.mark.parametrize("mutant", mutants.NOTICED_BY_A_KILL)
def test_a_mutant_is_noticed(fast_path, record_property, mutant):
    trial = Trial(mutants.NOTICED_BY_A_KILL[mutant], 1, fast_path)
    with mutant(), pytest.raises(AssertionError):
        for place in places("", trial):
            kill(trial, place)
    record_property("protocol mutants noticed", 1)


@pytest.mark.parametrize("is_full", LENGTHS)
@pytest.mark.parametrize("name", ["alone", "shared", "taken over", "checkpoint"])
def test_who_sleeps_at_an_operation_makes_no_second_version(
    fast_path, monkeypatch, record_property, name, is_full
):
    """Another process does the same meanwhile, to the end: the version is there once, and the
    sleeper ends with it, or with E-BUSY."""
    trial = Trial(name, 1, fast_path)
    moments = some([place for place in places(name, trial) if "before" in place], 4, is_full)
    monkeypatch.setattr(leases, "SECONDS_TO_LIVE", 0.0)
    for place in moments:
        with trial.store() as path:
            steps, made = partial(trial.steps, path), []
            meanwhile = partial(lambda steps, made: made.extend(steps()), steps, made)
            failure = f"{place}:signal={signal.SIGSTOP.value}"
            code, acknowledged = in_child(steps, failure, meanwhile)
            assert code == 0, place
            assert set(acknowledged) <= set(made), place
            trial.require(path, made)
    record_property("sleeps", len(moments))
