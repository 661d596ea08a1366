"""What a micro-batch of the optimizer moves through a GPU's memory, in how many kernels, and its
peak: counted on meta tensors for models of 0.5 to 7 billion weights. tests/benchmarks/RESULTS.md
has the table."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from quiver.flows.fit import Estimate, Workload, parse_machine
from quiver.flows.recipe import Recipe
from quiver.stages.model.forward import modules
from quiver.stages.model.forward.gpu import choice, head, operations
from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.transfer import to_device
from quiver.stages.model.memory import shape_of
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize.algorithms import find_algorithm
from quiver.stages.optimize.batch import Batch, StepColumns
from quiver.stages.optimize.config import Config
from quiver.stages.optimize.objective import Objective
from tests.bytes_moved import META, Counter, autocast_on_meta

MODELS = {
    "0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "1.7B": LlamaConfig(
        vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
        num_attention_heads=32, num_key_value_heads=32, tie_word_embeddings=True,
    ),
    "1.7B, heads normalized": Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""The sizes of Qwen2.5-0.5B, SmolLM2-1.7B, Qwen3-1.7B and Qwen2.5-7B."""
RECIPE = Recipe(
    run="tiny",
    policy={"model": "model"},
    data={"source": "rows.jsonl"},
    reward={"functions": [{"use": "math"}]},
)
GROUPS, COPIES, PROMPT, COMPLETION = 9, 8, 145, 95
"""8,073 tokens in the row, 6,840 of which are predicted."""


def _attention(queries, keys, values, *_, **__):
    log_sums = 4 * queries.shape[0] * queries.shape[1]
    return 2 * queries.nbytes + keys.nbytes + values.nbytes + log_sums


def _attention_slope(grad, queries, keys, values, *_, **__):
    log_sums = 4 * queries.shape[0] * queries.shape[1]
    return 4 * queries.nbytes + 2 * keys.nbytes + 2 * values.nbytes + log_sums


COSTS = {"_flash_attention_forward": _attention, "_flash_attention_backward": _attention_slope}


def with_adapters(model: nn.Module) -> nn.Module:
    """The model as LoRA trains it on a GPU: weights of linear layers in bfloat16, frozen."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = inject_adapter_in_model(LoraConfig(r=16, target_modules=names), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "base_layer" in name:
            parameter.data = parameter.data.bfloat16()
    return model


def once_a_kind(succeeds):
    """Trials of replacements, of which one speaks for all layers: without numbers they tell types
    and shapes alone."""
    answers = {}

    def succeeds_once(trial, like):
        name = repr(trial.forward).partition(" at ")[0]
        kind = name, trial.shapes, like.shape, trial.precision
        if kind not in answers:
            answers[kind] = succeeds(trial, like)
        return answers[kind]

    return succeeds_once


def micro_batch(
    config, monkeypatch, *, fused: bool, passes: int = 1, has_adapters: bool = False
) -> Counter:
    """A pass of a policy with float32 weights under bfloat16 autocast, with the loss of GRPO, and
    its backward pass. With two `passes` the second is counted, else the weights have no gradient
    before."""
    num_rollouts = GROUPS * COPIES
    rollouts = range(num_rollouts)
    numbers = [rollout // COPIES for rollout in rollouts]
    prompts, completions = (
        Ragged.from_lengths(torch.zeros(num_rollouts * length, dtype=torch.int64), lengths)
        for length in (PROMPT, COMPLETION)
        for lengths in [torch.full((num_rollouts,), length)]
    )
    sequences = Sequences(prompts, completions, torch.ones(num_rollouts))
    old_logprobs = torch.zeros(len(completions.values))
    batch = Batch(
        sequences,
        numbers,
        numbers,
        torch.ones(num_rollouts),
        old_logprobs,
        None,
        old_logprobs,
        masked=torch.zeros(num_rollouts, dtype=torch.bool),
    )
    objective = Objective(Config(kl_coef=0.1), find_algorithm("grpo"))
    weights = objective.weights(batch, list(rollouts))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = with_adapters(model) if has_adapters else model
    trained = [each for each in model.parameters() if each.requires_grad]
    if fused:
        monkeypatch.setattr(choice, "DEVICES", {"cuda", "meta"})
        monkeypatch.setattr(modules._Trial, "succeeds", once_a_kind(modules._Trial.succeeds))
    with autocast_on_meta(monkeypatch):
        policy = Policy(model, autocast=True)
        policy.set_mode("shared")
        policy.fuse()
        policy.kernel = "varlen"
        (pieces,) = policy.microbatches(rollouts, numbers, sequences, 1 << 30)
        layout = policy.layout(pieces, sequences)
        assert (layout.ids.numel(), len(layout.targets)) == (8073, 6840)
        step = StepColumns(weights, kl_coef=0.1).at(batch.places(layout.rows))
        columns, step = to_device((batch.token_columns(layout.rows), step), META)
        head._is_right("meta", torch.bfloat16)  # tried once a process, not once a micro-batch
        with policy.context():
            for _ in range(passes):
                with Counter(COSTS) as counter:
                    moments = [torch.empty_like(p) for p in trained for _ in range(2)]
                    counter.hold(*model.parameters(), *moments)
                    loss, _, _ = objective.loss(columns, policy(layout), step)
                    loss.backward()
    assert all(parameter.grad is not None for parameter in trained)
    return counter


@cache
def fused_micro_batch(name: str) -> Counter:
    """What a micro-batch of the model moves with the GPU's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        return micro_batch(MODELS[name], patch, fused=True)


