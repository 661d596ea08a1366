"""Every algorithm raises the reward of a toy task on the tiny model, from one config in which only the name differs."""

from statistics import fmean

import pytest
import torch

from stages.common.models import load_model
from stages.optimize.algorithms import ALGORITHMS
from stages.optimize.stage import Config, run
from tests.stages.optimize import world

ITERATIONS = 8


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_learns_to_prefer_even_ids(store, policy, algorithm):
    """Each iteration samples anew from the policy as it is and takes two steps, so that bounds are met."""
    config = {"learning_rate": 1e-2, "minibatches": 2, "max_completion_tokens": 8, "device": "cpu"}
    shares = []
    for iteration in range(ITERATIONS + 1):
        rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(6), 16, seed=iteration)
        shares.append(fmean(map(world.even_share, rows)))
        rollouts = world.write_rollouts(store, policy, rows)
        rewards = world.write_rewards(store, rollouts, world.even_share)
        chosen = Config(algorithm=algorithm, **config)
        policy = store.open(run(chosen, store, policy=policy.ref, rollouts=rollouts.ref, rewards=rewards.ref))
    assert shares[-1] > shares[0] + 0.15
