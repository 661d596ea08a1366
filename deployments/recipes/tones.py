"""The whole task of tones.toml: its rows with their clips, and the small base model.

A clip of 0.8 seconds has four tones in noise, one after the other. The policy must name the pitch
of each: `low high middle low`.

>>> [row["answer"] for row in rows("train", count=2)]
['low high high high', 'top top top middle']
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .squares import IDS, TEMPLATE, TEXT, right_words, teach, word_tokenizer

__all__ = ["prepare", "right_words", "rows"]
RATE = 16_000
PITCHES = {"low": 300, "middle": 500, "high": 800, "top": 1300}
"""Hertz."""
LENGTH = RATE // 5
"""Samples of a tone."""
QUESTION = "What tones"
_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<audio>"]
_WORDS = ["user", "assistant", "\n", *QUESTION.split(), *PITCHES, "nothing"]


def rows(split: str, count: int = 512) -> Iterator[dict[str, Any]]:
    """Yield `count` questions of one split, `train` or `held_out`, each with clip and answer."""
    import soundfile

    rng = random.Random(split)
    for row in range(count):
        samples, answer = draw(rng)
        content = io.BytesIO()
        soundfile.write(content, samples, RATE, format="FLAC")
        yield {
            "name": f"{split}-{row:04d}",
            "question": QUESTION,
            "clip": {"bytes": content.getvalue(), "path": None},
            "answer": answer,
        }


def draw(rng: random.Random) -> tuple[Any, str]:
    """Return the samples of a clip and its correct answer."""
    import numpy as np

    words = rng.choices([*PITCHES], k=4)
    random_numbers = np.random.default_rng(rng.getrandbits(32))
    moments = np.arange(LENGTH) / RATE
    samples = random_numbers.normal(0, 0.05, (len(words), LENGTH))
    for tone, word in zip(samples, words, strict=True):
        hertz = PITCHES[word] * random_numbers.uniform(0.9, 1.1)
        loudness = random_numbers.uniform(0.05, 0.3)
        tone[:] += loudness * np.sin(2 * np.pi * hertz * moments)
    return samples.ravel().astype(np.float32), " ".join(words)


def prepare(folder: Path, seed: int = 0, steps: int = 200, slips: float = 0.4) -> None:
    """Write the base model into `folder`: a Qwen2-Audio of 0.1M parameters after `steps` of
    supervised warm-up, 64 clips each.

    Args:
        slips: Probability that the teacher replaces a word by a random pitch.

    On one machine the same arguments give the same weights.
    """
    import torch
    from transformers import (
        AutoModelForMultimodalLM,
        GenerationConfig,
        Qwen2AudioConfig,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    torch.manual_seed(seed)
    template = TEMPLATE.replace("'image'", "'audio'").replace("<image>", "<audio>")
    tokenizer = word_tokenizer([*_SPECIALS, *_WORDS], len(_SPECIALS), template)
    hears = WhisperFeatureExtractor(feature_size=32, chunk_length=1, return_attention_mask=True)
    about = {"audio_token": "<audio>", "chat_template": template}
    processor = Qwen2AudioProcessor(hears, tokenizer, **about)
    ears = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
    ears |= {"encoder_ffn_dim": 64, "num_mel_bins": 32, "max_source_positions": 50}
    ears["initializer_range"] = 0.15  # with less it hears nothing for hundreds of steps
    config = Qwen2AudioConfig(
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **TEXT},
        audio_config=ears,
        audio_token_id=processor.audio_token_id,
    )

    def read(texts: Sequence[str], clips: Sequence[Any]) -> dict[str, Any]:
        return processor(text=texts, audio=[*clips], sampling_rate=RATE, return_tensors="pt")

    model = AutoModelForMultimodalLM.from_config(config)
    rng = random.Random(seed)
    kinds = ([*PITCHES],)
    teach(model, tokenizer, read, draw, QUESTION, kinds, steps, slips, rng, modality="audio")
    model.generation_config = GenerationConfig(**IDS)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
