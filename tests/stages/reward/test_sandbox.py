"""The sandbox for real: programs that try to get out, limits, what is left behind, and refusal
where a layer is missing.

Fault row 45: model-written code tries files, network, a fork bomb. Where this system permits no
full isolation, the tests of it are skipped with the sandbox's own reason, and
`test_where_a_layer_is_missing_nothing_is_run` still runs.
"""

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from ast import literal_eval
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError, ResourceError, SecurityError
from quiver.stages.common import sandbox
from quiver.stages.common.sandbox import Limits, check, interpreter, run_program
from quiver.stages.common.sandbox.launcher import seccomp
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
    own, found = os.readlink("/proc/self/ns/pid"), set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") != own:
                found.add(int(name))
        except OSError:
            continue  # gone, or another user's
    return found


def nobody_is_left(before: set[int]) -> bool:
    deadline = time.monotonic() + 10
    while (left := strangers() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


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


def test_the_corpus_is_large_enough():
    assert len({one.name for one in escapes.ALL}) == len(escapes.ALL) >= 25
    assert sum(one.works for one in escapes.ALL) >= 10


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
    assert (
        run_program(
            "print([name for name in globals() if name[0] != '_'])", isolation=isolation
        ).stdout
        == "[]\n"
    )


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


@BOTH
def test_the_environment_is_clean_and_the_same_each_time(permitted, isolation, monkeypatch):
    monkeypatch.setenv("QUIVER_CANARY", CANARY)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    program = (
        "import os, sys\nprint(sorted(os.environ), hash('x'), os.listdir('.'), '/somewhere' in "
        "sys.path, os.umask(0))"
    )
    first, second = (run_program(program, isolation=isolation).stdout for _ in range(2))
    assert first == second
    names, _, rest = first.partition("]")
    assert {name.strip("' ") for name in names.strip("[").split(",")} == {
        "HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONUTF8",
        "TMPDIR",
    }  # fmt: skip
    assert rest.split()[1:] == ["[]", "False", "63"]


@BOTH
def test_limits(permitted, isolation):
    def run(program, **limits):
        return run_program(program, limits=Limits(**limits), isolation=isolation)

    slow = run("import time\nprint('begun', flush=True)\ntime.sleep(60)", seconds=1)
    assert (slow.timed_out, slow.killed_by, slow.exit_code, slow.stdout) == (
        True,
        "time",
        -9,
        "begun\n",
    )
    assert 1 <= slow.seconds < 10
    assert "MemoryError" in run("bytearray(200 << 20)", memory_mib=100).stderr
    assert run("bytearray(200 << 20)", memory_mib=400).exit_code == 0
    assert (
        "File too large"
        in run("open('x', 'wb').write(bytes(3 << 20))", files_mib=1, seconds=10).stderr
    )
    assert (
        "Too many open files"
        in run("x = [open('/dev/null') for _ in range(40)]", open_files=32).stderr
    )
    loud = run("import sys\nprint('x' * 5000)\nsys.stderr.write('y' * 5000)", output_kib=1)
    assert (loud.stdout, loud.stderr, loud.exit_code) == ("x" * 1024, "y" * 1024, 0)
    assert run("import os\nos.abort()").killed_by == "SIGABRT"
    # one of the real-time signals, which have no name
    assert run("import os\nos.kill(os.getpid(), 40)").killed_by == "signal 40"


def test_cpu_time_is_limited_beside_the_clock(full):
    """Signal 24 is what the kernel sends when it is used up; the clock still has nine seconds
    then."""
    finished = run_program("import os\nos.kill(os.getpid(), 24)")
    assert (finished.timed_out, finished.killed_by) == (True, "cpu")
    limits = run_program(
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))",
        limits=Limits(seconds=2.5),
    )
    assert limits.stdout == "(3, 4)\n"


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
def test_whoever_asked_may_die(permitted, isolation, tmp_path):
    """Killed, it leaves nobody and nothing: neither the program, nor the processes around it, nor
    their folder."""
    code = f"""
from quiver.stages.common.sandbox import Limits, run_program
run_program("import time; time.sleep(100)", limits=Limits(seconds=100), isolation={isolation!r})
"""
    asker = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        deadline = time.monotonic() + 60
        while not (started := below(asker.pid, 3)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert started, "the program did not start"
    finally:
        asker.kill()
        asker.wait()
    deadline = time.monotonic() + 10
    while (
        left := [pid for pid in started if Path(f"/proc/{pid}").exists()]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
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


# -- where it can not be

# In a user namespace of its own, where one kind of namespace is forbidden, as a container or an
# administrator would do it.
FORBID = """
import os, sys
sys.path.insert(0, "stages/common/sandbox/launcher")
import kernel
user, group = os.geteuid(), os.getegid()
kernel.unshare(kernel.NEWUSER)
shown = 0 if sys.argv[1] == "ids" else 1000
for name, text in {"setgroups": "deny", "uid_map": f"{shown} {user} 1", "gid_map": f"{shown} {group} 1"}.items():
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
if sys.argv[1] != "ids":
    with open(f"/proc/sys/user/max_{sys.argv[1]}_namespaces", "w") as file:
        file.write("0")
from quiver.stages.reward.functions import FUNCTIONS
from quiver.stages.common.sandbox import run_program
program = f"open({sys.argv[2]!r}, 'a').write('was here ')"
for attempt in (lambda: run_program(program), lambda: FUNCTIONS["code"].function([program], ["assert True"])):
    try:
        print(attempt())
    except Exception as error:
        print(error)
print(run_program(program, isolation="process").exit_code)
"""
LAYERS = {
    "user": "user namespace",
    "net": "network namespace",
    "mnt": "mount namespace",
    "pid": "process namespace",
    "ids": "uid of its own (user namespace)",
    "ipc": "IPC namespace",
    "uts": "UTS namespace",
}


@pytest.mark.parametrize("kind", LAYERS)
def test_where_a_layer_is_missing_nothing_is_run(kind, tmp_path):
    try:
        check("full")
    except SecurityError as error:  # then this very system is the case
        assert (
            "does not permit the layer" in error.message and 'isolation = "process"' in error.next
        )
        return
    touched = tmp_path / "touched"
    done = subprocess.run(
        [sys.executable, "-c", FORBID, kind, str(touched)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    refusal = f"E-SECURITY sandbox: the system does not permit the layer {LAYERS[kind]}: "
    assert (
        done.stdout.count(refusal) == done.stdout.count('isolation = "process" asks for less') == 2
    ), done.stdout + done.stderr
    assert done.stdout.endswith("\n0\n"), "and with less it runs"
    assert touched.read_text() == "was here "  # once, by the one that asked for less


UNPRIVILEGED = """
from quiver.stages.common.sandbox import check, run_program
check()
print(run_program("import os; print(os.getuid(), os.listdir('/tmp'))").stdout)
"""


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
        for python in (interpreter.find().command[0], "/usr/bin/python3"):
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
    with pytest.raises(ConfigError, match="can not be used for programs"):
        run_program("", python="/bin/false")


def test_a_sandbox_that_fails_is_no_result(monkeypatch, tmp_path):
    """The launcher is gone, or answers nothing: an error, never an exit code of the program."""
    monkeypatch.setattr("quiver.stages.common.sandbox.run._LAUNCHER", tmp_path / "missing")
    with pytest.raises(ResourceError, match="its launcher died with exit code"):
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


# -- the filter of system calls


def decide(program: bytes, number: int, arch: int, *arguments: int) -> int:
    """What a filter says of a call: the instructions of classic BPF that it may use, as
    linux/filter.h describes them."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", program))
    at = loaded = 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        if kind == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (loaded,) = struct.unpack_from("=I", data, value)
        elif kind == 0x06:  # BPF_RET | BPF_K
            return value
        else:  # BPF_JMP | BPF_K with JEQ, JGE, JSET
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            at += if_true if holds else if_false


ALLOWED, KILLED, NOT_PERMITTED, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
# from asm/unistd.h: read, openat, getpid, ptrace, mount, clone, socket, ioctl, prlimit64, clone3
CALLS = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0,
            "openat": 257,
            "getpid": 39,
            "ptrace": 101,
            "mount": 165,
            "clone": 56,
            "socket": 41,
            "ioctl": 16,
            "prlimit": 302,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "read": 63,
            "openat": 56,
            "getpid": 172,
            "ptrace": 117,
            "mount": 40,
            "clone": 220,
            "socket": 198,
            "ioctl": 29,
            "prlimit": 261,
        },
    ),
}


@pytest.mark.parametrize("machine", CALLS)
def test_the_filter_of_each_architecture(machine):
    arch, number = CALLS[machine]
    program = seccomp.program(machine)

    def say(name, *arguments):
        return decide(program, number[name], arch, *arguments)

    assert {say(name) for name in ("read", "openat", "getpid")} == {ALLOWED}
    assert {say(name) for name in ("ptrace", "mount")} == {NOT_PERMITTED}
    assert [say("clone", flags) for flags in (17, 0x3D0F00, 0x10000011, 0x20011)] == [
        ALLOWED,
        ALLOWED,
        NOT_PERMITTED,
        NOT_PERMITTED,
    ]
    assert [say("socket", family) for family in (1, 2, 10, 16, 40)] == [ALLOWED] + [
        NOT_PERMITTED
    ] * 4
    assert [say("ioctl", 0, request) for request in (0x5401, 0x5412, 0x541C)] == [
        ALLOWED,
        NOT_PERMITTED,
        NOT_PERMITTED,
    ]
    assert [say("prlimit", pid) for pid in (0, 1)] == [ALLOWED, NOT_PERMITTED]
    assert decide(program, 435, arch) == NO_SUCH_CALL
    assert decide(program, 0, 0x40000003) == KILLED  # of i386
    assert machine != "x86_64" or decide(program, 0x40000000, arch) == KILLED  # of x32
