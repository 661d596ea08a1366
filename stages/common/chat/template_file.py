"""Reads a chat template from the file that a recipe names."""

from __future__ import annotations

import os
from pathlib import Path

from quiver.schemas.errors import ConfigError, printable, reason
from quiver.schemas.manifest import digest
from quiver.stages.common.store.storage import read_file


def read_template(path: str | None, key: str, sha256: str = "") -> str | None:
    """Return the text of the template file that `key` names; None for the model's own template.

    Raises ConfigError if it cannot be read or its digest is not `sha256`.
    """
    if path is None:
        return None
    try:
        template = read_file(Path(os.path.expanduser(path))).decode()
        if sha256 not in ("", digest(template)):
            raise ValueError("it changed since it was planned")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key} {printable(path)}",
            reason(error),
            next="name a jinja file in UTF-8, and leave it as it is during a run",
        ) from None
    return template
