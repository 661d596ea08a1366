"""How much is tried: little in `make test`, all in `make torture`."""

from __future__ import annotations

import math
import os
from random import Random

import pytest

SHARE = float(os.environ.get("TORTURE_SHARE", "1"))
"""Of the full number of trials; `TORTURE_SHARE=0.1 make torture` takes a tenth of the time."""


def sizes(short: int, full: int) -> list:
    """Values of a parameter that says how much is tried."""
    count = max(1, round(full * SHARE))
    return [
        pytest.param(short, id="short"),
        pytest.param(count, id="full", marks=pytest.mark.torture),
    ]


LENGTHS = [
    pytest.param(False, id="short"),
    pytest.param(True, id="full", marks=pytest.mark.torture),
]


def part(seeds: range) -> range:
    """The first `SHARE` of these seeds, at least one."""
    return seeds[: math.ceil(SHARE * len(seeds))]


def some(trials: list, short: int, is_full: bool) -> list:
    """A sample of the trials: always the same `short` ones, or `SHARE` of them all."""
    count = math.ceil(SHARE * len(trials)) if is_full else min(short, len(trials))
    return Random(0).sample(trials, count)
