"""The whole task of squares.toml: its rows with their pictures, and the small base model.

A picture of 32 × 32 pixels is grey noise with two coloured squares, one in its upper half and one
in its lower half. The policy must name both colours and sides, from the top: `red left blue right`.

>>> [row["answer"] for row in rows("train", count=2)]
['blue right red right', 'yellow left blue left']
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SIZE = 32
SIDE = 12
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 230)}
COLOURS |= {"yellow": (230, 220, 50)}
SIDES = ("left", "right")
QUESTION = "What squares"
_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>"]
_SPECIALS += ["<end_of_utterance>", "<global-img>"]
_WORDS = ["user", "assistant", "\n", *QUESTION.split(), *COLOURS, *SIDES, "nothing"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rows(split: str, count: int = 512) -> Iterator[dict[str, Any]]:
    """Yield `count` questions of one split, `train` or `held_out`, each with its picture and
    answer."""
    rng = random.Random(split)
    for row in range(count):
        picture, answer = draw(rng)
        content = io.BytesIO()
        picture.save(content, "PNG")
        yield {
            "name": f"{split}-{row:04d}",
            "question": QUESTION,
            "picture": {"bytes": content.getvalue(), "path": None},
            "answer": answer,
        }


def draw(rng: random.Random) -> tuple[Any, str]:
    """Return a picture and its correct answer."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(rng.getrandbits(32)).integers(60, 140, (SIZE, SIZE, 3))
    words = []
    for top in (0, SIZE // 2):
        colour, side = rng.choice([*COLOURS]), rng.choice(SIDES)
        left = SIDES.index(side) * SIZE // 2
        row = top + rng.randint(0, SIZE // 2 - SIDE)
        column = left + rng.randint(0, SIZE // 2 - SIDE)
        pixels[row : row + SIDE, column : column + SIDE] = COLOURS[colour]
        words += [colour, side]
    return Image.fromarray(pixels.astype(np.uint8)), " ".join(words)


def right_words(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return the share of the four words that are right; 0 if there are more or fewer words."""
    shares = []
    for said, expected in zip(completions, answer, strict=True):
        words, right = said.split(), expected.split()
        is_right = [a == b for a, b in zip(words, right, strict=False)]
        shares.append(sum(is_right) / len(right) if len(words) == len(right) else 0.0)
    return shares


def prepare(
    folder: Path, seed: int = 0, steps: int = 300, slips: float = 0.4, family: str = "idefics3"
) -> None:
    """Write the base model into `folder`: one of 0.1M parameters after `steps` of supervised
    warm-up, 64 pictures each.

    Args:
        slips: Probability that the teacher replaces a word by a random colour or side.
        family: `idefics3`, or `qwen3_vl`, which gives pictures positions of three axes.

    On one machine the same arguments give the same weights.
    """
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    torch.manual_seed(seed)
    tokenizer = word_tokenizer([*_SPECIALS, *_WORDS], len(_SPECIALS), TEMPLATE)
    config, parts, read = FAMILIES[family](tokenizer)
    model = AutoModelForImageTextToText.from_config(config)
    kinds = ([*COLOURS], SIDES)
    teach(model, tokenizer, read, draw, QUESTION, kinds, steps, slips, random.Random(seed))
    model.generation_config = GenerationConfig(**IDS)
    model.save_pretrained(folder)
    for part in parts:
        part.save_pretrained(folder)


IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
TEXT = {"hidden_size": 64, "max_position_embeddings": 128, "num_key_value_heads": 2}
TEXT |= {**_SIZES, **IDS}
_FEATURES = (SIZE // 8) ** 2
"""Features of a picture, one for 8 × 8 pixels."""


def _idefics3(tokenizer: Any) -> tuple:
    """Return the config of an Idefics3, what prepares its inputs, and the function that does so for
    texts and their pictures."""
    from transformers import Idefics3Config, Idefics3ImageProcessorPil, Idefics3Processor

    sees = Idefics3ImageProcessorPil(
        do_image_splitting=False,
        size={"longest_edge": SIZE},
        max_image_size={"longest_edge": SIZE},
    )
    processor = Idefics3Processor(sees, tokenizer, image_seq_len=_FEATURES, chat_template=TEMPLATE)
    vision = {"hidden_size": 32, "image_size": SIZE, "patch_size": 4, "intermediate_size": 64}
    config = Idefics3Config(
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **TEXT},
        vision_config={**_SIZES, **vision},
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=0,
    )

    def read(texts: Sequence[str], pictures: Sequence[Any]) -> dict[str, Any]:
        return processor(text=texts, images=[[each] for each in pictures], return_tensors="pt")

    return config, [processor], read


def _qwen3_vl(tokenizer: Any) -> tuple:
    """Return the same for a Qwen3-VL. Its whole processor would need torchvision."""
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig

    edges = {"shortest_edge": SIZE**2, "longest_edge": SIZE**2}
    sees = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=edges)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    rope["mrope_interleaved"] = True
    marks = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "patch_size": 4, "temporal_patch_size": 2}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "head_dim": 32,
            "rope_parameters": rope,
            **TEXT,
        },
        vision_config={
            **vision,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": (SIZE // 4) ** 2,
        },
        **dict(zip(names, tokenizer.convert_tokens_to_ids([*marks]), strict=True)),
    )

    def read(texts: Sequence[str], pictures: Sequence[Any]) -> dict[str, Any]:
        whole = [text.replace("<image>", "<image>" * _FEATURES) for text in texts]
        inputs = {**tokenizer(whole, return_tensors="pt")}
        types = (inputs["input_ids"] == config.image_token_id).long()
        return {**inputs, "mm_token_type_ids": types, **sees([*pictures], return_tensors="pt")}

    return config, [sees, tokenizer], read


FAMILIES = {"idefics3": _idefics3, "qwen3_vl": _qwen3_vl}


def teach(
    model: Any,
    tokenizer: Any,
    read: Callable[..., dict[str, Any]],
    draw: Callable[[random.Random], tuple[Any, str]],
    question: str,
    kinds: Sequence[Sequence[str]],
    steps: int,
    slips: float,
    rng: random.Random,
    modality: str = "image",
) -> None:
    """Train on next tokens of a teacher's answers; the question is no target.

    Args:
        read: Returns the inputs of texts and of the media in them.
        draw: Returns a medium, and its correct answer of four words.
        kinds: Words that the teacher mixes up: each is replaced by one of its kind with
            probability `slips`.
    """

    def batch() -> dict[str, Any]:
        media, answers = zip(*(draw(rng) for _ in range(64)), strict=True)
        texts = []
        for answer in answers:
            words = [
                rng.choice(next(kind for kind in kinds if word in kind))
                if rng.random() < slips
                else word
                for word in answer.split()
            ]
            parts = [{"type": modality}, {"type": "text", "text": question}]
            chat = [{"role": "user", "content": parts}]
            chat.append({"role": "assistant", "content": " ".join(words)})
            texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
        inputs = read(texts, media)
        labels = inputs["input_ids"].clone()
        labels[:, :-6] = -100  # four words, the end, a line feed; the rest is the question
        labels[:, -1] = -100
        return {**inputs, "labels": labels}

    warm_up(model, batch, steps, learning_rate=2e-3, first_share=0.02)


def warm_up(
    model: Any,
    batch: Callable[[], dict[str, Any]],
    steps: int,
    learning_rate: float,
    first_share: float = 1.0,
) -> None:
    """Train on new batches with AdamW. The learning rate rises over 50 steps, from its
    `first_share`."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, first_share, total_iters=50)
    model.train()
    for step in range(1, steps + 1):
        loss = model(**batch()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % 50 == 0:
            print(f"warm-up: step {step} of {steps}, loss {loss.item():.3f}")


def word_tokenizer(vocabulary: Sequence[str], num_specials: int, template: str) -> Any:
    """Return a tokenizer with one token per word, of which the first are control tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {name: id for id, name in enumerate(vocabulary)}
    words = Tokenizer(models.WordLevel(ids, unk_token="nothing"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.Split(Regex(" +"), behavior="removed"),
        ]
    )
    words.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=vocabulary[0],
        eos_token=vocabulary[2],
        unk_token="nothing",
        additional_special_tokens=[vocabulary[1], *vocabulary[3:num_specials]],
    )
    tokenizer.chat_template = template
    return tokenizer
