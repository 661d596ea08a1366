"""LoRA through the stage: what it writes, that base and adapter are the policy, how it goes on,
what it refuses."""

import json
import shutil
import sys

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.model.checkpoints import model_entry
from quiver.stages.model.loading import load_as_stored, load_model
from quiver.stages.optimize.config import Lora
from quiver.stages.optimize.lora import (
    attach,
    load_with_adapters,
    merge,
    narrow_frozen,
    require_layers,
)
from quiver.stages.optimize.stage import Config, check
from quiver.stages.optimize.trainer import Trainer
from tests.stages.optimize import world
from tests.tiny import make_folder, make_policy

ADAPTER = "adapter/adapter_model.safetensors"
SMALL = {"rank": 4, "alpha": 12}
LINEAR = {"llama": 2 * 7, "gpt2": 2 * 4, "t5": 2 * (4 + 2) + 2 * (8 + 2)}
"""Linear layers inside the tiny models."""


def _config(**fields) -> Config:
    return world.config(**{"learning_rate": 1e-2, "lora": SMALL, **fields})


def _again(**fields) -> Config:
    """A later iteration on the same rollouts, which are stale by then."""
    return _config(max_staleness=2, audit={"enabled": False}, **fields)


@pytest.fixture(params=LINEAR)
def start(request, store):
    return make_policy(store, request.param, request.param)


# -- what it writes


def test_base_and_adapter_are_the_policy(store, start):
    """As a user of peft would load it: the base's folder, the adapter's folder, nothing of this
    project."""
    made = world.by_engine(store, start, temperature=1.0)
    done = world.trained(store, start, made, _config(epochs=3))
    loader = AutoModelForSeq2SeqLM if start.ref.run == "t5" else AutoModelForCausalLM
    base = loader.from_pretrained(start.files.folder, dtype=torch.float32)
    apart = PeftModel.from_pretrained(base, done.files.folder / "adapter").eval()
    models = [*(load_model(version, dtype=torch.float32) for version in (start, done)), apart]
    rows = made[0].table().to_pylist()
    with torch.no_grad():
        before, merged, by_peft = (
            torch.cat([world.own_logprobs(model, row) for row in rows]) for model in models
        )
    torch.testing.assert_close(merged, by_peft, rtol=0, atol=1e-5)
    assert (merged - before).abs().max() > 1e-2
    assert model_entry("policy", done).weights != model_entry("policy", start).weights
    configs = [version.files.read("config.json") for version in (done, start)]
    assert json.loads(configs[0]) == json.loads(configs[1])


def test_only_the_adapters_are_trained_and_have_moments(store, policy, made, train):
    done = train(_config(minibatches=2))
    names = {name for name in done.files.names if name.endswith(".safetensors")}
    assert names == {"model.safetensors", ADAPTER, "optimizer/state.safetensors"}
    adapter = world.weights(done, ADAPTER)
    moments = world.weights(done, "optimizer/state.safetensors")
    assert len(adapter) == 2 * LINEAR["llama"]
    assert {name.rpartition("lora_")[2] for name in adapter} == {"A.weight", "B.weight"}
    size = sum(tensor.numel() for tensor in adapter.values())
    assert done.manifest.metrics["trainable_parameters"] == size
    assert sum(tensor.numel() for tensor in moments.values()) == 2 * size + 1
    before, after = world.weights(policy), world.weights(done)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = {name.removeprefix("base_model.model.") for name in adapter}
    assert changed == {name.replace(".lora_A", "") for name in layers if ".lora_A" in name}
    described = {**SMALL, "target_modules": "all-linear", "save": "merged", "base": "exact"}
    assert done.manifest.config["lora"] == described
    assert done.manifest.input("base").ref == str(policy.ref)
    assert verify(store)[1] == []
    other = train(_config(seed=1))
    assert not world.are_equal(adapter, world.weights(other, ADAPTER)), "A is made by the seed"


