"""The seccomp filter that bubblewrap applies to a program (`--seccomp`), built with libseccomp.

bubblewrap already takes away files, network, other processes and capabilities. A program could
still do the following:

- trace its own children, or change the limits of other processes of its user;
- open sockets of families that network namespaces do not cover;
- hold memory that no limit counts (memfd, System V IPC);
- read kernel keys, or make new namespaces.

The filter makes such calls fail with EPERM, so a program sees an ordinary error. clone3 fails with
ENOSYS, because a filter cannot see its flags; libraries then fall back to clone. Calls of another
architecture (32 bits, x32) end the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

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

    Raises OSError if libseccomp is missing or fails.
    """
    library = ctypes.CDLL("libseccomp.so.2")
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
                raise OSError(-status, f"libseccomp refuses a rule for {name}")
        with os.fdopen(os.memfd_create("filter"), "r+b") as file:
            status = library.seccomp_export_bpf(context, file.fileno())
            if status < 0:
                raise OSError(-status, "libseccomp writes no filter")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
