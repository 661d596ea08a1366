"""Checkpoints, identified by hashes; and the stage `policy`, which imports a run's base model once.

A policy version (a checkpoint) is a Hugging Face model directory that vLLM and transformers load
directly. What is not the model itself is in folders, because vLLM reads every *.safetensors at the
top: `optimizer/` (its state), `adapter/` (LoRA), `value_head/` or `critic/` (the critic). If so
configured, there are no weights at the top: the model is then the weights of another version, the
base, plus the adapter (see `loading`). Pickled weights and code inside a model are refused.

    ref = run_stage("policy", {"model": "path/to/model"}, store, into="arith")     # arith/policy@0
    tokenizer = load_tokenizer(store.open(ref))
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError, LineageError, printable
from quiver.schemas.manifest import ModelEntry, digest
from quiver.stages.core import plugins
from quiver.stages.core.config import Config as Base
from quiver.stages.core.files import storage_errors
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import Writer
from quiver.stages.core.user_cache import hash_files
from quiver.stages.model import from_function
from quiver.stages.model.families import modalities_of, require_processor, require_trainable
from quiver.stages.model.folder import (
    INDEX,
    PROCESSOR_FILES,
    SINGLE,
    check_folder,
    convert_gguf,
    count_parameters,
    end_ids_in,
    load_errors,
    move_templates_into_config,
    named_templates,
    parse_object,
    size_in,
    weight_files,
)
from quiver.stages.model.weights import require_weights, save_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

STAGE_VERSION = 1
ADAPTER_FOLDER = "adapter"
ADAPTER_WEIGHTS = f"{ADAPTER_FOLDER}/adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""Prefix of every tensor name in a file that peft writes."""
FILE_BYTES = 4 * 10**9
"""Largest size of a file of tensors, unless a single tensor is larger. Small enough that a writer
need not hold much at a time, and that several files are hashed in parallel."""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_TOKENIZER_FILES = (
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
CARRIED_FILES = (
    *_TOKENIZER_FILES,
    *_TEMPLATE_FILES,
    *PROCESSOR_FILES,
    "generation_config.json",
)
_FAST_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
log = logging.getLogger(__name__)


class PolicyConfig(Base):
    """The source of the base model, which becomes `policy@0` of the run."""

    model: str = Field(min_length=1)
    """A model directory, a .gguf file, `package:NAME/FILE.gguf` (a file inside an installed
    package), a hub id, or a function of yours that makes the model, `module:function` or
    `file.py:function`. The function is called once per run, as `function(folder, **arguments)` with
    a `pathlib.Path`. It writes config, safetensors, tokenizer and generation config there, for
    example with `save_pretrained`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function. They and the bytes of its file identify the base model, so
    its random numbers must follow from a seed among them. Sums may differ in their last bits on
    another machine; the store keeps the model that was made."""
    revision: str | None = None
    """Commit or tag of a hub id. Default: the hub's default branch. The stage fills in its
    commit."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights of a GGUF file once dequantized. Directory and hub models keep their own
    dtype."""
    source_hash: str = ""
    """Hash of the names and bytes of the model's files, or of the function and its arguments. The
    stage fills it in. If set, the model must match it."""

    @model_validator(mode="after")
    def _arguments_need_a_function(self) -> PolicyConfig:
        if self.arguments and not from_function.is_function(self.model):
            raise ValueError(
                "arguments are for a function, module:function or file.py:function; model is "
                f"{self.model!r}"
            )
        return self

    def key(self) -> dict[str, Any]:
        """Return the fields of the run key: the files' hash, and the dtype if it applies (GGUF)."""
        dtype = self.dtype if self.model.endswith(".gguf") else None
        return {"source_hash": self.source_hash, "dtype": dtype}


Config = PolicyConfig  # the name that the contract of a stage asks for; see core/run/stage.py


def resolve(config: PolicyConfig) -> PolicyConfig:
    """Return `config` with the hash of the model it names, and a hub model's commit.

    Reads the folder, the hub, or the function's file. Raises ConfigError or SecurityError.
    """
    revision = config.revision
    if from_function.is_function(config.model):
        source_hash = from_function.source_hash(config.model, config.arguments)
    else:
        path, commit = locate(config.model, revision)
        revision = commit or revision
        if path.is_dir():
            check_folder(path, config.model)
            require_trainable(path, config.model)
        source_hash = digest(hash_files(model_files(path), remembered=True))
    _require_hash(config, source_hash)
    return config.model_copy(update={"source_hash": source_hash, "revision": revision})


def plan(config: PolicyConfig, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the import of the base model as `into/policy@0`.

    The same bytes again are a cache hit; another base model is refused. Raises ConfigError or
    SecurityError.
    """
    if into is None:
        raise ConfigError("stage policy", "no run is named", next="name the run to write into")
    return Plan(
        store,
        stage="policy",
        stage_version=STAGE_VERSION,
        config=config if config.source_hash else resolve(config),
        run=into,
        kinds=("policy",),
        first_number=0,
        only_number=0,
        if_number_taken=f"the run starts from another base model than {printable(config.model)}",
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Import the base model. Raises ConfigError if it changed since it was planned, SecurityError
    if it is unsafe."""
    config = plan.config
    writer = writers["policy"]
    commit = ""
    with writer.phase("import"), storage_errors(f"{plan.run}/policy@0"):
        if from_function.is_function(config.model):
            function, source_hash = from_function.load(config.model, config.arguments)
            _require_hash(config, source_hash)
            log.info("making the base model by %s, once", printable(config.model))
            from_function.make(config.model, function, config.arguments, writer.folder)
            check_folder(writer.folder, config.model)
            require_trainable(writer.folder, config.model)
            require_weights(writer.folder, f"model {config.model}")
            move_templates_into_config(writer.folder, writer.folder)
            for path in {*writer.folder.iterdir()} - {*model_files(writer.folder)}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            path, commit = locate(config.model, config.revision)
            files = model_files(path)
            _require_hash(config, digest(hash_files(files)))
            if path.is_file():
                convert_gguf(path, writer.folder, config.dtype)
            else:
                require_weights(path, f"model {config.model}")  # before many bytes are copied
                for file in files:
                    if file.parent == path:
                        shutil.copyfile(file, writer.folder / file.name)
            move_templates_into_config(path, writer.folder)
            check_folder(writer.folder, config.model)
        require_trainable(writer.folder, config.model)
        require_processor(writer.folder, config.model)
    metrics: dict[str, Any] = {"parameters": count_parameters(writer.folder)}
    if commit:
        metrics["commit"] = commit
    writer.finish(metrics=metrics)


def _require_hash(config: PolicyConfig, source_hash: str) -> None:
    """Raise ConfigError if the model's hash is not the one in `config`."""
    if config.source_hash not in ("", source_hash):
        raise ConfigError(
            f"policy.model {printable(config.model)}",
            f"hash expected {config.source_hash[:12]}…, found {source_hash[:12]}…",
            next="run again; if the recipe names policy.source_hash, correct it or the model",
        )


# -- models outside the store


def locate(name: str, revision: str | None, field: str = "policy.model") -> tuple[Path, str]:
    """Return the model's folder or GGUF file, and the commit of a hub model (else "").

    Raises ConfigError about `field` if the model does not exist.
    """
    if name.startswith("package:"):
        package, _, inner_path = name.removeprefix("package:").partition("/")
        spec = plugins.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"{field} {printable(name)}",
                f"package {printable(repr(package))} is not installed",
                next=f"install it, or correct {field}",
            )
        path = Path(spec.submodule_search_locations[0]) / inner_path
    else:
        path = Path(os.path.expanduser(name)).absolute()
    if path.suffix == ".gguf" and not path.is_file():
        raise ConfigError(
            f"{field} {name}", f"there is no file {path.name}", next=f"correct {field}"
        )
    if path.suffix == ".gguf" or path.is_dir():
        return path, ""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"{field} {name}", "there is no such directory", next=f"correct {field}")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client raises many types; all mean the model is unavailable
        raise ConfigError(
            f"{field} {name}",
            f"no such directory, and the hub gives no such model ({type(error).__name__})",
            next="name a model directory, or check the hub id, HF_HUB_OFFLINE and the network",
        ) from error
    return folder, folder.name  # the hub's cache names a snapshot by its commit


