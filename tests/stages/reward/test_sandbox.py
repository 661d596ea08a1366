"""The sandbox for real: programs that try to get out, limits, what is left behind, and refusal
where a layer is missing.

Fault row 45: model-written code tries files, network, a fork bomb. Where bwrap is missing or
may not run, the tests of it are skipped with the sandbox's own reason.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from ast import literal_eval
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError, ResourceError, SecurityError
from quiver.stages.core import sandbox
from quiver.stages.core.isolation import Limits, find_interpreter
from quiver.stages.core.run.folders import sweep_folders
from quiver.stages.core.sandbox import check, run_program
from tests.stages.reward import escapes

ROOT = Path(__file__).parents[3]
CANARY = "canary-5b1f0e"


@pytest.fixture(scope="module")
def full():
    """Skips where the system does not permit the isolation."""
    try:
        check("full")
    except SecurityError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def host():
    """What a program might reach for, and what it may know of it; `touched` tells who came."""
    with (
        tempfile.TemporaryDirectory(prefix="host-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        os.chmod(folder, 0o777)
        secret = Path(folder, "secret")
        secret.write_text(CANARY)
        secret.chmod(0o644)
        patch.setenv("QUIVER_CANARY", CANARY)
        held = os.open(secret, os.O_RDWR)
        os.set_inheritable(held, True)
        servers = [
            socket.create_server(("127.0.0.1", 0)),
            socket.create_server("\0quiver-test-" + str(os.getpid()), family=socket.AF_UNIX),
            socket.create_server(folder + "/socket", family=socket.AF_UNIX),
        ]
        os.chmod(folder + "/socket", 0o777)
        for server in servers:
            threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield {
            "parent": os.getpid(),
            "secret": str(secret),
            "folder": folder,
            "port": servers[0].getsockname()[1],
            "abstract": servers[1].getsockname()[1:].decode(),
            "socket": folder + "/socket",
            "variables": ["QUIVER_CANARY"],
            "name": socket.gethostname(),
        }
        os.close(held)
        for server in servers:
            server.close()


VISITS: list[bytes] = []


def accept(server: socket.socket) -> None:
    """Count whoever connects."""
    while True:
        try:
            visitor, _ = server.accept()
        except OSError:
            return
        VISITS.append(visitor.recv(100))
        visitor.close()


def strangers() -> set[int]:
    """The processes that live in another process namespace than this one."""
    own = os.readlink("/proc/self/ns/pid")
    pids = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # gone, or another user's
            if os.readlink(f"/proc/{name}/ns/pid") != own:
                pids.add(int(name))
    return pids


def comes_true(condition: Callable[[], object], seconds: float = 10) -> object:
    """What the condition is once it is true, or when the time is over."""
    deadline = time.monotonic() + seconds
    while not (outcome := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return outcome


def nobody_is_left(before: set[int]) -> bool:
    return bool(comes_true(lambda: not strangers() - before))


def attempt(one: escapes.Try, host: dict, isolation: str = "full") -> sandbox.Finished:
    program = f"HOST = {host!r}\n{escapes.HELPERS}\n{one.program}"
    return run_program(program, limits=Limits(seconds=one.seconds), isolation=isolation)


@pytest.mark.parametrize("one", escapes.ALL, ids=lambda one: one.name)
def test_nothing_gets_out(full, host, one):
    before, visits, files = strangers(), len(VISITS), sorted(os.listdir(host["folder"]))
    finished = attempt(one, host)
    said = finished.stdout + finished.stderr
    assert "ESCAPED" not in said and CANARY not in said
    assert "SyntaxError" not in said and "NameError" not in said, "the try itself is broken"
    assert finished.killed_by == one.killed_by
    assert Path(host["secret"]).read_text() == CANARY
    assert sorted(os.listdir(host["folder"])) == files
    assert len(VISITS) == visits
    assert nobody_is_left(before)


@pytest.mark.parametrize("one", [one for one in escapes.ALL if one.works], ids=lambda one: one.name)
def test_the_tries_work_where_nothing_is_isolated(host, one):
    """The control: what isolation "process" says that it does not protect is found by the same
    programs."""
    assert "ESCAPED" in attempt(one, host, "process").stdout
    Path(host["folder"], "new").unlink(missing_ok=True)


# -- ordinary programs

BOTH = pytest.mark.parametrize("isolation", ["full", "process"])


@pytest.fixture
def permitted(request, isolation):
    if isolation == "full":
        request.getfixturevalue("full")


@BOTH
def test_a_program_gets_its_input_and_its_output_comes_back(permitted, isolation):
    finished = run_program(
        "import sys\nprint(input()[::-1])\nprint('é', file=sys.stderr)\nexit(3)",
        stdin="aé",
        isolation=isolation,
    )
    assert (finished.exit_code, finished.stdout, finished.stderr) == (3, "éa\n", "é\n")
    assert finished.killed_by is None and not finished.timed_out
    assert run_program("", isolation=isolation).exit_code == 0
    assert run_program("def f(", isolation=isolation).exit_code == 1
    assert "No module named 'pyarrow'" in run_program("import pyarrow", isolation=isolation).stderr


@BOTH
def test_it_is_a_script_as_any_other(permitted, isolation):
    program = """
