"""Checkpoints: the base imported once as `policy@0`, each later policy saved beside it; what a
model is, told by hashes.

A policy version is a Hugging Face model directory that vLLM and transformers load as it is. The
optimizer's state lives below it in `optimizer/`, a LoRA adapter in `adapter/`, because vLLM reads
every *.safetensors at the top. Refused: pickled weights, code that a model brings along.

    ref = run(PolicyConfig(model="path/to/model"), store, into="arith")        # arith/policy@0
    tokenizer = load_tokenizer(store.open(ref))
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError, ConflictError, LineageError, printable
from quiver.schemas.manifest import Model, digest
from quiver.schemas.refs import Ref
from quiver.stages.common.config import Config
from quiver.stages.common.models import from_function as made
from quiver.stages.common.models.folder import check_folder, convert_gguf, count_parameters
from quiver.stages.common.store import Store, Version, storage
from quiver.stages.common.work import begin

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

STAGE_VERSION = 1
OPTIMIZER_FOLDER = "optimizer"
ADAPTER_FOLDER = "adapter"
_TEMPLATE = ("chat_template.jinja", "chat_template.json")
_TOKENIZER = (
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
_CARRIED = (*_TOKENIZER, *_TEMPLATE, "generation_config.json")
log = logging.getLogger(__name__)


class PolicyConfig(Config):
    """Where the base model comes from. It becomes `policy@0` of the run."""

    model: str = Field(min_length=1)
    """A model directory, a .gguf file, `package:NAME/FILE.gguf` (a file inside an installed
    package), a hub id, or a function of yours that makes the model, `module:function` or
    `file.py:function`. It is called once a run, as `function(folder, **arguments)` with a
    `pathlib.Path`, and writes config, safetensors, tokenizer and generation config there, by
    `save_pretrained` say."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function. They and the bytes of its file say which base model it is,
    so what it draws at random must follow from a seed among them. Sums may differ in their last
    bits on another machine: the store keeps what was made."""
    revision: str | None = None
    """Commit or tag of a hub id. Without it the hub's default branch is taken. The manifest's
    metrics say which commit it was."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What a GGUF file's quantized weights become. A directory or hub model keeps the dtype that it
    has."""

    @model_validator(mode="after")
    def _fits(self) -> PolicyConfig:
        if self.arguments and not made.is_function(self.model):
            raise ValueError(
                "arguments are for a function, module:function or file.py:function; model is "
                f"{self.model!r}"
            )
        return self


class _Pinned(PolicyConfig):
    source_hash: str
    """sha256 over the names and bytes of the source: a changed directory is not mistaken for the
    old one."""

    def key(self) -> dict[str, Any]:
        """The bytes decide, wherever they lie; the dtype only where it is chosen here."""
        return {
            "source_hash": self.source_hash,
            "dtype": self.dtype if self.model.endswith(".gguf") else None,
        }


def run(config: PolicyConfig, store: Store, *, into: str, force: bool = False) -> Ref:
    """Import the base model as `into/policy@0`; the same bytes again are a cache hit. ConfigError,
    SecurityError."""
    source_hash, commit, fill = (
        _from_function(config) if made.is_function(config.model) else _from_files(config)
    )
    pinned = _Pinned(**config.model_dump(), source_hash=source_hash)
    with begin(
        store,
        into,
        "policy",
        stage="policy",
        stage_version=STAGE_VERSION,
        config=pinned,
        inputs={},
        force=force,
    ) as work:
        if work.done:
            return work.done.ref
        if not force and 0 in store.numbers(into, "policy"):
            what = f"the run starts from another base model than {printable(config.model)}"
            raise ConflictError(f"{into}/policy@0", what, next="choose another name for the run")
        with work.phase("import"), storage.storage_errors(f"{into}/policy@0"):
            fill(work.folder)
            check_folder(work.folder, config.model)
        metrics = {
            "parameters": count_parameters(work.folder),
            **({"commit": commit} if commit else {}),
        }
        return work.commit(number=None if force else 0, metrics=metrics).ref


def _from_function(config: PolicyConfig) -> tuple[str, str, Callable[[Path], None]]:
    """Hash of the function that makes the model and of its arguments, no commit, and what fills a
    folder."""
    function, source_hash = made.load(config.model, config.model_dump(mode="json")["arguments"])

    def fill(folder: Path) -> None:
        log.info("making the base model by %s, once", printable(config.model))
        made.make(config.model, function, config.arguments, folder)
        check_folder(folder, config.model)
        for path in folder.iterdir():  # as of a directory, only what makes the model is taken
            if not _wanted(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return source_hash, "", fill


def _from_files(config: PolicyConfig) -> tuple[str, str, Callable[[Path], None]]:
    """Hash of the model's files, the commit of a hub model, and what fills a folder with them."""
    source, weights, commit = _locate(config)
    if weights is None:
        check_folder(source, config.model)
    chosen = [weights] if weights else sorted(p for p in source.iterdir() if _wanted(p))

    def fill(folder: Path) -> None:
        if weights:
            convert_gguf(weights, folder, config.dtype)
            return
        for path in chosen:
            shutil.copyfile(path, folder / path.name)

    return digest([[p.name, storage.sha256(p)] for p in chosen]), commit, fill


