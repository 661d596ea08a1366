"""Failpoints: named places where a process fails on purpose, to test recovery from a failure.

    QUIVER_FAIL=commit.renamed:kill                        kill the process at this place
    QUIVER_FAIL=shard.noted@3:sleep=5,tag.entered:raise    the third time at one; also at another

    kill            by SIGKILL
    raise=NUMBER    raise OSError with this number; default: 5 (input/output error)
    sleep=SECONDS   default: 1
    signal=NUMBER   send this signal to itself; default: 15 (SIGTERM)

Each process that inherits the variable counts for itself. A place is recognised by the storage
operation and the object's key, so the protocol above the storage needs no code for failures. A few
places without an object are named in the code itself.

Not of the spine: without the variable, nothing here has an effect.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quiver.schemas.errors import ConfigError, printable

VARIABLE = "QUIVER_FAIL"
_STAGED = r"/\.staging/[0-9a-f]{64}"
_CANDIDATE = _STAGED + r"\.[0-9a-f]{12}"
_SHARD = r"/part-\d{5,}\.arrow"
_VERSION = r"/v\d{6,}"
_COPY = r"/\.ledger/v\d{6,}\.[0-9a-f]{64}"
_TOMBSTONE = _VERSION + r"\.expired(\.optimizer)?"
_RENAMING = r"renaming(?!.*/\.trash/)"
_RENAMED = r"renamed(?!.*/\.trash/)"
POINTS = {
    "store.made": ("created", r"/store\.json", "there is a store"),
    "staging.opened": ("made", _STAGED, "its folder is there, nothing in it"),
    "plan.noted": ("created", r"\.notes/plan", "how long its shards are is noted"),
    "sources.noted": ("replaced", r"\.notes/sources", "what it reads is noted"),
    "shard.flushing": ("flushing", _STAGED + _SHARD, "a shard is written, not flushed"),
    "shard.written": ("(created|replaced)", _STAGED + _SHARD, "it has its name, but no note"),
    "shard.noting": ("flushing", rf"\.notes{_SHARD}\.json", "the note is written, not flushed"),
    "shard.noted": ("replaced", rf"\.notes{_SHARD}\.json", "it counts"),
    "shard.reported": ("replaced", r"\.notes/[0-9a-f]+\.report", "one of several told its part"),
    "checkpoint.half": ("flushing", _CANDIDATE + r"/\w+/state\.json", "tensors, not what they are"),
    "checkpoint.saved": (
        "replaced",
        _CANDIDATE + r"/\w+/state\.json",
        "optimizer or critic is there",
    ),
    "checkpoint.flushing": ("flushing", _CANDIDATE + r"/.+\.safetensors", "sealing, not flushed"),
    "resume.saved": ("flushing", r"\.resume/state-.+", "a training's state is written, no note"),
    "resume.noting": ("flushing", r"\.resume/progress", "the note is written, not flushed"),
    "resume.noted": ("replaced", r"\.resume/progress", "the training goes on from here"),
    "commit.linked": ("linked", _CANDIDATE + r"/.+", "a file is in the folder to be renamed"),
    "commit.flushing": ("flushing", _CANDIDATE + r"/manifest\.json", "manifest not flushed"),
    "commit.staged": ("replaced", _CANDIDATE + r"/manifest\.json", "the folder is complete"),
    "commit.renaming": (
        _RENAMING,
        _VERSION,
        "it is flushed, and will be a version",
    ),
    "commit.renamed": (
        _RENAMED,
        _VERSION,
        "it is visible, not flushed, in no ledger",
    ),
    "commit.noting": ("flushing", _COPY, "it will outlive a power loss, and is in no ledger"),
    "commit.noted": ("replaced", _COPY, "it is in the ledger, not in the index"),
    "index.written": ("replaced", r"/\.index/versions", "it is in the index"),
    "staging.hiding": ("hidden", _STAGED + r".*", "something staged is no longer found"),
    "staging.cleared": ("deleted", _STAGED + r".*", "it is gone"),
    "tag.entering": ("flushing", r"/tags/\.[^/]+/\d+", "an entry is written, not flushed"),
    "tag.entered": ("created", r"/tags/\.[^/]+/\d+", "the tag has moved, its file has not"),
    "tag.moved": ("replaced", r"/tags/[^/]+", "its file has, too"),
    "tag.noted": ("replaced", r"/tags/\.[^/]+/newest", "so is the number of the entry"),
    "lease.taken": ("created", r"\.leases/[^/]+/0*1", "the first to have it"),
    "lease.taken_over": ("created", r"\.leases/[^/]+/0*[1-9]\d*(?<!/000001)", "from another"),
    "lease.renewed": ("renewed", r"\.leases/[^/]+/\d+", "it is heard of"),
    "lease.released": ("replaced", r"\.leases/[^/]+/\d+", "it was given back"),
    "rm.noting": ("flushing", _TOMBSTONE, "a version will be deleted; not flushed"),
    "rm.noted": ("replaced", _TOMBSTONE, "that is in the ledger"),
    "rm.hidden": ("renamed", rf"/\.trash/.+{_VERSION}(\.optimizer)?", "it is no longer found"),
    "rm.deleted": ("deleted", r"/\.trash/[^/]+", "it is gone"),
    "worker.answered": ("worker.answered", "", "a worker's answer is there, in no shard"),
    "flow.answered": ("flow.answered", "", "a stage is done, the next one has not begun"),
}
"""For each place: the storage event, a pattern of the object's key, and the state at that time."""
_USUAL_NUMBERS = {"kill": signal.SIGKILL, "raise": 5, "sleep": 1, "signal": signal.SIGTERM}
_WORDS = re.compile(r"([\w.]+)(?:@([1-9]\d*))?:(\w+)(?:=(\d+(?:\.\d+)?))?")


@dataclass
class _Failure:
    place: re.Pattern[str]
    times_left: int
    action: str
    number: float

    def happen(self, path: str | Path) -> None:
        if self.action == "raise":
            raise OSError(int(self.number), os.strerror(int(self.number)), str(path))
        if self.action == "sleep":
            time.sleep(self.number)
        else:
            os.kill(os.getpid(), int(self.number))


def failpoint(event: str, path: str | Path = "") -> None:
    """Fail here if QUIVER_FAIL names this place, given by an event and the object's path."""
    text = os.environ.get(VARIABLE)
    for failure in _failures(text) if text else ():
        if failure.place.fullmatch(f"{event} {path}"):
            failure.times_left -= 1
            if failure.times_left == 0:
                failure.happen(path)


def check_failpoints() -> None:
    """Raise ConfigError if QUIVER_FAIL names an unknown place or action."""
    _failures(os.environ.get(VARIABLE, ""))


@cache
def _failures(text: str) -> list[_Failure]:
    failures = []
    for words in filter(None, text.split(",")):
        match = _WORDS.fullmatch(words)
        name, times, action, number = match.groups() if match else ("", "", "", "")
        if name not in POINTS or action not in _USUAL_NUMBERS:
            raise ConfigError(
                VARIABLE,
                f"expected NAME[@TIMES]:ACTION[=NUMBER], an action of {', '.join(_USUAL_NUMBERS)} "
                f"and a name of stages/common/store/failpoints.py, found {printable(words, 60)}",
                next=f"unset {VARIABLE}",
            )
        event, pattern, _ = POINTS[name]
        place = re.compile(f"{event} .*{pattern}")
        number = float(number or _USUAL_NUMBERS[action])
        failures.append(_Failure(place, int(times or 1), action, number))
    return failures
