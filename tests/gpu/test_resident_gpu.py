"""One vLLM engine for two policies on a CUDA device: asleep it leaves the device to others, and what
it samples then is what a fresh engine samples, and what the trainer reproduces."""

import pytest
import torch

from quiver.stages.core.run.call import Call, Where
from quiver.stages.core.run.stage_process import end_waiting, run_call
from tests.gpu.test_optimize_gpu import optimize
from tests.stages.generate.making import random_prompts
from tests.stages.optimize import world
from tests.tiny import make_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture
def policies(store):
    yield [make_policy(store, f"p{number}", seed=number) for number in range(2)]
    end_waiting()


def sample(store, policy, *, resident: bool):
    """Rollouts in float32, by a resident engine or by a fresh one."""
    config = {
        "device": "cuda",
        "dtype": "float32",
        "samples_per_prompt": 4,
        "sampling": {"temperature": 0.8, "max_tokens": 32},
    }
    refs = {"prompts": str(random_prompts(store, 8).ref), "policy": str(policy.ref)}
    call = Call(
        "generate", config, store.url, refs, force=True, where=Where(resident_engine=resident)
    )
    return store.open(run_call(call).ref)


def test_two_policies_by_one_engine_are_sampled_as_by_fresh_ones(store, policies):
    resident = [sample(store, policy, resident=True) for policy in policies]
    free, total = torch.cuda.mem_get_info()
    assert total - free < 8 << 30, "weights and cache were not given back"
    end_waiting()
    fresh = [sample(store, policy, resident=False) for policy in policies]
    numbers = [each.manifest.metrics["engine"].get("policies") for each in (*resident, *fresh)]
    assert numbers == [None, 2, None, None]
    for one, other in zip(resident, fresh, strict=True):
        rows = [each.table().to_pylist() for each in (one, other)]
        for row, expected in zip(*rows, strict=True):
            assert row["completion_ids"] == expected["completion_ids"]
            assert row["old_logprobs"] == pytest.approx(expected["old_logprobs"], abs=1e-4)
    assert resident[0].manifest.content_hash != resident[1].manifest.content_hash


def test_the_trainer_reproduces_what_the_second_policy_sampled(store, policies):
    rollouts = [sample(store, policy, resident=True) for policy in policies][1]
    made = (rollouts, world.write_rewards(store, rollouts, world.even_share))
    done = optimize(
        store, policies[1], made, "cuda", precision="fp32", audit={"max_mean_gap": 1e-3}
    )
    assert done.manifest.metrics["audit"]["mean_gap"] <= 1e-3
