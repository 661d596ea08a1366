"""Servers that a recipe names: checks of their URLs, their tokens, and strict reading of what they
send.

A recipe names a token as `env:NAME` and never contains it. If a secret was written there anyway, no
message shows it.

    refuse_url("http://host:8000", needs_tls=False)
    token = secret("env:MY_TOKEN", "reward server judge")

Both sides read JSON in the same way: answers of servers, and requests to the server that scores for
others.

>>> read_json(b'{"score": 0.5}')
{'score': 0.5}
>>> read_json(b'[NaN]')
Traceback (most recent call last):
quiver.stages.core.servers.MalformedError: the answer is not JSON: NaN is not JSON: '[NaN]'
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from quiver.schemas import plain
from quiver.schemas.errors import ConfigError, printable

_Model = TypeVar("_Model", bound=BaseModel)

_TOKEN = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_SHORTEST = 8  # characters of a token: a shorter one could appear in a server's text by chance


def refuse_section(section: Mapping[str, Any]) -> None:
    """Check `token` and `urls` of a recipe's section.

    Raises ValueError if one is not allowed, or if a token would go over plain http without
    `allow_plain_http`.
    """
    token = section.get("token", "")
    refuse_token(token)
    needs_tls = bool(token) and section.get("allow_plain_http") is not True
    urls = section.get("urls", ())
    for url in urls if isinstance(urls, list | tuple) else [urls]:
        try:
            refuse_url(url, needs_tls, ", or set allow_plain_http = true")
        except ValueError as error:
            raise ValueError(f"urls: {error}") from None


def refuse_token(token: Any, name: str = "token") -> None:
    """Raise ValueError, about `name`, unless `token` is empty or names a variable."""
    if token and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
        raise ValueError(
            f"{name} must be env:NAME, the environment variable that holds it: a recipe must not "
            "contain secrets"
        )


def refuse_url(url: Any, needs_tls: bool, otherwise: str = "") -> None:
    """Raise ValueError unless `url` can be used.

    The error shows at most the host, because the rest may hold a secret.

    Args:
        needs_tls: if true, plain http is refused, except to this machine.
        otherwise: an alternative to https, for the error message.
    """
    host = None
    if isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url:
        with suppress(ValueError):
            address = urlsplit(url)
            _ = address.port  # parsed on access; raises ValueError
            host = address.hostname
    if not host or address.scheme not in ("http", "https") or "\\" in address.netloc:
        raise ValueError("a URL must be http://HOST:PORT/PATH or https://…, without spaces")
    if "@" in address.netloc or address.query or address.fragment:
        raise ValueError(
            f"the URL of {host} has a user, a query or a fragment: a secret goes into token, as "
            "env:NAME"
        )
    if needs_tls and address.scheme == "http" and not is_loopback(host):
        raise ValueError(f"a token would go to {host} unencrypted: use https{otherwise}")


def root_of(url: str) -> str:
    """Return the URL before a server's paths, with or without the /v1 of an OpenAI client."""
    return url.rstrip("/").removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Return True if `host`, a name or an address, is this machine and unreachable for others."""
    try:
        address = ipaddress.ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def secret(reference: str, owner: str) -> str:
    """Return the value of the variable in `env:NAME`; empty if `reference` is empty.

    Raises ConfigError, about `owner`, if the variable holds no token.
    """
    if not reference:
        return ""
    if not _TOKEN.fullmatch(reference):
        raise ConfigError(
            owner, "token must be env:NAME, the variable that holds it", next="name it as env:NAME"
        )
    name = reference.removeprefix("env:")
    token = os.environ.get(name, "")
    if not token:
        problem = "is not set"
    elif len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        problem = f"holds no token: at least {_SHORTEST} ASCII characters, no spaces"
    else:
        return token
    raise ConfigError(
        owner, f"environment variable {name} {problem}", next=f"set {name} in the environment"
    )


class MalformedError(ValueError):
    """A message breaks its dialect; the text says what was expected and found."""


def read_json(raw: bytes, name: str = "the answer") -> Any:
    """Parse `raw`. Raises MalformedError, about `name`, for invalid UTF-8, half a character, or
    anything that `plain.read_json` refuses."""
    try:
        text = raw.decode()
        document = plain.read_json(text)
        if "\\u" in text:  # \ud800 alone is half a character: no file and no wire can hold it
            json.dumps(document, ensure_ascii=False).encode()
    except ValueError as error:
        shown = printable(raw[:60].decode(errors="replace"), 60)
        problem = f"is not JSON: {printable(error, 100)}: {shown!r}" if raw else "is empty"
        raise MalformedError(f"{name} {problem}") from None
    return document


def read_as(cls: type[_Model], document: Any) -> _Model:
    """Return `document`, JSON bytes or what was read of them, as a `cls` without conversions.
    MalformedError names the place that is wrong.

    Bytes are read faster than by `read_json`, but the last of two equal keys counts, and NaN is a
    float.
    """
    try:
        if isinstance(document, bytes):
            return cls.model_validate_json(document, strict=True)
        return cls.model_validate(document, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the answer"
        raise MalformedError(printable(f"{place}: {problem['msg']}", 160)) from None
