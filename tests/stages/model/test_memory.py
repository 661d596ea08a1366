"""Bytes by hand. tests/flows/test_fit.py compares them with processes, and
tests/stages/optimize/test_bytes_moved.py with tensors counted on torch's meta device."""

import pytest
from transformers import (
    Gemma4TextConfig,
    GPT2Config,
    OpenAIGPTConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    T5Config,
)

from quiver.schemas.errors import ConfigError
from quiver.stages.model import memory
from quiver.stages.model.folder import says_no_memory

SEVEN = memory.shape_of(
    Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    )
)  # fmt: skip
"""Qwen2.5-7B."""


def train(precision="bf16", **options):
    return memory.training(SEVEN, 792, on_gpu=True, precision=precision, **options)


def test_a_shape_is_read_from_the_config_alone():
    assert (SEVEN.weights, SEVEN.layers, SEVEN.head) == (7_615_616_512, 28, 152064 * 3584)
    assert (SEVEN.attention, SEVEN.keys, SEVEN.is_tied) == (3584, 512, False)
    layer = 3584 * (3584 + 2 * 512) + 3584 + 2 * 512 + 3584**2 + 3 * 3584 * 18944 + 2 * 3584
    assert SEVEN.largest_layer == layer
    assert SEVEN.outside_layers == 2 * SEVEN.head + 3584


def test_a_width_counts_the_experts_a_token_is_routed_to():
    sparse = memory.shape_of(
        Qwen2MoeConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        )
    )  # fmt: skip
    assert sparse.intermediate == 2 * 32 + 48
    dense = memory.shape_of(GPT2Config())  # names its widths otherwise
    assert (dense.intermediate, dense.is_tied) == (4 * 768, True)


def test_a_width_is_that_of_the_widest_layer():
    """Every sixth layer of Gemma 4 has wider heads."""
    config = Gemma4TextConfig(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, global_head_dim=32, intermediate_size=48,
    )  # fmt: skip
    shape = memory.shape_of(config)
    assert (shape.heads, shape.attention, shape.keys) == (4, 4 * 32, 2 * 32)
    assert (shape.intermediate, shape.layers) == (48, 6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "not a decoder with attention"),
        (Qwen2Config(num_experts=2, num_experts_per_tok=[1, 2]), "cannot be estimated: TypeError"),
        (OpenAIGPTConfig(), "no layers of a known kind"),
    ],
)
def test_a_model_of_another_kind_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        memory.shape_of(config)


@pytest.mark.parametrize(
    ("precision", "is_8bit", "bytes_per_weight"),
    [
        ("fp32", False, 16),
        ("bf16", False, 18),
        ("bf16_stochastic", False, 14),
        ("fp32", True, 8),
        ("bf16", True, 8),
        ("bf16_stochastic", True, 6),
    ],
)
def test_bytes_per_trained_weight_are_those_of_the_documents(precision, is_8bit, bytes_per_weight):
    parts = train(precision, is_8bit=is_8bit)
    states = parts["weights"] + parts["gradients"] + parts["moments"]
    assert states / SEVEN.weights == pytest.approx(bytes_per_weight, rel=0.02)


def test_a_rank_holds_its_share_and_what_is_whole_for_a_moment():
    parts = train("fp32", ranks=8)
    assert parts["weights"] == 4 * SEVEN.weights / 8
    # the head, its gradient, the gradient's copy for the exchange, and the next layer
    assert parts["whole for a moment"] == 4 * (3 * SEVEN.head + SEVEN.largest_layer)
    assert train("bf16", ranks=8)["weights"] == parts["weights"], "casts are not kept"


def test_moments_on_the_host_take_none_of_a_gpus_memory():
    assert train(moments_on_host=True)["moments"] == 0
    on_cpu = memory.training(SEVEN, 792, on_gpu=False, precision="fp32", moments_on_host=True)
    assert on_cpu["moments"] == 8 * SEVEN.weights


def test_casts_of_few_byte_training_are_those_of_a_pass():
    casts = [
        train(is_8bit=True, recomputes=again)["whole for a moment"] - 4 * SEVEN.head
        for again in (False, True)
    ]
    held = SEVEN.in_layers, SEVEN.largest_layer
    assert casts == [2 * (layers + SEVEN.head) for layers in held]


def test_activations_by_hand():
    stored, again, narrow = (
        train(precision, recomputes=again)["activations"]
        for precision, again in (("bf16", False), ("bf16", True), ("bf16_stochastic", False))
    )
    assert again - stored / 28 == pytest.approx(792 * 4 * 3584 * 28)  # each layer's input
    # of each token both norms' inputs and outputs, queries, attention's output, gate and up
    per_token = 2 * 3584 * (4 + 2) + 2 * (2 * 3584 + 2 * 512 + 2 * 18944)
    assert stored == pytest.approx(792 * 28 * per_token)
    assert stored - narrow == 792 * 28 * 2 * 3584 * 2  # the stream between layers, twice


