"""Chat templates that have names, such as `tool_use`: a model's folder holds them in files of their
own, and a version, which has no folders within it, in the tokenizer's config.

Not of the spine: few models have any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .folder import parse_object

FOLDER = "additional_chat_templates"
"""Folder of these templates, as transformers saves them."""


def files_in(model: Path) -> list[Path]:
    """The files of named templates in a model's folder, in alphabetical order."""
    return sorted((model / FOLDER).glob("*.jinja"))


def write(files: Sequence[Path], folder: Path) -> None:
    """Write the named templates among a model's `files` into the tokenizer's config in `folder`,
    the older of two ways that transformers reads: versions have no folders within them."""
    named = {file.stem: file.read_text("utf-8") for file in files if file.parent.name == FOLDER}
    if not named:
        return
    default = folder / "chat_template.jinja"
    if default.is_file():
        named = {"default": default.read_text("utf-8"), **named}
        default.unlink()
    path = folder / "tokenizer_config.json"
    config = (parse_object(path.read_bytes()) if path.is_file() else None) or {}
    config["chat_template"] = [
        {"name": name, "template": template} for name, template in named.items()
    ]
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
