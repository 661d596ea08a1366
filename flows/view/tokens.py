"""Tokens as text, and their colours by logprob, ratio or advantage."""

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
"""Meaning of the colours, by the first word of a colouring."""
_RED, _GREEN, _BLUE = (190, 40, 40), (20, 125, 50), (35, 85, 200)
_SURFACE = (30, 30, 30)
_UNLIKELY = 5.0
"""Nats at which a token gets the strongest red."""
_LEAST_SHARE = 0.04
_MOST_BYTES = 4
"""Most bytes of a character in UTF-8, and so most tokens that it may take."""


def token_texts(store: Store, policy: str | None, ids: list[int]) -> list[str]:
    """Return the text of each token by the policy's own tokenizer, or its id without a
    tokenizer.json.

    A character of several tokens is the text of the last of them.
    """
    return reader_of(store, policy)(ids)


def reader_of(store: Store, policy: str | None) -> Callable[[list[int]], list[str]]:
    """Return a function like `token_texts` that can be used for many lists of ids."""
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
    """Return the text of each token; see `token_texts`."""
    texts = []
    first = 0  # First token of the character that is not complete yet.
    for index in range(len(ids)):
        # Decoded together with the token before, since many tokenizers drop the space of a first
        # token.
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
    """Return the possible colourings: `logprob`, `ratio prox`, `ratio ref`, `advantage`, `none`."""
    ratios = [f"ratio {role}" for role in joined.logprobs or ()]
    return ["logprob", *ratios, *([] if joined.advantages is None else ["advantage"]), "none"]


def values_of(tokens: Tokens, colouring: str) -> list[float] | None:
    """Return one number per token for a colouring; None if there is none."""
    kind, _, role = colouring.partition(" ")
    if kind == "logprob":
        return tokens.logprobs
    return tokens.ratios.get(role) if kind == "ratio" else tokens.advantages


def coloured(texts: list[str], values: list[float] | None, colouring: str) -> Text:
    """Return the completion with each token coloured.

    Control characters are escaped, and a line end gets a mark that can be coloured.
    """
    text = Text()
    for index, piece in enumerate(texts):
        style = style_of(colouring, values[index]) if values is not None else ""
        text.append(for_terminal(piece).replace("\n", "↵\n"), style)
    return text


def style_of(colouring: str, value: float) -> str:
    """Return the background style of a token; "" for a number close to neutral.

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
