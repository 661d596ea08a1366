"""The demo's task: which of two numbers is larger, each written in words or in digits? The answer
is exact, in digits.

Pairs of numbers are split by a fixed rule that no seed changes. A held-out pair never occurs in
training, in either order.

>>> row = next(rows("train", seed=0))
>>> row["question"], row["answer"]
('69 or 87?', 87)
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

_ONES = [
    *(
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
    ),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_HELD_OUT = 1000
_EXAMPLE = (
    {"role": "system", "content": "Reply with the larger number, in digits."},
    {"role": "user", "content": "12 or ten?"},
    {"role": "assistant", "content": "Answer: 12"},
)


def in_words(number: int) -> str:
    """Return 0 to 99 in English, such as `forty-two`."""
    if number < len(_ONES):
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


def rows(split: str, seed: int | str = 0) -> Iterator[dict[str, Any]]:
    """Yield the questions of one split, `train` or `held_out`, in an order and wording set by
    `seed`."""
    pairs = [(low, high) for low in range(10, 100) for high in range(low + 1, 100)]
    random.Random(0).shuffle(pairs)
    chosen = {"held_out": pairs[:_HELD_OUT], "train": pairs[_HELD_OUT:]}[split]
    order = random.Random(f"{split} {seed}")
    order.shuffle(chosen)
    for low, high in chosen:
        first, second = (
            order.choice((in_words(number), str(number))) for number in order.sample((low, high), 2)
        )
        question = f"{first} or {second}?"
        yield {
            "group_id": f"{split}-{low}-{high}",
            "messages": [*_EXAMPLE, {"role": "user", "content": question}],
            "question": question,
            "answer": high,
        }
