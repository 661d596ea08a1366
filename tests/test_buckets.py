"""The servers of buckets keep what a store builds on: of writers that race one wins."""

import threading
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import from_url

from tests.buckets import every_provider

RACERS = 16


def race(write) -> list[int]:
    """The racers whose `write(number)` went through."""
    start = threading.Barrier(RACERS)

    def run(number: int) -> bool:
        start.wait()
        try:
            write(number)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    with ThreadPoolExecutor(RACERS) as racers:
        return [number for number, won in enumerate(racers.map(run, range(RACERS))) if won]


@every_provider
@pytest.mark.parametrize("number", range(5))
def test_one_of_sixteen_creates_an_object(bucket, number):
    stores = [from_url(bucket.url) for _ in range(RACERS)]
    winners = race(lambda racer: obstore.put(stores[racer], "key", b"%d" % racer, mode="create"))
    assert [b"%d" % winner for winner in winners] == [obstore.get(stores[0], "key").bytes()]


@every_provider
def test_one_of_sixteen_replaces_the_object_that_all_have_seen(bucket):
    stores = [from_url(bucket.url) for _ in range(RACERS)]
    seen = dict(obstore.put(stores[0], "key", b"first"))
    seen = {name: text for name, text in seen.items() if text}
    winners = race(lambda racer: obstore.put(stores[racer], "key", b"%d" % racer, mode=seen))
    assert [b"%d" % winner for winner in winners] == [obstore.get(stores[0], "key").bytes()]
