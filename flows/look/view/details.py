"""All details of one rollout as coloured text: tokens by logprob, ratio or advantage, and pictures.

A rollout of one turn is one section. An episode has the prompt first, then each turn, then its end.

    for section in sections_of(joined, joined.rows([0])[0], "logprob", width=100):
        print(section.turn, section.text)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.style import Style
from rich.text import Text

from quiver.flows.look.describe import piece_lines
from quiver.flows.look.episodes import pieces_of
from quiver.flows.look.joined import Joined, Tokens
from quiver.flows.look.words import counted
from quiver.schemas.errors import LineageError, for_terminal
from quiver.stages.core.store import Store

OBSERVED = "italic green"
"""Style of tokens that are not trained on."""
_STYLES = {
    "title": "bold",
    "restart": "bold magenta",
    "policy": "cyan",
    "observation": OBSERVED,
    "error": "bold red",
    "note": "dim",
}
_MOST_LINES = 400
"""Most lines shown of a prompt or another text."""
_SIDE = 48
"""Most pixels of a picture's longer side."""
_RATIO = "blue: less likely under that model than when it was sampled; red: more likely"
LEGEND = {
    "logprob": "the redder, the less likely under the policy that sampled",
    "ratio prox": _RATIO,
    "ratio ref": _RATIO,
    "advantage": "green: above the others, red: below",
    "none": "no colour",
}
"""Meaning of the colours, by colouring: one of `Tokens.numbers`, or none."""
_RED = ColorTriplet(190, 40, 40)
_GREEN = ColorTriplet(20, 125, 50)
_BLUE = ColorTriplet(35, 85, 200)
_SURFACE = ColorTriplet(30, 30, 30)
_UNLIKELY = 5.0
"""Nats at which a token gets the strongest red."""
_LEAST_SHARE = 0.04


class Section(NamedTuple):
    """A stretch of the details."""

    turn: int | None
    """Index of its turn, from 0; None: not one turn."""
    text: Text


class TokenRow(NamedTuple):
    """One sampled or observed token, or a mark at which a new sequence begins."""

    turn: int
    place: int | None
    """Index among the sampled tokens; None: not sampled."""
    text: str
    id: int | str
    """Token id; empty for a mark."""


def sections_of(
    joined: Joined,
    row: dict[str, Any],
    colouring: str,
    width: int,
    name: str = "",
    most_turns: int | None = None,
) -> list[Section]:
    """Return the details of a rollout, wrapped to `width`, with sampled tokens coloured.

    `name` says which of two rollouts it is. With more than `most_turns` turns, only the first and
    the last are shown.
    """
    title = f"{name}  " if name else ""
    if not row:
        return [Section(None, Text(f"{title}no rollout of this prompt and sample"))]
    tokens = joined.tokens(row["position"])
    values = tokens.numbers.get(colouring)
    missing = " (this version has none)" if values is None and colouring != "none" else ""
    heading = Text.assemble(
        (for_terminal(f"{title}{row['rollout_id']}"), "bold"),
        (f"\ncompletion, by {colouring}: {LEGEND[colouring]}{missing}", "dim"),
    )
    read = reader_of(joined.store, joined.policy)
    starts = list(accumulate((turn["length"] for turn in tokens.turns), initial=0))
    sections = [(None, [heading])]
    for piece in pieces_of(row, most_turns):
        if piece.turn != sections[-1][0]:
            sections.append((piece.turn, []))
        if piece.voice == "sampled":
            turn = piece.turn or 0
            place = slice(starts[turn], starts[turn + 1])
            text = coloured(read(tokens.ids[place]), values and values[place], colouring)
        else:
            lines = piece_lines(piece, width, _MOST_LINES)
            text = Text(for_terminal("\n".join(lines)), _STYLES.get(piece.voice, ""))
            if piece.file and piece.name == "picture":
                text = Text("\n").join([text, drawn(piece.file["bytes"], width)])
        if text:
            sections[-1][1].append(text)
    return [Section(turn, Text("\n").join(texts)) for turn, texts in sections]


def token_rows(joined: Joined, tokens: Tokens) -> Iterator[TokenRow]:
    """Yield every token of a rollout in the order in which the policy read them.

    A rewritten history is only counted.
    """
    read = reader_of(joined.store, joined.policy)
    place = 0
    for index, turn in enumerate(tokens.turns):
        if turn["restart_ids"] is not None:
            num_tokens = counted(len(turn["restart_ids"]), "token")
            yield TokenRow(index, None, f"— a new sequence begins with {num_tokens} —", "")
        ids = tokens.ids[place : place + turn["length"]]
        for offset, text in enumerate(read(ids)):
            yield TokenRow(index, place + offset, text, ids[offset])
        place += turn["length"]
        ids = turn["observation_ids"]
        for text, id in zip(read(ids), ids, strict=True):
            yield TokenRow(index, None, text, id)


def drawn(content: bytes, width: int) -> Text:
    """Draw a picture with terminal characters; each shows two pixels, one above the other."""
    from quiver.stages.model.media.decoder import open_image

    small = open_image(content)
    small.thumbnail((min(width, _SIDE), min(width, _SIDE)))
    pixels = np.asarray(small)
    if len(pixels) % 2:
        pixels = np.concatenate([pixels, pixels[-1:]])
    text = Text()
    for upper_row, lower_row in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for upper, lower in zip(upper_row, lower_row, strict=True):
            colours = Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))
            text.append("▀", colours)
        text.append("\n")
    return text


# -- tokens


def reader_of(store: Store, policy: str | None) -> Callable[[list[int]], list[str]]:
    """Return a function that gives the text of each token by the policy's own tokenizer, or its id
    without a tokenizer.json.

    A character of several tokens is the text of the last of them.
    """
    with suppress(LineageError):
        version = store.open(policy) if policy else None
        if version is not None and "tokenizer.json" in version.files.names:
            version.verify("tokenizer.json")
            return partial(_texts, _tokenizer(version.files.path("tokenizer.json")))
    return lambda ids: [f"⟨{number}⟩" for number in ids]


def _texts(tokenizer: Any, ids: list[int]) -> list[str]:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer, id) or "" for id in ids]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    if ids and not texts[-1]:  # The end of the last character is missing.
        texts[-1] = whole[len("".join(texts)) :]
    return texts


@lru_cache(maxsize=4)
def _tokenizer(path: Path):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def coloured(texts: list[str], values: list[float] | None, colouring: str) -> Text:
    """Return the completion with each token coloured.

    Control characters are escaped, and a line end gets a mark that can be coloured.
    """
    text = Text()
    for index, token in enumerate(texts):
        style = style_of(colouring, values[index]) if values is not None else ""
        text.append(for_terminal(token).replace("\n", "↵\n"), style)
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
    return f"white on {blend_rgb(_SURFACE, colour, min(share, 1.0)).rgb}"
