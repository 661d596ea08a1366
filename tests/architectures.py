"""Tries every family of language models that transformers has: how its rollouts may be packed.

A tiny model of the family, with large random weights and windows of a few tokens, gives logprobs
and gradients of five rollouts in each mode. They are compared with transformers' own model over one
row at a time (its own attention, float32).

    python -m tests.architectures gpt_oss bert     # tried now, and printed
    python -m tests.architectures --update         # all: writes stages/model/families.toml
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
)
from transformers import __version__ as VERSION
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from quiver.stages.model import families
from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.verify import own_logprobs
from quiver.stages.model.ragged import Ragged
from tests.shrink import VOCABULARY, shrink
from tests.stages.model.forward.test_policy import packed

TEXT_FAMILIES = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys()
)
FAMILIES = sorted(
    TEXT_FAMILIES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() | families.HEARING
)
LOGPROB_TOLERANCE = 1e-3
"""Nats. Eleven layers of large random weights round to 2e-4 in float32."""
GRADIENT_TOLERANCE = 1e-2
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
_THREE_AXES = {
    "text_config": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [16, 24, 24],
        }
    }
}
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
    "qwen2_5_vl": _THREE_AXES,
    "qwen2_vl": _THREE_AXES,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_FOUR_LAYERS, "layers_block_type": ["mamba", "hybrid"] * 2},
}
"""What a family's config needs besides its defaults: some of these make no model, or one that lacks
the layers that the family is known for."""


class Verdict(NamedTuple):
    """How the rollouts of a family may be packed: a row of the table."""

    mode: str
    """The fastest correct mode, or `refused`."""
    reason: str = ""


STATEFUL = "its state runs on from token to token, and would into the next rollout"
DIFFERENCES = {
    "shared": "rollouts that share their prompt's tokens have other {}",
    "packed": "rollouts behind each other in a row have other {}",
    "single": "output embedding times last hidden state gives other {} than the model",
}


def config_of(family: str) -> Any:
    return CONFIG_MAPPING[family](**CONFIGS.get(family, {}))


def try_family(family: str) -> dict[str, Verdict]:
    """Return the rows of the table about a family: of its defaults, and if windows change that, of
    its models with windows. None if no tiny model runs."""
    try:
        config = config_of(family)
        rows = {config.model_type: try_config(config)}
    except Exception as error:  # modeling code of all kinds
        print(f"{family}: not tried ({words(error)})", flush=True)
        return {}
    verdict = rows[config.model_type]
    with suppress(Exception):  # a family may refuse windows
        if verdict.mode in families.MODES[:2] and add_windows(config):
            rows[f"{config.model_type} with windows"] = try_config(config)
    return rows if len(set(rows.values())) == len(rows) else {config.model_type: verdict}


def add_windows(config: Any) -> bool:
    """Give layers a window, in a family whose defaults have none. False: it knows no windows."""
    text = config.get_text_config()
    if getattr(text, "sliding_window", 0) is not None and getattr(text, "use_sliding_window", True):
        return False
    text.sliding_window = 6
    text.use_sliding_window = True
    text.max_window_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = ["sliding_attention", *text.layer_types[1:]]
    return True


def try_config(config: Any) -> Verdict:
    """Return the verdict on a config. Raises what the model's code raises over one row of ids."""
    loader = loader_of(config)
    if type(config) not in loader._model_mapping:
        return Verdict("refused", "transformers has no text model of this type")
    with quiet():
        plain, fused = (Policy(make_tiny(config), autocast=False) for _ in "ab")
        plain.set_mode("single")
        fused.fuse()
        with plain.context():  # products of both round alike
            return compare(plain, fused)


def loader_of(config: Any) -> Any:
    """Return the class that makes a model of `config`, as `load_model` chooses it."""
    has_text = type(config) in AutoModelForCausalLM._model_mapping
    fields = config.to_dict()
    return families.loader_of(fields, [] if has_text else families.modalities_of(fields))


