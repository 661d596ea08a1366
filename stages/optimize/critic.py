"""Advantages of tokens, from the reward to go or from one pass before the first update, such as a
critic's values; and the critic's weights, a value head, optionally on its own trunk.

The pass runs once, before any weight changes, and its columns stay fixed for all epochs and
mini-batches. Only completion tokens are steps. The finish reason, never the last id, decides if the
state after the last token has a value: after `stop` nothing follows; after `length` the value of
the cut state counts only if `bootstrap_length` is set.

The head maps each hidden state to one number. It starts at 0, so the first values are 0 for every
model. On the policy's trunk (`critic = "trunk"`), head and moments are saved in `value_head/` below
the policy's folder. A critic with its own trunk (`"model"`), initially a copy of the starting
policy's or a classifier (`critic_from`), is saved whole in `critic/`. It is never at the top:
engines load every *.safetensors there, and a critic must not change the policy itself.

    save(critic, optimizer, folder, "model", moments=True)
    resume(critic, optimizer, version, "model", moments=True)

Not of the spine: columns in, columns out, by the equations of advantages.py; only algorithms with
a critic (ppo) have weights here.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Version
from quiver.stages.model.forward import attention
from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.ragged import Ragged

from . import advantages
from . import optimizer as adamw
from .algorithms import Algorithm, find_function
from .batch import Batch
from .classifier import ADVICE, FOLDERS, saved_kind
from .config import Config
from .contract import TOKEN_OPTIONS
from .losses import log_ratio


def with_next_state(sequences: Sequences, cut: Tensor) -> tuple[Sequences, Tensor]:
    """Add one id after each rollout of `cut` [B] bool, so that a pass also gives the value after
    its last token.

    Returns the longer rollouts, and [N'] bool: which of their tokens were sampled. The added id is
    0 and is not used otherwise.
    """
    completions = sequences.completions
    lengths = completions.lengths + cut
    sampled = torch.ones(int(lengths.sum()), dtype=torch.bool)
    sampled[(lengths.cumsum(0) - 1)[cut]] = False
    ids = torch.zeros(len(sampled), dtype=completions.values.dtype)
    ids[sampled] = completions.values
    longer = dataclasses.replace(
        sequences,
        completions=Ragged.from_lengths(ids, lengths),
        turns=sequences.turns and sequences.turns.with_next_state(cut),
    )
    return longer, sampled


def token_rewards(config: Config, batch: Batch) -> Tensor:
    """Return r_t [N]: the rollout's reward, times `reward_scale`, on its last token, or its turns'
    rewards on the last token of each turn; with `kl_in_reward` also −kl_coef · (old − ref) on every
    token."""
    last_tokens = batch.sequences.completions.offsets[1:] - 1
    earned = batch.rewards
    if batch.turn_rewards is not None:
        last_tokens = batch.sequences.turns.last_tokens()
        earned = batch.turn_rewards.values
    rewards = torch.zeros(len(batch.old_logprobs), dtype=torch.float64)
    if config.kl_in_reward:
        rewards -= config.kl_coef * log_ratio(batch.old_logprobs, batch.ref_logprobs).double()
    return rewards.index_add(0, last_tokens, earned.double() * batch.reward_scale)


def with_token_advantages(
    config: Config, algorithm: Algorithm, batch: Batch, provided: Mapping[str, Tensor]
) -> Batch:
    """Return the batch with advantages [N] of its tokens; with a critic also old values [N] and
    returns [N].

    A masked rollout has advantage 0, and its tokens count in no baseline. `provided` comes from
    a pass of the current policy; only what `algorithm.needs` names is used.

    Advantages of functions without `groups` are whitened. With `critic_lambda`, advantages and
    returns have different λ: the value then estimates nearly the whole reward to come, while
    advantages have less variance.

    Reference: VC-PPO, https://arxiv.org/abs/2503.01491 (decoupled GAE).
    """
    advantage = find_function("advantages", algorithm.advantage)
    rows = batch.active_rows(zero_is_idle=False)
    places = batch.places(rows)
    offered = {
        "groups": torch.tensor(batch.groups)[rows],
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
    }
    named = inspect.signature(advantage).parameters
    chosen = {name: offered[name] for name in TOKEN_OPTIONS if name in named}
    for name in algorithm.needs:
        chosen[name] = provided[name][rows if name == "last_values" else places]
    lengths = batch.sequences.completions.lengths[rows]
    estimate = partial(
        advantage,
        token_rewards(config, batch)[places],
        offsets=Ragged.from_lengths(places, lengths).offsets,
    )
    token_advantages = estimate(**chosen)
    if algorithm.has_critic:
        token_advantages, returns = token_advantages
        if config.critic_lambda is not None:
            _, returns = estimate(**{**chosen, "gae_lambda": config.critic_lambda})
        of_all = torch.zeros(len(batch.old_logprobs))
        of_all[places] = returns
        batch = dataclasses.replace(batch, old_values=provided["values"], returns=of_all)
    if "groups" not in named:
        token_advantages = advantages.whitened(token_advantages)
    of_all = torch.zeros(len(batch.old_logprobs))
    of_all[places] = token_advantages
    return dataclasses.replace(batch, advantages=of_all)


def value_sums(values: Tensor, returns: Tensor) -> list[Tensor]:
    """Return Σ R, Σ R², Σ (R − V) and Σ (R − V)² over tokens, in float64, so that micro-batches and
    ranks add up.

    Args:
        values: [N] V_t.
        returns: [N] R_t, the target of V_t.
    Returns:
        Four sums, each [], without gradient; divided by N they are the arguments of
        `explained_variance`.
    """
    returns = returns.double()
    errors = returns - values.detach().double()
    return [returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]


def explained_variance(
    mean_return: float, mean_square: float, mean_error: float, mean_square_error: float
) -> float:
    """1 − Var(R − V) / Var(R): 1 for a perfect critic, 0 for a constant one.

    Args:
        mean_return, mean_square, mean_error, mean_square_error: over tokens, of R, R², R − V and
            (R − V)².
    Returns:
        At most 1; NaN if all returns are equal.
    """
    variance = mean_square - mean_return**2
    if not variance > 1e-12 * max(mean_square, 1e-12):
        return math.nan
    return 1.0 - (mean_square_error - mean_error**2) / variance


# -- the critic's weights


class ValueHead(nn.Module):
    """V = w · h + b in float32, for hidden states h [n, d] of any dtype -> [n] float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight[None], self.bias)[:, 0]


