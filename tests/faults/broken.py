"""Broken files, drawn from a seed, and what must hold of whoever reads them.

A file is broken in its text or in its meaning: one to three of its parts are replaced, taken out,
doubled or nested, and where it carries a checksum, that fits again. Whoever reads it must give an
answer or a typed error: within seconds, within 256 MiB, and with nothing else changed.

    random = Random(7)
    text = to_text(mutated(random, json.loads(path.read_bytes())))
    path.write_bytes(sealed(text))
    error = error_of(lambda: store.open(ref))     # a QuiverError, or None
    num_refused = fuzz(cases, 1000)               # many such files, each with its readers
"""

from __future__ import annotations

import copy
import json
import re
import signal
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from quiver.schemas.errors import QuiverError, unexpected
from quiver.schemas.manifest import digest

MOST_SECONDS = 120
MOST_BYTES = 256 * 1024 * 1024
DEPTHS = (70, 300, 900, 5000)


class Raw(str):
    """Text that stands in a JSON file as it is."""


VALUES = (
    *r"""
    null true false 0 -1 1 7 1.5 -0.0 1e308 1e400 -1e400 NaN Infinity -Infinity
    "" "x" "0" "null" "\u0000" "a\u0000b" "\ud800" "\udfff\ud800" "\u001b[31m" "\u202e"
    "../../etc/passwd" "/dev/zero" "*" "latest" "2026-13-45T99:99:99"
    [] {} [null] [[]] [{}] [1,"a"] ["a","a"] {"a":1} {"a":{}} {"a":1,"a":2}
    {"":null} {"\u0000":1} {"\ud800":1} {"format":1}
    """.split(),  # noqa: SIM905
    *map(str, (2**31, 2**63, -(2**63), 2**64)),
    *("9" * 400, "9" * 4000, "9" * 5000, "1" + "0" * 300 + ".5"),
    *(f'"{"x" * 300}"', f'"{"é" * 70_000}"', f'"{"9" * 5000}"'),
    *(json.dumps([0] * 50_000), json.dumps({f"k{i}": 0 for i in range(5000)})),
    *("[" * depth + "]" * depth for depth in DEPTHS),
    *('{"a":' * depth + "1" + "}" * depth for depth in DEPTHS),
)
"""JSON, and what is nearly JSON, of every wrong kind."""


class Doubled(dict):
    """An object in which the key `twice` stands twice."""

    twice: str = ""


def members(node: dict[str, Any]) -> list[tuple[str, Any]]:
    """Keys and values, as a file has them."""
    twice = node.twice if isinstance(node, Doubled) else ""
    return [*node.items(), *([(twice, node[twice])] if twice in node else [])]


