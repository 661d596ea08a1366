"""Small stand-ins for a recipe's base model, for trials: real tokenizer, template and context.

    make(folder, model="path/to/model")     # small and random, of the same family; can generate
    import_without_weights(PolicyConfig(model="path/to/model"), store, "arith")    # reads only

Not of the spine: only `quiver run --dry-run` and `quiver check` use them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import open_staging

from . import checkpoints, from_function
from .checkpoints import CARRIED_FILES, PolicyConfig, locate
from .families import THREE_AXES, loader_of, modalities_of, require_language_model
from .folder import convert_gguf, move_templates_into_config
from .shrink import shrink
from .weights import require_weights, save_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make(
    folder: Path,
    *,
    model: str,
    revision: str | None = None,
    arguments: dict[str, Any] | None = None,
) -> None:
    """Write a small random model of the same family as `model`, named as in policy.model.

    Raises ConfigError if its family cannot be made small, or if weights of `model` are missing.
    """
    import torch
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as work:
        source = _folder_of(model, revision, arguments or {}, Path(work))
        try:
            config = AutoConfig.from_pretrained(source)
            require_language_model(config.to_dict(), model)
            text = config.get_text_config()
            width = text.hidden_size if config.model_type in THREE_AXES else None
            shrink(text)  # the other parts must match the processor
            for name in ("out_hidden_size", "hidden_size"):  # but not in the width of its features
                if width is not None and getattr(config.vision_config, name, None) == width:
                    setattr(config.vision_config, name, text.hidden_size)
            fields = config.to_dict()
            loader = loader_of(fields, modalities_of(fields))
            torch.manual_seed(0)
            made = loader.from_config(config, dtype=torch.float32)
            _try_pass(made)
            save_model(made, folder)
        except ConfigError:
            raise
        except Exception as error:  # each family reports bad sizes in its own way
            raise ConfigError(
                f"--dry-run {printable(model)}",
                f"no small model of its family can be made: {type(error).__name__}: "
                f"{printable(error)}",
                next="run without --dry-run",
            ) from error
        if any(source.glob("*.safetensors")):
            require_weights(source, f"model {model}")
        _copy(source, folder)


def import_without_weights(
    config: PolicyConfig, store: Store, run: str, folder: Path | None = None
) -> Version:
    """Make `run`/policy@0 in `store` from all files of the model except its weights.

    One number takes the place of the weights. This is all that prompts need, and takes seconds
    however large the model is.

    Args:
        config: The base model.
        store: Store to write into.
        run: Run that gets the version.
        folder: Folder of the model, if it has been made already.

    Raises:
        ConfigError: The model is missing or wrong.
    """
    plan = checkpoints.plan(config, store, {}, into=run)
    with tempfile.TemporaryDirectory() as work, open_staging(plan) as staging:
        writer = staging.writers["policy"]
        source = folder or _folder_of(config.model, config.revision, config.arguments, Path(work))
        _copy(source, writer.folder, "config.json")
        save_file({"none": np.zeros(1, np.float32)}, writer.folder / "model.safetensors")
        writer.finish()
        return staging.publish()


def _try_pass(model: PreTrainedModel) -> None:
    """Let the model read two tokens, which fails if its sizes do not fit together."""
    import torch

    ids = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            model(input_ids=ids, decoder_input_ids=ids)
        else:
            model(input_ids=ids)


def _copy(source: Path, folder: Path, *names: str) -> None:
    """Copy what is beside the weights, as an import does, and the named files."""
    for name in (*names, *CARRIED_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    move_templates_into_config(source, folder)


def _folder_of(model: str, revision: str | None, arguments: dict[str, Any], work: Path) -> Path:
    """Return the folder of the model itself.

    A model that is not a folder is made in `work`; a GGUF file is converted without its weights,
    which need not be read.
    """
    if from_function.is_function(model):
        function, _ = from_function.load(model, arguments)
        from_function.make(model, function, arguments, work)
        return work
    path, _ = locate(model, revision)
    if path.is_file():
        convert_gguf(path, work, None)
        return work
    return path
