"""Checks that a model's files hold all of its weights, and writes a model's files.

    require_weights(Path("path/to/model"), "path/to/model")      # reads little more than headers

Importing this module does not import torch.

Not of the spine: the import of a base model and `--dry-run` call `require_weights`, `loading` calls
`load_whole`, and what saves a model calls `save_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError, printable

from .families import classifier_in, loader_of, modalities_of
from .folder import (
    PROCESSOR_FILES,
    load_errors,
    parse_object,
    stored_weights,
    text_fields,
    weight_files,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def load_whole(loader: Any, folder: Path, name: str, **options: Any) -> PreTrainedModel:
    """Load the model in `folder` with one of transformers' Auto classes.

    Raises ConfigError about `name` if the files are not a model's or if weights are missing, which
    transformers would fill with random numbers.
    """
    with load_errors(name):
        model, report = loader.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            return_dict=True,  # a config may say false, and no caller takes tuples
            **options,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        head = model.get_output_embeddings()
        is_head = head is not None and missing == [f"{_name_of(model, head)}.weight"]
        tied = ", set tie_word_embeddings = true in its config.json if it has no head of its own"
        raise ConfigError(
            name,
            f"{len(missing)} weights are missing and would be random: {printable(missing[0])}",
            next=f"complete its files{tied if is_head else ''}, or name another model",
        )
    return model


def save_model(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Write the config and the weights of `model` into `folder`; afterwards, do not use it.

    Its generation config is not written: callers copy the file of the model it comes from.
    Transformers refuses to write what it reads with no more than a warning, such as a temperature
    without do_sample, or attentions as outputs of a kernel that gives none. Neither is checked
    here, because that would lose a finished training.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()
    model.config._attn_implementation = "eager"  # is not written either
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)


def require_weights(folder: Path, name: str) -> None:
    """Raise ConfigError about `name` if weights of a base model are missing, or if its config ties
    two embeddings that differ.

    Embeddings that are tied and stored twice are read; of other weights only the headers are. A
    classifier is not checked, and a quantized model is left to its loader, which may need a GPU.
    """
    written = parse_object((folder / "config.json").read_bytes()) or {}
    if "quantization_config" in written or classifier_in(written):
        return
    has_processor = any((folder / file).is_file() for file in PROCESSOR_FILES)
    with load_errors(name):
        loader = loader_of(written, modalities_of(written) if has_processor else [])
    model = load_whole(loader, folder, name, device_map="meta")
    said = {about.get("tie_word_embeddings") for about in (written, text_fields(written))}
    if said - {None} == {True} and not written.get("is_encoder_decoder"):
        with load_errors(name):
            _require_equal_embeddings(model, folder, name)


def _require_equal_embeddings(model: PreTrainedModel, folder: Path, name: str) -> None:
    """Raise ConfigError if the files hold an output embedding other than the input embedding.

    Programs disagree on such a model: transformers reads both, vLLM the input embedding alone.
    """
    import torch
    from safetensors import safe_open

    both = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f"{_name_of(model, module)}.weight" for module in both if module is not None]
    can_tie = len(names) == 2 and names[1] in model.all_tied_weights_keys
    if not can_tie or not stored_weights(folder).keys() >= set(names):
        return
    matrices = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as tensors:
            for key in names:
                if key in tensors.keys():  # noqa: SIM118  not a dict
                    matrices[key] = tensors.get_tensor(key)
    if not torch.equal(*matrices.values()):
        raise ConfigError(
            name,
            f"its config.json ties the embeddings, and its files hold two different ones: "
            f"{' and '.join(sorted(names))}",
            next="set tie_word_embeddings = false in its config.json, or delete the wrong one",
        )


def _name_of(model: PreTrainedModel, wanted: nn.Module) -> str:
    """Return the name of a module inside `model`; empty if it is not there."""
    return next((name for name, module in model.named_modules() if module is wanted), "")