def to_text(node: Any, between: str = ":") -> str:
    """`node` as JSON text, or with ` = ` between key and value as TOML has it; a `Raw` in it stands
    for itself."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, dict):
        pairs = (
            f"{json.dumps(key)}{between}{to_text(child, between)}" for key, child in members(node)
        )
        return "{" + ",".join(pairs) + "}"
    if isinstance(node, list):
        return "[" + ",".join(to_text(child, between) for child in node) + "]"
    return json.dumps(node)


def to_bytes(node: Any, between: str = ":") -> bytes:
    return to_text(node, between).encode("utf-8", "surrogatepass")


def sealed(text: str) -> bytes:
    """The JSON object in `text` with the checksum that fits it, where there can be one."""
    try:
        fields = json.loads(text)
        checksum = digest(fields)
    except (ValueError, RecursionError):
        return to_bytes(Raw(text))
    if isinstance(fields, dict):
        comma = "," if fields else ""
        text = f'{text.rstrip()[:-1]}{comma}"checksum":"{checksum}"}}'
    return to_bytes(Raw(text))


def mutated(
    random: Random, document: Any, extra: tuple[str, ...] = (), values: tuple[str, ...] = VALUES
) -> Any:
    """A copy of `document` with one to three changes. `values`: texts to put in; `extra`: some that
    are put in more often."""
    holder = [copy.deepcopy(document)]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change(random, holder, extra if extra and random.random() < 0.4 else values)
    return holder[0]


def _change(random: Random, holder: list[Any], values: tuple[str, ...]) -> None:
    """One change somewhere below `holder[0]`."""
    path = [(holder, 0)]
    while True:
        parent, key = path[-1]
        child = parent[key]
        if not isinstance(child, dict | list) or not child or random.random() > 0.85:
            break
        names = list(child) if isinstance(child, dict) else range(len(child))
        path.append((child, random.choice(names)))
    change = random.choice(("put", "put", "put", "swap", "drop", "rename", "add", "wrap", "double"))
    value = Raw(random.choice(values))
    is_root = len(path) == 1
    if change == "swap":
        parent[key] = copy.deepcopy(random.choice(list(_nodes(holder[0]))))
    elif change == "drop" and not is_root:
        del parent[key]
    elif change == "rename" and isinstance(parent, dict):
        parent[random.choice((key.upper(), f"{key} ", "", "checksum", "format"))] = parent.pop(key)
    elif change == "add" and isinstance(parent[key], dict):
        parent[key][random.choice(("x", "role", "", "\0", "checksum"))] = value
    elif change == "add" and isinstance(parent[key], list):
        parent[key].append(value)
    elif change == "double" and isinstance(parent, list) and not is_root:
        parent.append(copy.deepcopy(parent[key]))
    elif change == "double" and isinstance(parent, dict):
        grandparent, parent_key = path[-2]
        grandparent[parent_key] = Doubled(parent)
        grandparent[parent_key].twice = key
    elif change == "wrap":
        parent[key] = random.choice(({"a": parent[key]}, [parent[key]]))
    else:
        parent[key] = value


def _nodes(node: Any) -> Iterator[Any]:
    """All that is in a document, itself too."""
    yield node
    for child in node.values() if isinstance(node, dict) else node if type(node) is list else ():
        yield from _nodes(child)


def garbled(random: Random, raw: bytes) -> bytes:
    """`raw` with some bytes flipped, cut, doubled, or in another encoding."""
    position = random.randrange(len(raw) + 1)
    end = min(len(raw), position + random.choice((1, 2, 8, 64)))
    return random.choice(
        (
            raw[:position],
            raw[:position] + raw[end:],
            raw[:position] + raw[position:end] * 2 + raw[end:],
            raw[:position] + random.randbytes(end - position) + raw[end:],
            raw[:position] + b"\0" * (end - position) + raw[end:],
            raw[:position] + b"\xff\xfe" + raw[position:],
            b"\xef\xbb\xbf" + raw,
            raw.decode("utf-8", "replace").encode("utf-16"),
            b"",
        )
    )


# -- what must hold


def error_of(read: Callable[[], object]) -> QuiverError | None:
    """The typed error that `read` raises, or None; any other exception is a defect, and so is a
    read that does not end by itself, or takes more than 256 MiB beside what was there before."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"not done within {MOST_SECONDS} s")

    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what there is now
    before = _peak_bytes()
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(MOST_SECONDS)
    typed = None
    try:
        read()
    except (QuiverError, OSError) as error:
        typed = error if isinstance(error, QuiverError) else unexpected("quiver", error)
        if typed.code == "E-INTERNAL":
            raise
        assert typed.next and typed.message, typed
    except SystemExit as end:
        assert end.code in range(2, 11), end
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    grown = _peak_bytes() - before
    assert grown <= MOST_BYTES, f"{grown >> 20} MiB"
    return typed


def _peak_bytes() -> int:
    """The most memory that this process had since it was asked to forget that."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) * 1024


def snapshot(folder: Path, passed_over: Collection[str] = ()) -> dict[str, tuple]:
    """What lies in `folder`, by path: size, time of the last change and inode. `passed_over`:
    names of folders and files that readers may write."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        if not set(path.relative_to(folder).parts) & set(passed_over):
            status = path.lstat()
            times = () if path.is_dir() else (status.st_mtime_ns, status.st_size)
            entries[str(path.relative_to(folder))] = (status.st_ino, *times)
    return entries


@dataclass
class Case:
    """Broken files, and who reads them."""

    readers: dict[str, Callable[[], object]]
    """By name; a later one does not run after an error if `in_order`."""
    state: Callable[[], object]
    """What they must leave as it is."""
    text: Callable[[], object]
    """What was broken, for whom it may concern."""
    require: Callable[[dict[str, QuiverError | None]], None] = lambda errors: None
    """Is given each reader's error."""
    in_order: bool = False


def fuzz(cases: Generator[Case], count: int) -> int:
    """Each case before its readers. How many of these refused theirs."""
    num_refused = 0
    with closing(cases):
        for number, case in zip(range(count), cases, strict=False):
            before = case.state()
            errors = {}
            for name, read in case.readers.items():
                try:
                    errors[name] = error_of(read)
                except BaseException as error:
                    error.add_note(f"case {number}, {name}: {str(case.text())[:3000]}")
                    raise
                if case.in_order and errors[name]:
                    break
            assert case.state() == before
            case.require(errors)
            num_refused += sum(error is not None for error in errors.values())
    return num_refused
