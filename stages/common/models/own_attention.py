"""Which attention of transformers a model needs: one for trainer, engine, reference and reward
models alike.

    take_own_attention(model)
    model.config._attn_implementation       # "sdpa", or "eager" for a model with logit caps

Not of the spine: a choice between two names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.schemas.errors import ConfigError, printable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def own_attention(model: PreTrainedModel) -> str:
    """Name of the transformers attention that computes all that the model's layers do.

    `sdpa` leaves logit caps out without a word, and has no sinks; transformers chooses it for
    models with caps all the same. Trainer, engine, reference and reward models all take this one.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        has_caps = bool(getattr(config, "attn_logit_softcapping", None))
        if has_caps or not getattr(module, "_supports_sdpa", True):
            return "eager"
    return "sdpa"


def take_own_attention(model: PreTrainedModel) -> None:
    """Set the attention that `model` needs."""
    own = own_attention(model)
    if model.config._attn_implementation != own:
        model.set_attn_implementation(own)


def set_attention(model: PreTrainedModel, name: str, option: str) -> None:
    """Take the attention `name` in place of the model's own. ConfigError about `option` where it is
    not there, or would leave out what the model's own computes."""
    if own_attention(model) == "eager" and name != "eager":
        raise ConfigError(
            f"{option} {printable(repr(name))}",
            f"{type(model).__name__} has logit caps, sinks or another part that only the eager "
            "attention of transformers computes, as the trainer does",
            next=f"leave {option} out",
        )
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        problem = printable(" ".join(str(error).split()))
        raise ConfigError(
            f"{option} {printable(repr(name))}", problem, next=f"leave {option} out"
        ) from error
