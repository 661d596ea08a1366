"""Leases: who works at what, told by objects alone; no lock of any operating system.

A lease is a chain of numbered objects, each put only where there is none:

    .leases/commit/000001    {"owner": …, "token": …}     its process died
    .leases/commit/000002    {"owner": …, "token": …}     the holder: the highest number
    .leases/work/…                                        all of it, by one process alone
    .leases/worker-1f2e…/…                                a process that shares the work is there
    .leases/shard-00000/…                                 one of its shards

Taking over is creating the next number, so of two that try, one gets it. A holder renews its object
every few seconds. A holder counts as gone when its process is dead, as far as that can be told from
here, or when its object has not changed for a minute by the clock of whoever waits; where its
process is seen to be stopped, the object's own time says it. Whoever was asleep that long finds a
higher number, and may not commit any more.

    leases = Leases(storage, "arith/rollouts/.staging/KEY.leases")
    lease = leases.take("commit")        # None: somebody holds it
    if lease and lease.is_held():
        ...
    lease.release()
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from quiver.schemas.errors import CorruptError
from quiver.schemas.plain import read_json

from .storage import Storage

SECONDS_TO_LIVE = 60.0
"""A lease that was not renewed for so long is free."""
SECONDS_BETWEEN_RENEWALS = 10.0


@dataclass(frozen=True)
class Owner:
    """A process: where it runs, and which of all that ever had its number."""

    boot_id: str
    """The host's, since it was last started."""
    pid_namespace: int
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    start_time: int
    """Clock ticks from the host's start to the process's."""

    @classmethod
    def this_process(cls) -> Owner:
        """Of whoever asks."""
        pid = os.getpid()
        return cls(_boot_id(), _pid_namespace(), pid, _start_time(pid) or 0)

    @property
    def is_visible(self) -> bool:
        """Whether this process could see that one: the same host and namespace."""
        return (self.boot_id, self.pid_namespace) == (_boot_id(), _pid_namespace())

    @property
    def is_dead(self) -> bool:
        """Whether it has certainly ended. False where it cannot be told from here."""
        return self.is_visible and _start_time(self.pid) != self.start_time

    @property
    def is_stopped(self) -> bool:
        """Whether it is certainly asleep (SIGSTOP, Ctrl-Z, a debugger)."""
        return self.is_visible and not self.is_dead and _status(self.pid)[0] in ("T", "t")


@dataclass(frozen=True)
class Link:
    """What an object of the chain says: who took the lease, and whether it was given back."""

    number: int
    owner: Owner
    token: str
    """Tells this lease from every other, also of the same process."""
    label: str
    released: bool


_LINK = TypeAdapter(Link)


class Lease:
    """Held by this process until it is released, or until another takes it over."""

    def __init__(self, leases: Leases, name: str, link: Link) -> None:
        self.name = name
        self.taken_at = time.monotonic()
        self.storage = leases.storage
        self.key = leases.key(name, link.number)
        self._leases = leases
        self._link = link

    @property
    def number(self) -> int:
        """Its place in the chain; above 1 others had it before, who may have been asleep."""
        return self._link.number

    def is_held(self) -> bool:
        """Whether it was neither released nor taken over: the highest number of the chain is
        still this one."""
        top = self._leases.top(self.name)
        return top is not None and top.token == self._link.token and not top.released

    def release(self) -> None:
        """Let others have it at once."""
        _renewed.discard(self)
        if self.is_held():
            try:
                self.storage.write(self.key, _encode(self._link, released=True), durable=False)
            except OSError:  # a full disk, or the work is done and its leases are cleared
                self.storage.delete(self.key)