import dataclasses, json, os, pickle, re, sqlite3, ssl, sys, zlib
from multiprocessing import Pool
@dataclasses.dataclass
class Point:
    x: int
def double(x):
    return 2 * x
if __name__ == "__main__":
    with open("file", "w") as file:
        file.write("kept")
    with Pool(2) as pool:
        numbers = pool.map(double, [1, 2])
    name = os.path.basename(__file__)
    print(json.dumps([pickle.loads(pickle.dumps(Point(1))).x, open("file").read(), numbers, name, sys.argv[1:]]))
"""
    finished = run_program(program, isolation=isolation)
    assert finished.stdout == '[1, "kept", [2, 4], "program.py", []]\n', finished.stderr


CLEAN = """
import os, sys
handles = []
for handle in range(60):
    try:
        os.fstat(handle)
        handles.append(handle)
    except OSError:
        pass
mine = [name for name in globals() if name[0] != "_"]
print([sorted(os.environ), handles, os.listdir("."), "/somewhere" in sys.path, os.umask(0), mine, hash("x")])
"""
VARIABLES = """
HOME LANG PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONNOUSERSITE PYTHONSAFEPATH PYTHONUTF8
TMPDIR
"""


@BOTH
def test_what_it_finds_is_clean_and_the_same_each_time(
    permitted, isolation, monkeypatch, fresh_python
):
    monkeypatch.setenv("QUIVER_CANARY", CANARY)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    first, second = (run_program(CLEAN, isolation=isolation).stdout for _ in range(2))
    assert first == second
    *expected, names, _ = literal_eval(first)
    assert expected == [VARIABLES.split(), [0, 1, 2], [], False, 0o077]
    assert names == ["os", "sys", "handles", "handle"]


@pytest.mark.parametrize(
    ("program", "limits", "killed_by", "exit_code", "output"),
    [
        ("print('begun', flush=True)\nimport time\ntime.sleep(60)", {"seconds": 1}, "time", -9, "begun\n"),
        ("bytearray(200 << 20)", {"memory_mib": 100}, None, 1, "MemoryError"),
        ("bytearray(200 << 20)", {"memory_mib": 400}, None, 0, ""),
        ("open('x', 'wb').write(bytes(3 << 20))", {"files_mib": 1}, None, 1, "File too large"),
        ("x = [open('/dev/null') for _ in range(40)]", {"open_files": 32}, None, 1, "Too many open files"),
        ("import sys\nprint('x' * 5000)\nsys.stderr.write('y' * 5000)", {"output_kib": 1}, None, 0, "x" * 1024 + "y" * 1024),
        ("import os\nos.abort()", {}, "SIGABRT", -6, ""),
        ("import os\nos.kill(os.getpid(), 40)", {}, "signal 40", -40, ""),  # has no name
        ("import os\nos.kill(os.getpid(), 24)", {}, "cpu", -24, ""),  # the kernel's, when it is used up
        ("import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))", {"seconds": 2.5}, None, 0, "(3, 4)\n"),
    ],
)  # fmt: skip
@BOTH
def test_limits(permitted, isolation, program, limits, killed_by, exit_code, output):
    finished = run_program(program, limits=Limits(**limits), isolation=isolation)
    assert (finished.killed_by, finished.exit_code) == (killed_by, exit_code)
    assert output in finished.stdout + finished.stderr
    assert len(finished.stdout + finished.stderr) <= 2048
    assert finished.timed_out == (killed_by in ("time", "cpu"))
    if killed_by == "time":
        assert finished.seconds >= 1


def test_less_isolation_still_leaves_no_daemon(host):
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        open(FOLDER + "/daemon", "w").close()
    os._exit(0)
os.wait()
"""
    finished = run_program(f"FOLDER = {host['folder']!r}\n{program}", isolation="process")
    assert finished.exit_code == 0
    time.sleep(1.5)
    assert "daemon" not in os.listdir(host["folder"])


