"""How a policy learns from scored rollouts: the fields of `[optimize]`, checked when they are read.

Each class refuses unknown keys, values out of range and fields that contradict each other; what
only the datasets or the model can tell is checked by the stage. No torch is loaded here.

    config = Config(algorithm="dapo", learning_rate=1e-6)
    config.resolved().clip_high      # 0.28, which the algorithm's row fills in

Not of the spine: its fields are looked up by name.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common import config as base
from quiver.stages.common.config import Runtime

from . import algorithms, effects
from .contract import GROUP_ADVANTAGES
from .lora import Lora

SURROGATE_FIELDS = {name for options in algorithms.OPTIONS.values() for name in options}
"""The fields that are options of a surrogate."""
_FILLED_FIELDS = {*SURROGATE_FIELDS, "drop_zero_variance"}
"""Those that an algorithm's row fills in."""
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
"""Those of rollouts."""
TIGHT_CLIP = 0.05
"""Clip bounds below this are met by the engine's noise alone, in place of the policy's change."""
_DecayRate = Annotated[float, Field(ge=0, lt=1)]


class Audit(base.Config):
    """The comparison of the trainer's logprobs with the engine's, before the first update."""

    enabled: bool = True
    """Compare, and stop the stage when the gap is too large."""
    max_mean_gap: float = Field(default=0.1, gt=0)
    """Largest mean of |trainer − old| in nats a token; engines in bfloat16 differ by 0.01 to 0.05.
    Rollouts of an older policy (see `max_staleness`) differ by right: for them the gap is reported
    only, and that of their proximal logprobs limited. Under biased sampling trainer − old alone is
    limited, since it may be below 0 by right."""


class Correction(base.Config):
    """The weight exp(prox − old) of a token's loss, where proximal logprobs are given."""

    mode: Literal["truncate", "clamp", "mask", "none"] = "truncate"
    """`truncate`: at most `high`; `clamp`: at least `low` too; `mask`: 0 outside [low, high];
    `none`: 1."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Of the token, the product over the completion, or its geometric mean."""
    low: float = Field(default=0.0, ge=0)
    """Smallest ratio, for `mask` and `clamp`."""
    high: float = Field(default=2.0, gt=0)
    """Largest ratio."""
    reject: Literal["ratio", "k2", "k3"] | None = None
    """Leave tokens out of the loss that lie too far off, by the ratio exp(prox − old) or by a
    divergence in nats; they count in the denominators. verl's `rollout_rs`. None: none."""
    reject_level: Literal["token", "sum", "mean", "max"] = "mean"
    """Of the token, or over the completion, which is then left out as a whole; sum and mean of a
    ratio are of its logarithm."""
    reject_low: float = Field(default=0.0, ge=0)
    """With `reject`: a token whose measure is lower is left out of the loss."""
    reject_high: float | None = Field(default=None, gt=0)
    """With `reject`, which needs it: a token whose measure is higher is left out of the loss."""

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


