"""reinforce_pp_to_go: a token answers for the rewards that come after it."""

import itertools
import math
from statistics import fmean, stdev

import pytest
import torch

from quiver.stages.optimize import estimators
from tests.stages.optimize import world


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_the_reward_to_go_is_the_discounted_sum_of_what_follows(gamma):
    rewards = [0.5, -0.25, 1.0, 2.0, 0.0, 0.125, -3.0]
    offsets = [0, 3, 4, 7]
    expected = [
        sum(gamma ** (k - t) * rewards[k] for k in range(t, end))
        for start, end in itertools.pairwise(offsets)
        for t in range(start, end)
    ]
    found = estimators.reward_to_go(torch.tensor(rewards), torch.tensor(offsets), gamma=gamma)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_stage_lays_on_a_token_the_kl_that_comes_after_it(store, policy):
    """One rollout has no reward, one was cut and is masked: whitened over the tokens of the
    others."""
    rows = world.rows_of(policy, 2, 4)
    for row in rows:
        row["finish_reason"] = "length" if row["rollout_id"] == "r-001-2" else "stop"
    made = world.scored(
        store,
        policy,
        rows,
        lambda row: None if row["rollout_id"] == "r-000-1" else world.even_share(row),
    )
    gaps = [[0.1 * (t % 3) - 0.1 for t in range(len(row["completion_ids"]))] for row in rows]
    lower = [
        [old - gap for old, gap in zip(row["old_logprobs"], row_gaps, strict=True)]
        for row, row_gaps in zip(rows, gaps, strict=True)
    ]
    ref = world.write_logprobs(store, made[0], lower, "ref", policy)
    config = world.config(
        algorithm="reinforce_pp_to_go", gamma=0.9, on_length="mask", kl_coef=0.5, kl_in_reward=True
    )
    done = world.trained(store, policy, made, config, ref_logprobs=ref.ref)
    to_come = {}
    for row, row_gaps in zip(rows, gaps, strict=True):
        rewards = [-0.5 * gap for gap in row_gaps]
        rewards[-1] += world.even_share(row)
        for t in reversed(range(len(rewards) - 1)):
            rewards[t] += 0.9 * rewards[t + 1]
        to_come[row["rollout_id"]] = rewards
    del to_come["r-000-1"], to_come["r-001-2"]
    tokens = [gain for gains in to_come.values() for gain in gains]
    saved = {row["rollout_id"]: row["advantage"] for row in world.advantages(store, done)}
    for name, gains in to_come.items():
        expected = [(gain - fmean(tokens)) / (stdev(tokens) + 1e-8) for gain in gains]
        assert saved[name] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert math.isfinite(done.manifest.metrics["loss"])
    assert done.manifest.metrics["dropped"] == {"length": 1, "not_scored": 1}
