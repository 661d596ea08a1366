"""Runs one program in a sandbox of its own; started as `python -I -S launcher REPORT LIFELINE` by
quiver.stages.common.sandbox.

    launcher                waits for the program, its deadline, the end of whoever asked (LIFELINE)
    └── first process       pid 1 of the new namespaces: builds the root, waits, and takes
        |                   everybody with it when it ends
        └── program         nobody, no privileges, limits, a filter of system calls; then the
                            interpreter is executed

Stdin holds the job (marshal of a dict, see `sandbox.run`); stdout and stderr become the program's.
REPORT gets one dict: how the program ended, or which layer the system refused, or what failed.
Nothing is run where a layer that was asked for is missing.
"""

from __future__ import annotations

import marshal
import os
import resource

import keeper
import kernel
import root
import seccomp
import watch

NOBODY = 65534
_EXHAUSTED = (11, 12, 23, 24)  # EAGAIN, ENOMEM, ENFILE, EMFILE: a want of means, not of permission


class Refused(Exception):
    """A layer that the system does not permit, and the errno that it gave."""


def set_up(layer: str, call, *arguments) -> None:
    """Call what sets up a layer; what the system refuses there is refused under the layer's
    name."""
    try:
        call(*arguments)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        raise Refused(layer, error.errno) from error


def main(report: int, lifeline: int) -> None:
    """Run the job of stdin and report."""
    for handle in (report, lifeline):
        os.set_inheritable(handle, False)
    with open(0, "rb", closefd=False) as file:
        job = marshal.load(file)
    try:
        outcome = supervise(job, lifeline)
    except Refused as error:
        outcome = {"refused": error.args}
    except OSError as error:
        outcome = {"failed": [str(error)]}
    try:
        os.write(report, marshal.dumps(outcome))
    except BrokenPipeError:  # whoever asked is gone, and can not tidy up
        if job["folder"]:
            import shutil  # slow to import

            shutil.rmtree(job["folder"], ignore_errors=True)


def supervise(job: dict, lifeline: int) -> dict:
    """Start the first process, wait for the end of the program or end it, and leave nobody
    behind."""
    keeper.set_oom_score(1000)  # programs go before the one who scores them
    job["privileged"] = os.geteuid() == 0
    if job["full"]:
        _unshare(job["privileged"])
    else:
        keeper.adopt_orphans()
    news, tell = os.pipe()
    first = _fork(tell, _first_process, job, tell)
    os.close(tell)
    try:
        return watch.until_it_ends(job, first, news, lifeline)
    finally:
        watch.end(first)


def _unshare(privileged: bool) -> None:
    """New user, network, IPC, UTS and (for children) process namespaces; a process outside must
    write the ids' map."""
    go, tell = os.pipe()
    owner = os.getpid()
    mapper = os.fork()
    if mapper == 0:
        os.close(tell)
        # root is mapped beside nobody, so that it may set up what nobody can not read
        both = f"0 0 1\n{NOBODY} {NOBODY} 1\n"
        maps = {"uid_map": both, "gid_map": both}
        if not privileged:  # any other user is shown as nobody
            maps = {
                "setgroups": "deny",
                "uid_map": f"{NOBODY} {os.geteuid()} 1\n",
                "gid_map": f"{NOBODY} {os.getegid()} 1\n",
            }
        os._exit(_map_ids(go, owner, maps))
    os.close(go)
    try:
        set_up("user namespace", kernel.unshare, kernel.NEWUSER)
        os.write(tell, b"1")
    finally:
        os.close(tell)
        number = os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1])
    if number:
        raise Refused("uid of its own (user namespace)", abs(number))
    set_up("network namespace", kernel.unshare, kernel.NEWNET)
    set_up("IPC namespace", kernel.unshare, kernel.NEWIPC)
    set_up("UTS namespace", kernel.unshare, kernel.NEWUTS)
    set_up("UTS namespace", kernel.hostname, "sandbox")
    set_up("process namespace", kernel.unshare, kernel.NEWPID)


