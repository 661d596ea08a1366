"""Programs that try to get out of the sandbox, each by one way; what one gets hold of it prints
after the word ESCAPED.

Each starts with `HOST`, what an attacker may know: `parent` (process id), `secret` (a file that all
may read, with a canary in it), `folder` (one that all may write), `port` (a listening TCP server),
`abstract` and `socket` (listening unix sockets). HELPERS are defined before it.
"""

from typing import NamedTuple


class Try(NamedTuple):
    """`works`: succeeds where nothing is isolated, so that isolation "process" is the control.
    `killed_by`: how it must end."""

    name: str
    program: str
    works: bool = False
    killed_by: str | None = None
    seconds: float = 10.0


HELPERS = '''
import ctypes, errno, os, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"

def call(x86, arm, *args):
    """A system call by its number; -1 when it fails."""
    return libc.syscall(ctypes.c_long(arm if ARM else x86), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])

def escaped(*what):
    print("ESCAPED", *what, flush=True)

def read(path):
    """Say it when there is something to be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(4096)
    except OSError:
        return
    escaped("read", path, data[:200])

def write(path):
    try:
        with open(path, "w") as file:
            file.write("was here")
    except OSError:
        return
    escaped("wrote", path)

def listed(path):
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return names

def connected(family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as one:
            one.settimeout(1)
            one.connect(address)
            one.send(b"hello")
    except OSError:
        return
    escaped("reached", address)
'''

FILES = [
    Try(
        "passwords",
        'for name in ("shadow", "passwd", "hosts", "hostname", "machine-id"): read("/etc/" + name)',
    ),
    Try("a file of the host", 'read(HOST["secret"])', works=True),
    Try(
        "a folder of the host",
        'if listed(HOST["folder"]): escaped(listed(HOST["folder"]))',
        works=True,
    ),
    Try(
        "homes",
        """
for top in ("/root", "/home", os.path.expanduser("~root")):
    for folder, names, files in os.walk(top):
        if folder.startswith(sys.base_prefix):
            names.clear()
        elif files:
            escaped(folder, files)
""",
    ),
    Try("the host's /tmp", 'if len(listed("/tmp")) > 0: escaped(listed("/tmp"))', works=True),
    Try("writing beside the secret", 'write(HOST["folder"] + "/new")', works=True),
    Try("overwriting the secret", 'write(HOST["secret"])'),
    Try(
        "writing over the interpreter and the program",
        """
for path in (os.__file__, sys.executable, __file__, "/usr/lib/x", "/lib/x", sys.base_prefix + "/lib/x", "/x", "/dev/x"):
    write(path)
    try:
        os.rename(path, path + ".moved")
        escaped("moved", path)
    except OSError:
        pass
""",
    ),
    Try(
        "relative paths",
        'read("../" * 30 + HOST["secret"]); read("/.host" + HOST["secret"]); read("/..//../" + '
        'HOST["secret"])',
    ),
    Try(
        "/proc/self/root and cwd",
        'read("/proc/self/root" + HOST["secret"]); read("/proc/1/root" + HOST["secret"])',
    ),
    Try(
        "links",
        """
os.symlink(HOST["secret"], "link")
read("link")
for path in (HOST["secret"], "/program.py", sys.executable):
    try:
        os.link(path, "hard")
        escaped("linked", path)
    except OSError:
        pass
""",
    ),
    Try(
        "chroot out of a chroot",
        """
os.mkdir("deep")
inside = os.open(".", os.O_RDONLY)
try:
    os.chroot("deep")
except OSError:
    sys.exit(0)
os.fchdir(inside)
for _ in range(50):
    os.chdir("..")
os.chroot(".")
escaped(listed("/"))
""",
    ),
    Try(
        "a file by its handle",
        """
handle = ctypes.create_string_buffer(struct.pack("II", 8, 1) + struct.pack("II", 2, 0))
for folder in ("/", "/usr/lib", "/tmp"):
    base = os.open(folder, os.O_RDONLY)
    found = call(304, 265, base, handle, os.O_RDONLY)
    if found >= 0:
        escaped("opened the host's root by inode 2", listed(found))
""",
    ),
    Try(
        "devices",
        """
import stat
for name in ("mem", "kmem", "port", "kmsg", "sda", "vda", "nvme0n1", "loop0", "fuse", "kvm", "net/tun", "tty", "console"):
    read("/dev/" + name)
for kind, device in ((stat.S_IFCHR, os.makedev(1, 1)), (stat.S_IFBLK, os.makedev(254, 0)), (stat.S_IFBLK, os.makedev(8, 0))):
    try:
        os.mknod("device", 0o600 | kind, device)
        read("device")
        os.unlink("device")
    except OSError:
        pass
""",
    ),
    Try(
        "settings of the kernel",
        """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper", "/sys/power/state"):
    try:
        os.close(os.open(path, os.O_WRONLY))  # never written: it is the host's
        escaped("could write", path)
    except OSError:
        pass
if listed("/sys") or listed("/proc"):
    escaped(listed("/sys"), listed("/proc"))
""",
        works=True,
    ),
    Try(
        "mounts",
        """
for kind, target in ((b"tmpfs", b"/usr/lib"), (b"proc", b"/tmp"), (b"sysfs", b"/tmp"), (b"devtmpfs", b"/tmp")):
    if libc.mount(b"none", target, kind, ctypes.c_ulong(0), None) == 0:
        escaped("mounted", kind)
if libc.mount(b"none", b"/", None, ctypes.c_ulong(32 | 4096), None) == 0:
    escaped("made the root writable")
for target in (b"/usr/lib", b"/tmp", b"/"):
    if libc.umount2(target, 2) == 0:
        escaped("took away", target)
if call(428, 428, -100, ctypes.c_char_p(b"/"), 1) >= 0 or call(430, 430, ctypes.c_char_p(b"proc"), 0) >= 0:
    escaped("the newer calls mount")
""",
    ),
]

