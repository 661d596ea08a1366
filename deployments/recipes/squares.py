"""The whole task of squares.toml: its rows with their pictures, and the small base model.

A picture of 32 × 32 pixels is grey noise with two coloured squares, one in its upper half and one
in its lower half. The policy must name both colours and sides, from the top: `red left blue right`.

>>> [row["answer"] for row in rows("train", count=2)]
['blue right red right', 'yellow left blue left']
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
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
_TEMPLATE = (
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


def prepare(folder: Path, seed: int = 0, steps: int = 300, slips: float = 0.4) -> None:
    """Write the base model into `folder`: an Idefics3 of 0.1M parameters after `steps` of
    supervised warm-up, 64 pictures each.

    Args:
        slips: Probability that the teacher replaces a word by a random colour or side.

    On one machine the same arguments give the same weights.
    """
    import torch
    from transformers import (
        GenerationConfig,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    sees = Idefics3ImageProcessorPil(
        do_image_splitting=False,
        size={"longest_edge": SIZE},
        max_image_size={"longest_edge": SIZE},
    )
    processor = Idefics3Processor(sees, tokenizer, image_seq_len=16, chat_template=_TEMPLATE)
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    text = {"model_type": "llama", "hidden_size": 64, "max_position_embeddings": 128}
    text |= {"vocab_size": len(tokenizer), "num_key_value_heads": 2}
    vision = {"hidden_size": 32, "image_size": SIZE, "patch_size": 4}
    config = Idefics3Config(
        text_config={**text, **sizes, **ids},
        vision_config={**vision, **sizes, "intermediate_size": 64},
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=0,
    )
    model = Idefics3ForConditionalGeneration(config)
    _teach(model, processor, steps, slips, random.Random(seed))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _teach(model: Any, processor: Any, steps: int, slips: float, rng: random.Random) -> None:
    """Train on next tokens of the teacher's answers with AdamW; the question is no target."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    model.train()
    for step in range(1, steps + 1):
        pictures, answers = zip(*(draw(rng) for _ in range(64)), strict=True)
        texts = [_asked(processor, _with_slips(answer, slips, rng)) for answer in answers]
        batch = processor(text=texts, images=[[each] for each in pictures], return_tensors="pt")
        labels = batch.input_ids.clone()
        labels[:, :-6] = -100  # four words, the end, a line feed; the rest is the question
        labels[:, -1] = -100
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % 50 == 0:
            print(f"warm-up: step {step} of {steps}, loss {loss.item():.3f}")


def _with_slips(answer: str, slips: float, rng: random.Random) -> str:
    """Return the teacher's answer: each word is replaced at random with probability `slips`."""
    words = [
        rng.choice([*(COLOURS if word in COLOURS else SIDES)]) if rng.random() < slips else word
        for word in answer.split()
    ]
    return " ".join(words)


def _asked(processor: Any, answer: str) -> str:
    question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return processor.apply_chat_template(chat, tokenize=False)


def _tokenizer() -> Any:
    """Return a tokenizer with one token per word, and one for a line feed."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: id for id, name in enumerate([*_SPECIALS, *_WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="nothing"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.Split(Regex(" +"), behavior="removed"),
        ]
    )
    words.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=_SPECIALS[0],
        eos_token=_SPECIALS[2],
        unk_token="nothing",
        additional_special_tokens=[_SPECIALS[1], *_SPECIALS[3:]],
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
