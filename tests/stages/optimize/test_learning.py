"""Every algorithm raises the reward of a toy task, on a tiny llama and a tiny T5: one config, only
the name differs."""

from functools import partial
from statistics import fmean

import pytest

from quiver.stages.optimize.algorithms import ALGORITHMS
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.stages.optimize.test_seq2seq_policies import sampled
from tests.tiny import make_policy
from tests.writing import run_here

run = partial(run_here, "optimize")


ITERATIONS = 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_learns_to_prefer_even_ids(store, kind, algorithm):
    """Each iteration samples anew from the policy as it is and takes two steps, so that bounds are
    met."""
    policy, shares = make_policy(store, kind, kind), []
    config = Config(algorithm=algorithm, learning_rate=2e-2, minibatches=2, device="cpu")
    for iteration in range(ITERATIONS + 1):
        rollouts = sampled(store, policy, groups=6, each=16, seed=iteration, temperature=1.0)
        shares.append(fmean(map(world.even_share, rollouts.table().to_pylist())))
        rewards = world.write_rewards(store, rollouts, world.even_share, run=kind)
        refs = {"policy": policy.ref, "rollouts": rollouts.ref, "rewards": rewards.ref}
        policy = store.open(run(config, store, **refs))
    assert shares[-1] > shares[0] + 0.15
