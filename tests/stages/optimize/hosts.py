"""Two hosts on this one: network namespaces with one cable between them, and one file system.

with two_hosts() as hosts:
    process = hosts[0].start([sys.executable, "-c", "..."], env, log)
    hosts[1].kill()
    hosts[1].unplug()
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Host:
    """A network namespace; what runs in it knows no other network."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._processes: list[subprocess.Popen] = []

    def start(self, command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
        """A process on this host, in a session of its own; its stderr goes to `log`."""
        with log.open("w") as stderr:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """All that runs there, at once."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True
        ).stdout.split()
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._processes:
            process.wait()

    def unplug(self) -> None:
        """No packet comes or goes any more, and nobody is told."""
        _ip("-n", self.name, "link", "set", "cable", "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, until the end of the block."""
    label = f"quiver-{os.getpid()}"
    hosts = Host(f"{label}-a", "10.91.7.1"), Host(f"{label}-b", "10.91.7.2")
    with ExitStack() as stack:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                stack.callback(_ip, "netns", "del", host.name)
            first, second = (host.name for host in hosts)
            _ip("-n", first, "link", "add", "cable", "type", "veth",
                "peer", "name", "cable", "netns", second)  # fmt: skip
            for host in hosts:
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
                _ip("-n", host.name, "link", "set", "cable", "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        for host in hosts:
            stack.callback(host.kill)
        yield hosts
