"""A policy that holds an adapter alone (`lora.save = "adapter"`): it is, bit for bit, what the
merged one of the same training is, to whoever reads it; at some hundredth of the size."""

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from quiver.flows.recipe import Recipe
from quiver.schemas.errors import ConfigError, ConflictError, CorruptError, LineageError
from quiver.stages.common.config import parse
from quiver.stages.common.models.checkpoints import PolicyConfig, as_model, resolve
from quiver.stages.common.models.loading import load_as_stored, load_model
from quiver.stages.common.models.merging import base_of
from quiver.stages.common.store.retention import remove
from quiver.stages.common.verification import verify
from quiver.stages.optimize.stage import Config
from tests.stages.generate.making import random_prompts
from tests.stages.optimize import world
from tests.stages.optimize.test_seq2seq_policies import sampled
from tests.tiny import make_folder, make_policy
from tests.writing import run_here

run = partial(run_here, "optimize")
ADAPTER = "adapter/adapter_model.safetensors"


def config(save: str, **values) -> Config:
    lora = {"rank": 4, "alpha": 12, "save": save}
    return Config(**{"device": "cpu", "learning_rate": 1e-2, "epochs": 2, "lora": lora, **values})


@pytest.fixture(params=["llama", "gpt2", "t5"])
def trained(request, store):
    """(refs of a training, the policy it made merged, the same as an adapter alone)."""
    start = make_policy(store, request.param, request.param)
    if request.param == "t5":
        rollouts = sampled(store, start)
        rewards = world.write_rewards(store, rollouts, world.even_share, run="t5")
    else:
        rollouts, rewards = world.make(store, start, world.even_share, run=request.param)
    refs = {"policy": start.ref, "rollouts": rollouts.ref, "rewards": rewards.ref}
    merged = store.open(run(config("merged"), store, into="merged", **refs))
    return refs, merged, store.open(run(config("adapter"), store, into="alone", **refs))


def files(version) -> set[str]:
    return {name for name in version.files.names if name.endswith(".safetensors")}


def weights(model) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def require_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0)


def test_it_has_no_weights_but_the_adapters_and_is_loaded_as_the_merged_one(store, trained):
    refs, merged, alone = trained
    assert files(merged) - files(alone) == {"model.safetensors"}
    require_equal(load_file(merged.files.path(ADAPTER)), load_file(alone.files.path(ADAPTER)))
    base = base_of(store, alone)
    assert base.ref == refs["policy"] and base_of(store, merged) is None
    for dtype in (torch.float32, torch.bfloat16):
        expected, found = load_model(merged, dtype=dtype), load_model(alone, dtype=dtype, base=base)
        require_equal(weights(expected), weights(found))
    apart = {"_name_or_path": None}  # the folder that it was read from
    assert {**found.config.to_dict(), **apart} == {**expected.config.to_dict(), **apart}
    require_equal(weights(load_as_stored(merged)), weights(load_as_stored(alone, base=base)))
    assert verify(store)[1] == []


def test_a_training_goes_on_from_either_alike(store, trained):
    refs, merged, alone = trained
    later = {"max_staleness": 2, "audit": {"enabled": False}}
    policies = []
    for start, save in ((merged, "merged"), (alone, "adapter"), (alone, "merged")):
        now = {**refs, "policy": start.ref}
        policies.append(store.open(run(config(save, **later), store, **now)))
    one, two, three = policies
    require_equal(load_file(one.files.path(ADAPTER)), load_file(two.files.path(ADAPTER)))
    names = [name for name in files(one) if "/" not in name]
    for name in names:
        require_equal(load_file(one.files.path(name)), load_file(three.files.path(name)))
    assert names == ["model.safetensors"] and two.manifest.input("base").ref == str(refs["policy"])


def test_whole_weights_may_follow(store, trained):
    refs, merged, alone = trained
    whole = config("merged", lora=None, max_staleness=2, audit={"enabled": False})
    one, two = (
        store.open(run(whole, store, **{**refs, "policy": start.ref})) for start in (merged, alone)
    )
    name = "model.safetensors"
    require_equal(load_file(one.files.path(name)), load_file(two.files.path(name)))
    assert two.manifest.input("base") is None


def test_it_scores_and_answers_as_the_merged_one(store, trained):
    refs, merged, alone = trained
    one, two = (
        store.open(
            run_here(
                "logprobs", {"device": "cpu"}, store, policy=each.ref, rollouts=refs["rollouts"]
            )
        )
        for each in (merged, alone)
    )
    assert one.ref != two.ref and one.table().equals(two.table())
    prompts = random_prompts(store, 3, run=refs["policy"].run)
    asked = {
        "engine": "transformers",
        "device": "cpu",
        "dtype": "float32",
        "sampling": {"max_tokens": 6},
    }
    one, two = (
        store.open(
            run_here("generate", {**asked, "seed": 3}, store, prompts=prompts.ref, policy=each.ref)
        ).table()
        for each in (merged, alone)
    )
    for column in ("completion_ids", "old_logprobs"):
        assert one[column].equals(two[column])


