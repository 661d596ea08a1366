"""Constructors of the sandbox's two errors: the system does not permit it, or one run failed."""

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
    """Return the error for a system that lacks isolation tools or does not permit them."""
    return SecurityError("sandbox", why, state="no program was run.", next=_NEXT)


def failed(why: str) -> ResourceError:
    """Return the error for a sandbox that failed; it implies nothing about the program."""
    return ResourceError("sandbox", why, state="the program was not judged.", next="run again")
