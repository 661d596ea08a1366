"""A policy that holds an adapter alone (`lora.save = "adapter"`): it is, bit for bit, what the
merged one of the same training is, to all that read it; at some hundredth of the size."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from quiver.flows.recipe import Recipe
from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, ConflictError, CorruptError, LineageError
from quiver.stages.core.store import marks
from quiver.stages.core.store.listing import EXPIRED
from quiver.stages.core.store.retention import remove
from quiver.stages.model.checkpoints import PolicyConfig, model_entry, resolve
from quiver.stages.model.loading import base_of, load_as_stored, load_model
from quiver.stages.optimize.stage import Config
from tests.stages.generate.making import random_prompts
from tests.stages.optimize import world
from tests.stages.optimize.test_lora import ADAPTER
from tests.tiny import make_folder, make_policy
from tests.writing import run_here

LATER = {"max_staleness": 2, "audit": {"enabled": False}}


def config(save: str, **fields) -> Config:
    lora = {"rank": 4, "alpha": 12, "save": save}
    return world.config(**{"learning_rate": 1e-2, "epochs": 2, "lora": lora, **fields})


def twice(store, start, made) -> tuple:
    """The policy that a training makes merged, and the same as an adapter alone."""
    return tuple(
        world.trained(store, start, made, config(save), into=save) for save in ("merged", "adapter")
    )


def require_equal(one, other) -> None:
    one, other = (dict(model.state_dict()) for model in (one, other))
    assert world.are_equal(one, other)
    assert [t.dtype for t in one.values()] == [other[name].dtype for name in one]


@pytest.mark.parametrize("kind", ["gpt2", "t5", "experts"])
def test_it_has_no_weights_but_the_adapters_and_is_loaded_as_the_merged_one(store, kind):
    """peft says of a model of experts what it trains by a set."""
    if kind == "experts":
        experts = Qwen3MoeConfig(
            vocab_size=320, hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, eos_token_id=2,
        )  # fmt: skip
        folder = make_folder(Path(store.url).parent / kind)
        AutoModelForCausalLM.from_config(experts).save_pretrained(folder)
        start = store.open(run_here("policy", {"model": str(folder)}, store, into=kind))
    else:
        start = make_policy(store, kind, kind)
    merged, alone = twice(store, start, world.by_engine(store, start))
    assert set(merged.files.names) - set(alone.files.names) == {"model.safetensors"}
    assert world.are_equal(*(world.weights(version, ADAPTER) for version in (merged, alone)))
    base = base_of(store, alone)
    assert base.ref == start.ref and base_of(store, merged) is None
    for dtype in (torch.float32, torch.bfloat16):
        expected, found = load_model(merged, dtype=dtype), load_model(alone, dtype=dtype, base=base)
        require_equal(expected, found)
    apart = {"_name_or_path": None}  # the folder that it was read from
    assert {**found.config.to_dict(), **apart} == {**expected.config.to_dict(), **apart}
    require_equal(load_as_stored(merged), load_as_stored(alone, base=base))
    assert verify(store)[1] == []


def test_a_training_goes_on_from_either_alike(store, policy, made, train):
    """With adapters or whole weights."""
    merged, alone = twice(store, policy, made)
    one, two, three = (
        train(config(save, **LATER), start=start)
        for start, save in ((merged, "merged"), (alone, "adapter"), (alone, "merged"))
    )
    assert world.are_equal(world.weights(one, ADAPTER), world.weights(two, ADAPTER))
    assert world.are_equal(world.weights(one), world.weights(three))
    assert two.manifest.input("base").ref == str(policy.ref)
    whole = config("merged", lora=None, **LATER)
    one, two = (train(whole, start=start) for start in (merged, alone))
    assert world.are_equal(world.weights(one), world.weights(two))
    assert two.manifest.input("base") is None


def test_it_scores_and_answers_as_the_merged_one(store, policy, made):
    policies = twice(store, policy, made)
    scored = [
        run_here("logprobs", {"device": "cpu"}, store, policy=version.ref, rollouts=made[0].ref)
        for version in policies
    ]
    assert scored[0] != scored[1]
    one, two = (store.open(ref).table() for ref in scored)
    assert one.equals(two)
    prompts = random_prompts(store, 3, run="tiny")
    fields = {"engine": "transformers", "device": "cpu", "dtype": "float32", "seed": 3}
    fields["sampling"] = {"max_tokens": 6}
    one, two = (
        store.open(
            run_here("generate", fields, store, prompts=prompts.ref, policy=each.ref)
        ).table()
        for each in policies
    )
    for column in ("completion_ids", "old_logprobs"):
        assert one[column].equals(two[column])


@pytest.fixture
def alone(store, policy, made):
    """An adapter alone on a tiny llama."""
    return world.trained(store, policy, made, config("adapter"))


def test_the_weights_that_a_manifest_names_are_those_of_base_and_adapter(policy, train, alone):
    other = train(config("adapter", learning_rate=2e-2))
    again = train(config("adapter"), into="again")
    names = [model_entry("policy", version).weights for version in (alone, other, again)]
    assert names[0] == names[2] != names[1]


def test_its_base_is_needed(store, policy, made, alone):
    on_its_weights = f"{alone.ref} is an adapter alone, on its weights"
    with pytest.raises(ConflictError, match=on_its_weights):
        remove(store, policy.ref)
    assert store.open(policy.ref).manifest and verify(store)[1] == []
    shutil.rmtree(policy.files.folder)
    with pytest.raises(LineageError, match="found no such version") as caught:
        run_here("logprobs", {}, store, policy=alone.ref, rollouts=made[0].ref)
    assert "without it the adapter cannot be used" in caught.value.next
    assert caught.value.state == "nothing was changed."


def test_a_base_that_expired_is_found_by_verify(store, policy, alone):
    marks.write(store.storage, policy.ref, EXPIRED, "by hand")
    problems = [problem for problem in verify(store)[1] if "adapter" in str(problem)]
    assert [problem.object for problem in problems] == [str(alone.ref)]


def test_a_changed_adapter_is_found(store, policy, alone):
    path = alone.files.path(ADAPTER)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"adapter_model\.safetensors"):
        load_model(alone, dtype=torch.float32, base=policy)


def test_where_whole_weights_are_needed_it_is_refused(store, policy, alone):
    with pytest.raises(ConfigError, match="holds only an adapter") as caught:
        resolve(PolicyConfig(model=str(alone.files.folder)))
    assert 'optimize.lora.save = "merged"' in caught.value.next
    refs = {"reference": policy.ref, "policy": alone.ref}
    with pytest.raises(ConfigError, match="only whole weights can be averaged"):
        run_here("average", {"rate": 0.1}, store, into="ema", **refs)


def test_a_recipe_whose_reference_is_an_average_is_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        'run = "a"\n[policy]\nmodel = "m"\n[data]\nsource = "rows.jsonl"\n'
        '[[reward.functions]]\nuse = "math"\n[reference]\nrule = "ema"\n'
        '[optimize.lora]\nsave = "adapter"\n'
    )
    with pytest.raises(ConfigError, match="averages whole weights"):
        Recipe.load(path)
