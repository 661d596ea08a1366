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
from typing import TYPE_CHECKING, Any
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
_KINDS = {"stdout": str, "stderr": str, "exit_code": int, "timed_out": bool}


class _AgainError(Exception):
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
    body = {"language": "python", "code": program, "stdin": stdin, "limits": asdict(limits)}
    headers = {"Accept-Encoding": "identity"} | (
        {"Authorization": f"Bearer {secret(token)}"} if token else {}
    )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "sandbox_url", f"must be an http or https URL, got {printable(url)}", next="correct it"
        )
    if token and url.startswith("http://") and not is_loopback(urlsplit(url).hostname or ""):
        what = f"the token would go to {printable(urlsplit(url).hostname)} in the clear"
        raise ConfigError("sandbox_url", what, next="use https")
    patience = httpx.Timeout(limits.seconds + ANSWER_SECONDS, connect=CONNECT_SECONDS)
    with httpx.Client(timeout=patience, trust_env=False, headers=headers) as client:
        for attempt in range(1, ATTEMPTS + 1):
            began = time.monotonic()
            try:
                answer = _ask(client, url, body, limits)
                return _read(answer, time.monotonic() - began, url)
            except _AgainError as error:
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


def _ask(client: httpx.Client, url: str, body: dict[str, Any], limits: Limits) -> bytes:
    """The answer's body. _AgainError where another attempt may help."""
    import httpx

    most = 2 * 6 * limits.output_kib * 1024 + 65536  # both outputs, each character escaped
    deadline = time.monotonic() + limits.seconds + ANSWER_SECONDS
    try:
        with client.stream(
            "POST", url, content=json.dumps(body), headers={"Content-Type": "application/json"}
        ) as answer:
            if answer.status_code == 429 or answer.status_code >= 500:
                raise _AgainError(f"status {answer.status_code}")
            if answer.status_code != 200 or "content-encoding" in answer.headers:
                raise _remote_error(
                    url,
                    f"status {answer.status_code}, expected 200 and an answer that is not "
                    "compressed",
                )
            data = b""
            for part in answer.iter_raw():
                data += part
                if len(data) > most:
                    raise _remote_error(url, f"the answer is longer than {most} bytes")
                if time.monotonic() > deadline:
                    raise _AgainError("the answer takes too long")
            return data
    except httpx.HTTPError as error:
        raise _AgainError(f"{type(error).__name__}: {printable(error)}") from error


def _read(data: bytes, seconds: float, url: str) -> Finished:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _remote_error(url, f"the answer is not JSON: {printable(error)}") from error
    if not isinstance(answer, dict):
        raise _remote_error(url, f"the answer is {type(answer).__name__}, expected an object")
    for name, kind in _KINDS.items():
        if type(answer.get(name)) is not kind:
            found = printable(repr(answer.get(name)))
            raise _remote_error(url, f"{name} must be {kind.__name__}, got {found}")
    killed_by = "time" if answer["timed_out"] else None
    return Finished(answer["exit_code"], answer["stdout"], answer["stderr"], killed_by, seconds)


def _remote_error(url: str, why: str) -> RemoteError:
    return RemoteError(
        f"sandbox {printable(url.partition('?')[0])}",
        why,
        state="the program was not judged.",
        next="see that the server runs and speaks this dialect (stages/reward/sandbox/remote.py)",
    )
