"""Engine `vllm` on a policy that learned through adapters and a critic: it samples from the adapted
weights, merged or apart."""

import pytest
import torch
from peft import PeftModel

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.model.checkpoints import model_entry
from quiver.stages.model.loading import load_model
from tests.stages.generate.making import random_prompts
from tests.stages.optimize import world
from tests.tiny import make_policy, plain_logprobs
from tests.vllm_process import checked

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The base, the policy trained over it, and rollouts: of the merged weights, of base and
    adapter, and of a policy that is only the adapter."""
    store = Store(tmp_path_factory.mktemp("lora") / "store")
    start = make_policy(store)
    inputs = world.make(store, start, world.even_share, groups=8)
    steps = {"algorithm": "ppo", "learning_rate": 3e-2, "epochs": 6, "minibatches": 2}
    adapted, alone = (
        world.trained(store, start, inputs, world.config(lora={"rank": 4, "save": save}, **steps))
        for save in ("merged", "adapter")
    )
    ways = [f"{adapted.ref}:merged", f"{adapted.ref}:adapter", f"{alone.ref}:merged"]
    prompts = random_prompts(store, 12)
    refs = checked("tests.stages.generate.lora_checks", store.url, prompts.ref, *ways)
    return start, adapted, alone, [store.open(ref) for ref in refs]


def test_it_samples_from_base_and_adapter(sampled):
    """Against peft's own adapter on the base: nothing is merged, nothing is of this project."""
    start, adapted, _, ways = sampled
    base = load_model(start, dtype=torch.float32)
    rows = ways[0].table().to_pylist()
    before = [plain_logprobs(base, row["prompt_ids"], row["completion_ids"]) for row in rows]
    model = PeftModel.from_pretrained(base, adapted.files.path("adapter")).eval()
    for number, row in enumerate(rows):
        ids = row["completion_ids"]
        expected = plain_logprobs(model, row["prompt_ids"], ids)
        for rollouts in ways:
            assert rollouts.table()["completion_ids"][number].as_py() == ids
            logprobs = rollouts.table()["old_logprobs"][number].as_py()
            assert logprobs == pytest.approx(expected.tolist(), abs=1e-3)
        assert (before[number] - expected).abs().max() > 0.01


def test_the_manifest_names_the_weights_and_the_base(sampled):
    start, adapted, alone, ways = sampled
    weights = [model_entry("policy", version).weights for version in (start, adapted, alone)]
    assert len(set(weights)) == 3
    names = [rollouts.manifest.model("policy").weights for rollouts in ways]
    assert names == [weights[1], weights[1], weights[2]]
    bases = [rollouts.manifest.metrics["engine"].get("base") for rollouts in ways]
    assert bases == [None, str(start.ref), str(start.ref)]


def test_a_model_without_adapters_in_vllm_is_refused(tmp_path):
    store = Store(tmp_path / "store")
    start = make_policy(store, kind="gpt2")
    inputs = world.make(store, start, world.even_share)
    alone = world.trained(store, start, inputs, world.config(lora={"rank": 4, "save": "adapter"}))
    refs = {"prompts": random_prompts(store, 2).ref, "policy": alone.ref}
    config = {"options": {"cpu_kv_cache_gib": 0.01}, "sampling": {"max_tokens": 4}}
    with pytest.raises(ConfigError, match="cannot load the adapter of tiny/policy@1") as caught:
        run_stage("generate", config, store, **refs)
    assert 'optimize.lora.save = "merged"' in caught.value.next
