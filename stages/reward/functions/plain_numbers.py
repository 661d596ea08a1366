r"""Read numbers in answers: 7, -3, 1,000, 1 000, 3.50, 1/2, \frac12, ½, 1½, $5, 50%, 1e-3,
1.5 × 10^3. They are read exactly, as fractions.

>>> [str(number.value) for number in find(r"so \dfrac{1}{2} of 1,000")]
['1/2', '1000']

Other expressions are not computed: π, roots, and products with a letter (2x) are found, but have no
value here; the function `math` reads them.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

_LONGEST = 1000  # characters; a longer text is no number, and exact arithmetic on it would be slow
_LARGEST_POWER = 999
_DEEPEST = 3  # \\text{…} within \\text{…}

# -- one spelling for what is written in several ways

_CHARACTERS = {
    **dict.fromkeys("−–－﹣\u2010\u2011\u2012", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f", " "),
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    "⁄": "/",
    "×": r"\times ",
    "·": r"\cdot ",
    "π": r"\pi ",
    "√": r"\sqrt ",
    "±": r"\pm ",
}
_TRANSLATED = str.maketrans(_CHARACTERS)
_VULGAR = re.compile("(?P<whole>[0-9] ?)?(?P<fraction>[¼-¾⅐-⅞])")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RAISED = re.compile("[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname|hbox|bf|rm)"
    r"\s*\{([^{}]*)\}"
)
_REWRITTEN = [
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\!|\\(?:left|right|displaystyle)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[,;: ]|~|\\(?:thinspace|quad|qquad)(?![a-zA-Z])"), " "),
    (re.compile(r"\\([$%#&€£])"), r"\1"),
    (re.compile(r"\^\s*+\{?\s*+\\circ\s*+\}?|\\degree(?![a-zA-Z])"), "°"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9])\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*([0-9])"), r"\\frac\1{\2}"),
]
_FUNCTION = r"ln|log|exp|(?:arc)?(?:sin|cos|tan)"
_KEYBOARD = [  # formulas as programs and plain text write them
    (re.compile(rf"\\(?:operatorname|mathrm)\s*\{{\s*({_FUNCTION})\s*\}}"), r"\\\1 "),
    # but not Markdown's **bold**, which has an operand on one side only
    (
        re.compile(
            r"(\\[a-zA-Z]+|(?<![a-zA-Z\\])(?:pi|[a-zA-Z])|[0-9)}\]])( ?)\*\*\2"
            r"(?=-?[0-9a-zA-Z({\\])"
        ),
        r"\1^",
    ),
    (re.compile(r"\^(-?[0-9]{2,}|-[0-9a-zA-Z])"), r"^{\1}"),
    (re.compile(r"(?<![\\a-zA-Z])sqrt ?\(((?:[^()]|\([^()]*\))*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\a-zA-Z])sqrt ?([0-9]+|[a-zA-Z](?![a-zA-Z]))"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi"),
    # a log of 7 days is no formula
    (
        re.compile(
            rf"(?<![\\a-zA-Z])({_FUNCTION})"
            r"(?=\s?[({^_\\]|[0-9]| (?:[0-9.]++|[a-zA-Z](?![a-zA-Z]))(?! ?[a-zA-Z]{2}))"
        ),
        r"\\\1",
    ),
]
# elsewhere - may begin an item of a list, or stand between words
_SIGN_APART = re.compile(
    r"([=≈][\s$*({]*|[$({])-"
    r"(?:\s+(?=[$€£¥₹]?\s?[0-9.\\])|\s*[({]\s*([0-9./]+)\s*[)}](?!\s*[0-9.^]))"
)
_FRACTION = re.compile(
    r"(?:(?P<whole>[0-9])\s?)?\\frac"
    r"\s*\{\s*(?P<above>-?[0-9.,]+)\s*\}\s*\{\s*(?P<below>-?[0-9.]+)\s*\}"
)
_BASE = re.compile(r"(-?(?<![0-9A-F.])[0-9A-F.]*[0-9][)}]?)\s*_\s*\{?\s*([0-9]+)\s*\}?")
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_NO_PLAIN_NUMBER = re.compile(
    rf"\\sqrt\s*(?:\[[^\]]*\])?\s*(?:{_BRACES}|[0-9]+|[a-zA-Z]?)"
    rf"|\\frac\s*{_BRACES}\s*{_BRACES}"
    r"|\\(?:pi|infty|log|ln|sin|cos|tan|exp)(?![a-zA-Z])|∞"
)
_MORE = re.compile(
    r"(?<![\w^{-])[.:]?[0-9]"
    r"|(?<!\w\w)(?<![A-Z-])-\s*[$*]*[\0({\[|]"
    r"|\+|(?<=[a-zA-Z)])\*|\\times|\\cdot|\\div|(?<=[a-zA-Z}]) - "
)
_EAST_ASIAN = re.compile(
    r"(?<=[\u3000-\u9fff\uac00-\ud7af\uff00-\uffef])(?=[-0-9$\\])"
    r"|(?<=[0-9$])(?=[\u3000-\u9fff\uac00-\ud7af\uff00-\uffef])"
)
"""Places between a number and a character of a script without spaces."""
_PLACE = "\0"
"""Placeholder of a number that was taken out."""
_UNIT = re.compile(r"(?! ?[a-zA-Z][\s.$*]*\Z)[a-zA-Z°'\"′″€£¥/^\d\s*_`.$()]*")
_AROUND = " \t\n*_`.$()"
_SYMBOL = "\\symbol"


def plain(text: str) -> str:
    r"""Return `text` with one spelling for each sign: unicode and LaTeX become keyboard characters.

    >>> plain(r"$\dfrac{3}{4}$ or 1½"), plain(r"\text{about } 1{,}000\,m²"), plain("−7")
    ('$3/4$ or 1 1/2', 'about  1,000 m^2', '-7')
    """
    text = _VULGAR.sub(_as_mixed, text)
    text = _RAISED.sub(lambda found: f"^{found[0].translate(_SUPERSCRIPTS)}", text)
    text = without_wrappers(_with_commands(text.translate(_TRANSLATED)))
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _SIGN_APART.sub(r"\1-\2", text)
    return _FRACTION.sub(_as_slash, text).removeprefix(" ")


def without_wrappers(text: str) -> str:
    r"""Return `text` without \text{…} and similar commands; their content stays.

    >>> without_wrappers(r"\text{(B)}"), without_wrappers(r"\mathbf{\text{yes}}")
    ('(B)', 'yes')
    """
    for _ in range(_DEEPEST):
        text = _WRAPPER.sub(r"\1", text)
    return text


def _as_mixed(found: re.Match[str]) -> str:
    fraction = unicodedata.normalize("NFKC", found["fraction"])
    return f"{found['whole'].strip()} {fraction}" if found["whole"] else fraction


def _as_slash(found: re.Match[str]) -> str:
    fraction = f"{found['above']}/{found['below']}"
    return f"{found['whole']} {fraction}" if found["whole"] else fraction


# -- numbers

_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ '_][0-9]{3})+(?![0-9])"
_GROUPED += r"|[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9.])"
_COMMA_DECIMAL = r"(?<![0-9],)(?<![(\[{])[0-9]+,(?:[0-9]{1,2}|[0-9]{4,})(?![0-9,])"
_COMMA_DECIMAL += r"|[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+(?![0-9,])"
_CURRENCY = r"(?:[$€£¥₹]\s?)?"
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.^\\])(?<![_^]\{{)(?<!\^-)(?<!\^\{{-)(?P<both>\\pm\s*+)?"
    rf"{_CURRENCY}(?P<sign>[-+])?{_CURRENCY}"
    rf"(?:(?P<mixed>[0-9]+) {{1,2}}(?=[0-9]+/[0-9]))?"
    rf"(?:(?P<comma>{_COMMA_DECIMAL})"
    rf"|(?P<whole>{_GROUPED}|[0-9]+)(?P<decimals>\.[0-9]+)?"
    r"|(?P<point>\.[0-9]+))"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?!\w))?"
    r"(?:\s?/\s?(?P<below>-?[0-9]+(?:\.[0-9]+)?)(?![0-9/]))?"
    r"(?:\s*+(?:\\times|\\cdot|\*|x)\s*+10\s*+\^\s*+\{?\s*+(?P<ten>[-+]?[0-9]{1,3})\s*+\}?)?"
    r"(?:\^\{?(?P<power>-?[0-9]{1,3})\}?)?"
    r"(?P<percent>\s?%|\s(?:percent|per cent)\b)?"
    r"(?P<factor>\s*+(?:\*|\\times|\\cdot)?\s*+\\symbol|[xyzni](?!\w)|_\{?[0-9]"
    r"|(?:\*|[ \t]\*[ \t])[a-zA-Z](?![ \t]?\w))?"
    r"|\\symbol(?:\s*+(?:[/*^]|\\times|\\cdot)?\s*+[0-9.]+)*(?P<symbol>)"
)
_LITERAL = re.compile(r"[-+−]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_GROUPED_BY_POINTS = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3})+")


class Number(NamedTuple):
    """A number as it was written."""

    value: Fraction | None
    """None if it is no plain number, such as 2π."""
    is_percent: bool = False
    grouped: Fraction | None = None
    """Value if its points are thousands separators, in case they may be: 1.000 is 1 or 1000."""
    has_comma: bool = False
    """True if a comma precedes its decimals: 3,14."""


def is_literal(text: str) -> bool:
    """True if `text` is one number and nothing else, as JSON or Python writes it.

    >>> is_literal(" -7.0 "), is_literal("1e3"), is_literal("$7"), is_literal("1,000")
    (True, True, False, False)
    """
    return _LITERAL.fullmatch(text.strip()) is not None


def find(text: str) -> list[Number]:
    """Return the numbers of `text`, in order; fractions with denominator 0 are left out."""
    text = _NO_PLAIN_NUMBER.sub(_symbol, plain(text))
    found = (_read(match) for match in _NUMBER.finditer(text))
    return [number for number in found if number is not None]


def only(text: str) -> Number | None:
    r"""Return the number of `text` if the text is only that, except for a unit.

    >>> str(only("**7.**").value), str(only("7 cm").value), only("x = 7"), only(r"2\pi")
    ('7', '7', None, None)
    """
    found = find(text)
    rest = _NUMBER.sub(_PLACE, _NO_PLAIN_NUMBER.sub(_symbol, plain(text)))
    before, _, unit = rest.partition(_PLACE)
    is_alone = len(found) == 1 and not before.strip(_AROUND) and _UNIT.fullmatch(unit)
    return found[0] if is_alone and found[0].value is not None else None


def readable(text: str) -> str:
    r"""Return `text` with what the LaTeX reader does not know (½, −, ×, pi, x**2, ln(2), sqrt2)
    written as LaTeX.

    >>> readable("1½ − x"), readable("7."), readable("pi*x**2")
    ('1\\frac{1}{2} - x', '7', '\\pi*x^2')
    """
    text = _VULGAR.sub(_as_frac, text).translate(_TRANSLATED).replace("°", r"^\circ")
    text = _SIGN_APART.sub(r"\1-\2", _with_commands(text))
    text = re.sub(r"(?<=[0-9])[eE]([-+]?[0-9]{1,3})(?!\w)", r" \\times 10^{\1}", text)
    text = _EAST_ASIAN.sub(" ", text)
    return text.strip().removesuffix(".")


def based(text: str, mark: str = "") -> str:
    r"""Return `text` with the base of each number as a factor: the LaTeX reader drops subscripts of
    numbers, so that it would take 12_5 for 12_7. `mark` is put around each such number.

    >>> based("4210_{5}, (11)_2"), based("it is 11_2", "$"), based("x_1")
    ('4210\\beta_{5}, (11)\\beta_{2}', 'it is $11\\beta_{2}$', 'x_1')
    """
    return _BASE.sub(rf"{mark}\1\\beta_{{\2}}{mark}", text)


def _with_commands(text: str) -> str:
    for pattern, replacement in _KEYBOARD:
        text = pattern.sub(replacement, text)
    return text


def _as_frac(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found["fraction"]).partition("⁄")
    return rf"{(found['whole'] or '').strip()}\frac{{{above}}}{{{below}}}"


def _symbol(_: re.Match[str]) -> str:
    return _SYMBOL


def leaves_more(text: str) -> bool:
    """True if, beside its numbers, `text` has something that changes their meaning: digits, as in
    1.2.3, arithmetic, as in x + 7, or a sign of its own, as in -|7|."""
    rest = _NUMBER.sub(_PLACE, _NO_PLAIN_NUMBER.sub(" ", plain(text)))
    return _MORE.search(rest) is not None


def _read(match: re.Match[str]) -> Number | None:
    if match["symbol"] is not None or match["factor"] or match["both"]:
        return Number(None)
    if len(match[0]) > _LONGEST:
        return None
    has_comma = match["comma"] is not None
    if has_comma:
        written = match["comma"].replace(".", "").replace(",", ".")
    else:
        written = re.sub(r"[,' _.]", "", match["whole"] or "0")
        written += match["decimals"] or match["point"] or ""
    value = Fraction(written + (match["exponent"] or ""))
    below = Fraction(match["below"] or 1)
    if below == 0:
        return None
    value = int(match["mixed"] or 0) + value / below
    value *= Fraction(10) ** int(match["ten"] or 0)
    if match["power"]:
        value = _raised(value, int(match["power"]))
    sign = -1 if match["sign"] == "-" else 1
    grouped = None
    if _GROUPED_BY_POINTS.fullmatch(written) and not match["below"]:
        grouped = sign * Fraction(written.replace(".", ""))
    return Number(
        None if value is None else sign * value, bool(match["percent"]), grouped, has_comma
    )


def _raised(value: Fraction, power: int) -> Fraction | None:
    too_large = len(str(value.numerator)) + len(str(value.denominator)) > 20
    if too_large or abs(power) > _LARGEST_POWER or (value == 0 and power < 0):
        return None
    return value**power


# -- whether two numbers are the same


def same(number: Number, right: Number, tolerance: Fraction = Fraction(0)) -> bool:
    """True if a completion's `number` equals the row's number `right`.

    If a spelling can be read in two ways, `right` decides: 1.000 is 1 or 1000, and 50% is 50 or
    1/2. Two percentages are compared directly.
    """
    if right.value is None or number.value is None:
        return False
    readings = [number.value]
    if number.grouped is not None:
        readings.append(number.grouped)
    rights = [right.value]
    if number.is_percent and not right.is_percent:
        readings += [reading / 100 for reading in readings]
    if right.is_percent and not number.is_percent:
        rights.append(right.value / 100)
    return any(
        abs(reading - expected) <= tolerance * max(1, abs(expected))
        for reading in readings
        for expected in rights
    )
