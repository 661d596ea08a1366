r"""Find answers in text: in the last \boxed{…}, the last <answer>…</answer>, after the last ####,
or as the last number; None if there is none. Also read the reference answers of rows.

>>> number_of("3 apples and 4 make 1,007.").value, boxed(r"so \boxed{\frac{1}{2}}.")
(Fraction(1007, 1), '\\frac{1}{2}')
>>> tagged("<answer> 7 </answer>")
'7'
"""

from __future__ import annotations

import datetime
import itertools
import math
import re
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from . import plain_numbers
from .plain_numbers import Number

_ANNOUNCED = re.compile(r"answer(?:\s+is|\s*:)[\s*:]*", re.IGNORECASE)
_ENDED = re.compile(r"\s*(?:$|[)\]}.:,;*$\\–-]|(?:because|since|as)\b)")
_AND = r"[\s)\].*_]*+(?:[,;/&+]|and\b|or\b)[\s(\[*_]*+(?:(?:and|or)\b[\s(\[*_]*+)?"
_AROUND = " \t\n*_`.()[]{}$\"'"
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?P<word>[^\s{}$\\]+))|[{}]")
_BETWEEN_BOXES = re.compile(
    r"(?:\s|[,;$&]|\\[,;: ()\[\]]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|and\b|or\b)*"
)
# at the end only, since Markdown headings use #### too
_HASHES = re.compile(r"####[ \t]*+([^\n#]++)\s*+\Z")
_FENCE = re.compile(r"(?P<before>(?:(?!```).)*)(?P<fence>`{3,})[ \t]*(?P<mark>\w*)(?P<rest>[^`]*)")
_MARGIN = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]+[.)])[ \t]+)?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WHOLE = re.compile(r"([-+−]?[0-9]+)\.0+")
_TRUTHS = ("true", "false")


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} of `text`, with balanced braces. Boxes with only
    commas, space, "and" or "or" between them are one answer: their contents, joined by commas.

    >>> boxed(r"first \boxed{1}, then \boxed{x^{2}}"), boxed(r"\boxed{never closed")
    ('x^{2}', None)
    >>> boxed(r"\boxed{1}\boxed{2}"), boxed(r"\boxed{7} and \boxed{7}")
    ('1, 2', '7')
    """
    boxes: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for token in _BOX_TOKEN.finditer(text):
        if token["word"]:
            boxes.append((token.start(), token.end(), token["word"].rstrip(".,;:")))
        elif token[0] != "}":
            opened.append(token)
        elif opened and (opening := opened.pop())[0] != "{":
            # of nested boxes the inner one counts
            holds_a_box = boxes and boxes[-1][0] > opening.start()
            if not holds_a_box:
                content = text[opening.end() : token.start()].strip()
                boxes.append((opening.start(), token.end(), content))
    unclosed = [opening.start() for opening in opened if opening[0] != "{"]
    if not boxes or (unclosed and unclosed[-1] > boxes[-1][0]):
        return None
    contents = [boxes[-1][2]]
    for later, earlier in itertools.pairwise(reversed(boxes)):
        if not _BETWEEN_BOXES.fullmatch(text, earlier[1], later[0]):
            break
        contents.append(earlier[2])
    return ", ".join(dict.fromkeys(reversed(contents)))


def tagged(text: str) -> str | None:
    """Return the content of the last <answer>…</answer> of `text`, without surrounding white space.
    An opening tag that is only mentioned does not count.

    >>> tagged("<answer>6</answer> no, <answer> 7 </answer>"), tagged("7")
    ('7', None)
    """
    contents = _TAGGED.findall(text)
    return contents[-1].strip() if contents else None


def marked(text: str) -> str | None:
    r"""Return the marked answer of `text`: in the last \boxed{…}, else in the last
    <answer>…</answer>, else after the #### of the last line. If the last box never closes, the
    answer was cut and is empty.

    >>> marked(r"<answer>\boxed{7}</answer>"), marked("9 * 8 = 72\n#### 72"), marked("72")
    ('7', '72', None)
    """
    box = boxed(text)
    if box is None and r"\boxed{" in text:
        return ""
    hashes = _HASHES.search(text)
    places = [box, tagged(text), hashes[1].strip() if hashes else None]
    return next((place for place in places if place is not None), None)


def fenced(text: str) -> list[tuple[str, str]]:
    r"""Return the fenced blocks of `text` that are not empty, each as its mark, lower case, and its
    content.

    A block ends at the next fence that begins or ends a line; an open one reaches to the end. Its
    opening fence may be indented or follow the sign of a list item, or stand in a line of prose if
    it is marked or follows a colon. As much indentation as it has is removed from each line, but
    never more than the first one has.

    >>> fenced("so\n```Python\nx = 1\n```\nprints:\n ```\n 1")
    [('python', 'x = 1\n'), ('', '1')]
    """
    blocks: list[tuple[str, int, list[str]]] = []
    fence = ""  # of the block that is open
    for line in re.split(r"(?<=\n)", text):
        is_end = False
        if fence:
            before, found, after = line.partition(fence)
            is_end = bool(found) and not (before.strip() and after.strip("` \t\r\n"))
            fence = "" if is_end else fence
            if not is_end or before.strip():
                blocks[-1][2].append(before if is_end else line)
                continue
        opening = _FENCE.fullmatch(line)
        if not opening:
            continue
        margin = _MARGIN.fullmatch(opening["before"])
        is_alone = not opening["rest"].strip()
        follows_colon = opening["before"].rstrip(" \t*_").endswith(":")
        # a marked fence opens a block even if the one before was never closed
        is_marked = is_alone and opening["mark"]
        if is_marked or (not is_end and (margin or (is_alone and follows_colon))):
            fence = opening["fence"]
            blocks.append((opening["mark"].lower(), len(margin[0]) if margin else 0, []))
    contents = ((mark, most, "".join(lines)) for mark, most, lines in blocks)
    return [(mark, _outdented(text, most)) for mark, most, text in contents if text.strip()]


def _outdented(block: str, most: int) -> str:
    """Remove the first line's indentation, up to `most` characters, from each line."""
    first = re.search(r"^[ \t]*(?=\S)", block, re.MULTILINE)
    width = min(most, len(first[0])) if first else 0
    return re.sub(rf"^[ \t]{{0,{width}}}", "", block, flags=re.MULTILINE)


