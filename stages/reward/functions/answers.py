r"""Answers found in text: the last number, the last \boxed{…}, the last <answer>…</answer>. None
when there is none.

>>> last_number("3 apples and 4 make 1,007."), boxed(r"so \boxed{\frac{1}{2}}."), tagged("<answer> 7 </answer>")
(Fraction(1007, 1), '\\frac{1}{2}', '7')
"""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_LONGEST = 1000  # characters; what is longer is no answer, and exact arithmetic on it would be slow
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-+−])?(?:[$€£]\s?)?"
    rf"(?P<whole>{_DIGITS})(?P<decimals>\.[0-9]+)?(?P<exponent>[eE][-+]?[0-9]{{1,3}}(?!\w))?"
    r"(?:/(?P<below>[0-9]+)(?![0-9/]))?"
)
_SAID = re.compile(r"answer(?:\s+is|\s*:)[\s*:]*", re.IGNORECASE)
_ENDED = re.compile(r"\s*(?:$|[)\]}.:,;*$\\–-]|(?:because|since|as)\b)")
_AROUND = " \t\n*_`.()[]{}$\"'"
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


def numbers(text: str) -> list[Fraction]:
    """All numbers of `text` in order, exactly: 7, -3, +2, 3.50, 1,000, $5, 1e-3, 1/2.

    A comma groups digits only where three follow each; a sign counts where no letter or digit
    stands before it (so 5-3 holds 5 and 3, not -3); a fraction with 0 below is left out; digits
    inside a word (x2) are no number.

    >>> [str(n) for n in numbers("5-3 = 2, not -3.50 or 1,000 or 1/2")]
    ['5', '3', '2', '-7/2', '1000', '1/2']
    """
    return [value for match in _NUMBER.finditer(text) if (value := _value(match)) is not None]


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _LONGEST:
        return None
    whole, decimals, below = (
        match["whole"].replace(",", ""),
        match["decimals"] or "",
        match["below"],
    )
    if below is not None and int(below) == 0:
        return None
    size = Fraction(whole + decimals + (match["exponent"] or "")) / (int(below) if below else 1)
    return -size if match["sign"] in ("-", "−") else size


def last_number(text: str) -> Fraction | None:
    """The last number of `text`, as `numbers` reads them.

    >>> last_number("7 + 5 = 12."), last_number("none")
    (Fraction(12, 1), None)
    """
    return next(reversed(numbers(text)), None)


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{…} of `text`, braces balanced.

    >>> boxed(r"first \boxed{1}, then \boxed{x^{2}}"), boxed(r"\boxed{never closed")
    ('x^{2}', None)
    """
    start = text.rfind(r"\boxed{")
    depth = 0
    for at in range(start + len(r"\boxed"), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : at].strip()
    return None


def tagged(text: str) -> str | None:
    """What stands in the last <answer>…</answer> of `text`, without white space around it. A tag
    that is only spoken of opens none.

    >>> tagged("<answer>6</answer> no, <answer> 7 </answer>"), tagged("7")
    ('7', None)
    """
    return next((found.strip() for found in reversed(_TAGGED.findall(text))), None)


def chosen(text: str, choices: str = "ABCD") -> str | None:
    r"""The letter of `choices` that `text` settles on, upper case: in the last \boxed{…}, else the
    last <answer>…</answer>, else after the last "answer is" or "answer:", else as the whole text.

    >>> chosen("I thought A, but the answer is **b**."), chosen("B) Paris"), chosen("A or B")
    ('B', 'B', None)
    """
    said = list(_SAID.finditer(text))
    rest = text[said[-1].end() :].splitlines()[:1] if said else None
    places = [boxed(text), tagged(text), rest[0] if rest else None, text]
    place = next(found for found in places if found is not None)
    letter, tail = place.strip(_AROUND)[:1].upper(), place.strip(_AROUND)[1:]
    return letter if letter and letter in choices.upper() and _ENDED.match(tail) else None