SECRETS = [
    Try(
        "its environment",
        "escaped(os.environ) if set(os.environ) & set(HOST['variables']) else None",
    ),
    Try(
        "the environment of others",
        """
for pid in ("self", "1", os.getppid(), HOST["parent"], *[name for name in listed("/proc") if name.isdigit()]):
    read(f"/proc/{pid}/environ")
""",
        works=True,
    ),
    Try(
        "memory of others",
        """
there = ctypes.create_string_buffer(64)
for pid in {1, os.getppid(), HOST["parent"]} - {0}:
    read(f"/proc/{pid}/maps")
    read(f"/proc/{pid}/mem")
    one = (ctypes.c_void_p * 2)(ctypes.addressof(there), 64)
    other = (ctypes.c_void_p * 2)(0x400000, 64)
    if call(310, 270, pid, one, 1, other, 1, 0) > 0 or ctypes.get_errno() == errno.EFAULT:
        escaped("may read the memory of", pid)
""",
    ),
    Try(
        "tracing others",
        """
for pid in {1, 2, os.getppid(), HOST["parent"]} - {0, os.getpid()}:
    if call(101, 117, 0x4206, pid, 0, 0) == 0:  # PTRACE_SEIZE
        escaped("traces", pid)
child = os.fork()
if child == 0:
    time.sleep(5)
if call(101, 117, 16, child, 0, 0) == 0:
    escaped("traces its own child")
os.kill(child, 9)
""",
    ),
    Try(
        "files that the parent has open",
        """
for handle in range(3, 4096):
    try:
        if handle != HOST.get("own") and os.fstat(handle):
            escaped("inherited", handle, os.pread(handle, 100, 0))
    except OSError:
        pass
""",
    ),
    Try(
        "files that others have open",
        """
for pid in {1, 2, os.getppid(), HOST["parent"]} - {0, os.getpid()}:
    try:
        process = os.pidfd_open(pid)
    except OSError:
        continue
    for handle in range(16):
        if call(438, 438, process, handle, 0) >= 0:
            escaped("took", handle, "from", pid)
    listed(f"/proc/{pid}/fd") and escaped("sees the files of", pid)
""",
    ),
    Try(
        "kernel keys",
        'if call(250, 219, 0, -3, 0, 0) > 0 or call(250, 219, 0, -4, 0, 0) > 0: escaped("has a '
        'keyring")',
    ),
]

