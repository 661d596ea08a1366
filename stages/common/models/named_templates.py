"""Named chat templates, such as `tool_use`, moved from their own files into the tokenizer's config.

A model's folder keeps them in a subfolder, which a version in the store does not have.

Not of the spine: few models have any.
"""

from __future__ import annotations

import json
from pathlib import Path

from .folder import NAMED_TEMPLATES, load_errors, parse_object


def files_in(model: Path) -> list[Path]:
    """Return the files of named templates in a model's folder, in alphabetical order."""
    return sorted((model / NAMED_TEMPLATES).glob("*.jinja"))


def move_into_config(model: Path, folder: Path) -> None:
    """Write the named templates of `model` into the tokenizer's config in `folder`.

    This is the older of two forms that transformers reads. A chat_template.jinja in `folder`
    becomes the template named `default` and is deleted. Raises ConfigError if one cannot be read.
    """
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