@pytest.mark.parametrize(
    ("start", "packing"),
    [("llama", "shared"), ("llama", "packed"), ("gpt2", "single"), ("t5", "packed")],
    indirect=["start"],
)
def test_the_adapters_gradient_is_that_of_the_whole_weights(store, start, packing):
    """With W' = W + s B A and B = 0: dL/dB = s dL/dW Aᵀ and dL/dA = 0, where dL/dW is that of full
    training; gpt2's W is the transpose."""
    inputs = world.inputs_of(start, world.by_engine(store, start))
    config = _config(packing=packing, token_budget=40)

    def parameters_of(lora: bool) -> dict[str, torch.nn.Parameter]:
        model = load_model(start, dtype=torch.float32)
        if lora:
            attach(config.lora, model, start, seed=0)
        trainer = world.trainer(store, inputs, config, model)
        world.step(trainer)
        assert trainer.mode == packing
        return dict(model.named_parameters())

    whole, adapted = parameters_of(False), parameters_of(True)
    largest = 0.0
    for name, parameter in adapted.items():
        assert ("lora_" in name) == parameter.requires_grad == (parameter.grad is not None)
        if "lora_B" in name:
            a = adapted[name.replace("lora_B", "lora_A")]
            slope = whole[name.replace(".lora_B.default", "")].grad
            expected = 12 / 4 * (slope.T if start.ref.run == "gpt2" else slope) @ a.detach().T
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)
            assert not a.grad.any()
            largest = max(largest, float(expected.abs().max()))
    assert largest > 1e-3


def test_names_choose_the_layers(train):
    lora = {**SMALL, "target_modules": ["q_proj", "mlp.down_proj"]}
    done = train(_config(lora=lora))
    names = world.weights(done, ADAPTER)
    layers = {name.partition(".layers.")[2].partition(".lora_")[0] for name in names}
    assert layers == {
        f"{n}.{name}" for n in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }


# -- going on


def test_the_audit_compares_base_and_adapter_with_what_the_merged_weights_sampled(store, train):
    done = train(_config(epochs=4))
    assert done.manifest.metrics["audit"]["max_gap"] < 1e-4
    later = world.scored(store, done, world.rows_of(done, 4, 4))
    metrics = world.trained(store, done, later, _config()).manifest.metrics
    assert metrics["audit"]["max_gap"] < 1e-4 and metrics["step"] == 5


def test_whole_weights_may_follow_adapters_and_the_reverse(train, caplog):
    adapted = train(_config())
    whole = train(_again(lora=None), start=adapted)
    assert (
        "trained by adapters, now it is whole weights: the moments start from zero" in caplog.text
    )
    assert not (whole.files.folder / "adapter").exists() and whole.manifest.input("base") is None
    before, after = world.weights(adapted), world.weights(whole)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    anew = train(_again(), start=whole)
    assert "trained by whole weights, now it is adapters" in caplog.text
    assert anew.manifest.input("base").ref == str(whole.ref)
    assert torch.equal(world.weights(anew)["model.norm.weight"], after["model.norm.weight"])


def test_a_critics_head_is_trained_beside_the_adapters(train):
    fields = {"algorithm": "ppo", "critic_learning_rate": 1e-2}
    first = train(_config(epochs=2, **fields))
    second = train(_again(**fields), start=first)
    size = sum(tensor.numel() for tensor in world.weights(first, ADAPTER).values())
    assert first.manifest.metrics["trainable_parameters"] == size + 32 + 1
    heads = [world.weights(done, "value_head/state.safetensors") for done in (first, second)]
    assert heads[0]["weight"].any() and not torch.equal(heads[0]["weight"], heads[1]["weight"])
    assert heads[1]["updates"].tolist() == [3.0]


@pytest.fixture(params=["llama", "t5"])
def half(request, store, tmp_path):
    """A policy that was saved in bfloat16, as most are."""
    folder = make_folder(tmp_path / "half", request.param)
    world.make_bfloat16(folder)
    return world.imported(store, folder, request.param)


