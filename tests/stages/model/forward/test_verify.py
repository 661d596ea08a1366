"""Which packing is chosen, and when the kernel for sequences of any lengths is: its runs, against
transformers one rollout at a time.

The kernel runs on a GPU alone (tests/gpu has it itself). Here loops over its arguments, as its
documentation describes them, stand in.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from quiver.schemas.errors import ConfigError
from quiver.stages.model.forward import policy as policy_module
from quiver.stages.model.forward import verify
from quiver.stages.model.forward.attention import block_attention
from quiver.stages.model.forward.layout import Sequences, make_layout
from quiver.stages.model.forward.packing import make_pieces
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.verify import (
    choose_kernel,
    choose_mode,
    is_right,
    recorded,
    right_kernel,
)
from quiver.stages.model.ragged import Ragged
from tests import flash
from tests.bytes_moved import META, Counter
from tests.stages.model.forward import test_policy as forward


def chosen(model, wanted: str = "shared", data=None) -> str:
    return choose_mode(Policy(model, autocast=False), *(data or forward._data()), wanted)


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
"""Of the tiny llama, whose heads have four frequencies."""


@pytest.mark.parametrize(
    ("kind", "rope", "wanted", "expected"),
    [
        ("llama", None, "shared", "shared"),
        ("llama", None, "packed", "packed"),
        ("mistral", None, "shared", "shared"),
        ("gemma2", None, "shared", "shared"),
        ("qwen3_next", None, "shared", "shared"),
        # positions that depend on the length of the row
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, "shared", "single"),
        ("llama", LONGROPE, "shared", "single"),
    ],
)
def test_choose_mode_takes_the_first_that_agrees(caplog, kind, rope, wanted, expected):
    changed = {"rope_parameters": {"rope_theta": 10000.0, **rope}} if rope else {}
    assert chosen(forward._model(kind, **changed), wanted) == expected
    assert ("length of the row" in caplog.text) == (rope is not None)


def test_choose_mode_falls_back_when_sharing_gives_other_numbers(monkeypatch, caplog):
    """A layout that forgets where completions go on is noticed, said, and not used."""

    def broken(pieces, sequences, **more):
        layout = make_layout(pieces, sequences, **more)
        if any(len(piece.rows) > 1 for piece in pieces):
            layout.positions.copy_(torch.arange(layout.positions.numel()) * 3)
        return layout

    monkeypatch.setattr(policy_module, "make_layout", broken)
    assert chosen(forward._model("llama")) == "packed"
    assert "'shared' is not right" in caplog.text


def test_the_comparison_takes_short_rollouts_and_few_logits():
    torch.manual_seed(0)
    rows = [torch.randint(97, (length,)) for length in (400, 20, 30, 300, 500)]
    prompts = forward._ragged([rows[0][:4]] * 5)
    sequences = Sequences(prompts, forward._ragged(rows), torch.ones(5))
    model, lengths = forward._model("llama"), []
    model.lm_head.register_forward_hook(lambda _, inputs, logits: lengths.append(logits.shape[1]))
    assert chosen(model, data=(sequences, [0, 0, 0, 1, 2])) == "shared"
    assert sorted(lengths) == [20, 30, 128, 256]


@pytest.mark.parametrize("lengths", [(20, 0, 30), (20, 30, 0), (0, 20, 0)])
def test_rollouts_without_a_token_are_not_compared(lengths):
    """The engine may have given up one of a prompt, or all of it."""
    rows = forward._ragged([torch.full((length,), 5) for length in lengths])
    sequences = Sequences(forward._ragged([torch.tensor([3, 4])] * 3), rows, torch.ones(3))
    assert chosen(forward._model("llama"), data=(sequences, [0, 0, 1])) == "shared"


def test_an_unknown_head_is_refused():
    model = forward._model("llama")
    plain = model.forward

    def scaled(*arguments, **options):
        output = plain(*arguments, **options)
        output.logits = output.logits * 2
        return output

    model.forward = scaled
    with pytest.raises(ConfigError, match="last hidden state"):
        chosen(model)


def test_a_model_that_reads_later_tokens_is_refused():
    """Gemma 3 does if its config says so."""
    config = Gemma3TextConfig(**forward.SMALL, use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="depends on later tokens"):
        chosen(AutoModelForCausalLM.from_config(config).eval())


def test_a_way_of_packing_that_gives_nan_anywhere_is_not_taken():
    model, (sequences, prompts) = forward._model("llama"), forward._data()
    lengths = sequences.completions.lengths.tolist()
    expected = [*forward.reference(model, sequences).detach().split(lengths)[:2]]
    expected[1] = expected[1] * float("nan")
    policy = Policy(model, autocast=False)
    gap = verify.largest_gap(policy, "packed", sequences.take([0, 1]), prompts[:2], expected)
    assert not gap <= verify.TOLERANCE


# -- the kernel

# -- the kernel


@pytest.fixture
def loops():
    with flash.on_cpu():
        yield


@pytest.mark.parametrize("mode", ["shared", "packed"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "llama4", "qwen3_next"])
def test_logprobs_and_gradients_are_those_of_one_rollout_at_a_time(loops, kind, mode):
    policy = Policy(forward._model(kind), autocast=False)
    policy.kernel = "varlen"
    forward.compare(policy, mode, *forward._data())


def _calls(dtype=torch.bfloat16, kind="llama", **changed):
    """What attention is given in a pass over ten rollouts, and their layout."""
    sequences, groups = forward._data(longest=30)
    policy = Policy(forward._model(kind, **changed).to(dtype), autocast=False)
    policy.set_mode("shared")
    lengths = sequences.prompts.lengths.tolist(), sequences.completions.lengths.tolist()
    pieces = make_pieces(range(10), groups, *lengths, 10_000)
    with torch.no_grad(), recorded() as calls:
        policy(make_layout(pieces, sequences))
    return list(calls.values()), make_layout(pieces, sequences, varlen=True)


def test_a_call_of_each_kind_is_kept():
    [(states, _)], layout = _calls()
    length = layout.ids.shape[1]
    assert [tensor.shape[1:] for tensor in states] == [(n, length, 8) for n in (4, 2, 2)]
    kinds = ["sliding_attention", "full_attention"]
    mixed, _ = _calls(kind="qwen3", use_sliding_window=True, sliding_window=5, layer_types=kinds)
    assert [options["sliding_window"] for _, options in mixed] == [5, None]


class Uncompiled(Exception):
    """As Triton's CompilationError, which is none of the usual ones."""


