"""Where a store lies: a folder, or a bucket.

    storage = open_storage("/data/store")
    storage = open_storage("s3://bucket/rl")

Not of the spine: a store is named by a path or a URL, and this file tells them apart.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quiver.schemas.errors import ConfigError, printable, reason

from .disk import Disk
from .storage import Storage


def is_url(store: str | os.PathLike[str]) -> bool:
    """Return True if a store is named by the URL of a bucket, even a wrong one."""
    text = os.fspath(store)
    return "://" in text or text.startswith(("s3:", "gs:", "az:"))


def locate(store: str | os.PathLike[str]) -> str:
    """Return the URL of a store, or the absolute path of its folder. Raises ConfigError."""
    text = os.fspath(store)
    if is_url(text):
        return re.sub("(?<=[^/:])/+$", "", text)
    try:
        return str(Path(text).expanduser().absolute())
    except (OSError, RuntimeError) as error:  # RuntimeError: an unknown home
        raise ConfigError(
            f"store {printable(text)}",
            f"cannot be used: {reason(error)}",
            next="name another folder in --store",
        ) from None


def open_storage(url: str) -> Storage:
    """Open the storage at a URL or path, as `locate` returns it. Raises ConfigError."""
    if is_url(url):
        from .bucket import Bucket

        return Bucket(url)
    return Disk(Path(url))
