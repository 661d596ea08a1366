"""Tiny models that hear, random weights in float32, and clips."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    AutoProcessor,
    GlmAsrProcessor,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store

from . import sight
from .tiny import made_once

RATE = 16_000
TEMPLATE = sight.TEMPLATE.replace("'image'", "'audio'")
AUDIO = sight.words().convert_tokens_to_ids("<image>")
_EARS = {
    "glmasr": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "qwen2_audio": {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2},
}
_EARS["glmasr"] |= {"intermediate_size": 64}
_EARS["qwen2_audio"] |= {"encoder_ffn_dim": 32}
_LENGTH = {"glmasr": "max_position_embeddings", "qwen2_audio": "max_source_positions"}
_TEXT = {"glmasr": "llama", "qwen2_audio": "qwen2"}
"""vLLM knows no others under these types."""
FAMILIES = tuple(_EARS)
REFS = {"prompts": "hears/prompts@1", "policy": "hears/policy@0"}


@made_once
def make_folder(folder: Path, kind: str = "qwen2_audio", seconds: int = 2) -> Path:
    """A tiny model directory; it hears `seconds` of a clip."""
    tokens = sight.words()
    tokens.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        kind,
        text_config={**sight.TEXT, "model_type": _TEXT[kind], "vocab_size": len(tokens)},
        audio_config={**_EARS[kind], _LENGTH[kind]: 50 * seconds, "num_mel_bins": 16},
        audio_token_id=AUDIO,
        tie_word_embeddings=False,
    )
    sight.save_random(AutoModelForMultimodalLM.from_config, config, folder, seed=0)
    name_as_on_the_hub(folder / "model.safetensors")
    extractor = WhisperFeatureExtractor(
        feature_size=16, chunk_length=seconds, return_attention_mask=True
    )
    about: dict[str, Any] = {"audio_token": "<image>", "chat_template": TEMPLATE}
    if kind == "glmasr":
        processor = GlmAsrProcessor(extractor, tokens, max_audio_len=2 * seconds, **about)
    else:
        processor = Qwen2AudioProcessor(extractor, tokens, **about)
    processor.save_pretrained(folder)
    return folder


def name_as_on_the_hub(file: Path) -> None:
    """Rename the weights of a model that was made from a config: transformers 5.19 saves them under
    names that only it knows. It saves a model that it has loaded under the names it found."""
    weights = load_file(file)
    for name in [name for name in weights if name.startswith("language_model.model.model.")]:
        weights[name.replace("model.model.", "model.", 1)] = weights.pop(name)
    save_file(weights, file, metadata={"format": "pt"})


def noise(seed: int, seconds: float, rate: int = RATE) -> np.ndarray:
    count = round(seconds * rate)
    return (0.3 * np.random.default_rng(seed).standard_normal(count)).clip(-1, 1).astype("float32")


def tone(hertz: float, seconds: float) -> np.ndarray:
    moments = np.arange(round(seconds * RATE)) / RATE
    return (0.5 * np.sin(2 * np.pi * hertz * moments)).astype("float32")


def stored(samples: np.ndarray, kind: str = "WAV", rate: int = RATE, **options: Any) -> bytes:
    """A file of those samples."""
    content = io.BytesIO()
    soundfile.write(content, samples, rate, format=kind, **options)
    return content.getvalue()


CLIPS = (stored(noise(0, 0.4), "FLAC"), stored(noise(1, 0.7)))
"""What `0.flac` and `1.wav` hold."""
NAMES = ("0.flac", "1.wav")


def make_prompts(
    folder: Path, rows: Sequence[dict], kind: str = "qwen2_audio", seconds: int = 2
) -> Store:
    """A store with REFS: a policy that hears, and prompts of rows whose column `audio` names
    clips."""
    store = Store(folder / "store")
    model = str(make_folder(folder / "model", kind, seconds))
    run_stage("policy", {"model": model}, store, into="hears", in_process=True)
    for name, content in zip(NAMES, CLIPS, strict=True):
        (folder / name).write_bytes(content)
    config = {"source": sight.write_rows(folder, rows), "prompt": "prompt", "audio": "audio"}
    run_stage("prompt", config, store, policy=REFS["policy"], in_process=True)
    return store


def own_inputs(folder: Path, row: dict, contents: Sequence[bytes]) -> dict[str, Any]:
    """What transformers' own model takes for a row's prompt and completion, and its clips."""
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    if not contents:
        return {"input_ids": ids}
    processor = AutoProcessor.from_pretrained(folder)
    options = {"text": [processor.audio_token], "sampling_rate": RATE, "return_tensors": "pt"}
    clips = [soundfile.read(io.BytesIO(content), dtype="float32")[0] for content in contents]
    heard = [processor(audio=[clip], **options) for clip in clips]
    names = heard[0].keys() - {"attention_mask", "input_ids"}
    return {name: torch.cat([each[name] for each in heard]) for name in names} | {"input_ids": ids}