def raising(error):
    def kernel(*_, **__):
        raise error

    return kernel


def nan(*arguments, **options):
    output, *others = flash.forward(*arguments, **options)
    return output * torch.nan, *others


def wrong_slope(*arguments, **options):
    return flash.backward(*arguments, **options, wrong=True)


@pytest.mark.parametrize(
    ("kernels", "dtype", "message"),
    [
        ([], torch.bfloat16, None),
        ([], torch.float32, ""),  # the kernel knows no float32
        ([partial(flash.forward, wrong=True)], torch.bfloat16, "varlen is wrong here"),
        ([flash.forward, wrong_slope], torch.bfloat16, "varlen is wrong here"),
        ([nan], torch.bfloat16, "varlen is wrong here"),
        ([raising(Uncompiled("no memory"))], torch.bfloat16, "does not run here (no memory)"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_kernel_is_taken_where_it_runs_and_is_right(caplog, kind, kernels, dtype, message):
    """Also with a window."""
    with flash.on_cpu(*kernels):
        assert is_right("varlen", *_calls(dtype, kind)) == (message is None)
    assert (message or "") in caplog.text


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_the_kernel_is_not_taken_for_caps_or_sinks(loops, caplog, kind):
    assert not is_right("varlen", *_calls(kind=kind))
    assert "knows no logit caps and no sinks" in caplog.text


@pytest.mark.parametrize(
    ("kernels", "expected", "message"),
    [
        ([], "FA3", ""),
        ([partial(flash.forward, wrong=True)], "varlen", "FA3 is wrong here"),
        ([flash.forward, wrong_slope], "varlen", "FA3 is wrong here"),
        (
            [raising(RuntimeError("needs compute capability 9.0"))],
            "varlen",
            "FA3 does not run here",
        ),
    ],
)
def test_flash_attention_3_is_taken_where_it_is_installed_and_right(
    loops, caplog, kernels, expected, message
):
    """By torch's own switch, which is off again afterwards."""
    with flash.installed("FA3", *kernels):
        assert right_kernel(*_calls(), ["FA3", "varlen"]) == expected
        assert current_flash_attention_impl() is None
    assert message in caplog.text and bool(message) == bool(caplog.text)


def test_flash_attention_that_is_not_installed_is_passed_over_in_silence(loops, caplog):
    with flash.installed(
        "FA3", error=ModuleNotFoundError("No module named 'flash_attn_interface'")
    ):
        assert right_kernel(*_calls(), ["FA3", "varlen"]) == "varlen"
    assert not caplog.text


def test_only_a_policys_own_passes_attend_by_its_kernel(loops):
    """Forward and backward, while its context is open; other models in the process do not."""
    names = []

    def counted(name, kernel, *arguments, **options):
        names.append(name)
        return kernel(*arguments, **options)

    sequences, groups = forward._data()
    policies = [Policy(forward._model("llama"), autocast=False) for _ in range(2)]
    kernels = [partial(counted, name, getattr(flash, name)) for name in ("forward", "backward")]
    with flash.installed("FA3", *kernels):
        for policy, kernel in zip(policies, ("FA3", "varlen"), strict=True):
            policy.set_mode("shared")
            policy.kernel = kernel
            pieces, *_ = policy.microbatches(range(10), groups, sequences, 10_000)
            with policy.context():
                policy(policy.layout(pieces, sequences)).logprobs.sum().backward()
            assert set(names) == ({"forward", "backward"} if kernel == "FA3" else set())
            names.clear()
    gradients = [
        torch.cat([weight.grad.flatten() for weight in policy.parameters()]) for policy in policies
    ]
    torch.testing.assert_close(*gradients)


def test_a_lack_of_memory_is_no_reason_for_another_kernel():
    kernel = raising(torch.OutOfMemoryError("CUDA out of memory"))
    with flash.on_cpu(kernel), pytest.raises(torch.OutOfMemoryError):
        is_right("varlen", *_calls())


def test_the_kernel_is_tried_on_the_beginnings_of_a_few_rollouts(loops):
    policy = Policy(forward._model("llama"), autocast=False)
    policy.set_mode("shared")
    lengths = [700, 30, 20, 600, 40, 9, 10]
    rows = [torch.randint(97, (length,)) for length in lengths]
    prompts = forward._ragged([rows[0]] * 5 + [rows[1]] * 2)
    sequences = Sequences(prompts, forward._ragged(rows), torch.ones(7))
    (pieces,) = policy.microbatches(range(7), [0] * 5 + [1] * 2, sequences, 10_000)
    calls, layout = verify.probe_calls(policy, pieces, sequences)
    kept = [512, 30, 20, 512, 9, 10]  # four of the first prompt, two of the second
    assert layout.ids.numel() == 512 + 30 + sum(kept) - len(kept)
    assert [states[0].shape[2] for states, _ in calls] == [layout.ids.numel()]


def test_trying_the_kernel_takes_half_a_gigabyte_at_most():
    """Beside its inputs, for rollouts of 16,384 tokens with the heads of Qwen3-1.7B."""
    ids = torch.zeros(2 * 16_384, dtype=torch.int64)
    both = Ragged.from_lengths(ids, torch.tensor([16_384, 16_384]))
    model = forward._model("qwen3", num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    policy = Policy(model.to(META), autocast=False)
    policy.context = nullcontext  # autocast knows no tensors without data, and the head asks it
    policy.read_head = lambda head, read, hidden: (hidden[..., 0], hidden[..., 0])
    policy.set_mode("shared")
    sequences = Sequences(both, both, torch.ones(2))
    (pieces,) = policy.microbatches(range(2), [0, 0], sequences, 100_000)
    with Counter({}) as counter:
        calls, layout = verify.probe_calls(policy, pieces, sequences)
        in_blocks = replace(layout, runs=None)
        for states, options in calls:
            for tried, dtype in ((layout, torch.bfloat16), (in_blocks, torch.float32)):
                leaves = [each.to(dtype).requires_grad_() for each in states]
                output, _ = block_attention(None, *leaves, None, layout=tried, **options)
                torch.autograd.grad(output, leaves, torch.empty_like(output))
    assert counter.peak < 0.5e9


@pytest.mark.parametrize("wanted, expected", [("shared", "blocks"), ("single", "model")])
def test_on_a_cpu_there_are_only_blocks(wanted, expected):
    sequences, groups = forward._data()
    policy = Policy(forward._model("llama"), autocast=True)
    policy.set_mode(wanted)
    pieces, *_ = policy.microbatches(range(10), groups, sequences, 100)
    assert choose_kernel(policy, pieces, sequences) == expected and policy.kernel == "blocks"
