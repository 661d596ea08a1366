"""The two errors of a sandbox: the system does not permit it, or it failed this time."""

from __future__ import annotations

from quiver.schemas.errors import ResourceError, SecurityError

_NEXT = (
    "apt install bubblewrap util-linux mount libseccomp2 (dnf install bubblewrap util-linux "
    "libseccomp) and permit user namespaces (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a "
    "container its seccomp profile), use a remote sandbox, or set isolation = "
    '"process" in the arguments of the function code, which protects neither files nor network'
)


def refused(why: str) -> SecurityError:
    """The error of a system that lacks what isolates programs, or does not permit it."""
    return SecurityError("sandbox", why, state="no program was run.", next=_NEXT)


def failed(why: str) -> ResourceError:
    """The error of a sandbox that failed, which says nothing about the program."""
    return ResourceError("sandbox", why, state="the program was not judged.", next="run again")
