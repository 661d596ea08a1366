"""Fused projections: the same numbers and gradients as the model's own, under the same names,
whatever calls them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quiver.stages.common.forward.projections import casts, fuse_projections

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.arange(24).view(2, 12)


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config, make, more = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "qwen2, with biases": (Qwen2Config, Qwen2ForCausalLM, {}),
        "olmo, clipped in place": (OlmoConfig, OlmoForCausalLM, {"clip_qkv": 0.02}),
    }[kind]
    model = make(config(vocab_size=32, max_position_embeddings=32, **SIZES, **more))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def _gradients(model: nn.Module, **options) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, **options):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen2, with biases", "olmo, clipped in place"])
@pytest.mark.parametrize(("autocast", "rtol", "atol"), [(False, 1e-5, 1e-7), (True, 2e-2, 2e-3)])
def test_gradients_are_those_of_the_model_itself(kind, autocast, rtol, atol):
    model = _model(kind)
    expected = _gradients(copy.deepcopy(model), enabled=autocast)
    assert len(fuse_projections(model)) == 2 * 2
    torch.testing.assert_close(_gradients(model, enabled=autocast), expected, rtol=rtol, atol=atol)


def test_under_autocast_the_rounding_is_that_of_the_model_itself():
    model = _model("llama")
    plain = copy.deepcopy(model)
    fuse_projections(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=0, atol=0
        )


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
        _gradients(plain)
        for parameter, mine in zip(plain.parameters(), model.parameters(), strict=True):
            mine.grad = parameter.grad.clone()  # so that rounding cannot part the two
        optimizer.step()
        own.step()
        optimizer.zero_grad()
    with casts(fused), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=0, atol=0
        )


def test_outside_of_casts_no_cast_is_kept():
    model = _model("llama")
    plain, fused = copy.deepcopy(model), fuse_projections(model)

    @torch.no_grad()
    def logits(each: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # torch's own casts end with it
            return each(input_ids=IDS).logits

    logits(model)
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(1.5)
    expected = logits(plain)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    with casts(fused):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


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

    def mapped() -> list[str]:
        return [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if str(tmp_path) in line
        ]

    assert mapped()
    fuse_projections(model)
    assert not mapped()
