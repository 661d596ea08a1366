"""A folder that holds a model, before it is anybody's checkpoint: is it whole, is it safe, what
does a GGUF file become.

Refused: pickled weights, code that a model brings along, weight files that are missing, cut, empty
or outside the folder, links to other places, no tokenizer.

    check_folder(Path("path/to/model"), "path/to/model")
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quiver.schemas.errors import ConfigError, SecurityError, printable

_JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
log = logging.getLogger(__name__)


def check_folder(folder: Path, name: str) -> None:
    """Raise unless `folder` is a whole model directory: ConfigError names what is missing,
    SecurityError what is refused."""
    title = f"model {name}"
    if not (folder / "config.json").is_file():
        raise _incomplete(title, "config.json is missing")
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not _is_in_hub_cache(path):
            raise SecurityError(
                title,
                f"{path.name} is a link",
                next="put the file itself into the folder, or name another model",
            )
    for file in _JSON_FILES:
        if (folder / file).exists():
            _check_json(folder / file, title)
    tokenizer = folder / "tokenizer.json"  # too large to be parsed each time
    if tokenizer.is_file() and not tokenizer.read_bytes()[:64].lstrip().startswith(b"{"):
        raise _incomplete(title, "tokenizer.json is no JSON object")
    config = _read_object(folder / "config.json")
    numbers = {**config, **(config.get("text_config") or {})}
    for key in ("vocab_size", "max_position_embeddings"):
        number = numbers.get(key) if key in numbers else 1
        is_open = number is None and key == "max_position_embeddings"
        if not is_open and not (isinstance(number, int) and number > 0):
            raise _incomplete(title, f"config.json: {key} is {printable(repr(number))}")
    _check_weights(folder, title)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise _incomplete(title, "the tokenizer's files are missing")


def _check_json(path: Path, title: str) -> None:
    """ConfigError unless the file holds an object; SecurityError where it names code to run."""
    content = _read_object(path)
    text_config = (content or {}).get("text_config") or {}
    if content is None or not isinstance(text_config, dict):
        raise _incomplete(title, f"{path.name} is no JSON object")
    if "auto_map" in content or "auto_map" in text_config:
        raise SecurityError(
            title,
            f"{path.name} asks to run code that the model brings (auto_map)",
            next=f"take auto_map out of {path.name}, or name another model",
        )


def _incomplete(title: str, problem: str) -> ConfigError:
    return ConfigError(title, problem, next="complete the directory, or name another model")


def _check_weights(folder: Path, title: str) -> None:
    index = folder / "model.safetensors.index.json"
    weights = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if index.is_file():
        shards = _read_index(index)
        if shards is None:
            raise _incomplete(title, f"{index.name} is no index of weight files")
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise SecurityError(
                title,
                f"{index.name} names weight files outside the folder: {printable(outside[0])}",
                next="put all weight files into the folder itself",
            )
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise _incomplete(
                title, f"{len(missing)} of {len(shards)} weight files are missing: {missing[0]}"
            )
    elif not weights:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise SecurityError(
                title,
                "pickled weights only; safetensors are needed",
                next="save its weights as safetensors, or name another model",
            )
        raise _incomplete(title, "no *.safetensors")
    for path in weights:
        try:
            with safe_open(path, "numpy") as tensors:
                tensors.keys()
        except (SafetensorError, OSError):
            raise _incomplete(title, f"{path.name} is cut or not a safetensors file") from None
    if count_parameters(folder) == 0:
        raise _incomplete(title, "its weight files hold no weights")


def _read_index(index: Path) -> list[str] | None:
    """The weight files that an index names; None where it is not an index."""
    try:
        shards = set(_read_object(index)["weight_map"].values())
        return sorted(shards) if shards and all(isinstance(s, str) for s in shards) else None
    except (TypeError, KeyError, AttributeError):
        return None


def _read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where it holds something else."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _is_in_hub_cache(link: Path) -> bool:
    """Whether a link leads from a snapshot to a blob of the same repository in a hub's cache."""
    repository = link.parent.resolve().parent.parent
    is_snapshot = link.parent.resolve().parent.name == "snapshots"
    return is_snapshot and link.resolve().is_relative_to(repository / "blobs")


def convert_gguf(source: Path, folder: Path, dtype: str) -> None:
    """Write model and tokenizer of the GGUF file `source` into `folder`, its weights dequantized to
    `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("dequantizing %s, once", source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=getattr(torch, dtype)
    )
    # the weights are plain tensors now; with the quantizer's marks left on, saving refuses
    del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method"):
        if getattr(model, mark, None) is not None:
            delattr(model, mark)
    model.is_quantized = False
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def count_parameters(folder: Path) -> int:
    """Numbers in all weight files; only their headers are read."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118  not a dict
                total += math.prod(tensors.get_slice(key).get_shape())
    return total
