"""Two at once: every order of their calls with two switches, and many processes at one store."""

import math
import multiprocessing
import os
import shutil
from itertools import product
from random import Random

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import QuiverError
from quiver.stages.core.store import Store
from quiver.stages.core.store.environment import environment
from tests.faults import mutants
from tests.faults.scenes import written
from tests.faults.sizes import sizes
from tests.faults.two_writers import CONTESTS


def orders(name: str, folder) -> list[tuple[float, float]]:
    """After how many calls of the first, and then of the second, the other goes on."""
    environment()  # asks git once
    counts = CONTESTS[name].run(folder / "count", math.inf, math.inf)
    orders = list(product(range(counts[0]), [*range(max(counts)), math.inf]))
    Random(0).shuffle(orders)
    return orders


@pytest.mark.parametrize("most", sizes(short=5, full=5_000))
@pytest.mark.parametrize("name", CONTESTS)
def test_any_order_of_two_comes_to_the_same(fast_path, record_property, name, most):
    for number, order in enumerate(orders(name, fast_path)[:most]):
        CONTESTS[name].run(fast_path / str(number), *order)
        shutil.rmtree(fast_path / str(number))
    record_property("orders of two writers", number + 1)


@pytest.mark.parametrize("mutant", mutants.NOTICED_BY_TWO_WRITERS)
def test_a_mutant_is_noticed(fast_path, record_property, mutant):
    name = mutants.NOTICED_BY_TWO_WRITERS[mutant]
    for number, order in enumerate(orders(name, fast_path)):
        try:
            with mutant():
                CONTESTS[name].run(fast_path / str(number), *order)
        except (AssertionError, QuiverError, FileNotFoundError):
            record_property("protocol mutants noticed", 1)
            return
    pytest.fail("no order shows it")


def _commit_many(path, writer: int, count: int) -> None:
    code = 1
    try:
        for index in range(count):
            written(path, 1000 * writer + index, 1)
        code = 0
    finally:
        os._exit(code)  # what the test's process has open is not this one's to close


@pytest.mark.parametrize(
    ("writers", "commits", "rounds"),
    [
        pytest.param(4, 5, 1, id="short"),
        pytest.param(8, 25, sizes(1, 20)[1].values[0], id="full", marks=pytest.mark.torture),
    ],
)
def test_writers_at_once_get_each_number_once(tmp_path, record_property, writers, commits, rounds):
    context = multiprocessing.get_context("fork")
    for number in range(rounds):
        store = Store(tmp_path / str(number))
        processes = [
            context.Process(target=_commit_many, args=(store.url, writer, commits))
            for writer in range(writers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * writers
        assert store.numbers("a", "logprobs") == list(range(1, writers * commits + 1))
        assert verify(store) == (writers * commits, [])
    record_property("commits of writers at once", rounds * writers * commits)
