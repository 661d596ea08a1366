"""Fixtures of the user's cache, and of what it remembers about files."""

import time

import pytest

LATER_NS = 3_000_000_000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache of hashes; other kinds lie beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/quiver/hashes"


@pytest.fixture
def later(monkeypatch):
    """Some seconds from now: what is changed from here on was changed long ago."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + LATER_NS)