class Leases:
    """The leases below one prefix, as one process sees them."""

    def __init__(
        self, storage: Storage, prefix: str, label: str = "", *, sleepers_hold: bool = False
    ) -> None:
        """`label`: a word about the holder that others are told. `sleepers_hold`: a process that is
        seen to be alive keeps its lease, however long it was not heard of."""
        self.storage = storage
        self.prefix = prefix
        self.label = label
        self._sleepers_hold = sleepers_hold
        self._seen: dict[str, tuple[object, float]] = {}
        """What was last seen of a lease, and since when, by time.monotonic()."""

    def key(self, name: str, number: int) -> str:
        """The object of lease `name` with this number."""
        return f"{self.prefix}/{name}/{number:06d}"

    def names(self) -> list[str]:
        """All leases that were ever taken here."""
        return self.storage.list(self.prefix)

    def top(self, name: str) -> Link | None:
        """The object with the highest number; None where there is none."""
        numbers = self.storage.list_numbers(f"{self.prefix}/{name}")
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
            return Link(number, Owner("", 0, 0, 0), "", "", released=True)

    def holder(self, name: str) -> Link | None:
        """Who holds the lease now; None where it is free."""
        top = self.top(name)
        return None if top is None or self._is_free(name, top) else top

    def seconds_seen(self, name: str) -> float:
        """For how long this process has seen the present holder have the lease."""
        holder = self.holder(name)
        if holder is None:
            return 0.0
        return self._seconds_unchanged(f"holder of {name}", holder.token)

    def _seconds_unchanged(self, what: str, state: object) -> float:
        """For how long this process has seen `what` in this state."""
        seen = self._seen.get(what)
        if seen is None or seen[0] != state:
            seen = self._seen[what] = (state, time.monotonic())
        return time.monotonic() - seen[1]

    def take(self, name: str, *, from_living: bool = False) -> Lease | None:
        """The lease, if it is free, or `from_living` whoever holds it; None where another has
        it."""
        top = self.top(name)
        if top is not None and not from_living and not self._is_free(name, top):
            self.seconds_seen(name)
            return None
        number = top.number + 1 if top else 1
        link = Link(number, Owner.this_process(), uuid.uuid4().hex, self.label, False)
        lease = Lease(self, name, link)
        try:
            if not self.storage.put_if_absent(lease.key, _encode(link), durable=False):
                return None
        except BaseException:
            with suppress(OSError):
                lease.release()  # it may be there all the same, and nobody else could give it back
            raise
        _keep_renewed(lease)
        return lease

    def trim(self, lease: Lease) -> None:
        """Delete what came before `lease` in its chain, where chains are not cleared with work that
        is done."""
        for number in self.storage.list_numbers(f"{self.prefix}/{lease.name}"):
            if number < lease.number:
                self.storage.delete(self.key(lease.name, number))

    def take_when_stale(self, name: str) -> Lease | None:
        """`take`, but wait for a holder of which nothing is heard; None as soon as it is heard of.

        A holder on this host that renewed lately is believed at once.
        """
        first = None
        while True:
            lease = self.take(name)
            top = self.top(name)
            if lease is not None or top is None:
                return lease
            stamp = self.storage.stamp(self.key(name, top.number))
            first = first or (top.token, stamp)
            if (top.token, stamp) != first or stamp is None:
                return None
            seconds_since_renewal = time.time() - stamp[0] / 1e9
            if top.owner.is_visible and abs(seconds_since_renewal) < SECONDS_TO_LIVE:
                return None
            time.sleep(min(0.5, SECONDS_TO_LIVE / 4))

    def _is_free(self, name: str, holder: Link) -> bool:
        if holder.released or holder.owner.is_dead:
            return True
        if self._sleepers_hold and holder.owner.is_visible:
            return False
        stamp = self.storage.stamp(self.key(name, holder.number))
        is_stopped = stamp is not None and holder.owner.is_stopped
        if is_stopped and time.time() - stamp[0] / 1e9 >= SECONDS_TO_LIVE:
            return True  # it is asleep, and was not heard of for so long
        return self._seconds_unchanged(f"stamp of {name}", stamp) >= SECONDS_TO_LIVE


def _encode(link: Link, *, released: bool = False) -> bytes:
    fields = asdict(link)
    del fields["number"]
    return json.dumps({**fields, "released": released}).encode()


# -- renewal: one thread for all leases of this process

_renewed: set[Lease] = set()
_thread: threading.Thread | None = None


def _keep_renewed(lease: Lease) -> None:
    global _thread  # noqa: PLW0603  there is one for the process
    _renewed.add(lease)
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_renew_for_ever, daemon=True, name="leases")
        _thread.start()


def _renew_for_ever() -> None:
    while True:
        time.sleep(SECONDS_BETWEEN_RENEWALS)
        for lease in list(_renewed):
            try:
                if not lease.storage.renew(lease.key):
                    _renewed.discard(lease)  # the version is committed, and its leases are cleared
            except OSError:  # the disk may answer next time; if not, another takes over
                continue


def _forget_leases() -> None:
    """In a forked child: the leases are its parent's."""
    global _thread  # noqa: PLW0603
    _renewed.clear()
    _thread = None


os.register_at_fork(after_in_child=_forget_leases)


# -- what tells processes apart


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """Clock ticks from the host's start to the process's; None where there is no such process.

    A process that has ended and that nobody has waited for yet is gone as well.
    """
    state, *fields = _status(pid)
    return None if state in ("", "Z", "X") else int(fields[18])


def _status(pid: int) -> list[str]:
    """What /proc/PID/stat says after the process's name; one empty word where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return [""]
    return text.rpartition(")")[2].split()
