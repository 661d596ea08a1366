"""The moving average of weights: the formula on every weight, a model that loads, nothing averaged
that does not match."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quiver.schemas.errors import CorruptError, LineageError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.model.loading import load_model
from tests.stages.optimize.world import weights
from tests.tiny import make_folder, make_policy
from tests.tokens import rename, swap, with_tokenizer


def average(store, reference, policy, rate):
    refs = {"reference": reference.ref, "policy": policy.ref}
    options = {"into": "tiny.ref", "in_process": True}
    return store.open(run_stage("average", {"rate": rate}, store, **refs, **options))


def test_every_weight_is_the_average(store, policy):
    other = make_policy(store, "other", seed=1)
    version = average(store, policy, other, 0.25)
    assert str(version.ref) == "tiny.ref/policy@0"
    old, new = weights(policy), weights(other)
    expected = {name: 0.75 * old[name] + 0.25 * new[name] for name in old.keys() | new.keys()}
    torch.testing.assert_close(weights(version), expected, atol=1e-7, rtol=0)
    load_model(version, dtype=torch.float32)
    models = {model.role: model.ref for model in version.manifest.models}
    assert models == {"reference": "tiny/policy@0", "policy": "other/policy@0"}
    assert average(store, policy, other, 0.25).ref == version.ref
    assert str(average(store, version, other, 0.25).ref) == "tiny.ref/policy@1"


def test_a_small_rate_moves_weights_that_are_bfloat16(store, tmp_path):
    """Each weight of the policy is 1.5 times the reference's: a thousandth of that is less than
    bfloat16 can show."""
    versions = []
    for name, factor in (("small", 1.0), ("large", 1.5)):
        path = make_folder(tmp_path / name) / "model.safetensors"
        narrow = {key: weight.bfloat16() * factor for key, weight in load_file(path).items()}
        save_file(narrow, path, {"format": "pt"})
        config = {"model": str(path.parent)}
        versions.append(store.open(run_stage("policy", config, store, into=name, in_process=True)))
    old, new = map(weights, versions)
    for name, weight in weights(average(store, *versions, 1e-3)).items():
        before = old[name].float()
        torch.testing.assert_close(weight, before + 1e-3 * (new[name].float() - before))
        assert not torch.equal(weight, before)


@pytest.mark.parametrize(("kind", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
def test_a_base_may_lack_the_prefix_of_the_names_that_transformers_saves(
    store, tmp_path, kind, prefix
):
    """The hub's GPT-2 has `h.0.attn.c_attn.weight`."""
    policy = make_policy(store, "other", kind, seed=1)
    path = make_folder(tmp_path / "base", kind) / "model.safetensors"
    old = load_file(path)
    save_file({name.removeprefix(prefix): old[name] for name in old}, path, {"format": "pt"})
    config = {"model": str(path.parent)}
    base = store.open(run_stage("policy", config, store, into="base", in_process=True))
    new = weights(policy)
    expected = {name: 0.75 * old[name] + 0.25 * new[name] for name in new}
    for reference, other, cut in ((base, policy, ""), (policy, base, prefix)):
        rate = 0.25 if other is policy else 0.75
        found = weights(average(store, reference, other, rate))
        wanted = {name.removeprefix(cut): expected[name] for name in expected}
        torch.testing.assert_close(found, wanted, atol=1e-7, rtol=0)


@pytest.mark.parametrize("damaged", [0, 1])
def test_weights_that_are_not_what_was_written_are_not_averaged(store, policy, damaged):
    versions = [policy, make_policy(store, "other", seed=1)]
    path = versions[damaged].files.path("model.safetensors")
    weights = bytearray(path.read_bytes())
    weights[-1] ^= 1
    path.write_bytes(weights)
    with pytest.raises(CorruptError, match="sha256"):
        average(store, *versions, 0.5)
    assert store.numbers("tiny.ref", "policy") == []


def other_model(store, folder, **changed):
    """A policy whose config differs in `changed` from the tiny one's, in a run named like its
    folder."""
    config = AutoConfig.from_pretrained(make_folder(folder))
    config.update(changed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model = {"model": str(folder)}
    return store.open(run_stage("policy", model, store, into=folder.name, in_process=True))


def test_a_reference_with_more_weights_is_refused(store, policy, tmp_path):
    """They would be left out of the mixture."""
    for changed, name in (
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"tie_word_embeddings": False}, "lm_head.weight"),
    ):
        other = other_model(store, tmp_path / "".join(changed).replace("_", "."), **changed)
        with pytest.raises(LineageError, match=f"{name}, which tiny/policy@0 lacks") as caught:
            average(store, other, policy, 0.5)
        assert caught.value.object == str(other.ref)
    assert store.numbers("tiny.ref", "policy") == []


def test_what_a_models_files_hold_besides_its_weights_is_no_other_model(store, policy, tmp_path):
    """The hub's GPT-2 has masks in its file; many files hold a tied head once more."""
    path = make_folder(tmp_path / "more", seed=1) / "model.safetensors"
    old = load_file(path)
    more = {"lm_head.weight": old["model.embed_tokens.weight"].clone(), "mask": torch.ones(3)}
    save_file({**old, **more}, path, {"format": "pt"})
    model = {"model": str(path.parent)}
    other = store.open(run_stage("policy", model, store, into="more", in_process=True))
    assert weights(average(store, other, policy, 0.5)).keys() == old.keys()


def test_another_tokenizer_is_refused(store, policy, tmp_path):
    """Rows of the embedding would be mixed that belong to other tokens."""
    for changes, is_refused in (((swap,), True), ((rename,), False)):
        name = changes[0].__name__
        other = with_tokenizer(store, tmp_path / name, name, *changes)
        if is_refused:
            with pytest.raises(LineageError, match="2 ids are other tokens, such as 300"):
                average(store, other, policy, 0.5)
        else:
            assert average(store, other, policy, 0.5)


def test_other_models_are_refused(store, policy):
    for changed, words in (
        ({"kind": "qwen3"}, r"self_attn\.k_norm\.weight: expected shape .* found nothing"),
        ({"vocabulary": 330}, r"expected shape \[330, 32\], found shape \[320, 32\]"),
    ):
        with pytest.raises(LineageError, match=words):
            average(store, policy, make_policy(store, "".join(changed), **changed), 0.5)
    assert store.numbers("tiny.ref", "policy") == []
