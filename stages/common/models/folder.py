"""A folder that holds a model, before it is anybody's checkpoint: is it whole, is it safe, what
does a GGUF file become.

Refused: pickled weights, code that a model brings along, weight files that are missing or cut, no
tokenizer.

    check_folder(Path("path/to/model"), "path/to/model")
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from quiver.schemas.errors import ConfigError, SecurityError

log = logging.getLogger(__name__)


def check_folder(folder: Path, name: str) -> None:
    """Raise unless `folder` is a whole model directory: ConfigError names what is missing,
    SecurityError what is refused."""
    next = "complete the directory, or name another model"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {name}", "config.json is missing", next=next)
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError:
        raise ConfigError(f"model {name}", "config.json is not JSON", next=next) from None
    if "auto_map" in config:
        what = "config.json asks to run code that the model brings (auto_map)"
        raise SecurityError(
            f"model {name}", what, next="take auto_map out of config.json, or name another model"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _shards(index, name, next)
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ConfigError(
                f"model {name}",
                f"{len(missing)} of {len(shards)} weight files are missing: {missing[0]}",
                next=next,
            )
    elif not any(folder.glob("*.safetensors")):
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            help = "save its weights as safetensors, or name another model"
            raise SecurityError(
                f"model {name}", "pickled weights only; safetensors are needed", next=help
            )
        raise ConfigError(f"model {name}", "no *.safetensors", next=next)
    if not any(
        (folder / file).is_file()
        for file in ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
    ):
        raise ConfigError(f"model {name}", "the tokenizer's files are missing", next=next)
    for path in sorted(folder.glob("*.safetensors")):
        _check_safetensors(path, name, next)


def _shards(index: Path, name: str, next: str) -> list[str]:
    """The weight files that an index names."""
    try:
        found = set(json.loads(index.read_bytes())["weight_map"].values())
        if all(isinstance(shard, str) for shard in found):
            return sorted(found)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ConfigError(f"model {name}", f"{index.name} is no index of weight files", next=next)


def _check_safetensors(path: Path, name: str, next: str) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as opened:
            opened.keys()
    except (SafetensorError, OSError):
        raise ConfigError(
            f"model {name}", f"{path.name} is cut or not a safetensors file", next=next
        ) from None


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
    from safetensors import safe_open

    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as opened:
            for key in opened.keys():  # noqa: SIM118  not a dict
                size = 1
                for length in opened.get_slice(key).get_shape():
                    size *= length
                total += size
    return total
