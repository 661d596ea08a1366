"""A seccomp filter: which system calls a program may not make. A list of what is refused, for
x86_64 and aarch64.

Refused calls fail with EPERM, so that a program sees an ordinary error: tracing and reading other
processes, mounts, new namespaces, kernel keys, BPF, io_uring, modules, clocks, and memory that no
limit counts (memfd, System V IPC). Sockets exist as AF_UNIX alone: AF_VSOCK, AF_ALG and the like
know no network namespace. A process may set no other's limits. clone3 fails with ENOSYS, because a
filter can not see its flags; libraries then use clone. Calls of another architecture (32 bits, x32)
end the process.

The instructions are those of classic BPF on `struct seccomp_data` (nr, arch, ip, args): seccomp(2),
linux/filter.h.
"""

from __future__ import annotations

import struct

# name, number on x86_64, number on aarch64 (- where there is no such call)
_REFUSED = """
ptrace 101 117
process_vm_readv 310 270
process_vm_writev 311 271
process_madvise 440 440
kcmp 312 272
pidfd_getfd 438 438
perf_event_open 298 241
lookup_dcookie 212 18
mount 165 40
umount2 166 39
pivot_root 155 41
chroot 161 51
open_tree 428 428
move_mount 429 429
fsopen 430 430
fsconfig 431 431
fsmount 432 432
fspick 433 433
mount_setattr 442 442
swapon 167 224
swapoff 168 225
quotactl 179 60
quotactl_fd 443 443
name_to_handle_at 303 264
open_by_handle_at 304 265
fanotify_init 300 262
nfsservctl 180 42
unshare 272 97
setns 308 268
keyctl 250 219
add_key 248 217
request_key 249 218
bpf 321 280
userfaultfd 323 282
io_uring_setup 425 425
io_uring_enter 426 426
io_uring_register 427 427
memfd_create 319 279
memfd_secret 447 447
shmget 29 194
msgget 68 186
semget 64 190
init_module 175 105
finit_module 313 273
delete_module 176 106
kexec_load 246 104
kexec_file_load 320 294
reboot 169 142
acct 163 89
settimeofday 164 170
clock_settime 227 112
clock_adjtime 305 266
adjtimex 159 171
syslog 103 116
personality 135 92
vhangup 153 58
sethostname 170 161
setdomainname 171 162
iopl 172 -
ioperm 173 -
modify_ldt 154 -
uselib 134 -
"""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Those for which there is a filter, as uname names them."""
_NAMESPACES = 0x7E020000  # CLONE_NEW*, without CLONE_NEWTIME, whose bit is a signal's in clone
_AF_UNIX = 1
_TIOCSTI = 0x5412
_TIOCLINUX = 0x541C
_X32 = 0x40000000

# classic BPF: load a word; jump where it equals, is at least, has a bit of; return
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_EPERM = 0x00050000 | 1
_ENOSYS = 0x00050000 | 38
# offsets in seccomp_data; of an argument the low half counts
_NUMBER = 0
_ARCH = 4
_ARGUMENTS = 16


def program(machine: str) -> bytes:
    """The filter for one of ARCHITECTURES; 8 bytes an instruction."""
    column = list(ARCHITECTURES).index(machine)
    code = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, ARCHITECTURES[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_op(_AT_LEAST, _X32, 0, 1), _op(_RETURN, _KILL)]
    for row in _REFUSED.split("\n")[1:-1]:
        number = row.split()[1 + column]
        if number != "-":
            code += _when(int(number), [_op(_RETURN, _EPERM)])
    for numbers, block in (  # in the order of ARCHITECTURES
        ((435, 435), [_op(_RETURN, _ENOSYS)]),  # clone3
        ((56, 220), _refuse_unless(0, _op(_ANY_BIT, _NAMESPACES, 0, 1))),  # clone
        ((41, 198), _refuse_unless(0, _op(_EQUAL, _AF_UNIX, 1, 0))),  # socket
        ((53, 199), _refuse_unless(0, _op(_EQUAL, _AF_UNIX, 1, 0))),  # socketpair
        ((302, 261), _refuse_unless(0, _op(_EQUAL, 0, 1, 0))),  # prlimit64, of the process itself
        (
            (16, 29),  # ioctl
            _refuse_unless(1, _op(_EQUAL, _TIOCSTI, 1, 0), _op(_EQUAL, _TIOCLINUX, 0, 1)),
        ),
    ):
        code += _when(numbers[column], block)
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _when(number: int, block: list[bytes]) -> list[bytes]:
    """Run `block`, which ends in a return, for one call; the call's number stays loaded for the
    next comparison."""
    return [_op(_EQUAL, number, 0, len(block)), *block]


def _refuse_unless(index: int, *tests: bytes) -> list[bytes]:
    """Refuse a call unless the tests of its argument `index` jump over the refusal."""
    load = _op(_LOAD, _ARGUMENTS + 8 * index)
    return [load, *tests, _op(_RETURN, _EPERM), _op(_RETURN, _ALLOW)]
