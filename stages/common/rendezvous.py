"""Ranks on several hosts: the meeting point of their agents, and detection of dead hosts.

Each host runs the same command with torchrun's own variables:

    PET_NNODES=2 PET_RDZV_ENDPOINT=first-host:29400 quiver optimize recipe.toml

PET_NPROC_PER_NODE is the number of ranks per host, if `optimize.processes` does not give the total.
Hosts meet if their calls are equal. PET_RDZV_ID also names the meeting; then the store may be
mounted at a different folder on each host. PET_RDZV_CONF sets join_timeout, keep_alive_interval and
keep_alive_max_attempt, as in torchrun.

A torch agent watches only its own ranks. If another host loses power, a rank would wait for its
peer for a day. So each agent writes heartbeats to the rendezvous store. If one is
silent for keep_alive_interval times keep_alive_max_attempt, or reports that its ranks failed, the
other agents end.

Not of the spine: the output of a stage does not depend on the hosts of its ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, printable

_DEFAULTS = {"join_timeout": 600, "keep_alive_interval": 5, "keep_alive_max_attempt": 12}
_GRACE_SECONDS = (
    10.0  # for ranks to end by themselves, because the version is committed or a peer is lost
)
_PAUSE = 0.5  # seconds between two heartbeats, until all hosts are present
_SECONDS_UNTOLD = 10.0  # of waiting for other hosts without a log line
_SECONDS_TO_RETURN = 5.0  # longest time of a store call while the store's host is alive
_STORE_GONE = "the host of the rendezvous is gone, or its ranks failed"
_ENDPOINT_ADVICE = "set PET_RDZV_ENDPOINT to a host that all can reach and a free port of it"
log = logging.getLogger(__name__)


class Rendezvous(NamedTuple):
    """The meeting point of all hosts' agents."""

    nodes: int
    ranks: int
    """Ranks per host, if the recipe does not say it."""
    host: str
    port: int
    id: str
    """PET_RDZV_ID; may be empty."""
    settings: dict[str, int]

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a host counts as dead."""
        return float(self.settings["keep_alive_interval"] * self.settings["keep_alive_max_attempt"])


def several_hosts(environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """Read the rendezvous from the environment; None for a single host. Raises ConfigError."""
    nodes = environ.get("PET_NNODES") or "1"
    least, _, most = nodes.partition(":")  # torchrun's syntax for a range
    nodes = least if least == most else nodes
    if nodes == "1":
        return None
    if not nodes.isdecimal() or int(nodes) < 1:
        raise ConfigError(
            "PET_NNODES",
            f"expected one number of hosts, found {printable(nodes)}",
            next="set PET_NNODES to how many hosts train together",
        )
    endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # an IPv6 address
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            "PET_RDZV_ENDPOINT",
            f"expected HOST:PORT, found {printable(repr(endpoint))}",
            next=_ENDPOINT_ADVICE,
        )
    pairs = [pair.partition("=") for pair in environ.get("PET_RDZV_CONF", "").split(",") if pair]
    for name, _, number in pairs:
        if name not in _DEFAULTS or not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                "PET_RDZV_CONF",
                f"expected {', '.join(_DEFAULTS)} with seconds or counts from 1 on, found "
                f"{printable(name)}={printable(number)}",
                next="correct PET_RDZV_CONF",
            )
    settings = _DEFAULTS | {name: int(number) for name, _, number in pairs}
    ranks = environ.get("PET_NPROC_PER_NODE") or "1"
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ConfigError(
            "PET_NPROC_PER_NODE",
            f"expected a number of ranks, found {printable(ranks)}",
            next="set PET_NPROC_PER_NODE to how many ranks each host has, or unset it",
        )
    return Rendezvous(
        int(nodes), int(ranks), host, int(port), environ.get("PET_RDZV_ID", ""), settings
    )


def ranks_a_host(processes: int | None, rendezvous: Rendezvous | None) -> int:
    """Return how many of `processes` ranks run on each host.

    Raises ConfigError if they cannot be divided evenly.
    """
    if rendezvous is None:
        return processes or 1
    nodes = rendezvous.nodes
    count = processes or nodes * rendezvous.ranks
    if count % nodes:
        raise ConfigError(
            "optimize.processes",
            f"{count} rank{'s' if count > 1 else ''} cannot be shared out evenly among {nodes} "
            "hosts",
            next=f"set optimize.processes to a multiple of {nodes}",
        )
    return count // nodes


def address_towards(rendezvous: Rendezvous) -> tuple[str, bool]:
    """Return this host's address towards the rendezvous, and if it is the rendezvous host itself.

    Raises ConfigError if the rendezvous cannot be reached.
    """
    try:
        family, *_, there = socket.getaddrinfo(
            rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing: the system only chooses a route
            address = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            "PET_RDZV_ENDPOINT",
            f"{printable(rendezvous.host)} cannot be reached: {printable(error)}",
            next=_ENDPOINT_ADVICE,
        ) from None
    is_given = rendezvous.host in ("localhost", there[0])  # not by a name that stands for the host
    if ip_address(there[0].partition("%")[0]).is_loopback and not is_given:
        raise ConfigError(
            "PET_RDZV_ENDPOINT",
            f"{printable(rendezvous.host)} leads to {there[0]} on this host, which no other host "
            "can reach",
            next="set PET_RDZV_ENDPOINT to this host's own address and a free port of it",
        )
    return address, address == there[0]


def interface_of(address: str) -> str | None:
    """Return the network interface with this address, or None."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address for entry in addresses]:
            return name
    return None


