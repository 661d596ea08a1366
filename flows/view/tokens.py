"""Tokens as text, and the colours that tell of their logprob, ratio or advantage."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.text import Text

from quiver.schemas.errors import LineageError, for_terminal
from quiver.stages.common.store import Store
from quiver.stages.report.joined import Joined, Tokens

LEGEND = {
    "logprob": "the redder, the less likely under the policy that sampled",
    "ratio": "blue: less likely under that model than when it was sampled; red: more likely",
    "advantage": "green: above the others, red: below",
    "none": "no colour",
}
"""What the colours mean, by the first word of a colouring."""
_RED, _GREEN, _BLUE = (190, 40, 40), (20, 125, 50), (35, 85, 200)
_SURFACE = (30, 30, 30)
_UNLIKELY = 5.0
"""Nats at which a token is as red as can be."""
_LEAST_SHARE = 0.04
_MOST_BYTES = 4
"""Of a character in UTF-8, and so the tokens that it may take."""


def token_texts(store: Store, policy: str | None, ids: list[int]) -> list[str]:
    """The text of each token by the policy's own tokenizer; its id where the policy, or its
    tokenizer.json, is gone. A character of several tokens is the text of the last of them."""
    return reader_of(store, policy)(ids)


def reader_of(store: Store, policy: str | None) -> Callable[[list[int]], list[str]]:
    """What gives the text of each token, as `token_texts` does, for many lists of ids."""
    path = None
    try:
        version = store.open(policy) if policy else None
        if version is not None and "tokenizer.json" in version.files.names:
            version.verify("tokenizer.json")
            path = version.files.path("tokenizer.json")
    except LineageError:
        pass
    if path is None:
        return lambda ids: [f"⟨{number}⟩" for number in ids]
    return partial(_texts, _tokenizer(path))


def _texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token, as `token_texts` says."""
    texts = []
    first = 0  # of the tokens that make the character which is not whole yet
    for index in range(len(ids)):
        # beside the token before, since many tokenizers drop the space of a first token
        start = max(first - 1, 0)
        before = tokenizer.decode(ids[start:first], skip_special_tokens=False)
        text = tokenizer.decode(ids[start : index + 1], skip_special_tokens=False)
        if text.startswith(before):
            text = text[len(before) :]
        else:
            text = tokenizer.decode(ids[first : index + 1], skip_special_tokens=False)
        is_whole = not text.endswith("\ufffd") or index - first == _MOST_BYTES - 1
        if is_whole or index == len(ids) - 1:
            texts.append(text)
            first = index + 1
        else:
            texts.append("")
    return texts


def colourings_of(joined: Joined) -> list[str]:
    """What tokens can be coloured by: `logprob`, `ratio prox`, `ratio ref`, `advantage`, `none`."""
    ratios = [f"ratio {role}" for role in joined.logprobs or ()]
    return ["logprob", *ratios, *([] if joined.advantages is None else ["advantage"]), "none"]


def values_of(tokens: Tokens, colouring: str) -> list[float] | None:
    """What a colouring shows, one number a token; None where there is no such number."""
    kind, _, role = colouring.partition(" ")
    if kind == "logprob":
        return tokens.logprobs
    return tokens.ratios.get(role) if kind == "ratio" else tokens.advantages


def coloured(texts: list[str], values: list[float] | None, colouring: str) -> Text:
    """The completion with each token on its colour; control characters are spelt out, and a line's
    end has a mark that can be coloured."""
    text = Text()
    for index, piece in enumerate(texts):
        style = style_of(colouring, values[index]) if values is not None else ""
        text.append(for_terminal(piece).replace("\n", "↵\n"), style)
    return text


def style_of(colouring: str, value: float) -> str:
    """The colour behind a token; none for a number that says little.

    >>> style_of("logprob", -5.0), style_of("logprob", 0.0)
    ('white on rgb(190,40,40)', '')
    """
    if colouring == "none" or not math.isfinite(value):
        return ""
    if colouring.startswith("ratio"):
        value = math.log(max(value, 1e-6))
        share, colour = abs(value), _RED if value > 0 else _BLUE
    elif colouring == "advantage":
        share, colour = abs(value) / 2, _GREEN if value > 0 else _RED
    else:
        share, colour = -value / _UNLIKELY, _RED
    if share < _LEAST_SHARE:
        return ""
    share = min(share, 1.0)
    red, green, blue = (
        round(base + share * (full - base)) for base, full in zip(_SURFACE, colour, strict=True)
    )
    return f"white on rgb({red},{green},{blue})"


@lru_cache(maxsize=4)
def _tokenizer(path: Path):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
