"""The commands that run an interpreter apart: bubblewrap, and tools of util-linux around it.

    unshare               mounts of its own; for an ordinary user by a user namespace
    └── mount             memory for /tmp: so many bytes, so many names, nothing that is executable
        └── bwrap         namespaces, a read-only root, no capabilities, a filter of system calls
            └── setpriv   for root: becomes the user nobody, whose processes the kernel counts
                └── prlimit   limits of each process
                    └── the interpreter

bwrap's own tmpfs bounds no names and lets files be executed, hence the mount; it maps one user,
hence, for root, the map that is written while it waits (`--userns-block-fd`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import PurePath

from . import calls
from .errors import refused
from .interpreter import Interpreter
from .limits import Limits, limit_options

_NOBODY = 65534
TOOLS = ("bwrap", "mount", "unshare", "setpriv", "prlimit")
_OF_PROCESS = ("setpriv", "prlimit")
_ROOT_RIGHTS = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # for setpriv, which gives them up
_MEMORY = "/sys"  # a folder that every system has, and none of whose files a program is shown
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
    """A command, to be continued by the interpreter's arguments, that shows it `python`'s files,
    /program.py and an empty /tmp. SecurityError when a tool is missing.

    Numbers of files that bwrap inherits: the program's source, the filter; for root, where it
    writes its child's pid, and where it waits until `map_users` is done.
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


def restrict(python: Interpreter, limits: Limits) -> list[str]:
    """The same for isolation "process": no new privileges, and limits of each process."""
    tools = find_tools(_OF_PROCESS)
    limited = [tools["prlimit"], *limit_options(limits)]
    return [tools["setpriv"], "--no-new-privs", *limited, *python.command]


def map_users(child: int) -> None:
    """Give root's sandbox, in which bwrap waits as `child`, the users root and nobody.
    SecurityError if they are not to be had; ProcessLookupError if it has ended."""
    try:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(f"0 0 1\n{_NOBODY} {_NOBODY} 1\n")
    except FileNotFoundError as error:
        raise ProcessLookupError(child) from error
    except OSError as error:
        raise refused(f"no user nobody of its own: {error.strerror}") from error


def find_tools(names: tuple[str, ...]) -> dict[str, str]:
    """Where the tools are. SecurityError when one is missing."""
    paths = {name: shutil.which(name) for name in names}
    if missing := [name for name, path in paths.items() if path is None]:
        raise refused(f"{', '.join(missing)} not found in PATH")
    return {name: os.path.realpath(path) for name, path in paths.items() if path}


def compile_filter() -> bytes:
    """The filter of system calls. SecurityError without libseccomp."""
    try:
        return calls.compile_filter()
    except OSError as error:
        raise refused(f"libseccomp makes no filter of system calls: {error}") from error


def _show(paths: list[str]) -> list[str]:
    """bwrap's options to show paths of the host where they are, each once and read-only, and four
    harmless devices."""
    options: list[str] = []
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    shown: list[str] = []
    for path in sorted({*paths, *devices}):
        if any(path.startswith(folder + "/") for folder in shown):
            continue
        shown.append(path)
        for folder in reversed(PurePath(path).parents[:-1]):
            options += ["--dir", str(folder)]  # those that bwrap makes by itself are root's alone
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--dev-bind" if path in devices else "--ro-bind", path, path]
    return options
