"""Rollouts and rewards of the tiny policy, for every test that trains on them."""

import pytest

from tests.stages.optimize import world


@pytest.fixture
def made(store, policy):
    """(rollouts, rewards) of the tiny policy."""
    return world.make(store, policy, world.even_share)
