"""A folder that holds a model, before it is anybody's checkpoint: is it whole, is it safe, what
does a GGUF file become.

Refused: pickled weights, code that a model brings along, weight files that are missing, cut, empty
or outside the folder, links to other places, no tokenizer. Of what lies in folders within it only
chat templates are read, so only these are looked at.

    check_folder(Path("path/to/model"), "path/to/model")
    with load_errors("model path/to/model"):    # what only trying tells
        AutoTokenizer.from_pretrained("path/to/model")
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quiver.schemas.errors import ConfigError, QuiverError, SecurityError, printable
from quiver.schemas.manifest import FILE_NAME
from quiver.schemas.plain import is_too_deep
from quiver.stages.common.models import user_cache
from quiver.stages.common.models.hashes import hash_files

_JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_MOST_LAYERS = 10_000
_BESIDE_GGUF = (*_JSON_FILES, *_TOKENIZER_FILES, "chat_template.jinja", "added_tokens.json")
"""What transformers may read beside a GGUF file."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""What a model has that sees pictures."""
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates that have names, such as `tool_use`, as transformers saves them."""
log = logging.getLogger(__name__)


def check_folder(folder: Path, name: str, *, has_weights: bool = True) -> None:
    """Raise unless `folder` is a whole model directory, but for weights that it may lack:
    ConfigError names what is missing, SecurityError what is refused."""
    title = f"model {name}"
    if not (folder / "config.json").is_file():
        raise _unusable(title, "config.json is missing")
    for path in sorted([*folder.iterdir(), *(folder / NAMED_TEMPLATES).glob("*.jinja")]):
        if path.is_symlink() and not _is_in_hub_cache(path, folder):
            raise SecurityError(
                title,
                f"{path.relative_to(folder)} is a link",
                next="put the file itself into the folder, or name another model",
            )
    for file in _JSON_FILES:
        if (folder / file).exists():
            _check_json(folder / file, title)
    if (folder / "tokenizer.json").is_file():
        with (folder / "tokenizer.json").open("rb") as file:  # too large to be parsed each time
            if not file.read(64).lstrip().startswith(b"{"):
                problem = "tokenizer.json is no JSON object"
                raise _unusable(title, problem, "correct tokenizer.json")
    if has_weights:
        _check_weights(folder, title)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise _unusable(title, "the tokenizer's files are missing")


def _check_json(path: Path, title: str) -> None:
    """Raise ConfigError unless the file holds an object with sane sizes, SecurityError if it names
    code to run."""
    content = parse_object(path.read_bytes()) if path.is_file() else None
    text_config = (content or {}).get("text_config") or {}
    if content is None or not isinstance(text_config, dict):
        raise _unusable(title, f"{path.name} is no JSON object", f"correct {path.name}")
    for key, number in {**content, **text_config}.items():
        is_number = type(number) is int and number > 0
        if key == "max_position_embeddings":
            is_number |= number is None
        elif key.endswith(("layers", "n_layer")):  # some are lists
            is_number = not isinstance(number, int) or number <= _MOST_LAYERS
        elif key != "vocab_size":
            continue
        if not is_number:
            problem = f"{path.name}: {key} is {printable(repr(number))}"
            raise _unusable(title, problem, f"correct {path.name}")
    waiting: list[Any] = [content]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict) and "auto_map" in node:
            raise SecurityError(
                title,
                f"{path.name} asks to run code that the model brings (auto_map)",
                next=f"take auto_map out of {path.name}, or name another model",
            )
        if isinstance(node, dict | list):
            waiting += node.values() if isinstance(node, dict) else node
    end_ids_in(content, path.name, title)


def end_ids_in(content: dict[str, Any], file: str, title: str) -> list[int] | None:
    """The ids that end a completion, rising, as a model's JSON file names them; None where it names
    none. ConfigError."""
    ids = content.get("eos_token_id")
    if ids is None:
        return None
    listed = ids if isinstance(ids, list) else [ids]
    # some models say -1 where they have none
    if not listed or any(type(id) is not int or not -1 <= id < 2**31 for id in listed):
        problem = f"{file}: eos_token_id is {printable(repr(ids))}"
        raise _unusable(title, problem, f"correct {file}")
    return sorted(listed)


def _unusable(title: str, problem: str, advice: str = "complete the directory") -> ConfigError:
    return ConfigError(title, problem, next=f"{advice}, or name another model")


def _check_weights(folder: Path, title: str) -> None:
    index = folder / "model.safetensors.index.json"
    weights = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if index.is_file():
        shards = _read_index(index)
        if shards is None:
            problem = f"{index.name} is no index of weight files"
            raise _unusable(title, problem, f"correct {index.name}")
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise SecurityError(
                title,
                f"{index.name} names weight files outside the folder: {printable(outside[0])}",
                next="put all weight files into the folder itself",
            )
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise _unusable(
                title, f"{len(missing)} of {len(shards)} weight files are missing: {missing[0]}"
            )
    elif not weights:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise SecurityError(
                title,
                "pickled weights only; safetensors are needed",
                next="save its weights as safetensors, or name another model",
            )
        if (folder / "adapter").is_dir():
            raise ConfigError(
                title,
                "it holds an adapter alone, without the weights that this goes on",
                next='name a policy that was trained with optimize.lora.save = "merged"',
            )
        raise _unusable(title, "no *.safetensors")
    for path in weights:
        if not re.fullmatch(FILE_NAME, path.name):
            raise ConfigError(
                title,
                f"the name of {printable(path.name)} has other characters than A-Z a-z 0-9 . _ -",
                next="rename the file, or name another model",
            )
        try:
            with safe_open(path, "numpy") as tensors:
                tensors.keys()
        except (SafetensorError, OSError):
            raise _unusable(title, f"{path.name} is cut or not a safetensors file") from None
    if count_parameters(folder) == 0:
        raise _unusable(title, "its weight files hold no weights")


def _read_index(index: Path) -> list[str] | None:
    """The weight files that an index names; None where it is not an index."""
    try:
        shards = set(parse_object(index.read_bytes())["weight_map"].values())
        return sorted(shards) if shards and all(isinstance(s, str) for s in shards) else None
    except (TypeError, KeyError, AttributeError):
        return None


def parse_object(raw: bytes) -> dict[str, Any] | None:
    """The object in the bytes of a JSON file; None if they hold something else, or are nested too
    deeply. Models name infinity, which JSON does not have."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and not is_too_deep(content) else None


