"""The task of calculator.toml: sums that are too hard for a model of 135M parameters, and a
calculator as its tool.

Pairs of numbers are split by a fixed rule that no seed changes. A held-out pair never occurs in
training.

>>> calculate("347 * 12")
'4164'
>>> next(rows("train"))["question"]
'423 * 504 ='
"""

from __future__ import annotations

import ast
import json
import operator
import random
import zlib
from collections.abc import Iterator
from typing import Any

_OF_SYNTAX = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MOST_CHARACTERS = 40


def calculate(expression: str) -> str:
    """Work out a sum of whole numbers.

    Args:
        expression: Numbers with +, - and * between them.
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {_MOST_CHARACTERS} characters")
    return str(_worked_out(ast.parse(expression, mode="eval").body))


def _worked_out(node: ast.expr) -> int:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _OF_SYNTAX:
            return _OF_SYNTAX[type(op)](_worked_out(left), _worked_out(right))
        case ast.Constant(value) if type(value) is int:
            return value
    raise ValueError("only whole numbers, +, - and *")


def rows(split: str, seed: int | str = 0, count: int = 2048) -> Iterator[dict[str, Any]]:
    """Yield `count` questions of one split, `train` or `held_out`, in an order set by `seed`. Three
    examples of the calculator's use precede each."""
    rng = random.Random(f"{split} {seed}")
    asked: set[str] = set()
    while len(asked) < count:
        first, second = rng.randint(100, 999), rng.randint(100, 999)
        question = f"{first} {rng.choice('+-*')} {second} ="
        is_held_out = zlib.crc32(f"{first} {second}".encode()) % 5 == 0
        if is_held_out != (split == "held_out") or question in asked:
            continue
        asked.add(question)
        yield {
            "name": f"{split}-{len(asked):04d}",
            "question": question,
            "answer": int(calculate(question.removesuffix(" ="))),
            "messages": [*_EXAMPLES, {"role": "user", "content": question}],
        }


def _example(question: str) -> Iterator[dict[str, str]]:
    expression = question.removesuffix(" =")
    result = calculate(expression)
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    yield {"role": "user", "content": question}
    yield {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}
    yield {"role": "tool", "content": result}
    yield {"role": "assistant", "content": f"Answer: {result}"}


_EXAMPLES = (
    {"role": "system", "content": "Use the calculator, then give its result."},
    *_example("214 * 31 ="),
    *_example("905 - 487 ="),
    *_example("356 + 278 ="),
)