@BOTH
def test_whoever_asked_may_die(permitted, isolation, tmp_path, monkeypatch):
    """Killed, it leaves nobody: neither the program, nor the processes around it; their folder is
    swept by the next."""
    code = f"""
from quiver.stages.core.isolation import Limits
from quiver.stages.core.sandbox import run_program
run_program("import time; time.sleep(100)", limits=Limits(seconds=100), isolation={isolation!r})
"""
    generations = 4 if isolation == "full" else 2
    asker = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        started = comes_true(lambda: below(asker.pid, generations), 60)
        assert started, "the program did not start"
    finally:
        asker.kill()
        asker.wait()
    assert comes_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sweep_folders()
    assert os.listdir(tmp_path) == []


def below(pid: int, generations: int) -> list[int]:
    """All descendants, once there are so many generations of them."""
    found, level = [], [pid]
    for _ in range(generations):
        try:
            level = [
                int(child)
                for one in level
                for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()
            ]
        except OSError:
            return []
        found += level
    return found if level else []


# -- where it cannot be

# In a user namespace of its own, where one kind of namespace is forbidden, as a container or an
# administrator would do it; as an ordinary user there, but for `ids`: root who may be nobody else.
FORBID = """
import sys
from quiver.stages.reward.functions import FUNCTIONS
from quiver.stages.core.sandbox import run_program
program = f"open({sys.argv[1]!r}, 'a').write('was here ')"
for attempt in (lambda: run_program(program), lambda: FUNCTIONS["code"].function([program], ["assert True"])):
    try:
        print(attempt())
    except Exception as error:
        print(error)
print(run_program(program, isolation="process").exit_code)
"""
AS_ROOT = ["unshare", "--user", "--map-root-user"]
AS_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps"]
LAYERS = {
    "user": "unshare: unshare failed: No space left on device",
    "mnt": "unshare: unshare failed: No space left on device",
    "net": "bwrap: Creating new namespace failed",
    "pid": "bwrap: Creating new namespace failed",
    "ipc": "bwrap: Creating new namespace failed",
    "uts": "bwrap: Creating new namespace failed",
    "ids": "cannot map a user nobody into the sandbox: Operation not permitted",
}


