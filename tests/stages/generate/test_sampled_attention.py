"""Engine `transformers` samples from the model that the trainer has: for each feature of a config
that changes attention, positions or logits, its saved logprobs are those of a plain pass with eager
attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward.attention import set_mode
from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.forward.policy import Policy
from quiver.stages.common.forward.verify import own_logprobs
from quiver.stages.common.models.families import FAMILIES, MODES, NOT_SAMPLED, UNPADDED
from quiver.stages.common.models.loading import configs_of, load_model, load_pretrained
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store, Version
from quiver.stages.generate.engine import Engine, Request, Setup
from quiver.stages.generate.engines.transformers import TransformersEngine
from quiver.stages.generate.options import Sampling
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
    "caps on attention: vaultgemma": ("eager", "vaultgemma", CAPS),
    "caps on attention: t5gemma": ("eager", "t5gemma", CAPS),
    "caps on logits: gemma2": (
        "sdpa",
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": 1.0},
    ),
    "caps on logits: gemma3": ("sdpa", "gemma3_text", {"final_logit_softcapping": 1.0}),
    "sinks: gpt_oss": ("eager", "gpt_oss", {}),
    "sinks: granite_swa": ("eager", "granite_swa", {}),
    "sinks: mimo_v2_flash": ("eager", "mimo_v2_flash", {}),
    "windows: mistral": ("sdpa", "mistral", {"sliding_window": 6}),
    "windows: qwen2": (
        "sdpa",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "windows: gemma3": ("sdpa", "gemma3_text", {"sliding_window": 6}),
    "chunks: llama4": ("sdpa", "llama4_text", {"attention_chunk_size": 6}),
    "scaled queries: gemma2": (
        "sdpa",
        "gemma2",
        {"query_pre_attn_scalar": 2, "attn_logit_softcapping": None},
    ),
    "scaled queries: granite": ("sdpa", "granite", {"attention_multiplier": 0.9}),
    "scaled positions: linear": (
        "sdpa",
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
    ),
    "scaled positions: yarn": ("sdpa", "llama", {"rope_parameters": {**ROPE, **YARN}}),
    "scaled positions: llama3": ("sdpa", "llama", {"rope_parameters": {**ROPE, **LLAMA3}}),
    "scaled positions: longrope": ("sdpa", "phi3", {"rope_parameters": {**ROPE, **LONGROPE}}),
    "scaled logits: cohere": ("sdpa", "cohere", {"logit_scale": 0.3}),
    "scaled logits: granite": ("sdpa", "granite", {"logits_scaling": 3.0}),
    "linear attention in other layers: bamba": ("sdpa", "bamba", {}),
    "linear attention in other layers: granitemoehybrid": ("sdpa", "granitemoehybrid", {}),
    "biases of positions: bloom": ("eager", "bloom", {}),
    "biases of positions: t5": ("sdpa", "mt5", {}),
}
"""Attention that trainer and engine take, family, and what its config is given."""
NOT_ON_A_CPU = {
    "biases of positions: t5",  # vLLM has no encoder-decoder models
    "caps on attention: t5gemma",
    "caps on attention: vaultgemma",  # vLLM's own model of it does not start
    "linear attention in other layers: bamba",  # these two were not tried
    "linear attention in other layers: granitemoehybrid",
    "chunks: llama4",  # its chunks are multiples of a block of 32
    "sinks: gpt_oss",  # no experts without quantization
    "sinks: granite_swa",  # these two were not tried
    "sinks: mimo_v2_flash",
}
"""What vLLM's CPU build does not start with, or was not tried with."""


TWO_HEADS = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 2)
"""For families whose heads are as wide as these are few: vLLM's CPU attention needs 32."""


