"""Every algorithm raises the reward of a toy task, on a tiny llama and a tiny T5, and so does every
precision: one config, only these differ. An adapter does on a task that its few numbers can solve."""

from statistics import fmean

import pytest
import torch

from quiver.stages.model.loading import load_model
from quiver.stages.optimize.algorithms import ALGORITHMS
from tests.stages.optimize import world
from tests.tiny import make_policy

ITERATIONS = 10
WAYS = [{"algorithm": name} for name in ALGORITHMS]
WAYS += [{"precision": precision} for precision in ("bf16", "bf16_stochastic")]
WAYS += [{"optimizer": "adamw_8bit"}]


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


@pytest.mark.slow
def test_an_adapter_learns_to_prefer_low_ids(store):
    """Each iteration samples from the merged weights and goes on from base and adapter; the audit
    sees no difference between the two."""

    def low_share(row: dict) -> float:
        return fmean(token < 64 for token in row["completion_ids"])

    policy, shares = make_policy(store, "tiny", "llama"), []
    config = world.config(lora={}, learning_rate=1e-2, minibatches=2, audit={"max_mean_gap": 1e-5})
    for iteration in range(7):
        model = load_model(policy, dtype=torch.float32)
        rows = world.sample(model, world.prompts(6), 16, seed=iteration)
        shares.append(fmean(map(low_share, rows)))
        rollouts = world.write_rollouts(store, policy, rows)
        rewards = world.write_rewards(store, rollouts, low_share)
        policy = world.trained(store, policy, (rollouts, rewards), config)
    assert policy.manifest.input("base").ref == "tiny/policy@0"
    assert shares[-1] > shares[0] + 0.2
