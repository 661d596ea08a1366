"""gdpo on rewards that the reward stage made: their parts by name, with the weights that it gave
them."""

import math
from statistics import stdev

import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.model.loading import load_model
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize.inputs import RolloutSet
from quiver.stages.reward.config import Config as RewardConfig
from quiver.stages.reward.override import Config as OverrideConfig
from tests.stages.optimize import world
from tests.writing import run_here

MINE = """
def even(completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def overlong(completion_ids):
    return [-len(ids) / 8 for ids in completion_ids]

def high(completion_ids):
    return [None if ids[0] % 5 == 0 else max(ids) / 300 for ids in completion_ids]
"""


@pytest.fixture
def rewarded(store, policy, tmp_path):
    """(run, seed, weights by function) -> rollouts and their rewards, with an overlong penalty."""
    (tmp_path / "mine.py").write_text(MINE)
    model = load_model(policy, dtype=torch.float32)

    def make(run: str, seed: int, *, penalty: bool = True, **weights: float):
        rows = world.sample(model, world.prompts(3, seed), 4, seed=seed)
        rows = [row | {"rollout_id": f"{run}-{row['rollout_id']}"} for row in rows]
        asked = world.write_prompts(store, rows, run)
        rollouts = world.write_rollouts(store, policy, rows, run, prompts=asked)
        functions = [
            {"use": f"{tmp_path}/mine.py:{name}", "weight": weight}
            for name, weight in weights.items()
        ]
        overlong = {"max_tokens": 8, "cache": 6, "weight": 0.3} if penalty else None
        config = RewardConfig(functions=functions, overlong=overlong, workers=1)
        return rollouts, store.open(run_here("reward", config, store, rollouts=rollouts.ref))

    return make


def test_parts_and_weights_are_those_of_the_reward_stage(policy, rewarded):
    """Of two versions that are trained on together, each has functions and weights of its own; one
    function does not apply everywhere."""
    made = [rewarded("tiny", 1, even=2.0, high=0.5), rewarded("other", 2, high=1.5)]
    versions = [
        RolloutSet({"policy": policy, "rollouts": rollouts, "rewards": rewards})
        for rollouts, rewards in made
    ]
    columns = joining._parts(world.config(algorithm="gdpo"), versions)
    weights = [{"even": 2.0, "high": 0.5, "overlong": 0.3}, {"high": 1.5, "overlong": 0.3}]
    names = made[0][1].table().schema.field("parts").type.names
    found, expected = [], []
    for (_, rewards), by_name in zip(made, weights, strict=True):
        for row in rewards.table().to_pylist():
            parts = {name: part for name, part in row["parts"].items() if part is not None}
            expected.append([(parts[name], by_name[name]) for name in names if name in parts])
    for parts, part_weights in zip(columns["parts"], columns["part_weights"], strict=True):
        pairs = zip(parts.tolist(), part_weights.tolist(), strict=True)
        found.append([pair for pair in pairs if not math.isnan(pair[0])])
    assert found == expected
    assert {len(parts) for parts in found[:12]} == {2, 3}


def test_a_function_may_have_the_name_of_the_penalty(policy, rewarded):
    rollouts, rewards = rewarded("tiny", 1, penalty=False, even=2.0, overlong=0.25)
    version = RolloutSet({"policy": policy, "rollouts": rollouts, "rewards": rewards})
    columns = joining._parts(world.config(algorithm="gdpo"), [version])
    names = rewards.table().schema.field("parts").type.names
    assert dict(zip(names, columns["part_weights"][0].tolist(), strict=True)) == {
        "even": 2.0,
        "overlong": 0.25,
    }


def test_a_group_of_equal_sums_is_learned_from_where_its_parts_differ(store, policy):
    """Group 0 has sums of 1 by three parts, two of spread 1/2, one of √(1/3); all of group 1 is
    equal."""
    rollouts, _ = world.make(store, policy, world.even_share, groups=2)
    rows = rollouts.table().to_pylist()
    parts = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 1), *[(0.5, 0.25, 0.25)] * 4]
    scores = [
        {
            "rollout_id": row["rollout_id"],
            "group_id": row["group_id"],
            "reward": 1.0,
            "parts": dict(zip("fgh", row_parts, strict=True)),
        }
        for row, row_parts in zip(rows, parts, strict=True)
    ]
    rewards = world.write_rewards(store, rollouts, scores, names=["f", "g", "h"])
    config = world.config(algorithm="gdpo", drop_zero_variance=True)
    done = world.trained(store, policy, (rollouts, rewards), config)
    assert done.manifest.metrics["dropped"] == {"zero_variance": 4}
    share = 0.5 / 0.5001 * 2 - 0.5 / (math.sqrt(1 / 3) + 1e-4)  # of the first two
    share -= 0.5 / 0.5001
    sums = [share, share, -share, -share, 0, 0, 0, 0]
    assert world.gains(store, done)[:4] == pytest.approx(
        [gain / (stdev(sums) + 1e-4) for gain in sums[:4]], rel=1e-5
    )


def test_sums_that_a_person_corrected_are_refused(store, policy, rewarded):
    rollouts, rewards = rewarded("tiny", 1, even=1.0)
    name = rewards.table()["rollout_id"][0].as_py()
    config = OverrideConfig(author="ada", reason="right", overrides={name: 1.0})
    corrected = store.open(run_here("override", config, store, rewards=rewards.ref))
    with pytest.raises(ConfigError, match="corrects only their sums") as caught:
        world.trained(store, policy, (rollouts, corrected), world.config(algorithm="gdpo"))
    assert str(rewards.ref) in caught.value.next
    done = world.trained(store, policy, (rollouts, corrected))
    assert math.isfinite(done.manifest.metrics["loss"])
