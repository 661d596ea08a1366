"""Choose how much memory a training takes: tokens of a micro-batch, dtypes of weights, gradients.

    budget, recomputes = choose_budget(config, model, batch, "bf16", accelerator, has_critic=False)
    narrow_for(config, "bf16", policy)

Not of the spine: it says how much a pass holds, not what it computes.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from quiver.stages.model import memory
from quiver.stages.model.devices import available_bytes
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.precision import narrow

from .batch import Batch
from .config import Config
from .lora import narrow_frozen
from .optimizer import is_sharded

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


def choose_budget(
    config: Config,
    model: PreTrainedModel,
    batch: Batch,
    precision: str,
    accelerator: Accelerator,
    *,
    has_critic: bool,
) -> tuple[int, bool]:
    """Return the tokens of a micro-batch, and whether layers are recomputed; equal on every rank.

    Args:
        config: Its `token_budget` and `activation_checkpointing` are taken if they are set.
        model: The model to train.
        batch: Rollouts of the whole training.
        precision: Precision of the passes; not "auto".
        accelerator: Its ranks may have devices of different sizes; the smallest one decides.
        has_critic: True if a critic has a trunk of its own.
    """
    passed, longest = batch.sequences.sizes(batch.prompt_numbers)
    shape = cache(partial(memory.shape_of, model.config))

    def bytes_of(tokens: int, recomputes: bool) -> dict[str, float]:
        return memory.training(
            shape(),
            max(min(tokens, passed / config.minibatches), longest),
            on_gpu=True,
            precision=precision,
            lora_rank=config.lora.rank if config.lora else None,
            has_critic=has_critic,
            recomputes=recomputes,
            ranks=accelerator.num_processes if config.shard else 1,
            is_8bit=config.optimizer == "adamw_8bit",
            moments_on_host=config.moments_on_host,
            has_nf4_base=config.has_nf4_base,
        )

    recomputes = config.activation_checkpointing
    if recomputes is None and not model.supports_gradient_checkpointing:
        recomputes = False
    device = accelerator.device
    of_ranks = accelerator.gather(torch.tensor([available_bytes(device)], device=device))
    return memory.choose_budget(bytes_of, int(of_ranks.min()), config.token_budget, recomputes)


def recompute_layers(trunk: PreTrainedModel) -> None:
    """Let the backward pass compute each layer again, in place of keeping its activations.

    Transformers recomputes the layers that are in train mode. What is inside them stays in eval
    mode: some routers draw noise in train mode, and the ratio would not be 1 before the first
    update.
    """
    trunk.gradient_checkpointing_enable({"use_reentrant": False})
    for module in trunk.modules():
        module.training = isinstance(module, GradientCheckpointingLayer)


def narrow_for(config: Config, precision: str, policy: Policy) -> None:
    """Round weights to bfloat16, and let gradients be bfloat16, where the config says so."""
    if precision == "bf16_stochastic":
        narrow(policy.model)
    if config.lora and precision == "bf16":
        narrow_frozen(policy.model)
    if config.optimizer == "adamw_8bit":
        policy.keeps_casts = False
        for parameter in policy.parameters():
            # ranks that shard weights sum the parts of a gradient in float32
            if parameter.requires_grad and parameter.ndim > 1 and not is_sharded(parameter):
                parameter.grad_dtype = torch.bfloat16