class Watch:
    """Sends heartbeats for this host and watches the other hosts, until the block ends.

    If a host is lost, this process gets SIGTERM, unless its ranks end by themselves, and `problem`
    says why.

    A signal does not reach a thread that waits for a store whose host died silently. Then
    `give_up` is called with the problem, in another thread, and must end the process.
    """

    def __init__(
        self, rendezvous: Rendezvous, run_id: str, give_up: Callable[[str], object]
    ) -> None:
        self.problem = ""
        self._give_up = give_up
        self._rendezvous = rendezvous
        self._run_id = run_id
        self._prefix = f"quiver/{run_id}"
        self._is_over = threading.Event()
        self._ranks_ended = threading.Event()
        self._is_lost = threading.Event()
        self._has_begun = False
        """All hosts have been heard from."""
        self._met_another = False
        """A host came to the same meeting point with another call."""
        self._oldest_beat = time.monotonic()
        """Last heartbeat of the host that has been silent longest, by time.monotonic()."""
        self._store: Any = None
        self._beating: threading.Thread | None = None

    def __enter__(self) -> Watch:
        def listen() -> None:
            began_at = time.monotonic()
            told = ""
            while not self._is_over.wait(1.0):
                silent_for = time.monotonic() - self._oldest_beat
                if self._has_begun and silent_for > self._rendezvous.silence:
                    self._lose(f"another host was silent for {self._rendezvous.silence:g} s")
                    return
                waited = time.monotonic() - began_at
                meeting = self._meeting + self._another
                if not self._has_begun and meeting != told and waited > _SECONDS_UNTOLD:
                    told = meeting
                    log.info("waits for %s", meeting)

        self._beating = threading.Thread(target=self._beat, daemon=True, name="beat")
        self._beating.start()
        threading.Thread(target=listen, daemon=True, name="listen").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._ranks_ended.set()
        # a process that exits while a thread is in torch's store is aborted, which hides its result
        if self._beating is not None:
            self._beating.join(_SECONDS_TO_RETURN)

    def problem_of(self, error: Exception) -> str:
        """Explain the agent's own error at the rendezvous."""
        from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

        if self._has_begun:
            return _STORE_GONE
        if isinstance(error, RendezvousClosedError):
            return f"one of {self._meeting} was ended while it waited for the others"
        cause = error.__cause__ or error  # torch says only that there is a cause
        words = printable(cause).rstrip(".") or type(cause).__name__
        return (
            f"not all of {self._meeting} came{self._another}: {words}. Hosts "
            "meet in equal calls of one version, at a port that no other program has; unset "
            "PET_NNODES where one host is meant"
        )

    @property
    def _meeting(self) -> str:
        """The number of hosts, their meeting point, and the variables that set it."""
        there = self._rendezvous
        endpoint = f"{there.host}:{there.port}"
        return f"{there.nodes} hosts at {endpoint} (PET_NNODES, PET_RDZV_ENDPOINT)"

    @property
    def _another(self) -> str:
        """Addition to the meeting's description if another call came to the same place."""
        return ", and one came with other settings, files or paths" if self._met_another else ""

    def tell_failure(self) -> None:
        """Report that the ranks of this host failed by themselves, so the others need not wait.

        If the store is on this host, the others learn it when the store ends.
        """
        with suppress(Exception):  # if the store is gone, they notice
            if self._store is not None:
                self._store.add(f"{self._prefix}/failed", 1)

    def why_lost(self) -> str:
        """Return why the other hosts were lost, or an empty string if they are alive.

        Call it after the ranks of this host failed. It waits as long as a host may be silent.
        """
        self._ranks_ended.set()
        self._is_lost.wait(self._rendezvous.silence + _GRACE_SECONDS)
        return self.problem

    def _beat(self) -> None:
        """Send heartbeats until the block ends.

        An unreachable store is tried again until all hosts have been heard from; torch's agent
        reports if that takes too long.
        """
        while not self._is_over.is_set():
            try:
                self._beat_in_store()
                return
            except Exception as error:  # torch's own classes for a lost connection
                log.debug("no store at the rendezvous: %s", error)
            if self._has_begun or self._ranks_ended.is_set():
                self._lose(_STORE_GONE)
                return
            self._is_over.wait(1.0)

    def _beat_in_store(self) -> None:
        """Send heartbeats and read the other hosts' heartbeats.

        Each store call may hang if the store's host died silently. A host that was killed while it
        waited, and started again, has a new number. So before all are present, only hosts with a
        recent heartbeat count.
        """
        from torch.distributed import TCPStore

        rendezvous = self._rendezvous
        interval = rendezvous.settings["keep_alive_interval"]
        self._store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=rendezvous.settings["join_timeout"]),
        )
        self._store.append("quiver/calls", f"{self._run_id} ")
        number = self._store.add(f"{self._prefix}/hosts", 1)
        beats: dict[int, int] = {}
        heard: dict[int, float] = {}
        """By host number: time of the last change in its heartbeat count."""
        members: set[int] = set()
        while not self._is_over.wait(interval / 2 if members else _PAUSE):
            self._store.add(f"{self._prefix}/beat/{number}", 1)
            for host in range(1, self._store.add(f"{self._prefix}/hosts", 0) + 1):
                present = self._store.add(f"{self._prefix}/beat/{host}", 0)
                if present != beats.setdefault(host, present):
                    beats[host] = present
                    heard[host] = time.monotonic()
            if self._store.add(f"{self._prefix}/failed", 0):
                self._lose("the ranks of another host failed")
                return
            if not members:
                calls = self._store.get("quiver/calls").decode().split()
                self._met_another = any(call != self._run_id for call in calls)
            now = time.monotonic()
            recent = {host for host, at in heard.items() if now - at < 4 * _PAUSE}
            if not members and len(recent) == rendezvous.nodes:
                members = recent
            if members:
                self._oldest_beat = min(heard[host] for host in members)
                self._has_begun = True

    def _lose(self, problem: str) -> None:
        """Record the problem, and end the ranks that do not end by themselves."""
        have_ended = self._ranks_ended.wait(_GRACE_SECONDS)
        if self._is_over.is_set() or self.problem:
            return
        self.problem = problem
        self._is_lost.set()
        if not have_ended:
            os.kill(os.getpid(), signal.SIGTERM)
            if not self._is_over.wait(2 * _GRACE_SECONDS):
                self._give_up(problem)
