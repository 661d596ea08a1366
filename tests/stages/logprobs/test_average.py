"""The moving average of weights: the formula on every weight, a model that loads, nothing averaged
that does not match."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quiver.schemas.errors import LineageError
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.logprobs.average import Config
from tests.tiny import make_folder, make_policy

run = partial(run_stage, "average", in_process=True)


def test_every_weight_is_the_average(store, policy):
    other = make_policy(store, "other", seed=1)
    version = store.open(
        run(Config(rate=0.25), store, reference=policy.ref, policy=other.ref, into="tiny.ref")
    )
    assert str(version.ref) == "tiny.ref/policy@0"
    found, old, new = (
        load_file(each.files.path("model.safetensors")) for each in (version, policy, other)
    )
    assert set(found) == set(old) == set(new)
    for name, weight in found.items():
        assert torch.allclose(weight, 0.75 * old[name] + 0.25 * new[name], atol=1e-7)
    AutoModelForCausalLM.from_pretrained(version.files.folder)
    assert {model.role: model.ref for model in version.manifest.models} == {
        "reference": "tiny/policy@0",
        "policy": "other/policy@0",
    }
    again = run(Config(rate=0.25), store, reference=policy.ref, policy=other.ref, into="tiny.ref")
    assert again == version.ref
    further = run(
        Config(rate=0.25), store, reference=version.ref, policy=other.ref, into="tiny.ref"
    )
    assert str(further) == "tiny.ref/policy@1"


def test_a_small_rate_moves_weights_that_are_bfloat16(store, tmp_path):
    """Each weight of the policy is 1.5 times the reference's: a thousandth of that is less than
    bfloat16 can tell."""
    versions = []
    for name, times in (("small", 1.0), ("large", 1.5)):
        folder = make_folder(tmp_path / name)
        weights = {
            key: value.bfloat16() * times
            for key, value in load_file(folder / "model.safetensors").items()
        }
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        versions.append(
            store.open(
                run_stage("policy", {"model": str(folder)}, store, into=name, in_process=True)
            )
        )
    old, new = versions
    version = store.open(
        run(Config(rate=1e-3), store, reference=old.ref, policy=new.ref, into="small.ref")
    )
    found, old, new = (
        load_file(each.files.path("model.safetensors")) for each in (version, old, new)
    )
    for name, weight in found.items():
        torch.testing.assert_close(
            weight, old[name].float() + 1e-3 * (new[name].float() - old[name].float())
        )
        assert not torch.equal(weight, old[name].float())


def test_other_models_are_refused(store, policy):
    other = make_policy(store, "qwen", kind="qwen3")
    with pytest.raises(
        LineageError,
        match=r"weight model\.layers\.0\.self_attn\.k_norm\.weight: expected shape .* found "
        r"nothing",
    ):
        run(Config(rate=0.5), store, reference=policy.ref, policy=other.ref, into="tiny.ref")
    wider = make_policy(store, "wider", vocabulary=330)
    with pytest.raises(LineageError, match=r"expected shape \[330, 32\], found shape \[320, 32\]"):
        run(Config(rate=0.5), store, reference=policy.ref, policy=wider.ref, into="tiny.ref")
    assert store.numbers("tiny.ref", "policy") == []