def _map_ids(go: int, owner: int, maps: dict[str, str]) -> int:
    """Write the maps of the process `owner` as soon as it says so; an errno, or 0."""
    if not os.read(go, 1):
        return 0
    try:
        for name, text in maps.items():
            with open(f"/proc/{owner}/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        return error.errno
    return 0


def _fork(pipe: int, work, *arguments) -> int:
    """A process that does the work, says in `pipe` what came of it, if anybody hears it, and ends
    without another line of code; its pid."""
    child = os.fork()
    if child:
        return child
    last_words = "failed|it ended"
    try:
        last_words = work(*arguments)
    except Refused as error:
        last_words = "|".join(["refused", *map(str, error.args)])
    except BaseException as error:
        last_words = f"failed|{type(error).__name__}: {error}"
    finally:
        try:
            os.write(pipe, last_words.replace("\n", " ").encode(errors="replace") + b"\n")
        finally:
            os._exit(1)


def _first_process(job: dict, tell: int) -> str:
    """How the program ended. Orphans are its children's children and end as zombies here."""
    keeper.die_with_parent()
    kernel.hide_memory()
    os.umask(0o022)
    if job["full"]:
        set_up("mount namespace", kernel.unshare, kernel.NEWNS)
        set_up("file system of its own", root.build, job["paths"], job["files_mib"])
    program = job["folder"] + "/program.py"
    stdin_path = job["folder"] + "/stdin"
    for path, content in ((program, job["program"]), (stdin_path, job["stdin"])):
        with open(path, "wb") as file:
            file.write(content)
    stdin = os.open(stdin_path, os.O_RDONLY)
    os.unlink(stdin_path)
    if job["full"]:
        set_up("file system of its own", root.seal)
    hear, fault = os.pipe()
    child = _fork(fault, _become, job, program, stdin)
    os.close(fault)
    with open(hear, "rb") as file:  # closed by a successful exec
        refusal = file.read()
    if refusal:
        return refusal.decode().rstrip()
    os.write(tell, b"started\n")
    while True:
        pid, status = os.wait()
        if pid == child:
            return f"ended|{os.waitstatus_to_exitcode(status)}"


def _become(job: dict, program: str, stdin: int) -> None:
    """The program: everything is given up, then the interpreter is executed."""
    os.setsid()
    os.dup2(stdin, 0)
    os.umask(0o077)
    os.chdir(job["cwd"])
    set_up("limits", _limit, job)
    if job["full"]:
        set_up("dropped uid", _become_nobody, job["privileged"])
    set_up("no new privileges", kernel.no_new_privileges)
    machine = os.uname().machine
    if job["full"] and machine in seccomp.ARCHITECTURES:
        set_up("seccomp filter", kernel.filter_calls, seccomp.program(machine))
    os.execve(job["command"][0], [*job["command"], program], job["environment"])


def _become_nobody(privileged: bool) -> None:
    kernel.drop_bounding_set()
    if privileged:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.drop_capabilities()


def _limit(job: dict) -> None:
    """Limits of each process; the number of processes only where the user namespace counts them
    apart from others."""
    limits = {
        resource.RLIMIT_AS: job["memory_mib"] << 20,
        resource.RLIMIT_CORE: 1,  # at 0 the kernel still pipes a core to a handler of the host's
        resource.RLIMIT_FSIZE: job["files_mib"] << 20,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_CPU: job["cpu_seconds"],
    }
    if job["full"]:
        above = 0 if job["privileged"] else 2  # the two above it, where the uid is one
        limits[resource.RLIMIT_NPROC] = job["processes"] + above
    for kind, soft in limits.items():
        hard = soft + (kind == resource.RLIMIT_CPU)  # SIGXCPU tells, SIGKILL a second later ends it
        allowed = resource.getrlimit(kind)[1]
        if allowed == resource.RLIM_INFINITY:
            allowed = hard
        resource.setrlimit(kind, (min(soft, allowed), min(hard, allowed)))
