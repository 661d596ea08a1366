"""Leases: which process works on what, decided by objects in the store alone, without OS locks.

A lease is a chain of numbered objects, each created only if absent:

    KEY.0.leases/work/000001      {"owner": …, "token": …}     its process died
    KEY.0.leases/work/000002      {"owner": …, "token": …}     the holder: the highest number

`work` is all the work, by one process alone. If it is shared, there are other chains:

    KEY.0.leases/worker-1f2e…     a process is present
    KEY.0.leases/shard-00000      one of the shards
    KEY.0.leases/commit           the commit

To take over, a process creates the next number, so only one of two competitors succeeds. A holder
renews its object every few seconds: it writes the time into it. A lease is free, so that another
process may take it, if one of these is true of its holder:

    it released the lease
    its process is known to be dead
    it did not renew the lease for a minute, by the waiting process's clock
    its process is seen to be stopped, and its last renewal is more than a minute ago

A holder loses the lease only when another process takes it, and notices when it commits or fails:
it then sees a higher number. So leases save work; what keeps a commit safe is written in `writer`.

    leases = Leases(storage, "arith/rollouts/.work/KEY.0.leases")
    lease = leases.take("commit")        # None if another process holds it
    if lease and lease.is_held():
        ...
    lease.release()
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from quiver.schemas.errors import CorruptError
from quiver.schemas.plain import read_json

from .storage import Stamp, Storage, list_numbers

SECONDS_TO_LIVE = 60.0
"""A lease that was not renewed for this long is free: another process may take it."""
SECONDS_BETWEEN_RENEWALS = 10.0
_NAME = re.compile("commit|work|worker-.+|shard-.+")


@dataclass(frozen=True)
class Owner:
    """Identifies one process on one host, even after its process id is reused."""

    boot_id: str
    """Boot id of the host; it changes with every boot."""
    pid_namespace: int
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    start_time: int
    """Clock ticks from the host's boot to the start of the process."""

    @classmethod
    def this_process(cls) -> Owner:
        """Return the owner that stands for this process."""
        pid = os.getpid()
        return cls(_boot_id(), _pid_namespace(), pid, _start_time(pid) or 0)

    @property
    def can_be_seen(self) -> bool:
        """True if the owner is on this host and in this pid namespace, so it can be observed."""
        return (self.boot_id, self.pid_namespace) == (_boot_id(), _pid_namespace())

    @property
    def is_dead(self) -> bool:
        """True if the process has certainly ended. False if that cannot be observed from here."""
        return self.can_be_seen and _start_time(self.pid) != self.start_time

    @property
    def is_stopped(self) -> bool:
        """True if the process is certainly stopped (SIGSTOP, Ctrl-Z, a debugger)."""
        return self.can_be_seen and not self.is_dead and _status(self.pid)[0] in ("T", "t")


@dataclass(frozen=True)
class Link:
    """One object of the chain, `KEY.0.leases/NAME/000001`: its number, the process that took the
    lease, and if the lease was released."""

    number: int
    owner: Owner
    token: str
    """Unique to this lease, also among leases of the same process."""
    renewed_at: float
    """Seconds since 1970, by the holder's clock."""
    released: bool = False

    def encode(self) -> bytes:
        """Return the object's bytes."""
        return _LINK.dump_json(self, exclude={"number"})


_LINK = TypeAdapter(Link)


class Lease:
    """A lease that this process holds until it releases it or another process takes it over."""

    def __init__(self, leases: Leases, name: str, link: Link) -> None:
        self.name = name
        self.number = link.number
        self.taken_at = time.monotonic()
        self._key = leases.key(name, link.number)
        self._storage = leases.storage
        self._leases = leases
        self._link = link
        self._stamp: Stamp | None = None

    def create(self) -> bool:
        """Create the object; return False if another process was first."""
        self._stamp = self._storage.put_if_absent(self._key, self._link.encode(), durable=False)
        return self._stamp is not None

    def is_held(self) -> bool:
        """Return True if the lease is still in force: neither released nor taken over."""
        top = self._leases.top(self.name)
        return top is not None and top.token == self._link.token and not top.released

    def renew(self) -> bool:
        """Write the time into the object; return False if it is gone."""
        with _renewing:
            return self._write(replace(self._link, renewed_at=time.time()))

    def _write(self, link: Link) -> bool:
        """Replace the object; return False if it is gone. If another process took the lease, that
        one's object has a higher number, so this changes nothing."""
        raw = link.encode()
        if self._stamp is not None:
            self._stamp = self._storage.put(self._key, raw, self._stamp, durable=False)
        # the stamp may differ though nobody took the lease: chown changes it, too
        if self._stamp is None and self.is_held():
            self._stamp = self._storage.put(self._key, raw, durable=False)
        return self._stamp is not None

    def forget(self) -> None:
        """Renew it no more: its object is about to be deleted."""
        _renewed.discard(self)

    def release(self) -> None:
        """Release the lease, so that another process can take it at once."""
        self.forget()
        with _renewing:
            try:
                self._write(replace(self._link, released=True))
            except OSError:  # a full disk
                self._storage.delete(self._key)


