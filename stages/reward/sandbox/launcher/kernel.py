"""The system calls of Linux that Python does not offer, through ctypes. Each raises OSError with
the kernel's errno.

Numbers and structures: the manual pages of unshare(2), mount(2), pivot_root(2), mount_setattr(2),
prctl(2) and capset(2). Stdlib only: the launcher runs outside of any package.
"""

from __future__ import annotations

import ctypes
import os

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_RDONLY = 2, 4, 8, 1
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _CHILD_SUBREAPER, _NO_NEW_PRIVS, _CAP_AMBIENT = (
    1,
    4,
    22,
    24,
    36,
    38,
    47,
)
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63
_SYS_MOUNT_SETATTR = 442  # the same on every architecture
_SYS_PIVOT_ROOT = {"x86_64": 155}.get(os.uname().machine, 41)
_EINVAL = 22

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def unshare(flags: int) -> None:
    """Give this process namespaces of its own."""
    _checked(_libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2); `kind` None for bind mounts and changes of propagation."""
    _checked(
        _libc.mount(
            source.encode(),
            target.encode(),
            kind and kind.encode(),
            ctypes.c_ulong(flags),
            options.encode(),
        )
    )


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def restrict(target: str, attributes: int) -> None:
    """Add attributes to the mount at `target` and to all mounts below it (Linux 5.12)."""
    wanted = _MountAttr(attributes, 0, 0, 0)
    path = ctypes.c_char_p(target.encode())
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    _checked(
        _libc.syscall(
            _SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(wanted), size
        )
    )


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root; the former root is then found at `old`, a folder in it."""
    _checked(_libc.syscall(_SYS_PIVOT_ROOT, new.encode(), old.encode()))


def detach(target: str) -> None:
    """Take the mount and all below it out of sight."""
    _checked(_libc.umount2(target.encode(), _MNT_DETACH))


def hostname(name: str) -> None:
    _checked(_libc.sethostname(name.encode(), len(name)))


def prctl(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *padded))


def die_with_parent() -> None:
    """SIGKILL when the parent ends, however it ends."""
    prctl(_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    prctl(_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Neither ptrace, nor /proc/PID/mem, nor a core file for processes without privileges."""
    prctl(_DUMPABLE, 0)


def no_new_privileges() -> None:
    """No file that is executed can give more rights, now or in any descendant."""
    prctl(_NO_NEW_PRIVS, 1)


def drop_bounding_set() -> None:
    """Give up, for good, what capabilities an exec could bring back."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == _EINVAL:  # the kernel knows no further ones
                break
            raise


def drop_capabilities() -> None:
    """Give up every capability."""
    prctl(_CAP_AMBIENT, 4)  # PR_CAP_AMBIENT_CLEAR_ALL
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())))


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def filter_calls(program: bytes) -> None:
    """Put a seccomp filter (classic BPF) on this process and all its descendants."""
    held = _Program(len(program) // 8, program)
    address = ctypes.cast(ctypes.byref(held), ctypes.c_void_p).value
    prctl(_SECCOMP, 2, address)
