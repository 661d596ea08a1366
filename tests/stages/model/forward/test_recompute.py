"""Recomputed norms and MLPs, and fused projections: the numbers and gradients of the model's own,
under the same names; less kept for the backward pass; strangers left alone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from quiver.stages.model.forward import attention
from quiver.stages.model.forward.layout import Block, Scoring
from quiver.stages.model.forward.modules import fuse_modules
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.projections import casts, fuse_projections
from tests.stages.model.forward.kernel_cases import Clamped, Clipped

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.arange(24).view(2, 12)
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "qwen3, queries and keys normalized": (Qwen3Config, {}),
    "gemma, whose norm is another": (GemmaConfig, {}),
    "qwen2, with biases": (Qwen2Config, {}),
    "olmo, clipped in place": (OlmoConfig, {"clip_qkv": 0.02}),
}
RECOMPUTED = {
    "llama": 2 * (2 + 1) + 1,
    "qwen3, queries and keys normalized": 2 * (4 + 1) + 1,
    "gemma, whose norm is another": 2 * 1,
}


def _model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config, more = CONFIGS[family]
    config = config(vocab_size=32, max_position_embeddings=32, head_dim=4, **SIZES, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter)
    return model.to(dtype)


def _gradients(model: nn.Module, autocast: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _kept(compute) -> int:
    """Bytes of the tensors that autograd keeps, each storage once."""
    found = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = compute()
    assert result.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("family", RECOMPUTED)
@pytest.mark.parametrize(
    ("dtype", "autocast", "rtol", "atol"),
    [
        (torch.float32, False, 1e-5, 1e-7),
        (torch.float32, True, 1e-2, 1e-3),
        (torch.bfloat16, False, 5e-2, 1e-2),
        (torch.float16, False, 1e-2, 1e-3),
    ],
)
def test_gradients_are_those_of_the_model_itself(family, dtype, autocast, rtol, atol):
    model = _model(family, dtype)
    expected = _gradients(copy.deepcopy(model), autocast)
    assert fuse_modules(model) == RECOMPUTED[family]
    torch.testing.assert_close(_gradients(model, autocast), expected, rtol=rtol, atol=atol)
    assert fuse_modules(model) == 0


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["norm", "mlp"])
def test_norms_and_mlps_have_the_same_bits(name, autocast):
    model = _model("llama")
    parts = [copy.deepcopy(model), model]
    fuse_modules(model)
    own, ours = (part.model.norm if name == "norm" else part.model.layers[0].mlp for part in parts)
    states = torch.randn(2, 7, 16)
    for enabled in (torch.enable_grad, torch.no_grad):
        with enabled(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(ours(states), own(states))


def test_less_is_kept():
    """Of a norm the normalized input less; of an MLP act(gate) and act(gate) · up less."""
    model = _model("llama")
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    states = torch.randn(1, 64, 16, requires_grad=True)
    weights = 3 * 16 * 24 * 4
    before = [_kept(lambda: norm(states)), _kept(lambda: mlp(states))]
    Policy(model, autocast=False).fuse()
    after = [_kept(lambda: norm(states)), _kept(lambda: mlp(states))]
    assert before[0] - after[0] == 64 * 16 * 4
    assert before[1] - after[1] >= 2 * 64 * 24 * 4
    assert after[1] <= 64 * (2 * 24 + 16) * 4 + weights


class _Silenced(LlamaRMSNorm):
    """A norm with a gate, as some state space models have it."""

    def forward(self, states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(states if gate is None else states * gate)


class _Swapped(LlamaMLP):
    """A gated MLP by its attributes, of another formula."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(states) * self.act_fn(self.up_proj(states)))


def test_what_computes_something_else_under_these_names_stays_as_it_is():
    modules = nn.ModuleList([_Silenced(16), _Swapped(LlamaConfig(**SIZES))])
    modules += [Clamped(LlamaConfig(**SIZES)), Clipped(64)]  # where states stand out
    assert fuse_modules(modules) == 0
    assert not any("forward" in vars(module) for module in modules)


def _block() -> Block:
    """Two sequences of eight queries, each with eight keys before."""
    nowhere = torch.zeros(1, 1, dtype=torch.int64)
    return Block(
        nowhere.expand(2, 8), nowhere.expand(2, 16), torch.tensor([8, 8]), has_no_prefix=False
    )


def test_attention_keeps_its_weights_once_in_the_dtype_of_the_values():
    query, key, value = (torch.randn(2, *shape, 4) for shape in ((6, 8), (3, 16), (3, 16)))
    value = value.bfloat16()
    tensors = [states.requires_grad_() for states in (query, key, value)]
    kept = _kept(lambda: attention.attend_by_products(*tensors, _block(), Scoring(0.5)))
    assert kept == 2 * (2 * 6 * 8 * 16 + query.numel() + key.numel() + value.numel())


def _exact_attention(scoring: Scoring, queries, keys, values, sinks) -> torch.Tensor:
    """What `_block` gives, by its formula."""
    keys, values = (states.repeat_interleave(2, 1) for states in (keys, values))
    scores = queries @ keys.transpose(-1, -2) * scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    key, last = torch.arange(16), torch.arange(8, 16)[:, None]
    oldest = 0
    if scoring.window is not None:
        oldest = (
            last // scoring.window * scoring.window
            if scoring.is_chunk
            else last - scoring.window + 1
        )
    scores = scores.masked_fill((key > last) | (key < oldest), float("-inf"))
    if scoring.sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(2, 6, 8, 1)], -1)
    return scores.softmax(-1)[..., :16] @ values


