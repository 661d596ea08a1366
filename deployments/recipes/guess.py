"""The whole task of guess.toml: its rows, its environment, its score, and the small base model.

The policy has four turns to find a number from 1 to 15. Each wrong guess is answered `higher` or
`lower`. Halving the remaining range finds every number. The model (0.1M parameters) learns from a
teacher who heeds the answers three times in four.

>>> game = Guess()
>>> game.reset(number=11)
>>> game.step("8")["text"], round(game.step("12")["reward"], 3), game.step("11")["done"]
('higher', 0.313, True)
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .squares import IDS, TEMPLATE, TEXT, warm_up, word_tokenizer

HIGHEST = 15
TURNS = 4
QUESTION = "Guess my number"
_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_WORDS = ["user", "assistant", "\n", "Guess", "my", "number", "higher", "lower", "right", "nothing"]


def rows(split: str, count: int = 512) -> Iterator[dict[str, Any]]:
    """Yield `count` games of one split, `train` or `held_out`, each with its number. Both splits
    draw from the same fifteen numbers."""
    rng = random.Random(split)
    for row in range(count):
        name = f"{split}-{row:04d}"
        yield {"name": name, "question": QUESTION, "number": rng.randint(1, HIGHEST)}


class Guess:
    """One game. The reward of a guess is the share of the number's bits that it reveals. So a
    game's rewards add up to 1 if the number was found."""

    def reset(self, number: int) -> None:
        """Begin a game with that number."""
        self.number = number
        self.low, self.high = 1, HIGHEST

    def step(self, turn: Any) -> dict[str, Any]:
        """Answer a guess."""
        text = getattr(turn, "text", turn).strip()
        guess = int(text) if text.isdecimal() else 0
        bits_before = math.log2(self.high - self.low + 1)
        if guess == self.number:
            return {"text": "right", "reward": bits_before / math.log2(HIGHEST), "done": True}
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        bits = bits_before - math.log2(self.high - self.low + 1)
        hint = "higher" if guess < self.number else "lower"
        return {"text": hint, "reward": bits / math.log2(HIGHEST)}


def found(end_reason: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for each game that ended because the number was found, else 0."""
    return [float(reason == "environment") for reason in end_reason]


def prepare(folder: Path, seed: int = 0, steps: int = 800, heeds: float = 0.75) -> None:
    """Write the base model into `folder`: a Llama after `steps` of supervised warm-up, 64 games
    each.

    Args:
        heeds: Probability that the teacher guesses within the range that the answers left.

    On one machine the same arguments give the same weights.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **TEXT))
    rng = random.Random(seed)

    def batch() -> dict[str, Any]:
        games = [_game(rng, heeds) for _ in range(64)]
        texts = [tokenizer.apply_chat_template(game, tokenize=False) for game in games]
        inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return {**inputs, "labels": _said_by_teacher(inputs.input_ids, tokenizer)}

    warm_up(model, batch, steps, learning_rate=3e-3)
    model.generation_config = GenerationConfig(**IDS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _said_by_teacher(ids: Any, tokenizer: Any) -> Any:
    """Return labels [B, T]: the token after `assistant` and a line feed, and the end token after
    it."""
    import torch

    assistant, line_feed = tokenizer.convert_tokens_to_ids(["assistant", "\n"])
    is_start = torch.zeros_like(ids, dtype=torch.bool)
    is_start[:, 2:] = (ids[:, :-2] == assistant) & (ids[:, 1:-1] == line_feed)
    is_end = torch.zeros_like(is_start)
    is_end[:, 1:] = is_start[:, :-1]
    return ids.masked_fill(~(is_start | is_end), -100)  # transformers' mark for "no target here"


def _game(rng: random.Random, heeds: float) -> list[dict[str, str]]:
    """Return one game of the teacher as a chat."""
    game = Guess()
    game.reset(rng.randint(1, HIGHEST))
    chat = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        low, high = (game.low, game.high) if rng.random() < heeds else (1, HIGHEST)
        guess = str(rng.randint(low, high))
        chat.append({"role": "assistant", "content": guess})
        step = game.step(guess)
        if step.get("done"):
            break
        chat.append({"role": "user", "content": step["text"]})
    return chat


def _tokenizer() -> Any:
    """Return a tokenizer with one token per word or number, and one for a line feed."""
    from tokenizers import decoders

    names = [*_SPECIALS, *_WORDS, *map(str, range(1, HIGHEST + 1))]
    tokenizer = word_tokenizer(names, len(_SPECIALS), TEMPLATE)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # two digits are one number
    return tokenizer
