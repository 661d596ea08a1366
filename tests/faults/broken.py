"""Broken files, drawn from a seed, and what must hold of whoever reads them.

A file is broken in its text or in its meaning: one to three of its parts are replaced, taken out,
doubled or nested, and where it carries a checksum, that fits again. Whoever reads it must give an
answer or a typed error: within seconds, within 256 MiB, and with nothing else changed.

    random = Random(7)
    text = to_text(mutated(random, json.loads(path.read_bytes())))
    path.write_bytes(sealed(text))
    error = error_of(lambda: store.open(ref))     # a QuiverError, or None
"""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from quiver.schemas.errors import QuiverError
from quiver.schemas.manifest import digest

MOST_SECONDS = 30
MOST_BYTES = 256 * 1024 * 1024
DEPTHS = (70, 300, 900, 5000)


class Raw(str):
    """Text that stands in a JSON file as it is."""


VALUES = (
    *("null", "true", "false", "0", "-1", "1", "7", "1.5", "-0.0", "1e308", "1e400", "-1e400"),
    *("NaN", "Infinity", "-Infinity", str(2**31), str(2**63), str(-(2**63)), str(2**64)),
    *("9" * 400, "9" * 4000, "9" * 5000, "1" + "0" * 300 + ".5"),
    *('""', '"x"', '"0"', '"null"', '"\\u0000"', '"a\\u0000b"', '"\\ud800"', '"\\udfff\\ud800"'),
    *('"\\u001b[31m"', '"\\u202e"', '"../../etc/passwd"', '"/dev/zero"', '"*"', '"latest"'),
    *(f'"{"x" * 300}"', f'"{"é" * 70_000}"', f'"{"9" * 5000}"', '"2026-13-45T99:99:99"'),
    *("[]", "{}", "[null]", "[[]]", "[{}]", '[1, "a"]', '["a", "a"]', '{"a": 1}', '{"a": {}}'),
    *('{"a": 1, "a": 2}', '{"": null}', '{"\\u0000": 1}', '{"\\ud800": 1}', '{"format": 1}'),
    *(json.dumps([0] * 50_000), json.dumps({f"k{i}": 0 for i in range(5000)})),
    *("[" * depth + "]" * depth for depth in DEPTHS),
    *('{"a":' * depth + "1" + "}" * depth for depth in DEPTHS),
)
"""JSON, and what is nearly JSON, of every wrong kind."""


def to_text(node: Any) -> str:
    """`node` as JSON text; a `Raw` in it stands for itself."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{to_text(node[key])}" for key in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(to_text, node)) + "]"
    return json.dumps(node)


def sealed(text: str) -> bytes:
    """The JSON object in `text` with the checksum that fits it, where there can be one."""
    try:
        fields = json.loads(text)
        checksum = digest(fields)
    except (ValueError, RecursionError):
        return text.encode("utf-8", "surrogatepass")
    if isinstance(fields, dict):
        comma = "," if fields else ""
        text = f'{text.rstrip()[:-1]}{comma}"checksum":"{checksum}"}}'
    return text.encode("utf-8", "surrogatepass")


def mutated(random: Random, document: Any, extra: tuple[str, ...] = ()) -> Any:
    """A copy of `document` with one to three changes. `extra`: more JSON texts to put in."""
    holder = [copy.deepcopy(document)]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change(random, holder, (*extra, *VALUES) if random.random() < 0.7 else extra or VALUES)
    return holder[0]


def _change(random: Random, holder: list[Any], values: tuple[str, ...]) -> None:
    """One change somewhere below `holder[0]`."""
    parent: Any = holder
    key: Any = 0
    while isinstance(parent[key], dict | list) and parent[key] and random.random() < 0.85:
        parent = parent[key]
        key = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    change = random.choice(("put", "put", "put", "swap", "drop", "rename", "add", "wrap", "double"))
    if change == "put" or (parent is holder and change in ("drop", "rename", "double")):
        parent[key] = Raw(random.choice(values))
    elif change == "swap":
        parent[key] = copy.deepcopy(random.choice(list(_nodes(holder[0]))))
    elif change == "drop":
        del parent[key]
    elif change == "rename" and isinstance(parent, dict):
        parent[random.choice((key.upper(), f"{key} ", "", "checksum", "format"))] = parent.pop(key)
    elif change == "add" and isinstance(parent[key], dict):
        parent[key][random.choice(("x", "role", "", "\0", "checksum"))] = Raw(random.choice(values))
    elif change == "add" and isinstance(parent[key], list):
        parent[key].append(Raw(random.choice(values)))
    elif change == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    elif change == "double":
        pairs = f"{json.dumps(key)}:{to_text(parent[key])}"
        others = {name: parent[name] for name in parent if name != key}
        beside = to_text(others)[1:-1]
        text = Raw("{" + ",".join(filter(None, (pairs, beside, pairs))) + "}")
        if not _replace(holder, parent, text):
            holder[0] = text
    else:
        parent[key] = random.choice(({"a": parent[key]}, [parent[key]], Raw(to_text(parent[key]))))


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in node.values() if isinstance(node, dict) else node if _is_list(node) else ():
        yield from _nodes(child)


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _replace(container: Any, target: Any, text: Raw) -> bool:
    """Put `text` in the place of the container `target`, wherever below `container` it is."""
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        child = container[key]
        if child is target:
            container[key] = text
            return True
        if isinstance(child, dict | list) and _replace(child, target, text):
            return True
    return False


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


@contextmanager
def within_bounds() -> Iterator[None]:
    """Around one reading: it ends by itself, and takes no more than 256 MiB beside what was there
    before."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"not done within {MOST_SECONDS} s")

    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what there is now
    before = _memory("VmHWM")
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    grown = _memory("VmHWM") - before
    assert grown <= MOST_BYTES, f"{grown >> 20} MiB"


def _memory(name: str) -> int:
    """Bytes, of a line in this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def error_of(read: Callable[[], object]) -> QuiverError | None:
    """The typed error that `read` raises, or None; any other exception is a defect."""
    with within_bounds():
        try:
            read()
        except QuiverError as error:
            assert error.code != "E-INTERNAL", error
            assert error.next and error.message, error
            return error
        except SystemExit as end:
            assert end.code in range(2, 11), end
    return None


def snapshot(folder: Path, passed_over: tuple[str, ...] = ()) -> dict[str, tuple]:
    """What lies in `folder`, by path: size, time of the last change and inode. `passed_over`:
    names of folders and files that readers may write."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        if not set(path.relative_to(folder).parts) & set(passed_over):
            status = path.lstat()
            is_folder = path.is_dir()
            times = () if is_folder else (status.st_mtime_ns, status.st_size)
            entries[str(path.relative_to(folder))] = (status.st_ino, *times)
    return entries
