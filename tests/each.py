"""One test over many like things: every one that fails is reported, not only the first."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def check_each(things: Iterable[T], check: Callable[[T], None], name: Callable[[T], str] = str):
    """Call `check` on each of `things`, of which there must be some.

    Raises: AssertionError, with a line for each one whose check raised.
    """
    failed, count = [], 0
    for count, thing in enumerate(things, 1):  # noqa: B007
        try:
            check(thing)
        except Exception as error:
            failed.append(f"{name(thing)}: {type(error).__name__}: {error}")
    assert count, "there is nothing to check"
    assert not failed, "\n".join([f"{len(failed)} of {count}", *failed])
