"""What a rank holds of a model that is trained with `optimize.shard`, by its shapes alone.

    python -m tests.benchmarks.sharded_memory --ranks 8 16 32 64

Nothing is loaded: the weights are meta tensors of the shapes of Llama 3 70B. A rank holds its rows
of each weight, of its gradient and of AdamW's two moments, all in float32, rounded up where rows do
not divide evenly. Whole in a pass are the weights outside layers (embeddings, last norm and head),
with their gradient in the backward pass, and of the layers the one that computes, the next one on
its way, a gradient and its copy for the exchange. Activations, casts to bfloat16 and what libraries
take come on top.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from quiver.stages.model.memory import layers_of

from .side_by_side import table

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
ITEM = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Share:
    """Bytes of the first rank, which has most."""

    weights: int
    outside_layers: int
    """Of all weights that are in no layer, whole."""
    layer: int
    """Of the largest layer, whole."""

    @property
    def gradients(self) -> int:
        return self.weights

    @property
    def moments(self) -> int:
        return 2 * self.weights

    @property
    def most(self) -> int:
        """Of all that is held at once in the backward pass."""
        held = self.weights + self.gradients + self.moments
        return held + 2 * self.outside_layers + 4 * self.layer


def model_of(shape: dict[str, int]) -> nn.Module:
    """A Llama of meta tensors."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.float32)


def share_of(model: nn.Module, num_ranks: int) -> Share:
    """What the first of `num_ranks` holds of `model`."""
    layers = [_bytes(layer) for layer in layers_of(model)]
    rows = [-(-len(p) // num_ranks) * p[0].numel() for p in model.parameters()]
    return Share(ITEM * sum(rows), _bytes(model) - sum(layers), max(layers))


def _bytes(module: nn.Module) -> int:
    return ITEM * sum(parameter.numel() for parameter in module.parameters())


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    model = model_of(LLAMA_70B)
    rows = []
    for num_ranks in parser.parse_args().ranks:
        share = share_of(model, num_ranks)
        sizes = {
            "weights": share.weights,
            "gradients": share.gradients,
            "moments": share.moments,
            "outside layers, whole": share.outside_layers,
            "a layer, whole": share.layer,
            "at once": share.most,
        }
        gigabytes = {name: f"{size / 1e9:.1f}" for name, size in sizes.items()}
        rows.append({"ranks": str(num_ranks), **gigabytes})
    print(table(rows))


if __name__ == "__main__":
    main()
