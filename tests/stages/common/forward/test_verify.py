"""Which packing is chosen, and when the kernel for sequences of any lengths is: its runs, against
transformers one rollout at a time.

The kernel runs on a GPU alone (tests/gpu has it itself). Here loops over its arguments, as its
documentation describes them, stand in.
"""

import pytest
import torch
import torch.nn.attention.varlen
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward import policy as policy_module
from quiver.stages.common.forward import verify
from quiver.stages.common.forward.layout import Sequences, make_layout
from quiver.stages.common.forward.packing import make_pieces
from quiver.stages.common.forward.policy import Policy
from quiver.stages.common.forward.verify import (
    choose_kernel,
    choose_mode,
    recorded,
    varlen_is_right,
)
from tests.stages.common.forward import test_policy as forward


@pytest.mark.parametrize(
    "kind, wanted, expected",
    [
        ("llama", "shared", "shared"),
        ("llama", "packed", "packed"),
        ("mistral", "shared", "shared"),
        ("gemma2", "shared", "single"),
    ],
)
def test_choose_mode_takes_the_first_that_agrees(kind, wanted, expected):
    data, groups = forward._data()
    assert (
        choose_mode(Policy(forward._model(kind), autocast=False), data, groups, wanted) == expected
    )


def test_choose_mode_falls_back_when_sharing_gives_other_numbers(monkeypatch, caplog):
    """A layout that forgets where completions go on is noticed, said, and not used."""

    def broken(pieces, data, device="cpu", **more):
        layout = make_layout(pieces, data, device, **more)
        if any(len(piece.rows) > 1 for piece in pieces):
            layout.positions.copy_(torch.arange(layout.positions.numel()) * 3)
        return layout

    monkeypatch.setattr(policy_module, "make_layout", broken)
    data, groups = forward._data()
    assert (
        choose_mode(Policy(forward._model("llama"), autocast=False), data, groups, "shared")
        == "packed"
    )
    assert "'shared' is not right" in caplog.text


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
"""Of the tiny llama, whose heads have four frequencies."""


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, LONGROPE])
def test_positions_that_depend_on_the_row_s_length_run_alone(caplog, rope):
    data, groups = forward._data()
    rope = {"rope_theta": 10000.0, **rope}
    assert (
        choose_mode(
            Policy(forward._model("llama", rope_parameters=rope), autocast=False),
            data,
            groups,
            "shared",
        )
        == "single"
    )
    assert "length of the row" in caplog.text


def test_the_comparison_takes_short_rollouts_and_few_logits(monkeypatch):
    torch.manual_seed(0)
    lengths = [400, 20, 30, 300, 500]
    rows = [torch.randint(97, (length,)) for length in lengths]
    data, groups = (
        Sequences(forward._ragged([rows[0][:4]] * 5), forward._ragged(rows), torch.ones(5)),
        [0, 0, 0, 1, 2],
    )
    model, made = forward._model("llama"), []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: made.append(logits.shape[1]))
    assert choose_mode(Policy(model, autocast=False), data, groups, "shared") == "shared"
    assert sorted(made) == [20, 30, 128, 256]


def test_an_unknown_head_is_refused():
    model, (data, groups) = forward._model("llama"), forward._data()
    plain = model.forward

    def scaled(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = scaled
    with pytest.raises(ConfigError, match="last hidden state"):
        choose_mode(Policy(model, autocast=False), data, groups, "shared")


def test_a_model_that_reads_later_tokens_is_refused():
    """Gemma 3 does if its config says so."""
    config = Gemma3TextConfig(**forward.SMALL, use_bidirectional_attention=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match="depends on later tokens"):
        choose_mode(Policy(model, autocast=False), *forward._data(), "shared")


def test_a_way_of_packing_that_gives_nan_anywhere_is_not_taken():
    model, (data, prompts) = forward._model("llama"), forward._data()
    policy = Policy(model, autocast=False)
    lengths = data.completions.lengths.tolist()
    expected = [*forward.reference(model, data).detach().split(lengths)[:2]]
    expected[1] = expected[1] * float("nan")
    assert (
        not verify.largest_gap(policy, "packed", data.take([0, 1]), prompts[:2], expected)
        <= verify.TOLERANCE
    )


# -- the kernel


def by_loops(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    wrong=False,
):
    """Query i of n sees of m keys those up to m − n + i, and from there back at most
    `window_size[0]` more. `wrong`: those up to i, as if the first query stood with the first
    key."""
    outputs, times = [], query.shape[1] // key.shape[1]
    assert times == 1 or enable_gqa
    for i in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[i] : cu_seq_q[i + 1]].float()
        k, v = (
            part[cu_seq_k[i] : cu_seq_k[i + 1]].float().repeat_interleave(times, 1)
            for part in (key, value)
        )
        assert len(q) <= max_q and len(k) <= max_k
        last = torch.arange(len(q))[:, None] + (0 if wrong else len(k) - len(q))
        place = torch.arange(len(k))
        seen = (
            place <= last
            if window_size[0] < 0
            else (place <= last) & (place >= last - window_size[0])
        )
        scores = torch.einsum("qhe,khe->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        outputs.append(
            torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        )
    return torch.cat(outputs).to(value.dtype)


