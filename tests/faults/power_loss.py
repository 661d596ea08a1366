"""What a power loss may leave on the disk: every state that the calls of a scene allow.

What was flushed is there. Of what was written since, anything may be missing: the bytes of a file
(none, half, zeros, or all), and each change of a folder, whatever its order. One rename happens
whole or not at all. (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014.)

    recording = record(path, scene, seed)
    for state in crash_states(recording):
        state.write(folder)
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, count
from pathlib import Path
from threading import RLock
from typing import Any

from tests.faults.scenes import Acknowledged, Scene, in_child
from tests.faults.seam import watched

Names = dict[int, dict[str, int]]
"""Of each folder: which file or folder has which name. Each is known by a number of its own."""
_ROOT = 0
_ALL_SUBSETS_OF = 5
_PAIRS_OF = 12
"""Of so many changes that may be missing any are; of more two at most, or all but two; of still
more one, or all but one. And always all but the first few."""


@dataclass
class Recording:
    """What a scene found, and did."""

    names: Names
    contents: dict[int, bytes]
    events: list[tuple[Any, ...]]
    """("changed", {(folder, name): number or None}), ("written", number, bytes), ("flushed",
    number), ("acknowledged", step)."""


class Recorder:
    """Looks at a folder before and after each call."""

    def __init__(self, root: Path) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._root = root
        self._lock = RLock()
        """A policy's files are flushed in threads; calls are recorded one after another."""
        self._numbers: dict[int, int] = {}
        """By inode; forgotten when it is, since another file may get it."""
        self._new_numbers = count(_ROOT)
        self.names, self.contents = self._walk()

    def around(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        """Do a call and record it."""
        with self._lock:
            self.look(at_once=False)
            flushed = None
            if name == "fsync":
                flushed = self._numbers.get(os.stat(path).st_ino)
            answer = call()
            self.look(at_once=True)
            if flushed is not None:
                self.events.append(("flushed", flushed))
            return answer

    def look(self, *, at_once: bool) -> None:
        """Record what has changed since the last look; `at_once`: by one call."""
        names, contents = self._walk()
        changes = {}
        for folder in {*names, *self.names}:
            before, after = self.names.get(folder, {}), names.get(folder, {})
            if folder in names:  # else it is gone with all that was in it
                for name in before.keys() | after.keys():
                    # a half-written file that never got its name matters to nobody
                    if before.get(name) != after.get(name) and not name.endswith(".tmp"):
                        changes[folder, name] = after.get(name)
        for number, content in contents.items():
            if content != self.contents.get(number):
                self.events.append(("written", number, content))
        if at_once and changes:
            self.events.append(("changed", changes))
        else:
            self.events += [("changed", {key: number}) for key, number in changes.items()]
        self.names, self.contents = names, contents

    def _walk(self) -> tuple[Names, dict[int, bytes]]:
        names: Names = {}
        contents: dict[int, bytes] = {}
        numbers = {}

        def visit(path: str) -> int:
            inode = os.stat(path).st_ino
            number = numbers.get(inode, self._numbers.get(inode))
            numbers[inode] = number = next(self._new_numbers) if number is None else number
            if os.path.isdir(path):
                names[number] = {entry.name: visit(entry.path) for entry in os.scandir(path)}
            else:
                with open(path, "rb") as file:
                    contents[number] = file.read()
            return number

        visit(str(self._root))
        self._numbers = numbers
        return names, contents


def record(
    path: Path, scene: Scene, seed: int, mutant: Callable[[], AbstractContextManager] = nullcontext
) -> Recording:
    """Do a scene in a process of its own, which is dead afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "recording"

        def steps() -> Iterator[Acknowledged]:
            recorder = Recorder(path)
            names, contents = recorder.names, recorder.contents
            with watched(recorder.around), mutant():
                for step in scene.steps(path, seed):
                    recorder.look(at_once=False)
                    recorder.events.append(("acknowledged", step))
            recorder.look(at_once=False)
            answer.write_bytes(pickle.dumps(Recording(names, contents, recorder.events)))
            yield from ()

        code, _ = in_child(steps)
        assert code == 0
        return pickle.loads(answer.read_bytes())


@dataclass(frozen=True)
class State:
    """A disk after a power loss."""

    files: dict[str, tuple[int, bytes | None]]
    """By path: the number of the file, which may have several, and its bytes."""
    acknowledged: tuple[Acknowledged, ...]
    """What was said to be done before."""
    event: int
    """After how many events."""

    def write(self, folder: Path) -> Path:
        """Put it on a disk."""
        paths: dict[int, Path] = {}
        for name, (number, content) in self.files.items():
            path = folder / name
            if content is None:
                path.mkdir()
            elif number in paths:
                path.hardlink_to(paths[number])
            else:
                path.write_bytes(content)
            paths[number] = path
        return folder


@dataclass
class _Disk:
    """What is on the disk for sure, and what may be."""

    names: Names
    contents: dict[int, bytes]
    changes: list[dict[tuple[int, str], int | None]] = field(default_factory=list)
    writes: dict[int, list[bytes]] = field(default_factory=dict)

    def flush(self, number: int) -> None:
        """A file's bytes are there, or all changes of a folder up to now."""
        if number in self.writes:
            self.contents[number] = self.writes.pop(number)[-1]
        for change in list(self.changes):
            added = {folder for (folder, _), entry in change.items() if entry is not None}
            if number in (added or {folder for folder, _ in change}):
                self.changes.remove(change)
                _apply(self.names, change)
                for earlier in self.changes:  # of these names only what comes later may come yet
                    for key in earlier.keys() & change.keys():
                        del earlier[key]
        self.changes = [change for change in self.changes if change]

    def states(self) -> Iterator[dict[str, tuple[int, bytes | None]]]:
        """Each tree that may be found."""
        for subset in _subsets(self.changes):
            names = {folder: dict(entries) for folder, entries in self.names.items()}
            for change in subset:
                _apply(names, change)
            one_by_one = min(len(subset), len(self.changes) - len(subset)) <= 1
            for contents in self._contents(one_by_one):
                files: dict[str, tuple[int, bytes | None]] = {}
                _list(_ROOT, "", names, contents, files)
                yield files

    def _contents(self, one_by_one: bool) -> Iterator[dict[int, bytes]]:
        """The bytes of all files: of what was not flushed all, none, half or zeros; of all of
        them alike, and of one beside whole ones."""
        last = {number: writes[-1] for number, writes in self.writes.items()}
        yield {**self.contents, **last}
        for torn in (_nothing, _half, _zeros):
            damaged = {number: torn(content) for number, content in last.items()}
            if damaged:
                yield {**self.contents, **damaged}
            if len(damaged) > 1 and one_by_one:
                for number, content in damaged.items():
                    yield {**self.contents, **last, number: content}
        for number, writes in self.writes.items():
            for content in [self.contents.get(number, b""), *writes[:-1]]:
                yield {**self.contents, **last, number: content}


def _nothing(content: bytes) -> bytes:
    return b""


@cache
def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


@cache
def _zeros(content: bytes) -> bytes:
    return bytes(len(content))


def _apply(names: Names, change: dict[tuple[int, str], int | None]) -> None:
    for (folder, name), number in change.items():
        entries = names.setdefault(folder, {})
        if number is None:
            entries.pop(name, None)
        else:
            entries[name] = number


def _subsets(changes: list) -> Iterator[list]:
    size = len(changes)
    most = size if size <= _ALL_SUBSETS_OF else 2 if size <= _PAIRS_OF else 1
    for number in range(size + 1):
        if min(number, size - number) <= most:
            for chosen in combinations(changes, number):
                yield list(chosen)
        else:
            yield changes[:number]


def _list(number: int, prefix: str, names: Names, contents: dict[int, bytes], files: dict) -> None:
    """All that can be reached from a folder."""
    for name, entry in names.get(number, {}).items():
        path = f"{prefix}{name}"
        files[path] = entry, contents.get(entry)
        if entry not in contents:
            _list(entry, f"{path}/", names, contents, files)


def crash_states(recording: Recording) -> Iterator[State]:
    """Each state that a power loss may leave, at any moment; each once."""
    disk = _Disk(
        {folder: dict(entries) for folder, entries in recording.names.items()},
        dict(recording.contents),
    )
    acknowledged: tuple[Acknowledged, ...] = ()
    seen = set()
    for number, (what, *about) in enumerate(recording.events):
        if what == "changed":
            disk.changes.append(dict(about[0]))
        elif what == "written":
            disk.writes.setdefault(about[0], []).append(about[1])
        elif what == "flushed":
            disk.flush(about[0])
        else:
            acknowledged += (about[0],)
        for files in disk.states():
            key = hash((frozenset(files.items()), acknowledged))
            if key not in seen:
                seen.add(key)
                yield State(files, acknowledged, number + 1)
