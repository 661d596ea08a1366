"""The store: a folder of immutable versions, each complete when it is visible.

    STORE/store.json                          format, id
    STORE/<run>/<kind>/v000003/               manifest.json + part-00000.arrow …
    STORE/<run>/<kind>/.staging/<run_key>/    finished shards of an unfinished stage
    STORE/<run>/tags/<name>                   one reference, moved by compare-and-swap; its journal is beside it

Reading checks size and sha256 before it parses, and maps files into memory. It never falls back in
silence: when the newest version is torn, `latest` is an error. Writing is
`quiver.stages.common.work`.

    store = Store("store")
    rollouts = store.open("arith/rollouts@latest")
    rollouts.manifest.metrics; rollouts.table(); rollouts.to_datasets()
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import re
import shlex
import uuid
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quiver.schemas import refs
from quiver.schemas.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    CorruptError,
    LineageError,
    QuiverError,
    SchemaError,
)
from quiver.schemas.manifest import Input, Manifest, from_json
from quiver.schemas.refs import Ref

from . import files, tags

if TYPE_CHECKING:
    import datasets

FORMAT = 1
log = logging.getLogger(__name__)
_VERSION = re.compile(r"v(\d{6,})")


def schema_module(kind: str):
    """The module of `schemas` that describes `kind`; only for kinds that are tables."""
    return importlib.import_module(f"quiver.schemas.{kind}")


class Version:
    """One immutable version: its reference, folder and manifest; the data on demand, checked before
    it is parsed."""

    def __init__(self, ref: Ref, path: Path) -> None:
        self.ref, self.path = ref, path
        self._checked: set[str] = set()

    def __repr__(self) -> str:
        return f"Version({str(self.ref)!r})"

    @cached_property
    def manifest(self) -> Manifest:
        """What the version says of itself; CorruptError when that is torn or belongs elsewhere."""
        try:
            raw = (self.path / "manifest.json").read_bytes()
        except FileNotFoundError:
            raise self.corrupt("manifest.json", "is missing") from None
        found = from_json(raw, str(self.ref))
        if found.ref != str(self.ref):
            raise self.corrupt("manifest.json", f"expected {self.ref}, found {found.ref}")
        return found

    def as_input(self, role: str) -> Input:
        """The manifest entry of a version that was made of this one."""
        return Input(role=role, ref=str(self.ref), content_hash=self.manifest.content_hash)

    def verify(self, prefix: str = "") -> None:
        """Check size and sha256 of every file whose name starts with `prefix`; each once a process.
        CorruptError."""
        for entry in self.manifest.files:
            if entry.name.startswith(prefix) and entry.name not in self._checked:
                self._verify_file(entry.name, entry.bytes, entry.sha256)
                self._checked.add(entry.name)

    def _verify_file(self, name: str, size: int, sha256: str) -> None:
        path = self.path / name
        if not path.is_file() or path.is_symlink():
            raise self.corrupt(name, "is missing")
        if path.stat().st_size != size:
            raise self.corrupt(name, f"expected {size} bytes, found {path.stat().st_size}")
        found = files.sha256(path)
        if found != sha256:
            raise self.corrupt(name, f"sha256 expected {sha256[:12]}…, found {found[:12]}…")

    def corrupt(self, name: str, what: str) -> CorruptError:
        """The error that file `name` of this version is not what was written."""
        return CorruptError(
            f"{self.ref} {name}",
            what,
            state="other versions are not touched by this; nothing was changed.",
            next=f"quiver verify {self.ref}",
        )

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """All rows in order, mapped into memory (nothing is copied). [rows] with the kind's
        schema."""
        self.verify()
        parts = [entry for entry in self.manifest.files if entry.name.endswith(".arrow")]
        tables = [
            pa.ipc.open_file(pa.memory_map(str(self.path / entry.name))).read_all()
            for entry in parts
        ]
        for entry, table in zip(parts, tables, strict=True):
            if table.num_rows != entry.rows:
                raise self.corrupt(
                    entry.name, f"expected {entry.rows} rows, found {table.num_rows}"
                )
        whole = pa.concat_tables(tables)
        return whole.select(columns) if columns else whole

    def head(self, columns: list[str], most_bytes: int) -> pa.Table:
        """These columns of the first shards, as many as have `most_bytes` together and at least
        one; checked, then mapped."""
        tables: list[pa.Table] = []
        for entry in self.manifest.files:
            most_bytes -= entry.bytes
            if tables and most_bytes < 0:
                break
            self.verify(entry.name)
            tables.append(
                pa.ipc.open_file(pa.memory_map(str(self.path / entry.name)))
                .read_all()
                .select(columns)
            )
        return pa.concat_tables(tables)

    def to_datasets(self) -> datasets.Dataset:
        """The same rows as a `datasets.Dataset` over the mapped files, without copying."""
        import datasets
        from datasets.table import ConcatenationTable, InMemoryTable

        return datasets.Dataset(
            ConcatenationTable.from_tables(
                [InMemoryTable(self.table().replace_schema_metadata(None))]
            )
        )


class Store:
    """A folder of versions. `written` holds the references that this object committed (the others
    were cache hits)."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        self.path = Path(path).expanduser().absolute()
        self.written: set[str] = set()
        marker = self.path / "store.json"
        if not marker.exists():
            if not create:
                raise ConfigError(
                    f"store {self.path}",
                    "there is no store here",
                    next="give --store PATH, or run a recipe first",
                )
            if self.path.is_dir() and any(
                not path.name.startswith("store.json") for path in self.path.iterdir()
            ):
                raise ConfigError(
                    f"store {self.path}",
                    "the folder holds other things",
                    next="name an empty or new folder",
                )
            with files.storage(f"store {self.path}"):
                files.make_folder(self.path)
                files.write_bytes(
                    marker, json.dumps({"format": FORMAT, "id": str(uuid.uuid4())}).encode()
                )
        try:
            about = json.loads(marker.read_bytes())
            newer = about["format"] != FORMAT
        except (ValueError, KeyError, TypeError):
            whole = json.dumps({"format": FORMAT, "id": str(uuid.uuid4())})
            help = f"write {whole} into {marker}, the versions need no more"
            raise CorruptError(
                f"store {self.path}", "store.json can not be read", next=help
            ) from None
        if newer:
            raise CorruptError(
                f"store {self.path}",
                f"format {about['format']!r} is newer than {FORMAT}",
                next="update Quiver",
            )

    # -- reading

    def runs(self) -> list[str]:
        """Names of all runs, sorted."""
        return sorted(
            p.name for p in self.path.iterdir() if p.is_dir() and refs.NAME.fullmatch(p.name)
        )

    def numbers(self, run: str, kind: str) -> list[int]:
        """Version numbers of one kind in one run, rising."""
        folder = self.folder(run, kind)
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(int(match[1]) for match in map(_VERSION.fullmatch, names) if match)

    def refs(self, run: str | None = None, kind: str | None = None) -> Iterator[Ref]:
        """References of all visible versions, by run, kind and number."""
        for name in [run] if run else self.runs():
            for each in [kind] if kind else refs.KINDS:
                yield from (Ref(name, each, number) for number in self.numbers(name, each))

    def versions(self, run: str | None = None, kind: str | None = None) -> Iterator[Version]:
        """Every visible version, by run, kind and number."""
        return map(self._version, self.refs(run, kind))

    def folder(self, run: str, kind: str) -> Path:
        """The folder of one kind in one run, whether it exists or not."""
        return self.path / refs.check_name(run, "run") / kind

    def resolve(self, ref: str | Ref, run: str | None = None) -> Ref:
        """The reference with its number. `latest` is the highest number; a tag is what it points
        at. LineageError."""
        parsed = refs.parse(ref, run)
        if isinstance(parsed.version, int):
            if not (self.path / parsed.folder).is_dir():
                raise self._nowhere(parsed, "there is no such version")
            return parsed
        if parsed.version == "latest":
            numbers = self.numbers(parsed.run, parsed.kind)
            if not numbers:
                raise self._nowhere(parsed, f"run {parsed.run} has no {parsed.kind} yet")
            return parsed._replace(version=numbers[-1])
        target = tags.read(self._tags(parsed.run), parsed.version)
        if target is None:
            raise self._nowhere(parsed, f"run {parsed.run} has no tag {parsed.version}")
        found = refs.parse(target)
        if found.kind != parsed.kind:
            raise self._nowhere(parsed, f"tag {parsed.version} points at {found}")
        return self.resolve(found)

    def open(self, ref: str | Ref, run: str | None = None) -> Version:
        """The version that `ref` names, its manifest checked. LineageError, CorruptError."""
        version = self._version(self.resolve(ref, run))
        version.manifest  # noqa: B018  a torn manifest is found here, not later
        return version

    def find(self, run: str, kind: str, run_key: str, above: int = -1) -> Version | None:
        """The newest complete version that bears `run_key` and a number above `above`, or None. One
        whose manifest is torn is passed over, with a warning."""
        needle = f'"run_key":"{run_key}"'.encode()
        for number in (each for each in reversed(self.numbers(run, kind)) if each > above):
            version = self._version(Ref(run, kind, number))
            try:
                raw = (version.path / "manifest.json").read_bytes()
            except FileNotFoundError:
                continue  # torn; opening or verifying it says so, a search for other work need not
            try:
                if needle in raw and version.manifest.run_key == run_key:
                    return version
            except CorruptError as error:
                log.warning("%s is passed over: %s", version.ref, error.message)
        return None

    def _version(self, ref: Ref) -> Version:
        path = self.path / ref.folder
        if path.resolve() != self.path.resolve() / ref.folder:
            raise CorruptError(
                str(ref), "the folder is a link", next="replace the link by the folder itself"
            )
        return Version(ref, path)

    def _nowhere(self, ref: Ref, why: str) -> LineageError:
        next = "quiver ls" if any(self.refs()) else "run a recipe with this store first"
        known = [
            str(found) for found in self.refs(ref.run if ref.run in self.runs() else None, ref.kind)
        ]
        return LineageError(
            str(ref), why + (f"; there are {', '.join(known[-5:])}" if known else ""), next=next
        )

    # -- lineage and checks

    def verify(self, ref: str | Ref | None = None) -> tuple[int, list[QuiverError]]:
        """Check every byte of one version, or of all: how many were checked, and the errors
        found."""
        named = [self.resolve(ref)] if ref else list(self.refs())
        bad: list[QuiverError] = []
        for each in named:
            try:
                self._verify(self._version(each))
            except QuiverError as error:
                if error.next == f"quiver verify {each}":  # that is what was asked already
                    self._tell_loss(error, each)
                bad.append(error)
        return len(named), bad

    def _verify(self, version: Version) -> None:
        version.verify()
        known = {entry.name for entry in version.manifest.files} | {"manifest.json"}
        extra = {
            path.relative_to(version.path).as_posix()
            for path in version.path.rglob("*")
            if path.is_file()
        } - known
        if extra:
            error = version.corrupt(min(extra), "is no file of this version")
            error.next = shlex.join(["rm", str(version.path / min(extra))])
            raise error
        if version.ref.kind != "policy":
            try:
                schema_module(version.ref.kind).check(version.table())
            except SchemaError as error:
                raise version.corrupt(error.object, error.message) from error
        for parent in version.manifest.inputs:
            self._verify_parent(version, parent)

    def _verify_parent(self, version: Version, parent: Input) -> None:
        ref = refs.parse(parent.ref)
        if not (self.path / ref.folder).is_dir():
            what = (
                f"restore {self.path / ref.folder} from a copy; without it {version.ref} is whole, "
                "but not its lineage"
            )
            raise LineageError(str(version.ref), f"its input {ref} is gone", next=what)
        if self.open(ref).manifest.content_hash != parent.content_hash:
            what = f"make {version.ref.kind} anew of what {ref} is now"
            raise LineageError(str(version.ref), f"input {ref} is not what it was", next=what)

    def _tell_loss(self, error: QuiverError, ref: Ref) -> None:
        """Say in `error` what refers to `ref`, whose bytes are not those written, and that only
        making it anew helps."""
        users = [f"tag {tag}" for tag in self._tags_of(ref)]
        for other in self.refs():
            with contextlib.suppress(QuiverError):  # torn itself, and told so
                about = self._version(other).manifest
                users += [str(other)] * (
                    str(ref) in {entry.ref for entry in (*about.inputs, *about.models)}
                    and other != ref
                )
        error.state = (
            "no other version is touched by this; what refers to this one: "
            f"{', '.join(users) or 'nothing'}."
        )
        error.next = f"delete {self.path / ref.folder} and run the stage that made it again"

    # -- tags

    def _tags(self, run: str) -> Path:
        return self.path / refs.check_name(run, "run") / "tags"

    def _tags_of(self, ref: Ref) -> list[str]:
        """Names of the tags of its run that point at `ref`."""
        folder = self._tags(ref.run)
        names = (
            [path.name for path in sorted(folder.glob("*")) if refs.NAME.fullmatch(path.name)]
            if folder.is_dir()
            else []
        )
        return [name for name in names if tags.read(folder, name) == str(ref)]

    def tag(
        self,
        run: str,
        name: str,
        ref: str | Ref,
        expected: str | None = "*",
        *,
        why: str = "",
        key: str = "",
        about: dict[str, Any] | None = None,
    ) -> Ref:
        """Point tag `name` of `run` at `ref`, and say in its journal why, on what the decision was
        made, and what it was (`key`).

        ConflictError unless the tag now holds `expected` ("*": whatever it holds). Nothing is done
        where an entry with this `key` is there already: what was decided once stays decided. With a
        `key` a tag that stays where it is gets an entry too.
        """
        tags.check_name(name)
        target, folder = self.resolve(ref, run), self._tags(run)
        with files.storage(f"{run} tag {name}"):
            files.make_folder(folder)
            with locked(folder / f".{name}.lock", f"tag {run}/{name}"):
                if key and any(entry.key == key for entry in tags.history(folder, name)):
                    return target
                held = tags.read(folder, name)
                if expected not in ("*", held):
                    raise ConflictError(
                        f"tag {run}/{name}",
                        f"expected {expected}, found {held}",
                        next="look at what the tag points at now, then tag again",
                    )
                tags.move(folder, name, str(target), why, key, about or {})
        return target

    def tagged(self, run: str, name: str) -> str | None:
        """The reference that tag `name` of `run` holds; None where there is no such tag."""
        return tags.read(self._tags(run), tags.check_name(name))

    def history(self, run: str, name: str) -> list[tags.Entry]:
        """What became of tag `name` of `run`, oldest first; empty for a tag that never moved.
        CorruptError."""
        return tags.history(self._tags(run), tags.check_name(name))


@contextlib.contextmanager
def locked(path: Path, what: str, next: str = "wait for it, then run again") -> Iterator[None]:
    """Hold a lock file; the system frees it when its process dies, however it dies. BusyError names
    the holder, and `next`."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 64, 0).decode(errors="replace") or "unknown"
            os.close(handle)
            raise BusyError(what, f"process {holder} is at this very work now", next=next) from None
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
            break
        os.close(handle)  # the holder removed the file between our open and our lock
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
