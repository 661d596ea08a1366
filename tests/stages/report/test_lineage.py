"""What a version was made of, down to the sources, and what of it lies outside the store."""

import shutil

import pytest

from quiver.schemas.manifest import Model
from quiver.stages.common.store import Store
from quiver.stages.report.lineage import lineage, parents_of
from tests.benchmarks.made import (
    make_prompts,
    make_rewards,
    rollouts_table,
    tiny_policy,
    write_version,
)


@pytest.fixture
def store(tmp_path) -> Store:
    """prompts → rollouts → rewards of run `bench`; a reward model that a hub's id names took part
    in the rollouts."""
    store = Store(tmp_path / "store")
    tiny_policy(store)
    asked = make_prompts(store, 2)
    models = (Model(role="reward:helpful", ref="somebody/reward-model"),)
    table = rollouts_table(4, 8, 8, 2)
    make_rewards(
        store, write_version(store, "rollouts", "generate", table, {"prompts": asked}, models)
    )
    return store


def test_the_tree_goes_down_to_the_sources(store):
    tree = lineage(store, "bench/rewards@1")
    (rollouts,) = tree["inputs"]
    assert (rollouts["role"], rollouts["ref"]) == ("rollouts", "bench/rollouts@1")
    outside, asked = rollouts["inputs"]
    assert outside == {"role": "reward:helpful", "ref": "somebody/reward-model", "inputs": []}
    assert (asked["ref"], asked["stage"]) == ("bench/prompts@1", "prompt")
    assert parents_of(store.open("bench/rollouts@1").manifest) == {"bench/prompts@1": "prompts"}


def test_what_is_gone_is_marked(store):
    shutil.rmtree(store.path / "bench/prompts/v000001")
    (rollouts,) = lineage(store, "bench/rewards@1")["inputs"]
    assert rollouts["inputs"][1] == {
        "role": "prompts",
        "ref": "bench/prompts@1",
        "inputs": [],
        "expired": True,
    }