def model_files(path: Path) -> list[Path]:
    """Return the GGUF file, or the files of a folder that make up the model."""
    if path.is_file():
        return [path]
    weights = {file.name for file in weight_files(path)}
    names = {"config.json", *CARRIED_FILES, *weights}
    if weights != {SINGLE}:  # vLLM would read an index of other files beside it
        names.add(INDEX)
    config = path / "config.json"
    if not modalities_of(parse_object(config.read_bytes()) or {} if config.is_file() else {}):
        names -= {*PROCESSOR_FILES}  # such a processor is for other inputs
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name in names)
    return files + named_templates(path)


def find_folder(model: str, revision: str | None, field: str) -> Path:
    """Return the complete model directory that `field` of a recipe names, given as path or hub id.

    Raises ConfigError or SecurityError.
    """
    folder, _ = locate(model, revision, field)
    if folder.is_file():
        raise ConfigError(
            f"{field} {model}",
            "is a GGUF file; safetensors are needed",
            next=f"name a directory in {field}",
        )
    check_folder(folder, model)
    return folder


# -- how a checkpoint is identified


def folder_model_entry(role: str, name: str, folder: Path, *, remembered: bool) -> ModelEntry:
    """Return the manifest entry of a model directory outside any store, like `model_entry`.

    Args:
        role: The model's role, such as "policy".
        name: Its name in the entry.
        folder: The model directory.
        remembered: If true, hashes cached on this host are enough, as for a plan. A new manifest
            needs False, which reads every byte.
    """
    return _model_entry(role, name, hash_files(model_files(folder), remembered=remembered))