def make_tiny(config: Any) -> nn.Module:
    """Return a tiny model like `config`'s, in float32 and eval mode.

    Its weights are the same each time, and large enough that every part of it matters.
    """
    torch.manual_seed(0)
    model = loader_of(config).from_config(shrink(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = 0
    return model


def rollouts(vocabulary: int) -> tuple[Sequences, list[int]]:
    """Return five rollouts of three prompts, and the number of each rollout's prompt."""
    draw = torch.Generator().manual_seed(0)
    numbers = [0, 0, 1, 2, 1]
    prompts = [torch.randint(vocabulary, (length,), generator=draw) for length in (7, 19, 3)]
    lengths = torch.tensor([9, 23, 5, 17, 12])
    ids = torch.randint(vocabulary, (int(lengths.sum()),), generator=draw)
    rows = [prompts[number] for number in numbers]
    sequences = Sequences(
        Ragged.from_lengths(torch.cat(rows), torch.tensor([len(row) for row in rows])),
        Ragged.from_lengths(ids, lengths),
        torch.linspace(0.7, 1.3, len(lengths)),
    )
    return sequences, numbers


def compare(plain: Policy, fused: Policy) -> Verdict:
    """Return the fastest mode in which `fused` gives the numbers of `plain`'s own passes."""
    vocabulary = min(VOCABULARY, plain.model.get_input_embeddings().weight.shape[0])
    sequences, numbers = rollouts(vocabulary)
    counts = sequences.completions.lengths.tolist()
    # the longest prompt first: BigBird changes its attention permanently at a short one
    own = {row: own_logprobs(plain, sequences, row, counts[row]) for row in (2, 4, 0, 1, 3)}
    with torch.no_grad():
        for count in (1, 11):
            gap = (own_logprobs(plain, sequences, 1, count) - own[1][:count]).abs().max()
            if not gap <= LOGPROB_TOLERANCE:
                return Verdict("refused", "a token's logprob depends on later tokens")
    expected = torch.cat([own[row] for row in range(len(counts))])
    weights = torch.randn(len(expected), generator=torch.Generator().manual_seed(1))
    try:
        gradients = gradients_of(plain.model, weights, expected)
    except Exception:  # modeling code of all kinds
        return Verdict("refused", "it has no gradients")
    times = SENSITIVE.get(plain.model.config.model_type, 1)
    is_stateful = plain.is_causal and plain.model._is_stateful
    reason = ""
    for mode in families.MODES:
        try:
            logprobs = packed(fused, mode, sequences, numbers, 1 << 30)
            theirs = gradients_of(fused.model, weights, logprobs)
        except NotImplementedError as error:
            reason = words(error)
            continue
        except Exception as error:  # modeling code of all kinds
            reason = f"its code does not run so ({type(error).__name__})"
            continue
        if not (logprobs - expected).detach().abs().max() <= times * LOGPROB_TOLERANCE:
            reason = STATEFUL if is_stateful else DIFFERENCES[mode].format("logprobs")
        elif not gradient_gap(theirs, gradients) <= times * GRADIENT_TOLERANCE:
            reason = DIFFERENCES[mode].format("gradients")
        else:
            return Verdict(mode, reason)
    return Verdict("refused", reason)


def gradients_of(model: nn.Module, weights: Tensor, logprobs: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad(
        (weights * logprobs).sum(), parameters, allow_unused=True, materialize_grads=True
    )


def gradient_gap(gradients: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of a parameter's gradient, as a share of its norm."""
    total = torch.stack([gradient.norm() for gradient in expected]).norm()
    gaps = [
        (gradient - own).norm() / (own.norm() + 1e-3 * total)
        for gradient, own in zip(gradients, expected, strict=True)
    ]
    return float(torch.stack(gaps).max())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings about tiny models, and use one thread: more would wait for each other."""
    threads = torch.get_num_threads()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.disable(level)


def words(error: Exception) -> str:
    return textwrap.shorten(" ".join(str(error).split()), 100, placeholder=" …")


def table(verdicts: dict[str, tuple[str, str]]) -> str:
    """Return `families.toml`: model types by mode and reason."""
    modes = [*families.MODES, "refused"]
    groups: dict[tuple[str, str], list[str]] = {}
    for model_type, (mode, reason) in sorted(verdicts.items()):
        groups.setdefault((mode, reason), []).append(model_type)
    blocks = [f"# Made by `python -m tests.architectures --update`, with transformers {VERSION}."]
    for (mode, reason), types in sorted(
        groups.items(), key=lambda pair: (modes.index(pair[0][0]), -len(pair[1]))
    ):
        # a line may end between names, not within one
        names = ", ".join(json.dumps(name).replace(" ", "\0") for name in types)
        filled = textwrap.fill(names, 92, break_on_hyphens=False).replace("\0", " ")
        lines = textwrap.indent(filled + ",", "    ")
        blocks.append(
            f"[[group]]\nmode = {json.dumps(mode)}\nreason = {json.dumps(reason)}\n"
            f"types = [\n{lines}\n]"
        )
    return "\n\n".join(blocks) + "\n"


def main(arguments: list[str]) -> None:
    """Try families and print their verdicts; with `--update`, write them into the table."""
    names = [name for name in arguments if name != "--update"]
    verdicts: dict[str, tuple[str, str]] = {**families.FAMILIES} if names else {}
    for family in names or FAMILIES:
        rows = try_family(family)
        verdicts |= rows
        for name, verdict in rows.items():
            print(f"{name}: {verdict.mode} {verdict.reason}", flush=True)
    if "--update" in arguments:
        families.TABLE.write_text(table(verdicts))


if __name__ == "__main__":
    main(sys.argv[1:])
