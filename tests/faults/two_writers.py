"""Two processes at one store, and every order of their calls with two switches from one to the
other.

They are two threads, of which one runs: the first up to its n-th call, the second up to its m-th,
the first to its end, the second to its end. A lease that is not renewed counts as given up at once,
so whoever waits is one that was asleep for too long.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from quiver.schemas.errors import BusyError, ConflictError, LineageError, QuiverError
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Store, leases
from quiver.stages.core.store.listing import Listing
from quiver.stages.core.store.retention import Rule, collect, remove
from tests.faults import scenes
from tests.faults.seam import watched

_SECONDS = 60
_MOST_CALLS = 2_000
Outcome = str | QuiverError


class _Turns:
    """Which of two threads runs."""

    def __init__(self, *lengths: float) -> None:
        self.counts = [0, 0]
        """Calls that each has done."""
        self._left = list(lengths)
        self._running = 0
        self._at_work = {0, 1}
        self._changed = threading.Condition()
        self._numbers: dict[int, int] = {}

    def begin(self, number: int) -> None:
        """The thread that calls is the first or the second, and waits for its turn."""
        self._numbers[threading.get_ident()] = number
        with self._changed:
            self._wait_for(number)

    def around(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        """Before each call the other may have its turn."""
        number = self._numbers.get(threading.get_ident())
        if number is not None:
            with self._changed:
                if self._left[number] == 0 and 1 - number in self._at_work:
                    self._left[number] = math.inf
                    self._pass_on(number)
                    self._wait_for(number)
                self._left[number] -= 1
                self.counts[number] += 1
                assert self.counts[number] < _MOST_CALLS, "it turns round and round"
        return call()

    def end(self, number: int) -> None:
        """It is done."""
        with self._changed:
            self._at_work.discard(number)
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self._running = 1 - number
        self._changed.notify_all()

    def _wait_for(self, number: int) -> None:
        assert self._changed.wait_for(lambda: self._running == number, _SECONDS), "both wait"


@dataclass(frozen=True)
class Contest:
    """What two do at once, what is there before, and what must have come of it."""

    does: Callable[[Path, int], str]
    """Is given 0 or 1."""
    before: Callable[[Path], None]
    require: Callable[[Path, list[Outcome]], None]
    seconds_to_live: float = 0.0
    """Of a lease."""

    def run(self, path: Path, *lengths: float) -> list[int]:
        """Let them do it in turns of these lengths, and look at what came of it. How many calls
        each has done."""
        self.before(path)
        turns = _Turns(*lengths)
        outcomes: list[Any] = [None, None]

        def work(number: int) -> None:
            turns.begin(number)
            try:
                outcomes[number] = self.does(path, number)
            except QuiverError as error:
                outcomes[number] = error
            except Exception as error:
                outcomes[number] = AssertionError(repr(error))
            finally:
                turns.end(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        with (
            patch.object(leases, "SECONDS_TO_LIVE", self.seconds_to_live),
            # each process has its own
            patch.object(leases, "_renewing", nullcontext()),
            # Python 3.11 computes them in one thread at a time, whosever they are
            patch.object(Plan.listing, "lock", nullcontext()),
            patch.object(Plan.repetition, "lock", nullcontext()),
            patch.object(Listing._lines, "lock", nullcontext()),
            watched(turns.around),
        ):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for outcome in outcomes:
            if isinstance(outcome, AssertionError):
                raise outcome
        self.require(path, outcomes)
        return turns.counts


def _require_same(path: Path, outcomes: list[Outcome], kind: str = "logprobs") -> None:
    """One version, which nobody lost; who was asleep may be told so, and who is disturbed by
    him."""
    refs = {outcome for outcome in outcomes if not isinstance(outcome, BusyError)}
    (last,) = Store(path).numbers("a", kind)[-1:] or [None]
    assert refs <= {f"a/{kind}@{last}"}, outcomes
    scenes.require_invariants(path, scenes.Known.of(path), [])
    run_keys = [version.manifest.run_key for version in Store(path).versions("a", kind)]
    assert len(run_keys) == len(set(run_keys)), "it is there twice"


def _require_same_rows(path: Path, outcomes: list[Outcome]) -> None:
    _require_same(path, outcomes)
    assert scenes.written(path, 1, 2).table()["rollout_id"].to_pylist() == [
        f"r{1000 + row}" for row in range(4)
    ]


def _require_same_policy(path: Path, outcomes: list[Outcome]) -> None:
    _require_same(path, outcomes, "policy")
    *_, (_, ref) = scenes.three_kinds(path, 1)
    policy = Store(path).open(ref)
    assert {"model.safetensors", "optimizer/state.safetensors"} <= set(policy.files.names)
    for kind in ("advantages", "updates"):
        assert Store(path).open(f"a/{kind}@latest").table().num_rows == 1


def _require_each(path: Path, outcomes: list[Outcome]) -> None:
    """Both versions, each with its own number."""
    assert sorted(outcomes) == ["a/logprobs@2", "a/logprobs@3"]
    for seed, ref in enumerate(outcomes, 1):
        first_id = f"r{1000 * seed}"
        assert Store(path).open(ref).table()["rollout_id"][0].as_py() == first_id
    scenes.require_invariants(path, scenes.Known.of(path), [])


def _move(path: Path, number: int) -> str:
    ref = f"a/logprobs@{2 + number}"
    return str(Store(path).tag("a", "prod", ref, expected="a/logprobs@1"))


def _require_one_move(path: Path, outcomes: list[Outcome]) -> None:
    """One has moved the tag, the other was told that it is elsewhere by now."""
    assert sum(isinstance(outcome, ConflictError) for outcome in outcomes) == 1, outcomes
    (moved,) = [outcome for outcome in outcomes if isinstance(outcome, str)]
    store = Store(path)
    assert store.tagged("a", "prod") == moved
    assert [entry.ref for entry in store.history("a", "prod")] == ["a/logprobs@1", moved]


def _clean(path: Path) -> str:
    collect(Store(path), Rule(keep=1, grace_seconds=0), apply=True)
    return "cleaned"


def _require_what_is_tagged(path: Path, outcomes: list[Outcome]) -> None:
    """Who tags a version that expires meanwhile is told; else it stays, also after another gc."""
    moved, cleaned = outcomes
    assert cleaned == "cleaned" and isinstance(moved, LineageError | str), outcomes
    _clean(path)
    store = Store(path)
    assert store.tagged("a", "prod") == (moved if isinstance(moved, str) else "a/logprobs@1")
    assert store.open("a/logprobs@prod").table().num_rows == 2
    scenes.require_invariants(path, scenes.Known(), [])


def _require_one_of(path: Path, outcomes: list[Outcome]) -> None:
    """A version that a stage reads is not removed; and a stage does not begin with a removed
    one."""
    made, removed = outcomes
    assert isinstance(made, LineageError | str) and isinstance(removed, ConflictError | str)
    assert not isinstance(removed, ConflictError) or Store(path).open("a/logprobs@2").table()
    scenes.require_invariants(path, scenes.Known.of(path), [])


def _tagged(path: Path) -> None:
    for number in range(3):
        scenes.written(path, 100 + number, 1)
    Store(path).tag("a", "prod", "a/logprobs@1")


CONTESTS = {
    "the same work": Contest(
        lambda path, number: str(scenes.written(path, 1, 2, process=number).ref),
        lambda path: scenes.earlier(path, 1),
        _require_same_rows,
    ),
    "shared work": Contest(
        lambda path, number: str(scenes.written(path, 1, 2, share=True, process=number).ref),
        lambda path: scenes.earlier(path, 1),
        _require_same_rows,
    ),
    "one checkpoint": Contest(
        lambda path, number: list(scenes.three_kinds(path, 1, number))[-1][1],
        lambda path: scenes.earlier(path, 0),
        _require_same_policy,
    ),
    "other work": Contest(
        lambda path, number: str(scenes.written(path, 1 + number, 2).ref),
        lambda path: scenes.earlier(path, 1),
        _require_each,
    ),
    "a tag": Contest(_move, _tagged, _require_one_move),
    "a tag beside gc": Contest(
        lambda path, number: _clean(path) if number else _move(path, 0),
        _tagged,
        _require_what_is_tagged,
    ),
    "a stage beside rm": Contest(
        lambda path, number: str(
            remove(Store(path), "a/logprobs@2")[0]
            if number
            else scenes.written(path, 1, 1, inputs=["a/logprobs@2"]).ref
        ),
        _tagged,
        _require_one_of,
        seconds_to_live=60.0,
    ),
}