@pytest.mark.parametrize(
    ("name", "gigabytes", "most", "kernels", "peak"),
    [
        ("0.5B", 54.3, 0.4 * 231, 1059, 14.5),
        ("1.7B", 107.8, 0.4 * 327, 975, 38.6),
        ("1.7B, heads normalized", 116.4, 0.4 * 327, 1207, 38.9),
        ("7B", 232.4, 0.4 * 770, 1206, 131.7),
    ],
)
def test_a_micro_batch_moves_less_than_two_fifths(name, gigabytes, most, kernels, peak):
    counter = fused_micro_batch(name)
    assert counter.moved / 1e9 == pytest.approx(gigabytes, abs=0.06)
    assert counter.peak / 2**30 == pytest.approx(peak, abs=0.06)
    assert counter.kernels == kernels
    assert counter.moved < most * 1e9
    assert counter.kernels <= 2000


@pytest.mark.parametrize(
    ("name", "lora"), [*((name, None) for name in MODELS), ("1.7B, heads normalized", {"rank": 16})]
)
def test_quiver_fit_tells_the_peak_within_a_fifth(name, lora, monkeypatch):
    counter = (
        micro_batch(MODELS[name], monkeypatch, fused=True, has_adapters=True)
        if lora
        else fused_micro_batch(name)
    )
    work = Workload(GROUPS, COPIES, PROMPT, COMPLETION, 240, "the test")
    assert work.passed_tokens == 8073
    estimate = Estimate(RECIPE, shape_of(MODELS[name]), work, parse_machine("h100"))
    config = Config(kl_coef=0.1, token_budget=8073, activation_checkpointing=False, lora=lora)
    need = estimate.training(config)
    held = need.bytes - need.memory["libraries"] - need.memory.get("sleeping engine", 0)
    held -= 0.5 * need.memory["gradients"]  # in the middle of the backward pass
    assert held == pytest.approx(counter.peak, rel=0.2)


def test_a_layer_is_at_most_34_kernels():
    """In a micro-batch after the first, with shared prompts; no gradient is added up by autograd
    but the embedding's."""
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "head_dim": 16}
    counters = []
    for num_layers in (1, 2):
        config = Qwen3Config(
            **small, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2
        )
        with pytest.MonkeyPatch.context() as patch:
            counters.append(micro_batch(config, patch, fused=True, passes=2))
    first, second = counters
    assert second.kernels - first.kernels <= 34
    assert first.calls_of["add_"] == second.calls_of["add_"] == 1
    assert second.calls_of["rotate_kernel"] - first.calls_of["rotate_kernel"] == 2


def test_without_the_kernels_it_moves_four_times_as_much(monkeypatch):
    plain = micro_batch(MODELS["0.5B"], monkeypatch, fused=False)
    assert plain.moved / 1e9 == pytest.approx(232.5, rel=0.02)
    assert plain.kernels > 2000


def test_what_no_row_of_the_costs_tells_is_refused():
    import torch.nn.attention.varlen  # registers the operation, and takes 2 s

    attend = torch.ops.torch_attn._varlen_attn
    states, starts = torch.empty(3, 1, 8, device=META), torch.empty(2, device=META)
    with Counter({}), pytest.raises(LookupError, match="_varlen_attn"):
        attend(states, states, states, starts, starts, 3, 3)


def test_a_kernel_reads_and_writes_each_of_its_tensors_once():
    with Counter({}) as counter:
        gates, ups = torch.empty(2, 3, 4, device=META)
        operations.gate(gates, ups)
    assert (counter.kernels, counter.moved) == (1, 3 * gates.nbytes)


def test_views_are_free_and_an_operation_reads_and_writes_once():
    with Counter({}) as counter:
        matrix = torch.ones(4, 8, device=META)
        (matrix[:2].T + 1.0) @ matrix[:2]
    assert (counter.kernels, counter.moved, counter.moved_by_products) == (3, 128 + 128, 384)
    assert counter.peak == 128 + 64 + 256
