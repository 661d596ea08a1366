"""Run programs in a sandbox on a server: a program is sent over HTTP and its output comes back.
Answers are read strictly.

    POST URL        Authorization: Bearer TOKEN
    {"language": "python", "code": "print(input())", "stdin": "abc",
     "limits": {"seconds": 10.0, "memory_mib": 512, "processes": 16, "files_mib": 16, "open_files":
     64, "output_kib": 64}}
    →  {"stdout": "abc\\n", "stderr": "", "exit_code": 0, "timed_out": false}

The server alone decides how well programs are isolated from each other and from the harness of
`code`. A program may be sent again after a lost or malformed answer, a 429 or a 5xx (see
`servers.transport`). Redirects, compressed answers, and proxies or passwords from the environment
are not used. A token is sent over plain http only to this machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from functools import cache, partial

from pydantic import BaseModel

from quiver.schemas.errors import RemoteError, printable
from quiver.schemas.manifest import digest
from quiver.stages.core.client import Client, FailedError
from quiver.stages.core.config import parse
from quiver.stages.core.isolation import Limits
from quiver.stages.core.sandbox import Finished
from quiver.stages.core.servers import read_as, secret
from quiver.stages.reward.servers.config import ServerConfig
from quiver.stages.reward.servers.transport import Deadline, Transport

ATTEMPTS = 3
ANSWER_SECONDS = 30.0
"""Seconds that an answer may take beyond the program's own limit."""
PAUSE_SECONDS = 0.5
"""Longest pause before the second attempt; doubled before each further one."""


class Answer(BaseModel):
    """The server's result of a program."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool


def run_program(
    program: str, *, stdin: str = "", limits: Limits | None = None, url: str, token: str = ""
) -> Finished:
    """Run Python source on the server at `url` and wait for it.

    Args:
        token: `env:NAME`, a variable of this process.

    Raises:
        RemoteError: No answer came, or none that can be trusted. It says nothing about the program.
        ConfigError: The token or the URL is wrong.
    """
    limits = limits or Limits()
    seconds = limits.seconds + ANSWER_SECONDS
    server = {
        "dialect": "quiver",
        "urls": [url],
        "token": token,
        "retries": ATTEMPTS - 1,
        "backoff_seconds": PAUSE_SECONDS,
        "connect_seconds": 10.0,
        "read_seconds": seconds,
        "total_seconds": ATTEMPTS * seconds,
        "max_bytes": 2 * 6 * limits.output_kib * 1024 + 65536,  # each character escaped
    }
    config = parse(ServerConfig, server, "sandbox_url")
    transport = Transport(config, [url])
    token = secret(token, "sandbox_token")
    request = {"language": "python", "code": program, "stdin": stdin, "limits": asdict(limits)}

    async def ask() -> Answer:
        async with Client(token, config.connect_seconds, keeps_connections=False) as client:
            body = json.dumps(request).encode()
            key = digest(request)
            return await transport.ask(client, body, key, partial(read_as, Answer), Deadline())

    started = time.monotonic()
    try:
        answer = asyncio.run(ask())
    except (FailedError, RemoteError) as error:
        raise _remote_error(url, getattr(error, "message", str(error))) from None
    killed_by = "time" if answer.timed_out else None
    elapsed = time.monotonic() - started
    return Finished(answer.exit_code, answer.stdout, answer.stderr, killed_by, elapsed)


@cache
def check(url: str, token: str) -> None:
    """Raise RemoteError unless the server runs a trivial program. Checked once per process."""
    finished = run_program("print('ready')", url=url, token=token)
    if finished.stdout.strip() != "ready":
        raise _remote_error(
            url, f"a program that does nothing failed: {printable(finished.stderr[-200:])}"
        )


def _remote_error(url: str, why: str) -> RemoteError:
    return RemoteError(
        f"sandbox {printable(url)}",
        why,
        state="the program was not judged.",
        next="see that the server runs and speaks this dialect (stages/reward/remote_sandbox.py)",
    )
