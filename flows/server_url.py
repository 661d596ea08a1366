"""The Prefect server of PREFECT_API_URL: its URL without passwords, and a check that it answers.

without_login("http://me:password@host/api")    # http://…@host/api
require_answer(url)                             # RemoteError after SECONDS
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future

from quiver.schemas.errors import ConfigError, RemoteError, printable

SECONDS = 8.0
MOST_BYTES = 64 * 1024
"""Most bytes of a health answer; a server that sends more is not Prefect's."""
_LOGIN = re.compile(r"^(.*?//)?.*@", re.DOTALL)
_LOGIN_IN_TEXT = re.compile(r"//\S*@")


def without_login(said: str | Exception) -> str:
    """Return a URL, or an error's text about one, without user and password.

    In a URL everything before the last @ is removed, since a password may hold any character.
    """
    if isinstance(said, Exception):
        return printable(_LOGIN_IN_TEXT.sub("//…@", str(said)))
    return printable(_LOGIN.sub(r"\1…@", said))


def no_address(url: str, error: Exception) -> ConfigError:
    """Return the ConfigError for an invalid `url`; the original `error` may quote part of a
    password."""
    how = "is a special sign of its password written with %?" if "@" in url else printable(error)
    return ConfigError(
        f"Prefect API {without_login(url)}",
        f"is no address of a server: {how}",
        next="export PREFECT_API_URL=http://HOST:4200/api, or unset it, and run again",
    )


def require_answer(url: str) -> None:
    """Raise RemoteError unless the server at `url` answers within SECONDS, with at most MOST_BYTES.

    Prefect's own client waits a minute per try, for ever if a server sends single bytes, and reads
    an answer of any length.
    """
    import httpx

    answer: Future[int] = Future()

    def ask() -> None:
        try:
            with httpx.stream("GET", f"{url}/health", timeout=None) as response:
                num_bytes = 0
                for chunk in response.iter_bytes():
                    num_bytes += len(chunk)
                    if num_bytes > MOST_BYTES:
                        break
            answer.set_result(num_bytes)
        except Exception as error:
            answer.set_exception(error)

    # In a thread, since no timeout of httpx covers the whole answer. It dies with this process.
    threading.Thread(target=ask, daemon=True, name="prefect-probe").start()
    try:
        # An error is left to the next request, which meets and reports it.
        error = answer.exception(SECONDS)
    except TimeoutError:
        raise RemoteError(
            f"Prefect API {without_login(url)}",
            f"does not answer within {SECONDS:g} s",
            next="prefect server start, or correct PREFECT_API_URL, and run again",
        ) from None
    if error is None and answer.result() > MOST_BYTES:
        raise RemoteError(
            f"Prefect API {without_login(url)}",
            f"answers with more than {MOST_BYTES:,} bytes when it is asked how it is: it is no "
            "server of Prefect's",
            next="correct PREFECT_API_URL, or unset it, and run again",
        )
