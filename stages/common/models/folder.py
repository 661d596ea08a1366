"""A folder that holds a model, before it is anybody's checkpoint: is it whole, is it safe, what
does a GGUF file become.

Refused: pickled weights, code that a model brings along, weight files that are missing or cut, no
tokenizer.

    check_folder(Path("path/to/model"), "path/to/model")
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quiver.schemas.errors import ConfigError, SecurityError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
log = logging.getLogger(__name__)


def check_folder(folder: Path, name: str) -> None:
    """Raise unless `folder` is a whole model directory: ConfigError names what is missing,
    SecurityError what is refused."""

    def incomplete(problem: str) -> ConfigError:
        next = "complete the directory, or name another model"
        return ConfigError(f"model {name}", problem, next=next)

    if not (folder / "config.json").is_file():
        raise incomplete("config.json is missing")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError:
        raise incomplete("config.json is not JSON") from None
    if "auto_map" in config:
        raise SecurityError(
            f"model {name}",
            "config.json asks to run code that the model brings (auto_map)",
            next="take auto_map out of config.json, or name another model",
        )
    index = folder / "model.safetensors.index.json"
    weights = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        shards = _read_index(index)
        if shards is None:
            raise incomplete(f"{index.name} is no index of weight files")
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise incomplete(
                f"{len(missing)} of {len(shards)} weight files are missing: {missing[0]}"
            )
    elif not weights:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise SecurityError(
                f"model {name}",
                "pickled weights only; safetensors are needed",
                next="save its weights as safetensors, or name another model",
            )
        raise incomplete("no *.safetensors")
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise incomplete("the tokenizer's files are missing")
    for path in weights:
        try:
            with safe_open(path, "numpy") as tensors:
                tensors.keys()
        except (SafetensorError, OSError):
            raise incomplete(f"{path.name} is cut or not a safetensors file") from None


def _read_index(index: Path) -> list[str] | None:
    """The weight files that an index names; None where it is not an index."""
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        return sorted(shards) if all(isinstance(shard, str) for shard in shards) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


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