def number_of(text: str) -> Number | None:
    r"""Return the number that a completion gives as its answer: the last one of what is `marked`,
    else of the whole text. In a box, or in text without words, several numbers are no answer,
    unless = precedes the last.

    >>> str(number_of(r"\boxed{3 + 4 = 7}, in 2 steps").value), number_of(r"\boxed{1}\boxed{2}")
    ('7', None)
    >>> str(number_of("1, 2 or rather 3").value), number_of("1, 2, 3")
    ('3', None)
    """
    place = marked(text)
    answer = text if place is None else place
    if boxed(text) is not None or not has_words(answer):
        return _only_number(answer)
    found = plain_numbers.find(answer)
    return found[-1] if found else None


def has_words(text: str, variables: bool = False) -> bool:
    """True if `text` has letters outside LaTeX commands. With `variables`, Latin letters that stand
    alone, as in 2x + y, are no words.

    >>> has_words("x + 7"), has_words("x + 7", variables=True), has_words("so 7", variables=True)
    (True, False, True)
    """
    word = r"[^\W\d_]{2}|[^\W\d_a-zA-Z]" if variables else r"[^\W\d_]"
    return re.search(word, _COMMAND.sub("", text)) is not None


def _only_number(text: str) -> Number | None:
    """Return the only number of `text`, or of the part after its last =."""
    side = "=" + text.rpartition("=")[2]  # what follows = is no list: its - is a sign
    found = plain_numbers.find(side)
    return None if len(found) != 1 or plain_numbers.leaves_more(side) else found[0]


