"""Engine `transformers` samples from the trainer's model: for each config feature that changes
attention, positions or logits, its logprobs are those of a plain pass with eager attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.generate.engine import Engine, Request, Setup
from quiver.stages.generate.engines.transformers import TransformersEngine
from quiver.stages.generate.options import Sampling
from quiver.stages.model.families import FAMILIES, HEARING, MODES, NOT_SAMPLED, UNPADDED
from quiver.stages.model.forward.attention import set_mode
from quiver.stages.model.loading import configs_of, load_model
from tests import architectures, tiny

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-4
ROPE = {"rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 64,
}
CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": None}
FEATURES = {
    "caps on attention: gemma2": ("eager", "gemma2", CAPS),
    "caps on logits: gemma2": (
        "sdpa",
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": 1.0},
    ),
    "caps on logits: gemma3": ("sdpa", "gemma3_text", {"final_logit_softcapping": 1.0}),
    "sinks: gpt_oss": ("eager", "gpt_oss", {}),
    "windows: mistral": ("sdpa", "mistral", {"sliding_window": 6}),
    "windows: gemma3": ("sdpa", "gemma3_text", {"sliding_window": 6}),
    "chunks: llama4": ("sdpa", "llama4_text", {"attention_chunk_size": 6}),
    "scaled queries: gemma2": (
        "sdpa",
        "gemma2",
        {"query_pre_attn_scalar": 2, "attn_logit_softcapping": None},
    ),
    "scaled queries: granite": ("sdpa", "granite", {"attention_multiplier": 0.9}),
    "scaled positions: yarn": ("sdpa", "llama", {"rope_parameters": {**ROPE, **YARN}}),
    "scaled positions: llama3": ("sdpa", "llama", {"rope_parameters": {**ROPE, **LLAMA3}}),
    "scaled positions: longrope": ("sdpa", "phi3", {"rope_parameters": {**ROPE, **LONGROPE}}),
    "scaled logits: cohere": ("sdpa", "cohere", {"logit_scale": 0.3}),
    "scaled logits: granite": ("sdpa", "granite", {"logits_scaling": 3.0}),
    "linear attention in other layers: bamba": ("sdpa", "bamba", {}),
    "biases of positions: bloom": ("eager", "bloom", {}),
    "biases of positions: t5": ("sdpa", "mt5", {}),
}
"""Attention that trainer and engine take, family, and what its config is given."""
NOT_ON_A_CPU = {
    "biases of positions: t5",  # vLLM has no encoder-decoder models
    "linear attention in other layers: bamba",  # not tried
    "chunks: llama4",  # its chunks are multiples of a block of 32
    "sinks: gpt_oss",  # no experts without quantization
}
"""What vLLM's CPU build does not start with, or was not tried with."""


TWO_HEADS = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 2)
"""For families whose heads are as wide as these are few: vLLM's CPU attention needs 32."""


def make_model(folder: Path, family: str, **changed: object) -> Path:
    """A tiny model of a family, with large random weights."""
    config = architectures.config_of(family)
    if family in ("bloom", "cohere", "granite", "llama", "phi3"):
        changed = {**TWO_HEADS, **changed}
    for part in configs_of(config):
        if part.model_type == "llama4_text":  # three layers with chunks and one without
            part.num_hidden_layers, part.layer_types = 4, part.layer_types[:4]
        for name, value in changed.items():
            if hasattr(part, name):
                setattr(part, name, value)
    architectures.make_tiny(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def policy_of(store: Store, folder: Path) -> Version:
    ref = run_stage("policy", {"model": str(folder)}, store, into=folder.name, in_process=True)
    return store.open(ref)


def setup_of(policy: Version, **options: object) -> Setup:
    """Rows of 20 ids, in float32."""
    return Setup(
        policy=policy,
        sampling=Sampling(max_tokens=20, ignore_eos=True),
        stop_ids=(),
        max_model_len=40,
        dtype="float32",
        device="cpu",
        options=options,
    )


def largest_gap(engine: Engine) -> float:
    """Sample rows with prompts of several lengths in one batch, and return the largest difference
    from the logprobs of one plain pass with eager attention over each row, in nats."""
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 96, (length,), generator=draw) for length in (8, 15, 4)]
    requests = [Request(row, ids.int().numpy(), row) for row, ids in enumerate(prompts)]
    rows = list(engine.generate(iter(requests)))
    assert len(rows) == len(prompts)
    plain = load_model(engine.setup.policy, dtype=torch.float32)
    plain.set_attn_implementation("eager")
    gaps = [
        tiny.plain_logprobs(plain, prompts[row.index].tolist(), row.completion_ids.tolist())
        - torch.from_numpy(row.logprobs)
        for row in rows
    ]
    return float(torch.cat(gaps).abs().max())


