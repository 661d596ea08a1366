"""The exception tree: one class per code, each also a standard type, each with a next step.

    QuiverError           E-INTERNAL         1 Exception     a bug in Quiver: report it
  ├── ConfigError         E-CONFIG           2 ValueError      a recipe, option or file
  ├── CorruptError        E-CORRUPT          3 OSError         bytes differ from what was written
  ├── BusyError           E-BUSY             4 OSError         another process does the same work
  ├── ConflictError       E-CONFLICT         4 OSError         another process was first
  ├── LineageError        E-LINEAGE          5 LookupError     a reference is missing or wrong
  │   └── ExpiredError    E-EXPIRED          5                 the files of a version expired
  ├── SchemaError         E-SCHEMA           5 TypeError       a table does not fit its kind
  ├── RewardError         E-REWARD           6 RuntimeError    a reward function failed
  ├── RemoteError         E-REMOTE           6 ConnectionError a server failed
  ├── ResourceError       E-RESOURCE         7 OSError         disk, memory, GPU, a dead child
  ├── NumericError        E-NUMERIC          8 ArithmeticError NaN, inf, an audit beyond its limit
  ├── OutcomeUnknownError E-OUTCOME-UNKNOWN  9 RuntimeError    the action may or may not be done
  └── SecurityError       E-SECURITY        10 PermissionError refused on purpose

Every error carries `code`, `object` (the thing at fault), `message` (expected and found), `state`
(what is still intact) and `next` (one command or one change). `to_dict` and `from_dict` carry it
across a process boundary.

>>> state = "versions 1-6 are intact"
>>> print(CorruptError("arith/rollouts@7", "sha256 differs", state=state, next="quiver verify"))
E-CORRUPT arith/rollouts@7: sha256 differs
State: versions 1-6 are intact
Next: quiver verify

Not of the spine: you need this file only when an error is raised.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable

SYSTEM_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EIO: "input/output error",
    errno.EMFILE: "too many open files",
    errno.EFBIG: "a file is larger than the system allows",
    errno.EXDEV: "it lies on another file system than the store's folder",
}
"""Explanations of operating system errors, by errno."""
_SHORTAGES = (
    "allocate memory",
    "failed to map segment",  # a shared library
    "can't start new thread",
    "Resource temporarily unavailable",  # a process, beyond `ulimit -u`
)
_UNUSUAL = re.compile(r"[^ -~]")
_UNUSUAL_IN_LINES = re.compile(r"[^ -~\n\t]")
UNCHANGED = "nothing was changed."
"""Default state of an error: it was found before anything was done."""


def printable(text: object, limit: int = 200) -> str:
    """Make foreign text safe for a terminal: escape control characters, cut at `limit`."""
    escaped = _UNUSUAL.sub(_escaped, str(text)[: limit + 1])
    return escaped if len(escaped) <= limit else escaped[: limit - 1] + "…"


def quoted_name(name: object) -> str:
    """Make a user's column name safe as `printable` does.

    It is put in quotation marks if it is empty or has spaces at an end, which a reader would miss.

    >>> quoted_name("answer"), quoted_name("answer "), quoted_name("")
    ('answer', '"answer "', '""')
    """
    shown = printable(name)
    return shown if shown and shown == shown.strip() else f'"{shown}"'


def did_you_mean(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message about an unknown `name`: the choice with the closest spelling."""
    near = difflib.get_close_matches(name, choices, 1, 0.5)
    return f"; did you mean {quoted_name(near[0])}?" if near else otherwise


def reason(error: BaseException) -> str:
    """Return the text of `error`, printable.

    For a system error, its number and path are left out, because the message around it names them.

    >>> reason(FileNotFoundError(2, "No such file or directory", "rows.csv"))
    'No such file or directory'
    """
    return printable(getattr(error, "strerror", None) or error)


def for_terminal(text: object) -> str:
    """Make lines from any source safe for a terminal.

    No character in them can move the cursor, or change colours or the writing direction.
    """
    return _UNUSUAL_IN_LINES.sub(_escaped, str(text))


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


