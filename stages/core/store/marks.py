"""Marks: small objects beside a version which say that its data may be deleted, and why.

    STORE/<run>/<kind>/v000003.expired             all its data; its work still counts as done
    STORE/<run>/<kind>/v000003.expired.optimizer   its optimizer state
    STORE/<run>/<kind>/v000003.removed             a user removed it, or it is damaged: a stage that
                                                   needs it makes it again

A mark is written before data are deleted. The manifest stays, so a number
is never given again, and lineage can always be told.

Not of the spine: `retention` writes marks, and readers turn them into errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from quiver.schemas.errors import CorruptError, LineageError, printable
from quiver.schemas.manifest import digest
from quiver.schemas.plain import read_json
from quiver.schemas.refs import Ref

from .listing import EXPIRED, REMOVED
from .storage import Storage


@dataclass(frozen=True)
class Mark:
    """The record that the data of a version, or its optimizer state, may be deleted."""

    at: str
    """UTC, ISO 8601."""
    why: str
    keep: bool = False
    """If true, the data are damaged, and stay for a user to look at until they are removed."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of small files that plans read beside the manifest, by name."""

    def __str__(self) -> str:
        return f"{self.at} {printable(self.why)}".strip()

    @property
    def seconds(self) -> float:
        """Age in seconds, by this host's clock."""
        return (datetime.now(UTC) - datetime.fromisoformat(self.at)).total_seconds()


def key_of(ref: Ref, name: str) -> str:
    """Return the key of the mark with this name."""
    return f"{ref.folder}.{name}"


def write(storage: Storage, ref: Ref, name: str, why: str, **fields) -> None:
    """Mark a version. A mark of this name that is there already stays.

    Args:
        fields: other fields of the mark.
    """
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    content = asdict(Mark(at, why, **fields))
    line = json.dumps({**content, "checksum": digest(content)}).encode()
    # durable before the data are deleted
    storage.put_if_absent(key_of(ref, name), line, flush_name=True)


def read(storage: Storage, ref: Ref, name: str) -> Mark | None:
    """Return a mark of a version; None if it is not there. Raises CorruptError if it cannot be
    read."""
    key = key_of(ref, name)
    try:
        fields = read_json(storage.read(key))
        checksum = fields.pop("checksum")
        mark = Mark(**fields)
        if checksum == digest(fields) and mark.seconds is not None:
            return mark
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, AttributeError, TypeError, CorruptError):
        pass
    raise CorruptError(
        key,
        "the mark that the version's data may be deleted cannot be read",
        state="its manifest is kept.",
        next=f"rm {storage.local(key)}",
    )


def gone_error(storage: Storage, ref: Ref, names: Iterable[str]) -> LineageError | None:
    """Build the error for reading data that have one of these marks; None if they have none."""
    for name in names:
        mark = read(storage, ref, name)
        if mark is not None and name == REMOVED:
            return LineageError(str(ref), f"was removed on purpose: {mark}", next="quiver ls")
        if mark is not None:
            return LineageError(
                str(ref),
                f"its {'files' if name == EXPIRED else 'optimizer state'} expired: {mark}",
                state="its manifest is kept; nothing was changed.",
                next=f"quiver lineage {ref}",
            )
    return None
