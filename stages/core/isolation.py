"""Command lines that isolate an interpreter: bubblewrap, with util-linux tools around it.

    unshare               mounts of its own; an ordinary user gets them through a user namespace
    └── mount             a tmpfs for /tmp: limited bytes and names, nothing executable
        └── bwrap         namespaces, a read-only root, no capabilities, a filter of system calls
            └── setpriv   for root: becomes the user nobody, so the kernel counts its processes
                └── prlimit   limits of each process
                    └── the interpreter

bwrap's own tmpfs limits no names and allows executable files, hence the separate mount. bwrap maps
only one user, so for root `map_users` writes the map while bwrap waits (`--userns-block-fd`).

bwrap already takes away files, network, other processes and capabilities. A program could still do
the following, which the filter (`--seccomp`, built with libseccomp) makes fail with EPERM, so that
a program sees an ordinary error:

- trace its own children, or change the limits of other processes of its user;
- open sockets of families that network namespaces do not cover;
- hold memory that no limit counts (memfd, System V IPC);
- read kernel keys, or make new namespaces.

clone3 fails with ENOSYS, because a filter cannot see its flags; libraries then fall back to clone.
Calls of another architecture (32 bits, x32) end the process.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import NamedTuple

from quiver.schemas.errors import ConfigError, ResourceError, SecurityError, printable

_NEXT = (
    "apt install bubblewrap util-linux mount libseccomp2 (dnf install bubblewrap util-linux "
    "libseccomp) and permit user namespaces (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a "
    "container its seccomp profile). Or use a remote sandbox, or set isolation = "
    '"process" in the arguments of the function code, which protects neither files nor network'
)
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_ASK = """
import json, sys, sysconfig
paths = [sys.prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
print(json.dumps([paths, sysconfig.get_config_var("LIBDIR")]))
"""
_NOBODY = 65534
_CAP_SYS_ADMIN = 21
TOOLS = ("bwrap", "mount", "unshare", "setpriv", "prlimit")
_OF_PROCESS = ("setpriv", "prlimit")
_ROOT_RIGHTS = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # setpriv needs them and drops them
_MEMORY = "/sys"  # a mount point that every system has; the program never sees its files
_SCRIPT = f"""\
"$1" -t tmpfs -o "$2" none {_MEMORY} || exit
shift 2
exec "$@"
"""
_REFUSED = """
ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd perf_event_open
lookup_dcookie mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick
mount_setattr swapon swapoff quotactl quotactl_fd name_to_handle_at open_by_handle_at fanotify_init
nfsservctl unshare setns keyctl add_key request_key bpf userfaultfd io_uring_setup io_uring_enter
io_uring_register memfd_create memfd_secret shmget msgget semget init_module finit_module
delete_module kexec_load kexec_file_load reboot acct settimeofday clock_settime clock_adjtime
adjtimex syslog personality vhangup sethostname setdomainname iopl ioperm modify_ldt uselib
"""
# CLONE_NEW*: NS, CGROUP, UTS, IPC, USER, PID, NET
_NAMESPACES = (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)
_AF_UNIX = 1
_TIOCSTI = 0x5412
_TIOCLINUX = 0x541C
_32_BITS = 0xFFFFFFFF
# Constants of seccomp.h.
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NOT_EQUAL = 1
_MASKED_EQUAL = 7
_UNKNOWN = -1


def refused(why: str) -> SecurityError:
    """Return the error for a system that lacks isolation tools or does not permit them."""
    return SecurityError("sandbox", why, state="no program was run.", next=_NEXT)


def failed(why: str) -> ResourceError:
    """Return the error for a sandbox that failed; it implies nothing about the program."""
    return ResourceError("sandbox", why, state="the program was not judged.", next="run again")


# -- limits


@dataclass(frozen=True)
class Limits:
    """Resources that one program may use. Raises ConfigError if a value is out of range."""

    seconds: float = 10.0
    """Wall-clock time from the start of its interpreter; also the CPU time of each process."""
    memory_mib: int = 512
    """Address space of each process, and resident memory of all processes together."""
    processes: int = 16
    """Processes and threads at once (isolation "full" only)."""
    files_mib: int = 16
    """Space in its /tmp, and size of the largest file it may write."""
    open_files: int = 64
    """File descriptors of each process."""
    output_kib: int = 64
    """KiB kept of stdout, and of stderr; the rest is read and discarded."""

    def __post_init__(self) -> None:
        for name, least in {
            "seconds": 0.01,
            "memory_mib": 64,
            "processes": 2,
            "files_mib": 1,
            "open_files": 16,
            "output_kib": 1,
        }.items():
            number = getattr(self, name)
            kinds = (int, float) if name == "seconds" else int
            if not isinstance(number, kinds) or not least <= number <= 1 << 20:
                whole = "" if name == "seconds" else "a whole number "
                raise ConfigError(
                    f"limits.{name}",
                    f"must be {whole}between {least} and {1 << 20}, got {number!r}",
                    next=f"correct limits.{name}",
                )


def limit_options(limits: Limits, pids: int | None = None) -> list[str]:
    """Return prlimit's options; none is above the hard limit of this process.

    Args:
        limits: Limits of the program.
        pids: Limit of processes. Pass it only if a user namespace counts the program's processes
            apart from others. Default: not limited.
    """
    seconds = math.ceil(limits.seconds)
    bounds = {
        "as": (limits.memory_mib << 20,) * 2,
        "core": (1, 1),  # with 0 the kernel would still pipe a core to the host's handler
        "cpu": (seconds, seconds + 1),  # SIGXCPU names the cause, SIGKILL ends it later
        "fsize": (limits.files_mib << 20,) * 2,
        "memlock": (0, 0),
        "msgqueue": (0, 0),
        "nofile": (limits.open_files,) * 2,
        "rtprio": (0, 0),
    }
    if pids is not None:
        bounds["nproc"] = (pids, pids)
    options = []
    for name, (soft, hard) in bounds.items():
        allowed = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        if allowed == resource.RLIM_INFINITY:
            allowed = hard
        options.append(f"--{name}={min(soft, allowed)}:{min(hard, allowed)}")
    return options


# -- the interpreter


class Interpreter(NamedTuple):
    """A Python interpreter: its command, to be followed by Python code, and the paths it reads."""

    command: tuple[str, ...]
    paths: tuple[str, ...]


@cache
def find_interpreter(python: str = "") -> Interpreter:
    """Return the interpreter to run programs with.

    Args:
        python: Path of an interpreter, which is used with all packages installed in its
            environment. Default: this interpreter, with the standard library alone.

    Raises:
        ConfigError: `python` cannot be run.
    """
    if not python:
        executable = os.path.realpath(sys._base_executable)
        # the base installation, not the virtual environment that Quiver runs in
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        paths = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
        shown = _shown([*paths, executable], sysconfig.get_config_var("LIBDIR"))
        return Interpreter((executable, "-S"), shown)
    try:
        answer = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        paths, library_folder = json.loads(answer)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"interpreter {printable(python)}",
            f"cannot be used for programs: {type(error).__name__}: {printable(error)}",
            next="name the path of an interpreter (sandbox_python of the function code)",
        ) from error
    executable = os.path.abspath(python)
    # a virtual environment's python is a link, possibly to another link; each must be visible
    links = [executable]
    while os.path.islink(links[-1]) and len(links) < 40:
        folder = os.path.dirname(links[-1])
        links.append(os.path.normpath(os.path.join(folder, os.readlink(links[-1]))))
    return Interpreter((executable,), _shown([*paths, *links], library_folder))


def _shown(paths: list[str], library_folder: str | None) -> tuple[str, ...]:
    """Return the existing paths among `paths`, the interpreter's shared library and the system
    libraries; each link comes with its target."""
    libraries = glob.glob(os.path.join(library_folder, "libpython3*.so*")) if library_folder else []
    shown = set()
    for path in (*paths, *libraries, *_SYSTEM):
        shown.update(filter(os.path.exists, (path, os.path.realpath(path))))
    return tuple(shown)


# -- the command


def isolate(
    python: Interpreter,
    limits: Limits,
    program: int,
    filter: int,
    info_file: int | None = None,
    wait: int | None = None,
) -> list[str]:
    """Return a command that isolates an interpreter, to be followed by the interpreter's arguments.

    The interpreter sees `python`'s files, /program.py and an empty /tmp.

    Args:
        python: Interpreter to run, with the paths it reads.
        limits: Limits of the program.
        program: File descriptor of the program's source, inherited by bwrap.
        filter: File descriptor of the seccomp filter, inherited by bwrap.
        info_file: For root only: file descriptor to which bwrap writes its child's pid.
        wait: For root only: file descriptor on which bwrap waits until `map_users` is done.

    Raises:
        SecurityError: A tool is missing.
    """
    tools = find_tools(TOOLS)
    is_root = info_file is not None
    inner = [tools["prlimit"], *limit_options(limits, pids=limits.processes + (not is_root))]
    paths = [*python.paths, tools["prlimit"]]
    options = ["--seccomp", str(filter)]
    if is_root:
        options += ["--info-fd", str(info_file), "--userns-block-fd", str(wait)]
        options += ["--uid", "0", "--gid", "0"]
        options += [option for right in _ROOT_RIGHTS for option in ("--cap-add", right)]
        paths.append(tools["setpriv"])
        nobody = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
        inner = [tools["setpriv"], *nobody, "--bounding-set=-all", "--inh-caps=-all", *inner]
    else:  # the namespace's only user, whose processes include bwrap's own
        options += ["--uid", str(_NOBODY), "--gid", str(_NOBODY)]
    memory = f"size={limits.files_mib}m,nr_inodes=1024,mode=1777,nosuid,nodev,noexec"
    return [
        *(tools["unshare"], "--mount", *([] if is_root else ["--user", "--map-root-user"])),
        *("/bin/sh", "-c", _SCRIPT, "sh", tools["mount"], memory),
        *(tools["bwrap"], "--unshare-all", "--unshare-user", "--cap-drop", "ALL"),
        *("--new-session", "--die-with-parent", "--hostname", "sandbox", *options),
        *("--bind", _MEMORY, "/tmp", *_show(paths), "--symlink", "/tmp", "/dev/shm"),
        *("--file", str(program), "/program.py", "--remount-ro", "/"),
        *("--chdir", "/tmp", *inner, *python.command),
    ]


def may_mount() -> bool:
    """Return True if this process may mount in namespaces without a user namespace of its own.

    Root in a container often may not, and is then treated like any other user.
    """
    status = Path("/proc/self/status").read_text()
    capabilities = int(re.search(r"CapEff:\s*(\w+)", status)[1], 16)
    return os.geteuid() == 0 and bool(capabilities >> _CAP_SYS_ADMIN & 1)


def restrict(python: Interpreter, limits: Limits) -> list[str]:
    """Return the command for isolation "process": no new privileges, and limits of each process.

    Raises SecurityError if a tool is missing.
    """
    tools = find_tools(_OF_PROCESS)
    limited = [tools["prlimit"], *limit_options(limits)]
    return [tools["setpriv"], "--no-new-privs", *limited, *python.command]


def map_users(child: int) -> None:
    """Map the users root and nobody into root's sandbox, in which bwrap waits as `child`.

    Raises SecurityError if the system refuses the map, ProcessLookupError if `child` has ended.
    """
    try:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(f"0 0 1\n{_NOBODY} {_NOBODY} 1\n")
    except FileNotFoundError as error:
        raise ProcessLookupError(child) from error
    except OSError as error:
        raise refused(f"cannot map a user nobody into the sandbox: {error.strerror}") from error


def find_tools(names: tuple[str, ...]) -> dict[str, str]:
    """Return the resolved path of each tool. Raises SecurityError if one is missing."""
    paths = {name: shutil.which(name) for name in names}
    if missing := [name for name, path in paths.items() if path is None]:
        raise refused(f"{', '.join(missing)} not found in PATH")
    return {name: os.path.realpath(path) for name, path in paths.items() if path}


def _show(paths: list[str]) -> list[str]:
    """Return the bwrap options that show each host path once, in its place and read-only.

    Four harmless devices are added.
    """
    options: list[str] = []
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    shown: list[str] = []
    for path in sorted({*paths, *devices}):
        if any(path.startswith(folder + "/") for folder in shown):
            continue
        shown.append(path)
        for folder in reversed(PurePath(path).parents[:-1]):
            options += ["--dir", str(folder)]  # folders that bwrap makes by itself belong to root
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--dev-bind" if path in devices else "--ro-bind", path, path]
    return options


# -- the filter of system calls


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`: compare a call's argument with a number, or with a masked number."""

    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


@cache
def compile_filter() -> bytes:
    """Return the filter for this machine as BPF bytes.

    Raises SecurityError if libseccomp is missing or fails.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise refused(f"libseccomp makes no filter of system calls: {error}") from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    rules: list[tuple[str, int, list[_Comparison]]] = [
        *((name, errno.EPERM, []) for name in _REFUSED.split()),
        ("clone3", errno.ENOSYS, []),
        *(
            ("clone", errno.EPERM, [_Comparison(0, _MASKED_EQUAL, flag, flag)])
            for flag in _NAMESPACES
        ),
        ("socket", errno.EPERM, [_Comparison(0, _NOT_EQUAL, _AF_UNIX)]),
        ("socketpair", errno.EPERM, [_Comparison(0, _NOT_EQUAL, _AF_UNIX)]),
        ("prlimit64", errno.EPERM, [_Comparison(0, _NOT_EQUAL, 0)]),  # 0: the process itself
        *(
            ("ioctl", errno.EPERM, [_Comparison(1, _MASKED_EQUAL, _32_BITS, request)])
            for request in (_TIOCSTI, _TIOCLINUX)
        ),
    ]
    try:
        for name, number, comparisons in rules:
            call = library.seccomp_syscall_resolve_name(name.encode())
            if call == _UNKNOWN:  # an older libseccomp does not know this call
                continue
            array = (_Comparison * len(comparisons))(*comparisons)
            status = library.seccomp_rule_add_array(
                context, ctypes.c_uint32(_ERRNO | number), call, len(comparisons), array
            )
            if status < 0:
                raise refused(f"libseccomp has no rule for {name}: {os.strerror(-status)}")
        with os.fdopen(os.memfd_create("filter"), "r+b") as file:
            status = library.seccomp_export_bpf(context, file.fileno())
            if status < 0:
                raise refused(f"libseccomp writes no filter: {os.strerror(-status)}")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