class Config(base.Config):
    """How a policy learns from scored rollouts."""

    algorithm: Annotated[str, AfterValidator(effects.check_name)] = "grpo"
    """grpo, bnpo, dapo, dr_grpo, gdpo, pass_at_k, rloo, gspo, cispo, sapo, reinforce_pp,
    reinforce_pp_baseline, reinforce_pp_to_go, dppo, dppo_kl, gmpo, luspo, opo, otb, ppo, or
    `module:NAME` of an `Algorithm` of your own."""
    advantage: Advantage | None = None
    """What a rollout is worth against the others, in place of the algorithm's own: a function of
    `advantages.py` or `estimators.py`. TRL's `scale_rewards` "group", "batch" and "none" are
    group_normalized, batch_scaled and group_centered; its "normalize_then_sum" is part_normalized.
    Not for ppo, otb and reinforce_pp_to_go. None: the algorithm's."""
    advantage_epsilon: float | None = Field(default=None, gt=0)
    """Added to the standard deviation that an advantage is divided by, in its unit. None: the
    advantage's own, 1e-4 of a group, 1e-8 of the batch and of pass_at_k; of batch_scaled 1e-4."""
    pass_k: int | None = Field(default=None, ge=1)
    """pass_at_k: of how many answers the best one counts; below `generate.samples_per_prompt`.
    None: 4."""
    credit: Literal["rollout", "turn", "gae"] = "rollout"
    """Of rollouts of several turns, what a turn's tokens answer for. `rollout`: the reward of the
    whole. `turn`: the rewards of this turn and those after it, less the mean of the same of the
    others in the group, in place of the algorithm's advantage, unless that is of turns. `gae`: with
    a critic (ppo), each turn's reward stands on the last token of the turn. The last two need
    rewards of turns."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW, after warm-up."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps an epoch; groups are dealt out whole. 1 keeps the update on-policy."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts."""
    clip_low: float | None = Field(default=None, ge=0)
    """Distance of the lower clip bound from ratio 1; gmpo: of log r from 0. None: the
    algorithm's."""
    clip_high: float | None = Field(default=None, ge=0)
    """Distance of the upper clip bound from ratio 1; gmpo: of log r from 0. None: the
    algorithm's."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, the loss is at most this times −advantage. None: off."""
    delta: float | None = Field(default=None, gt=1)
    """The ratio is capped here in the unclipped branch; above 1 + clip_high. None: off."""
    clip_max: float | None = Field(default=None, gt=0)
    """cispo: largest weight of a token, the bound of the ratio itself (5.0); other systems mean its
    distance from 1. None: the algorithm's."""
    tau_positive: float | None = Field(default=None, gt=0)
    """sapo: how fast the gradient fades away from ratio 1 where the advantage is above 0. None: the
    algorithm's."""
    tau_negative: float | None = Field(default=None, gt=0)
    """sapo: the same where the advantage is not above 0. None: the algorithm's."""
    token_form: bool | None = None
    """gspo: each token's own gradient under the sequence's ratio, for advantages that differ within
    a completion. None: off."""
    divergence: Literal["tv", "kl"] | None = None
    """dppo, dppo_kl: distance of the sampled token's probability from what it was, as a difference
    (tv) or as KL against all other tokens. None: the algorithm's."""
    divergence_low: float | None = Field(default=None, ge=0)
    """dppo, dppo_kl: distance beyond which a token of negative advantage that fell is left out.
    None: the algorithm's."""
    divergence_high: float | None = Field(default=None, ge=0)
    """dppo, dppo_kl: distance beyond which a token of positive advantage that rose is left out.
    None: the algorithm's."""
    ratio_max: float | None = Field(default=None, gt=0)
    """dppo, dppo_kl: largest weight of a token. None: off."""
    drift_coef: float | None = Field(default=None, ge=0)
    """dppo, dppo_kl: weight of (log r)² of every token; prime-rl takes 0.001. None: off."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More options for the surrogate of your own algorithm, by name."""
    aggregation: (
        Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"] | None
    ) = None
    """What a token weighs; `prompt_mean`: each prompt alike. None: the algorithm's."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Divisor of aggregation `constant`. None: what generation allowed, as the rollouts' manifest
    says."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss. Above 0 reference logprobs must be given."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL's value."""
    kl_unbiased: bool = True
    """Take the gradient of the true KL (that of k2) whatever estimator gives the value."""
    kl_in_reward: bool = False
    """Take the KL to the reference (k1, of the logprobs that were sampled with) off the reward
    instead: of each token's with a critic, else of the rollout's."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL to the reference, in nats a token, that `kl_coef` is steered towards over the policy's
    life: after a step above it the coefficient goes up, else down, in proportion and by a fifth at
    most. With `kl_in_reward` a training has one coefficient, and the next takes up what its steps
    say. `kl_coef` is where it begins. None: the coefficient stays."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Rollouts over which the coefficient would move by that share, with `kl_target`."""
    nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of good answers, mean over their tokens in the step, as
    in VAPO, which takes 0.1; `policy_loss` holds it. 0: off."""
    nll_reward: float = 1.0
    """With `nll_coef`: an answer is good from this reward on."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which the loss then rewards. With `entropy_target` where it
    begins."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Mean entropy in nats a token that the coefficient is steered towards, over the policy's life:
    after a step at or below it goes up, else down, and above it there is no bonus. None: the
    coefficient stays."""
    entropy_coef_step: float = Field(default=0.005, gt=0)
    """By how much the coefficient moves after a step, with `entropy_target`."""
    entropy_coef_max: float = Field(default=1.0, gt=0)
    """Largest coefficient, with `entropy_target`."""
    entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the step's tokens, those of highest entropy, that the policy learns from; the others
    count in the denominators. Below 1 each step scores its tokens first."""
    critic: Literal["trunk", "model"] = "trunk"
    """`trunk`: a value head on the policy's last hidden states, whose gradient moves the policy's
    trunk too. `model`: a trunk of its own below the head, at first a copy of the policy, which the
    critic's loss alone moves; it takes the policy's memory once more, moments included. This and
    the fields up to `critic_warmup_steps` are for algorithms with a critic (ppo); with others they
    are refused."""
    value_coef: float = Field(default=0.1, ge=0)
    """Weight of the critic's loss. With `critic = "model"` it competes with nothing. 0: the critic
    judges and learns nothing."""
    value_clip: float | None = Field(default=0.2, ge=0)
    """How far a value may move from what it was before the first update, in units of reward. None:
    any distance."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward one token later. Of reinforce_pp_to_go too."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """1: the whole reward to come against the critic's value; 0: one token ahead, the rest by the
    critic."""
    critic_lambda: float | None = Field(default=None, ge=0, le=1)
    """The same for the returns that the critic learns, as in VC-PPO and VAPO, which take 1 here.
    None: `gae_lambda`."""
    reward_scaling: Literal["none", "running"] = "none"
    """`running`: a critic is given the reward over the standard deviation of all rewards of the
    policy's trainings, this one's too, so values and `value_clip` are in such units."""
    bootstrap_length: bool = False
    """A completion cut by length is worth the critic's value of its last state. False: nothing
    follows it. Not with `on_length = "mask"`, which leaves such completions out."""
    critic_learning_rate: float | None = Field(default=None, gt=0)
    """Of the critic, with the policy's warm-up and schedule. None: `learning_rate`."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of the policy's life in which the critic learns alone and the policy stays as
    it is."""
    prox_of: Literal["behaviour", "start"] = "behaviour"
    """Which policy's logprobs, with the trainer's numerics, are the ratio's denominator.
    `behaviour`: the policy that sampled. `start`: the policy that this training starts from, as in
    decoupled PPO; it needs proximal logprobs, and stale rollouts are weighed by exp(prox − old)."""
    correction: Correction = Correction()
    """Off-policy weights; they apply only where proximal logprobs are given."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes after warm-up; linear and cosine reach 0 at `total_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up, counted over the policy's life."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps over the policy's life at which linear and cosine end. A stage that would
    begin there is refused."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global norm of the gradient; a critic that is a model of its own has its own norm,
    with the same limit."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay of matrices."""
    betas: tuple[_DecayRate, _DecayRate] = (0.9, 0.999)
    """AdamW's decay rates of the moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's denominator constant."""
    save_optimizer: bool = True
    """Save AdamW's moments with the policy, so that the next iteration goes on with them (twice the
    weights' bytes in float32)."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the policy's weights are on disk. bfloat16: half the bytes for every reader, rounded to
    nearest; the float32 weights, with which the next iteration goes on, are in the optimizer's
    state. With precision bf16_stochastic they are bfloat16 in any case."""
    load_optimizer: bool = True
    """Take up the moments that the starting checkpoint holds, if any."""
    drop_zero_variance: bool | None = None
    """Leave groups with equal rewards out of the denominators too. None: the algorithm's."""
    on_length: Literal["keep", "mask"] = "keep"
    """Completions cut by length: train on them, or leave them out of the loss (their reward counts
    in the group's mean), and out of the denominators too, unless `mask_counted`."""
    mask_counted: bool = False
    """With `on_length = "mask"`: what is left out of the loss counts as a rollout in the
    denominators, as in TRL; its tokens do not. False: it does not count at all. With `token_mean`
    both are the same."""
    max_staleness: int = Field(default=0, ge=0)
    """How many policies older than the starting checkpoint the one that sampled the rollouts may
    be."""
    allow_biased_sampling: bool = False
    """Accept rollouts sampled with top_p, top_k, min_p, min_tokens or penalties, whose distribution
    is not the policy's. They need proximal logprobs, which a recipe then makes by itself."""
    score_after: bool = False
    """Score the rollouts once more after the last step, so that mean_ratio and mean_logprob are the
    new policy's. False: they are of the policy that the rollout's last step started from."""
    lora: Lora | None = None
    """Train adapters instead of all weights. None: all weights."""
    train_vision: bool = False
    """Train what looks at pictures too. False: the language model alone."""
    audit: Audit = Audit()
    """The numeric audit before the first update."""
    seed: int = Field(default=0, ge=0)
    """Decides which groups go into which mini-batch, what new adapters start from, and how
    bf16_stochastic rounds."""
    precision: Literal["auto", "fp32", "bf16", "bf16_stochastic"] = "auto"
    """Of passes and weights; AdamW's moments are float32 always. auto: bf16 on a GPU, fp32 on a
    CPU. bf16: autocast, weights in float32. bf16_stochastic: weights in bfloat16 alone, rounded by
    chance after each step."""
    packing: Runtime[Literal["shared", "packed", "single"]] = "shared"
    """Most that is packed together: prompts shared by a group, whole rollouts, or nothing. A
    simpler one is taken when it must be."""
    token_budget: Runtime[int | None] = Field(default=None, ge=1)
    """Tokens of one micro-batch. None: 8192 on a GPU, 2048 on a CPU. Lower it when memory is short,
    raise it where a GPU has memory left: small models train up to twice as fast."""
    activation_checkpointing: Runtime[bool] = False
    """Make activations again in the backward pass: less memory, a third more time."""
    shard: Runtime[bool] = False
    """Each of several ranks holds its share of weights, gradients and moments, and a layer is whole
    only while it computes (FSDP2). False: each holds the whole model. One rank (no `processes`)
    has nobody to share with."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to train."""
    processes: Runtime[int | None] = Field(default=None, ge=1)
    """How many ranks train together on one machine, each with a whole model (but see `shard`): on a
    GPU of its own, or on its share of the cores. The stage starts them; under a launcher, such as
    torchrun, another number than it started is refused. None: as many as were launched, or one."""
    resume_minutes: Runtime[float] = Field(default=15.0, gt=0)
    """How often weights and moments are saved, so that a training that is killed goes on there."""
    resume_steps: Runtime[int | None] = Field(default=None, ge=1)
    """The same counted in optimizer steps, in place of minutes."""
    trackers: Runtime[list[str]] = Field(default_factory=list)
    """accelerate's trackers by name, such as tensorboard, wandb, mlflow or trackio: the numbers of
    each step, rewards, lengths and evaluations."""
    tracker_folder: Runtime[str | None] = None
    """Where trackers write. mlflow: unless MLFLOW_TRACKING_URI names a server."""
    algorithm_source: str = ""
    """Filled in by the stage, with the defaults of an algorithm of your own: hash of its file. If
    set, the file must have it."""

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
                "adapters are of the language model alone: leave train_vision out, or lora"
            )
        is_narrow = self.precision == "bf16_stochastic"
        if is_narrow and (self.lora or self.critic == "model"):
            conflicting = "lora" if self.lora else "critic = 'model'"
            raise ValueError(
                f"precision {self.precision!r} does not go with {conflicting}: take 'bf16', or "
                f"leave {conflicting} out"
            )
        saves_rounded = self.save_dtype == "bfloat16" and not is_narrow
        if saves_rounded and not (self.lora or self.save_optimizer):
            raise ValueError(
                "save_dtype 'bfloat16' keeps the float32 weights in the optimizer's state, so "
                "save_optimizer must be true: set it, or take 'float32'"
            )
        if saves_rounded and self.needs_prox:
            raise ValueError(
                "save_dtype 'bfloat16' does not go with bounds this tight, or with prox_of = "
                "'start', since rounding the saved weights moves a ratio further: take 'float32'"
            )
        if saves_rounded and self.lora and self.lora.save == "adapter":
            raise ValueError(
                "save_dtype is of merged weights, and lora.save = 'adapter' saves none: leave one "
                "out"
            )
        if self.shard and is_narrow:
            raise ValueError(
                f"precision {self.precision!r} does not go with shard: take 'bf16', whose weights "
                "are float32 and sharded"
            )
        if self.kl_in_reward and self.kl_coef == 0:
            raise ValueError("kl_in_reward needs kl_coef > 0")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target needs kl_coef > 0, where the coefficient begins")
        if self.trackers and not self.tracker_folder:
            raise ValueError("trackers need tracker_folder, the folder that they write to")
        return self

    @model_validator(mode="after")
    def _check_mask(self) -> Config:
        if self.mask_counted and self.on_length != "mask":
            raise ValueError(
                "mask_counted says how what on_length = 'mask' leaves out is counted: set that "
                "too, or leave mask_counted out"
            )
        return self

    @model_validator(mode="after")
    def _check_algorithm_options(self) -> Config:
        has_bounds = self.delta is not None and self.clip_high is not None
        if has_bounds and self.delta <= 1 + self.clip_high:
            raise ValueError(
                f"delta must be > 1 + clip_high = {1 + self.clip_high:g}, got {self.delta}"
            )
        row = algorithms.ALGORITHMS.get(self.algorithm)
        for name in self.options:
            # else the manifest would name a value that did not count
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
        if row:
            effects.check_options(row, self.surrogate_options())
            self._check_row(row)
        return self

    def _check_row(self, row: algorithms.Algorithm) -> None:
        """ValueError for a field that has no effect on `row`."""
        effects.check_effect(row, self._defaults_of_changed())
        if self.advantage and row.advantage_of != "rollouts":
            raise ValueError(
                f"advantage would leave algorithm {row.name!r} without its advantages of "
                f"{row.advantage_of}: leave it out"
            )
        self._check_credit(row)
        advantage = self.turn_advantage or self.advantage or row.advantage
        if advantage == "part_normalized" and self.kl_in_reward:
            raise ValueError(
                "kl_in_reward would have no effect: 'part_normalized' looks at the parts of the "
                "reward alone. Leave it out; kl_coef is then of the loss"
            )
        effects.check_advantage(
            "its own" if callable(advantage) else advantage, self.advantage_options()
        )

    def _check_credit(self, row: algorithms.Algorithm) -> None:
        """ValueError where `credit` does not go with `row`, or with another field."""
        if self.credit == "gae" and not row.critic:
            raise ValueError(
                f"credit = 'gae' would have no effect: algorithm {row.name!r} has no critic. Take "
                "ppo, or credit = 'turn'"
            )
        if self.credit != "turn":
            if row.advantage_of == "turns":
                raise ValueError(
                    f"algorithm {row.name!r} has advantages of turns: set credit = 'turn'"
                )
            return
        problem = ""
        token_form = {**row.defaults, **self.surrogate_options()}.get("token_form")
        if row.critic:
            problem = f"algorithm {row.name!r} has advantages of tokens: take credit = 'gae'"
        elif row.advantage_of == "tokens":
            problem = f"algorithm {row.name!r} has a baseline of its own: take grpo or rloo"
        elif row.surrogate == "geometric_clipped" or (
            row.surrogate == "sequence_clipped" and not token_form
        ):
            problem = (
                f"the ratio of algorithm {row.name!r} is the whole completion's, so each token "
                "would get the mean of all turns: take grpo, or gspo with token_form = true"
            )
        elif self.advantage:
            problem = "it is an advantage itself: leave advantage out"
        elif self.kl_in_reward:
            problem = (
                "kl_in_reward takes the KL off the reward of the whole: leave it out, kl_coef is "
                "then of the loss"
            )
        if problem:
            raise ValueError(f"credit = 'turn' does not go with this: {problem}")

    def _defaults_of_changed(self) -> dict[str, Any]:
        """The defaults of the critic's fields that have another value. A field that is written out
        at its default, as in a config that travels between processes, is not changed."""
        changed = self.model_dump(include=set(effects.CRITIC_OPTIONS), exclude_defaults=True)
        return {name: type(self).model_fields[name].default for name in changed}

    def key(self) -> dict[str, Any]:
        """The values that decide the outcome; the source of a user's own algorithm is one of
        them."""
        return {
            **super().key(),
            "algorithm": base.without_folder(self.algorithm),
            "algorithm_source": self.algorithm_source or effects.source_hash(self.algorithm),
        }

    def resolved(self) -> Config:
        """With the algorithm's defaults filled in, so that the manifest says them and a changed
        default is other work. Only a user's own file knows those of its algorithm: it runs, once;
        what is resolved stays as it is. ConfigError."""
        is_own = self.algorithm not in algorithms.ALGORITHMS
        if is_own and self.algorithm_source and self.drop_zero_variance is not None:
            return self
        source = self.require_source()
        row = algorithms.resolve(self.algorithm)
        try:
            # a user's own algorithm is known only now
            self._check_row(row)
        except ValueError as error:
            raise ConfigError(
                f"optimize.algorithm {self.algorithm}", str(error), next="leave those options out"
            ) from None
        if self.mask_counted and self.aggregation is None and callable(row.aggregation):
            raise ConfigError(
                f"optimize.algorithm {self.algorithm}",
                "mask_counted would give its own aggregation completions of no token",
                next="set optimize.aggregation, or leave mask_counted out",
            )
        defaults = {"drop_zero_variance": False, **row.defaults, "aggregation": row.aggregation}
        filled: dict[str, Any] = {
            name: defaults.get(name)
            for name in (*_FILLED_FIELDS, "aggregation")
            if getattr(self, name) is None and not callable(defaults.get(name))
        }
        filled["algorithm_source"] = source
        return base.parse(Config, {**self.model_dump(), **filled}, "optimize", is_section=True)

    def row(self) -> algorithms.Algorithm:
        """The algorithm, with the advantage that is set here. ConfigError."""
        row = algorithms.resolve(self.algorithm)
        if self.turn_advantage and row.advantage_of != "turns":
            return dataclasses.replace(row, advantage=self.turn_advantage, advantage_of="turns")
        return dataclasses.replace(row, advantage=self.advantage) if self.advantage else row

    def require_source(self) -> str:
        """The hash of the algorithm's file. ConfigError where it is not `algorithm_source`."""
        source = effects.source_hash(self.algorithm)
        if self.algorithm_source not in ("", source):
            raise ConfigError(
                f"optimize.algorithm {self.algorithm}",
                f"hash expected {printable(self.algorithm_source[:12])}…, found "
                f"{source[:12] or 'none'}…",
                next="restore the file and run again, or take algorithm_source out of the recipe",
            )
        return source

    @property
    def kl_in_loss(self) -> bool:
        """The KL to the reference is a term of the loss."""
        return self.kl_coef > 0 and not self.kl_in_reward

    @property
    def has_bonus(self) -> bool:
        """The loss rewards entropy, or may come to."""
        return self.entropy_coef > 0 or self.entropy_target is not None

    def terms_beside_rewards(self) -> list[str]:
        """The keys of the loss's terms that train although every advantage is 0."""
        is_used = {
            "kl_coef": self.kl_in_loss,
            "nll_coef": self.nll_coef > 0,
            "entropy_coef" if self.entropy_target is None else "entropy_target": self.has_bonus,
        }
        return [key for key, used in is_used.items() if used]

    def tightest_clip(self) -> float | None:
        """The smaller of the surrogate's distances `clip_low` and `clip_high`; None: it has
        neither. Of a user's own algorithm they are known once it is resolved."""
        row = algorithms.ALGORITHMS.get(self.algorithm)
        options = {**(row.defaults if row else {}), **self.surrogate_options()}
        bounds = [options[name] for name in ("clip_low", "clip_high") if name in options]
        return min(bounds, default=None)

    @property
    def needs_prox(self) -> bool:
        """Whether the ratio needs proximal logprobs for its denominator: its bounds are within the
        engine's noise, or the denominator is the starting policy."""
        clip = self.tightest_clip()
        return self.prox_of == "start" or (clip is not None and clip < TIGHT_CLIP)

    def surrogate_options(self) -> dict[str, Any]:
        """The surrogate's options that are set here; they override the algorithm's
        defaults."""
        return {**self.model_dump(include=SURROGATE_FIELDS, exclude_none=True), **self.options}

    def advantage_options(self) -> dict[str, Any]:
        """The advantage's options that are set here, by the names of its arguments."""
        fields = effects.ADVANTAGE_FIELDS.items()
        values = {name: getattr(self, field) for name, field in fields}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def turn_advantage(self) -> str:
        """What takes the place of the algorithm's advantage; empty: nothing does."""
        return "turn_leave_one_out" if self.credit == "turn" else ""

    @property
    def least_samples(self) -> int:
        """How many rollouts of one prompt its advantage needs; of a user's own algorithm 1."""
        row = algorithms.ALGORITHMS.get(self.algorithm)
        advantage = self.advantage or (row and row.advantage)
        if self.turn_advantage:
            return 2
        if advantage == "pass_at_k":
            return (self.pass_k or 4) + 1
        return 2 if advantage in GROUP_ADVANTAGES else 1
