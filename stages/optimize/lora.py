"""LoRA: the fields of `[optimize.lora]`, and which policy is the base. A pair of small matrices
beside each linear layer is trained; the layer itself stays.

    W' = W + (alpha / rank) · B A,    A [rank, in], B [out, rank]

B starts at 0, so the first ratio is 1. W is the weight of the base: the policy on which the first
adapter was trained, several iterations ago or in this one. For passes in bfloat16 it is held in
bfloat16 if that loses nothing.

A policy trained this way holds two things. At the top are the merged weights W' in float32, so
every reader can use it like any other model, with the disk size of a full one. Below them is
`adapter/`, with A and B in peft's format. The next iteration starts from the base's weights and the
adapter, so rounding of merges never adds up; its manifest names the base as an input. With `save =
"adapter"` a policy holds only the adapter, and its readers read the base too.

Refused: a rank, alpha or layers that differ from the adapter's, and a base that is gone or changed.

The matrices themselves are in `adapters`.

Not of the spine: only a recipe with `[optimize.lora]` uses it.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Annotated, Literal

from pydantic import Field

from quiver.schemas.errors import ConfigError
from quiver.stages.common.config import Config, parse
from quiver.stages.common.models.checkpoints import (
    OPTIMIZER_FOLDER,
    adapter_base,
    is_adapter_alone,
)
from quiver.stages.common.store import Store, Version

log = logging.getLogger(__name__)


class Lora(Config):
    """Adapters instead of all weights. They need a larger learning rate than full training, about
    ten times.

    References: https://arxiv.org/abs/2106.09685; rate and alpha:
    https://thinkingmachines.ai/blog/lora/.
    """

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: int = Field(default=32, ge=1)
    """The adapter is scaled by alpha / rank. A fixed alpha, not a multiple of the rank, lets one
    learning rate work for all ranks."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Layers that get adapters: all linear layers of the language model except the output
    embedding, or those whose names end with one of these, such as ["q_proj", "v_proj"]."""
    save: Literal["merged", "adapter"] = "merged"
    """Contents of the next policy. merged: the whole model in float32, and the adapter. adapter:
    only the adapter, about a hundredth of the disk; its readers put it on the base as they load it,
    and vLLM gets both."""


def with_base(config: Lora | None, store: Store, inputs: dict[str, Version]) -> dict[str, Version]:
    """Return the stage's inputs and, if adapters are trained, the policy with the frozen weights
    under role `base`.

    Raises:
        ConfigError: the starting policy's adapter differs from `config`.
        LineageError: its base is gone or changed.
    """
    if config is None:
        return inputs
    policy = inputs["policy"]
    base = adapter_base(store, policy)
    if base is None:
        return {"base": policy, **inputs}
    saved = parse(Lora, policy.manifest.config_section("lora"), f"{policy.ref} lora")
    for_life = Lora.model_fields.keys() - {"save"}
    changed = [name for name in for_life if getattr(config, name) != getattr(saved, name)]
    if changed:
        expected = ", ".join(f"{name} = {getattr(saved, name)}" for name in changed)
        asked = ", ".join(f"{name} = {getattr(config, name)}" for name in changed)
        raise ConfigError(
            f"optimize.lora {policy.ref}",
            f"its adapter has {expected}, the recipe asks for {asked}",
            next="ask for what it has"
            + (
                ", or go on with optimize.lora.save = 'merged' and start anew from that"
                if is_adapter_alone(policy)
                else f", or start a new run with policy.model = {str(policy.files.folder)!r}"
            ),
        )
    return {"base": base, **inputs}


def check_installed() -> None:
    """Raise ConfigError if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "optimize.lora", "peft is not installed here", next='pip install "quiver-rl[lora]"'
        )


def has_moments(config: Lora | None, policy: Version) -> bool:
    """Return True if `policy` holds optimizer state for the weights trained now, adapters or whole
    weights."""
    if f"{OPTIMIZER_FOLDER}/state.json" not in policy.files.names:
        return False
    trained = ["whole weights", "adapters"]
    had_adapters = policy.manifest.input("base") is not None
    has_adapters = config is not None
    if had_adapters != has_adapters:
        log.warning(
            "%s was trained by %s, now it is %s: the moments start anew",
            policy.ref,
            trained[had_adapters],
            trained[has_adapters],
        )
    return had_adapters == has_adapters
