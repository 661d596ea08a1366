"""Prefect's embedded server, for a run without a server of its own.

Look here if the server does not start, dies, or outlives a run. It ends with the run, even after
kill -9; Prefect stops it only at a normal exit. Ctrl-C in a terminal, and `timeout`, signal every
process of the flow's group. The server is outside that group, since an ending flow still reports to
the server, and would wait for a dead one for more than a minute.

If the server dies before the run (the kernel may need its memory), another is started at the same
address over the same database. The flow's client retries for a while and does not notice. A server
that dies repeatedly ends the run with an error; finished shards and versions are kept.

The first server over a database creates its tables, which is not safe beside another one. So runs
that start together begin one after the other.
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
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from quiver.schemas.errors import CorruptError, ResourceError, reason
from quiver.stages.core.processes.subprocesses import Process

from .shared import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prefect.server.api.server import SubprocessASGIServer

MOST_DEATHS = 3
"""Number of servers that may die within a minute; the next death ends the run."""
_GRACE_SECONDS = 5
_POPEN = subprocess.Popen
_PORT_IS_TAKEN = 3
"""Exit code of uvicorn."""
_POLL_SECONDS = 0.2
_DATABASE_BYTES = 16 * 1024 * 1024
"""Room for Prefect's database of a few runs and its journal."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
log = logging.getLogger(__name__)


def guard_embedded_server() -> None:
    """Start the embedded server and watch it; nothing if PREFECT_API_URL names a server.

    Raises:
        ResourceError: If Prefect cannot write its files, or the server does not start.
        CorruptError: If the database is damaged.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, get_current_settings

    if PREFECT_API_URL.value():
        return
    require_writable(PREFECT_HOME.value())
    database = PREFECT_HOME.value() / "prefect.db"
    # It may be another database, even of another kind.
    named = get_current_settings().server.database.connection_url
    if named.get_secret_value() == f"sqlite+aiosqlite:///{database}":
        require_intact(database)
    # Imported late: the whole server is half of a short run's import time.
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer()  # One per process: the flow's client takes this very server.
    is_over = threading.Event()
    threading.Thread(
        target=_watch, args=(server, is_over), daemon=True, name="prefect-server-watch"
    ).start()
    try:
        with alone_at_first(PREFECT_HOME.value()), _kept():
            # Waits until the server answers; if it dies meanwhile, the watch replaces it.
            server.start()
    except RuntimeError as error:
        is_over.set()
        raise ResourceError(
            "Prefect's embedded server",
            f"does not start: {reason(error)}",
            next=f"look at {PREFECT_HOME.value()} and at memory, or start `prefect server start` "
            "and export PREFECT_API_URL; then run the same command again",
        ) from error
    atexit.register(is_over.set)  # Runs before Prefect's own handler, which stops the server.


def require_writable(home: Path) -> None:
    """Raise ResourceError if Prefect cannot write its database.

    Prefect itself reports a full disk only after minutes.
    """
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
            next="export PREFECT_HOME=FOLDER, a folder that can be written",
        ) from None


def require_intact(database: Path) -> None:
    """Raise CorruptError if the file exists but is no SQLite database, which Prefect would retry
    for minutes.

    Only its first page and its list of tables are read.
    """
    if not database.exists():
        return
    try:
        read_only = f"{database.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(read_only, timeout=0, uri=True)) as file:
            file.execute("select count(*) from sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF not in _DAMAGED:
            return  # It is locked, for example: Prefect waits for that.
        raise CorruptError(
            str(database),
            f"Prefect's database is damaged: {reason(error)}",
            state="the store is not affected; this file holds only the history on Prefect's pages.",
            next=shlex.join(["mv", str(database), f"{database}.damaged"]),
        ) from None


@contextmanager
def alone_at_first(home: Path) -> Iterator[None]:
    """Hold back other first starts of a server over the database in `home`, until this one answers.

    Only the first start by each version of Prefect is exclusive.
    """
    note = home / f".quiver-first-start-{metadata.version('prefect')}"
    with nullcontext() if note.exists() else FileLock(f"{note}.lock"):
        yield
        note.touch()


@contextmanager
def _kept() -> Iterator[None]:
    """End processes started inside together with this one; Prefect has no option for it."""
    subprocess.Popen = partial(Process, orphan_grace=_GRACE_SECONDS)
    try:
        yield
    finally:
        subprocess.Popen = _POPEN  # Not the value from before: two threads may be inside.


def _watch(server: SubprocessASGIServer, is_over: threading.Event) -> None:
    """Restart the server if it dies before the run is over."""
    deaths: list[float] = []
    while not is_over.wait(_POLL_SECONDS):
        if server.server_process is None or server.server_process.poll() is None:
            continue
        code = server.server_process.poll()
        if code == _PORT_IS_TAKEN:
            continue  # Prefect takes another port.
        deaths = [*(at for at in deaths if time.monotonic() - at < 60), time.monotonic()]
        if len(deaths) > MOST_DEATHS:
            _end_run(code)
        log.warning("Prefect's embedded server died (exit code %s); another is started", code)
        with _kept():
            server.server_process = server._run_uvicorn_command()


def _end_run(code: int) -> None:
    """End this process at once: the flow would wait minutes for the server, and could not report
    anything."""
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
