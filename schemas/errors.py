"""The exception tree: one class a code, each also a standard type, each with what to do next.

    QuiverError           E-INTERNAL         1 Exception     a defect of Quiver's: report it
  ├── ConfigError         E-CONFIG           2 ValueError      a recipe, option or file
  ├── CorruptError        E-CORRUPT          3 OSError         bytes are not those that were written
  ├── BusyError           E-BUSY             4 OSError         another process is at this very work
  ├── ConflictError       E-CONFLICT         4 OSError         somebody else was first
  ├── LineageError        E-LINEAGE          5 LookupError     a reference leads nowhere, or astray
  ├── SchemaError         E-SCHEMA           5 TypeError       a table is not of its kind
  ├── RewardError         E-REWARD           6 RuntimeError    a reward function failed
  ├── RemoteError         E-REMOTE           6 ConnectionError a server failed
  ├── ResourceError       E-RESOURCE         7 OSError         disk, memory, GPU, a dead child
  ├── NumericError        E-NUMERIC          8 ArithmeticError NaN, inf, an audit beyond its limit
  ├── OutcomeUnknownError E-OUTCOME-UNKNOWN  9 RuntimeError    it is unknown whether it was done
  └── SecurityError       E-SECURITY        10 PermissionError refused on purpose

Every error carries `code`, `object` (what it is about), `message` (expected and found), `state`
(what is still whole) and `next` (one command or one change). It survives a process boundary:
`to_dict` / `from_dict`.

>>> state = "versions 1-6 are intact"
>>> print(CorruptError("arith/rollouts@7", "sha256 differs", state=state, next="quiver verify"))
E-CORRUPT arith/rollouts@7: sha256 differs
State: versions 1-6 are intact
Next: quiver verify

Not of the spine: one reads it when an error is raised.
"""

from __future__ import annotations

import difflib
import errno
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
"""What is wrong with a host, by the number of the system's error."""
_SHORTAGES = (
    "allocate memory",
    "failed to map segment",  # of a shared library
    "can't start new thread",
    "Resource temporarily unavailable",  # a process, beyond `ulimit -u`
)
UNCHANGED = "nothing was changed."
"""The state of an error that says nothing else of it: it was found before anything was done."""


def printable(text: object, limit: int = 200) -> str:
    """Foreign text made safe for a terminal: control characters escaped, cut at `limit`
    characters."""
    escaped = "".join(map(_escaped, str(text)[: limit + 1]))
    return escaped if len(escaped) <= limit else escaped[: limit - 1] + "…"


def quoted_name(name: object) -> str:
    """A user's name of a column, made safe as by `printable`; in quotation marks if the eye would
    miss it, or a space of it.

    >>> quoted_name("answer"), quoted_name("answer "), quoted_name("")
    ('answer', '"answer "', '""')
    """
    shown = printable(name)
    return shown if shown and shown == shown.strip() else f'"{shown}"'


def did_you_mean(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown `name`: the choice that is spelled most like it."""
    near = difflib.get_close_matches(name, choices, 1, 0.5)
    return f"; did you mean {quoted_name(near[0])}?" if near else otherwise


def reason(error: BaseException) -> str:
    """What `error` says, printable. Of one of the system, without its number and the path, which
    the message around it names.

    >>> reason(FileNotFoundError(2, "No such file or directory", "rows.csv"))
    'No such file or directory'
    """
    return printable(getattr(error, "strerror", None) or error)


def for_terminal(text: object) -> str:
    """Lines that leave for a terminal, whoever wrote them: no character in them moves the cursor,
    changes colours or the direction of writing."""
    return "".join(c if c in "\n\t" else _escaped(c) for c in str(text))


def _escaped(character: str) -> str:
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
        """The error as the command line's JSON has it."""
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
    cls.code: cls for cls in (QuiverError, *QuiverError.__subclasses__())
}


def unexpected(object: str, error: BaseException) -> QuiverError:
    """Any other exception as one of ours: what memory, disk and system refuse as E-RESOURCE, a
    name that no file can have and settings that Prefect refuses as E-CONFIG, the rest as
    E-INTERNAL."""
    problem = f"{type(error).__name__}: {printable(error)}"
    model = str(getattr(error, "title", ""))  # pydantic's name of what was not valid
    if type(error).__name__ == "ValidationError" and model.endswith("Settings"):
        # Prefect reads them as it is imported, from the environment and from its profile
        first = error.errors()[0]
        return ConfigError(
            "Prefect's settings",
            printable(": ".join([*map(str, first["loc"]), first["msg"]])),
            next="correct PREFECT_API_URL, or which of the PREFECT_ variables it is",
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ConfigError(object, problem, next="give it a shorter name")
    state = "finished shards and all versions are kept."
    reason = SYSTEM_REASONS.get(error.errno) if isinstance(error, OSError) else None
    refused = shortage(error)
    if refused is not None:
        # numpy, for one, has a page of advice around the line that says it
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
        f"a defect of Quiver's: {problem}",
        state=state,
        next="report it, with the traceback that is printed before it and the command that you ran",
    )


def shortage(error: BaseException | None) -> BaseException | None:
    """The error that says that the system gave no memory or no thread, be it `error` or what led to
    it, the first that did; None if there is none. Libraries have several types and texts for it."""
    first = None
    while error is not None:
        is_known = isinstance(error, OSError | ImportError | RuntimeError)
        text = str(error) if is_known or type(error).__name__ == "ArrowException" else ""
        if isinstance(error, MemoryError) or any(word in text for word in _SHORTAGES):
            first = error
        error = error.__cause__ or error.__context__
    return first


def from_dict(data: dict[str, str]) -> QuiverError:
    """The error that `to_dict` described, as the same class."""
    fields = dict(data)
    return BY_CODE.get(fields.pop("code"), QuiverError)(**fields)