@pytest.fixture
def loops(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_loops)


@pytest.mark.parametrize("mode", ["shared", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt2"])
def test_logprobs_and_gradients_are_those_of_one_rollout_at_a_time(loops, kind, mode):
    policy = Policy(forward._model(kind), autocast=False)
    policy.varlen = True
    forward.compare(policy, mode, *forward._data())


def test_runs_are_the_row_and_each_completions_keys_begin_with_its_prompt():
    data, groups = forward._data()
    lengths = data.prompts.lengths.tolist(), data.completions.lengths.tolist()
    layout = make_layout(make_pieces(range(10), groups, *lengths, 10_000), data, varlen=True)
    runs = layout.runs
    assert runs.query_offsets[0] == 0 and runs.query_offsets[-1] == layout.ids.shape[1]
    for i in range(len(runs.query_offsets) - 1):
        keys = runs.keys[runs.key_offsets[i] : runs.key_offsets[i + 1]]
        assert layout.positions[0, keys].tolist() == list(
            range(len(keys))
        )  # a whole prompt, and what follows it
        assert keys[-1] == runs.query_offsets[i + 1] - 1


def _calls(dtype=torch.bfloat16, kind="llama", **changed):
    """What attention is given in a pass over ten rollouts, and their layout."""
    data, groups = forward._data(longest=30)
    policy = Policy(forward._model(kind, **changed).to(dtype), autocast=False)
    policy.set_mode("shared")
    lengths = data.prompts.lengths.tolist(), data.completions.lengths.tolist()
    layout = make_layout(make_pieces(range(10), groups, *lengths, 10_000), data)
    with torch.no_grad(), recorded() as calls:
        policy(layout)
    return list(calls.values()), make_layout(
        make_pieces(range(10), groups, *lengths, 10_000), data, varlen=True
    )


def test_a_call_of_each_kind_is_kept():
    assert [
        call.options["sliding_window"] for call in _calls(kind="mistral", sliding_window=6)[0]
    ] == [6]
    (call,), layout = _calls()
    assert [each.shape[1:] for each in call.states] == [
        (heads, layout.ids.shape[1], 8) for heads in (4, 2, 2)
    ]
    mixed = _calls(
        kind="qwen3",
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert [call.options["sliding_window"] for call in mixed[0]] == [5, None]


def test_a_kernel_that_is_right_is_taken(loops):
    assert varlen_is_right(*_calls())


@pytest.mark.parametrize("broken", ["first key", "NaN"])
def test_a_kernel_with_other_numbers_is_not_taken(monkeypatch, caplog, broken):
    wrong = {
        "first key": lambda *given, **more: by_loops(*given, **more, wrong=True),
        "NaN": lambda *given, **more: by_loops(*given, **more) * torch.nan,
    }
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong[broken])
    assert not varlen_is_right(*_calls())
    assert "varlen is wrong here" in caplog.text


def test_a_kernel_that_does_not_run_is_not_taken(caplog):
    """torch's own, on a CPU."""
    assert not varlen_is_right(*_calls())
    assert "varlen does not run here" in caplog.text


class Uncompiled(Exception):
    """As Triton's CompilationError, which is none of the usual ones."""


def test_a_kernel_that_its_compiler_refuses_is_not_taken(monkeypatch, caplog):
    def refuse(*_, **__):
        raise Uncompiled("out of shared memory")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", refuse)
    assert not varlen_is_right(*_calls())
    assert "varlen does not run here (out of shared memory)" in caplog.text


def test_a_lack_of_memory_is_no_reason_for_another_kernel(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        varlen_is_right(*_calls())


def test_float32_goes_by_blocks(loops):
    """The kernel knows no float32."""
    assert not varlen_is_right(*_calls(torch.float32))


@pytest.mark.parametrize("wanted, expected", [("shared", "blocks"), ("single", "model")])
def test_on_a_cpu_there_are_only_blocks(wanted, expected):
    data, groups = forward._data()
    policy = Policy(forward._model("llama"), autocast=True)
    mode = choose_mode(policy, data, groups, wanted)
    micros = policy.microbatches(range(10), groups, data, 100)
    assert (
        mode == wanted and choose_kernel(policy, micros[0], data) == expected and not policy.varlen
    )
