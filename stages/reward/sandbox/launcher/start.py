"""Runs one program in a sandbox of its own; started as `python -I -S launcher REPORT LIFELINE` by
quiver.stages.reward.sandbox.

    launcher                waits: for the program, for its deadline, for the end of whoever asked (LIFELINE closes)
    └── first process       pid 1 of the new namespaces: builds the root, waits, and takes everybody with it when it ends
        └── the program     nobody, no privileges, limits, a filter of system calls; then the interpreter is executed

Stdin holds the job (marshal of a dict, see `sandbox.run`); stdout and stderr become the program's.
REPORT gets one dict: how the program ended, or which layer the system refused, or what failed.
Nothing is run where a layer that was asked for is missing.
"""

from __future__ import annotations

import marshal
import os
import resource

import kernel
import root
import seccomp
import watch

NOBODY = 65534
_EXHAUSTED = (11, 12, 23, 24)  # EAGAIN, ENOMEM, ENFILE, EMFILE: a want of means, not of permission


class Refused(Exception):
    """A layer that the system does not permit."""


class layer:
    """What the system refuses inside is refused under this name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, OSError) and error.errno not in _EXHAUSTED:
            raise Refused(self.name, error.errno, error.strerror) from error


def main(report: int, lifeline: int) -> None:
    """Run the job of stdin and report."""
    for handle in (report, lifeline):
        os.set_inheritable(handle, False)
    with open(0, "rb", closefd=False) as file:
        job = marshal.load(file)
    try:
        answer = supervise(job, lifeline)
    except Refused as error:
        answer = {"refused": error.args}
    except OSError as error:
        answer = {"failed": str(error)}
    try:
        os.write(report, marshal.dumps(answer))
    except BrokenPipeError:  # whoever asked is gone, and can not tidy up
        if job["folder"]:
            import shutil  # slow to import

            shutil.rmtree(job["folder"], ignore_errors=True)


def supervise(job: dict, lifeline: int) -> dict:
    """Start the first process, wait for the end of the program or end it, and leave nobody
    behind."""
    full = job["isolation"] == "full"
    _offer_to_the_oom_killer()
    privileged = os.geteuid() == 0
    if full:
        _unshare(privileged)
    else:
        kernel.adopt_orphans()
    news, tell = os.pipe()
    child = os.fork()
    if child == 0:
        _first(job, full, privileged, tell)
    os.close(tell)
    try:
        return watch.until_it_ends(job, child, news, lifeline)
    finally:
        watch.end(child)


# -- before the program


def _offer_to_the_oom_killer() -> None:
    """When the machine runs out of memory, programs go before the one who scores them."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # a system without it has no such order


def _unshare(privileged: bool) -> None:
    """New user, network, IPC, UTS and (for children) process namespaces; a process outside must
    write the ids' map."""
    go, tell = os.pipe()
    owner, user, group = os.getpid(), os.geteuid(), os.getegid()
    mapper = os.fork()
    if mapper == 0:
        os.close(tell)
        os._exit(_map_ids(go, owner, None if privileged else (user, group)))
    os.close(go)
    try:
        with layer("user namespace"):
            kernel.unshare(kernel.NEWUSER)
        os.write(tell, b"1")
    finally:
        os.close(tell)
        status = os.waitpid(mapper, 0)[1]
    if status:
        number = os.waitstatus_to_exitcode(status)
        raise Refused("uid of its own (user namespace)", number, os.strerror(abs(number)))
    for name, flag in (
        ("network namespace", kernel.NEWNET),
        ("IPC namespace", kernel.NEWIPC),
        ("UTS namespace", kernel.NEWUTS),
        ("process namespace", kernel.NEWPID),
    ):
        with layer(name):
            kernel.unshare(flag)
    with layer("UTS namespace"):
        kernel.hostname("sandbox")


