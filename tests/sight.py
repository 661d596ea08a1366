"""Tiny vision-language models for tests, random weights in float32, and pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version

from .tiny import BOS, EOS, PAD, SPECIALS, made_once, tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BETWEEN_MARKS = TEMPLATE.replace("<image>", "<fake_token_around_image><image><end_of_utterance>")
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


PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
THREE_AXES = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 2, "fullatt_block_indexes": [1], "window_size": 32},
    "qwen3_5": {"depth": 2, "num_position_embeddings": 64},
    "qwen3_vl": {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
}
"""Families with positions of three axes, and what their part that sees needs beside `PATCHES`."""
GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""What Qwen3.5's text part needs beside `TEXT`."""


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


@made_once
def make_folder(folder: Path, kind: str = "idefics3", seed: int = 0) -> Path:
    """A tiny model directory: `kind` is idefics3 (4 features a picture, and three ids around them),
    llava (16 features), or one of `THREE_AXES` (a feature for 16 × 16 pixels)."""
    if kind in THREE_AXES:
        return make_folder_of_axes(folder, kind, seed)
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
    save_random(model_class, config, folder, seed)
    processor.save_pretrained(folder)
    return folder


def make_folder_of_axes(folder: Path, kind: str, seed: int) -> Path:
    """A tiny model directory of a family of `THREE_AXES`."""
    tokens = words()
    tokens.chat_template = BETWEEN_MARKS
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    if kind.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    text = {name: size for name, size in TEXT.items() if name != "model_type"}
    text |= {"head_dim": 32, "vocab_size": len(tokens), "rope_parameters": rope}
    if kind == "qwen3_5":
        rope["partial_rotary_factor"] = 1.0
        text |= {"layer_types": ["linear_attention", "full_attention"], **GATED_DELTA}
    ids = dict(
        zip(
            ("vision_start_token_id", "image_token_id", "vision_end_token_id"),
            tokens.convert_tokens_to_ids(MARKS[:3]),
            strict=True,
        )
    )
    eye = PATCHES | THREE_AXES[kind]
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=eye, video_token_id=len(tokens) - 1, **ids
    )
    save_random(AutoModelForImageTextToText.from_config, config, folder, seed)
    tokens.save_pretrained(folder)
    bounds = {"shortest_edge": 16 * 16, "longest_edge": 64 * 16 * 16}
    Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=bounds).save_pretrained(folder)
    return folder


def save_random(model_class: Any, config: PretrainedConfig, folder: Path, seed: int) -> None:
    """Save a model with large random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, bos_token_id=BOS)
    model.save_pretrained(folder)


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


def own_inputs(folder: Path, row: dict, contents: Sequence[bytes]) -> dict[str, Any]:
    """What transformers' own model takes for a row's prompt and completion, and its pictures."""
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    images = [decode(content) for content in contents]
    if not images:
        return {"input_ids": ids}
    token = words().convert_tokens_to_ids("<image>")
    if json.loads((folder / "config.json").read_text())["model_type"] in THREE_AXES:
        eyes = Qwen2VLImageProcessorPil.from_pretrained(folder)
        inputs = dict(eyes(images=images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == token).long()
        inputs["mm_token_type_ids"][:, len(row["prompt_ids"]) :] = 0
    else:
        processor = AutoProcessor.from_pretrained(folder)
        text = [processor.image_token * len(images)]
        inputs = dict(processor(text=text, images=[images], return_tensors="pt"))
        del inputs["attention_mask"]
    return {**inputs, "input_ids": ids}
