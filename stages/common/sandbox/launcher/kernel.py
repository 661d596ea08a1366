"""The system calls of Linux that Python does not offer, through ctypes. Each raises OSError with
the kernel's errno.

Numbers and structures: the manual pages of unshare(2), mount(2), pivot_root(2), mount_setattr(2),
prctl(2) and capset(2). Stdlib only: the launcher runs outside of any package.
"""

from __future__ import annotations

import ctypes
import os
import struct

NEWNS = 0x20000
NEWUTS = 0x4000000
NEWIPC = 0x8000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
ATTR_RDONLY = 1
ATTR_NOSUID = 2
ATTR_NODEV = 4
ATTR_NOEXEC = 8
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MNT_DETACH = 2
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63
_SYS_MOUNT_SETATTR = 442  # the same on every architecture
_SYS_PIVOT_ROOT = {"x86_64": 155}.get(os.uname().machine, 41)
_EINVAL = 22

_libc = ctypes.CDLL(None, use_errno=True)


def _check(status: int) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def unshare(flags: int) -> None:
    """Give this process namespaces of its own."""
    _check(_libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2); `kind` is empty for bind mounts and changes of propagation."""
    names = (source.encode(), target.encode(), kind.encode())
    _check(_libc.mount(*names, ctypes.c_ulong(flags), options.encode()))


def restrict(target: str, attributes: int) -> None:
    """Add attributes to the mount at `target` and to all mounts below it (Linux 5.12)."""
    attr = struct.pack("=4Q", attributes, 0, 0, 0)  # to set, to clear, propagation, user namespace
    arguments = (_AT_FDCWD, target.encode(), _AT_RECURSIVE, attr, ctypes.c_size_t(len(attr)))
    _check(_libc.syscall(_SYS_MOUNT_SETATTR, *arguments))


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root; the former root is then found at `old`, a folder in it."""
    _check(_libc.syscall(_SYS_PIVOT_ROOT, new.encode(), old.encode()))


def detach(target: str) -> None:
    """Take the mount and all below it out of sight."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH))


def hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name)))


def _prctl(option: int, *arguments: int) -> None:
    padded = (*arguments, 0, 0, 0)[:4]
    _check(_libc.prctl(option, *map(ctypes.c_ulong, padded)))


def hide_memory() -> None:
    """Neither ptrace, nor /proc/PID/mem, nor a core file for processes without privileges."""
    _prctl(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    """No file that is executed can give more rights, now or in any descendant."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_bounding_set() -> None:
    """Give up, for good, what capabilities an exec could bring back."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == _EINVAL:  # the kernel knows no further ones
                break
            raise


def drop_capabilities() -> None:
    """Give up every capability."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(none)))


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def filter_calls(instructions: bytes) -> None:
    """Put a seccomp filter (classic BPF) on this process and all its descendants."""
    program = _Program(len(instructions) // 8, instructions)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))