def _map_ids(go: int, owner: int, own: tuple[int, int] | None) -> int:
    """Write the maps of the process `owner` as soon as it says so; an errno, or 0.

    Root is mapped beside nobody, so that it may set up what nobody can not read. Any other user is
    shown as nobody.
    """
    if not os.read(go, 1):
        return 0
    both = f"0 0 1\n{NOBODY} {NOBODY} 1\n"
    maps = {"uid_map": both, "gid_map": both}
    if own:
        maps = {
            "setgroups": "deny",
            "uid_map": f"{NOBODY} {own[0]} 1\n",
            "gid_map": f"{NOBODY} {own[1]} 1\n",
        }
    try:
        for name, text in maps.items():
            with open(f"/proc/{owner}/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        return error.errno
    return 0


def _first(job: dict, full: bool, privileged: bool, tell: int) -> None:
    """The first process. Never returns."""
    said = "failed|the first process ended"
    try:
        kernel.die_with_parent()
        kernel.hide_memory()
        os.umask(0o022)
        if full:
            with layer("mount namespace"):
                kernel.unshare(kernel.NEWNS)
            with layer("file system of its own"):
                root.build(job["paths"], job["tmp_bytes"])
        program, stdin = _place(job)
        if full:
            with layer("file system of its own"):
                root.seal()
        said = _run(job, full, privileged, (program, stdin), tell)
    except Refused as error:
        said = "|".join(["refused", *map(str, error.args)])
    except BaseException as error:
        said = f"failed|{type(error).__name__}: {error}"
    finally:
        _last_words(tell, said)


def _place(job: dict) -> tuple[str, int]:
    """Write the program where it is run from; its path, and the open file of its stdin, which has
    no name any more."""
    path = job["folder"] + "/program.py"
    with open(path, "wb") as file:
        file.write(job["program"])
    with open(job["folder"] + "/stdin", "wb") as file:
        file.write(job["stdin"])
    stdin = os.open(job["folder"] + "/stdin", os.O_RDONLY)
    os.unlink(job["folder"] + "/stdin")
    return path, stdin


def _run(job: dict, full: bool, privileged: bool, files: tuple[str, int], tell: int) -> str:
    """Start the program and wait for it; what to tell. Orphans are its children's children and end
    as zombies here."""
    hear, fault = os.pipe()
    program = os.fork()
    if program == 0:
        _become(job, full, privileged, files, fault)
    os.close(fault)
    with open(hear, "rb") as file:  # closed by a successful exec
        wrong = file.read()
    if wrong:
        return wrong.decode().rstrip()
    os.write(tell, b"started\n")
    while True:
        pid, status = os.wait()
        if pid == program:
            return f"ended|{os.waitstatus_to_exitcode(status)}"


def _become(job: dict, full: bool, privileged: bool, files: tuple[str, int], fault: int) -> None:
    """The program: everything is given up, then the interpreter is executed. Never returns."""
    said = ""
    try:
        os.setsid()
        os.dup2(files[1], 0)
        os.umask(0o077)
        os.chdir(job["cwd"])
        with layer("limits"):
            _limit(job, full, privileged)
        if full:
            with layer("dropped uid"):
                kernel.drop_bounding_set()
                if privileged:
                    os.setgroups([])
                    os.setresgid(NOBODY, NOBODY, NOBODY)
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                kernel.drop_capabilities()
        with layer("no new privileges"):
            kernel.no_new_privileges()
        if full and seccomp.supported():
            with layer("seccomp filter"):
                kernel.filter_calls(seccomp.program(os.uname().machine))
        os.execve(job["command"][0], [*job["command"], files[0]], job["environment"])
    except Refused as error:
        said = "|".join(["refused", *map(str, error.args)])
    except BaseException as error:
        said = f"failed|{type(error).__name__}: {error}"
    finally:
        _last_words(fault, said)


def _last_words(pipe: int, said: str) -> None:
    """Say it, if anybody hears it, and end this process without another line of code."""
    try:
        os.write(pipe, said.replace("\n", " ").encode(errors="replace") + b"\n")
    finally:
        os._exit(1)


def _limit(job: dict, full: bool, privileged: bool) -> None:
    """Limits of each process; the number of processes only where the user namespace counts them
    apart from others."""
    wanted = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_CORE: 1,  # at 0 the kernel still pipes a core to a handler of the host's
        resource.RLIMIT_FSIZE: job["tmp_bytes"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_CPU: job["cpu_seconds"],
    }
    if full:
        wanted[resource.RLIMIT_NPROC] = job["processes"] + (
            0 if privileged else 2
        )  # the two above it, where the uid is one
    for kind, most in wanted.items():
        allowed = resource.getrlimit(kind)[1]
        extra = (
            1 if kind == resource.RLIMIT_CPU else 0
        )  # SIGXCPU tells the reason, SIGKILL a second later ends it
        soft, hard = (
            n if allowed == resource.RLIM_INFINITY else min(n, allowed)
            for n in (most, most + extra)
        )
        resource.setrlimit(kind, (soft, hard))
