"""Chat templates that have names, such as `tool_use`: a model's folder holds them in files of their
own, and a version, which has no folders within it, in the tokenizer's config.

Not of the spine: few models have any.
"""

from __future__ import annotations

import json
from pathlib import Path

from .folder import NAMED_TEMPLATES, load_errors, parse_object


def files_in(model: Path) -> list[Path]:
    """The files of named templates in a model's folder, in alphabetical order."""
    return sorted((model / NAMED_TEMPLATES).glob("*.jinja"))


def move_into_config(model: Path, folder: Path) -> None:
    """Write the named templates of `model` into the tokenizer's config in `folder`, the older of
    two ways that transformers reads. A chat_template.jinja there becomes the one that is named
    `default`, and is deleted. ConfigError if one cannot be read."""
    files = {file.stem: file for file in files_in(model)}
    if not files:
        return
    default = folder / "chat_template.jinja"
    if default.is_file():
        files = {"default": default, **files}
    templates = []
    for name, file in files.items():
        with load_errors(f"chat template {file.name}"):
            templates.append({"name": name, "template": file.read_text("utf-8")})
    default.unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    config = (parse_object(path.read_bytes()) if path.is_file() else None) or {}
    config["chat_template"] = templates
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
