"""Random histories of a store: versions come and go, tags move, processes die, the power fails;
after each step all that was acknowledged is there."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quiver.schemas import refs
from quiver.schemas.errors import ConflictError
from quiver.stages.core.store import Store
from quiver.stages.core.store.retention import Rule, collect, find_kept, remove
from tests.faults.conftest import IN_MEMORY
from tests.faults.power_loss import crash_states, record
from tests.faults.scenes import (
    Known,
    Scene,
    in_child,
    is_marked,
    require_invariants,
    written,
)
from tests.faults.sizes import sizes

SEEDS = st.integers(0, 5)
NUMBERS = st.integers(0, 10**6)


class Histories(RuleBasedStateMachine):
    """One store in a folder of its own. A rule more is a method more."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="quiver-history.", dir=IN_MEMORY))
        self.path = self.folder / "store"
        self.store = Store(self.path)
        self.known = Known()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def refs(self) -> list[str]:
        return [str(ref) for ref in self.store.refs()]

    def one_of(self, number: int) -> str:
        return self.refs()[number % len(self.refs())]

    # -- what is done; each step may be one of a process that dies

    def commit(self, seed: int, number: int):
        """A version, perhaps made of another."""
        inputs = [self.one_of(number)] if number % 2 and self.refs() else []
        yield "made", str(written(self.path, seed, 1 + seed % 3, inputs=inputs).ref)

    def move(self, seed: int, number: int):
        """A tag moves."""
        ref = self.one_of(number)
        self.store.tag("a", "prod", ref, why=f"seed {seed}")
        yield "tagged", ref

    def delete(self, seed: int, number: int):
        """A version is deleted, unless a tag points at it."""
        ref = self.one_of(number)
        if self.store.tagged("a", "prod") != ref:
            remove(self.store, ref)
            yield "gone", ref

    def clean(self, seed: int, number: int):
        """Old versions expire, and their data go at once, or stay a day."""
        for expiring in collect(self.store, self.rule_of(seed, number), apply=True).marked:
            yield "gone", str(expiring.ref)

    def rule_of(self, seed: int, number: int) -> Rule:
        return Rule(keep=1 + seed % 3, grace_seconds=number % 2 * 86400)

    def leaving(self, step: str, seed: int, number: int) -> set[str]:
        """What may be gone after a step that was begun."""
        if step == "delete":
            return {self.one_of(number)}
        kept = find_kept(self.store, self.rule_of(seed, number).keep, 1).versions
        return set(self.refs()) - set(map(str, kept)) if step == "clean" else set()

    # -- rules

    @rule(seed=SEEDS, number=NUMBERS)
    def a_version_is_made(self, seed, number):
        self.acknowledge(self.commit(seed, number))

    @precondition(lambda self: self.refs())
    @rule(seed=SEEDS, number=NUMBERS)
    def a_tag_moves(self, seed, number):
        self.acknowledge(self.move(seed, number))

    @precondition(lambda self: self.refs())
    @rule(number=NUMBERS)
    def a_move_on_a_wrong_guess_is_refused(self, number):
        with pytest.raises(ConflictError):
            self.store.tag("a", "prod", self.one_of(number), expected="a/logprobs@999999")

    @precondition(lambda self: self.refs())
    @rule(number=NUMBERS)
    def a_version_is_deleted(self, number):
        self.acknowledge(self.delete(0, number))

    @rule(seed=SEEDS, number=NUMBERS)
    def gc_cleans_up(self, seed, number):
        leaving = self.leaving("clean", seed, number)
        steps = list(self.clean(seed, number))
        assert {ref for _, ref in steps} == leaving
        self.acknowledge(steps)

    @precondition(lambda self: self.refs())
    @rule(
        step=st.sampled_from(["commit", "move", "delete", "clean"]),
        place=st.sampled_from(["before", "after"]),
        time=st.integers(1, 80),
        seed=SEEDS,
        number=NUMBERS,
    )
    def a_process_dies(self, step, place, time, seed, number):
        expected, leaving = self.one_of(number), self.leaving(step, seed, number)
        failure = f"{place}@{time}:kill"
        _, acknowledged = in_child(lambda: getattr(self, step)(seed, number), failure)
        self.settle(step, expected, leaving, acknowledged)

    @precondition(lambda self: self.refs())
    @rule(
        step=st.sampled_from(["commit", "move", "clean"]),
        seed=SEEDS,
        number=NUMBERS,
        moment=NUMBERS,
    )
    def the_power_fails(self, step, seed, number, moment):
        expected, leaving = self.one_of(number), self.leaving(step, seed, number)
        scene = Scene(lambda path, seed: getattr(self, step)(seed, number))
        states = list(crash_states(record(self.path, scene, seed)))
        if not states:
            return  # nothing was changed
        shutil.rmtree(self.path)
        self.path.mkdir()
        state = states[moment % len(states)]
        state.write(self.path)
        self.settle(step, expected, leaving, list(state.acknowledged))

    @rule()
    def it_is_opened_again(self):
        self.store = Store(self.path)

    # -- what is known since

    def acknowledge(self, steps) -> None:
        for what, ref in steps:
            self.known.manifests.pop(ref if what == "gone" else None, None)
            self.known.acknowledge(what, ref, self.store)

    def settle(self, step: str, ref: str, leaving: set[str], acknowledged) -> None:
        """After a step that may have been done or not."""
        self.acknowledge(acknowledged)
        if step == "move":
            before = self.known.tags or {None}
            assert self.store.tagged("a", "prod") in before | {ref}
            self.known.tags = {self.store.tagged("a", "prod")}
        for left in map(refs.parse, leaving):
            if not self.store.exists(left):
                assert is_marked(self.store, left)
                self.known.manifests.pop(str(left), None)

    @invariant()
    def all_is_there(self):
        require_invariants(self.path, self.known, [])
        for ref in self.refs():
            self.known.acknowledge("made", ref, self.store)


@pytest.mark.parametrize("count", sizes(short=2, full=400))
def test_histories(record_property, count):
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=count,
            stateful_step_count=10 if count < 50 else 25,
            deadline=None,
            database=None,
            derandomize=count < 50,
            suppress_health_check=list(HealthCheck),
        ),
    )
    record_property("random histories", count)
