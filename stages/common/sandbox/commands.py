"""Command lines that isolate an interpreter: bubblewrap, with util-linux tools around it.

    unshare               mounts of its own; an ordinary user gets them through a user namespace
    └── mount             a tmpfs for /tmp: limited bytes and names, nothing executable
        └── bwrap         namespaces, a read-only root, no capabilities, a filter of system calls
            └── setpriv   for root: becomes the user nobody, so the kernel counts its processes
                └── prlimit   limits of each process
                    └── the interpreter

bwrap's own tmpfs limits no names and allows executable files, hence the separate mount. bwrap maps
only one user, so for root `map_users` writes the map while bwrap waits (`--userns-block-fd`).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePath

from . import calls
from .errors import refused
from .interpreter import Interpreter
from .limits import Limits, limit_options

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
        raise refused(f"no user nobody of its own: {error.strerror}") from error


def find_tools(names: tuple[str, ...]) -> dict[str, str]:
    """Return the resolved path of each tool. Raises SecurityError if one is missing."""
    paths = {name: shutil.which(name) for name in names}
    if missing := [name for name, path in paths.items() if path is None]:
        raise refused(f"{', '.join(missing)} not found in PATH")
    return {name: os.path.realpath(path) for name, path in paths.items() if path}


def compile_filter() -> bytes:
    """Return the seccomp filter as bytes. Raises SecurityError if libseccomp cannot make it."""
    try:
        return calls.compile_filter()
    except OSError as error:
        raise refused(f"libseccomp makes no filter of system calls: {error}") from error


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
