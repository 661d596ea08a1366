"""A checkpoint as a torch module. Local files, safetensors and transformers' own classes only.

model = load_model(store.open("arith/policy@0"), dtype=torch.float32)
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from .checkpoints import check_folder, is_encoder_decoder
from .store import Version


def load_model(
    version: Version, *, dtype: torch.dtype, device: str | torch.device = "cpu", attn_implementation: str = "sdpa"
) -> PreTrainedModel:
    """The model of a policy version in eval mode with every dropout at 0; hashes are checked first.

    Dropout is off in training too: the ratio π_θ / π_old must be 1 before the first update.
    """
    version.verify()
    check_folder(version.path, str(version.ref))
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
    for key in ("dropout", "attention_dropout", "dropout_rate", "activation_dropout", "classifier_dropout"):
        if isinstance(getattr(model.config, key, None), float):
            setattr(model.config, key, 0.0)
    return model.to(device).eval()