@pytest.mark.parametrize("kind", LAYERS)
def test_where_a_layer_is_missing_nothing_is_run(full, kind, tmp_path):
    before, touched = strangers(), tmp_path / "touched"
    forbid = "exec" if kind == "ids" else f"echo 0 >/proc/sys/user/max_{kind}_namespaces; exec"
    done = subprocess.run(
        [
            *(AS_ROOT if kind == "ids" else AS_USER),
            *("sh", "-c", f'{forbid} "$@"', "sh"),
            *(sys.executable, "-c", FORBID, str(touched)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("E-SECURITY sandbox: ") == done.stdout.count(LAYERS[kind]) == 2, (
        done.stdout + done.stderr
    )
    assert done.stdout.count('isolation = "process"') == 2
    assert done.stdout.endswith("\n0\n"), "and with less it runs"
    assert nobody_is_left(before)
    assert touched.read_text() == "was here "  # once, by the one that asked for less


@BOTH
def test_a_missing_tool_is_refused_with_its_package(isolation, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SecurityError, match="setpriv, prlimit not found in PATH") as refused:
        run_program("", isolation=isolation)
    assert ("bwrap" in refused.value.message) == (isolation == "full")
    for way in ("apt install bubblewrap", "dnf install bubblewrap", 'isolation = "process"'):
        assert way in refused.value.next


UNPRIVILEGED = """
from quiver.stages.core.sandbox import check, run_program
check()
print(run_program("import os; print(os.getuid(), os.listdir('/tmp'))").stdout)
"""


def test_root_of_a_container_may_lack_the_right_to_mount(full):
    """With a user namespace of its own it needs none."""
    if os.geteuid() != 0:
        return  # every other test here says so
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    command = [*without, sys.executable, "-c", UNPRIVILEGED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "65534 []\n\n"


def test_it_needs_no_root(full):
    """The same for an ordinary user, who keeps his own uid outside."""
    if os.geteuid() != 0:
        return  # every other test here says so
    with tempfile.TemporaryDirectory(prefix="quiver-unprivileged-") as folder:
        for room in ("schemas", "stages"):
            target = f"{folder}/quiver/{room}"
            shutil.copytree(ROOT / room, target, ignore=shutil.ignore_patterns("__pycache__"))
        os.chmod(folder, 0o755)
        user = {
            "user": 1234,
            "group": 1234,
            "extra_groups": [],
            "cwd": folder,
            "env": {"PYTHONPATH": folder},
        }
        for python in (find_interpreter().command[0], "/usr/bin/python3"):
            try:
                done = subprocess.run(
                    [python, "-c", UNPRIVILEGED],
                    capture_output=True,
                    text=True,
                    check=False,
                    **user,
                )
            except (PermissionError, FileNotFoundError):
                continue  # an interpreter of root's alone, or none
            assert done.stdout == "65534 []\n\n", done.stderr
            return
    pytest.skip("no interpreter here may be run by an ordinary user")


def test_what_can_not_be_right_is_refused():
    with pytest.raises(ConfigError, match=r"isolation: must be full or process, got 'none'"):
        run_program("", isolation="none")
    for size in (1, 512.0):
        with pytest.raises(
            ConfigError, match=r"limits\.memory_mib: must be a whole number between 64"
        ):
            Limits(memory_mib=size)
    with pytest.raises(ConfigError, match="cannot be used for programs"):
        run_program("", python="/bin/false")


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("echo setpriv: no new privileges: Operation not permitted >&2; exit 1", SecurityError, "not permitted"),
        ("echo setpriv: fork: Cannot allocate memory >&2; exit 1", ResourceError, "Cannot allocate memory"),
        ("echo python: no library >&2; exit 127", ResourceError, "did not start: python: no library"),
        ("kill -9 $$", ResourceError, "did not start: it was killed"),
    ],
)  # fmt: skip
def test_a_sandbox_that_fails_is_no_result(script, error, message, monkeypatch, tmp_path):
    """A tool that ends before the program begins: an error, never an exit code of the program."""
    tool = tmp_path / "setpriv"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(error, match=message):
        run_program("print(1)", isolation="process")


def test_another_interpreter_with_its_packages(full, fresh_python):
    """The tests' own environment has numpy; this very interpreter shows it when it is named, and
    not otherwise."""
    program = "import numpy; print(int(numpy.arange(3).sum()))"
    assert "No module named 'numpy'" in run_program(program).stderr
    finished = run_program(
        program, python=sys.executable, limits=Limits(memory_mib=4096, processes=64, seconds=60)
    )
    assert finished.stdout == "3\n", finished.stderr


def test_an_interpreter_below_tmp(full):
    """A clone or an environment may lie there; the program sees it, and of the rest of the host's
    /tmp nothing."""
    program = (
        "import os, sys; open('/tmp/mine', 'w').close(); print(sys.prefix, os.listdir('/tmp'))"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/env"], check=True)
        finished = run_program(program, python=f"{folder}/env/bin/python")
        assert finished.stdout.split(maxsplit=1)[0] == f"{folder}/env", finished.stderr
        assert set(literal_eval(finished.stdout.split(maxsplit=1)[1])) == {
            "mine",
            Path(folder).name,
        }