def test_a_base_that_bfloat16_holds_is_held_in_it_and_nothing_changes(store, half, monkeypatch):
    """Linear layers alone: under autocast these are rounded in any case, norms and embeddings are
    not."""
    made = world.by_engine(store, half)
    kinds, whole = {}, Trainer.train

    def train(trainer, progress):
        head = trainer.model.get_output_embeddings()  # is the input embedding too
        for module in filter(lambda each: each is not head, trainer.model.modules()):
            for parameter in module.parameters(recurse=False):
                kind = type(module).__name__, parameter.requires_grad
                kinds.setdefault(kind, set()).add(parameter.dtype)
        return whole(trainer)

    monkeypatch.setattr(Trainer, "train", train)
    config = _config(precision="bf16", epochs=3, audit={"max_mean_gap": 1.0})
    narrow = world.trained(store, half, made, config)
    assert kinds.pop(("Linear", False)) == {torch.bfloat16}
    assert kinds and all(found == {torch.float32} for found in kinds.values()), kinds
    monkeypatch.setattr("quiver.stages.optimize.budget.narrow_frozen", lambda model: None)
    as_float32 = {"weight": ("F32", ())}
    monkeypatch.setattr("quiver.stages.model.loading.stored_weights", lambda folder: as_float32)
    wide = world.trained(store, half, made, config, force=True)
    assert narrow.ref != wide.ref and narrow.manifest.content_hash == wide.manifest.content_hash


def test_a_base_in_bfloat16_is_loaded_as_it_is_and_its_adapters_are_float32(half):
    inputs = {"base": half, "policy": half}
    narrow, wide = (
        load_with_adapters(_config(precision=precision), inputs, torch.device("cpu"))
        for precision in ("bf16", "fp32")
    )
    assert torch.bfloat16 in {parameter.dtype for parameter in narrow.parameters()}
    for name, parameter in wide.named_parameters():
        assert parameter.dtype == torch.float32
        assert "lora_" not in name or narrow.get_parameter(name).dtype == torch.float32
        assert torch.equal(narrow.get_parameter(name).float(), parameter), name


def test_buffers_that_a_model_computes_are_those_of_float32(store, tmp_path):
    """gemma3's scale of embeddings, which in bfloat16 is another number."""
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=24, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=12,
    )  # fmt: skip
    folder = make_folder(tmp_path / "model")
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    policy = world.imported(store, folder, "gemma")
    scale = dict(load_as_stored(policy).named_buffers())["model.embed_tokens.embed_scale"]
    assert float(scale) == pytest.approx(24**0.5, rel=1e-6)


def test_adapters_are_float32_and_so_is_a_base_that_bfloat16_does_not_hold(policy):
    for dtype in (torch.float16, torch.float32):
        model = load_model(policy, dtype=dtype)
        attach(Lora(**SMALL), model, policy, seed=0)
        narrow_frozen(model)
        dtypes = {"lora_" in name: p.dtype for name, p in model.named_parameters()}
        assert dtypes == {True: torch.float32, False: dtype}


# -- refusals


def test_without_peft_it_says_what_to_install(train, monkeypatch):
    done = train(_config())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="peft is not installed") as caught:
        train(_config(), force=True)
    assert caught.value.next == 'pip install "quiver-rl[lora]"'
    with pytest.raises(ConfigError, match="peft is not installed"):  # before anything is generated
        check(_config(), ["answer"])
    assert train(_config()).ref == done.ref  # what is done needs none


def test_the_order_of_target_modules_makes_no_other_adapter(train):
    first = train(_config(lora={**SMALL, "target_modules": ["q_proj", "v_proj"]}))
    turned = {**SMALL, "target_modules": ["v_proj", "q_proj", "v_proj"]}
    second = train(_again(lora=turned), start=first)
    assert second.manifest.input("base") is not None and second.manifest.metrics["step"] == 2


