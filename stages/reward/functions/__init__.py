r"""Reward functions that come with Quiver, by name in FUNCTIONS. Each is a plain function that you
may copy as a start for your own.

A function gets lists with one item per rollout, by keyword: `prompts` (messages, or text),
`completions` (text), `completion_ids`, `finish_reason`, every user column by its name, and the
recipe's `arguments`. It returns one float per rollout. None means that it does not apply to the
rollout, which is not 0.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, did_you_mean, printable

from . import answers, verifiers
from .embedding import model_hash, similarity
from .plain_numbers import same, without_wrappers
from .programs import code

_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
_THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"


def exact_match(
    completions: Sequence[str],
    answer: Sequence[Any],
    extract: str = "text",
    ignore_case: bool = False,
) -> list[float | None]:
    r"""Return 1 if the completion gives the row's `answer`, else 0.

        reward_i = 1 if extract(completion_i) = answer_i else 0

    Both sides are compared as text without surrounding white space. 7 equals 7.0 and true equals
    True, in any type of the row's cell. A number in the row equals every plain spelling of it
    (0.5, .50, 5e-1), but not 1,000 or 1/2, which `numeric` reads.

    Args:
        answer: Null gives None. A list, a mapping, bytes or NaN is an error of the row.
        extract: `text` (the whole completion), `tag` (the last <answer>…</answer>) or `boxed` (the
            last \boxed{…}, without \text around its content). Nothing found is 0. Boxes side by
            side are one answer: \boxed{1}\boxed{2} gives "1, 2".

    >>> exact_match(["7 ", "<answer>7</answer>"], [7, 7])
    [1.0, 0.0]
    >>> exact_match(["so <answer>Yes</answer>"], ["yes"], "tag", True)
    [1.0]
    >>> exact_match(["7", "true"], [7.0, True])
    [1.0, 1.0]
    """
    extractors = {"text": str, "tag": answers.tagged, "boxed": answers.boxed}
    if extract not in extractors:
        raise ValueError(f"extract must be {', '.join(extractors)}, got {extract!r}")
    fold = str.casefold if ignore_case else str

    def score(text: str, right: Any) -> float:
        answers.as_text(right)  # first, so that a bad answer is an error for every completion
        extracted = extractors[extract](text)
        if extracted is None:
            return 0.0
        if extract == "boxed":
            extracted = without_wrappers(extracted)
            right = without_wrappers(right) if isinstance(right, str) else right
        return float(answers.is_exactly(extracted, right, fold))

    return answers.score_each(score, completions, answer)


def numeric(
    completions: Sequence[str], answer: Sequence[Any], tolerance: float = 0.0
) -> list[float | None]:
    r"""Return 1 if the completion's number is the row's `answer`, else 0.

        reward_i = 1 if |number(completion_i) − answer_i| ≤ tolerance · max(1, |answer_i|) else 0

    The number is the last one in the last \boxed{…}, else in the last <answer>…</answer>, else
    after the #### of the last line, else in the whole text. A box (or boxes side by side) with
    several numbers is no answer, and neither are several numbers without a word around them (1, 2),
    unless = precedes the last. A box that never closes is no answer either.

    A minus may stand apart in a box, in text without words, and after =, ( or $: there - 7 and -(7)
    are -7. Elsewhere - 7 may be an item of a list, and is 7.

    Numbers are read exactly: 1,000, 1 000 and 1{,}000 are 1000; 3.50 is 7/2; 1/2, \frac12 and ½ are
    a half, 1½ is 3/2; 1e3 and 1.5 × 10^3 are known; 3,14 is 3.14. Signs around a number ($, cm, °,
    x =) are not compared. If a spelling can be read in two ways, the answer decides: 1.000 is 1 or
    1000, 50% is 50 or 1/2. π and roots are no plain numbers: see `math`.

    Args:
        answer: A number, or text with one number. In longer text mark it, as GSM8K's "… #### 72"
            does. Null gives None. An answer without a number, or with several, is an error of the
            row, not a 0.

    >>> numeric(["7 + 5 = 12.", "about 0.5", "twelve", "1,000"], [12, "1/2", 12, None])
    [1.0, 1.0, 0.0, None]
    """
    bound = Fraction(tolerance)

    def score(text: str, right: Any) -> float:
        right_number = answers.as_number(right)
        number = answers.number_of(text)
        return float(number is not None and same(number, right_number, bound))

    return answers.score_each(score, completions, answer)


def choice(
    completions: Sequence[str], answer: Sequence[Any], choices: str = "ABCD"
) -> list[float | None]:
    r"""Return 1 if the completion chooses the row's `answer` among lettered choices, else 0.

        reward_i = 1 if chosen(completion_i) = letter(answer_i) else 0

    The chosen letter is the one in the last \boxed{…}, else in the last <answer>…</answer>, else
    after the last "answer is" or "answer:", else the letter that is the whole completion. Brackets,
    stars and a full stop around it are ignored, and so is text after a letter with a bracket, point
    or colon, as in "B) Paris". No letter is 0, and so are several (A and B).

    Args:
        answer: A letter of `choices`, written in the same ways, or its position, counted from 0.
            Null gives None, anything else is an error of the row.

    >>> choice(["The answer is (B).", r"\boxed{C}", "**a**", "A or B"], ["B", 2, "B", "A"])
    [1.0, 1.0, 0.0, 0.0]
    """

    def letter_of(right: Any) -> str:
        if isinstance(right, float) and right.is_integer():
            right = int(right)
        if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(choices):
            return choices[right].upper()
        letter = answers.letter_in(right, choices) if isinstance(right, str) else None
        if letter is not None:
            return letter
        raise ValueError(f"the answer {right!r} is neither a letter of {choices} nor a place in it")

    def score(text: str, right: Any) -> float:
        return float(answers.chosen(text, choices) == letter_of(right))

    return answers.score_each(score, completions, answer)


def format(
    completions: Sequence[str], pattern: str = "think_answer", match: str = "full", flags: str = "s"
) -> list[float | None]:
    r"""Return 1 if the completion has the form that `pattern` describes, else 0.

        reward_i = 1 if completion_i matches pattern else 0

    Args:
        pattern: A regular expression of Python's, or `think_answer`:
            <think>…</think><answer>…</answer> and nothing else, each tag once.
        match: `full` (the whole completion) or `search` (anywhere in it).
        flags: Letters of i, m, s, x.

    >>> format(["<think>3 + 4</think> <answer>7</answer>", "7"])
    [1.0, 0.0]
    >>> format(["so 7", "none"], pattern=r"\d", match="search")
    [1.0, 0.0]
    """
    if match not in ("full", "search") or not set(flags) <= set("imsx"):
        raise ValueError(
            f"match must be full or search, flags letters of imsx, got {match!r} and {flags!r}"
        )
    bits = sum((getattr(re, letter.upper()) for letter in set(flags)), re.RegexFlag(0))
    form = re.compile(_THINK_ANSWER if pattern == "think_answer" else pattern, bits)
    matches = form.fullmatch if match == "full" else form.search
    return [float(matches(text) is not None) for text in completions]


def environment(
    turns: Sequence[Sequence[dict[str, Any]]], end_reason: Sequence[str]
) -> list[float | None]:
    """Return the sum of the environment's rewards over a rollout's turns.

        reward_i = Σ_k r_ik over its turns k in which there was a reward

    None if no turn has a reward, or if the environment failed or hung: then the true reward is
    unknown. With this function the rewards also hold each turn's share (`turn_rewards`), for
    `optimize.credit`.

    >>> turns = [[{"reward": None}, {"reward": 0.5}, {"reward": 1.0}], [{"reward": None}]]
    >>> environment(turns, ["environment", "answered"])
    [1.5, None]
    >>> environment(turns, ["environment_error", "answered"])
    [None, None]
    """
    from quiver.stages.turns.statistics import FAILURES

    given = [[turn["reward"] for turn in row if turn["reward"] is not None] for row in turns]
    return [
        math.fsum(rewards) if rewards and reason not in FAILURES else None
        for rewards, reason in zip(given, end_reason, strict=True)
    ]


def length(
    completion_ids: Sequence[Sequence[int]], target: int, tolerance: int = 0
) -> list[float | None]:
    """Return 1 for completions of at most `target` tokens, falling linearly to 0 over the next
    `tolerance` tokens.

        reward_i = clip(1 − (T_i − target) / tolerance, 0, 1)

    T_i is the number of completion tokens, end token included. With tolerance 0 it is a step: 1 up
    to the target, 0 beyond. Give it a negative weight to want longer completions.

    >>> length([[5] * 10, [5] * 15, [5] * 40], target=10, tolerance=10)
    [1.0, 0.5, 0.0]
    """
    if target < 0 or tolerance < 0:
        raise ValueError(f"target and tolerance must be at least 0, got {target} and {tolerance}")
    over = [max(0, len(ids) - target) for ids in completion_ids]
    return [max(0.0, 1 - beyond / tolerance) if tolerance else float(not beyond) for beyond in over]


def overlong(
    completion_ids: Sequence[Sequence[int]], max_tokens: int, cache: int
) -> list[float | None]:
    """Return the soft penalty on completions of nearly `max_tokens` tokens, in [−1, 0]:
    `overlong_penalty` of each.

    As a function its part is weighted and clipped with the others. `[reward.overlong]` adds the
    same number after the clip.

    >>> overlong([[5] * 12, [5] * 14, [5] * 20, [5] * 25], max_tokens=20, cache=8)
    [0.0, -0.25, -1.0, -1.0]
    """
    if not 1 <= cache <= max_tokens:
        raise ValueError(f"cache must be from 1 to max_tokens = {max_tokens}, got {cache}")
    return [overlong_penalty(len(ids), max_tokens, cache) for ids in completion_ids]


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """Return the soft penalty of a completion of `length` tokens, end token included, in [−1, 0].

        penalty = −clip((length − (max_tokens − cache)) / cache, 0, 1)

    The policy learns gradually that it is running out of room, while cutting alone would be a
    sudden penalty; `cache` = 1 is that jump. `max_tokens` and `cache` are the paper's L_max and
    L_cache.

    Reference: DAPO, https://arxiv.org/abs/2503.14476, equation 13.

    >>> [overlong_penalty(length, max_tokens=20, cache=8) for length in (12, 14, 20, 25)]
    [0.0, -0.25, -1.0, -1.0]
    """
    return 0.0 - min(max((length - (max_tokens - cache)) / cache, 0.0), 1.0)


def repetition(completion_ids: Sequence[Sequence[int]], n: int = 4) -> list[float | None]:
    """Return minus the share of a completion's token n-grams that repeat an earlier one, in (−1,
    0].

        reward_i = −(1 − distinct n-grams of completion_i / n-grams of completion_i)

    0 if no n-gram repeats, and for completions of fewer than n + 1 tokens; near −1 for a completion
    that loops. The paper counts words; tokens treat code and languages without spaces alike.

    Reference: Demystifying Long Chain-of-Thought Reasoning in LLMs,
    https://arxiv.org/abs/2502.03373, appendix C.

    >>> repetition([[1, 2, 3, 4], [7, 8, 7, 8, 7, 8, 7], [9]], n=2)
    [0.0, -0.6666666666666667, 0.0]
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")

    def score(ids: Sequence[int]) -> float:
        grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    return [score(ids) for ids in completion_ids]