def _locate(config: PolicyConfig, field: str = "policy.model") -> tuple[Path, Path | None, str]:
    """The folder that holds the model, the GGUF file in it where it is one, and the commit of a hub
    model."""
    name = config.model
    if name.startswith("package:"):
        package, _, inner = name.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"{field} {name}", f"package {package} is not installed", next=f"install {package}"
            )
        path = Path(spec.submodule_search_locations[0]) / inner
    else:
        path = Path(name).expanduser().absolute()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(
                f"{field} {name}", f"there is no file {path.name}", next=f"correct {field}"
            )
        return path.parent, path, ""
    if path.is_dir():
        return path, None, ""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"{field} {name}", "there is no such directory", next=f"correct {field}")
    folder = _download(config, field)
    return folder, None, folder.name  # the hub's cache names a snapshot by its commit


def _download(config: PolicyConfig, field: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(
            snapshot_download(config.model, revision=config.revision, allow_patterns=patterns)
        )
    except (
        Exception
    ) as error:  # the hub client raises many types; each means that the model can not be had
        raise ConfigError(
            f"{field} {config.model}",
            f"no directory of that name, and the hub gave none ({type(error).__name__})",
            next="name a model directory, or check the hub id, HF_HUB_OFFLINE and the network",
        ) from error


def _wanted(path: Path) -> bool:
    weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
    return path.is_file() and (weights or path.name == "config.json" or path.name in _CARRIED)


# -- what a checkpoint is


def find_folder(model: str, revision: str | None, field: str) -> Path:
    """The whole model directory that `field` of a recipe names: a directory, or a hub id.
    ConfigError, SecurityError."""
    folder, gguf, _ = _locate(PolicyConfig(model=model, revision=revision), field)
    if gguf:
        raise ConfigError(
            f"{field} {model}",
            "is a GGUF file; safetensors are needed",
            next=f"name a directory in {field}",
        )
    check_folder(folder, model)
    return folder


def folder_as_model(role: str, name: str, folder: Path) -> Model:
    """`as_model` for a directory that lies outside any store: its files are hashed here."""
    paths = sorted(path for path in folder.iterdir() if _wanted(path))
    with ThreadPoolExecutor(4) as pool:  # a large file is hashed at the speed of one core
        return _as_model(
            role,
            name,
            [(p.name, sha) for p, sha in zip(paths, pool.map(storage.sha256, paths), strict=True)],
        )


def as_model(role: str, version: Version) -> Model:
    """The manifest entry of a policy version: hashes of weights + config, of the tokenizer, and of
    the chat template."""
    return _as_model(
        role, str(version.ref), [(entry.name, entry.sha256) for entry in version.manifest.files]
    )


def _as_model(role: str, ref: str, entries: list[tuple[str, str]]) -> Model:
    weights = [
        e
        for e in entries
        if "/" not in e[0]
        and (e[0].endswith((".safetensors", ".index.json")) or e[0] == "config.json")
    ]
    return Model(
        role=role,
        ref=ref,
        weights=digest(weights),
        tokenizer=digest([e for e in entries if e[0] in _TOKENIZER]),
        template=digest([e for e in entries if e[0] in _TEMPLATE]),
    )


def adapter_base(store: Store, policy: Version) -> Version | None:
    """The policy whose weights the adapter of `policy` is relative to; None where it has no
    adapter. LineageError."""
    told = policy.manifest.input("base")
    if told is None:
        return None
    try:
        base = store.open(told.ref)
    except LineageError:
        found = "none of that name"
    else:
        if base.manifest.content_hash == told.content_hash:
            return base
        found = f"{base.manifest.content_hash[:12]}…"
    raise LineageError(
        str(policy.ref),
        f"its adapter was trained over {told.ref}, expected {told.content_hash[:12]}…, found "
        f"{found}",
        state="its merged weights are whole; nothing was changed.",
        next=f"restore {told.ref}, or start a new run with policy.model = {str(policy.files.folder)!r}",
    )


def model_config(version: Version) -> dict[str, Any]:
    """The model's config.json, checked against its hash."""
    return _read_json(version, "config.json")


def _read_json(version: Version, name: str) -> dict[str, Any]:
    if not any(entry.name == name for entry in version.manifest.files):
        return {}
    version.verify(name)
    return json.loads((version.files.folder / name).read_bytes())


def vocabulary_size(version: Version) -> int:
    """Rows of the embedding: token ids are below it."""
    config = model_config(version)
    return int({**config, **config.get("text_config", {})}["vocab_size"])


def context_length(version: Version) -> int | None:
    """Most tokens of prompt and completion together; None where positions are relative (T5)."""
    return context_of(model_config(version))


def context_of(config: dict[str, Any]) -> int | None:
    """The same from a model's config.json."""
    length = {**config, **config.get("text_config", {})}.get("max_position_embeddings")
    return int(length) if length else None


def is_encoder_decoder(version: Version) -> bool:
    """Whether the prompt goes to an encoder and the completion to a decoder."""
    return bool(model_config(version).get("is_encoder_decoder"))


def end_token_ids(version: Version) -> list[int]:
    """Ids that end a completion, from generation_config.json or else config.json, rising.
    ConfigError when there is none."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json(version, name).get("eos_token_id")
        if found is not None:
            return sorted(found if isinstance(found, list) else [found])
    raise ConfigError(
        str(version.ref),
        "the model names no end token",
        next="add eos_token_id to generation_config.json",
    )


def load_tokenizer(version: Version) -> PreTrainedTokenizerFast:
    """The checkpoint's own tokenizer with its template; from its folder alone, hashes checked."""
    for name in _CARRIED:
        version.verify(name)
    return load_folders_tokenizer(version.files.folder)


def load_folders_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory, with its template."""
    about = folder / "tokenizer_config.json"
    named = json.loads(about.read_bytes()).get("tokenizer_class") if about.is_file() else None
    if named in _PLAIN and (folder / "tokenizer.json").is_file():
        from transformers import (
            PreTrainedTokenizerFast,
        )  # what AutoTokenizer would choose, without its import of every model

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def save_policy(model: PreTrainedModel, parent: Version, folder: Path) -> None:
    """Write `model` as a model directory; tokenizer, template and generation config are the
    parent's, byte for byte."""
    model.save_pretrained(folder)
    for name in _CARRIED:
        if (parent.files.folder / name).is_file():
            shutil.copyfile(parent.files.folder / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