def test_another_adapter_than_the_checkpoints_is_refused(train):
    first = train(_config())
    for changed, said in (
        ({"rank": 8}, "its adapter has rank = 4, the recipe asks for rank = 8"),
        ({"alpha": 24}, "its adapter has alpha = 12, the recipe asks for alpha = 24"),
        ({"target_modules": ["q_proj"]}, "asks for target_modules = ['q_proj']"),
        (
            {"target_modules": ["q_proj"], "alpha": 24, "rank": 8},
            "asks for rank = 8, alpha = 24, target_modules = ['q_proj']",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            train(_again(lora={**SMALL, **changed}), start=first)
        assert said in caught.value.message and str(first.files.folder) in caught.value.next


@pytest.mark.parametrize("name", ["q_porj", "lm_head", "embed_tokens", "proj", ""])
def test_names_that_are_no_layer_are_refused(policy, name):
    model = load_model(policy, dtype=torch.float32)
    with pytest.raises(ConfigError, match="no linear layer inside the language model") as caught:
        attach(Lora(target_modules=["k_proj", name]), model, policy, seed=0)
    names = "there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert names in caught.value.message
    assert ("mean q_proj?" in caught.value.message) == (name == "q_porj")


def experts_policy(store, folder, kind: str, **fields):
    """A tiny policy with a mixture of experts."""
    shutil.copytree(make_folder(folder / "tiny"), folder / "experts")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    widths = dict.fromkeys(("intermediate_size", "intermediate_size_mlp"), 32)
    experts |= {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, **widths, **fields}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 320}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, **sizes, **experts, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "experts")
    return world.imported(store, folder / "experts", kind.partition("_")[0])


@pytest.mark.parametrize("kind", ["llama4_text", "phimoe"])
def test_a_router_of_experts_gets_no_adapter(store, tmp_path, kind):
    """It is derived from a linear layer and gives several tensors."""
    policy = experts_policy(store, tmp_path, kind)
    model = load_model(policy, dtype=torch.float32)
    attach(Lora(**SMALL), model, policy, seed=0)
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any("q_proj" in name for name in trained)
    assert not any("router" in name for name in trained)
    with pytest.raises(ConfigError, match="is called 'router'"):
        require_layers(Lora(target_modules=["router"]), policy)


def test_layers_are_checked_without_the_weights(policy):
    with pytest.raises(ConfigError, match=r"mean q_proj\?"):
        require_layers(Lora(target_modules=["q_porj"]), policy)
    require_layers(Lora(**SMALL), policy)


def test_layers_that_are_called_like_experts_get_no_adapter(store, tmp_path, caplog):
    """The first layer's MLP has none, the second one's has fused ones: peft would adapt these."""
    experts = experts_policy(store, tmp_path, "deepseek_v3", first_k_dense_replace=1)
    for names in (["down_proj"], ["gate_proj"], ["gate_proj", "up_proj"]):
        mixed = [*names, "q_b_proj"]
        with pytest.raises(ConfigError, match=r"peft takes .* for experts") as caught:
            require_layers(Lora(target_modules=mixed), experts)
        assert all(name in caught.value.message for name in names)
        assert "q_b_proj" not in caught.value.message
    model = load_model(experts, dtype=torch.float32)
    attach(Lora(**SMALL), model, experts, seed=0)
    assert "peft takes down_proj, gate_proj, up_proj" in caplog.text
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("q_b_proj" in name for name in trained)
    assert not any("mlp" in name for name in trained)
    merge(model)
    plain = load_model(experts, dtype=torch.float32)
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()
    }


def test_an_adapter_of_another_model_is_refused(store, train):
    first = train(_config())
    other = load_model(make_policy(store, "t5", "t5"), dtype=torch.float32)
    with pytest.raises(ConfigError, match="other names or shapes"):
        attach(Lora(**SMALL), other, first, seed=0)


def test_a_base_that_is_gone_or_changed_is_refused(store, policy, train):
    first = train(_config())
    shutil.rmtree(policy.files.folder)
    gone = "trained over tiny/policy@0, expected .*, found no such version"
    with pytest.raises(LineageError, match=gone) as caught:
        train(_again(), start=first)
    assert str(first.files.folder) in caught.value.next
    other = make_policy(store, seed=1)  # it has the number of what was deleted by hand
    assert other.ref == policy.ref
    with pytest.raises(LineageError, match=other.manifest.content_hash[:12]):
        train(_again(), start=first)
