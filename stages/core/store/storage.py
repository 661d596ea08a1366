"""Storage: objects by key, in a folder of a POSIX file system or in a bucket.

Other modules name objects by key (`arith/rollouts/v000003/manifest.json`). They take a path only
from `local` and `folder`, for libraries that read or write files themselves.

An object is written once, and appears whole or not at all. `put` is for the few that may be
replaced: leases, caches and notes of progress. `publish` makes a version appear in one step.

`disk` and `bucket` have these operations; `places` opens one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from quiver.schemas.errors import printable
from quiver.schemas.fields import require_names
from quiver.schemas.manifest import digest
from quiver.schemas.plain import read_json
from quiver.stages.core.files import regular_file, sha256_of
from quiver.stages.core.user_cache import hash_stored

_NUMBER = re.compile(r"([1-9][0-9]{6,11}|[0-9]{6})(.*)")
Stamp = tuple[str, ...]
"""Changes with every write of an object."""


class Storage(Protocol):
    """Objects by key below one folder or URL. Missing objects raise FileNotFoundError."""

    url: str
    """The folder or URL, as `--store` names it."""
    data_folder: str
    """Name of the folder, below each kind, in which shards and policies are written before they are
    published. `.work` on a disk: `publish` moves them into the version's folder. `.data` in a
    bucket: they stay."""
    is_foreign: bool
    """True if another user presumably wrote the store, so its files are parsed with care."""

    # -- reading

    def read(self, key: str, most_bytes: int = ...) -> bytes:
        """Return all bytes of a small object.

        Raises CorruptError if it has more than `most_bytes` or is not a regular file.
        """
        ...

    def local(self, key: str, names: Iterable[str] = (), *, again: bool = False) -> Path:
        """Return the path of an object on this host; with `names`, of the folder with these files
        below the prefix `key`. Nothing there may be changed.

        With `again`, a copy is replaced by a new one.
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, sorted; empty if it does not exist.

        Objects being written are not listed, nor what a killed process left of one. Raises
        CorruptError if `prefix`, or a name above it, exists and is not a folder of the store.
        """
        ...

    def files(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Return the size in bytes, and the time of the last write in seconds since 1970, of every
        object below `prefix`, by its name from there, sorted. Raises CorruptError as `list`."""
        ...

    # -- writing

    def put_if_absent(
        self, key: str, data: bytes, *, flush_name: bool = False, durable: bool = True
    ) -> Stamp | None:
        """Write an object if it does not exist, and return its stamp; return None if it does.

        Args:
            flush_name: flush its name too, so that it survives a power loss from now on.
            durable: if false, it need not survive a power loss.
        """
        ...

    def put(
        self,
        key: str,
        data: bytes,
        stamp: Stamp | None = None,
        *,
        durable: bool = True,
    ) -> Stamp | None:
        """Write an object, replacing an existing one; with `stamp`, only one that still has it.

        If `durable` is false, it need not survive a power loss. Returns its new stamp; None if the
        object was replaced or deleted meanwhile.
        """
        ...

    def flush(self, prefix: str) -> None:
        """Flush the names directly below `prefix`, which other processes may not have flushed,
        before anything is built on them."""
        ...

    def folder(self, prefix: str) -> Path:
        """Return a folder of this host, made if it does not exist, for a library that writes files.
        They become objects below `prefix` by `put_file`."""
        ...

    def put_file(self, key: str, file: Path | None = None) -> tuple[int, str]:
        """Turn a file that a library wrote into `folder`, or a copy of `file`, into an object that
        survives a power loss and that other users can read. Returns its size and sha256."""
        ...

    def delete(self, *keys: str) -> None:
        """Delete objects, and for a key that ends in a slash all objects below it, as far as they
        exist, in this order."""
        ...

    # -- versions

    def publish(
        self, work: str, worker: str, target: str, manifest: bytes, sizes: dict[str, int]
    ) -> bool:
        """Publish the objects below `work`, with this manifest, as the version `target`.

        On a disk one rename moves them to a folder that no other process writes, where the manifest
        is added; a second one makes that the version. In a bucket they stay, and one request
        creates the manifest, if it is absent.

        Args:
            work: prefix of the unfinished work in `data_folder`, listed at the top of `writer`.
            worker: name of this process.
            sizes: bytes of the files that it must have, by name.

        Returns:
            False if `target` is taken: call again with another target.

        Raises:
            FileNotFoundError: another process took the folder or its files away.
            OutcomeUnknownError: the version may be published, but a power loss may undo it.
        """
        ...

    def reclaim(self, work: str) -> None:
        """Take back what a dead or sleeping process left while it published `work`. A process that
        wakes in the middle of publishing then fails."""
        ...


def list_numbers(storage: Storage, prefix: str, ending: str = "") -> list[int]:
    """Return the numbers of objects directly below `prefix`, named `000001` and `ending`, rising.
    Objects with other names are not the store's."""
    matches = map(_NUMBER.fullmatch, storage.list(prefix))
    return sorted(int(match[1]) for match in matches if match and match[2] == ending)


def with_checksum(fields: dict[str, Any]) -> bytes:
    """Encode the fields of a small object, and their checksum."""
    return json.dumps({**fields, "checksum": digest(fields)}).encode()


def read_checked(storage: Storage, key: str) -> dict[str, Any]:
    """Return the fields of an object that `with_checksum` encoded. Raises ValueError, KeyError,
    AttributeError or TypeError if it is damaged."""
    fields = read_json(storage.read(key))
    checksum = fields.pop("checksum")
    if checksum != digest(fields):
        raise ValueError(f"checksum expected {printable(checksum)}, found {digest(fields)}")
    return fields


def use_local(
    storage: Storage,
    key: str,
    use: Callable[[Path], Any],
    names: Iterable[str] = (),
    *,
    again: bool = False,
) -> Any:
    """Return what `use` makes of the path that `Storage.local` returns.

    If somebody deletes the copies meanwhile, they are fetched again. Raises FileNotFoundError.
    """
    for _ in range(3):
        with suppress(FileNotFoundError):
            return use(storage.local(key, names, again=again))
    return use(storage.local(key, names, again=again))


def size_and_sha256(
    storage: Storage,
    key: str,
    expected: tuple[int, str] | None = None,
    *,
    remembered: bool = False,
) -> tuple[int, str]:
    """Return an object's size in bytes and its sha256, as 64 hex digits.

    If they are not `expected`, its copy on this host may be damaged, so a new one counts. Raises
    CorruptError if it is not a regular file.

    Args:
        remembered: a hash of a large file that this host remembers is enough, if it is the one
            `expected`. False: all bytes are read.
    """

    def measure(path: Path, hash_of: Callable[[Path], str] = sha256_of) -> tuple[int, str]:
        return regular_file(path, key).stat().st_size, hash_of(path)

    hash_of = hash_stored if remembered else sha256_of
    first = use_local(storage, key, partial(measure, hash_of=hash_of))
    return first if expected in (None, first) else use_local(storage, key, measure, again=True)


def read_table(storage: Storage, key: str) -> pa.Table:
    """Read an Arrow file, mapped into memory.

    Raises pyarrow.ArrowException if it cannot be parsed.
    """
    file = use_local(storage, key, lambda path: pa.memory_map(str(regular_file(path, key))))
    try:
        table = pa.ipc.open_file(file).read_all()
        require_names(table.schema)
        return table
    except OSError as error:
        if error.errno is None:  # pyarrow raises this for a file that contradicts itself
            raise pa.ArrowInvalid(str(error)) from None
        raise