def has_vision(config: dict[str, Any]) -> bool:
    """Whether a model of this config.json has a part that sees."""
    return isinstance(config.get("vision_config"), dict)


def _is_in_hub_cache(link: Path, folder: Path) -> bool:
    """Whether a link in `folder` leads from a snapshot to a blob of the same repository in a hub's
    cache."""
    snapshots = folder.resolve().parent
    blobs = snapshots.parent / "blobs"
    try:
        return snapshots.name == "snapshots" and link.resolve().is_relative_to(blobs)
    except RuntimeError:  # a loop of links
        return False


def says_no_memory(error: BaseException) -> bool:
    """Whether a library says that memory is short. On a CPU torch raises a plain RuntimeError."""
    phrases = ("not enough memory", "can't allocate memory", "Cannot allocate memory")
    names = {parent.__name__ for parent in type(error).__mro__}
    is_known = bool({"MemoryError", "OutOfMemoryError"} & names)
    return is_known or any(phrase in str(error) for phrase in phrases)


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """Turn whatever libraries raise at a model's files into ConfigError about `name`. Lack of
    memory rises as it is."""
    try:
        yield
    except QuiverError:
        raise
    except BaseException as error:  # a PanicException of the libraries in Rust is no Exception
        is_panic = type(error).__name__ == "PanicException"
        if not (is_panic or isinstance(error, Exception)) or says_no_memory(error):
            raise
        raise ConfigError(
            name,
            f"cannot be loaded: {type(error).__name__}: {printable(error)}",
            next="correct its files, or name another model",
        ) from error


def convert_gguf(source: Path, folder: Path, dtype: str | None) -> None:
    """Write model and tokenizer of the GGUF file `source` into `folder`, its weights dequantized to
    `dtype`, or without its weights if that is None: once per machine, since the user's cache
    keeps them. ConfigError."""
    beside = [source.parent / name for name in _BESIDE_GGUF]
    files = [source, *(path for path in beside if path.is_file())]
    with load_errors(f"model {source.name}"):  # gguf is not there, say
        made_by = [f"{name} {version(name)}" for name in ("transformers", "gguf", "tokenizers")]
    parts = [str(dtype), *made_by, *(sha256 for _, sha256 in hash_files(files, remembered=True))]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    user_cache.fill(folder, "models", key, partial(_dequantize, source, dtype))


def _dequantize(source: Path, dtype: str | None, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with load_errors(f"model {source.name}"):
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.save_pretrained(folder)
        if dtype is None:
            config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
            config.save_pretrained(folder)
            return
        log.info("dequantizing %s, once per machine", source.name)
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


def stored_dtypes(folder: Path) -> set[str]:
    """The dtypes of all weights, as safetensors names them: F32, BF16, …"""
    dtypes = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118  not a dict
                dtypes.add(tensors.get_slice(key).get_dtype())
    return dtypes


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, by its name; only the headers of the files are read."""
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118  not a dict
                shapes[key] = tuple(tensors.get_slice(key).get_shape())
    return shapes


def count_parameters(folder: Path) -> int:
    """Numbers in all weight files; only their headers are read."""
    return sum(map(math.prod, weight_shapes(folder).values()))
