"""Every algorithm raises the reward of a toy task, on a tiny llama and a tiny T5, and so does every
precision: one config, only these differ. An adapter does on a task that its few numbers can solve."""

from statistics import fmean

import pytest
import torch
from transformers import T5ForConditionalGeneration

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Version
from quiver.stages.optimize.algorithms import ALGORITHMS
from tests.stages.optimize import world
from tests.tiny import make_folder, make_policy

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


def _policy_for_adapters(store, folder, kind: str) -> Version:
    """`kind/policy@0`. A T5's embeddings are as large as T5's own.

    T5 divides its logits by sqrt(d_model), and adapters leave the head as it is: the logits of the
    usual tiny model stay below 0.9 whatever is learned, which is too little to prefer a token.
    """
    make_folder(folder, kind)
    if kind == "t5":
        model = T5ForConditionalGeneration.from_pretrained(folder)
        with torch.no_grad():
            model.shared.weight *= 8
        model.save_pretrained(folder)
    config = {"model": str(folder)}
    return store.open(run_stage("policy", config, store, into=kind, in_process=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_an_adapter_learns_to_prefer_low_ids(store, tmp_path, kind):
    """Each iteration samples from the merged weights and goes on from base and adapter; the audit
    sees no difference between the two."""

    def low_share(row: dict) -> float:
        return fmean(token < 64 for token in row["completion_ids"])

    policy, shares = _policy_for_adapters(store, tmp_path / kind, kind), []
    config = world.config(lora={}, learning_rate=1e-2, minibatches=2, audit={"max_mean_gap": 1e-5})
    for iteration in range(9):
        rollouts, _ = world.by_engine(
            store, policy, groups=6, each=16, seed=iteration, temperature=1.0
        )
        shares.append(fmean(map(low_share, rollouts.table().to_pylist())))
        rewards = world.write_rewards(store, rollouts, low_share, kind)
        policy = world.trained(store, policy, (rollouts, rewards), config)
    assert policy.manifest.input("base").ref == f"{kind}/policy@0"
    assert shares[-1] > shares[0] + 0.2
