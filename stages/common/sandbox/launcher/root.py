"""The file system of a sandbox: a root in memory, read-only, with what the interpreter needs and an
empty writable /tmp.

Nothing of the host is in it but the paths asked for (read-only, no setuid, no devices) and four
harmless devices. There is no /proc, /sys, /etc or home. Called in a new mount namespace; afterwards
the host's files can not be named any more.
"""

from __future__ import annotations

import os

import kernel

HOST = "/.host"


def build(paths: list[str], tmp_mib: int) -> None:
    """Replace the root. `paths`: folders, files and symbolic links of the host, each once, to be
    found at the same place."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, "mode=755,nr_inodes=4096")
    os.mkdir("/tmp" + HOST)
    kernel.pivot_root("/tmp", "/tmp" + HOST)
    os.chdir("/")
    os.mkdir("/tmp")  # before what is shown: an interpreter may lie below the host's /tmp
    options = f"mode=1777,size={tmp_mib}m,nr_inodes=1024"
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags | kernel.MS_NOEXEC, options)
    shown: list[str] = []
    for path in sorted(paths):
        if not any(path.startswith(folder + "/") for folder in shown):
            _show(path, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
            shown.append(path)
    for device in ("null", "zero", "random", "urandom"):
        _show(f"/dev/{device}", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC)
    os.symlink("/tmp", "/dev/shm")


def seal() -> None:
    """Let go of the host's files and make the root read-only; /tmp stays writable."""
    kernel.detach(HOST)
    os.rmdir(HOST)
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | flags)


def _show(path: str, attributes: int) -> None:
    source = HOST + path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    kernel.mount(source, path, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict(path, attributes)