PROCESSES = [
    Try(
        "signals to the parent",
        'for n in (0, 9):\n  try: os.kill(HOST["parent"], n); escaped(n)\n  except OSError: pass',
    ),
    Try(
        "signals to everybody",
        """
for pid in range(1, 4000):
    try:
        if pid not in (1, os.getpid()):
            os.kill(pid, 0)
            escaped("sees", pid)
    except OSError:
        pass
for target in (-1, 1):
    try:
        os.kill(target, 9)
    except OSError:
        pass
""",
    ),
    Try(
        "a fork bomb",
        "while True:\n  try: os.fork()\n  except OSError: pass",
        killed_by="time",
        seconds=0.5,
    ),
    Try(
        "how many processes there may be",
        """
count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    pass
if count >= 20:
    escaped(count)
""",
    ),
    Try(
        "threads without end",
        """
count = 0
try:
    while count < 300:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
if count >= 20:
    escaped(count)
os._exit(0)
""",
    ),
    Try(
        "a daemon that stays",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for handle in (0, 1, 2):
            os.close(handle)
        time.sleep(60)
    os._exit(0)
""",
    ),
    Try(
        "a child that keeps the pipes open",
        """
if os.fork() == 0:
    time.sleep(60)
    escaped("outlived its parent")
""",
    ),
    Try(
        "not to be ended",
        """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(3):
    os.fork()
while True:
    pass
""",
        killed_by="time",
        seconds=0.5,
    ),
    Try("waiting without end", "threading.Event().wait()", killed_by="time", seconds=0.5),
    Try(
        "another user",
        """
for number in (0, 1, 1000):
    for change in (os.setuid, os.seteuid, os.setgid, lambda n: os.setgroups([n]), lambda n: os.setresuid(n, n, n)):
        try:
            change(number)
            escaped("became", number)
        except OSError:
            pass
if os.getuid() == 0 or 0 in os.getgroups():
    escaped(os.getuid(), os.getgroups())
""",
    ),
    Try(
        "capabilities",
        """
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
libc.capget(header, data)
if any(data):
    escaped("has", list(data))
data[:] = [0xFFFFFFFF] * 6
if libc.capset(header, data) == 0:
    escaped("took all")
if libc.prctl(39, 0, 0, 0, 0) != 1:
    escaped("an exec may give it privileges")
if any(libc.prctl(23, capability, 0, 0, 0) == 1 for capability in range(41)):
    escaped("its bounding set is not empty")
""",
    ),
    Try(
        "programs of the host",
        """
for path in ("/bin/sh", "/bin/su", "/usr/bin/sudo", "/usr/bin/passwd", "/bin/mount", "/usr/bin/env", "/bin/ls"):
    try:
        subprocess.run([path], timeout=2, stdin=subprocess.DEVNULL, capture_output=True)
        escaped("ran", path)
    except OSError:
        pass
""",
    ),
    Try(
        "a program of its own with the setuid bit",
        """
import shutil
shutil.copy(sys.executable, "python")
os.chmod("python", 0o6755)
try:
    subprocess.run(["./python", "-c", "pass"])
    escaped("ran it")
except OSError:
    pass
""",
    ),
    Try(
        "new namespaces",
        """
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    if libc.unshare(flag) == 0:
        escaped("unshare", hex(flag))
    child = call(56, 220, flag | 17, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child > 0:
        escaped("clone", hex(flag))
arguments = (ctypes.c_uint64 * 11)(0x10000000)
if call(435, 435, arguments, ctypes.sizeof(arguments)) >= 0:
    escaped("clone3")
""",
    ),
    Try(
        "the namespaces of others",
        """
for pid in {1, os.getppid(), HOST["parent"]} - {0}:
    for kind in ("user", "mnt", "net", "pid"):
        try:
            handle = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        except OSError:
            handle = -1
        if handle >= 0 and libc.setns(handle, 0) == 0:
            escaped("entered", kind, "of", pid)
    try:
        if libc.setns(os.pidfd_open(pid), 0x40000000) == 0:
            escaped("entered by pidfd", pid)
    except OSError:
        pass
""",
    ),
    Try(
        "limits raised, and set for others",
        """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        escaped("raised", kind)
    except (OSError, ValueError):
        pass
for pid in (1, HOST["parent"]):
    try:
        resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))
        escaped("limited", pid)
    except OSError:
        pass
""",
    ),
    Try(
        "keys pressed for the terminal",
        """
import fcntl
try:
    terminals = [0, 1, 2, os.open("/dev/tty", os.O_RDWR)]
except OSError:
    terminals = [0, 1, 2]
for handle in terminals:
    for byte in b"id\\n":
        try:
            fcntl.ioctl(handle, 0x5412, bytes([byte]))
            escaped("typed", byte)
        except OSError as error:
            if error.errno != errno.EPERM:
                escaped("the kernel was asked", error)
""",
    ),
]

RESOURCES = [
    Try("memory at once", "x = bytearray(4 << 30)\nescaped(len(x))"),
    Try(
        "memory bit by bit",
        "x = []\nfor _ in range(400): x.append(bytearray(10 << 20))\nescaped(len(x))",
    ),
    Try(
        "memory by many processes",
        """
for _ in range(12):
    if os.fork() == 0:
        x = bytes(150 << 20).replace(b"\\0", b"1")
        time.sleep(60)
time.sleep(9)
escaped("twelve times 150 MiB")
""",
        killed_by="memory",
    ),
    Try(
        "memory that no limit counts",
        """
if call(319, 279, ctypes.c_char_p(b"x"), 0) >= 0:
    escaped("memfd_create")
if call(29, 194, 0, 1 << 30, 0o1600) >= 0:
    escaped("shmget")
if call(68, 186, 0, 0o1600) >= 0 or call(64, 190, 0, 1, 0o1600) >= 0:
    escaped("msgget, semget")
""",
    ),
    Try(
        "a full disk",
        """
written = 0
for number in range(100):
    try:
        with open(f"file{number}", "wb") as file:
            for _ in range(64):
                written += file.write(bytes(1 << 20))
    except OSError:
        pass
if written > 17 << 20:
    escaped(written)
""",
    ),
    Try(
        "a disk full of names",
        """
count = 0
try:
    while count < 20000:
        os.mkdir(f"d{count}")
        count += 1
except OSError:
    pass
if count > 2000:
    escaped(count)
""",
    ),
    Try("output without end", "while True: print('x' * 100000)", killed_by="time", seconds=0.5),
    Try(
        "errors without end",
        "while True: sys.stderr.write('x' * 100000)",
        killed_by="time",
        seconds=0.5,
    ),
    Try("an endless loop", "while True: pass", killed_by="time", seconds=0.5),
    Try("a crash", "ctypes.string_at(0)", killed_by="SIGSEGV"),
]

NETWORK = [
    Try("a server on this machine", 'connected(socket.AF_INET, ("127.0.0.1", HOST["port"]))', works=True),
    Try("a server on this machine, by IPv6", 'connected(socket.AF_INET6, ("::1", HOST["port"]))'),
    Try("an abstract unix socket", 'connected(socket.AF_UNIX, "\\0" + HOST["abstract"])', works=True),
    Try("a unix socket", 'connected(socket.AF_UNIX, HOST["socket"])', works=True),
    Try("the cloud's metadata", 'connected(socket.AF_INET, ("169.254.169.254", 80))'),
    Try(
        "the internet",
        """
connected(socket.AF_INET, ("1.1.1.1", 53))
connected(socket.AF_INET, ("8.8.8.8", 53), socket.SOCK_DGRAM)
""",
    ),
    Try(
        "names",
        """
for name in ("localhost", "example.com", socket.gethostname()):
    try:
        escaped(socket.getaddrinfo(name, 80))
    except OSError:
        pass
""",
    ),
    Try(
        "a server of its own",
        """
for family, address in ((socket.AF_INET, ("0.0.0.0", 0)), (socket.AF_INET6, ("::", 0))):
    try:
        with socket.socket(family) as one:
            one.bind(address)
            one.listen()
            escaped(one.getsockname())
    except OSError:
        pass
""",
        works=True,
    ),
    Try(
        "sockets of other kinds",
        """
for family in range(2, 46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind).close()
            escaped("family", family)
        except OSError:
            pass
""",
        works=True,
    ),
    Try("the host's name", "if socket.gethostname() == HOST['name']: escaped(HOST['name'])", works=True),
]  # fmt: skip

ALL = [*FILES, *SECRETS, *PROCESSES, *RESOURCES, *NETWORK]
