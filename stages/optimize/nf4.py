"""Linear layers in 4 bits under adapters: NF4 of QLoRA (https://arxiv.org/abs/2305.14314).

    quantize_frozen(model, device)     # after the adapters are attached
    layer.dequantized()                # a plain layer with the rounded weights
    rounded(folder, "Qwen/Qwen3-8B")   # a base whose first rollouts are of the rounded weights

A weight is one of 16 values times the largest magnitude of its block of 64. That magnitude is in
float32, so rounded weights stay the same if they are quantized again. Passes multiply with the
rounded weights, in the dtype of the pass, as if they were a plain layer's. No pass keeps them: the
backward pass makes them again.

Not of the spine: only a recipe with `optimize.lora.base = "nf4"` uses it.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
)

from quiver.stages.model.checkpoints import find_folder, model_files
from quiver.stages.model.families import loader_of, modalities_of
from quiver.stages.model.forward.gpu.choice import uncast
from quiver.stages.model.forward.media import vision_parameters
from quiver.stages.model.forward.projections import product, product_dtype
from quiver.stages.model.loading import load_pretrained, read_by_linear_layers_alone
from quiver.stages.model.weights import save_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORMAT = {"blocksize": 64, "quant_type": "nf4"}
log = logging.getLogger(__name__)


def quantize_frozen(model: PreTrainedModel, device: torch.device) -> None:
    """Replace the frozen linear layers of the language model in place by layers in 4 bits on
    `device`, and move the rest there.

    Only plain `nn.Linear` layers are replaced, and not the output embedding, whose weight is read
    directly. Joint weights of experts, and gpt2's and falcon's own layers, stay as they are.
    """
    num_weights = 0
    for name, linear in _plain_layers(model):
        if not linear.weight.requires_grad:
            num_weights += linear.weight.numel()
            model.set_submodule(name, Nf4Linear(linear, device))
    model.to(device)
    log.info("lora: %d weights of the base are in 4 bits", num_weights)


def _plain_layers(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers that can be in 4 bits, by name."""
    alone = {*read_by_linear_layers_alone(model)} - {*vision_parameters(model)}
    alone.discard(model.get_output_embeddings().weight)
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module.weight in alone
    ]


def rounded(folder: Path, model: str, revision: str | None = None) -> None:
    """Write `model`, a directory or hub id, into `folder` with the weights that training on it in
    4 bits has. A recipe names this function as `policy.model`."""
    source = find_folder(model, revision, "policy.model")
    config = AutoConfig.from_pretrained(source).to_dict()
    loader = loader_of(config, modalities_of(config))
    loaded = load_pretrained(loader, source, model, dtype="auto")
    for _, linear in _plain_layers(loaded):
        for _ in range(2):  # 16 bits round the blocks' scales too, and then the weights are final
            weight = Nf4Linear(linear, torch.device("cpu")).weight
            linear.weight.data = weight.to(linear.weight.dtype)
    save_model(loaded, folder)
    for file in model_files(source):
        if file.name != "config.json" and ".safetensors" not in file.name:
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


class Nf4Linear(nn.Module):
    """A frozen linear layer with its weight [o, d] in NF4."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        from bitsandbytes import functional

        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach().to(device, torch.float32)
        codes, about = functional.quantize_4bit(weight.contiguous(), **_FORMAT)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", about.absmax, persistent=False)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the rounded weight [o, d] in `dtype`."""
        from bitsandbytes import functional

        # As one row, since blocks run on from row to row: on CPUs with AVX-512, bitsandbytes begins
        # a block with each row of a matrix.
        shape = torch.Size((1, self.out_features * self.in_features))
        about = functional.QuantState(self.scales, shape=shape, dtype=dtype, **_FORMAT)
        weight = functional.dequantize_4bit(self.codes, about)
        return weight.view(self.out_features, self.in_features)

    @property
    def weight(self) -> Tensor:
        """The rounded weight in float32, for modules that read it."""
        return self.weight_in(torch.float32)

    def dequantized(self) -> nn.Linear:
        """Return a plain float32 layer with the rounded weight, in host memory."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight.cpu(), requires_grad=False)
        linear.bias = self.bias
        return linear.cpu().float()

    def forward(self, states: Tensor) -> Tensor:
        """[…, d] -> […, o]"""
        return _Product.apply(states.to(product_dtype(states)), self)


class _Product(torch.autograd.Function):
    """A product with the weight of a layer in 4 bits."""

    @staticmethod
    def forward(ctx, states, layer):
        ctx.layer = layer
        return product(states, layer.weight_in(states.dtype), layer.bias)

    @staticmethod
    def backward(ctx, grad):
        with uncast(grad):
            return grad @ ctx.layer.weight_in(grad.dtype), None
