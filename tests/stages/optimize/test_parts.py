"""gdpo on rewards that the reward stage made: their parts by name, with the weights that it gave
them."""

import math
from statistics import fmean, stdev

import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.loading import load_model
from quiver.stages.reward.config import Config as RewardConfig
from quiver.stages.reward.override import Config as OverrideConfig
from tests.stages.optimize import world
from tests.writing import run_here

MINE = """
def even(completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def high(completion_ids):
    return [None if ids[0] % 5 == 0 else max(ids) / 300 for ids in completion_ids]
"""


@pytest.fixture
def rewarded(store, policy, tmp_path):
    """(run, seed, weights by function) -> rollouts and their rewards, with an overlong penalty."""
    (tmp_path / "mine.py").write_text(MINE)
    model = load_model(policy, dtype=torch.float32)

    def make(run: str, seed: int, **weights: float):
        rows = world.sample(model, world.prompts(3, seed), 4, seed=seed)
        rows = [row | {"rollout_id": f"{run}-{row['rollout_id']}"} for row in rows]
        asked = world.write_prompts(store, rows, run)
        rollouts = world.write_rollouts(store, policy, rows, run, prompts=asked)
        functions = [
            {"use": f"{tmp_path}/mine.py:{name}", "weight": weight}
            for name, weight in weights.items()
        ]
        overlong = {"max_tokens": 8, "cache": 6, "weight": 0.3}
        config = RewardConfig(functions=functions, overlong=overlong, workers=1)
        return rollouts, store.open(run_here("reward", config, store, rollouts=rollouts.ref))

    return make


def _expected(*scored: tuple[list[dict], dict[str, float]]) -> dict[str, float]:
    """By rollout, of the rows of each rewards version and the weights of its parts."""
    sums = {}
    for all_rows, weights in scored:
        rows = [row for row in all_rows if row["reward"] is not None]
        for row in rows:
            sums[row["rollout_id"]] = 0.0
            for name, weight in weights.items():
                peers = [r["parts"][name] for r in rows if r["group_id"] == row["group_id"]]
                peers = [part for part in peers if part is not None]
                if row["parts"][name] is not None and len(peers) > 1:
                    deviation = row["parts"][name] - fmean(peers)
                    sums[row["rollout_id"]] += weight * deviation / (stdev(peers) + 1e-4)
    std = stdev(sums.values())
    return {name: value / (std + 1e-4) for name, value in sums.items()}


def test_parts_and_weights_are_those_of_the_reward_stage(store, policy, rewarded):
    """Of two versions that are trained on together, each has functions and weights of its own."""
    first = rewarded("tiny", 1, even=2.0, high=0.5)
    second = rewarded("other", 2, high=1.5)
    refs = {"rollouts": [], "rewards": []}
    for rollouts, rewards in (first, second):
        refs["rollouts"].append(rollouts.ref)
        refs["rewards"].append(rewards.ref)
    done = world.trained(store, policy, first, world.config(algorithm="gdpo"), **refs)
    table = store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    expected = _expected(
        (first[1].table().to_pylist(), {"even": 2.0, "high": 0.5, "overlong": 0.3}),
        (second[1].table().to_pylist(), {"high": 1.5, "overlong": 0.3}),
    )
    found = {row["rollout_id"]: row["advantage"] for row in table if row["kept"]}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len(found) < len(table)  # where no function applied there is no reward
    parts = [row["parts"]["high"] for row in first[1].table().to_pylist()]
    assert None in parts  # one of two did not apply


def test_a_group_of_equal_sums_is_learned_from_where_its_parts_differ(store, policy):
    """Group 0 has sums of 1 by three parts, two of spread 1/2, one of √(1/3); all of group 1 is
    equal."""
    rows = world.make(store, policy, world.even_share, groups=2)[0].table().to_pylist()
    rollouts = world.write_rollouts(store, policy, rows)
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
    table = store.open(done.manifest.metrics["advantages"]).table()
    assert table["advantage"].to_pylist()[:4] == pytest.approx(
        [value / (stdev(sums) + 1e-4) for value in sums[:4]], rel=1e-5
    )


def test_sums_that_a_person_corrected_are_refused(store, policy, rewarded):
    rollouts, rewards = rewarded("tiny", 1, even=1.0)
    name = rewards.table()["rollout_id"][0].as_py()
    config = OverrideConfig(author="ada", reason="right", overrides={name: 1.0})
    corrected = store.open(run_here("override", config, store, rewards=rewards.ref))
    with pytest.raises(ConfigError, match="corrects their sums alone") as caught:
        world.trained(store, policy, (rollouts, corrected), world.config(algorithm="gdpo"))
    assert str(rewards.ref) in caught.value.next
    assert math.isfinite(
        world.trained(store, policy, (rollouts, corrected)).manifest.metrics["loss"]
    )
