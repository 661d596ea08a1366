"""Standard streams of every kind: closed, full, of another encoding; and words on their way to
them."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from quiver.deployments.server import check_api
from quiver.flows import prefect_server
from quiver.flows.prefect_server import crash_abandoned
from quiver.schemas.errors import ConfigError, QuiverError, RemoteError, ResourceError
from quiver.stages.core.store import Store
from tests.flows.conftest import RECIPE, command_environment, own_home
from tests.stages.core.store.histories import make_table
from tests.tiny import make_folder
from tests.warm import REAL_PYTHON


@pytest.fixture
def store(tmp_path) -> Path:
    make_table(Store(tmp_path / "store"), 0)
    return tmp_path / "store"


def in_shell(
    folder: Path, line: str, before: str = "", stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess:
    """What a shell ran: Python with these words, after what comes before."""
    return subprocess.run(
        ["bash", "-c", f"{before} {sys.executable} {line}"],
        cwd=folder,
        env={**command_environment(folder), **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


def called(folder: Path, words: str, **options) -> subprocess.CompletedProcess:
    """A command, with what a shell says of its streams behind it."""
    return in_shell(folder, f"-m quiver.flows.cli.main {words}", **options)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("ls --store store --json >&-", 0),
        ("ls --store store --json 2>&-", 0),
        ("view a/logprobs@1 --store store <&-", 5),  # it shows rollouts alone
        ("verify --store store --json >/dev/full", 7),
        ("rm a/logprobs@1 --store store --reason $'\\xff'", 2),
        ("ls --store $'x\\xff'", 2),
        ("ls --store store >/dev/full 2>/dev/full", 7),
        ("nosuch >/dev/full 2>/dev/full", 2),
        ("nosuch --json >/dev/full 2>/dev/full", 2),
    ],
)
def test_streams_and_words_of_any_kind(tmp_path, store, words, code):
    done = called(tmp_path, words)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert Store(store).refs("a", "logprobs")


@pytest.mark.parametrize("words", ["ls --store store", "ls --store store --json", "--help"])
def test_a_command_whose_answer_nobody_reads_ends_like_others_of_a_pipe(tmp_path, store, words):
    reader, writer = os.pipe()
    os.close(reader)
    done = called(tmp_path, words, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_pipe_inside_a_command_that_breaks_is_a_defect_and_told(tmp_path):
    (tmp_path / "with_pipe.py").write_text(
        "import os\n"
        "from quiver.flows.cli import main as cli\n"
        "def pipe():\n"
        "    reader, writer = os.pipe()\n"
        "    os.close(reader)\n"
        "    os.write(writer, b'x')\n"
        "cli.app.command('pipe')(pipe)\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "with_pipe.py", "pipe"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 1 and b"E-INTERNAL quiver: a bug" in done.stderr


def test_a_store_whose_path_is_no_text_is_no_damage(tmp_path, store):
    path = os.fsencode(tmp_path) + b"/x\xff"
    os.rename(store, path)
    done = called(tmp_path, "verify", QUIVER_STORE=os.fsdecode(path))
    assert done.returncode == 2 and b"cannot be used" in done.stderr
    os.rename(path, store)


@pytest.mark.parametrize("words", ["keys optimize", "ls --store store --json"])
def test_an_encoding_that_lacks_characters_gets_them_escaped(tmp_path, store, words):
    done = called(tmp_path, words, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)


def test_what_a_stages_process_says_moves_no_cursor(tmp_path):
    make_folder(tmp_path / "model")
    (tmp_path / "rows.py").write_text(
        "def rows():\n"
        "    print('a\\x1b[2Jb')\n"
        "    return [{'question': '1+5?', 'answer': '6'}] * 4\n"
    )
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("questions.jsonl", "rows.py:rows"))
    done = called(tmp_path, "prompt recipe.toml")
    assert done.returncode == 0, done.stderr.decode()
    assert b"a\\x1b[2Jb" in done.stderr
    assert b"\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("name", "setting", "says"),
    [
        ("PREFECT_API_URL", "http://[::1", "Invalid IPv6 URL"),
        ("PREFECT_SERVER_API_PORT", "none", "port: Input should be a valid integer"),
    ],
)
def test_a_setting_that_prefect_can_not_be_imported_with_is_told(tmp_path, name, setting, says):
    named = {"PREFECT_API_URL": "http://127.0.0.1:1/api", name: setting}
    done = called(tmp_path, "doctor --json", **named)
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.returncode, problem["code"]) == (2, "E-CONFIG")
    assert says in problem["message"] and "PREFECT_" in problem["next"]
    assert b"Traceback" not in done.stderr


ASKS = (crash_abandoned, check_api)
URLS = {
    "http://me:canary@127.0.0.1:1/api": (RemoteError, "http://…@127.0.0.1:1/api"),
    "http://127.0.0.1:99999999/api": (RemoteError, "http://127.0.0.1:99999999/api"),
    "ftp://127.0.0.1/api": (ConfigError, "ftp://127.0.0.1/api"),
    "me:canary@127.0.0.1:1/api": (ConfigError, "…@127.0.0.1:1/api"),
    "http://me:canary/#@1@127.0.0.1:1/api": (ConfigError, "http://…@127.0.0.1:1/api"),
    "http://canary:canary@127.0.0.1:9x/api": (ConfigError, "http://…@127.0.0.1:9x/api"),
}
"""The URL of a server that is none; its error, and how the URL is shown."""


def refused(asks: Callable[[], object], url: str) -> QuiverError:
    """The error of what asks this server."""
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(QuiverError) as caught:
        asks()
    return caught.value


@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("url", URLS)
def test_a_server_that_is_none_is_told_without_its_password(asks, url):
    error = refused(asks, url)
    kind, shown = URLS[url]
    assert isinstance(error, kind) and error.object == f"Prefect API {shown}"
    assert "canary" not in str(error)
    assert "PREFECT_API_URL" in error.next or "prefect server start" in error.next


def answering(status: int, kind: str, pieces: list[bytes]) -> type[BaseHTTPRequestHandler]:
    """A server that answers each question with these pieces."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-type", kind)
            if len(pieces) == 1:
                self.send_header("content-length", str(len(pieces[0])))
            self.end_headers()
            with contextlib.suppress(OSError):
                for piece in pieces:
                    self.wfile.write(piece)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    return Other