def model_entry(role: str, version: Version) -> ModelEntry:
    """Return the manifest entry of a policy version: hashes of weights and config, of the
    tokenizer, of the chat template, and of the processor if any."""
    entries = [(entry.name, entry.sha256) for entry in version.manifest.files]
    if is_adapter_alone(version):
        # named like top-level weights, so that `_model_entry` counts them as weights
        base = version.manifest.input("base")
        adapter = [sha256 for name, sha256 in entries if name == ADAPTER_WEIGHTS]
        entries += [("adapter.safetensors", sha256) for sha256 in adapter]
        entries.append(("base.safetensors", base.content_hash))
    return _model_entry(role, str(version.ref), entries)


def _model_entry(role: str, ref: str, hashes: list[tuple[str, str]]) -> ModelEntry:
    weights = [
        (name, sha256)
        for name, sha256 in hashes
        if name == "config.json"
        or (name.endswith((".safetensors", ".index.json")) and "/" not in name)
    ]
    processor = [entry for entry in hashes if entry[0] in PROCESSOR_FILES]
    return ModelEntry(
        role=role,
        ref=ref,
        weights=digest(weights),
        tokenizer=digest([entry for entry in hashes if entry[0] in _TOKENIZER_FILES]),
        template=digest([entry for entry in hashes if entry[0] in _TEMPLATE_FILES]),
        processor=digest(processor) if processor else "",
    )


def is_adapter_alone(version: Version) -> bool:
    """True if the version is only an adapter on its base, without weights of its own at the top."""
    has_weights = any(
        name.endswith(".safetensors") and "/" not in name for name in version.files.names
    )
    return version.manifest.input("base") is not None and not has_weights


def adapter_base(store: Store, policy: Version) -> Version | None:
    """Return the policy whose weights the adapter of `policy` is relative to.

    Returns None if it has no adapter. Raises LineageError if that base is missing or changed.
    """
    base_input = policy.manifest.input("base")
    if base_input is None:
        return None
    found_hash = "no such version"
    with suppress(LineageError):
        base = store.open(base_input.ref)
        if base.manifest.content_hash == base_input.content_hash:
            return base
        found_hash = f"{base.manifest.content_hash[:12]}…"
    if is_adapter_alone(policy):
        state = "nothing was changed."
        advice = (
            ": without it the adapter cannot be used. A base that a recipe imported is imported "
            "again by its next run"
        )
    else:
        state = "its merged weights are complete; nothing was changed."
        advice = f", or start a new run with policy.model = {str(policy.files.folder)!r}"
    raise LineageError(
        str(policy.ref),
        f"its adapter was trained over {base_input.ref}, expected "
        f"{base_input.content_hash[:12]}…, found {found_hash}",
        state=state,
        next=f"restore {base_input.ref}{advice}",
    )


def adapter_rank(policy: Version) -> int:
    """Return the rank of the policy's adapter. Raises LineageError if its manifest names none."""
    rank = policy.manifest.config_section("lora").get("rank")
    if isinstance(rank, int):
        return rank
    name = str(policy.ref)
    raise LineageError(name, "names no rank of its adapter", next=f"quiver lineage {name}")


