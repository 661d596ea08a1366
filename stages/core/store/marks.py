"""Marks: small objects beside a version which say that its data may be deleted, and why.

    STORE/<run>/<kind>/v000003.expired             all its data; its work still counts as done
    STORE/<run>/<kind>/v000003.expired.optimizer   its optimizer state
    STORE/<run>/<kind>/v000003.removed             a user removed it, or it is damaged: a stage that
                                                   needs it makes it again

A mark is written before data are deleted. The manifest stays, so a number is never given again, and
lineage can always be told. A mark names its version, so a copy of it beside another version is
damage, and deletes nothing.

Not of the spine: `retention` writes marks, and readers turn them into errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from quiver.schemas.errors import CorruptError, ExpiredError, LineageError, printable
from quiver.schemas.manifest import from_json
from quiver.schemas.refs import Ref

from .listing import EXPIRED, REMOVED
from .storage import Storage, read_checked, with_checksum


@dataclass(frozen=True)
class Mark:
    """The record that the data of a version, or its optimizer state, may be deleted."""

    ref: str
    """Reference of the version."""
    commit_id: str
    """Commit id of the version; empty if its manifest could not be read."""
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
    content = asdict(Mark(str(ref), _commit_id(storage, ref), at, why, **fields))
    # durable before the data are deleted
    storage.put_if_absent(key_of(ref, name), with_checksum(content), flush_name=True)


def read(storage: Storage, ref: Ref, name: str) -> Mark | None:
    """Return a mark of a version; None if it is not there. Raises CorruptError if it cannot be
    read, or names another version."""
    try:
        mark = Mark(**read_checked(storage, key_of(ref, name)))
        if mark.seconds is not None and mark.ref == str(ref):
            return mark
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, AttributeError, TypeError, CorruptError):
        pass
    raise _damaged(storage, ref, name)


def checked(storage: Storage, ref: Ref, name: str) -> Mark | None:
    """Read a mark, and compare it with the version's manifest.

    Do so before anything is deleted for it. Raises CorruptError also if another version had the
    number when the mark was written.
    """
    mark = read(storage, ref, name)
    if mark is not None and _commit_id(storage, ref) not in ("", mark.commit_id):
        raise _damaged(storage, ref, name)
    return mark


def _damaged(storage: Storage, ref: Ref, name: str) -> CorruptError:
    key = key_of(ref, name)
    return CorruptError(
        key,
        "the mark that the version's data may be deleted cannot be read, or is another version's",
        state="its manifest is kept.",
        next=f"rm {storage.url}/{key}",
    )


def _commit_id(storage: Storage, ref: Ref) -> str:
    with suppress(FileNotFoundError, CorruptError):
        return from_json(storage.read(f"{ref.folder}/manifest.json"), str(ref)).commit_id
    return ""


def gone_error(storage: Storage, ref: Ref, names: Iterable[str]) -> LineageError | None:
    """Build the error for reading data that have one of these marks; None if they have none."""
    for name in names:
        mark = read(storage, ref, name)
        if mark is not None and name == REMOVED:
            return LineageError(str(ref), f"was removed on purpose: {mark}", next="quiver ls")
        if mark is not None:
            again = "the command that made it makes it again, under another number."
            if ref.kind == "evaluations":
                again = "`quiver evaluate RECIPE --policy POLICY` makes it again."
            return ExpiredError(
                str(ref),
                f"its {'files' if name == EXPIRED else 'optimizer state'} expired: {mark}",
                state="its manifest is kept; "
                + (again if name == EXPIRED else "nothing was changed."),
                next=f"quiver lineage {ref}",
            )
    return None