def make_model(folder: Path, family: str, **changed: object) -> Path:
    """A tiny model of a family, with large random weights."""
    config = architectures.config_of(family)
    if family in ("bloom", "cohere", "granite", "llama", "phi3", "qwen2"):
        changed = {**TWO_HEADS, **changed}
    for part in configs_of(config):
        for name, value in changed.items():
            if hasattr(part, name):
                setattr(part, name, value)
    architectures.make_tiny(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def policy_of(store: Store, folder: Path) -> Version:
    ref = run_stage("policy", {"model": str(folder)}, store, into="tiny", in_process=True)
    return store.open(ref)


Sampled = list[tuple[torch.Tensor, np.ndarray, np.ndarray]]
"""Of each row its prompt, ids and logprobs."""


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


def sampled(policy: Version, **options: object) -> Sampled:
    """Rows that engine `transformers` samples."""
    return answers(TransformersEngine(setup_of(policy, **options)))


def answers(engine: Engine) -> Sampled:
    """Rows with prompts of several lengths, sampled in one batch."""
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 96, (length,), generator=draw) for length in (8, 15, 4)]
    requests = [Request(row, ids.int().numpy(), row) for row, ids in enumerate(prompts)]
    rows = [
        (prompts[row.index], row.completion_ids, row.logprobs)
        for row in engine.generate(iter(requests))
    ]
    assert len(rows) == len(prompts)
    return rows


