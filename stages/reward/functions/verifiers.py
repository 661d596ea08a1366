r"""Reward functions that need a library: `math` uses math-verify, `json_schema` uses jsonschema.
Each imports its library when called.

They are called like the functions in `__init__.py`, and listed there. They fetch nothing, and run
no part of a completion.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from quiver.schemas.errors import ConfigError
from quiver.schemas.plain import finite_float, no_constant, no_key_twice

from . import plain_numbers
from .answers import as_text, boxed, fenced, has_words, is_exactly, marked, number_of, score_each

_INTEGER = re.compile(r"-?[0-9]{1,15}")
_BOXED_INTEGER = re.compile(r"\\boxed\{\s*(-?[0-9]{1,15})\s*\}")
_LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
_DATE = re.compile(
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*|[0-9]{1,2}[/.][0-9]{1,2}[/.][0-9]{2,4}", re.DOTALL
)
_LETTER = re.compile(r"\(([A-Za-z])\)")
_AROUND = " \t\n*_`$"


def math(completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    r"""Return 1 if the completion's mathematical answer equals the row's `answer`, else 0.

        reward_i = 1 if verify(parse(answer_i), parse(completion_i)) else 0

    parse and verify are math-verify's. The answer is read as LaTeX or plain text and compared
    symbolically and numerically (1/2 is 0.5, x + 1 is 1 + x; sets, intervals, matrices and
    equations are known). The completion's answer is in the last \boxed{…}, else in the last
    <answer>…</answer>, else after the last ####, else it is the whole text if that has no words.
    Among words it is the last formula in $…$, \(…\) or \[…\], or the last number; no other
    formulas are found there. Boxes side by side are one answer, so \boxed{1}\boxed{2} is 1, 2 and
    not 2. If both sides are a single number, they are compared as in `numeric`. Identical texts are
    always equal. If both sides name a base, bases are compared too: 12_5 is 12, but not 12_7.

    An answer without LaTeX marks is read as a formula, in which pi, ln, log (of base 10), exp, sin,
    cos, tan, sqrt and ** are known. A null answer gives None. An answer that cannot be read (a
    list, a date) is an error of the row; a completion that cannot be read is wrong, 0. Units are
    not compared. Formulas that take sympy for ever end by the row's time limit.

    Reference: https://github.com/huggingface/Math-Verify

    >>> math([r"so \boxed{\frac{1}{2}}", r"$x + 1$", "41"], ["0.5", "1 + x", 42])
    [1.0, 1.0, 0.0]
    """
    return score_each(_math, completions, answer)


def _math(text: str, right: Any) -> float:
    right = as_text(right).strip()
    # most answers are whole numbers; reading them as LaTeX takes a hundred times as long, with the
    # same result
    if _INTEGER.fullmatch(right) and text.count(r"\boxed") == 1:
        boxed_integer = _BOXED_INTEGER.search(text)
        if boxed_integer:
            return float(int(boxed_integer[1]) == int(right))
    if _DATE.fullmatch(right):
        raise ValueError(f"the answer {right!r} is a date, not a formula: use exact_match")
    place, marked_right = marked(text), marked(right)
    given = text.strip() if place is None else place
    expected = right if marked_right is None else marked_right
    if not _bare(expected):
        raise ValueError(f"the answer {right!r} holds no mathematics")
    if is_exactly(_bare(given), _bare(expected)):
        return 1.0
    number, expected_number = plain_numbers.only(given), plain_numbers.only(expected)
    if number and expected_number and not expected_number.has_comma:
        return float(plain_numbers.same(number, expected_number._replace(grouped=None)))
    from math_verify import verify

    # math-verify finds a box itself, but knows no other mark
    expected = plain_numbers.readable(expected if boxed(right) is None else right)
    given = plain_numbers.readable(given)
    has_latex = boxed(text) is not None or _LATEX.search(given) is not None
    last_number = number_of(given)
    is_product = (
        last_number is not None and last_number.value is None
    )  # 2*x is no sentence with a 2
    is_sentence = has_latex or has_words(given, variables=is_product or not expected_number)
    is_formula = boxed(text) is not None or not is_sentence
    mark = "" if is_formula or has_latex else "$"
    with_bases = plain_numbers.based(given, mark), plain_numbers.based(expected)
    if with_bases[0] != given and with_bases[1] != expected:
        given, expected = with_bases
    formulas = _right_answer(expected)
    found = _parse(f"\\boxed{{{given}}}" if is_formula else given)
    return float(verify(formulas, found, timeout_seconds=None))


def _bare(text: str) -> str:
    """Return text without signs that only surround an answer. A point before it is decimal."""
    bare = plain_numbers.without_wrappers(text).lstrip(_AROUND).rstrip(f"{_AROUND}.")
    letter = _LETTER.fullmatch(bare)
    return letter[1] if letter else bare


@functools.lru_cache(4096)  # all rollouts of a prompt have one answer
def _right_answer(right: str) -> list[Any]:
    formulas = _parse(right if _LATEX.search(right) else f"${right}$")
    if not formulas:
        raise ValueError(f"the answer {right!r} holds no mathematics")
    return formulas


def _parse(text: str) -> list[Any]:
    try:
        from math_verify import parse
    except ImportError:
        raise ConfigError(
            "reward function math",
            "math-verify is not installed",
            next="pip install 'quiver-rl[rewards]'",
        ) from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that time limits are off
    # its own limit needs a signal, which only the main thread gets; the row's limit is outside
    return parse(text, parsing_timeout=None)


def json_schema(
    completions: Sequence[str], schema: Sequence[Any] | dict[str, Any] | str, find: str = "auto"
) -> list[float | None]:
    """Return 1 if the completion is JSON that its schema allows, else 0.

        reward_i = 1 if json(completion_i) is valid under schema_i else 0

    JSON is read strictly: no NaN, no duplicate keys, no number that is too large for a float, and
    no integer that is too large for what its schema computes.

    Args:
        schema: A column of the rows (JSON text or a struct; null gives None), or one for all rows
            in `arguments`. `$schema` names its draft; default: 2020-12. An invalid schema is an
            error of the row. `$ref` reaches nothing outside the schema. In a column of structs a
            null is a key that the row lacks: a schema that says null, as {"const": null}, must be
            JSON text there.
        find: `text` (the whole completion), `fenced` (the last ``` block that is marked json or not
            marked; nothing found is 0) or `auto` (the last such block if there is one).

    Reference: https://json-schema.org/draft/2020-12

    >>> schema = {"properties": {"age": {"type": "integer"}}, "required": ["age"]}
    >>> json_schema(['{"age": 7}', '{"age": "7"}', "no"], schema)
    [1.0, 0.0, 0.0]
    """
    if find not in ("auto", "text", "fenced"):
        raise ValueError(f"find must be auto, text or fenced, got {find!r}")
    schema = json.dumps(schema) if isinstance(schema, dict) else schema
    schemas = [schema] * len(completions) if isinstance(schema, str) else schema
    return score_each(functools.partial(_json, find=find), completions, schemas)


def _json(text: str, schema: Any, find: str) -> float:
    schema = schema if isinstance(schema, str) else json.dumps(_without_nulls(schema))
    validator = _validator(schema)  # first, so that a bad schema is an error for every completion
    marks = ("", "json") if find != "text" else ()
    blocks = [block for mark, block in fenced(text) if mark in marks]
    if find == "fenced" and not blocks:
        return 0.0
    try:
        document = json.loads(
            blocks[-1] if blocks else text,
            object_pairs_hook=no_key_twice,
            parse_constant=no_constant,
            parse_float=finite_float,
        )
    except (ValueError, RecursionError):
        return 0.0
    try:
        return float(validator.is_valid(document))
    except (OverflowError, RecursionError):
        return 0.0


def _without_nulls(schema: Any) -> Any:
    """Remove the nulls that Arrow adds to a schema, since it gives every struct every key. Raise
    ValueError if `const` may be a null that was written: without it everything would be valid."""
    if isinstance(schema, dict):
        kept = {key: _without_nulls(rule) for key, rule in schema.items() if rule is not None}
        if "const" in schema and not kept:
            raise ValueError(
                "the schema is a struct with a const of null, which may also be a key that it "
                "lacks: write the schemas of this column as JSON text"
            )
        return kept
    return [_without_nulls(rule) for rule in schema] if isinstance(schema, list) else schema


@functools.lru_cache(1024)
def _validator(schema_text: str) -> Any:
    from jsonschema import validators
    from referencing import Registry

    try:
        schema = json.loads(schema_text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    kind = validators.validator_for(schema, validators.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())  # an empty registry: nothing is fetched