LATER = "does not answer"
ANSWERS = {
    "a page": (200, "text/html", [b"<html><body>It works!</body></html>"], LATER),
    "not allowed": (405, "application/json", [b'{"detail": "Method Not Allowed"}'], LATER),
    "an object": (200, "application/json", [b'{"status": "ok"}'], LATER),
    "rows of another kind": (200, "application/json", [b'[{"model": "tiny"}]'], LATER),
    "null": (200, "application/json", [b"null"], LATER),
    "text that is cut": (200, "application/json", [b'[{"id": '], LATER),
    "bytes that are no text": (200, "application/json", [b"\xff\xfe\x00"], LATER),
    "elsewhere": (307, "text/html", [b""], LATER),
    "without end": (200, "application/json", [b"[" * 2**20] * 64, "more than 65,536 bytes"),
}
ALSO_OTHERS = ("not allowed", "an object", "elsewhere", "without end")
"""Those that another request meets in another way; all else is for what both go through."""


@pytest.mark.parametrize(
    ("asks", "name"),
    [*((crash_abandoned, name) for name in ANSWERS), *((check_api, name) for name in ALSO_OTHERS)],
)
def test_a_server_that_answers_otherwise_than_prefect_is_told(asks, name):
    *answer, said = ANSWERS[name]
    with ThreadingHTTPServer(("127.0.0.1", 0), answering(*answer)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        error = refused(asks, f"http://me:canary@127.0.0.1:{server.server_port}/api")
        server.shutdown()
    assert isinstance(error, RemoteError) and said in error.message
    assert error.object == f"Prefect API http://…@127.0.0.1:{server.server_port}/api"
    assert "canary" not in str(error)


@pytest.mark.parametrize("trickles", [False, True])
def test_a_server_that_takes_a_question_and_does_not_answer_is_told(monkeypatch, trickles):
    assert prefect_server.SECONDS <= 60, "Prefect's own client waits a minute"
    monkeypatch.setattr(prefect_server, "SECONDS", 1.0)

    def answer() -> None:
        connection, _ = listener.accept()
        connections.append(connection)
        with contextlib.suppress(OSError):
            connection.recv(1000)
            if not trickles:
                connection.recv(1)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while True:
                connection.sendall(b" ")
                time.sleep(0.05)

    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        error = refused(crash_abandoned, f"http://127.0.0.1:{listener.getsockname()[1]}/api")
    for connection in connections:
        connection.shutdown(socket.SHUT_RDWR)
    assert isinstance(error, RemoteError) and "does not answer within" in error.message


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_process_that_a_command_starts_finds_streams_where_its_own_were_closed(tmp_path, closed):
    (tmp_path / "starting.py").write_text(
        "import subprocess\n"
        "from quiver.flows.cli.main import _settle_streams\n"
        "_settle_streams()\n"
        "script = 'read line; echo out && echo error >&2 && echo ok > said'\n"
        "subprocess.run(['bash', '-c', script])\n"
    )
    assert in_shell(tmp_path, f"starting.py {closed}").returncode == 0
    assert (tmp_path / "said").read_text() == "ok\n"


def test_a_limit_on_the_size_of_files_is_told_before_prefects_database_is_made(tmp_path):
    script = (
        "from pathlib import Path; from quiver.flows.cli.embedded import require_writable;"
        "require_writable(Path('home'))"
    )
    done = in_shell(tmp_path, f'-c "{script}"', "ulimit -f 100;")
    assert b"E-RESOURCE PREFECT_HOME home: Prefect" in done.stderr
    assert b"ulimit -f allows no file of its size" in done.stderr


@pytest.mark.parametrize("threads", [1, 2], ids=["ours", "OpenBLAS's"])
def test_a_limit_on_threads_is_no_interrupt(tmp_path, threads):
    """OpenBLAS interrupts a process in which it can start none: as Ctrl-C does."""
    recipe = Path("deployments/recipes/demo.toml").absolute()
    command = ["prlimit", f"--nproc={threads}", REAL_PYTHON, "-m", "quiver.flows.cli.main"]
    command += ["check", str(recipe)]
    if os.geteuid() == 0:  # whom no such limit binds
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv")
        reads_all = "-all,+dac_override,+dac_read_search"
        kinds = ("--inh-caps", "--ambient-caps", "--bounding-set")
        capabilities = [word for kind in kinds for word in (kind, reads_all)]
        another = ["setpriv", "--reuid", "54321", "--clear-groups"]
        another += ["--securebits", "+no_setuid_fixup"]  # or os.access would say no
        command = [*another, *capabilities, *command]
    done = subprocess.run(
        command, cwd=tmp_path, env=own_home(tmp_path), capture_output=True, check=False
    )
    assert b"E-RESOURCE quiver: RuntimeError: can't start new thread" in done.stderr
    assert b"`ulimit -a`" in done.stderr and b"stopped" not in done.stderr
    assert done.returncode == ResourceError.exit_code


def test_doctor_shows_no_password_of_prefects_server(tmp_path):
    done = called(tmp_path, "doctor --json", PREFECT_API_URL="http://me:canary@127.0.0.1:1/api")
    assert json.loads(done.stdout)["prefect"]["api"] == "http://…@127.0.0.1:1/api"
    assert b"canary" not in done.stdout + done.stderr
