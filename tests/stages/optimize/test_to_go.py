"""reinforce_pp_to_go: a token answers for the rewards that come after it."""

import itertools
import math
from statistics import fmean, stdev

import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.common.config import parse
from quiver.stages.optimize import estimators
from quiver.stages.optimize.stage import Config
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


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_the_stage_lays_on_a_token_the_kl_that_comes_after_it(store, policy, kl_coef):
    """One rollout has no reward, one was cut and is masked: whitened over the tokens of the
    others."""
    rows = world.make(store, policy, world.even_share, groups=2)[0].table().to_pylist()
    for row in rows:
        row["finish_reason"] = "length" if row["rollout_id"] == "r-001-2" else "stop"
    rollouts = world.write_rollouts(store, policy, rows)
    rewards = world.write_rewards(
        store,
        rollouts,
        lambda row: None if row["rollout_id"] == "r-000-1" else world.even_share(row),
    )
    gaps = [[0.1 * (t % 3) - 0.1 for t in range(len(row["completion_ids"]))] for row in rows]
    ref = world.write_logprobs(
        store,
        rollouts,
        [
            [old - gap for old, gap in zip(row["old_logprobs"], row_gaps, strict=True)]
            for row, row_gaps in zip(rows, gaps, strict=True)
        ],
        "ref",
        policy,
    )
    config = world.config(
        algorithm="reinforce_pp_to_go", gamma=0.9, on_length="mask",
        kl_coef=kl_coef, kl_in_reward=kl_coef > 0,
    )  # fmt: skip
    done = world.trained(store, policy, (rollouts, rewards), config, ref_logprobs=ref.ref)
    to_come = {}
    for row, row_gaps in zip(rows, gaps, strict=True):
        if row["rollout_id"] in ("r-000-1", "r-001-2"):
            continue
        per_token = [-kl_coef * gap for gap in row_gaps]
        per_token[-1] += world.even_share(row)
        to_come[row["rollout_id"]] = [
            sum(0.9 ** (k - t) * per_token[k] for k in range(t, len(per_token)))
            for t in range(len(per_token))
        ]
    tokens = [value for values in to_come.values() for value in values]
    table = store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    assert [row["rollout_id"] for row in table if row["kept"]] == list(to_come)
    for row in table:
        if row["kept"]:
            expected = [
                (value - fmean(tokens)) / (stdev(tokens) + 1e-8)
                for value in to_come[row["rollout_id"]]
            ]
            assert row["advantage"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert math.isfinite(done.manifest.metrics["loss"])
    assert done.manifest.metrics["dropped"] == {"length": 1, "not_scored": 1}


def test_without_a_kl_and_a_discount_a_token_has_its_rollouts_reward():
    rewards, offsets = torch.tensor([0.0, 0.0, 2.0, 0.0, -1.0]), torch.tensor([0, 3, 5])
    found = estimators.reward_to_go(rewards, offsets)
    assert found.tolist() == [2.0, 2.0, 2.0, -1.0, -1.0]


def test_of_a_critics_options_it_takes_gamma_alone():
    assert Config(algorithm="reinforce_pp_to_go", gamma=0.9).resolved().gamma == 0.9
    for given in ({"gae_lambda": 0.5}, {"value_coef": 0.5}):
        with pytest.raises(ConfigError, match="would have no effect"):
            parse(Config, {"algorithm": "reinforce_pp_to_go", **given}, "optimize")
