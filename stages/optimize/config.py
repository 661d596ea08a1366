"""The fields of `[optimize]`: how a policy learns from scored rollouts.

Each class refuses unknown keys, values out of range and fields that contradict each other. The
stage checks what needs the datasets or the model. No torch is loaded here.

    config = Config(algorithm="dapo", learning_rate=1e-6)
    config.resolved().clip_high      # 0.28, the algorithm's default

Not of the spine: its fields are looked up by name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from quiver.schemas.errors import ConfigError, did_you_mean, printable
from quiver.stages.core import config as base
from quiver.stages.core import plugins
from quiver.stages.core.config import Runtime

from . import algorithms
from .contract import GROUP_ADVANTAGES

SURROGATE_FIELDS = {name for options in algorithms.OPTIONS.values() for name in options}
"""Fields that are options of a surrogate."""
_FILLED_FIELDS = {*SURROGATE_FIELDS, "drop_zero_variance"}
"""Fields for which an algorithm's row has the default."""
Advantage = Literal[
    "group_normalized",
    "batch_scaled",
    "part_normalized",
    "pass_at_k",
    "group_centered",
    "leave_one_out",
    "batch_normalized",
    "batch_normalized_baseline",
    "length_weighted",
]
"""Names of the advantages of whole rollouts."""
ADVANTAGE_OPTIONS = {
    "group_normalized": ("epsilon",),
    "batch_scaled": ("epsilon",),
    "part_normalized": ("epsilon",),
    "pass_at_k": ("k", "epsilon"),
    "batch_normalized": ("epsilon",),
    "batch_normalized_baseline": ("epsilon",),
}
"""Options of each advantage that has any."""
ADVANTAGE_FIELDS = {"epsilon": "advantage_epsilon", "k": "pass_k"}
"""Config field of each option of an advantage."""
CRITIC_OPTIONS = (
    "critic",
    "critic_from",
    "value_coef",
    "value_clip",
    "gamma",
    "gae_lambda",
    "critic_lambda",
    "reward_scaling",
    "bootstrap_length",
    "critic_learning_rate",
    "critic_warmup_steps",
)
"""Fields that only an algorithm with a critic reads."""
TIGHT_CLIP = 0.05
"""Clip bounds below this are reached by the engine's numeric noise alone."""
_DecayRate = Annotated[float, Field(ge=0, lt=1)]


def _check_name(name: str) -> str:
    """Return `name` if it is in the table or a dotted path; otherwise raise ValueError with the
    nearest name."""
    if name in algorithms.ALGORITHMS or ":" in name:
        return name
    raise ValueError(
        "expected a name that quiver algorithms lists, or module:NAME or file.py:NAME of your own"
        f"{did_you_mean(name, algorithms.ALGORITHMS)}"
    )


class Audit(base.Config):
    """Comparison of the trainer's logprobs with the engine's, before the first update."""

    enabled: bool = True
    """Compare, and stop the stage if the gap is too large."""
    max_mean_gap: float = Field(default=0.1, gt=0)
    """Largest mean of |trainer − old| in nats per token; bfloat16 engines differ by 0.01 to 0.05.
    Rollouts of an older policy (see `max_staleness`) differ legitimately: their gap is only
    reported, and the limit applies to their proximal logprobs. Under biased sampling the limit
    applies to trainer − old, which may legitimately be negative."""


class Correction(base.Config):
    """Weight exp(prox − old) of a token's loss, used if proximal logprobs are given."""

    mode: Literal["truncate", "clamp", "mask", "none"] = "truncate"
    """`truncate`: at most `high`; `clamp`: at least `low` too; `mask`: 0 outside [low, high];
    `none`: 1."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """`token`: the token's own ratio; `sequence`: the product over the completion; `geometric`: the
    geometric mean over the completion."""
    low: float = Field(default=0.0, ge=0)
    """Smallest ratio, for `mask` and `clamp`."""
    high: float = Field(default=2.0, gt=0)
    """Largest ratio."""
    reject: Literal["ratio", "k2", "k3"] | None = None
    """Leave out of the loss the tokens that are too far off, by the ratio exp(prox − old) or by a
    divergence in nats. They still count in the denominators. verl's `rollout_rs`. Default: none are
    left out."""
    reject_level: Literal["token", "sum", "mean", "max"] = "mean"
    """`token`: single tokens. The others measure a completion and leave it out as a whole; sum and
    mean of a ratio are taken of its logarithm."""
    reject_low: float = Field(default=0.0, ge=0)
    """With `reject`: tokens with a lower measure are left out of the loss."""
    reject_high: float | None = Field(default=None, gt=0)
    """Required by `reject`: tokens with a higher measure are left out of the loss."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Correction:
        if self.low >= self.high:
            raise ValueError(
                f"low must be < high = {self.high:g}, got {self.low:g}: every weight would be 0"
            )
        if self.reject is None and (self.reject_low or self.reject_high is not None):
            raise ValueError("reject_low and reject_high have no effect without reject: set it")
        if self.reject and (self.reject_high is None or self.reject_low >= self.reject_high):
            raise ValueError(
                f"reject needs reject_high, above reject_low = {self.reject_low:g}, got "
                f"{self.reject_high}"
            )
        return self


