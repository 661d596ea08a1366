r"""Answers found in text: the last number, the last \boxed{…}, the last <answer>…</answer>. None
when there is none.

>>> last_number("3 apples and 4 make 1,007."), boxed(r"so \boxed{\frac{1}{2}}.")
(Fraction(1007, 1), '\\frac{1}{2}')
>>> tagged("<answer> 7 </answer>")
'7'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_LONGEST = 1000  # characters; what is longer is no answer, and exact arithmetic on it would be slow
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-+−])?(?:[$€£]\s?)?"
    rf"(?P<whole>{_DIGITS})(?P<decimals>\.[0-9]+)?(?P<exponent>[eE][-+]?[0-9]{{1,3}}(?!\w))?"
    r"(?:/(?P<below>[0-9]+)(?![0-9/]))?"
)
_ANNOUNCED = re.compile(r"answer(?:\s+is|\s*:)[\s*:]*", re.IGNORECASE)
_ENDED = re.compile(r"\s*(?:$|[)\]}.:,;*$\\–-]|(?:because|since|as)\b)")
_AROUND = " \t\n*_`.()[]{}$\"'"
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


def last_number(text: str) -> Fraction | None:
    """The last number of `text`, exactly: 7, -3, +2, 3.50, 1,000, $5, 1e-3, 1/2.

    A comma groups digits only where three follow each; a sign counts where no letter or digit
    stands before it (so 5-3 ends in 3, not -3); a fraction with 0 below is left out; digits inside
    a word (x2) are no number.

    >>> [str(last_number(text)) for text in ("5-3", "2, not -3.50", "7 or 1,000", "so 1/2", "x2")]
    ['3', '-7/2', '1000', '1/2', 'None']
    """
    for match in reversed(list(_NUMBER.finditer(text))):
        denominator = int(match["below"] or 1) if len(match[0]) <= _LONGEST else 0
        if denominator:
            digits = match["whole"].replace(",", "")
            decimal = f"{digits}{match['decimals'] or ''}{match['exponent'] or ''}"
            sign = -1 if match["sign"] in ("-", "−") else 1
            return sign * Fraction(decimal) / denominator
    return None


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{…} of `text`, braces balanced.

    >>> boxed(r"first \boxed{1}, then \boxed{x^{2}}"), boxed(r"\boxed{never closed")
    ('x^{2}', None)
    """
    _, opening, tail = text.rpartition(r"\boxed{")
    depth = 1
    for position, character in enumerate(tail if opening else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return tail[:position].strip()
    return None


def tagged(text: str) -> str | None:
    """What stands in the last <answer>…</answer> of `text`, without white space around it. A tag
    that is only spoken of opens none.

    >>> tagged("<answer>6</answer> no, <answer> 7 </answer>"), tagged("7")
    ('7', None)
    """
    contents = _TAGGED.findall(text)
    return contents[-1].strip() if contents else None


def chosen(text: str, choices: str = "ABCD") -> str | None:
    r"""The letter of `choices` that `text` settles on, upper case: in the last \boxed{…}, else the
    last <answer>…</answer>, else after the last "answer is" or "answer:", else as the whole text.

    >>> chosen("I thought A, but the answer is **b**."), chosen("B) Paris"), chosen("A or B")
    ('B', 'B', None)
    """
    tails = _ANNOUNCED.split(text)[1:]
    announced = next(iter(tails[-1].splitlines()), None) if tails else None
    places = [boxed(text), tagged(text), announced, text]
    place = next(place for place in places if place is not None).strip(_AROUND)
    letter = place[:1].upper()
    is_choice = letter and letter in choices.upper() and _ENDED.match(place[1:])
    return letter if is_choice else None


def score_each(
    score: Callable[[str, Any], float], completions: Sequence[str], answer: Sequence[Any]
) -> list[float | None]:
    """`score` of each completion and its row's answer; None where that is null."""
    return [
        None if right is None else score(text, right)
        for text, right in zip(completions, answer, strict=True)
    ]
