"""Chooses the transformers attention of a model, the same for trainer, engine and other models.

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
    """Return the transformers attention that computes everything the model's layers need.

    `sdpa` silently ignores logit caps and has no sinks, yet transformers chooses it for models with
    caps. Trainer, engine, reference and reward models all use this function's choice.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        has_caps = bool(getattr(config, "attn_logit_softcapping", None))
        if has_caps or not getattr(module, "_supports_sdpa", True):
            return "eager"
    return "sdpa"


def take_own_attention(model: PreTrainedModel) -> None:
    """Set the attention that `own_attention` names on `model`."""
    own = own_attention(model)
    if model.config._attn_implementation != own:
        model.set_attn_implementation(own)


def set_attention(model: PreTrainedModel, name: str, option: str) -> None:
    """Set the attention `name` in place of the model's own.

    Raises ConfigError about `option` if it is not available, or if it would ignore a part that the
    model's own attention computes.
    """
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
