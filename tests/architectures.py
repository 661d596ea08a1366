"""Every family of text models that transformers has: a tiny one of each is imported and trained,
and the table of what came of it is a document.

    python -m tests.architectures gpt_oss bert     # rows of the table, tried now
    python -m tests.architectures --update         # all of them, or those named: the document, and
                                                   # families.TRAINED
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers import __version__ as VERSION
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils.logging import disable_progress_bar

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward.architecture import judge, make_tiny, own_logprobs
from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.forward.policy import Policy
from quiver.stages.common.forward.verify import choose_mode
from quiver.stages.common.models.checkpoints import PolicyConfig, is_encoder_decoder
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.models.shrink import shrink
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.store import Store, Version
from tests import tiny
from tests.stages.optimize import world
from tests.writing import run_here

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "deployments" / "docs" / "architectures.md"
NAMES = ROOT / "stages" / "common" / "models" / "families.py"
FAMILIES = tuple(
    dict.fromkeys(
        [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES]
    )
)
LOGPROB_TOLERANCE = 2e-4
"""Nats. Eleven layers of large random weights round to as much in float32."""
GRADIENT_TOLERANCE = 2e-3
"""Of a parameter's norm."""
SENSITIVE = {"gemma3n_text": 5}
"""Times the tolerances: it cuts activations at a quantile, so its own two attention kernels differ
by 3e-3 in float32, and by 6e-4 in float64."""
_QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [22, 22, 20]}
_FOUR_LAYERS = {"num_hidden_layers": 4}
CONFIGS = {
    "bamba": {**_FOUR_LAYERS, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        **_FOUR_LAYERS,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "granitemoehybrid": {
        **_FOUR_LAYERS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "lfm2": {**_FOUR_LAYERS, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {**_FOUR_LAYERS, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "minimax_m3_vl_text": {
        **_FOUR_LAYERS,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "ministral": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 32},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_FOUR_LAYERS, "layers_block_type": ["mamba", "hybrid"] * 2},
}
"""What a family's config needs besides its defaults: some of these make no model, or one that lacks
the layers that the family is known for."""


@dataclass(frozen=True)
class Row:
    """One family in the table."""

    family: str
    how: str
    """`packed`, `packed, each with its prompt`, `row by row`, `refused` or `not tried`."""
    why: str = ""
    gaps: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    """Of logprobs in nats, and of gradients as a share of their norm."""


HOW = {"shared": "packed", "packed": "packed, each with its prompt", "single": "row by row"}


def try_family(family: str) -> Row:
    """Import a tiny model of `family` and train it for one step; AssertionError where a logprob or
    a gradient is another than that of transformers' own model over single rows."""
    try:
        config = CONFIG_MAPPING[family](**CONFIGS.get(family, {}))
    except Exception as error:  # modeling code of all kinds
        return Row(family, "not tried", f"its config has no usable defaults: {_words(error)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        problem = _write(config, folder)
        store = Store(Path(temporary) / "store")
        try:
            ref = run_here("policy", PolicyConfig(model=str(folder)), store, into="tiny")
        except ConfigError as error:
            return Row(family, "refused", error.message.removeprefix("cannot be trained: "))
        verdict = judge(AutoConfig.from_pretrained(folder))
        if problem or not verdict.tried:
            reason = f"no tiny model of it runs ({problem})" if problem else verdict.reason
            return Row(family, "not tried", reason)
        return _train(family, store.open(ref), store)


def _write(config, folder: Path) -> str:
    """A tiny model's folder; what went wrong where there is none, and the folder has its config
    alone."""
    loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    problem = ""
    try:
        model = make_tiny(loader.from_config, config)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            model.config.decoder_start_token_id = 0
        model.save_pretrained(folder)
    except Exception as error:  # modeling code of all kinds
        problem = _words(error)
        shrink(config).save_pretrained(folder)
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    tiny.tokenizer().save_pretrained(folder)
    return problem


def _train(family: str, policy: Version, store: Store) -> Row:
    """One step of the stage, and its logprobs and gradients beside those of the plain model."""
    folder = policy.files.folder
    loader = AutoModelForSeq2SeqLM if is_encoder_decoder(policy) else AutoModelForCausalLM
    # the other kernels leave logit caps out
    plain = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    start = plain.config.decoder_start_token_id if is_encoder_decoder(policy) else None
    sequences, groups = _rollouts(plain.get_output_embeddings().weight.shape[0])
    own = [
        own_logprobs(plain, sequences.prompts[row], sequences.completions[row], 1.0, start)
        for row in range(len(groups))
    ]
    weights = torch.randn(sum(map(len, own)), generator=torch.Generator().manual_seed(1))
    (weights * torch.cat(own)).sum().backward()

    # as the trainer has it
    trained = Policy(load_model(policy, dtype=torch.float32), autocast=False)
    mode = choose_mode(trained, sequences, groups, "shared")
    trained.fuse()
    logprobs = torch.zeros(len(weights))
    for micro in trained.microbatches(range(len(groups)), groups, sequences, 100):
        layout = trained.layout(micro, sequences)
        places = sequences.completions.positions(layout.rows)
        logprobs = logprobs.index_copy(0, places, trained(layout)[0])
    (weights * logprobs).sum().backward()
    gaps = _gaps(torch.cat(own), logprobs, plain, trained.model)
    times = SENSITIVE.get(family, 1)
    assert gaps[0] <= times * LOGPROB_TOLERANCE, f"{family}: logprobs differ by {gaps[0]}"
    assert gaps[1] <= times * GRADIENT_TOLERANCE, f"{family}: gradients differ by {gaps[1]}"

    rows = [
        {
            "rollout_id": f"r-{row}",
            "group_id": f"g-{groups[row]}",
            "sample_index": row,
            "prompt_ids": sequences.prompts[row].tolist(),
            "completion_ids": sequences.completions[row].tolist(),
            "old_logprobs": own[row].clamp(max=0).tolist(),
            "finish_reason": "length",
            "stop_reason": None,
            "completion_text": "",
            "temperature": 1.0,
            "seed": 0,
        }
        for row in range(len(groups))
    ]
    rollouts = world.write_rollouts(store, policy, rows)
    rewards = world.write_rewards(store, rollouts, lambda row: float(row["sample_index"] % 2))
    updated = world.trained(store, policy, (rollouts, rewards))
    assert updated.manifest.metrics["packing"] == mode, family
    before, after = (load_model(version, dtype=torch.float32) for version in (policy, updated))
    assert any(
        not torch.equal(old, new)
        for old, new in zip(before.parameters(), after.parameters(), strict=True)
    ), f"{family}: nothing was learned"
    return Row(family, HOW[mode], judge(trained.model.config).reason, gaps)


def _rollouts(vocabulary: int) -> tuple[Sequences, list[int]]:
    """Six rollouts of two prompts and one of a third, of different lengths."""
    draw = torch.Generator().manual_seed(2)
    groups = [0, 0, 0, 1, 1, 1, 2]
    prompts = [torch.randint(3, vocabulary, (length,), generator=draw) for length in (8, 15, 4)]
    lengths = torch.tensor([3, 18, 9, 12, 1, 20, 6])
    ids = torch.randint(3, vocabulary, (int(lengths.sum()),), generator=draw)
    rows = [prompts[group] for group in groups]
    sequences = Sequences(
        Ragged.from_lengths(torch.cat(rows), torch.tensor([len(row) for row in rows])),
        Ragged.from_lengths(ids, lengths),
        torch.ones(len(groups)),
    )
    return sequences, groups


def _gaps(own, logprobs, plain, model) -> tuple[float, float]:
    """The largest differences, of logprobs and of gradients."""
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in plain.named_parameters()
    }
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    gaps = []
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gap = (gradient - gradients[name]).norm() / (gradients[name].norm() + 1e-3 * norm)
        gaps.append(float(gap))
    return float((own - logprobs).detach().abs().max()), max(gaps)


def _words(error: Exception) -> str:
    words = " ".join(str(error).replace("|", "/").split())
    return textwrap.shorten(f"{type(error).__name__}: {words}", 140, placeholder=" …")


def document(rows: list[Row]) -> str:
    """`deployments/docs/architectures.md`."""
    lines = [_HEAD, "| how | families |", "|---|---|"]
    for how in (*HOW.values(), "refused", "not tried"):
        lines.append(f"| {how} | {sum(row.how == how for row in rows)} |")
    lines += ["", "| family | how | why not packed, or not trained |", "|---|---|---|"]
    lines += [f"| {row.family} | {row.how} | {row.why.replace('|', '/')} |" for row in rows]
    return "\n".join(lines) + "\n"


def documented() -> dict[str, Row]:
    """The rows of the document, by family."""
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0] in FAMILIES:
            rows[cells[0]] = Row(*cells)
    return rows


def update(rows: list[Row]) -> None:
    """Write the document, and the families that need not be tried when one is imported."""
    DOCUMENT.write_text(document(rows))
    trained = {CONFIG_MAPPING[row.family].model_type for row in rows if row.how in HOW.values()}
    head, _, tail = NAMES.read_text().partition("_TRAINED = ")
    names = textwrap.fill(" ".join(sorted(trained)), 96, break_on_hyphens=False)
    tail = tail.split('"""', 2)[2]
    NAMES.write_text(f'{head}_TRAINED = """\n{textwrap.indent(names, "    ")}\n"""{tail}')


_HEAD = f"""# Architectures

Which families of language models train, and how. `python -m tests.architectures --update` writes this page, with
transformers {VERSION} on a CPU. It makes a tiny model of each family with random weights, imports it and trains it for one
step. It compares logprobs and gradients with transformers' own model, one row at a time (eager attention, float32).

* **packed**: rollouts follow one another in one row, with a group's prompt once.
* **packed, each with its prompt**: the same, with the prompt before each rollout.
* **row by row**: one rollout at a time through the model's own attention: correct, and slower.
* **refused**: E-CONFIG when the model is imported, before anything is sampled; `quiver check` reports it too.
* **not tried**: no tiny model could be made. A real one is imported with a warning, runs row by row, and is compared
  with its own forward pass before the first step.

A family stands for the defaults of its config. What a model's own config changes (a window, a rotary scaling,
`is_decoder`) is tried again before its first step. So a model may run row by row although its family is packed. Whether
an engine can sample from it is a separate question.
"""


def main(arguments: list[str]) -> None:
    """Try families and print their rows, or write them all down."""
    logging.disable(logging.CRITICAL)
    disable_progress_bar()
    os.environ["OMP_NUM_THREADS"] = "1"  # threads at tiny products only wait for each other
    torch.set_num_threads(1)
    rows = []
    for family in [name for name in arguments if name != "--update"] or FAMILIES:
        try:
            rows.append(try_family(family))
        except Exception as error:  # the others are tried still
            rows.append(Row(family, "BROKEN", _words(error)))
        gaps = "{:.1e} {:.1e}".format(*rows[-1].gaps)
        print(f"| {family} | {rows[-1].how} | {rows[-1].why} | {gaps}", flush=True)
    if "--update" in arguments:
        known = documented() if DOCUMENT.exists() else {}
        known.update((row.family, row) for row in rows)
        update([known[family] for family in FAMILIES if family in known])


if __name__ == "__main__":
    main(sys.argv[1:])
