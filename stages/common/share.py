"""Work on one version that any number of processes do together, on any hosts that see the store.
See `claims` for whose a shard is.

What comes out is what one process alone makes, byte for byte, where the stage makes the same rows
of a shard whoever does it:
  * a shard is linked into place whole, and the first one stays; what another makes of it later is
    discarded
  * the version is a folder of links of the committer's own, renamed to the next number after a look
    that no version of this work is there: so it appears once, even where two commit at the same
    time
  * its seconds are summed over all processes that finished a shard; `total` is the longest of them

A process that fails raises its error, and the others take up its shards; when they have committed,
it has not failed either.

    with begin(..., share=True) as work:
        ...                                  # as for one process
        return work.commit(metrics={...}).ref
    return work.done.ref                     # another one committed it
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import OutcomeUnknownError, printable
from quiver.schemas.manifest import FileEntry

from . import files
from .claims import Claims, Finished
from .store import Version
from .work import Work

log = logging.getLogger(__name__)


class SharedWork(Work):
    """One version in the making by several processes; made by `begin`."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.worker = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._looked = -1

    def together(self, patience: float | None) -> Iterator[Work]:
        """Yield this once, and end quietly when another process has committed the version, whatever
        happened in this one."""
        if self._committed():
            yield self
            return
        with files.storage(f"{self.run}/{self.kind}"):
            files.make_folder(self.folder)
            files.make_folder(self.notes)
        self._claims = Claims(self, patience)
        with self._claims.present():
            try:
                yield self
            except Finished:
                return
            except OutcomeUnknownError:  # of this one's own commit
                raise
            except Exception as error:
                if not self._committed():
                    raise
                log.warning("%s was finished by others; here: %s", self.done.ref, printable(error))

    def leave(self) -> None:
        """The last of all processes goes: nothing stays of a version that is there."""
        if self.done:
            self.clear()

    def _committed(self) -> bool:
        numbers = self.store.numbers(self.run, self.kind)
        self.done = self.done or self.store.find(self.run, self.kind, self.run_key, self._looked)
        self._looked = max([self._looked, *numbers])
        return self.done is not None

    def look(self) -> None:
        """Finished when another process has committed the version."""
        if self._committed():
            raise Finished

    @contextmanager
    def there(self) -> Iterator[None]:
        """Where a staged file is gone: Finished when that is because another process committed
        them."""
        try:
            yield
        except FileNotFoundError:
            self.look()
            raise

    def claims(self, count: int) -> Claims:
        """Who does which of the `count` shards."""
        self._claims.count = count
        return self._claims

    def plan(self, size: int) -> int:
        """Rows a shard: `size`, unless somebody said another first."""
        path = self.notes / "plan"
        with self.there(), files.storage(f"{self.run}/{self.kind}"):
            with suppress(FileExistsError), files.replacing(path, first=True) as out:
                out.write(str(size).encode())
            return int(path.read_bytes())

    def parts(self) -> list[dict[str, Any]]:
        """As the base has it; of others what they said when they finished their last shard.
        `shards`: how many, `slowest`: the seconds from claim to end of the slowest."""
        with self.there():
            others = [path for path in self.notes.glob("*.part") if path.stem != self.worker]
            return [self._part(), *(json.loads(path.read_bytes()) for path in others)]

    def _part(self) -> dict[str, Any]:
        return {**super()._part(), "shards": self._claims.shards, "slowest": self._claims.slowest}

    def read(self, index: int) -> pa.Table:
        with self.there():
            return super().read(index)

    def write(self, index: int, table: pa.Table) -> None:
        """As the base has it; a shard that is there already stays. The claim on it ends."""
        with self.there():
            super().write(index, table)
            self._claims.written(index)
            files.write_bytes(self.notes / f"{self.worker}.part", json.dumps(self._part()).encode())

    def _write(self, name: str, table: pa.Table, *, first: bool = True) -> FileEntry:
        path, note = self.folder / name, self.notes / f"{name}.json"
        try:
            return super()._write(name, table, first=first)
        except FileExistsError:
            if note.exists():
                return FileEntry.model_validate_json(note.read_bytes())
            rows = (
                pa.ipc.open_file(pa.memory_map(str(path))).read_all().num_rows
            )  # its writer may have died before the note
            if rows != table.num_rows:  # of an attempt with other shards
                path.unlink(missing_ok=True)
                return super()._write(name, table, first=first)
            return FileEntry(
                name=name, bytes=path.stat().st_size, sha256=files.sha256(path), rows=rows
            )

    def commit(self, *, metrics: dict[str, Any] | None = None, **about: Any) -> Version:
        """As the base has it, with the number of processes that finished a shard among the metrics.
        Finished."""
        workers = sum(part["shards"] > 0 for part in self.parts())
        try:
            self.done = super().commit(metrics={**(metrics or {}), "workers": workers}, **about)
        except (FileNotFoundError, ValueError):
            # another has committed it meanwhile, and cleared away what this one was reading
            self.look()
            raise
        return self.done

    def _publish(self, folder: Path, about: dict[str, Any], number: int | None) -> Version:
        own = folder.with_name(f"{self.run_key}.{self.worker}")
        files.make_folder(own)
        for entry in about["files"]:
            os.link(folder / entry.name, own / entry.name)
        return super()._publish(own, about, number)

    def _numbers(self) -> list[int]:
        taken = super()._numbers()
        # after the list: a version of this work that is not in it has the next number, or a higher
        # one
        self.look()
        return taken

    def _remove_strays(self, expected: list[str]) -> None:
        """They may be others' shards in the making; a commit takes what it links."""

    def clear(self) -> None:
        """Remove all that is staged, each folder at once, so that nobody writes into it any
        more."""
        for path in self.folder.parent.glob(f"{self.run_key}*"):
            if path.suffix != ".lock":
                gone = (
                    path
                    if path.suffix == ".gone"
                    else path.with_name(f"{path.name}.{self.worker}.gone")
                )
                with suppress(FileNotFoundError):
                    path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
