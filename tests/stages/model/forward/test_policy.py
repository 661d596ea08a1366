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
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.loading import take_own_attention
from quiver.stages.model.ragged import Ragged

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
        **SMALL, final_logit_softcapping=5.0, attn_logit_softcapping=4.0, sliding_window=6
    ),
    "gpt_oss": GptOssConfig(
        **SMALL, num_local_experts=2, num_experts_per_tok=1, sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "llama4": Llama4TextConfig(
        **SMALL, intermediate_size_mlp=48, num_local_experts=2, no_rope_layers=[1, 0], floor_scale=4,
        attention_chunk_size=6,
    ),
    "qwen3_next": Qwen3NextConfig(
        **SMALL, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=24, shared_expert_intermediate_size=24,
    ),
}  # fmt: skip


def _model(kind: str, **changed):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[kind])
    for name, value in changed.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).eval()
    take_own_attention(model)
    return model


WAYS = [
    pytest.param(0, 128, id="kernel"),
    # of 128 rows, the default, are those of other tests
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


def reference(model, sequences: Sequences) -> torch.Tensor:
    """[N] logprobs with gradient by transformers' own model, one rollout at a time."""
    logprobs = []
    for prompt, completion, temperature in zip(
        sequences.prompts, sequences.completions, sequences.temperature, strict=True
    ):
        if model.config.is_encoder_decoder:
            start = torch.tensor([model.config.decoder_start_token_id])
            inputs = {"input_ids": prompt, "decoder_input_ids": torch.cat([start, completion[:-1]])}
            inputs |= {
                name.replace("input_ids", "attention_mask"): torch.ones_like(ids)
                for name, ids in inputs.items()
            }
        else:
            inputs = {"input_ids": torch.cat([prompt, completion[:-1]])}
        inputs = {name: row[None] for name, row in inputs.items()}
        logits = model(**inputs, use_cache=False).logits[0, -len(completion) :]
        table = (logits / temperature).log_softmax(-1)
        logprobs.append(table.gather(1, completion[:, None])[:, 0])
    return torch.cat(logprobs)


def packed(
    policy: Policy, mode: str, sequences: Sequences, numbers: list[int], budget: int = 10_000
) -> torch.Tensor:
    """[N] logprobs with gradient, in the order of the rollouts."""
    policy.set_mode(mode)
    logprobs = torch.zeros(len(sequences.completions.values))
    for pieces in policy.microbatches(range(len(numbers)), numbers, sequences, budget):
        layout = policy.layout(pieces, sequences)
        places = sequences.completions.places(layout.rows)
        logprobs = logprobs.index_copy(0, places, policy(layout)[0])
    return logprobs


def compare(
    policy: Policy,
    mode: str,
    sequences: Sequences,
    numbers: list[int],
    expected: torch.Tensor | None = None,
    atol: float = 1e-5,
) -> None:
    """Logprobs and gradients of `mode` are those of one rollout at a time, whatever the budget."""
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    expected = reference(policy.model, sequences) if expected is None else expected
    weights = torch.randn(len(expected), generator=torch.Generator().manual_seed(1))
    options = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad((weights * expected).sum(), parameters, **options)
    for budget in (1, 12, 10_000) if mode != "single" else (1,):  # which knows no budget
        logprobs = packed(policy, mode, sequences, numbers, budget)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=atol)
        ours = torch.autograd.grad((weights * logprobs).sum(), parameters, **options)
        torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=4 * atol)


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


@pytest.mark.parametrize("short, rows", WAYS)
@pytest.mark.parametrize("mode", ["shared", "packed"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_and_gradients_are_those_of_one_rollout_at_a_time(
    monkeypatch, kind, mode, short, rows
):
    monkeypatch.setattr("quiver.stages.model.forward.attention._SHORT", short)
    monkeypatch.setattr("quiver.stages.model.forward.attention._ROWS", rows)
    compare(Policy(_model(kind), autocast=False), mode, *_data())


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_rollout_by_itself_is_passed_as_the_model_does(kind):
    """By its own attention."""
    compare(Policy(_model(kind), autocast=False), "single", *_data())


@pytest.mark.parametrize("short, rows", WAYS)
def test_a_window_leaves_no_fill_without_a_key(monkeypatch, short, rows):
    """A short completion after a long prompt stands in a block with a long one after a short
    prompt: its fill looks far ahead."""
    monkeypatch.setattr("quiver.stages.model.forward.attention._SHORT", short)
    monkeypatch.setattr("quiver.stages.model.forward.attention._ROWS", rows)
    torch.manual_seed(1)
    prompts = [ids for length in (30, 3) for ids in [torch.randint(97, (length,))] * 2]
    completions = [torch.randint(97, (length,)) for length in (3, 2, 31, 29)]
    sequences = Sequences(_ragged(prompts), _ragged(completions), torch.ones(4))
    compare(Policy(_model("mistral"), autocast=False), "shared", sequences, [0, 0, 1, 1])


def test_long_sequences_go_through_the_kernel_in_blocks(monkeypatch):
    monkeypatch.setattr("quiver.stages.model.forward.layout._MASK_ITEMS", 20_000)
    compare(Policy(_model("llama"), autocast=False), "shared", *_data(longest=200), atol=1e-4)


def test_a_freed_policy_keeps_nothing():
    """Neither weights nor gradients, although modules, and fused projections, still refer to them."""
    model, (data, groups) = _model("llama"), _data()
    policy = Policy(model, autocast=False)
    policy.fuse()
    packed(policy, "shared", data, groups).sum().backward()
    tensors = [*policy.parameters(), *(parameter.grad for parameter in policy.parameters())]
    held = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    assert all(storage() is not None for storage in held)
    del tensors
    policy.free()
    gc.collect()
    assert [storage for storage in held if storage() is not None] == []


@pytest.mark.parametrize("is_kept", [True, False])
def test_within_a_step_each_weight_is_cast_once_if_casts_are_kept(is_kept):
    """A weight that changes inside, which no trainer does, shows whether it was cast anew."""
    model, (data, groups) = _model("llama"), _data()
    policy = Policy(model, autocast=True)
    policy.fuse()
    policy.keeps_casts = is_kept
    with policy.context():
        before = packed(policy, "shared", data, groups)
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.data.mul_(4)
        after = packed(policy, "shared", data, groups)
    assert torch.equal(before, after) == is_kept
