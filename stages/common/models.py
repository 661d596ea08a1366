"""A checkpoint as a torch module. Local files, safetensors and transformers' own classes only.

model = load_model(store.open("arith/policy@0"), dtype=torch.float32)

Importing this module loads no torch: an engine sets its environment before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import ConfigError

from .checkpoints import check_folder, is_encoder_decoder
from .store import Version

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def verify_model(version: Version) -> None:
    """Check the files that make the model, those at the top of the folder; the optimizer's state is checked where it is read."""
    for entry in version.manifest.files:
        if "/" not in entry.name:
            version.verify(entry.name)
    check_folder(version.path, str(version.ref))


def load_model(
    version: Version, *, dtype: torch.dtype, device: str | torch.device = "cpu", attn_implementation: str = "sdpa"
) -> PreTrainedModel:
    """The model of a policy version in eval mode with every dropout at 0; hashes are checked first.

    Dropout is off in training too: the ratio π_θ / π_old must be 1 before the first update.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    verify_model(version)
    loader = AutoModelForSeq2SeqLM if is_encoder_decoder(version) else AutoModelForCausalLM
    model = loader.from_pretrained(
        version.path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for holder in (model.config, *model.modules()):  # layers copy the config's rates, or read them from it
        for name, value in vars(holder).items():
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
    return model.to(device).eval()


def restore_dropout(model: PreTrainedModel, version: Version) -> None:
    """Make the config's dropout rates those of `version` again, for saving: they are not this project's to change."""
    for name, value in vars(type(model.config).from_pretrained(version.path)).items():
        if "drop" in name:
            setattr(model.config, name, value)


def decoder_start_id(model: PreTrainedModel) -> int:
    """The id that an encoder-decoder model's decoder reads first. ConfigError when the model names none."""
    for config in (model.config, model.generation_config):
        if getattr(config, "decoder_start_token_id", None) is not None:
            return config.decoder_start_token_id
    raise ConfigError(
        f"model {type(model).__name__}",
        "no decoder_start_token_id",
        next="add it to the model's config.json and import it again",
    )


def is_memory_error(error: BaseException) -> bool:
    """Whether torch or Python says that memory is short. On a CPU torch raises a plain RuntimeError."""
    import torch

    said = any(words in str(error) for words in ("not enough memory", "can't allocate memory", "Cannot allocate memory"))
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or said
