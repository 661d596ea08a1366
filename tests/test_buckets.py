"""The servers of buckets keep what a store builds on: of writers that race one wins."""

import threading
from concurrent.futures import ThreadPoolExecutor

import obstore
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
def test_one_of_sixteen_creates_an_object_and_one_replaces_it(bucket):
    stores = [from_url(bucket.url) for _ in range(RACERS)]

    def require_one(key: str, mode) -> None:
        winners = race(lambda racer: obstore.put(stores[racer], key, b"%d" % racer, mode=mode))
        assert [b"%d" % winner for winner in winners] == [obstore.get(stores[0], key).bytes()]

    for number in range(5):
        require_one(f"key{number}", "create")
    seen = dict(obstore.put(stores[0], "key0", b"seen by all"))
    require_one("key0", {name: text for name, text in seen.items() if text})