def gap_of(policy: Version, **options: object) -> float:
    """The largest difference of engine `transformers`."""
    return largest_gap(TransformersEngine(setup_of(policy, **options)))


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_sampled_is_what_eager_attention_computes(store, tmp_path, name):
    attention, family, changed = FEATURES[name]
    policy = policy_of(store, make_model(tmp_path / "model", family, **changed))
    model = load_model(policy, dtype=torch.float32)
    assert model.config._attn_implementation == attention
    set_mode(model, "single")
    assert model.config._attn_implementation == attention
    assert gap_of(policy) < TOLERANCE


def test_caps_that_are_left_out_would_be_seen(store, tmp_path):
    policy = policy_of(store, make_model(tmp_path / "model", "gemma2", **CAPS))
    engine = TransformersEngine(setup_of(policy))
    engine.model.set_attn_implementation("sdpa")
    assert largest_gap(engine) > 100 * TOLERANCE


def test_every_feature_is_in_the_document():
    text = (ROOT / "deployments" / "docs" / "engines.md").read_text()
    documented = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")}
    assert {name.partition(":")[0] for name in FEATURES} <= documented


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", sorted(FEATURES.keys() - NOT_ON_A_CPU))
def test_vllm_samples_the_same(name, tmp_path):
    module = "tests.stages.generate.test_sampled_attention"
    command = [sys.executable, "-m", module, name, str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(done.stdout.splitlines()[-1]) < (1e-3 if name.endswith("bloom") else TOLERANCE)


def test_only_attention_that_leaves_nothing_out_may_be_chosen(store, tmp_path):
    plain = policy_of(store, make_model(tmp_path / "llama", "llama"))
    assert gap_of(plain, attn_implementation="eager") < TOLERANCE
    with pytest.raises(ConfigError, match="not supported"):
        gap_of(plain, attn_implementation="sdqa")
    for family in ("gemma2", "gpt_oss"):
        policy = policy_of(store, make_model(tmp_path / family, family))
        for name in ("flash_attention_2", "flex_attention"):
            with pytest.raises(ConfigError, match="only the eager attention") as caught:
                gap_of(policy, attn_implementation=name)
            assert caught.value.object == f"generate.options.attn_implementation '{name}'"
            assert caught.value.next == "leave generate.options.attn_implementation out"


def test_a_warning_names_the_length_beyond_which_positions_change(store, tmp_path, caplog):
    rope = {"rope_parameters": {**ROPE, **LONGROPE}, "original_max_position_embeddings": 30}
    policy = policy_of(store, make_model(tmp_path / "model", "phi3", **rope))
    TransformersEngine(setup_of(policy))
    (message,) = [message for message in caplog.messages if "longrope" in message]
    assert "rows may have 40 ids, but beyond 30" in message
    assert "generate.max_model_len = 30" in message


@pytest.mark.parametrize(
    ("family", "changed", "problem"),
    [
        ("mamba", {}, "transformers keeps no keys and values"),
        ("bamba", {"attn_layer_indices": None}, "none of its layers keeps keys and"),
        (
            "granitemoehybrid",
            {"layer_types": ["linear_attention"] * 4},
            "none of its layers keeps keys and",
        ),
    ],
)
def test_a_model_that_keeps_no_keys_and_values_is_not_sampled(
    store, tmp_path, family, changed, problem
):
    policy = policy_of(store, make_model(tmp_path / "model", family, **changed))
    words = f"cannot sample from a model of type {family}: .*{problem}"
    with pytest.raises(ConfigError, match=words):
        gap_of(policy)


@pytest.mark.parametrize("family", sorted(UNPADDED - {"minimax_m3_vl_text", "deepseek_v4"}))
def test_rows_are_not_padded_where_that_changes_them(store, tmp_path, family):
    policy = policy_of(store, make_model(tmp_path / "model", family))
    assert gap_of(policy) < TOLERANCE


TRAINED = {name for name, (mode, _) in FAMILIES.items() if mode in MODES}
OTHERWISE = {"gemma3n_text": 1e-3, "nemotron_h": 5e-3, "zamba2": 5e-3}
"""Nats, of families whose own kernels differ by as much: a quantile, or a scan in chunks."""


NO_TEXT_ALONE = HEARING | {"emu3", "mllama"}
"""Families whose language model alone is no model that transformers loads by its type."""


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted((architectures.TEXT_FAMILIES & TRAINED) - NO_TEXT_ALONE))
def test_every_family_is_sampled_right_or_refused(store, tmp_path, family):
    policy = policy_of(store, make_model(tmp_path / "model", family))
    try:
        assert gap_of(policy) < OTHERWISE.get(family, TOLERANCE)
    except ConfigError as error:
        assert error.object == "engine transformers"
        assert family in NOT_SAMPLED or "keeps no keys and values" in error.message


if __name__ == "__main__":  # `test_vllm_samples_the_same` runs this in its own process
    from quiver.stages.generate.engines.vllm import VllmEngine

    name, folder = sys.argv[1], Path(sys.argv[2])
    _, family, changed = FEATURES[name]
    policy = policy_of(Store(folder / "store"), make_model(folder / "model", family, **changed))
    print(largest_gap(VllmEngine(setup_of(policy, cpu_kv_cache_gib=0.2, max_num_seqs=4))))