def logprobs_of(model, prompt: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The logprobs of one row, by one plain pass."""
    prompts, completions = (Ragged.from_lengths(r, torch.tensor([len(r)])) for r in (prompt, ids))
    sequences = Sequences(prompts, completions, torch.ones(1))
    return own_logprobs(Policy(model, autocast=False), sequences, 0, len(ids))


def largest_gap(policy: Version, rows: Sampled) -> float:
    """The largest difference from the logprobs of one plain pass with eager attention over each
    row, in nats."""
    plain = load_model(policy, dtype=torch.float32)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        gaps = [
            logprobs_of(plain, prompt, torch.from_numpy(ids)).numpy() - logprobs
            for prompt, ids, logprobs in rows
        ]
    return max(float(np.abs(gap).max()) for gap in gaps)


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_sampled_is_what_eager_attention_computes(store, tmp_path, name):
    attention, family, changed = FEATURES[name]
    policy = policy_of(store, make_model(tmp_path / "model", family, **changed))
    model = load_model(policy, dtype=torch.float32)
    assert model.config._attn_implementation == attention
    set_mode(model, "single")
    assert model.config._attn_implementation == attention
    assert largest_gap(policy, sampled(policy)) < TOLERANCE


def test_caps_that_are_left_out_would_be_seen(store, tmp_path):
    policy = policy_of(store, make_model(tmp_path / "model", "gemma2", **CAPS))
    engine = TransformersEngine(setup_of(policy))
    engine.model.set_attn_implementation("sdpa")
    assert largest_gap(policy, answers(engine)) > 100 * TOLERANCE


def test_every_feature_is_in_the_document():
    text = (ROOT / "deployments" / "docs" / "engines.md").read_text()
    documented = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")}
    assert {name.partition(":")[0] for name in FEATURES} <= documented


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", sorted(FEATURES.keys() - NOT_ON_A_CPU))
def test_vllm_samples_the_same(name, tmp_path):
    command = [sys.executable, "-m", __name__, name, str(tmp_path)]
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


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_that_leaves_a_part_out_is_refused(store, tmp_path, family, name):
    policy = policy_of(store, make_model(tmp_path / "model", family))
    with pytest.raises(ConfigError, match="only the eager attention") as caught:
        sampled(policy, attn_implementation=name)
    assert caught.value.object == f"generate.options.attn_implementation '{name}'"
    assert caught.value.next == "leave generate.options.attn_implementation out"


def test_attention_may_be_chosen_where_every_one_computes_the_same(store, tmp_path):
    policy = policy_of(store, make_model(tmp_path / "model", "llama"))
    rows = [sampled(policy, attn_implementation=name) for name in ("eager", "sdpa")]
    for eager, fused in zip(*rows, strict=True):
        assert eager[1].tolist() == fused[1].tolist()
    with pytest.raises(ConfigError, match="not supported"):
        sampled(policy, attn_implementation="sdqa")


def test_reward_models_have_the_same_attention(tmp_path):
    folder = make_model(tmp_path / "model", "gemma2", **CAPS)
    model = load_pretrained(AutoModelForCausalLM, folder, "judge", dtype=torch.float32)
    assert model.config._attn_implementation == "eager"


def test_rows_whose_positions_change_on_the_way_are_told(store, tmp_path, caplog):
    rope = {"rope_parameters": {**ROPE, **LONGROPE}, "original_max_position_embeddings": 30}
    policy = policy_of(store, make_model(tmp_path / "model", "phi3", **rope))
    sampled(policy)
    (told,) = [message for message in caplog.messages if "longrope" in message]
    assert "rows may have 40 ids, and beyond 30" in told
    assert "generate.max_model_len = 30" in told


def test_a_model_that_transformers_cannot_read_id_by_id_is_refused(store, tmp_path):
    policy = policy_of(store, make_model(tmp_path / "model", "mamba"))
    with pytest.raises(ConfigError, match="cannot sample from a model of type mamba"):
        sampled(policy)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("bamba", {"attn_layer_indices": None}),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 4}),
    ],
)
def test_a_model_without_a_layer_of_attention_is_trained_but_not_sampled(
    store, tmp_path, family, changed
):
    policy = policy_of(store, make_model(tmp_path / "model", family, **changed))
    model = load_model(policy, dtype=torch.float32)
    assert model.config._attn_implementation == "sdpa"
    assert set(model.config.layer_types) == {"linear_attention"}
    prompt, ids = torch.arange(3, 20), torch.arange(20, 30)
    rows = [(prompt, ids.numpy(), logprobs_of(model, prompt, ids).detach().numpy())]
    assert largest_gap(policy, rows) < TOLERANCE
    with pytest.raises(ConfigError, match=f"type {family}: none of its layers keeps keys and"):
        sampled(policy)


@pytest.mark.parametrize("family", sorted(UNPADDED - {"minimax_m3_vl_text", "deepseek_v4"}))
def test_rows_are_not_padded_where_that_changes_them(store, tmp_path, family):
    policy = policy_of(store, make_model(tmp_path / "model", family))
    assert largest_gap(policy, sampled(policy)) < TOLERANCE


TRAINED = {name for name, (mode, _) in FAMILIES.items() if mode in MODES}
OTHERWISE = {"gemma3n_text": 1e-3, "nemotron_h": 5e-3, "zamba2": 5e-3}
"""Nats, of families whose own kernels differ by as much: a quantile, or a scan in chunks."""


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(architectures.TEXT_FAMILIES & TRAINED))
def test_every_family_is_sampled_right_or_refused(store, tmp_path, family):
    policy = policy_of(store, make_model(tmp_path / "model", family))
    try:
        rows = sampled(policy)
    except ConfigError as error:
        assert error.object == "engine transformers"
        assert family in NOT_SAMPLED or "keeps no keys and values" in error.message
    else:
        assert largest_gap(policy, rows) < OTHERWISE.get(family, TOLERANCE)


def print_gap_of_vllm(name: str, folder: Path) -> None:
    """What the test of vLLM reads, from a process of its own."""
    from quiver.stages.generate.engines.vllm import VllmEngine

    _, family, changed = FEATURES[name]
    policy = policy_of(Store(folder / "store"), make_model(folder / "model", family, **changed))
    engine = VllmEngine(setup_of(policy, cpu_kv_cache_gib=0.2, max_num_seqs=4))
    print(largest_gap(policy, answers(engine)))


if __name__ == "__main__":
    print_gap_of_vllm(sys.argv[1], Path(sys.argv[2]))