class Lora(base.Config):
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
    embedding, or those of them whose names end with one of these, such as ["q_proj",
    "v_proj"]."""
    save: Literal["merged", "adapter"] = "merged"
    """Contents of the next policy. merged: the whole model in float32, and the adapter. adapter:
    only the adapter, about a hundredth of the disk; its readers put it on the base as they load it,
    and vLLM gets both."""
    base: Literal["exact", "nf4"] = "exact"
    """The frozen weights. exact: as they are. nf4: linear layers of the language model in 4 bits,
    as in QLoRA (https://arxiv.org/abs/2305.14314). The next policy is the rounded base plus the
    adapter; start from a base that `quiver.stages.optimize.nf4:rounded` makes, so that the first
    rollouts are of rounded weights too. Needs the extra `8bit`. Not with `save = "adapter"` or
    `shard`."""

    @model_validator(mode="after")
    def _check_base(self) -> Lora:
        if self.base == "nf4" and self.save == "adapter":
            raise ValueError(
                "base 'nf4' does not go with save = 'adapter', whose readers would put the adapter "
                "on the exact weights: set save = 'merged', or base = 'exact'"
            )
        return self


class Config(base.Config):
    """Fields of `[optimize]`: how a policy learns from scored rollouts."""

    algorithm: Annotated[str, AfterValidator(_check_name)] = "grpo"
    """grpo, bnpo, dapo, dr_grpo, gdpo, pass_at_k, rloo, gspo, cispo, sapo, reinforce_pp,
    reinforce_pp_baseline, reinforce_pp_to_go, dppo, dppo_kl, gmpo, luspo, opo, otb, ppo, or your
    own `Algorithm` as `module:NAME`."""
    advantage: Advantage | None = None
    """Advantage of a rollout, in place of the algorithm's own: a function of `advantages.py` or
    `estimators.py`. TRL's `scale_rewards` "group", "batch" and "none" are group_normalized,
    batch_scaled and group_centered; its "normalize_then_sum" is part_normalized. Not for ppo, otb
    and reinforce_pp_to_go. Default: the algorithm's."""
    advantage_epsilon: float | None = Field(default=None, gt=0)
    """Added to the standard deviation that an advantage is divided by, in the same unit. Default:
    the advantage's own. It is 1e-4 for a group and for batch_scaled, 1e-8 for the batch and for
    pass_at_k."""
    pass_k: int | None = Field(default=None, ge=1)
    """pass_at_k: the k of "best of k answers"; below `generate.samples_per_prompt`. Default: 4."""
    credit: Literal["rollout", "turn", "gae"] = "rollout"
    """Which rewards a turn's tokens answer for, in rollouts of several turns. `rollout`: the reward
    of the whole. `turn`: the rewards of this turn and later ones, minus the mean of the same sum
    over the rest of the group. It replaces the algorithm's advantage, unless that is already per
    turn. `gae`: with a critic (ppo), each turn's reward is placed on the turn's last token. `turn`
    and `gae` need rewards of turns."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW, after warm-up."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps an epoch; a group is never split. 1 keeps the update on-policy."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts."""
    clip_low: float | None = Field(default=None, ge=0)
    """Distance of the lower clip bound from ratio 1; gmpo: of log r from 0. Default: the
    algorithm's."""
    clip_high: float | None = Field(default=None, ge=0)
    """Distance of the upper clip bound from ratio 1; gmpo: of log r from 0. Default: the
    algorithm's."""
    dual_clip: float | None = Field(default=None, gt=1)
    """If the advantage is negative, the loss is at most this times −advantage. Default: off."""
    delta: float | None = Field(default=None, gt=1)
    """Cap of the ratio in the unclipped branch; above 1 + clip_high. Default: off."""
    clip_max: float | None = Field(default=None, gt=0)
    """cispo: largest weight of a token. It bounds the ratio itself (5.0); in other systems it is
    the distance from 1. Default: the algorithm's."""
    tau_positive: float | None = Field(default=None, gt=0)
    """sapo: how fast the gradient fades away from ratio 1 if the advantage is above 0. Default: the
    algorithm's."""
    tau_negative: float | None = Field(default=None, gt=0)
    """sapo: the same if the advantage is 0 or below. Default: the algorithm's."""
    token_form: bool | None = None
    """gspo: use each token's own gradient under the sequence's ratio, for advantages that differ
    within a completion. Default: off."""
    divergence: Literal["tv", "kl"] | None = None
    """dppo, dppo_kl: how the change of the sampled token's probability is measured: as a difference
    (tv), or as KL against all other tokens (kl). Default: the algorithm's."""
    divergence_low: float | None = Field(default=None, ge=0)
    """dppo, dppo_kl: a token of negative advantage whose probability fell further than this is left
    out. Default: the algorithm's."""
    divergence_high: float | None = Field(default=None, ge=0)
    """dppo, dppo_kl: a token of positive advantage whose probability rose further than this is left
    out. Default: the algorithm's."""
    ratio_max: float | None = Field(default=None, gt=0)
    """dppo, dppo_kl: largest weight of a token. Default: off."""
    drift_coef: float | None = Field(default=None, ge=0)
    """dppo, dppo_kl: weight of (log r)² of every token; prime-rl uses 0.001. Default: off."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More options for the surrogate of your own algorithm, by name."""
    aggregation: (
        Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"] | None
    ) = None
    """Weight of a token in the step; `prompt_mean`: all prompts count alike. Default: the
    algorithm's."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Divisor of aggregation `constant`. Default: the limit of generation, read from the rollouts'
    manifest."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss. Above 0, reference logprobs are required."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL's value."""
    kl_unbiased: bool = True
    """Use k2's gradient, which is the true KL's, with every estimator of the value."""
    kl_in_reward: bool = False
    """Subtract the KL to the reference (k1, of the logprobs that were sampled with) from the reward
    instead: from each token's reward with a critic, else from the rollout's."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL to the reference, in nats per token, that `kl_coef` is steered towards over the policy's
    life. After a step above the target the coefficient goes up, else down, in proportion and by at
    most a fifth. With `kl_in_reward` the coefficient is constant within a training, and the next
    training starts from the updated one. `kl_coef` is the start value of the policy's life: later
    policies go on from the coefficient in their metrics, whatever the recipe says. Default: the
    coefficient stays."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """With `kl_target`: rollouts over which the coefficient moves by its relative distance from the
    target, limited to a fifth. A step of more rollouts moves it no further."""
    nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of good answers, the mean over their tokens in the
    step. As in VAPO, which uses 0.1; included in `policy_loss`. 0: off."""
    nll_reward: float = 1.0
    """With `nll_coef`: smallest reward of a good answer."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss. With `entropy_target`: the start value of the
    policy's life; later policies go on from the coefficient in their metrics, whatever the recipe
    says."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Mean entropy in nats per token to steer the coefficient towards, over the policy's life.
    After a step at or below the target it goes up, else down; above the target there is no bonus.
    Default: the coefficient stays."""
    entropy_coef_step: float = Field(default=0.005, gt=0)
    """With `entropy_target`: change of the coefficient after a step."""
    entropy_coef_max: float = Field(default=1.0, gt=0)
    """With `entropy_target`: largest coefficient."""
    entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the step's tokens that the policy learns from, highest entropy first; the others
    count in the denominators. Below 1, a pass of its own computes the entropy
    first."""
    critic: Literal["trunk", "model"] = "trunk"
    """`trunk`: a value head on the policy's last hidden states; its gradient moves the policy's
    trunk too. `model`: the head has its own trunk, initially a copy of the policy's, which only the
    critic's loss moves. It needs the policy's memory once more, moments included. This field and
    those up to `critic_warmup_steps` are for algorithms with a critic (ppo); others refuse them."""
    critic_from: str | None = Field(default=None, min_length=1)
    """Start of a critic with its own trunk: a sequence classifier with one label, such as a reward
    model, on the policy's architecture. A model directory, a hub id, or one imported into the
    store, `run/policy@version`. A policy that has a critic continues with that one. Default: a copy
    of the policy, and a head of zeros."""
    value_coef: float = Field(default=0.1, ge=0)
    """Weight of the critic's loss. With `critic = "model"` it competes with no other term. 0: the
    critic gives values and learns nothing."""
    value_clip: float | None = Field(default=0.2, ge=0)
    """Largest change of a value from its value before the first update, in units of reward. None:
    no limit."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward one token later. Also used by reinforce_pp_to_go."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """1: all later rewards minus the critic's value; 0: one token ahead, the rest estimated by the
    critic."""
    critic_lambda: float | None = Field(default=None, ge=0, le=1)
    """λ of the returns that the critic learns; VC-PPO and VAPO use 1. Default: `gae_lambda`."""
    reward_scaling: Literal["none", "running"] = "none"
    """`running`: the critic's rewards are divided by the standard deviation of all rewards in the
    policy's trainings, this one included. Values and `value_clip` are then in that unit."""
    bootstrap_length: bool = False
    """After a completion cut by length, add the critic's value of its last state. False: nothing
    follows it. Not with `on_length = "mask"`, which leaves such completions out."""
    critic_learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of the critic, with the policy's warm-up and schedule. Default:
    `learning_rate`."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the start of the policy's life in which only the critic learns."""
    prox_of: Literal["behaviour", "start"] = "behaviour"
    """Policy whose logprobs, computed by the trainer, are the ratio's denominator. `behaviour`: the
    policy that sampled. `start`: the policy that this training starts from, as in decoupled PPO; it
    needs proximal logprobs, and stale rollouts are weighed by exp(prox − old)."""
    correction: Correction = Correction()
    """Off-policy weights; used only if proximal logprobs are given."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up; linear and cosine reach 0 at `total_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up, counted over the policy's life."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer step of the policy's life at which linear and cosine end. A stage that would start
    at or after it is refused."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global norm of the gradient. A critic with its own trunk is clipped by its own norm,
    with the same limit."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay, applied to matrices."""
    betas: tuple[_DecayRate, _DecayRate] = (0.9, 0.999)
    """AdamW's decay rates of the moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's denominator constant."""
    save_optimizer: bool = True
    """Save AdamW's moments with the policy, so that the next iteration continues with them (twice
    the weights' bytes in float32)."""
    save_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the policy's weights on disk. bfloat16: half the bytes for every reader, rounded to
    nearest; the optimizer's state keeps the lower halves of the float32 weights, from which the
    next iteration goes on exactly, so both `save_optimizer` and `load_optimizer` are needed, unless
    adapters are trained. With precision bf16_stochastic the weights are always bfloat16.
    auto: bfloat16 if precision is bf16, the state is saved and loaded, and no bound of the ratio is
    tight; else float32."""
    load_optimizer: bool = True
    """Load the moments of the starting checkpoint, if it has any."""
    drop_zero_variance: bool | None = None
    """Leave groups with equal rewards out of the denominators too. Default: the algorithm's."""
    on_length: Literal["keep", "mask"] = "keep"
    """Completions cut by length: train on them, or leave them out of the loss and, unless
    `mask_counted`, out of the denominators. Their reward counts in the group's mean either way."""
    mask_counted: bool = False
    """With `on_length = "mask"`: rollouts that are left out of the loss count in the denominators,
    as in TRL; their tokens do not. False: they do not count at all. With `token_mean` both are the
    same."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest age of the policy that sampled the rollouts: how many policies it is older than the
    starting checkpoint."""
    allow_biased_sampling: bool = False
    """Accept rollouts sampled with top_p, top_k, min_p, min_tokens or penalties, whose distribution
    is not the policy's. They need proximal logprobs; a recipe then computes them."""
    score_after: bool = False
    """Compute the logprobs once more after the last step, so that mean_ratio and mean_logprob
    describe the new policy. False: they describe the policy just before the rollout's last step."""
    lora: Lora | None = None
    """Train adapters instead of all weights. Default: all weights."""
    train_vision: bool = False
    """Train the vision encoder too. False: only the language model."""
    audit: Audit = Audit()
    """Numeric audit before the first update."""
    seed: int = Field(default=0, ge=0)
    """Seed of the split into mini-batches, of new adapters, and of the rounding of
    bf16_stochastic."""
    precision: Literal["auto", "fp32", "bf16", "bf16_stochastic"] = "auto"
    """Dtype of passes and weights. auto: bf16 on a GPU, fp32 on a CPU. bf16: autocast, weights in
    float32. bf16_stochastic: weights in bfloat16 only, rounded stochastically after each step."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw: gradients and moments in float32. adamw_8bit: moments in 8 bits, quantized in blocks,
    and gradients of matrices in bfloat16. With precision bf16 a weight then takes 8 bytes in place
    of 18, with bf16_stochastic 6. Needs the extra `8bit`."""
    moments_on_host: Runtime[bool] = False
    """Keep AdamW's moments in host memory, and move each to the GPU only for its part of a step.
    The last resort: it saves their bytes on the GPU, and a step waits for the copies. Not with
    `shard`."""
    packing: Runtime[Literal["shared", "packed", "single"]] = "shared"
    """The most that may be packed together: prompts shared by a group, whole rollouts, or nothing.
    A simpler packing is used if the model requires it."""
    token_budget: Runtime[int | None] = Field(default=None, ge=1)
    """Tokens of one micro-batch. Default: 8192 to 65536 on a GPU, the most that its memory holds;
    2048 on a CPU. In a training of one process it is halved if memory runs out."""
    activation_checkpointing: Runtime[bool | None] = None
    """Recompute activations in the backward pass: less memory, a third more time. Default: on a
    GPU, if its memory holds no micro-batch otherwise."""
    shard: Runtime[bool] = False
    """Shard weights, gradients and moments over the ranks; a layer is whole only while it computes
    (FSDP2). False: each rank holds the whole model. No effect with one rank (no `processes`)."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device to train on."""
    processes: Runtime[int | None] = Field(default=None, ge=1)
    """Number of ranks that train together on one machine. Each has a whole model (unless `shard`),
    on its own GPU or its share of the cores. The stage starts them; under a launcher, such as
    torchrun, the number must be the one it started. Default: as many as were launched, or one."""
    resume_minutes: Runtime[float] = Field(default=15.0, gt=0)
    """Minutes between saves of weights and moments, from which a killed training resumes."""
    resume_steps: Runtime[int | None] = Field(default=None, ge=1)
    """Optimizer steps between these saves, in place of minutes."""
    trackers: Runtime[list[str]] = Field(default_factory=list)
    """Names of accelerate's trackers, such as tensorboard, wandb, mlflow or trackio. They get the
    numbers of each step, rewards, lengths and evaluations."""
    tracker_folder: Runtime[str | None] = None
    """Destination of the trackers' files. mlflow: unless MLFLOW_TRACKING_URI names a server."""
    algorithm_source: str = ""
    """Hash of the file of your own algorithm. The stage fills it in, with the algorithm's defaults;
    if it is set, the file must match."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Config:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps must be > warmup_steps = {self.warmup_steps}, got {self.total_steps}"
            )
        if self.lora and self.train_vision:
            raise ValueError(
                "adapters change only the language model: leave train_vision or lora out"
            )
        is_narrow = self.precision == "bf16_stochastic"
        if is_narrow and (self.lora or self.critic == "model"):
            conflicting = "lora" if self.lora else "critic = 'model'"
            raise ValueError(
                f"precision {self.precision!r} does not go with {conflicting}: take 'bf16', or "
                f"leave {conflicting} out"
            )
        saves_rounded = self.save_dtype == "bfloat16" and not is_narrow
        unset = [name for name in ("save_optimizer", "load_optimizer") if not getattr(self, name)]
        if saves_rounded and unset and not self.lora:
            raise ValueError(
                "save_dtype 'bfloat16' keeps half of the float32 weights in the optimizer's state: "
                f"set {unset[0]} = true, or take 'auto' or 'float32'"
            )
        if saves_rounded and self.needs_prox:
            raise ValueError(
                "save_dtype 'bfloat16' does not go with bounds this tight, or with prox_of = "
                "'start', since rounding the saved weights moves a ratio further: take 'float32'"
            )
        if saves_rounded and self.lora and self.lora.save == "adapter":
            raise ValueError(
                "save_dtype is for merged weights, and lora.save = 'adapter' saves none: leave one "
                "out"
            )
        not_sharded = {
            f"precision {self.precision!r}": is_narrow,
            "moments_on_host": self.moments_on_host,
            "lora.base = 'nf4'": self.has_nf4_base,
        }
        conflicting = [setting for setting, is_set in not_sharded.items() if is_set]
        if self.shard and conflicting:
            raise ValueError(
                f"{conflicting[0]} does not go with shard, whose ranks hold their rows of float32 "
                "weights and moments on their devices: leave one out"
            )
        if self.kl_in_reward and self.kl_coef == 0:
            raise ValueError("kl_in_reward needs kl_coef > 0")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target needs kl_coef > 0, the coefficient's start value")
        if self.mask_counted and self.on_length != "mask":
            raise ValueError(
                "mask_counted applies only with on_length = 'mask': set that too, or leave "
                "mask_counted out"
            )
        if self.trackers and not self.tracker_folder:
            raise ValueError("trackers need tracker_folder, the folder that they write to")
        return self

    @model_validator(mode="after")
    def _check_algorithm_options(self) -> Config:
        has_bounds = self.delta is not None and self.clip_high is not None
        if has_bounds and self.delta <= 1 + self.clip_high:
            raise ValueError(
                f"delta must be > 1 + clip_high = {1 + self.clip_high:g}, got {self.delta}"
            )
        for name in self.options:
            # else the manifest would record a value that had no effect
            if name in _FILLED_FIELDS:
                raise ValueError(f"options.{name} has a field of its own: set optimize.{name}")
        if self.critic_warmup_steps and self.value_coef == 0:
            raise ValueError(
                "critic_warmup_steps > 0 with value_coef = 0: nothing would learn; drop one"
            )
        if self.bootstrap_length and self.on_length == "mask":
            raise ValueError(
                "bootstrap_length is for completions cut by length, and on_length = 'mask' leaves "
                "them out: drop one"
            )
        algorithm = algorithms.ALGORITHMS.get(self.algorithm)
        if algorithm:
            accepted = algorithms.OPTIONS[algorithm.surrogate]
            for name in sorted(self.surrogate_options().keys() - {*accepted}):
                raise ValueError(
                    f"{name} is not an option of algorithm {algorithm.name!r}: leave it out; it "
                    f"takes {', '.join(accepted)}"
                )
            self._check_algorithm(algorithm)
        if self.critic_from and self.critic != "model":
            raise ValueError(
                "critic_from is a trunk with its head, and critic = 'trunk' reads the policy's: "
                "set critic = 'model'"
            )
        return self

    def _check_algorithm(self, algorithm: algorithms.Algorithm) -> None:
        """Raise ValueError for a field that has no effect on `algorithm`. A field at its default is
        no error, so one recipe with the defaults written out works with every algorithm."""
        accepted = {"gamma"} if algorithm.advantage == "reward_to_go" else set()
        if callable(algorithm.advantage) and algorithm.advantage_of == "tokens":
            accepted = {"gamma", "gae_lambda"} & inspect.signature(
                algorithm.advantage
            ).parameters.keys()
        changed = self.model_dump(include={*CRITIC_OPTIONS} - accepted, exclude_defaults=True)
        if changed and not algorithm.has_critic:
            raise ValueError(
                f"{', '.join(changed)} would have no effect: algorithm {algorithm.name!r} has no "
                "critic. Leave out what has no effect, or take an algorithm with a critic: ppo"
            )
        if self.advantage and algorithm.advantage_of != "rollouts":
            raise ValueError(
                f"advantage would leave algorithm {algorithm.name!r} without its advantages of "
                f"{algorithm.advantage_of}: leave it out"
            )
        self._check_credit(algorithm)
        advantage = self.turn_advantage or self.advantage or algorithm.advantage
        if advantage == "part_normalized" and self.kl_in_reward:
            raise ValueError(
                "kl_in_reward would have no effect: 'part_normalized' uses only the parts of the "
                "reward. Leave it out; kl_coef then belongs to the loss"
            )
        for name in self.advantage_options():
            if name not in ADVANTAGE_OPTIONS.get(advantage, ()):
                takers = [other for other, names in ADVANTAGE_OPTIONS.items() if name in names]
                raise ValueError(
                    f"{ADVANTAGE_FIELDS[name]} would have no effect: the advantage is "
                    f"{'its own' if callable(advantage) else advantage!r}. Leave it out, or take "
                    f"one of {', '.join(takers)}"
                )

    def _check_credit(self, algorithm: algorithms.Algorithm) -> None:
        """Raise ValueError if `credit` contradicts `algorithm` or another field."""
        if self.credit == "gae" and not algorithm.has_critic:
            raise ValueError(
                f"credit = 'gae' would have no effect: algorithm {algorithm.name!r} has no critic. "
                "Take ppo, or credit = 'turn'"
            )
        if self.credit != "turn":
            if algorithm.advantage_of == "turns":
                raise ValueError(
                    f"algorithm {algorithm.name!r} has advantages of turns: set credit = 'turn'"
                )
            return
        problem = ""
        token_form = {**algorithm.defaults, **self.surrogate_options()}.get("token_form")
        if algorithm.has_critic:
            problem = f"algorithm {algorithm.name!r} has advantages of tokens: take credit = 'gae'"
        elif algorithm.advantage_of == "tokens":
            problem = f"algorithm {algorithm.name!r} has a baseline of its own: take grpo or rloo"
        elif algorithm.surrogate == "geometric_clipped" or (
            algorithm.surrogate == "sequence_clipped" and not token_form
        ):
            problem = (
                f"the ratio of algorithm {algorithm.name!r} is the whole completion's, so each "
                "token would get the mean of all turns: take grpo, or gspo with token_form = true"
            )
        elif self.advantage:
            problem = "it is an advantage itself: leave advantage out"
        elif self.kl_in_reward:
            problem = (
                "kl_in_reward subtracts the KL from the whole rollout's reward: leave it out; "
                "kl_coef then belongs to the loss"
            )
        if problem:
            raise ValueError(f"credit = 'turn' does not go with this: {problem}")

    def key(self) -> dict[str, Any]:
        """Return the values that decide the outcome, the source of a user's own algorithm
        included. The bytes of `critic_from` count as a model of the plan."""
        fields = super().key()
        del fields["critic_from"]
        return {
            **fields,
            "algorithm": base.without_folder(self.algorithm),
            "algorithm_source": self.algorithm_source or self._source_hash(),
        }

    def resolved(self) -> Config:
        """Return the config with the algorithm's defaults filled in.

        The manifest then records them, and changing a default changes the run key. The defaults of
        a user's own algorithm are known only from its file, which is run once; a resolved config is
        returned unchanged. Raises ConfigError for options that have no effect or a changed file.
        """
        is_own = self.algorithm not in algorithms.ALGORITHMS
        if is_own and self.algorithm_source and self.drop_zero_variance is not None:
            return self
        source = self.require_unchanged_code()
        algorithm = algorithms.find_algorithm(self.algorithm)
        try:
            # the row of a user's own algorithm is unknown before this
            self._check_algorithm(algorithm)
        except ValueError as error:
            raise ConfigError(
                f"optimize.algorithm {self.algorithm}", str(error), next="leave those options out"
            ) from None
        if self.mask_counted and self.aggregation is None and callable(algorithm.aggregation):
            raise ConfigError(
                f"optimize.algorithm {self.algorithm}",
                "mask_counted would give its own aggregation completions of no token",
                next="set optimize.aggregation, or leave mask_counted out",
            )
        defaults = {
            "drop_zero_variance": False,
            **algorithm.defaults,
            "aggregation": algorithm.aggregation,
        }
        filled: dict[str, Any] = {
            name: defaults.get(name)
            for name in (*_FILLED_FIELDS, "aggregation")
            if getattr(self, name) is None and not callable(defaults.get(name))
        }
        filled["algorithm_source"] = source
        return base.parse(Config, {**self.model_dump(), **filled}, "optimize", is_section=True)

    def chosen_algorithm(self) -> algorithms.Algorithm:
        """Return the algorithm's row with the advantage that is set here. Raises ConfigError."""
        algorithm = algorithms.find_algorithm(self.algorithm)
        if self.turn_advantage and algorithm.advantage_of != "turns":
            return dataclasses.replace(
                algorithm, advantage=self.turn_advantage, advantage_of="turns"
            )
        return (
            dataclasses.replace(algorithm, advantage=self.advantage)
            if self.advantage
            else algorithm
        )

    def require_unchanged_code(self) -> str:
        """Return the hash of the algorithm's file. Raises ConfigError if it is not
        `algorithm_source`."""
        source = self._source_hash()
        if self.algorithm_source not in ("", source):
            raise ConfigError(
                f"optimize.algorithm {self.algorithm}",
                f"hash expected {printable(self.algorithm_source[:12])}…, found "
                f"{source[:12] or 'none'}…",
                next="restore the file and run again, or take algorithm_source out of the recipe",
            )
        return source

    def _source_hash(self) -> str:
        """Return a fingerprint of the file behind a dotted path, so that an edited algorithm gets
        another run key; empty for table rows. No code of a user's runs. Raises ConfigError."""
        if self.algorithm in algorithms.ALGORITHMS:
            return ""
        return plugins.fingerprint(
            plugins.locate(self.algorithm, "optimize.algorithm", algorithms.Algorithm.__name__)
        )

    def without_moments(self) -> list[str]:
        """Return the settings, as for `--set`, of the same training with a new optimizer state."""
        settings = ["optimize.load_optimizer=false"]
        if self.save_dtype == "bfloat16" and not self.lora:
            settings.append("optimize.save_dtype=auto")  # see `_check_optimizer`
        return settings

    @property
    def has_nf4_base(self) -> bool:
        """True if adapters are trained on a base of 4 bits."""
        return self.lora is not None and self.lora.base == "nf4"

    @property
    def kl_in_loss(self) -> bool:
        """True if the KL to the reference is a term of the loss."""
        return self.kl_coef > 0 and not self.kl_in_reward

    @property
    def has_entropy_bonus(self) -> bool:
        """True if the loss rewards entropy, now or after the coefficient has moved."""
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def steered(self) -> list[str]:
        """Names of the coefficients that follow a target."""
        targets = {"kl_coef": self.kl_target, "entropy_coef": self.entropy_target}
        return [name for name, target in targets.items() if target is not None]

    def with_steered(self, metrics: Mapping[str, Any]) -> Config:
        """Return the config of the next training of a policy with these `metrics`: a coefficient
        that follows a target is the one that the last training ended with."""
        carried = {name: metrics[name] for name in self.steered if name in metrics}
        return self.model_copy(update=carried)

    def terms_beside_rewards(self) -> list[str]:
        """Return the keys of the loss's terms that train even if every advantage is 0."""
        is_used = {
            "kl_coef": self.kl_in_loss,
            "nll_coef": self.nll_coef > 0,
            "entropy_coef"
            if self.entropy_target is None
            else "entropy_target": self.has_entropy_bonus,
        }
        return [key for key, used in is_used.items() if used]

    def tightest_clip(self) -> float | None:
        """Return the smaller of the surrogate's `clip_low` and `clip_high`, or None if it has
        neither. For a user's own algorithm they are known only after `resolved`."""
        algorithm = algorithms.ALGORITHMS.get(self.algorithm)
        options = {**(algorithm.defaults if algorithm else {}), **self.surrogate_options()}
        bounds = [options[name] for name in ("clip_low", "clip_high") if name in options]
        return min(bounds, default=None)

    def saved_dtype(self, precision: str) -> str:
        """Return `save_dtype`; for auto, the dtype for a policy trained in this precision."""
        if self.save_dtype != "auto":
            return self.save_dtype
        goes_on = self.save_optimizer and self.load_optimizer
        if self.lora:  # the next iteration starts from the base and the adapter
            goes_on = self.lora.save == "merged"
        return "bfloat16" if precision == "bf16" and goes_on and not self.needs_prox else "float32"

    @property
    def needs_prox(self) -> bool:
        """True if the ratio's denominator must be proximal logprobs: a clip bound is below
        TIGHT_CLIP, or the denominator is the starting policy."""
        clip = self.tightest_clip()
        return self.prox_of == "start" or (clip is not None and clip < TIGHT_CLIP)

    def surrogate_options(self) -> dict[str, Any]:
        """Return the surrogate's options that are set here; they override the algorithm's
        defaults."""
        return {**self.model_dump(include=SURROGATE_FIELDS, exclude_none=True), **self.options}

    def advantage_options(self) -> dict[str, Any]:
        """Return the advantage's options that are set here, by the names of its arguments."""
        fields = ADVANTAGE_FIELDS.items()
        values = {name: getattr(self, field) for name, field in fields}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def turn_advantage(self) -> str:
        """Name of the advantage that replaces the algorithm's; empty if none does."""
        return "turn_leave_one_out" if self.credit == "turn" else ""

    @property
    def least_samples(self) -> int:
        """Rollouts of one prompt that the advantage needs at least; 1 for a user's own
        algorithm."""
        row = algorithms.ALGORITHMS.get(self.algorithm)
        return self.least_of(self.turn_advantage or self.advantage or (row and row.advantage))

    def least_of(self, advantage: Any) -> int:
        """Return the rollouts of one prompt that an advantage needs at least; 1 for a user's own
        function."""
        if advantage == "pass_at_k":
            return (self.pass_k or 4) + 1
        return 2 if advantage in GROUP_ADVANTAGES else 1
