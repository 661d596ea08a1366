"""A tiny policy, and rollouts and rewards of it, for every test that trains on them: made once, and
copied into the store of each test."""

import shutil
from pathlib import Path

import pytest

from quiver.stages.core.store import Store, Version
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.tiny import make_policy


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Store:
    """The store to copy from."""
    store = Store(tmp_path_factory.mktemp("original") / "store")
    world.make(store, make_policy(store), world.even_share)
    return store


def copied(original: Store, store: Store, kind: str, number: int) -> Version:
    """A version of the original in a store that has none of its kind."""
    source, target = (Path(each.url) / "tiny" / kind for each in (original, store))
    shutil.copytree(source, target, symlinks=True)
    return store.open(f"tiny/{kind}@{number}")


@pytest.fixture
def policy(store, original) -> Version:
    """`tiny/policy@0`: a tiny llama."""
    return copied(original, store, "policy", 0)


@pytest.fixture
def made(store, original, policy) -> tuple[Version, Version]:
    """(rollouts, rewards) of the tiny policy."""
    rollouts, rewards = (copied(original, store, kind, 1) for kind in ("rollouts", "rewards"))
    return rollouts, rewards


@pytest.fixture
def train(store, policy, made):
    """(config, start=policy, into=..., **fields) -> the policy that a training of `made` makes of the
    tiny one, or of `start`. `fields`: what its config has, where none is given."""

    def make(chosen: Config | None = None, *, start: Version = policy, **options) -> Version:
        fields = {name: options.pop(name) for name in options.keys() & Config.model_fields.keys()}
        return world.trained(store, start, made, chosen or world.config(**fields), **options)

    return make