def test_adapters_and_a_critic():
    sides = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    adapters = 28 * 16 * sides
    linear = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    base = 2 * (SEVEN.in_layers + SEVEN.head) + 4 * (SEVEN.head + 3584)
    for precision, weights in (("bf16", base), ("fp32", 4 * SEVEN.weights)):
        parts = train(precision, lora_rank=16)
        assert parts["weights"] == weights + 4 * adapters
        narrow = train(precision, lora_rank=16, has_nf4_base=True)["weights"]
        saved = (2 if precision == "bf16" else 4) - (0.5 + 4 / 64)
        assert parts["weights"] - narrow == saved * linear
        assert (parts["gradients"], parts["moments"]) == (4 * adapters, 8 * adapters)
    alone, judged = train(), train(has_critic=True)
    for name in ("weights", "gradients", "moments"):
        assert judged[name] == 2 * alone[name]


def test_logprobs_hold_no_gradients():
    for precision, weights in (
        ("bf16", 4 * SEVEN.weights + 2 * (SEVEN.in_layers + SEVEN.head)),
        ("bf16_pure", 2 * SEVEN.weights),
    ):
        parts = memory.scoring(SEVEN, 792, on_gpu=True, precision=precision)
        assert parts["weights"] == weights and "gradients" not in parts


@pytest.mark.parametrize(
    ("asked", "cache"),
    [
        ({"options": {"cpu_kv_cache_gib": 2}}, 2 * 2**30),
        ({"longest": 10**7}, 0.4 * 1e11),
        ({"longest": 100, "sequences": 4}, 4 * 132 * 28 * 2 * 512 * 2),
        ({"on_gpu": True}, 0.9 * 1e11 - 2 * SEVEN.weights - 2.5e9),
        ({"on_gpu": True, "options": {"gpu_memory_utilization": 0.5}}, 0.5e11 - 2 * SEVEN.weights - 2.5e9),
        ({"on_gpu": True, "device_bytes": 2**30}, 1280 * 28 * 2 * 512 * 2),  # of one rollout
    ],
)  # fmt: skip
def test_a_cache_takes_what_is_asked_for_or_left(asked, cache):
    usual = {"engine": "vllm", "options": {}, "width": 2, "longest": 1280, "sequences": 256}
    usual |= {"on_gpu": False, "device_bytes": 1e11}
    assert memory.sampling(SEVEN, **{**usual, **asked})["cache"] == pytest.approx(cache)


def test_vllm_splits_weights_over_gpus():
    options = {"tensor_parallel_size": 2, "engine_args": {"data_parallel_size": 2}}
    usual = {"options": options, "width": 2, "longest": 1, "sequences": 1, "device_bytes": 8e10}
    weights = [
        memory.sampling(SEVEN, engine=engine, on_gpu=on_gpu, **usual)["weights"]
        for engine, on_gpu in (("vllm", True), ("vllm", False), ("transformers", True))
    ]
    assert weights == [SEVEN.weights, 2 * SEVEN.weights, 2 * SEVEN.weights]
    assert memory.reward_model(10, width=4, on_gpu=True, split=2)["weights"] == 20


# -- the budget


def half(tokens, recomputes):
    """A byte a token, and half of one if layers are recomputed."""
    return {"activations": 1e6 * tokens * (0.5 if recomputes else 1.0)}


@pytest.mark.parametrize(
    ("gigabytes", "given", "chosen"),
    [
        (0, (None, None), (2048, False)),
        (0, (300, True), (300, True)),
        (100, (None, None), (65536, False)),
        (17, (None, None), (12288, False)),
        (8, (None, None), (12288, True)),
        (8, (None, False), (8192, False)),
        (17, (None, True), (24576, True)),
        (17, (9000, None), (9000, False)),
        (10, (9000, None), (9000, True)),
        (2, (None, None), (8192, True)),
    ],
)
def test_the_most_that_fits_is_chosen_and_what_is_given_stays(gigabytes, given, chosen):
    assert memory.choose_budget(half, gigabytes * 1e9, *given) == chosen


@pytest.mark.parametrize(("given", "recomputes"), [(None, False), (False, False), (True, True)])
def test_a_model_of_an_unknown_shape_gets_the_smallest_budget(given, recomputes):
    def unknown(tokens, recomputes):
        return memory.training(memory.shape_of(T5Config()), tokens, on_gpu=True, precision="bf16")

    assert memory.choose_budget(unknown, 1e12, None, given) == (8192, recomputes)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("out of resource: shared memory, Required: 262144, Hardware limit: 101376", False),
    ],
)  # fmt: skip
def test_what_says_that_memory_ran_out(message, expected):
    assert says_no_memory(RuntimeError(message)) == expected
