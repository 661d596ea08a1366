"""Servers that a recipe names: their URLs, and the tokens that they are asked with.

A token is named, as `env:NAME`, never written; no message here shows what was written in its place.

    refuse_url("http://host:8000", needs_tls=False)
    token = secret("env:MY_TOKEN", "reward server judge")
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from quiver.schemas.errors import ConfigError

_TOKEN = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_SHORTEST = 8  # characters of a token: a shorter one would be found by chance in a server's text


def refuse_section(section: Mapping[str, Any]) -> None:
    """ValueError where `token` or `urls` of a recipe's section may not stand there, or a token
    would go over plain http that is not allowed to."""
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
    """ValueError, about `name`, unless `token` is empty or names a variable."""
    if token and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
        raise ValueError(
            f"{name} must be env:NAME, the environment variable that holds it: a recipe is no "
            "place for a secret"
        )


def refuse_url(url: Any, needs_tls: bool, otherwise: str = "") -> None:
    """ValueError unless `url` is one that can be asked; it shows the host at most, as anything else
    may hold a secret.

    `otherwise`: what may be done instead of taking https.
    """
    host = None
    if isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url:
        with suppress(ValueError):
            parts = urlsplit(url)
            _ = parts.port  # which is read only now
            host = parts.hostname
    if not host or parts.scheme not in ("http", "https") or "\\" in parts.netloc:
        raise ValueError("a URL must be http://HOST:PORT/PATH or https://…, without spaces")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"the URL of {host} has a user, a query or a fragment: a secret goes into token, as "
            "env:NAME"
        )
    if needs_tls and parts.scheme == "http" and not is_loopback(host):
        raise ValueError(f"a token would go to {host} in the clear: use https{otherwise}")


def root_of(url: str) -> str:
    """What a server's paths begin behind, with or without the /v1 of an OpenAI client."""
    return url.rstrip("/").removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine and no other can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def secret(reference: str, owner: str) -> str:
    """What stands in the variable of `env:NAME`; empty where `reference` is. ConfigError, about
    `owner`: it holds no token."""
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