def test_the_weights_that_a_manifest_names_are_those_of_base_and_adapter(store, trained):
    refs, _, alone = trained
    other = store.open(run(config("adapter", learning_rate=2e-2), store, into="other", **refs))
    names = {as_model("policy", version).weights for version in (alone, other)}
    again = store.open(run(config("adapter"), store, into="again", **refs))
    assert len(names) == 2 and as_model("policy", again).weights in names


@pytest.fixture
def alone(store):
    """An adapter alone on a tiny llama, and what it was trained on."""
    start = make_policy(store)
    rollouts, rewards = world.make(store, start, world.even_share)
    refs = {"policy": start.ref, "rollouts": rollouts.ref, "rewards": rewards.ref}
    return refs, store.open(run(config("adapter"), store, **refs))


def test_without_its_base_it_is_told_that_it_is_no_model(store, alone):
    refs, policy = alone
    shutil.rmtree(store.open(refs["policy"]).files.folder)
    with pytest.raises(LineageError, match="found none of that name") as caught:
        run_here("logprobs", {}, store, policy=policy.ref, rollouts=refs["rollouts"])
    assert "without it the adapter is no model" in caught.value.next
    assert caught.value.state == "nothing was changed."


def test_its_base_is_not_deleted_and_is_missed_where_it_is(store, alone):
    refs, policy = alone
    with pytest.raises(ConflictError, match=f"{policy.ref} is an adapter alone, on its weights"):
        remove(store, refs["policy"])
    assert store.open(refs["policy"]).manifest and verify(store)[1] == []
    remove(store, policy.ref)
    remove(store, refs["policy"])  # nobody needs it any more


def test_a_base_that_is_gone_is_found_by_verify(store, alone):
    refs, policy = alone
    ledger = store.ledger(refs["policy"].run, "policy")
    ledger.expire(0, "by hand", commit_id="")
    shutil.rmtree(store.open(policy.ref).files.folder.parent / "v000000")
    problems = verify(store)[1]
    assert [str(policy.ref)] == [
        problem.object for problem in problems if "adapter" in str(problem)
    ]


def test_a_model_of_experts_is_saved_too(store):
    """peft says of such a model what it trains by a set."""
    config_of_experts = Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
    )  # fmt: skip
    folder = make_folder(store.path.parent / "experts")
    AutoModelForCausalLM.from_config(config_of_experts).save_pretrained(folder)
    start = store.open(run_here("policy", {"model": str(folder)}, store, into="experts"))
    rollouts, rewards = world.make(store, start, world.even_share, run="experts")
    refs = {"policy": start.ref, "rollouts": rollouts.ref, "rewards": rewards.ref}
    merged = store.open(run(config("merged"), store, into="merged", **refs))
    alone = store.open(run(config("adapter"), store, into="alone", **refs))
    base = base_of(store, alone)
    require_equal(
        weights(load_model(merged, dtype=torch.float32)),
        weights(load_model(alone, dtype=torch.float32, base=base)),
    )


def test_a_changed_adapter_is_found(store, alone):
    refs, policy = alone
    path = policy.files.path(ADAPTER)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"adapter_model\.safetensors"):
        load_model(policy, dtype=torch.float32, base=store.open(refs["policy"]))


def test_where_whole_weights_are_needed_it_is_refused(store, alone):
    refs, policy = alone
    with pytest.raises(ConfigError, match="holds an adapter alone") as caught:
        resolve(PolicyConfig(model=str(policy.files.folder)))
    assert 'optimize.lora.save = "merged"' in caught.value.next
    with pytest.raises(ConfigError, match="whole weights are averaged"):
        run_here(
            "average", {"rate": 0.1}, store, into="ema", reference=refs["policy"], policy=policy.ref
        )
    with pytest.raises(ConfigError, match="save_dtype is of merged weights"):
        parse(Config, {"save_dtype": "bfloat16", "lora": {"save": "adapter"}}, "optimize")


def test_a_recipe_whose_reference_is_an_average_is_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        'run = "a"\n[policy]\nmodel = "m"\n[data]\nsource = "rows.jsonl"\n'
        '[[reward.functions]]\nuse = "math"\n[reference]\nrule = "ema"\n'
        '[optimize.lora]\nsave = "adapter"\n'
    )
    with pytest.raises(ConfigError, match="averages whole weights"):
        Recipe.load(path)
