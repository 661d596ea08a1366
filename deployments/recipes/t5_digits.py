"""The whole task of t5_ppo.toml: its rows, its reward, and the small base T5. The task is to sort
digits: 52917 → 12579.

Multisets of digits are held out by a fixed rule that no seed changes. So no order of a held-out
row's digits occurs in training or warm-up. The T5 (0.9M parameters, one token per digit) learns
briefly from a teacher who sometimes swaps neighbours. PPO has to find the rest.

>>> next(rows("train", seed=1))
{'digits': '65785074', 'answer': '04556778'}
>>> in_place(["12579", "1257", "92571", ""], ["12579"] * 4)
[1.0, 0.8, 0.6, 0.0]
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

SHORTEST, LONGEST = 5, 8
_SPECIALS = ["<pad>", "</s>", "<unk>"]
_PAD, _END, _UNKNOWN = range(3)


def rows(split: str, seed: int = 0, count: int = 12_288) -> Iterator[dict[str, str]]:
    """Yield `count` different rows of one split, `train` or `held_out`: digits in an order set by
    `seed`, and the answer."""
    seen: set[str] = set()
    drawn = _draw(split, random.Random(f"{split} {seed}"))
    while len(seen) < count:
        digits = next(drawn)
        if digits not in seen:
            seen.add(digits)
            yield {"digits": digits, "answer": "".join(sorted(digits))}


def _draw(split: str, rng: random.Random) -> Iterator[str]:
    """Yield strings of digits without end; a fifth of all multisets is held out."""
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.randint(SHORTEST, LONGEST)))
        held_out = zlib.crc32("".join(sorted(digits)).encode()) % 5 == 0
        if held_out == {"held_out": True, "train": False}[split]:
            yield digits


def in_place(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return the share of digits in their right place: right digits / length of the longer of
    completion and answer."""
    return [
        sum(map(str.__eq__, got, want)) / max(len(got), len(want))
        for got, want in zip(completions, answer, strict=True)
    ]


def prepare(folder: Path, seed: int = 0, steps: int = 180, slips: float = 0.1) -> None:
    """Write the base model into `folder`: a T5 after `steps` of supervised warm-up, 64 rows each.

    Args:
        slips: Probability that the teacher swaps a digit with its neighbour.

    On one machine the same arguments give the same weights.
    """
    import torch
    from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    ids = {"pad_token_id": _PAD, "eos_token_id": _END, "decoder_start_token_id": _PAD}
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_heads": 4, "num_layers": 2}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), dropout_rate=0.0, **sizes, **ids)
    )
    _teach(model, tokenizer, steps, slips, random.Random(seed))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _teach(model, tokenizer, steps: int, slips: float, rng: random.Random) -> None:
    """Train by teacher forcing with AdamW. The learning rate rises over 20 steps, then falls to
    0."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / 20, 1 - done / steps)
    )
    lessons = _draw("train", rng)
    model.train()
    for step in range(1, steps + 1):
        asked = list(islice(lessons, 64))
        given = tokenizer(asked, padding=True, return_tensors="pt")
        answers = [_taught(digits, slips, rng) for digits in asked]
        shown = tokenizer(answers, padding=True, return_tensors="pt")
        # -100 is transformers' mark for "no target here"
        labels = shown.input_ids.masked_fill(shown.attention_mask == 0, -100)
        loss = model(**given, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"warm-up: step {step} of {steps}, loss {loss.item():.3f}")


def _taught(digits: str, slips: float, rng: random.Random) -> str:
    """Return the digits sorted by the teacher: from left to right each may be swapped with the
    next."""
    shown = sorted(digits)
    for at in range(len(shown) - 1):
        if rng.random() < slips:
            shown[at], shown[at + 1] = shown[at + 1], shown[at]
    return "".join(shown)


def _tokenizer():
    """Return a tokenizer with three special tokens and one per digit. A text ends with `</s>`, as
    for T5."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIALS, *"0123456789"]
    made = Tokenizer(
        models.WordLevel({name: id for id, name in enumerate(names)}, unk_token=_SPECIALS[_UNKNOWN])
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", _END)]
    )
    made.decoder = decoders.Fuse()
    special = dict(zip(("pad_token", "eos_token", "unk_token"), _SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