def model_config(version: Version) -> dict[str, Any]:
    """Return the model's config.json, checked against its hash."""
    return _read_json(version, "config.json")


def _read_json(version: Version, name: str) -> dict[str, Any]:
    if name not in version.files.names:
        return {}
    content = parse_object(version.files.read(name))
    if content is None or not isinstance(content.get("text_config") or {}, dict):
        raise _unusable(version, f"{name} is not a JSON object")
    return content


def _unusable(version: Version, problem: str) -> ConfigError:
    return ConfigError(str(version.ref), problem, next="import the model again, as another run")


def vocabulary_size(version: Version) -> int:
    """Return the number of rows of the embedding; token ids are below it. Raises ConfigError."""
    config = model_config(version)
    size = size_in(config, "vocab_size")
    if type(size) is not int or size < 1:
        raise _unusable(version, f"config.json: vocab_size is {printable(repr(size))}")
    return size


def context_length(version: Version) -> int | None:
    """Return the maximum tokens of prompt plus completion; None for relative positions (T5)."""
    return context_of(model_config(version))


def room_for_prompt(version: Version, reserve_tokens: int) -> int | None:
    """Return the maximum tokens of a prompt that leaves `reserve_tokens` for the completion; None
    if there is no limit."""
    context = context_length(version)
    if context is None or is_encoder_decoder(version):  # its decoder has a context of its own
        return context
    return context - reserve_tokens


def context_of(config: dict[str, Any]) -> int | None:
    """Return the context length from a model's config.json, or None if it has none."""
    names = ["max_position_embeddings"]
    if not config.get("is_encoder_decoder"):  # T5 has n_positions, but positions are relative
        names += ["n_positions", "max_seq_len"]
    length = size_in(config, *names)
    return length if isinstance(length, int) and length > 0 else None


def is_encoder_decoder(version: Version) -> bool:
    """True if the prompt goes to an encoder and the completion to a decoder."""
    return bool(model_config(version).get("is_encoder_decoder"))


def modalities(version: Version) -> list[str]:
    """Return what the model reads besides text; nothing if it has no processor."""
    has_processor = any(name in version.files.names for name in PROCESSOR_FILES)
    return modalities_of(model_config(version)) if has_processor else []


def end_token_ids(version: Version) -> list[int]:
    """Return the ids that end a completion, in ascending order.

    They come from generation_config.json, or else from config.json. Raises ConfigError if neither
    names any.
    """
    for name in ("generation_config.json", "config.json"):
        ids = end_ids_in(_read_json(version, name), name, str(version.ref))
        if ids is not None:
            return ids
    raise ConfigError(
        str(version.ref),
        "the model names no end token",
        next="add eos_token_id to generation_config.json, or set ignore_eos = true in sampling",
    )


def load_tokenizer(version: Version) -> PreTrainedTokenizerFast:
    """Return the checkpoint's own tokenizer with its template, from its folder alone.

    Hashes are checked first. Raises ConfigError.
    """
    verify_carried(version)
    tokenizer = load_folders_tokenizer(version.files.folder, str(version.ref))
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise _unusable(
            version, f"its tokenizer is a {type(tokenizer).__name__}, expected a fast one"
        )
    return tokenizer


def verify_carried(version: Version) -> None:
    """Check the hashes of the files beside the weights. Raises CorruptError."""
    version.verify(*CARRIED_FILES)


def load_folders_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model directory, with its template.

    Raises ConfigError about model `name`.
    """
    path = folder / "tokenizer_config.json"
    config = parse_object(path.read_bytes()) if path.is_file() else None
    class_name = (config or {}).get("tokenizer_class")
    with load_errors(f"tokenizer of {name}"):
        if class_name in _FAST_TOKENIZERS and (folder / "tokenizer.json").is_file():
            # the class that AutoTokenizer would choose, without importing every model
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def save_policy(model: PreTrainedModel | None, parent: Version, folder: Path) -> None:
    """Write `model` as a model directory, in files of at most FILE_BYTES.

    Tokenizer, template and generation config are copied from the parent byte for byte. If `model`
    is None, the parent's config is copied too and no weights are written. `model` cannot be used
    after this.
    """
    if model is not None:
        save_model(model, folder, max_shard_size=FILE_BYTES)
    for name in CARRIED_FILES if model is not None else ("config.json", *CARRIED_FILES):
        if name in parent.files.names:
            shutil.copyfile(parent.files.path(name), folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