class Leases:
    """The leases below one prefix, as one process sees them."""

    def __init__(self, storage: Storage, prefix: str) -> None:
        self.storage = storage
        self.prefix = prefix
        self._seen: dict[str, tuple[object, float]] = {}
        """Last observed state of a lease, and since when, by time.monotonic()."""

    def key(self, name: str, number: int) -> str:
        """Return the key of the object with this number of lease `name`."""
        return f"{self.prefix}/{name}/{number:06d}"

    def names(self) -> list[str]:
        """Return the names of all leases that were ever taken here. Other names are ignored."""
        return list(filter(_NAME.fullmatch, self.storage.list(self.prefix)))

    def workers(self) -> dict[str, Link]:
        """Return the processes that share the work and are present, by their names."""
        names = [name for name in self.names() if name.startswith("worker-")]
        holders = {name.removeprefix("worker-"): self.holder(name) for name in names}
        return {name: holder for name, holder in holders.items() if holder}

    def top(self, name: str) -> Link | None:
        """Return the object with the highest number, or None if the chain is empty."""
        numbers = list_numbers(self.storage, f"{self.prefix}/{name}")
        if not numbers:
            return None
        number = max(numbers)
        try:
            fields = read_json(self.storage.read(self.key(name, number)))
            return _LINK.validate_python({**fields, "number": number})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, CorruptError):
            # torn by a power loss, so its process is gone too
            return Link(number, Owner("", 0, 0, 0), "", 0.0, released=True)

    def holder(self, name: str) -> Link | None:
        """Return the current holder of the lease, or None if it is free."""
        top = self.top(name)
        return None if top is None or self._is_free(name, top) else top

    def holders(self) -> list[Link]:
        """Return the holders of all leases here, which tell `retention` that the work is alive.

        A process of another host, or of another boot, is left out if nothing here changed for ten
        times a lease's lifetime. The times of files decide this, because a process that has just
        begun has not seen yet if the holder renews its lease.
        """
        holders = [holder for name in self.names() if (holder := self.holder(name))]
        changed_at = max((at for _, at in self.storage.files(self.prefix).values()), default=0.0)
        is_silent = time.time() - changed_at > 10 * SECONDS_TO_LIVE
        return [holder for holder in holders if holder.owner.can_be_seen or not is_silent]

    def seconds_seen(self, name: str) -> float:
        """Return for how many seconds this process has observed the current holder, renewals or
        not."""
        holder = self.holder(name)
        if holder is None:
            return 0.0
        return self._seconds_unchanged(f"holder of {name}", holder.token)

    def _seconds_unchanged(self, what: str, state: object) -> float:
        """Return for how many seconds this process has observed `what` in this state. A holder
        changes when another process takes the lease, a link with each renewal too."""
        seen = self._seen.get(what)
        if seen is None or seen[0] != state:
            seen = self._seen[what] = (state, time.monotonic())
        return time.monotonic() - seen[1]

    def take(self, name: str, *, from_living: bool = False) -> Lease | None:
        """Take the lease if it is free; return None if another process holds it.

        With `from_living`, take it from its holder as well.
        """
        top = self.top(name)
        if top is not None and not from_living and not self._is_free(name, top):
            self.seconds_seen(name)  # notes when this holder was first seen
            return None
        number = top.number + 1 if top else 1
        link = Link(number, Owner.this_process(), uuid.uuid4().hex, time.time())
        lease = Lease(self, name, link)
        try:
            if not lease.create():
                return None
        except BaseException:
            with suppress(OSError):
                # the object may exist all the same, and only this process can release it
                lease.release()
            raise
        _keep_renewed(lease)
        return lease

    def take_or_wait(self, name: str) -> Lease | None:
        """Take the lease, waiting for a silent holder to expire. None if the holder renews it.

        A holder on this host that renewed recently counts as alive at once.
        """
        first = None
        while True:
            lease = self.take(name)
            if lease is not None:
                return lease
            top = self.top(name)
            first = first or top
            if top is None or top != first:
                return None
            if top.owner.can_be_seen and abs(time.time() - top.renewed_at) < SECONDS_TO_LIVE:
                return None
            time.sleep(min(0.5, SECONDS_TO_LIVE / 4))

    def _is_free(self, name: str, holder: Link) -> bool:
        is_late = time.time() - holder.renewed_at >= SECONDS_TO_LIVE
        if holder.released or holder.owner.is_dead or (is_late and holder.owner.is_stopped):
            return True
        return self._seconds_unchanged(f"link of {name}", holder) >= SECONDS_TO_LIVE


# -- renewal: one thread for all leases of this process

_renewed: set[Lease] = set()
_renewing = threading.Lock()
"""Held while a lease's object is written anew, so that no renewal undoes a release."""
_thread: threading.Thread | None = None


def _keep_renewed(lease: Lease) -> None:
    global _thread  # noqa: PLW0603  one thread per process
    _renewed.add(lease)
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_renew_for_ever, daemon=True, name="leases")
        _thread.start()


def _renew_for_ever() -> None:
    while True:
        time.sleep(SECONDS_BETWEEN_RENEWALS)
        for lease in list(_renewed):
            # the disk may answer next time; if not, another takes over
            with suppress(OSError):
                if not lease.renew():
                    _renewed.discard(lease)  # the version is committed, and its leases are cleared


def _forget_leases() -> None:
    """Forget all leases in a forked child: they belong to its parent."""
    global _renewing, _thread  # noqa: PLW0603
    _renewed.clear()
    _renewing = threading.Lock()
    _thread = None


os.register_at_fork(after_in_child=_forget_leases)


# -- identity of a process


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """Return clock ticks from the host's boot to the process's start, or None if it has ended.

    A zombie, which ended but was not waited for, counts as ended too.
    """
    state, *fields = _status(pid)
    return None if state in ("", "Z", "X") else int(fields[18])


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process's name; [""] if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return [""]
    return text.rpartition(")")[2].split()