def chosen(text: str, choices: str = "ABCD") -> str | None:
    r"""Return the letter of `choices` that `text` settles on, upper case: in the last \boxed{…},
    else the last <answer>…</answer>, else after the last "answer is" or "answer:", else as the
    whole text.

    >>> chosen("I thought A, but the answer is **b**."), chosen("B) Paris"), chosen("A or B")
    ('B', 'B', None)
    """
    tails = _ANNOUNCED.split(text)[1:]
    announced = next(iter(tails[-1].splitlines()), None) if tails else None
    places = [boxed(text), tagged(text), announced, text]
    place = next(place for place in places if place is not None)
    return letter_in(plain_numbers.without_wrappers(place), choices)


def letter_in(text: str, choices: str) -> str | None:
    """Return the one letter of `choices` that `text` begins with, upper case.

    >>> letter_in("(b)", "ABCD"), letter_in("C. Paris", "ABCD"), letter_in("A, B", "ABCD")
    ('B', 'C', None)
    """
    text = text.strip(_AROUND)
    letter = text[:1].upper()
    if not letter or letter not in choices.upper() or not _ENDED.match(text[1:]):
        return None
    other = re.match(rf"{_AND}([{re.escape(choices)}])(?!\w|')", text[1:], re.IGNORECASE)
    # "A, B" are two choices, "A, a fruit" is one
    is_list = other is not None and other[1].isupper() == text[0].isupper()
    return None if is_list else letter


# -- reference answers


def as_text(right: Any) -> str:
    """Return a row's answer as text: true and false as in JSON, dates in ISO form.

    Raises ValueError if no text can equal it: lists, mappings, bytes, NaN.

    >>> as_text(7.0), as_text(True), as_text("7.0")
    ('7.0', 'true', '7.0')
    """
    if isinstance(right, str):
        return right
    if isinstance(right, bool):
        return "true" if right else "false"
    if isinstance(right, int | float | Decimal):
        if not math.isfinite(right):
            raise ValueError(f"the answer is {right}, which is not a number")
        return str(right)
    if isinstance(right, datetime.date | datetime.time):
        return right.isoformat()
    if isinstance(right, uuid.UUID):
        return str(right)
    raise ValueError(
        f"the answer is a {type(right).__name__}, expected text, a number, true or false: write it "
        "as one of them, or name a column that is, in columns of this function"
    )


def as_number(right: Any) -> Number:
    """Return a row's answer as a number: itself, or the one number of its text, which may follow
    #### or be in a box. Raises ValueError if it holds none, several, or none that is plain."""
    is_number = isinstance(right, int | float | Decimal) and not isinstance(right, bool)
    right = as_text(right)
    if is_number:
        return Number(Fraction(right))
    place = marked(right)
    number = _only_number(right if place is None else place)
    found = plain_numbers.find(right)
    if number is None and not found:
        raise ValueError(f"the answer {right!r} holds no number")
    if number is None or number.has_comma:
        raise ValueError(
            f"the answer {right!r} holds several numbers, or none that can be read in one way "
            "only: write one number, or mark it as in #### 7"
        )
    if number.value is None:
        raise ValueError(f"the answer {right!r} is not a plain number: use the function math")
    return number._replace(grouped=None)


def is_exactly(text: str, right: Any, fold: Callable[[str], str] = str) -> bool:
    """True if `text` states `right`. If the row holds a number, numbers are compared. As texts, 7.0
    equals 7 and True equals true."""
    expected = as_text(right)
    if isinstance(right, int | float | Decimal) and not isinstance(right, bool):
        found = plain_numbers.find(text) if plain_numbers.is_literal(text) else []
        return bool(found) and found[0].value == Fraction(expected)
    if isinstance(right, datetime.datetime) and text.strip() == str(right):
        return True
    return fold(_spelled(text)) == fold(_spelled(expected))


def _spelled(text: str) -> str:
    """Return `text` without surrounding white space; whole numbers, true and false in one
    spelling."""
    text = text.strip()
    if whole := _WHOLE.fullmatch(text):
        text = whole[1]
    return text.lower() if text.lower() in _TRUTHS else text


def score_each(
    score: Callable[[str, Any], float], completions: Sequence[str], answer: Sequence[Any]
) -> list[float | None]:
    """Return `score` of each completion and its row's answer; None if the answer is null."""
    return [
        None if right is None else score(text, right)
        for text, right in zip(completions, answer, strict=True)
    ]
