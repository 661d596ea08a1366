"""Checks a folder that holds a model before it becomes a checkpoint, and converts GGUF files.

Refused: pickled weights; code inside a model; weight files that are missing, cut, empty or outside
the folder; links to other places; a missing tokenizer. Of its subfolders, only chat templates are
read, so only they are checked.

    check_folder(Path("path/to/model"), "path/to/model")
    with load_errors("model path/to/model"):    # errors that only loading shows
        AutoTokenizer.from_pretrained("path/to/model")

Not of the spine: a model that a stage loads has passed these checks before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quiver.schemas.errors import ConfigError, QuiverError, SecurityError, printable
from quiver.schemas.manifest import FILE_NAME
from quiver.schemas.plain import is_too_deep
from quiver.stages.core import user_cache
from quiver.stages.core.user_cache import hash_files

_JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""File that names the weight files of a model in several."""
_MOST_LAYERS = 10_000
_BESIDE_GGUF = (*_JSON_FILES, *_TOKENIZER_FILES, "chat_template.jinja", "added_tokens.json")
"""Files that transformers may read beside a GGUF file."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of the processor of a model that reads pictures or clips."""
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of named chat templates, such as `tool_use`, as transformers saves them. A version in the
store has no such folder."""
log = logging.getLogger(__name__)


def check_folder(folder: Path, name: str, *, has_weights: bool = True) -> None:
    """Check that `folder` is a complete and safe model directory.

    Args:
        folder: The model directory.
        name: The model's name, for messages.
        has_weights: If false, weights may be missing.

    Raises:
        ConfigError: A file is missing or wrong.
        SecurityError: A file is unsafe.
    """
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
        with (folder / "tokenizer.json").open("rb") as file:  # too large to parse each time
            if not file.read(64).lstrip().startswith(b"{"):
                problem = "tokenizer.json is not a JSON object"
                raise _unusable(title, problem, "correct tokenizer.json")
    if has_weights:
        _check_weights(folder, title)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise _unusable(title, "the tokenizer's files are missing")


def _check_json(path: Path, title: str) -> None:
    """Raise ConfigError unless the file holds a JSON object with sane sizes, SecurityError if it
    names code to run."""
    content = parse_object(path.read_bytes()) if path.is_file() else None
    text_config = (content or {}).get("text_config") or {}
    if content is None or not isinstance(text_config, dict):
        raise _unusable(title, f"{path.name} is not a JSON object", f"correct {path.name}")
    for key, number in text_fields(content).items():
        is_number = type(number) is int and number > 0
        if key == "max_position_embeddings":
            is_number |= number is None
        elif key.endswith(("layers", "n_layer")):  # in some models it is a list
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
    """Return the ids that end a completion, ascending, from a model's JSON file.

    Returns None if it names none. Raises ConfigError if they are not token ids.
    """
    ids = content.get("eos_token_id")
    if ids is None:
        return None
    listed = ids if isinstance(ids, list) else [ids]
    # some models write -1 for "none"
    if not listed or any(type(id) is not int or not -1 <= id < 2**31 for id in listed):
        problem = f"{file}: eos_token_id is {printable(repr(ids))}"
        raise _unusable(title, problem, f"correct {file}")
    return sorted(id for id in listed if id >= 0) or None


def _unusable(title: str, problem: str, advice: str = "complete the directory") -> ConfigError:
    return ConfigError(title, problem, next=f"{advice}, or name another model")


def _check_weights(folder: Path, title: str) -> None:
    weights = weight_files(folder)
    if (folder / INDEX).is_file():
        shards = _indexed(folder)
        if not shards:
            raise _unusable(title, f"{INDEX} is not an index of weight files", f"correct {INDEX}")
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise SecurityError(
                title,
                f"{INDEX} names weight files outside the folder: {printable(outside[0])}",
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
                "it holds only an adapter, without the weights under it",
                next='name a policy that was trained with optimize.lora.save = "merged"',
            )
        raise _unusable(title, "no *.safetensors")
    for path in weights:
        if not re.fullmatch(FILE_NAME, path.name):
            raise ConfigError(
                title,
                f"the name of {printable(path.name)} has characters other than A-Z a-z 0-9 . _ -",
                next="rename the file, or name another model",
            )
        try:
            with safe_open(path, "numpy") as tensors:
                tensors.keys()
        except (SafetensorError, OSError):
            raise _unusable(title, f"{path.name} is cut or not a safetensors file") from None
    if count_parameters(folder) == 0:
        raise _unusable(title, "its weight files hold no weights")


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the model's weights: model.safetensors, else those that the index
    names, else every *.safetensors. Transformers chooses in this order.

    Others hold the same weights in another form, such as Mistral's consolidated.safetensors.
    """
    for names in ([SINGLE], _indexed(folder)):
        files = [folder / name for name in names if (folder / name).is_file()]
        if files:
            return files
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def _indexed(folder: Path) -> list[str]:
    """Return the names of weight files in the index; nothing if there is none, or it is broken."""
    index = folder / INDEX
    content = parse_object(index.read_bytes()) if index.is_file() else None
    weight_map = (content or {}).get("weight_map")
    return sorted({*map(str, weight_map.values())}) if isinstance(weight_map, dict) else []


