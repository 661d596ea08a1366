"""A sandbox on a server: a program goes there by HTTP and its output comes back. Strict about what
it takes for an answer.

    POST URL        Authorization: Bearer TOKEN
    {"language": "python", "code": "print(input())", "stdin": "abc",
     "limits": {"seconds": 10.0, "memory_mib": 512, "processes": 16, "files_mib": 16, "open_files":
     64, "output_kib": 64}}
    →  {"stdout": "abc\\n", "stderr": "", "exit_code": 0, "timed_out": false}

How well programs are kept apart there, and from the harness of `code`, is the server's matter. A
program may be sent again after a lost answer, a 429 or a 5xx. No redirects, no compressed answers,
no proxy or password of the environment; no token over plain http, but to this machine.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quiver.schemas.errors import ConfigError, RemoteError, printable

from .run import Finished, Limits

if TYPE_CHECKING:
    import httpx

ATTEMPTS = 3
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
"""How long an answer may take beyond the program's own limit."""
PAUSE_SECONDS = 0.5
"""Before the second attempt; doubled before each further one."""


class _PassingError(Exception):
    """A failure that may pass."""


def run_program(
    program: str, *, stdin: str = "", limits: Limits | None = None, url: str, token: str = ""
) -> Finished:
    """Run Python source on the server at `url` and wait for it. `token` is `env:NAME`, a variable
    of this process.

    RemoteError: no answer, or none that can be trusted, which says nothing about the program.
    ConfigError: the token or the URL.
    """
    import httpx

    from quiver.stages.reward.servers.config import is_loopback

    limits = limits or Limits()
    bearer = secret(token)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "sandbox_url", f"must be an http or https URL, got {printable(url)}", next="correct it"
        )
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if bearer:
        headers["Authorization"] = f"Bearer {bearer}"
        host = urlsplit(url).hostname or ""
        if url.startswith("http://") and not is_loopback(host):
            raise ConfigError(
                "sandbox_url",
                f"the token would go to {printable(host)} in the clear",
                next="use https",
            )
    request = {"language": "python", "code": program, "stdin": stdin, "limits": asdict(limits)}
    patience = httpx.Timeout(limits.seconds + ANSWER_SECONDS, connect=CONNECT_SECONDS)
    with httpx.Client(timeout=patience, trust_env=False, headers=headers) as client:
        for attempt in range(1, ATTEMPTS + 1):
            started = time.monotonic()
            try:
                body = _ask(client, url, json.dumps(request), limits)
                return _read(body, time.monotonic() - started, url)
            except _PassingError as error:
                if attempt == ATTEMPTS:
                    raise _remote_error(url, f"{error}, {ATTEMPTS} times") from error
                time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
    raise AssertionError("not reached")


@lru_cache(maxsize=8)
def check(url: str, token: str) -> None:
    """RemoteError unless the server runs a program that does nothing."""
    finished = run_program("print('ready')", url=url, token=token)
    if finished.stdout.strip() != "ready":
        raise _remote_error(
            url, f"a program that does nothing failed: {printable(finished.stderr[-200:])}"
        )


def secret(token: str) -> str:
    """The value of the environment's variable that `env:NAME` names; empty where `token` is.
    ConfigError."""
    if not token:
        return ""
    kind, _, name = token.partition(":")
    if kind != "env" or not name:
        raise ConfigError(
            "sandbox_token",
            "must be env:NAME; a secret never stands in a recipe",
            next="export it, name it",
        )
    if not os.environ.get(name):
        raise ConfigError(
            "sandbox_token",
            f"the environment has no variable {printable(name)}",
            next=f"export {printable(name)}",
        )
    return os.environ[name]


def _ask(client: httpx.Client, url: str, request: str, limits: Limits) -> bytes:
    """The answer's body. _PassingError where another attempt may help."""
    import httpx

    most = 2 * 6 * limits.output_kib * 1024 + 65536  # both outputs, each character escaped
    deadline = time.monotonic() + limits.seconds + ANSWER_SECONDS
    try:
        with client.stream("POST", url, content=request) as answer:
            status = answer.status_code
            if status == 429 or status >= 500:
                raise _PassingError(f"status {status}")
            if status != 200 or "content-encoding" in answer.headers:
                why = f"status {status}, expected 200 and an answer that is not compressed"
                raise _remote_error(url, why)
            body = bytearray()
            for chunk in answer.iter_raw():
                body += chunk
                if len(body) > most:
                    raise _remote_error(url, f"the answer is longer than {most} bytes")
                if time.monotonic() > deadline:
                    raise _PassingError("the answer takes too long")
            return bytes(body)
    except httpx.HTTPError as error:
        raise _PassingError(f"{type(error).__name__}: {printable(error)}") from error


def _read(body: bytes, seconds: float, url: str) -> Finished:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _remote_error(url, f"the answer is not JSON: {printable(error)}") from error
    if not isinstance(answer, dict):
        raise _remote_error(url, f"the answer is {type(answer).__name__}, expected an object")
    kinds = {"stdout": str, "stderr": str, "exit_code": int, "timed_out": bool}
    for name, kind in kinds.items():
        member = answer.get(name)
        if type(member) is not kind:
            why = f"{name} must be {kind.__name__}, got {printable(repr(member))}"
            raise _remote_error(url, why)
    killed_by = "time" if answer["timed_out"] else None
    return Finished(answer["exit_code"], answer["stdout"], answer["stderr"], killed_by, seconds)


def _remote_error(url: str, why: str) -> RemoteError:
    return RemoteError(
        f"sandbox {printable(url.partition('?')[0])}",
        why,
        state="the program was not judged.",
        next="see that the server runs and speaks this dialect (stages/reward/sandbox/remote.py)",
    )
