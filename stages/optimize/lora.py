"""LoRA: a pair of small matrices beside each linear layer is trained, the layer itself stays.

    W' = W + (alpha / rank) · B A,    A [rank, in], B [out, rank]

B starts at 0, so the first ratio is 1. W is that of the base: the policy that the first adapter was
trained over, whichever iteration that was; for passes in bfloat16 it is held in that where nothing
is lost. A policy trained this way holds two things: at the top the merged weights W' in float32, so
that every reader takes it for a model like any other (its size on disk is that of a full one);
below them `adapter/`, A and B as peft writes them. The next iteration goes on from the base's
weights and the adapter, so the rounding of merges never adds up; its manifest names the base as an
input. By choice a policy holds the adapter alone (`save`), and who reads it reads its base too.
Refused: another rank, alpha or other layers than the adapter has; a base that is gone or changed.

Here is what a recipe says of it and which policy is the base; `adapters` has the matrices.

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
    """Adapters instead of all weights. They want a larger learning rate than full training does,
    about ten times.

    References: https://arxiv.org/abs/2106.09685; rate and alpha:
    https://thinkingmachines.ai/blog/lora/.
    """

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: int = Field(default=32, ge=1)
    """The adapter counts alpha / rank. Fixed rather than a multiple of the rank: then one learning
    rate does for all ranks."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Which layers: all linear ones of the language model but the output embedding, or those whose
    names end so, such as ["q_proj", "v_proj"]."""
    save: Literal["merged", "adapter"] = "merged"
    """What the next policy holds. merged: the whole model in float32, and the adapter. adapter:
    that alone, some hundredth of the disk; its readers put it on the base as they load it, and vLLM
    is given both."""


def with_base(config: Lora | None, store: Store, inputs: dict[str, Version]) -> dict[str, Version]:
    """The stage's inputs and, where adapters are trained, under role `base` the policy whose
    weights stay as they are.

    ConfigError: the adapter of the starting policy is of another kind. LineageError: its base is
    gone or changed.
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
    """ConfigError where there is no peft."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "optimize.lora", "peft is not installed here", next='pip install "quiver-rl[lora]"'
        )


def has_moments(config: Lora | None, policy: Version) -> bool:
    """Whether `policy` holds optimizer state of what is trained now, adapters or whole weights."""
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
