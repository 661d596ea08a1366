"""Objects in a bucket of S3 (`s3://bucket/prefix`), Google (`gs://…`) or Azure (`az://…`).

The library is obstore. It finds credentials and endpoints as usual (environment variables, roles of
the machine), and they are never written anywhere.

Objects that a library wants as files are copied to a cache on this host, whole; later reads map the
copy. A library that writes files gets a folder of the cache, whose files are uploaded one by one.

Shards and policies stay where they were written, in `.data`; a manifest names the place. So a
version is published by one request, which creates its manifest.

A request whose answer was lost may have been carried out. So after an error, and if an object
"exists already", it is read again and compared.

Not of the spine: it does what `storage` says, with other means.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import from_url

from quiver.schemas.errors import (
    ConfigError,
    CorruptError,
    OutcomeUnknownError,
    RemoteError,
    ResourceError,
    printable,
    reason,
)
from quiver.stages.core.files import MOST_BYTES, replacing, sha256_of, storage_errors
from quiver.stages.core.threads import map_in_threads

from .storage import Stamp, Storage

_URL = re.compile(r"(s3|gs|az)://[\w.-]+(/[^?#]*)?")
_AT_ONCE = 256  # keys in one request to delete
_TIMEOUT = "120s"
"""For one request, with its body: a shard of a few hundred MB."""
_RETRIES = {"max_retries": 5, "retry_timeout": timedelta(seconds=180)}
"""A request cannot be interrupted by a signal, and is sent again only within this time."""
_PART_BYTES = 64 * 1024**2
_UPLOADS = ".uploads"
"""Folder of the cache with files that a library writes, until they are uploaded."""
_UPLOAD_SECONDS = 7 * 24 * 3600.0
_IN_USE_SECONDS = 3600.0
_MOST_TRIES = 3
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_METADATA_SERVICE = "169.254.169.254"
"""Asked for the machine's role if the environment holds no credentials."""
_STATUS_REFUSED = re.compile(r"\b40[134] [A-Z]")
_MANIFESTS: defaultdict[tuple[str, bytes], dict[str, bytes]] = defaultdict(dict)
"""Manifests that this process has read, by URL and `store.json`; they never change."""
CACHE_GIB = "QUIVER_CACHE_GIB"
DEFAULT_CACHE_GIB = 100.0


