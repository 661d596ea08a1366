"""How much is tried: little in `make test`, all in `make torture`."""

from __future__ import annotations

import os

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
