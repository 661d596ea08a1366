"""LoRA through the stage: what it writes, that base and adapter are the policy, how it goes on,
what it refuses."""

import json
import shutil
import sys
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

from quiver.schemas.errors import ConfigError, ConflictError, CorruptError, LineageError
from quiver.stages.common.config import parse
from quiver.stages.common.models.checkpoints import PolicyConfig, as_model
from quiver.stages.common.models.loading import load_as_stored, load_model
from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.lora import attach, load_with_adapters, narrow_frozen
from quiver.stages.optimize.algorithms import resolve
from quiver.stages.optimize.config import Lora
from quiver.stages.optimize.stage import Config, check
from quiver.stages.optimize.trainer import Trainer
from tests.stages.optimize import world
from tests.stages.optimize.test_seq2seq_policies import sampled
from tests.tiny import make_folder, make_policy
from tests.writing import run_here

import_policy = partial(run_here, "policy")
run = partial(run_here, "optimize")


SMALL = {"rank": 4, "alpha": 12}
LINEAR = {"llama": 2 * 7, "t5": 2 * (4 + 2) + 2 * (8 + 2), "bart": 2 * (4 + 2) + 2 * (8 + 2)}
"""Linear layers inside the tiny models."""


def _config(**values) -> Config:
    return Config(**{"device": "cpu", "learning_rate": 1e-2, "lora": SMALL, **values})


def _made(store, kind):
    policy = make_policy(store, kind, kind)
    if kind == "llama":
        return policy, *world.make(store, policy, world.even_share, run=kind)
    rollouts = sampled(store, policy)
    return policy, rollouts, world.write_rewards(store, rollouts, world.even_share, run=kind)


@pytest.fixture
def made(store):
    """(policy, rollouts, rewards) of a tiny llama."""
    return _made(store, "llama")


@pytest.fixture(params=["llama", "t5"])
def either(request, store):
    """The same of a decoder, and of an encoder-decoder."""
    return _made(store, request.param)


def _run(store, made, config=None, policy=None, **more):
    start, rollouts, rewards = made
    named = {
        "policy": (policy or start).ref,
        "rollouts": rollouts.ref,
        "rewards": rewards.ref,
        **more,
    }
    return store.open(run(config or _config(), store, **named))


def _again(**values) -> Config:
    """A later iteration on the same rollouts, which are stale by then."""
    return _config(max_staleness=2, audit={"enabled": False}, **values)


def _tensors(version, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(version.files.folder / name)


def _equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _by_peft(base, policy):
    """The model as a user of peft would load it: the base's folder, the adapter's folder, nothing
    of this project."""
    loader = AutoModelForCausalLM if base.ref.run == "llama" else AutoModelForSeq2SeqLM
    return PeftModel.from_pretrained(
        loader.from_pretrained(base.files.folder, dtype=torch.float32),
        policy.files.folder / "adapter",
    ).eval()


def _logprobs(model, rollouts) -> torch.Tensor:
    """[N] logprobs of all completions at temperature 1, one plain forward pass each."""
    found = []
    for row in rollouts.table().to_pylist():
        prompt, ids = row["prompt_ids"], torch.tensor(row["completion_ids"])
        if model.config.is_encoder_decoder:
            inputs = torch.cat([torch.tensor([model.config.decoder_start_token_id]), ids[:-1]])[
                None
            ]
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=inputs).logits[0]
        else:
            logits = model(input_ids=torch.tensor([prompt + ids.tolist()])).logits[
                0, len(prompt) - 1 : -1
            ]
        found.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
    return torch.cat(found)


# -- what it writes


@pytest.mark.parametrize("kind", LINEAR)
def test_base_and_adapter_are_the_policy(store, kind):
    made = _made(store, kind)
    done = _run(store, made, _config(epochs=3))
    start, merged = (load_model(version, dtype=torch.float32) for version in (made[0], done))
    with torch.no_grad():
        before, merged, apart = (
            _logprobs(model, made[1]) for model in (start, merged, _by_peft(made[0], done))
        )
    torch.testing.assert_close(merged, apart, rtol=0, atol=1e-5)
    assert (merged - before).abs().max() > 1e-2
    assert as_model("policy", done).weights != as_model("policy", made[0]).weights
    config = [
        json.loads((version.files.folder / "config.json").read_bytes())
        for version in (done, made[0])
    ]
    assert config[0] == config[1]


