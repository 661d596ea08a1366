"""Packed forward passes against transformers, one rollout at a time, on several architectures."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from quiver.stages.common.forward.layout import Sequences, make_layout
from quiver.stages.common.forward.policy import Policy, token_budget
from quiver.stages.common.ragged import Ragged

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=6),
    "gpt2": GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.2
    ),
    "gemma2": Gemma2Config(
        **SMALL, final_logit_softcapping=5.0, attn_logit_softcapping=4.0, sliding_window=64
    ),
}


def _model(kind: str, **changed):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[kind])
    for name, value in changed.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


WAYS = [
    pytest.param(0, 128, id="kernel"),
    pytest.param(256, 128, id="products"),
    pytest.param(256, 5, id="products of few rows"),
]


def _data(longest: int = 9, seed: int = 0) -> tuple[Sequences, list[int]]:
    """Four prompts, each with several completions; one id long at the shortest."""
    torch.manual_seed(seed)
    prompts, groups = [], []
    for group, copies in enumerate([3, 1, 4, 2]):
        prompts += [torch.randint(97, (int(torch.randint(1, longest, ())),))] * copies
        groups += [group] * copies
    completions = [torch.randint(97, (length,)) for length in [1, 5, 2, 7, 1, 1, longest, 3, 4, 2]]
    return Sequences(
        _ragged(prompts), _ragged(completions), torch.linspace(0.6, 1.4, len(groups))
    ), groups


def _ragged(rows: list[torch.Tensor]) -> Ragged:
    return Ragged.from_lengths(torch.cat(rows), torch.tensor([len(row) for row in rows]))


def _reference(model, data: Sequences) -> list[torch.Tensor]:
    found = []
    for prompt, completion, temperature in zip(
        data.prompts, data.completions, data.temperature, strict=True
    ):
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
        table = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        found.append(table.gather(1, completion[:, None])[:, 0])
    return found


def _packed(
    policy: Policy, mode: str, data: Sequences, groups: list[int], budget: int
) -> list[torch.Tensor]:
    policy.set_mode(mode)
    found = {}
    for micro in policy.microbatches(range(len(groups)), groups, data, budget):
        layout = make_layout(micro, data)
        parts = policy(layout)[0].split(
            [len(data.completions[row]) for row in layout.rows.tolist()]
        )
        found.update(zip(layout.rows.tolist(), parts, strict=True))
    return [found[row] for row in range(len(groups))]


@pytest.mark.parametrize("mode, num_pieces", [("shared", 4), ("packed", 10), ("single", 10)])
def test_a_prompt_of_several_rollouts_is_passed_once_where_it_is_shared(mode, num_pieces):
    policy = Policy(_model("llama"), autocast=False)
    policy.set_mode(mode)
    data, groups = _data()
    pieces = [p for micro in policy.microbatches(range(10), groups, data, 10_000) for p in micro]
    assert len(pieces) == num_pieces
    prompts = data.prompts.lengths.tolist()
    passed = sum(prompts[piece.rows[0]] for piece in pieces)
    # what comes after the last token of a completion is not asked
    passed += len(data.completions.values) - len(groups)
    assert sum(piece.tokens for piece in pieces) == passed


def test_a_micro_batch_is_larger_on_a_gpu():
    assert [token_budget(torch.device(name)) for name in ("cpu", "cuda")] == [2048, 8192]


@pytest.mark.parametrize("short, rows", WAYS)
@pytest.mark.parametrize("mode", ["shared", "packed", "single"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt2"])
def test_logprobs_and_gradients_are_those_of_one_rollout_at_a_time(
    monkeypatch, kind, mode, short, rows
):
    monkeypatch.setattr("quiver.stages.common.forward.attention._SHORT", short)
    monkeypatch.setattr("quiver.stages.common.forward.attention._ROWS", rows)
    _compare(_model(kind), *_data(), mode)


def _compare(model, data: Sequences, groups: list[int], mode: str) -> None:
    """Values and gradients of `mode` against one rollout at a time, whatever the budget."""
    expected = _reference(model, data)
    weights = [torch.randn_like(row) for row in expected]
    sum((w * row).sum() for w, row in zip(weights, expected, strict=True)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    for budget in (12, 40, 10_000):
        model.zero_grad()
        found = _packed(Policy(model, autocast=False), mode, data, groups, budget)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        sum((w * row).sum() for w, row in zip(weights, found, strict=True)).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("short, rows", WAYS)
def test_a_window_leaves_no_fill_without_a_key(monkeypatch, short, rows):
    """A short completion after a long prompt stands in a block with a long one after a short
    prompt: its fill looks far ahead."""
    monkeypatch.setattr("quiver.stages.common.forward.attention._SHORT", short)
    monkeypatch.setattr("quiver.stages.common.forward.attention._ROWS", rows)
    torch.manual_seed(1)
    prompts = [ids for length in (30, 3) for ids in [torch.randint(97, (length,))] * 2]
    completions = [torch.randint(97, (length,)) for length in (3, 2, 31, 29)]
    _compare(
        _model("mistral"),
        Sequences(_ragged(prompts), _ragged(completions), torch.ones(4)),
        [0, 0, 1, 1],
        "shared",
    )


def test_long_sequences_go_through_the_kernel_in_blocks(monkeypatch):
    monkeypatch.setattr("quiver.stages.common.forward.layout._MASK_ITEMS", 20_000)
    model, (data, groups) = _model("llama"), _data(longest=200)
    with torch.no_grad():
        expected = _reference(model, data)
        found = _packed(Policy(model, autocast=False), "shared", data, groups, 10_000)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_freed_policy_keeps_nothing():
    """Neither weights nor gradients, although modules, and fused projections, still refer to them."""
    model, (data, groups) = _model("llama"), _data()
    policy = Policy(model, autocast=False)
    policy.fuse()
    torch.stack(
        [row.sum() for row in _packed(policy, "shared", data, groups, 1000)]
    ).sum().backward()
    tensors = [*policy.parameters(), *(parameter.grad for parameter in policy.parameters())]
    held = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    assert all(storage() is not None for storage in held)
    del tensors
    policy.free()
    gc.collect()
    assert [storage for storage in held if storage() is not None] == []
