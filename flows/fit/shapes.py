"""The shape of a model, read from its config alone: no weight is loaded.

shape = shape_of(find_config(recipe))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError, LineageError, printable
from quiver.stages.common.models.checkpoints import locate
from quiver.stages.common.models.folder import load_errors
from quiver.stages.common.models.from_function import is_function
from quiver.stages.common.store import Store

from ..recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Shape:
    """Counts of weights, and widths. Widths count only the experts a token is routed to."""

    weights: int
    outside_layers: int
    """Weights outside the layers: embeddings, last norm and head."""
    head: int
    """Weights of the output embedding, which may be shared with the input."""
    is_tied: bool
    largest_layer: int
    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; with experts, of all experts a token is routed to."""
    experts: int
    """Experts per layer; 0: no experts."""
    heads: int
    """Attention heads; tensor parallelism splits them evenly."""
    attention: int
    """Width of all heads' queries together."""
    keys: int
    """Width of all heads' keys together, and of their values."""
    vocabulary: int

    @property
    def in_layers(self) -> int:
        return self.weights - self.outside_layers

    @property
    def multiplied(self) -> int:
        """Weights that each token is multiplied with: the layers', counting only the experts in
        use."""
        if not self.experts:
            return self.in_layers
        return self.layers * (
            2 * self.hidden * (self.attention + self.keys) + 3 * self.hidden * self.intermediate
        )


def find_config(recipe: Recipe) -> PreTrainedConfig:
    """Return the config of the recipe's base model.

    For a model made by a function, this is the config of the run's policy@0. Raises ConfigError.
    """
    from transformers import AutoConfig

    model = recipe.policy.model
    if is_function(model):
        try:
            path = Store(recipe.store, create=False).open(f"{recipe.run}/policy@0").files.folder
        except (ConfigError, LineageError):
            raise ConfigError(
                f"policy.model {printable(model)}",
                "the function has not made the model yet, so its shape is not known",
                next="let a run import the model, or name a directory of such a model by "
                "--set policy.model=FOLDER",
            ) from None
    else:
        path, _ = locate(model, recipe.policy.revision)
    with load_errors(f"model {printable(model)}"):
        if path.is_file():
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def shape_of(config: PreTrainedConfig) -> Shape:
    """Return the shape of a model with this config. Raises ConfigError if it is not a decoder."""
    import torch
    import transformers

    from quiver.stages.optimize.sharding import layers_of

    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or not hasattr(text, "num_attention_heads"):
        raise ConfigError(
            f"model {config.model_type}",
            "its memory can be told of decoders with attention alone",
            next="start with a low optimize.token_budget, and look at the report's memory",
        )
    has_vision = getattr(config, "vision_config", None) is not None
    loader = transformers.AutoModelForImageTextToText if has_vision else None
    loader = loader or transformers.AutoModelForCausalLM
    with load_errors(f"model {config.model_type}"), torch.device("meta"):
        model = loader.from_config(config)
    layers = [_count(layer) for layer in layers_of(model)]
    if not layers:
        raise ConfigError(
            f"model {config.model_type}",
            "its memory cannot be told: it has no layers of a kind that is known here",
            next="start with a low optimize.token_budget",
        )
    weights = _count(model)
    head = model.get_output_embeddings().weight
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Shape(
        weights=weights,
        outside_layers=weights - sum(layers),
        head=head.numel(),
        is_tied=head is model.get_input_embeddings().weight,
        largest_layer=max(layers),
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=_intermediate(text),
        experts=_num_experts(text),
        heads=heads,
        attention=heads * width,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * width,
        vocabulary=len(head),
    )


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _num_experts(text: PreTrainedConfig) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((getattr(text, name) for name in names if getattr(text, name, None)), 0)


def _intermediate(text: PreTrainedConfig) -> int:
    widths = [getattr(text, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim")]
    width = next(filter(None, widths), 4 * text.hidden_size)
    width = max(width) if isinstance(width, list | tuple) else width
    if not _num_experts(text):
        return width
    of_expert = getattr(text, "moe_intermediate_size", None) or width
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    shared += (getattr(text, "n_shared_experts", None) or 0) * of_expert
    return (getattr(text, "num_experts_per_tok", None) or 1) * of_expert + shared
