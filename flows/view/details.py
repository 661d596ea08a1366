"""All details of one rollout as coloured text.

A rollout of one turn is one piece. An episode has the prompt first, then each turn, then its end.

    for section in sections_of(joined, joined.rows([0])[0], "logprob", width=100):
        print(section.turn, section.text)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from rich.text import Text

from quiver.schemas.errors import for_terminal
from quiver.stages.report.describe import asked_lines, outcome_lines, part_lines, row_lines
from quiver.stages.report.episodes import Part, left_out, parts_of_turn, shown_turns
from quiver.stages.report.joined import Joined, Tokens
from quiver.stages.report.words import counted

from . import tokens as token_colours
from .pictures import drawn

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


class Section(NamedTuple):
    """One piece of the details."""

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
    values = token_colours.values_of(tokens, colouring)
    missing = " (nothing is told of it)" if values is None and colouring != "none" else ""
    legend = token_colours.LEGEND[colouring.partition(" ")[0]]
    heading = for_terminal(f"{title}{row['rollout_id']}\n")
    pictures = Text("\n") + drawn(row["images"], width) if row.get("images") else Text()
    read = token_colours.reader_of(joined.store, joined.policy)
    if tokens.turns is None:
        others = {key: cell for key, cell in row.items() if key != "completion_text"}
        text = Text.assemble(
            (heading, "bold"),
            for_terminal("\n".join(row_lines(others, width, _MOST_LINES))),
            pictures,
            (f"\n\ncompletion, by {colouring}: {legend}{missing}\n", "dim"),
            token_colours.coloured(read(tokens.ids), values, colouring),
        )
        return [Section(None, text)]
    head = Text.assemble(
        (heading, "bold"),
        for_terminal("\n".join(asked_lines(row, width, _MOST_LINES))),
        pictures,
        (f"\n\nturns, what was sampled by {colouring}: {legend}{missing}", "dim"),
    )
    sections = [Section(None, head)]
    starts = list(accumulate((turn["length"] for turn in tokens.turns), initial=0))
    for index in shown_turns(len(tokens.turns), most_turns):
        if index is None:
            part = left_out(len(tokens.turns), most_turns)
            sections.append(Section(None, _lines(part, width)))
            continue
        place = slice(starts[index], starts[index + 1])
        sampled = token_colours.coloured(
            read(tokens.ids[place]), values and values[place], colouring
        )
        sections.append(Section(index, _turn_text(parts_of_turn(row, index), sampled, width)))
    end = for_terminal("\n".join(outcome_lines(row, width, _MOST_LINES)))
    return [*sections, Section(None, Text(end))]


def details(
    joined: Joined, row: dict[str, Any], colouring: str, width: int, name: str, most_turns: int
) -> Text:
    """Return the sections as one text."""
    sections = sections_of(joined, row, colouring, width, name, most_turns)
    return Text("\n\n").join(section.text for section in sections)


def token_rows(joined: Joined, tokens: Tokens) -> Iterator[TokenRow]:
    """Yield every token of an episode in the order in which the policy read them.

    A rewritten history is only counted.
    """
    read = token_colours.reader_of(joined.store, joined.policy)
    place = 0
    for index, turn in enumerate(tokens.turns):
        history = turn["restart_ids"]
        if history is not None:
            begun = f"— a new sequence begins with {counted(len(history), 'token')} —"
            yield TokenRow(index, None, begun, "")
        ids = tokens.ids[place : place + turn["length"]]
        for offset, text in enumerate(read(ids)):
            yield TokenRow(index, place + offset, text, ids[offset])
        place += turn["length"]
        ids = turn["observation_ids"]
        for offset, text in enumerate(read(ids)):
            yield TokenRow(index, None, text, ids[offset])


def _turn_text(parts: list[Part], sampled: Text, width: int) -> Text:
    """Return a turn's text, with its tokens below its title."""
    pieces = []
    for part in parts:
        if part.name != "sampled":
            pieces.append(_lines(part, width))
        if part.voice == "title" and sampled:
            pieces.append(sampled)
    return Text("\n").join(pieces)


def _lines(part: Part, width: int) -> Text:
    lines = part_lines(part, width, _MOST_LINES)
    return Text(for_terminal("\n".join(lines)), _STYLES[part.voice])