def test_only_the_adapters_are_trained_and_have_moments(store, made):
    done = _run(store, made, _config(minibatches=2))
    assert [path.name for path in done.files.folder.glob("*.safetensors")] == ["model.safetensors"]
    assert {path.name for path in (done.files.folder / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    adapter, moments = (
        _tensors(done, "adapter/adapter_model.safetensors"),
        _tensors(done, "optimizer/state.safetensors"),
    )
    assert len(adapter) == 2 * LINEAR[made[0].ref.run]
    assert {name.rpartition("lora_")[2] for name in adapter} == {"A.weight", "B.weight"}
    assert len(moments) == 2 * len(adapter) + 1 and all(
        "lora_" in name or name == "updates" for name in moments
    )
    size = sum(value.numel() for value in adapter.values())
    assert done.manifest.metrics["trainable_parameters"] == size
    assert sum(value.numel() for value in moments.values()) == 2 * size + 1
    before, after = _tensors(made[0]), _tensors(done)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = {
        name.removeprefix("base_model.model.").replace(".lora_A", "")
        for name in adapter
        if ".lora_A" in name
    }
    assert changed == trained
    described = {**SMALL, "target_modules": "all-linear", "save": "merged"}
    assert done.manifest.config["lora"] == described
    assert done.manifest.input("base").ref == str(made[0].ref)
    assert verify(store)[1] == []


def test_the_same_work_gives_the_same_bytes(store, made):
    first, second = _run(store, made), _run(store, made, force=True)
    assert first.ref != second.ref and first.manifest.content_hash == second.manifest.content_hash
    assert _run(store, made).ref == second.ref
    assert _run(store, made, _config(lora={**SMALL, "alpha": 13})).ref not in (
        first.ref,
        second.ref,
    )
    adapters = [
        _tensors(each, "adapter/adapter_model.safetensors")
        for each in (first, _run(store, made, _config(seed=1)))
    ]
    assert not _equal(*adapters)


@pytest.mark.parametrize("packing", ["shared", "packed", "single"])
def test_the_adapters_gradient_is_that_of_the_whole_weights(store, either, packing):
    """With W' = W + s B A and B = 0: dL/dB = s dL/dW Aᵀ and dL/dA = 0, where dL/dW is that of full
    training."""
    config, row = _config(packing=packing, token_budget=40).resolved(), resolve("grpo")
    loaded = joining.load(
        config, row, store, dict(zip(("policy", "rollouts", "rewards"), either, strict=True))
    )
    everyone = list(range(len(loaded.batch.groups)))

    def trained(lora: bool):
        model = load_model(either[0], dtype=torch.float32)
        if lora:
            attach(config.lora, model, either[0], seed=0)
        trainer = Trainer(config, model, loaded.batch, row, make_accelerator(config))
        trainer.accumulate(everyone, everyone)
        assert trainer.mode == packing
        return trainer

    whole, adapted = dict(trained(False).model.named_parameters()), trained(True)
    values = dict(adapted.model.named_parameters())
    assert len(adapted.parameters) == 2 * LINEAR[either[0].ref.run]
    largest = 0.0
    for name, parameter in values.items():
        assert ("lora_" in name) == parameter.requires_grad == (parameter.grad is not None)
        if "lora_B" in name:
            a = values[name.replace("lora_B", "lora_A")]
            expected = 12 / 4 * whole[name.replace(".lora_B.default", "")].grad @ a.detach().T
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)
            assert not a.grad.any()
            largest = max(largest, float(expected.abs().max()))
    assert largest > 1e-3


def test_names_choose_the_layers(store, made):
    done = _run(store, made, _config(lora={**SMALL, "target_modules": ["q_proj", "mlp.down_proj"]}))
    names = _tensors(done, "adapter/adapter_model.safetensors")
    layers = {name.partition(".layers.")[2].partition(".lora_")[0] for name in names}
    assert layers == {
        "0.self_attn.q_proj",
        "1.self_attn.q_proj",
        "0.mlp.down_proj",
        "1.mlp.down_proj",
    }


# -- going on


def test_two_iterations_of_one_step_are_one_of_two_bit_for_bit(store, either):
    together = _run(store, either, _config(epochs=2, max_staleness=2), into="together")
    first = _run(store, either)
    second = _run(store, either, _again(), policy=first)
    for name in (
        "model.safetensors",
        "adapter/adapter_model.safetensors",
        "optimizer/state.safetensors",
    ):
        assert _equal(_tensors(together, name), _tensors(second, name))
    assert [entry.ref for entry in second.manifest.inputs if entry.role == "base"] == [
        str(either[0].ref)
    ]
    assert second.manifest.metrics["step"] == 2


def test_the_audit_compares_base_and_adapter_with_what_the_merged_weights_sampled(store, made):
    done = _run(store, made, _config(epochs=4))
    assert done.manifest.metrics["audit"]["max_gap"] < 1e-4
    rows = world.sample(load_model(done, dtype=torch.float32), world.prompts(4), 4)
    rollouts = world.write_rollouts(store, done, rows, "llama")
    made = done, rollouts, world.write_rewards(store, rollouts, world.even_share, run="llama")
    metrics = _run(store, made).manifest.metrics
    assert metrics["audit"]["max_gap"] < 1e-4 and metrics["step"] == 5


def test_whole_weights_may_follow_adapters_and_the_reverse(store, made, caplog):
    adapted = _run(store, made)
    whole = _run(store, made, _again(lora=None), policy=adapted)
    assert "trained by adapters, now it is whole weights: the moments start anew" in caplog.text
    assert not (whole.files.folder / "adapter").exists() and whole.manifest.input("base") is None
    before, after = _tensors(adapted), _tensors(whole)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert whole.manifest.metrics["trainable_parameters"] == sum(
        value.numel() for value in after.values()
    )
    anew = _run(store, made, _again(), policy=whole)
    assert "trained by whole weights, now it is adapters" in caplog.text
    assert anew.manifest.input("base").ref == str(whole.ref)
    assert torch.equal(_tensors(anew)["model.norm.weight"], after["model.norm.weight"])


def test_a_critics_head_is_trained_beside_the_adapters(store, either):
    config = _config(algorithm="ppo", critic_learning_rate=1e-2, epochs=2)
    first = _run(store, either, config)
    second = _run(store, either, _again(algorithm="ppo", critic_learning_rate=1e-2), policy=first)
    sizes = [
        sum(
            value.numel() for value in _tensors(first, "adapter/adapter_model.safetensors").values()
        ),
        32 + 1,
    ]
    assert first.manifest.metrics["trainable_parameters"] == sum(sizes)
    heads = [_tensors(version, "value_head/state.safetensors") for version in (first, second)]
    assert heads[0]["weight"].any() and not torch.equal(heads[0]["weight"], heads[1]["weight"])
    assert heads[1]["updates"].tolist() == [3.0]


def test_while_the_critic_warms_up_the_weights_stay_the_bases(store, made):
    done = _run(store, made, _config(algorithm="ppo", critic_warmup_steps=1))
    assert as_model("policy", done).weights == as_model("policy", made[0]).weights


@pytest.mark.slow
def test_it_learns_over_iterations(store, policy):
    """Each samples from the merged weights and goes on from base and adapter; the audit sees no
    difference between the two."""

    def low_share(row: dict) -> float:
        return sum(token < 64 for token in row["completion_ids"]) / len(row["completion_ids"])

    shares = []
    for iteration in range(7):
        rows = world.sample(
            load_model(policy, dtype=torch.float32), world.prompts(6), 16, seed=iteration
        )
        shares.append(sum(map(low_share, rows)) / len(rows))
        rollouts = world.write_rollouts(store, policy, rows)
        rewards = world.write_rewards(store, rollouts, low_share)
        config = _config(lora=Lora(), minibatches=2, audit={"max_mean_gap": 1e-5})
        policy = _run(store, (policy, rollouts, rewards), config)
    assert policy.manifest.input("base").ref == "tiny/policy@0"
    assert shares[-1] > shares[0] + 0.2


@pytest.mark.parametrize(
    "values, like", [({"activation_checkpointing": True}, 1 - 1e-6), ({"precision": "bf16"}, 0.99)]
)
def test_the_ways_of_a_pass_lead_to_like_adapters(store, made, values, like):
    """AdamW's eps is 1, so that the step follows the gradient and not only its sign."""
    found = []
    for more in ({}, values):
        adapter = _tensors(
            _run(store, made, _config(eps=1.0, **more), force=True),
            "adapter/adapter_model.safetensors",
        )
        assert {value.dtype for value in adapter.values()} == {torch.float32}
        found.append(
            torch.cat([value.flatten() for name, value in adapter.items() if "lora_B" in name])
        )
    assert torch.cosine_similarity(*found, 0) > like


@pytest.fixture(params=["llama", "t5"])
def half(request, store, tmp_path):
    """(policy, rollouts, rewards) of a model that was saved in bfloat16, as most are."""
    folder = make_folder(tmp_path / "half", request.param)
    weights = {
        name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    policy = store.open(import_policy(PolicyConfig(model=str(folder)), store, into=request.param))
    rollouts = sampled(store, policy)
    return (
        policy,
        rollouts,
        world.write_rewards(store, rollouts, world.even_share, run=request.param),
    )


def test_a_base_that_bfloat16_holds_is_held_in_it_and_nothing_changes(store, half, monkeypatch):
    """Linear layers alone: under autocast these are rounded in any case, norms and embeddings are
    not."""
    kinds, whole = {}, Trainer.train

    def train(trainer, progress):
        head = trainer.model.get_output_embeddings()  # is the input embedding too
        for module in filter(lambda each: each is not head, trainer.model.modules()):
            for parameter in module.parameters(recurse=False):
                kinds.setdefault((type(module).__name__, parameter.requires_grad), set()).add(
                    parameter.dtype
                )
        return whole(trainer)

    monkeypatch.setattr(Trainer, "train", train)
    common = {"precision": "bf16", "epochs": 3, "audit": {"max_mean_gap": 1.0}}
    narrow = _run(store, half, _config(**common))
    assert kinds.pop(("Linear", False)) == {torch.bfloat16} and kinds.pop(("Linear", True)) == {
        torch.float32
    }
    assert kinds and all(found == {torch.float32} for found in kinds.values()), kinds
    monkeypatch.setattr("quiver.stages.optimize.trainer.narrow_frozen", lambda model: None)
    monkeypatch.setattr("quiver.stages.common.models.loading.stored_dtypes", lambda folder: {"F32"})
    wide = _run(store, half, _config(**common), force=True)
    assert narrow.ref != wide.ref and narrow.manifest.content_hash == wide.manifest.content_hash
    assert {value.dtype for value in _tensors(narrow).values()} == {torch.float32}


def test_a_base_in_bfloat16_is_loaded_as_it_is_and_its_adapters_are_float32(half):
    inputs = {"base": half[0], "policy": half[0]}
    models = {
        precision: load_with_adapters(_config(precision=precision), inputs, torch.device("cpu"))
        for precision in ("bf16", "fp32")
    }
    dtypes = {
        name: parameter.dtype
        for name, parameter in models["bf16"].named_parameters()
        if "norm" not in name and "embed" not in name and "shared" not in name
    }
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    assert torch.bfloat16 in dtypes.values()
    for name, parameter in models["fp32"].named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(models["bf16"].get_parameter(name).float(), parameter), name


def test_buffers_that_a_model_computes_are_those_of_float32(store, tmp_path):
    """gemma3's scale of embeddings, which in bfloat16 is another number."""
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=24, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=12,
    )  # fmt: skip
    folder = make_folder(tmp_path / "model")
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    policy = store.open(import_policy(PolicyConfig(model=str(folder)), store, into="gemma"))
    narrow = load_as_stored(policy)
    scale = dict(narrow.named_buffers())["model.embed_tokens.embed_scale"]
    assert float(scale) == pytest.approx(24**0.5, rel=1e-6)


def test_a_base_whose_file_is_cut_is_told_as_damage(half):
    path = half[0].files.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    inputs = {"base": half[0], "policy": half[0]}
    with pytest.raises(CorruptError):
        load_with_adapters(_config(precision="bf16"), inputs, torch.device("cpu"))


def test_adapters_over_a_base_in_float16_are_float32(store, made):
    model = load_model(made[0], dtype=torch.float16)
    attach(Lora(**SMALL), model, made[0], seed=0)
    dtypes = {p.dtype for name, p in model.named_parameters() if "lora_" in name}
    assert dtypes == {torch.float32}


def test_a_base_that_bfloat16_does_not_hold_stays_what_it_is(store, made):
    model = load_model(made[0], dtype=torch.float32)
    attach(Lora(**SMALL), model, made[0], seed=0)
    narrow_frozen(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# -- refusals


def test_without_peft_it_says_what_to_install(store, made, monkeypatch):
    done = _run(store, made)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="peft is not installed") as caught:
        _run(store, made, force=True)
    assert caught.value.next == 'pip install "quiver-rl[lora]"'
    with pytest.raises(ConfigError, match="peft is not installed"):  # before anything is generated
        check(_config(), ["answer"])
    assert _run(store, made).ref == done.ref  # what is done needs none
    assert _run(store, made, _config(lora=None)).manifest.metrics["steps"] == 1


@pytest.mark.parametrize(
    "asked, said",
    [({"rank": 8}, "its adapter has rank = 4, the recipe asks for rank = 8"), ({"alpha": 13}, "alpha = 13"),
     ({"target_modules": ["q_proj"]}, "has target_modules = all-linear, the recipe asks for "
                                      "target_modules = ['q_proj']")],
)  # fmt: skip
def test_another_adapter_than_the_checkpoints_is_refused(store, made, asked, said):
    first = _run(store, made)
    with pytest.raises(ConfigError) as caught:
        _run(store, made, _again(lora={**SMALL, **asked}), policy=first)
    assert said in caught.value.message and str(first.files.folder) in caught.value.next


@pytest.mark.parametrize("name", ["q_porj", "lm_head", "embed_tokens", "proj", ""])
def test_names_that_are_no_layer_are_refused(store, made, name):
    with pytest.raises(ConfigError, match="no linear layer inside the model") as caught:
        _run(store, made, _config(lora={**SMALL, "target_modules": ["k_proj", name]}))
    assert (
        "there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
        in caught.value.message
    )
    assert name != "q_porj" or caught.value.next == "set target_modules = ['q_proj']"


def test_a_base_that_is_gone_or_changed_is_refused(store, made):
    first = _run(store, made)
    shutil.rmtree(made[0].files.folder)
    with pytest.raises(
        LineageError, match=r"trained over llama/policy@0, expected .*, found none of that name"
    ) as caught:
        _run(store, (first, *made[1:]), _again())
    assert str(first.files.folder) in caught.value.next
    with pytest.raises(ConflictError, match="starts from another base model"):
        make_policy(store, "llama", seed=1)
    other = make_policy(Store(store.path.with_name("other")), "llama", seed=1)
    shutil.copytree(other.files.folder, made[0].files.folder)  # by hand
    with pytest.raises(LineageError, match=other.manifest.content_hash[:12]):
        _run(store, (first, *made[1:]), _again())


def test_a_damaged_adapter_is_refused(store, made):
    first = _run(store, made)
    path = first.files.folder / "adapter" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"adapter_model\.safetensors"):
        _run(store, made, _again(), policy=first)


def test_an_adapter_of_another_model_is_refused(store, made):
    first = _run(store, made)
    other = load_model(make_policy(store, "t5", "t5"), dtype=torch.float32)
    with pytest.raises(ConfigError, match="other names or shapes"):
        attach(Lora(**SMALL), other, first, seed=0)


@pytest.mark.parametrize(
    "given, word",
    [
        ({"rank": 0}, "rank"),
        ({"target_modules": []}, "target_modules"),
        ({"dropout": 0.1}, "unknown key lora.dropout"),
    ],
)
def test_a_wrong_section_is_refused(given, word):
    with pytest.raises(ConfigError, match=word):
        parse(Config, {"lora": given}, "optimize")
