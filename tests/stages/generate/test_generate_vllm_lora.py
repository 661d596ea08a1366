"""Engine `vllm` on a policy that learned through adapters and a critic: it samples from the adapted
weights, merged or apart."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common.config import parse
from quiver.stages.common.models.checkpoints import as_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from quiver.stages.generate.stage import Config as GenerateConfig
from quiver.stages.optimize.stage import Config
from tests.stages.generate.lora_checks import SAMPLING
from tests.stages.generate.making import random_prompts
from tests.stages.optimize import world
from tests.tiny import make_policy

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """(policy@0, policy@1, rollouts of policy@0, of policy@1 merged, of policy@1 as base and
    adapter, and of a policy that is the adapter alone)."""
    store = Store(tmp_path_factory.mktemp("lora") / "store")
    start = make_policy(store)
    rollouts, rewards = world.make(store, start, world.even_share, groups=8)
    refs = {"policy": start.ref, "rollouts": rollouts.ref, "rewards": rewards.ref}
    adapted, alone = (
        store.open(
            run_stage(
                "optimize",
                Config(
                    algorithm="ppo",
                    lora={"rank": 4, "save": save},
                    learning_rate=3e-2,
                    epochs=6,
                    minibatches=2,
                    device="cpu",
                ),
                store,
                in_process=True,
                **refs,
            )
        )
        for save in ("merged", "adapter")
    )
    prompts = random_prompts(store, 12)
    asked = [f"{start.ref}:adapter", f"{adapted.ref}:merged", f"{adapted.ref}:adapter"]
    asked += [f"{alone.ref}:merged"]
    command = [
        sys.executable,
        "-m",
        "tests.stages.generate.lora_checks",
        str(store.path),
        str(prompts.ref),
        *asked,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return start, adapted, *map(store.open, json.loads(done.stdout.splitlines()[-1]))


def by_peft(start, adapted):
    """Transformers' model of the base with peft's own adapter on it; nothing is merged, nothing is
    of this project."""
    base = AutoModelForCausalLM.from_pretrained(start.files.folder, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapted.files.path("adapter")).eval()


def completions(rollouts) -> list[list[int]]:
    return rollouts.table()["completion_ids"].to_pylist()


def test_it_samples_from_the_adapted_weights(answered):
    """The greedy text is that of base and adapter; under the base alone it is another."""
    start, adapted, before, merged, apart, alone = answered
    model, expected = by_peft(start, adapted), []
    for prompt in merged.table()["prompt_ids"].to_pylist():
        ids = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=SAMPLING["max_tokens"]
        )
        expected.append(ids[0, len(prompt) :].tolist())
    assert completions(merged) == completions(apart) == completions(alone) == expected
    assert sum(one != other for one, other in zip(completions(before), expected, strict=True)) >= 10


def test_the_logprobs_are_those_of_base_and_adapter(answered):
    start, adapted, _, *all_ways = answered
    model = by_peft(start, adapted)
    for rollouts in all_ways:
        for row in rollouts.table().to_pylist():
            prompt, ids = row["prompt_ids"], torch.tensor(row["completion_ids"])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + row["completion_ids"]])).logits[
                    0, len(prompt) - 1 : -1
                ]
            found = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
            assert row["old_logprobs"] == pytest.approx(found.tolist(), abs=1e-3)


def test_the_manifest_records_what_was_sampled(answered):
    start, adapted, before, merged, apart, alone = answered
    weights = [as_model("policy", version).weights for version in (start, adapted)]
    found = [version.manifest.model("policy").weights for version in (before, merged, apart)]
    assert found == [weights[0], weights[1], weights[1]] and weights[0] != weights[1]
    assert alone.manifest.model("policy").weights not in weights
    assert [
        version.manifest.metrics["engine"].get("base") for version in (before, merged, apart, alone)
    ] == [None, None, str(start.ref), str(start.ref)]


def test_what_lies_below_the_policys_folder_is_no_business_of_the_engine(answered):
    folders = {path.name for path in answered[1].files.folder.iterdir() if path.is_dir()}
    assert folders == {"adapter", "optimizer", "value_head"}


def test_a_base_that_is_gone_is_told_before_the_engine_starts(answered, tmp_path):
    start, adapted, *_ = answered
    store = Store(shutil.copytree(start.files.folder.parents[2], tmp_path / "store"))
    shutil.rmtree(store.open(start.ref).files.folder)
    config = parse(
        GenerateConfig, {"options": {"lora": True}, "sampling": {"max_tokens": 4}}, "generate"
    )
    with pytest.raises(
        LineageError, match=r"trained over tiny/policy@0, expected .*, found none of that name"
    ):
        refs = {"prompts": "tiny/prompts@1", "policy": adapted.ref}
        run_stage("generate", config, store, in_process=True, **refs)


def test_a_model_that_vllm_has_no_adapters_for_is_told(tmp_path):
    store = Store(tmp_path / "store")
    start = make_policy(store, kind="gpt2")
    rollouts, rewards = world.make(store, start, world.even_share)
    config = Config(lora={"rank": 4, "save": "adapter"}, device="cpu")
    refs = {"policy": start.ref, "rollouts": rollouts.ref, "rewards": rewards.ref}
    alone = run_stage("optimize", config, store, in_process=True, **refs)
    prompts = random_prompts(store, 2)
    asked = {"options": {"cpu_kv_cache_gib": 0.01}, "sampling": {"max_tokens": 4}}
    with pytest.raises(ConfigError, match="takes no adapter like that of tiny/policy@1") as caught:
        run_stage("generate", asked, store, prompts=prompts.ref, policy=alone)
    assert 'optimize.lora.save = "merged"' in caught.value.next


@pytest.mark.parametrize("name", ["enable_lora", "max_lora_rank"])
def test_vllms_own_arguments_for_it_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} cannot be set here"):
        parse(GenerateConfig, {"options": {"engine_args": {name: 8}}}, "generate")