def trunk_of(model: nn.Module) -> nn.Module:
    """Return `model` without its output embedding, which no value needs; every remaining weight has
    a gradient."""
    # T5-like models hold encoder, decoder and output embedding side by side
    trunk = attention.trunk_of(model)
    if trunk is model:
        model.set_output_embeddings(None)
    return trunk


def with_trunk(head: ValueHead, trunk: nn.Module | None) -> nn.Module:
    """Return the module that is trained, saved and restored as the critic: the head, with its own
    trunk if it has one."""
    return head if trunk is None else nn.ModuleDict({"head": head, "trunk": trunk})


def save(
    critic: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, kind: str, *, moments: bool
) -> None:
    """Write weights and, if asked, AdamW's moments into the folder of this kind below `folder`."""
    tensors = {name: parameter.detach() for name, parameter in critic.named_parameters()}
    if moments:
        tensors |= adamw.optimizer_state(optimizer, critic)
    adamw.write_tensors(folder / FOLDERS[kind], tensors)


def resume(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: Version,
    kind: str,
    *,
    moments: bool,
    start: dict[str, Tensor] | None = None,
) -> None:
    """Continue with the critic that `policy` was saved with; without one, from the weights `start`
    of a classifier, if given.

    A head from the policy's trunk continues on the copy of that trunk, with new moments: the values
    are the same at first. The other direction raises ConfigError, because the head was trained on
    other hidden states, and so does a critic of another model.
    """
    saved = saved_kind(policy)
    if saved is None and start is None:
        return
    if kind == "trunk" and saved == "model":
        raise ConfigError(
            str(policy.ref),
            "its critic is a model of its own, optimize.critic = 'trunk' asks for one on the "
            "policy's trunk",
            next='set optimize.critic = "model"',
        )
    tensors = adamw.read_tensors(policy, FOLDERS[saved]) if saved else start
    module = critic if saved in (kind, None) else critic["head"]
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        shape = list(tensors[name].shape) if name in tensors else "nothing"
        if shape != list(parameter.shape):
            raise ConfigError(
                "critic",
                f"{name} was saved as {shape}, the model has {list(parameter.shape)}",
                next="start from the policy that it was trained with" if saved else ADVICE,
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(adamw.like(tensors.pop(name), parameter))
    if moments and tensors and saved == kind:
        adamw.load_optimizer_state(optimizer, module, tensors)
