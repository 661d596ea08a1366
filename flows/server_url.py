"""The Prefect server that PREFECT_API_URL names: how its URL is shown, and whether it answers.

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
"""A server that answers a question after its health with more is none of Prefect's."""
_LOGIN = re.compile(r"^(.*?//)?.*@", re.DOTALL)
_LOGIN_IN_TEXT = re.compile(r"//\S*@")


def without_login(said: str | Exception) -> str:
    """A URL, or what an error says of one, safe to show: without user and password. Of a URL all
    before the last @ goes, since a password may hold any sign."""
    if isinstance(said, Exception):
        return printable(_LOGIN_IN_TEXT.sub("//…@", str(said)))
    return printable(_LOGIN.sub(r"\1…@", said))


def no_address(url: str, error: Exception) -> ConfigError:
    """What to raise where `error` says that `url` is no URL; it may quote a part of a password."""
    how = "is a special sign of its password written with %?" if "@" in url else printable(error)
    return ConfigError(
        f"Prefect API {without_login(url)}",
        f"is no address of a server: {how}",
        next="export PREFECT_API_URL=http://HOST:4200/api, or unset it, and run again",
    )


def require_answer(url: str) -> None:
    """RemoteError unless the server at `url` has said something within SECONDS, of no more than
    MOST_BYTES. Prefect's client waits a minute for each of its tries, for ever for a server that
    sends a byte now and then, and reads an answer of any length."""
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

    # a thread, since no timeout of httpx's is over the whole answer; it dies with this process
    threading.Thread(target=ask, daemon=True, name="prefect-probe").start()
    try:
        error = answer.exception(SECONDS)  # the next question meets the error too, and tells it
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