def lot(rollout_ids: Sequence[str]) -> list[float]:
    """Return a number between 0 and 1 for each rollout, which depends on its id alone: a reward
    for `quiver run --dry-run`."""
    return [random.Random(name).random() for name in rollout_ids]


class Shipped(NamedTuple):
    """A function with the version of its meaning. A higher version makes rewards anew."""

    function: Callable[..., list[float | None]]
    description: str
    arguments: dict[str, str]
    version: int = 1
    hash_files: Callable[[dict[str, Any], bool], str] = lambda *_: ""
    """Returns the hash of the files that the arguments name and that decide the numbers. Its second
    argument: true if a remembered hash is enough."""
    columns: tuple[str, ...] = ()
    """Optional columns, beyond the required ones."""
    reference: str = ""
    """Name of the parameter that a row's completions are compared with. A value that it cannot read
    is an error of the row. Empty if there is none."""
    is_quick: bool = True
    """True if a call runs no program and no model."""

    def fingerprint(self, arguments: dict[str, Any], *, remembered: bool = True) -> str:
        """Return its version and, if it reads files, their hash: together they decide the
        numbers."""
        hashed = self.hash_files(arguments, remembered)
        return f"quiver:{self.version}:{hashed}" if hashed else f"quiver:{self.version}"


FUNCTIONS: dict[str, Shipped] = {
    "environment": Shipped(
        environment,
        "sum of the environment's rewards over a rollout's turns",
        {},
    ),
    "exact_match": Shipped(
        exact_match,
        "1 if the completion says the column `answer`",
        {"extract": "text, tag or boxed", "ignore_case": "false"},
        version=3,
        reference="answer",
    ),
    "numeric": Shipped(
        numeric,
        "1 if the completion's number is the column `answer`",
        {"tolerance": "relative, 0 is exact"},
        version=5,
        reference="answer",
    ),
    "math": Shipped(
        verifiers.math,
        "1 if the completion's mathematical answer equals the column `answer`",
        {},
        version=5,
        reference="answer",
    ),
    "choice": Shipped(
        choice,
        "1 if the completion chooses the letter in the column `answer`",
        {"choices": "the letters, ABCD"},
        version=4,
        reference="answer",
    ),
    "format": Shipped(
        format,
        "1 if the completion has the form that a pattern describes",
        {
            "pattern": "a regular expression, or think_answer",
            "match": "full or search",
            "flags": "letters of i, m, s, x",
        },
        version=2,
    ),
    "length": Shipped(
        length,
        "1 up to a number of tokens, falling linearly to 0 beyond it",
        {"target": "tokens", "tolerance": "tokens from 1 to 0"},
    ),
    "overlong": Shipped(
        overlong,
        "0, falling to −1 over the last tokens before a length",
        {"max_tokens": "tokens from which it is −1", "cache": "tokens over which it falls"},
    ),
    "repetition": Shipped(
        repetition,
        "minus the share of n-grams of tokens that were there before",
        {"n": "tokens of an n-gram, 4"},
    ),
    "json_schema": Shipped(
        verifiers.json_schema,
        "1 if the completion is JSON that the column or argument `schema` allows",
        {"schema": "JSON text or a table", "find": "auto, text or fenced"},
        version=4,
        reference="schema",
    ),
    "similarity": Shipped(
        similarity,
        "cosine of the embeddings of the completion and of the column `answer`",
        {
            "model": "a directory, package: or hub id",
            "pooling": "mean or cls",
            "cut": "true: read long texts in part",
        },
        hash_files=model_hash,
        reference="answer",
        is_quick=False,
    ),
    "code": Shipped(
        code,
        "share of the column `tests` that the program in the completion passes, run in a sandbox",
        {
            "timeout_seconds": "of one test",
            "memory_mib": "of one program",
            "all": "true: 1 for all tests, else 0",
            "entry": "the function to call",
            "language": "python",
            "preamble": "text to run before each program",
            "isolation": "full, or process, which protects less",
            "sandbox_python": "an interpreter with packages",
            "sandbox_url": "a server that runs programs",
            "sandbox_token": "env:NAME",
        },
        version=3,
        columns=("entry", "language"),
        reference="tests",
        is_quick=False,
    ),
}


def shipped(use: str) -> Shipped:
    """Return the function of that name that comes with Quiver. Raises ConfigError."""
    if use not in FUNCTIONS:
        hint = did_you_mean(use, FUNCTIONS, f"; there are {', '.join(FUNCTIONS)}")
        raise ConfigError(
            f"reward function {printable(use)}",
            f"no function of that name comes with Quiver{hint}; your own is module:function or "
            "file.py:function",
            next="quiver rewards",
        )
    return FUNCTIONS[use]
