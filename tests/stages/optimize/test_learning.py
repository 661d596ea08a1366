"""Every algorithm raises the reward of a toy task, on a tiny llama and a tiny T5, and so does every
precision and an adapter: one config, only these differ."""

from statistics import fmean

import pytest

from quiver.stages.optimize.algorithms import ALGORITHMS
from tests.stages.optimize import world
from tests.tiny import make_policy

ITERATIONS = 10
WAYS = [{"algorithm": name} for name in ALGORITHMS]
WAYS += [{"precision": precision} for precision in ("bf16", "bf16_stochastic")]
WAYS += [{"optimizer": "adamw_8bit"}]
WAYS += [{"lora": {}, "learning_rate": 5e-2}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("fields", WAYS, ids=lambda fields: str(next(iter(fields.values()))))
def test_it_learns_to_prefer_even_ids(store, kind, fields):
    """Each iteration samples anew from the policy as it is and takes two steps, so that bounds are
    met."""
    policy, shares = make_policy(store, kind, kind), []
    config = world.config(**{"learning_rate": 2e-2, "minibatches": 2, **fields})
    for iteration in range(ITERATIONS + 1):
        made = world.by_engine(store, policy, groups=6, each=16, seed=iteration, temperature=1.0)
        shares.append(fmean(map(world.even_share, made[0].table().to_pylist())))
        policy = world.trained(store, policy, made, config)
    assert shares[-1] > shares[0] + 0.15