@pytest.mark.parametrize("short", [0, 256], ids=["kernel", "products"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(0.5),
        Scoring(0.5, window=3),
        Scoring(0.5, window=3, is_chunk=True),
        Scoring(0.5, softcap=0.7),
        Scoring(0.5, sinks=torch.tensor(0.0)),
        Scoring(0.5, window=3, sinks=torch.tensor(0.0)),
    ],
    ids=["plain", "window", "chunk", "cap", "sinks", "sinks and window"],
)
def test_the_gradients_of_attention_are_those_of_float64(
    monkeypatch, scoring, dtype, tolerance, short
):
    """Six query heads over three key heads, a causal mask; the distance relative to the norm."""
    monkeypatch.setattr(attention, "_SHORT", short)
    monkeypatch.setattr(attention, "_KEPT_ITEMS", short)
    torch.manual_seed(0)
    shapes = [(2, 6, 8, 4), (2, 3, 16, 4), (2, 3, 16, 4), (6,)]
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    wide = [each.detach().double().requires_grad_() for each in tensors]
    direction = torch.randn(2, 6, 8, 4).to(dtype)
    given = scoring if scoring.sinks is None else scoring._replace(sinks=tensors[3])
    outputs = attention.attend_block(*tensors[:3], _block(), given)
    exact = _exact_attention(scoring, *wide)
    options = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(outputs, tensors, direction, **options)
    wanted = torch.autograd.grad(exact, wide, direction.double(), **options)
    for ours, theirs in zip([outputs, *found], [exact, *wanted], strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


# -- fused projections


@pytest.mark.parametrize("family", ["llama", "qwen2, with biases", "olmo, clipped in place"])
@pytest.mark.parametrize(("autocast", "rtol", "atol"), [(False, 1e-5, 1e-7), (True, 2e-2, 2e-3)])
def test_gradients_of_fused_projections_are_the_models_own(family, autocast, rtol, atol):
    model = _model(family)
    expected = _gradients(copy.deepcopy(model), autocast)
    assert len(fuse_projections(model)) == 2 * 2
    torch.testing.assert_close(_gradients(model, autocast), expected, rtol=rtol, atol=atol)


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # torch's own casts end with it
        return model(input_ids=IDS).logits


def test_under_autocast_the_rounding_is_that_of_the_model_itself():
    model = _model("llama")
    plain = copy.deepcopy(model)
    fuse_projections(model)
    assert torch.equal(_logits(model), _logits(plain))


def test_weights_keep_their_names_and_a_saved_model_is_whole(tmp_path):
    model = _model("qwen2, with biases")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fuse_projections(model)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(saved, {name: expected[name] for name in saved}, rtol=0, atol=0)
    assert saved.keys() == expected.keys()


def test_a_step_of_the_optimizer_is_seen_by_the_next_pass():
    model = _model("llama")
    fused, optimizer = fuse_projections(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    plain = copy.deepcopy(_model("llama"))
    own = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(2):
        with casts(fused), torch.autocast("cpu", torch.bfloat16):
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        _gradients(plain, True)
        for parameter, mine in zip(plain.parameters(), model.parameters(), strict=True):
            mine.grad = parameter.grad.clone()  # so that rounding cannot part the two
        optimizer.step()
        own.step()
        optimizer.zero_grad()
    with casts(fused):
        assert torch.equal(_logits(model), _logits(plain))


def test_outside_of_casts_no_cast_is_kept():
    model = _model("llama")
    plain, fused = copy.deepcopy(model), fuse_projections(model)
    _logits(model)
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(1.5)
    assert torch.equal(_logits(model), _logits(plain))
    with casts(fused):
        assert torch.equal(_logits(model), _logits(plain))


def test_siblings_that_read_another_input_compute_for_themselves():
    module, own, other = nn.Module(), torch.randn(3, 4), torch.randn(3, 4)
    for name, width in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
        setattr(module, name, nn.Linear(4, width))
    inputs = {"q_proj": own, "k_proj": other, "v_proj": own}
    expected = {name: getattr(module, name)(states) for name, states in inputs.items()}
    fuse_projections(module)
    for name in (*inputs, "v_proj"):  # asked again, with nothing left for it
        torch.testing.assert_close(getattr(module, name)(inputs[name]), expected[name])
    changed = own.clone()
    module.q_proj(changed)
    changed += 1
    plain = nn.functional.linear(changed, module.v_proj.weight, module.v_proj.bias)
    torch.testing.assert_close(module.v_proj(changed), plain)


def test_what_is_more_than_a_plain_linear_layer_is_left_alone():
    class Adapted(nn.Linear):
        def forward(self, states):
            return super().forward(states) + 1

    module = nn.Module()
    module.gate_proj, module.up_proj = Adapted(4, 4), nn.Linear(4, 4)
    assert not fuse_projections(module)
    module.gate_proj = nn.Linear(4, 4).requires_grad_(False)
    assert not fuse_projections(module)


def test_nothing_is_left_in_the_mapped_file(tmp_path):
    _model("llama").save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)

    def is_mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    assert is_mapped()
    fuse_projections(model)
    assert not is_mapped()