def parse_object(raw: bytes) -> dict[str, Any] | None:
    """Return the object in the bytes of a JSON file.

    Returns None if they hold something else or are nested too deeply. Infinity is accepted, since
    models use it although JSON does not have it.
    """
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and not is_too_deep(content) else None


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json, with those of its text part in place of its own."""
    return {**config, **(config.get("text_config") or {})}


def text_field(config: Mapping[str, Any], name: str) -> Any:
    """Return one field of the text part, by the name that most families have for it.

    If config.json has no such name, transformers' class for the model decides: it knows a family's
    own names (`n_layer`) and defaults. Only then are transformers and torch imported. Returns None
    if the class has no such field, or does not take the config.
    """
    fields = text_fields(config)
    if name in fields:
        return fields[name]
    with suppress(Exception):  # each class refuses in its own way; loading the model says why
        from transformers import AutoConfig

        loaded = AutoConfig.for_model(**deepcopy(dict(config)))
        return getattr(loaded.get_text_config(), name, None)
    return None


def size_in(config: dict[str, Any], *names: str) -> Any:
    """Return the first field of these `names`; None if there is none.

    A text part inside a config.json may leave out defaults. Only for these is the model's class
    asked, because that imports torch.
    """
    fields = text_fields(config)
    for name in names:
        if name in fields:
            return fields[name]
    return text_field(config, names[0]) if config.get("text_config") else None


def _is_in_hub_cache(link: Path, folder: Path) -> bool:
    """True if a link in `folder` leads from a snapshot to a blob of the same repository in a hub
    cache."""
    snapshots = folder.resolve().parent
    blobs = snapshots.parent / "blobs"
    try:
        return snapshots.name == "snapshots" and link.resolve().is_relative_to(blobs)
    except RuntimeError:  # the link is part of a loop
        return False


def says_no_memory(error: BaseException) -> bool:
    """True if a library's error means out of memory; torch on a CPU, CUDA's own calls, cuBLAS and
    Triton raise a plain RuntimeError or the like."""
    phrases = ("not enough memory", "out of memory", "ALLOC_FAILED")
    phrases += ("can't allocate memory", "Cannot allocate memory")
    names = {parent.__name__ for parent in type(error).__mro__}
    is_known = bool({"MemoryError", "OutOfMemoryError"} & names)
    return is_known or any(phrase in str(error) for phrase in phrases)


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """Convert errors that libraries raise at a model's files into ConfigError about `name`.

    Out-of-memory errors and QuiverError pass unchanged.
    """
    try:
        yield
    except QuiverError:
        raise
    except BaseException as error:  # PanicException, of libraries in Rust, is not an Exception
        is_panic = type(error).__name__ == "PanicException"
        if not (is_panic or isinstance(error, Exception)) or says_no_memory(error):
            raise
        raise ConfigError(
            name,
            f"cannot be loaded: {type(error).__name__}: {printable(error)}",
            next="correct its files, or name another model",
        ) from error


def convert_gguf(source: Path, folder: Path, dtype: str | None) -> None:
    """Write model and tokenizer of a GGUF file into `folder`.

    The user's cache keeps the result, so a machine converts a file only once. Raises ConfigError.

    Args:
        source: The GGUF file.
        folder: Folder to write into.
        dtype: Dtype of the dequantized weights. None: write no weights.
    """
    beside = [source.parent / name for name in _BESIDE_GGUF]
    files = [source, *(path for path in beside if path.is_file())]
    with load_errors(f"model {source.name}"):  # the package gguf may be missing
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
    # the weights are plain tensors now, but saving refuses while the quantizer's marks remain
    del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method"):
        if getattr(model, mark, None) is not None:
            delattr(model, mark)
    model.is_quantized = False
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)


def named_templates(model: Path) -> list[Path]:
    """Return the files of named templates in a model's folder, in alphabetical order."""
    return sorted((model / NAMED_TEMPLATES).glob("*.jinja"))


def move_templates_into_config(model: Path, folder: Path) -> None:
    """Write the named templates of `model` into the tokenizer's config in `folder`.

    This is the older of two forms that transformers reads. A chat_template.jinja in `folder`
    becomes the template named `default` and is deleted. Raises ConfigError if one cannot be read.
    """
    files = {file.stem: file for file in named_templates(model)}
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


def stored_weights(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype (safetensors' name: F32, BF16, …) and shape of each weight, by its name.

    Only the files' headers are read.
    """
    weights = {}
    for path in weight_files(folder):
        with safe_open(path, "numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118  not a dict
                header = tensors.get_slice(key)
                weights[key] = header.get_dtype(), tuple(header.get_shape())
    return weights


def count_parameters(folder: Path) -> int:
    """Return the number of elements in all weight files; only their headers are read."""
    return sum(math.prod(shape) for _, shape in stored_weights(folder).values())
