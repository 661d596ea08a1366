"""Functions in threads, and Python's parser under several."""

import gc
import sys
import threading

import pytest

from quiver.stages.common.threads import parse_python


@pytest.fixture
def often_switched():
    """Threads are switched at each chance, and collecting garbage gives many: it runs Python."""

    def collected(phase, info):
        return list(range(20))

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(10)
    gc.callbacks.append(collected)
    yield
    gc.callbacks.remove(collected)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def test_threads_may_parse_at_once(often_switched):
    """With `ast.parse` itself three of four threads end in a SystemError on Python 3.11."""
    parsed = []

    def parse():
        for _ in range(50):
            parsed.append(len(parse_python("x = (1, [2, {3: f(4)}])\n" * 20).body))

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parsed == [20] * 200


def test_what_is_no_python_is_told_as_the_parser_does():
    with pytest.raises(SyntaxError):
        parse_python(b"def")
    assert len(parse_python(b"def f(): pass").body) == 1
