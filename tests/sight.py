"""Tiny vision-language models for tests, random weights in float32, and pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version

from .tiny import BOS, EOS, PAD, SPECIALS, tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
SIZE = 32
TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
EYE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 8,
}


def words() -> PreTrainedTokenizerFast:
    """The tokenizer of tests, with the marks of pictures as control tokens."""
    with_marks = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer().backend_tokenizer).from_str(
            tokenizer().backend_tokenizer.to_str()
        ),
        pad_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        additional_special_tokens=MARKS,
    )
    with_marks.chat_template = TEMPLATE
    return with_marks


def make_folder(folder: Path, kind: str = "idefics3", seed: int = 0) -> Path:
    """A tiny model directory: `kind` is idefics3 (4 features a picture, and three ids around them)
    or llava (16 features)."""
    tokens = words()
    text = {**TEXT, "vocab_size": len(tokens)}
    token = tokens.convert_tokens_to_ids("<image>")
    if kind == "idefics3":
        eyes = Idefics3ImageProcessorPil(
            do_image_splitting=False,
            size={"longest_edge": SIZE},
            max_image_size={"longest_edge": SIZE},
        )
        processor = Idefics3Processor(eyes, tokens, image_seq_len=4, chat_template=TEMPLATE)
        config = Idefics3Config(
            text_config=text,
            vision_config=EYE,
            image_token_id=token,
            scale_factor=2,
            pad_token_id=PAD,
        )
        model_class = Idefics3ForConditionalGeneration
    else:
        eyes = CLIPImageProcessorPil(
            size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
        )
        processor = LlavaProcessor(
            eyes,
            tokens,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=TEMPLATE,
        )
        config = LlavaConfig(
            text_config=text,
            vision_config={**EYE, "model_type": "clip_vision_model", "projection_dim": 32},
            image_token_index=token,
            vision_feature_layer=-1,
        )
        model_class = LlavaForConditionalGeneration
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, bos_token_id=BOS)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_policy(store: Store, folder: Path, run: str = "sees", kind: str = "idefics3") -> Version:
    """`run/policy@0` in `store`."""
    config = {"model": str(make_folder(folder, kind))}
    return store.open(run_stage("policy", config, store, into=run, in_process=True))


def png(seed: int, size: tuple[int, int] = (20, 40)) -> bytes:
    """A picture of noise, `size` high and wide."""
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    return stored(pixels)["bytes"]


def stored(pixels: np.ndarray) -> dict:
    """A picture of those `pixels` [H, W, 3] uint8, as prompts have it."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return {"bytes": content.getvalue(), "path": None}


def write_rows(folder: Path, rows: Sequence[dict], name: str = "rows.jsonl") -> str:
    """A source of those rows."""
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


PICTURES = (png(0, (20, 40)), png(1, (50, 30)))
"""What `0.png` and `1.png` hold."""
REFS = {"prompts": "sees/prompts@1", "policy": "sees/policy@0"}
GENERATE = {
    "engine": "transformers",
    "samples_per_prompt": 3,
    "dtype": "float32",
    "sampling": {"max_tokens": 12, "temperature": 0.9},
}


def make_prompts(
    folder: Path, rows: Sequence[dict], kind: str = "idefics3", images: str = "images"
) -> Store:
    """A store with REFS: a policy that sees, and prompts of rows whose column `images` names
    pictures."""
    store = Store(folder / "store")
    make_policy(store, folder / "model", kind=kind)
    for number, content in enumerate(PICTURES):
        (folder / f"{number}.png").write_bytes(content)
    config = {"source": write_rows(folder, rows), "prompt": "prompt", "images": images}
    run_stage("prompt", config, store, policy=REFS["policy"], in_process=True)
    return store


class Plain(dict):
    """A config of a stage that is none, for versions that a test writes."""

    def key(self):
        return dict(self)

    def model_dump(self, mode):
        return {"sampling": {"max_tokens": 12}}


def decode(content: bytes) -> Image.Image:
    """The picture in its bytes."""
    return Image.open(io.BytesIO(content)).convert("RGB")
