"""Prefect's embedded server, for a run without a server of its own.

It ends with the run, even when that is killed by kill -9; Prefect stops it at a normal exit only.
Ctrl-C in a terminal, and `timeout`, signal every process of the flow's group: the server stands
outside it, since the flow, as it ends, still has to tell the server so and would wait for a dead
one for more than a minute.

When the server dies before the run (the kernel may need its memory), another is started at the
same address over the same database, and the flow's client, which asks again for a while, does not
notice. A server that dies again and again ends the run, with an error; what is finished is kept.

The first server over a database makes its tables, and expects nobody else at that: runs that start
together begin one after the other.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import resource
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from quiver.schemas.errors import CorruptError, ResourceError, reason
from quiver.stages.common.runtime.subprocesses import Process
from quiver.stages.common.store.leases import Leases
from quiver.stages.common.store.storage import Storage

from .commands.shared import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prefect.server.api.server import SubprocessASGIServer

MOST_DEATHS = 3
"""Servers that may die within a minute; the next death ends the run."""
_GRACE_SECONDS = 5
_POPEN = subprocess.Popen
_PORT_IS_TAKEN = 3
"""uvicorn's exit code."""
_POLL_SECONDS = 0.2
_DATABASE_BYTES = 16 * 1024 * 1024
"""Room for Prefect's database of a few runs and its journal."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
log = logging.getLogger(__name__)


def guard_embedded_server() -> None:
    """Start the embedded server so; nothing where PREFECT_API_URL names a server. ResourceError
    where Prefect cannot write what it needs, or its server does not start; CorruptError."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, get_current_settings

    if PREFECT_API_URL.value():
        return
    require_writable(PREFECT_HOME.value())
    database = PREFECT_HOME.value() / "prefect.db"
    named = get_current_settings().server.database.connection_url  # maybe another, of its own kind
    if named.get_secret_value() == f"sqlite+aiosqlite:///{database}":
        require_intact(database)
    # the whole server: half of a short run's imports
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer()  # one a process: the flow's client takes this very server
    is_over = threading.Event()
    threading.Thread(
        target=_watch, args=(server, is_over), daemon=True, name="prefect-server-watch"
    ).start()
    try:
        with alone_at_first(PREFECT_HOME.value()), _kept():
            server.start()  # waits until it answers; if it dies meanwhile the watch replaces it
    except RuntimeError as error:
        is_over.set()
        raise ResourceError(
            "Prefect's embedded server",
            f"does not start: {reason(error)}",
            next=f"look at {PREFECT_HOME.value()} and at memory, or start `prefect server start` "
            "and export PREFECT_API_URL; then run the same command again",
        ) from error
    atexit.register(is_over.set)  # before Prefect's own, which stops the server


def require_writable(home: Path) -> None:
    """ResourceError where Prefect cannot keep its database; of a full disk Prefect tells only
    after minutes."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
        if 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[0] < _DATABASE_BYTES:
            raise OSError(errno.EFBIG, "ulimit -f allows no file of its size")
        if shutil.disk_usage(home).free < _DATABASE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ResourceError(
            f"PREFECT_HOME {home}",
            f"Prefect cannot keep its database there: {error.strerror}",
            next="export PREFECT_HOME to a folder that can be written",
        ) from None


def require_intact(database: Path) -> None:
    """CorruptError where the file is there and is no SQLite database: Prefect would try for
    minutes. Only its first page and its list of tables are looked at."""
    if not database.exists():
        return
    try:
        read_only = f"{database.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(read_only, timeout=0, uri=True)) as file:
            file.execute("select count(*) from sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF not in _DAMAGED:
            return  # it is locked, say: Prefect waits for that
        raise CorruptError(
            str(database),
            f"Prefect's database is damaged: {reason(error)}",
            state="the store is not touched; only the history on Prefect's pages is in this file.",
            next=shlex.join(["mv", str(database), f"{database}.damaged"]),
        ) from None


@contextmanager
def alone_at_first(home: Path) -> Iterator[None]:
    """Around the start of a server, until it answers: where none of this version of Prefect has
    answered yet over the database in `home`, no other is started meanwhile."""
    name = f"first-start-{metadata.version('prefect')}"
    note = home / f".quiver-{name}"
    if note.exists():
        yield
        return
    leases = Leases(Storage(home), ".quiver-leases")
    lease = leases.take(name)
    if lease is None:
        log.info("waits for another process, which makes Prefect's database in %s", home)
    while lease is None:
        time.sleep(_POLL_SECONDS)
        lease = leases.take(name)
    try:
        yield
        note.touch()
    finally:
        lease.release()


@contextmanager
def _kept() -> Iterator[None]:
    """Processes started inside end with this one: Prefect has no option for it."""
    subprocess.Popen = partial(Process, orphan_grace=_GRACE_SECONDS)
    try:
        yield
    finally:
        subprocess.Popen = _POPEN  # not what was there before: two threads may be inside


def _watch(server: SubprocessASGIServer, is_over: threading.Event) -> None:
    """Start the server anew whenever it dies before the run is over."""
    deaths: list[float] = []
    while not is_over.wait(_POLL_SECONDS):
        if server.server_process is None or server.server_process.poll() is None:
            continue
        code = server.server_process.poll()
        if code == _PORT_IS_TAKEN:
            continue  # Prefect takes another one
        deaths = [*(at for at in deaths if time.monotonic() - at < 60), time.monotonic()]
        if len(deaths) > MOST_DEATHS:
            _end_run(code)
        log.warning("Prefect's embedded server died (exit code %s); another is started", code)
        with _kept():
            server.server_process = server._run_uvicorn_command()


def _end_run(code: int) -> None:
    """End this process at once: the flow would wait for the server for minutes, and nothing that
    it could still say reaches anybody."""
    error = ResourceError(
        "Prefect's embedded server",
        f"died {MOST_DEATHS + 1} times within a minute (exit code {code})",
        state="all finished shards and versions are kept.",
        next="look at memory and at PREFECT_HOME, or start `prefect server start` and export "
        "PREFECT_API_URL; then run the same command again",
    )
    say({"error": error.to_dict()}, [])
    print(error, file=sys.stderr, flush=True)
    os._exit(error.exit_code)
