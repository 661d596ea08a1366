"""Turn a tag's history into one table of nights: the policy in use, the candidate, and the decision
with its numbers, author and reason. `quiver history`, the report and Prefect's pages show it.

Rejected nights are rows like the others.

    for night in nights_of(store.history("arith", "prod")):
        print(night.name, night.decision, night.difference)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quiver.schemas.errors import printable
from quiver.stages.core.store.tags import Entry

BY_HAND = "set by hand"
_LONGEST = 1000


class NightRow(NamedTuple):
    """One decision as text, one cell per column. All texts may be foreign."""

    name: str
    """Empty if no night decided it."""
    decided: str
    """Time of the decision, in UTC."""
    in_use: str
    """The version that had the tag before."""
    candidate: str
    """The version that was compared with it, or that got the tag."""
    decision: str
    """began, promoted, rejected, rolled back or set by hand."""
    difference: str
    """Candidate − in use on the same held-out rows, and its lower confidence bound."""
    watch: str
    """Distance of the candidate from the policy in use, if it is beyond [promotion]."""
    who: str
    why: str


HEADER = NightRow(
    "night", "decided", "in use", "candidate", "decision", "difference", "to watch", "who", "why"
)


class _Difference(BaseModel):
    score: float
    stderr: float | None = None


class About(BaseModel):
    """Notes of a night in an entry of a tag's history."""

    model_config = ConfigDict(strict=True)

    night: str = ""
    decision: str = BY_HAND
    candidate: str = ""
    evaluation: str | None = None
    author: str = ""
    by: str = "score"
    difference: _Difference | None = None
    bound: float | None = None
    watch: list[str] = Field(default_factory=list)

    @property
    def difference_in_words(self) -> str:
        """The difference with its standard error and bound; empty if nothing was compared."""
        if self.difference is None:
            return ""
        name = "" if self.by == "score" else f"{self.by} "
        words = f"{name}{self.difference.score:+.4f}"
        if self.difference.stderr is None or self.bound is None:
            return f"{words}, of one prompt"
        return f"{words} ± {self.difference.stderr:.4f}, at least {self.bound:+.4f}"


def read_about(entry: Entry) -> About:
    """Return the notes of a night in `entry`; default notes if they have another form."""
    try:
        return About.model_validate(entry.about)
    except ValidationError:
        return About()


def table_of(nights: Sequence[NightRow]) -> list[tuple[str, ...]]:
    """Return the rows below their header, without the columns that are empty in every row. The
    header does not speak of candidates if the tag was only moved by hand."""
    header = HEADER
    if not any(night.name for night in nights):
        header = HEADER._replace(decided="when", in_use="before", candidate="now")
    columns = zip(header, *nights, strict=True)
    return list(zip(*(column for column in columns if any(column[1:])), strict=True))


def nights_of(entries: Iterable[Entry]) -> list[NightRow]:
    """Return one row per entry of a tag's history, oldest first."""
    rows = []
    for entry in entries:
        notes = read_about(entry)
        moved_to = entry.ref if entry.ref != entry.before else ""
        row = NightRow(
            name=notes.night,
            decided=entry.at[:16].replace("T", " "),
            in_use=entry.before or "none",
            candidate=moved_to or notes.candidate or entry.ref,
            decision=notes.decision,
            difference=notes.difference_in_words,
            watch="; ".join(notes.watch),
            who=notes.author,
            why=entry.why,
        )
        rows.append(NightRow(*(printable(cell, _LONGEST) for cell in row)))
    return rows
