"""The file that `prompt.template` names."""

from __future__ import annotations

import os
from pathlib import Path

from quiver.schemas.errors import ConfigError, printable, reason
from quiver.schemas.manifest import digest
from quiver.stages.common.store.storage import read_file

from .config import TemplateConfig


def read_template(config: TemplateConfig, sha256: str = "") -> str | None:
    """Text of the template file; None for the policy's own. ConfigError, also if its digest is not
    `sha256`."""
    if config.template is None:
        return None
    try:
        template = read_file(Path(os.path.expanduser(config.template))).decode()
        if sha256 not in ("", digest(template)):
            raise ValueError("it changed while the prompts were planned")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"prompt.template {printable(config.template)}",
            reason(error),
            next="name a jinja file in UTF-8, and leave it as it is during a run",
        ) from None
    return template