class Bucket(Storage):
    """Objects by key below one prefix of a bucket; see `Storage`. There is nothing to flush, and
    nothing to reclaim."""

    data_folder = ".data"
    is_foreign = False

    def __init__(self, url: str) -> None:
        self.url = url
        for name, text in os.environ.items():  # Google's are JSON
            if name.startswith(("AWS_", "AZURE_")) and not text.isprintable():
                problem = "holds a line break, or another character that no header may have"
                raise ConfigError(name, problem, next=f"export {name} without it")
        try:
            if not _URL.fullmatch(url):
                raise ValueError("is not the URL of a bucket")
            # obstore reads no environment for the client's options if one of them is given
            variables = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
            allowed = {os.environ.get(variable, "").lower() for variable in variables}
            client = {"timeout": _TIMEOUT, "allow_http": "true" in allowed}
            self._bucket = from_url(url, client_options=client, retry_config=_RETRIES)
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigError(
                f"store {_without_secrets(url)}",
                _first_line(error),
                next="name a bucket, as in s3://bucket/folder, and give the environment variables "
                "that its provider's tools read",
            ) from None
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._caches = home / "quiver/buckets"
        self._manifests: dict[str, bytes] = {}
        self._fetched: set[str] = set()
        """Keys of files that this process has fetched, or compared with the bucket."""
        self._free_bytes = 0.0
        """Bytes that can be fetched before the size of the cache is measured again."""
        self._cache = self._caches / hashlib.sha256(url.encode()).hexdigest()[:16]
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                str(self._cache),
                f"cannot hold copies of a bucket's files: {reason(error)}",
                next="export XDG_CACHE_HOME=FOLDER",
            ) from None

    @contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Turn errors of a request about `key` into typed ones. A missing object stays
        FileNotFoundError, and a failed condition obstore's own error."""
        name = f"{self.url}/{key}"
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", name) from None
        except exceptions.InvalidPathError as error:
            raise ResourceError(
                name,
                f"an object there cannot be listed: {_first_line(error)}",
                next="delete it with the tools of the bucket's provider: it is not the store's",
            ) from None
        except exceptions.BaseError as error:
            if _METADATA_SERVICE in str(error):
                raise ResourceError(
                    f"store {self.url}",
                    "there are no credentials for it: none in the environment, and the machine "
                    "names no role",
                    next="export those of deployments/docs/buckets.md",
                ) from None
            # a listing that is refused has no type of its own
            if isinstance(error, _REFUSED) or _STATUS_REFUSED.search(str(error)):
                raise ResourceError(
                    name,
                    f"the bucket refuses: {_first_line(error)}",
                    next="give this process the right to read, write, list and delete there; and "
                    "look if the bucket exists",
                ) from None
            raise RemoteError(
                name,
                f"the bucket does not answer: {_first_line(error)}",
                state="finished shards and all versions are kept.",
                next="run the same command again",
            ) from None

    # -- reading

    def read(self, key: str, most_bytes: int = MOST_BYTES) -> bytes:
        if key in self._manifests:
            return self._manifests[key]
        with self._asking(key):
            answer = obstore.get(self._bucket, key)
            size = answer.meta["size"]
            if size > most_bytes:
                problem = f"has {size} bytes, at most {most_bytes} are read"
                raise CorruptError(key, problem, next=f"delete {self.url}/{key}")
            raw = bytes(answer.bytes())
        if key == "store.json":
            self._manifests = _MANIFESTS[self.url, raw]
        elif key.endswith("/manifest.json"):
            self._manifests[key] = raw
        return raw

    def list(self, prefix: str) -> list[str]:
        with self._asking(prefix):
            listed = obstore.list_with_delimiter(self._bucket, prefix or None)
        paths = [*listed["common_prefixes"], *(entry["path"] for entry in listed["objects"])]
        return sorted(path.rpartition("/")[2] for path in paths if path != prefix)

    def files(self, prefix: str) -> dict[str, tuple[int, float]]:
        return {
            name: (entry["size"], entry["last_modified"].timestamp())
            for name, entry in sorted(self._entries(prefix).items())
        }

    def _entries(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        """Return what the bucket says of each object below `prefix`, by its name from there. A
        console's "folder" is an object without a name, and does not count."""
        start = len(prefix) + 1 if prefix else 0
        with self._asking(prefix):
            chunks = list(obstore.list(self._bucket, prefix or None))
        entries = {entry["path"][start:]: entry for chunk in chunks for entry in chunk}
        entries.pop("", None)
        return entries

    # -- copies on this host

    def local(self, key: str, names: Iterable[str] = (), *, again: bool = False) -> Path:
        keys = [f"{key}/{name}" for name in names] or [key]
        wanted = [each for each in keys if again or not self._is_fetched(each)]
        entries = self._entries(key) if len(wanted) > 1 else {}
        map_in_threads(
            lambda each: self._fetch(each, entries.get(each[len(key) + 1 :]), again), wanted
        )
        return self._cache / key

    def _is_fetched(self, key: str) -> bool:
        """Return True if this process has compared the copy. The copy counts as used now."""
        path = self._cache / key
        with suppress(OSError):
            if key in self._fetched:
                os.utime(path, (time.time(), path.stat().st_mtime))
                return True
        return False

    def _fetch(self, key: str, entry: Mapping[str, Any] | None, again: bool) -> None:
        """Copy an object to the cache, unless the copy there is the one that `entry` describes.
        None: the bucket is asked."""
        path = self._cache / key
        with storage_errors(self._cache), self._asking(key):
            answer = None
            if entry is None and path.exists():
                entry = obstore.head(self._bucket, key)
            elif entry is None:  # a small file needs no other request
                answer = obstore.get(self._bucket, key)
                entry = answer.meta
            size, changed_at = entry["size"], _time_of(entry)
            copied = None
            with suppress(FileNotFoundError):
                copied = path.stat().st_size, path.stat().st_mtime
            if again or copied != (size, changed_at):
                self._make_room(size)
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path, durable=False) as file:
                    done = file.write(answer.bytes()) if answer and size <= _PART_BYTES else 0
                    # the time limit is that of one request
                    for start in range(done, size, _PART_BYTES):
                        end = min(size, start + _PART_BYTES)
                        file.write(obstore.get_range(self._bucket, key, start=start, end=end))
        os.utime(path, (time.time(), changed_at))
        self._fetched.add(key)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the copies that were not used for longest, if the cache is full. Those used in the
        last hour stay: a library may be about to open them."""
        self._free_bytes -= num_bytes
        if self._free_bytes >= 0:
            return
        copies = []
        for folder, _, names in os.walk(self._caches):
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    copies.append((status.st_atime, status.st_size, path))
        text, most_bytes = os.environ.get(CACHE_GIB, str(DEFAULT_CACHE_GIB)), 0.0
        with suppress(ValueError):
            most_bytes = float(text) * 1024**3
        if not most_bytes > 0:
            problem = f"{printable(text)} is not a number above 0"
            raise ConfigError(CACHE_GIB, problem, next=f"export {CACHE_GIB}={DEFAULT_CACHE_GIB:g}")
        excess = sum(size for _, size, _ in copies) + num_bytes - 0.9 * most_bytes
        for used_at, size, path in sorted(copies):
            seconds_to_stay = _UPLOAD_SECONDS if _UPLOADS in path.parts else _IN_USE_SECONDS
            if excess > 0 and time.time() - used_at >= seconds_to_stay:
                path.unlink(missing_ok=True)
                excess -= size
        self._free_bytes = 0.1 * most_bytes

    # -- writing

    def put_if_absent(self, key: str, data: bytes, **flushed: bool) -> Stamp | None:
        failure = None
        for _ in range(_MOST_TRIES):
            try:
                with self._asking(key):
                    return _stamp(obstore.put(self._bucket, key, bytes(data), mode="create"))
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                failure = None
            except RemoteError as error:
                failure = error
            there = self._read_back(key, failure)
            if there is not None:
                return there[0] if there[1] == bytes(data) else None
            # not written, or deleted meanwhile
        raise failure or FileNotFoundError(errno.ENOENT, "it cannot be written", key)

    def _read_back(self, key: str, failure: RemoteError | None) -> tuple[Stamp, bytes] | None:
        """Read what is there after a write that may have failed. Returns the stamp and the bytes;
        None if there is no object. Raises OutcomeUnknownError if that cannot be read either."""
        try:
            with suppress(FileNotFoundError), self._asking(key):
                answer = obstore.get(self._bucket, key)
                return _stamp(answer.meta), bytes(answer.bytes())
        except RemoteError as error:
            if failure is None:
                raise
            raise OutcomeUnknownError(
                f"{self.url}/{key}",
                f"it may have been written, or not: {error.message}",
                state="what was there before is intact.",
                next="run the same command again: it looks first",
            ) from error
        return None

    def put(
        self, key: str, data: bytes, stamp: Stamp | None = None, **flushed: bool
    ) -> Stamp | None:
        mode: Any = "overwrite"
        if stamp is not None:
            mode = dict(zip(("e_tag", "version"), stamp, strict=False))
        self._fetched.discard(key)
        with self._asking(key):
            try:
                return _stamp(obstore.put(self._bucket, key, bytes(data), mode=mode))
            except exceptions.PreconditionError:
                there = self._read_back(key, None)
                return there[0] if there and there[1] == bytes(data) else None

    def folder(self, prefix: str) -> Path:
        path = self._cache / _UPLOADS / prefix
        path.mkdir(parents=True, exist_ok=True)
        return path

    def put_file(self, key: str, file: Path | None = None) -> tuple[int, str]:
        written = self._cache / _UPLOADS / key
        self._make_room(0)
        for tries_left in reversed(range(_MOST_TRIES)):
            try:
                with self._asking(key):
                    answer = obstore.put(self._bucket, key, file or written)
                break
            except RemoteError:  # large files go in parts; the answer to one may be lost
                if not tries_left:
                    raise
        if file is None:
            os.utime(written, (time.time(), _time_of(answer)))  # so it is not fetched again
            (self._cache / key).parent.mkdir(parents=True, exist_ok=True)
            file = written.replace(self._cache / key)
        return file.stat().st_size, sha256_of(file)

    def delete(self, *keys: str) -> None:
        names = []
        if folders := [key for key in keys if key.endswith("/")]:
            # one listing for several folders side by side
            place = os.path.commonpath(folders)
            names = [os.path.join(place, name) for name in self._entries(place)]
        below = []
        for key in keys:
            below += [n for n in names if n.startswith(key)] if key.endswith("/") else [key]
            shutil.rmtree(self._cache / key, ignore_errors=True)
            with suppress(OSError):
                (self._cache / key).unlink()
        self._fetched.difference_update(below)
        for start in range(0, len(below), _AT_ONCE):
            with suppress(FileNotFoundError), self._asking(below[start]):
                obstore.delete(self._bucket, below[start : start + _AT_ONCE])

    # -- versions

    def publish(
        self, work: str, worker: str, target: str, manifest: bytes, sizes: dict[str, int]
    ) -> bool:
        there = self.files(work)
        for name, size in sizes.items():
            if name not in there or there[name][0] != size:
                raise FileNotFoundError(errno.ENOENT, "it was taken away", f"{work}/{name}")
        key = f"{target}/manifest.json"
        if self.put_if_absent(key, manifest) is None:
            return False
        self._manifests[key] = manifest
        return True


def _stamp(answer: Mapping[str, Any]) -> Stamp:
    # Google has numbers of generations
    version = answer["version"] or ""
    return (answer["e_tag"], version) if version.isdecimal() else (answer["e_tag"],)


def _time_of(answer: Mapping[str, Any]) -> int:
    """Return the modification time that a copy of this object has, which stands for its stamp."""
    e_tag = (answer["e_tag"] or "").strip('"')
    return int(hashlib.sha256(e_tag.encode()).hexdigest()[:7], 16)


def _first_line(error: Exception) -> str:
    # long enough for the status behind the URL
    return printable(_without_secrets(str(error).strip().partition("\n")[0]), 500)


def _without_secrets(text: str) -> str:
    """Return a text without what stands before @, or behind ?, in its URLs."""
    return re.sub(r"(?<=://)[^/@\s]*@|\?[^\s)]*", "", text)