class QuiverError(Exception):
    """Base of all errors that Quiver raises on purpose."""

    code = "E-INTERNAL"
    exit_code = 1

    def __init__(
        self, object: str, message: str, *, state: str = UNCHANGED, next: str = ""
    ) -> None:
        self.object, self.message, self.state, self.next = object, message, state, next
        super().__init__(object, message)

    def __str__(self) -> str:
        lines = [f"{self.code} {self.object}: {self.message}", f"State: {self.state}"]
        return "\n".join([*lines, f"Next: {self.next}"] if self.next else lines)

    def __reduce__(self):
        return from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, str]:
        """Return the error as it appears in the command line's JSON."""
        names = ("code", "object", "message", "state", "next")
        return {name: getattr(self, name) for name in names}


class ConfigError(QuiverError, ValueError):
    code, exit_code = "E-CONFIG", 2


class CorruptError(QuiverError, OSError):
    code, exit_code = "E-CORRUPT", 3


class BusyError(QuiverError, OSError):
    code, exit_code = "E-BUSY", 4


class ConflictError(QuiverError, OSError):
    code, exit_code = "E-CONFLICT", 4


class LineageError(QuiverError, LookupError):
    code, exit_code = "E-LINEAGE", 5


class ExpiredError(LineageError):
    code = "E-EXPIRED"


class SchemaError(QuiverError, TypeError):
    code, exit_code = "E-SCHEMA", 5


class RewardError(QuiverError, RuntimeError):
    code, exit_code = "E-REWARD", 6


class RemoteError(QuiverError, ConnectionError):
    code, exit_code = "E-REMOTE", 6


class ResourceError(QuiverError, OSError):
    code, exit_code = "E-RESOURCE", 7


class NumericError(QuiverError, ArithmeticError):
    code, exit_code = "E-NUMERIC", 8


class OutcomeUnknownError(QuiverError, RuntimeError):
    code, exit_code = "E-OUTCOME-UNKNOWN", 9


class SecurityError(QuiverError, PermissionError):
    code, exit_code = "E-SECURITY", 10


BY_CODE: dict[str, type[QuiverError]] = {
    cls.code: cls for cls in (QuiverError, *QuiverError.__subclasses__(), ExpiredError)
}


def unexpected(object: str, error: BaseException) -> QuiverError:
    """Convert any other exception to a QuiverError.

    A shortage of memory or disk, and refusals by the system, become E-RESOURCE. A file name that is
    too long, and settings that Prefect refuses, become E-CONFIG. Everything else becomes
    E-INTERNAL.
    """
    problem = f"{type(error).__name__}: {printable(error)}"
    model = str(getattr(error, "title", ""))  # pydantic's name of the invalid model
    if type(error).__name__ == "ValidationError" and model.endswith("Settings"):
        # Prefect reads them at import, from the environment and from its profile
        first = error.errors()[0]
        return ConfigError(
            "Prefect's settings",
            printable(": ".join([*map(str, first["loc"]), first["msg"]])),
            next="correct PREFECT_API_URL, or the PREFECT_ variable that is wrong",
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ConfigError(object, problem, next="give it a shorter name")
    state = "finished shards and all versions are kept."
    reason = SYSTEM_REASONS.get(error.errno) if isinstance(error, OSError) else None
    refused = shortage(error)
    if refused is not None:
        # numpy, for one, surrounds the relevant line with a page of advice
        lines = [
            line for line in str(refused).splitlines() if any(map(line.__contains__, _SHORTAGES))
        ]
        problem = f"{type(refused).__name__}: {printable(lines[0] if lines else refused)}"
        next = "free memory, or raise the limits that `ulimit -a` shows, then run again"
        return ResourceError(object, problem, state=state, next=next)
    if reason:
        next = "make room or give access, then run the same command again"
        return ResourceError(object, problem, state=state, next=next)
    return QuiverError(
        object,
        f"a bug in Quiver: {problem}",
        state=state,
        next="report it, with the traceback that is printed before it and the command that you ran",
    )


def shortage(error: BaseException | None) -> BaseException | None:
    """Return the first error in the chain of `error` that reports a lack of memory or threads.

    The chain is `error` and its causes; the result is None if none does. Libraries use several
    types and texts for such an error.
    """
    first = None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        is_known = isinstance(error, OSError | ImportError | RuntimeError)
        text = str(error) if is_known or type(error).__name__ == "ArrowException" else ""
        if isinstance(error, MemoryError) or any(word in text for word in _SHORTAGES):
            first = error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return first


def from_dict(data: dict[str, str]) -> QuiverError:
    """Rebuild the error that `to_dict` described, with the same class."""
    fields = dict(data)
    return BY_CODE.get(fields.pop("code"), QuiverError)(**fields)
