"""optimize: saved rollouts and their rewards turn a checkpoint into the next one.

It reads datasets and weights, nothing else: no engine, no tokenizer. Several versions of rollouts
may be given (replay), each with its own rewards and logprobs. Refused: rollouts of another policy
(unless `max_staleness` allows), rewards or logprobs that do not name exactly these rollouts, greedy
rows, truncated sampling (unless `allow_biased_sampling`), a KL term without reference logprobs, and
logprobs that the trainer can not reproduce (the audit). Written, together or not at all: the policy
with its optimizer state, advantages and updates. When every advantage is 0 there is nothing to
learn: the same weights become the next policy, and its metrics say so.

    ref = run(Config(algorithm="dapo"), store, policy="a/policy@0", rollouts="a/rollouts@1",
    rewards="a/rewards@1")
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from quiver.schemas.errors import ConfigError
from quiver.schemas.refs import Ref
from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime, parse, without_folder
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import Work, begin

from . import algorithms
from .checks import check_schedule
from .inputs import Refs, open_inputs
from .lora import Lora, attach, check_installed, moments_fit, with_base

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .rollouts import Loaded

STAGE_VERSION = 1
_Rate = Annotated[float, Field(ge=0, lt=1)]
_SURROGATE = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "delta",
    "clip_max",
    "tau_positive",
    "tau_negative",
    "token_form",
)
log = logging.getLogger(__name__)


class Audit(Base):
    """The comparison of the trainer's logprobs with the engine's, before the first update."""

    enabled: bool = True
    """Compare, and stop the stage when the gap is too large."""
    max_mean_gap: float = Field(default=0.1, gt=0)
    """Largest mean of |trainer − old| in nats a token; engines in bfloat16 differ by 0.01 to 0.05.
    Rollouts of an older policy (see `max_staleness`) differ by right: for them the gap is reported
    only."""


class Correction(Base):
    """The weight exp(prox − old) of a token's loss, where proximal logprobs are given."""

    mode: Literal["truncate", "mask"] = "truncate"
    """`truncate`: at most `high`; `mask`: 0 outside [low, high]."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Of the token, the product over the completion, or its geometric mean."""
    low: float = Field(default=0.0, ge=0)
    """Lower bound, for `mask`."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound."""

    @model_validator(mode="after")
    def _fits(self) -> Correction:
        if self.low >= self.high:
            raise ValueError(
                f"low must be < high = {self.high:g}, got {self.low:g}: every weight would be 0"
            )
        return self


class Config(Base):
    """How a policy learns from scored rollouts."""

    algorithm: str = "grpo"
    """grpo, bnpo, dapo, dr_grpo, rloo, gspo, cispo, sapo, reinforce_pp, reinforce_pp_baseline, ppo,
    or `module:NAME` of an `Algorithm` of your own."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Of AdamW, after warm-up."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps an epoch; groups are dealt out whole. 1 keeps the update on-policy."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts."""
    clip_low: float | None = Field(default=None, ge=0)
    """Distance of the lower clip bound from ratio 1. None: the algorithm's."""
    clip_high: float | None = Field(default=None, ge=0)
    """Distance of the upper clip bound from ratio 1. None: the algorithm's."""
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
    options: dict[str, Any] = Field(default_factory=dict)
    """More options for the surrogate of your own algorithm, by name."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """What a token weighs. None: the algorithm's."""
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
    """Discount of a reward one token later."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """1: the whole reward to come against the critic's value; 0: one token ahead, the rest by the
    critic."""
    bootstrap_length: bool = False
    """A completion cut by length is worth the critic's value of its last state. False: nothing
    follows it. Not with `on_length = "mask"`, which leaves such completions out."""
    critic_learning_rate: float | None = Field(default=None, gt=0)
    """Of the critic, with the policy's warm-up and schedule. None: `learning_rate`."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of the policy's life in which the critic learns alone and the policy stays as
    it is."""
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
    betas: tuple[_Rate, _Rate] = (0.9, 0.999)
    """AdamW's decay rates of the moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's denominator constant."""
    save_optimizer: bool = True
    """Save AdamW's moments with the policy, so that the next iteration goes on with them (twice the
    weights' bytes in float32)."""
    load_optimizer: bool = True
    """Take up the moments that the starting checkpoint holds, if any."""
    drop_zero_variance: bool | None = None
    """Leave groups with equal rewards out of the denominators too. None: the algorithm's."""
    on_length: Literal["keep", "mask"] = "keep"
    """Completions cut by length: train on them, or leave them out of the loss (their reward counts
    in the group's mean)."""
    max_staleness: int = Field(default=0, ge=0)
    """How many policies older than the starting checkpoint the one that sampled the rollouts may
    be."""
    allow_biased_sampling: bool = False
    """Accept rollouts sampled with top_p, top_k, min_p, min_tokens or penalties, whose distribution
    is not the policy's."""
    score_after: bool = False
    """Score the rollouts once more after the last step, so that mean_ratio and mean_logprob are the
    new policy's. False: they are of the policy that the rollout's last step started from."""
    lora: Lora | None = None
    """Train adapters instead of all weights. None: all weights."""
    audit: Audit = Audit()
    """The numeric audit before the first update."""
    seed: int = Field(default=0, ge=0)
    """Decides which groups go into which mini-batch, what new adapters start from, and how
    bf16_stochastic rounds."""
    precision: Literal["auto", "fp32", "fp32_fast", "bf16", "bf16_master", "bf16_stochastic"] = (
        "auto"
    )
    """Of passes and weights; AdamW's moments are float32 always. auto: bf16 on a GPU, fp32 on a
    CPU. fp32_fast: products as fast as float32 can have them here (TF32 on a GPU; oneDNN on a CPU,
    whose factors may be bfloat16). bf16: autocast, weights in float32. bf16_master: weights in
    bfloat16, with float32 ones in the optimizer's state. bf16_stochastic: weights in bfloat16
    alone, rounded by chance after each step."""
    packing: Runtime[Literal["shared", "packed", "single"]] = "shared"
    """Most that is packed together: prompts shared by a group, whole rollouts, or nothing. A
    simpler one is taken when it must be."""
    token_budget: Runtime[int | None] = Field(default=None, ge=1)
    """Tokens of one micro-batch. None: 8192 on a GPU, 2048 on a CPU. Lower it when memory is
    short."""
    activation_checkpointing: Runtime[bool] = False
    """Make activations again in the backward pass: less memory, a third more time."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to train."""
    processes: Runtime[int | None] = Field(default=None, ge=1)
    """How many ranks must take part; another number is refused. None: as many as were launched."""
    trackers: Runtime[list[str]] = Field(default_factory=list)
    """accelerate's trackers by name, such as tensorboard."""
    tracker_folder: Runtime[str | None] = None
    """Where trackers write."""

    @field_validator("algorithm")
    @classmethod
    def _known(cls, name: str) -> str:
        return algorithms.check_name(name)

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps must be > warmup_steps = {self.warmup_steps}, got {self.total_steps}"
            )
        if self.precision.startswith("bf16_") and (self.lora or self.critic == "model"):
            other = "lora" if self.lora else "critic = 'model'"
            raise ValueError(
                f"precision {self.precision!r} does not go with {other}: take 'bf16', or leave "
                f"{other} out"
            )
        if self.precision == "bf16_master" and not (self.save_optimizer and self.load_optimizer):
            raise ValueError(
                "precision 'bf16_master' keeps its float32 weights in the optimizer's state, so "
                "save_optimizer and "
                "load_optimizer must be true: set them, or take 'bf16_stochastic'"
            )
        if self.kl_in_reward and self.kl_coef == 0:
            raise ValueError("kl_in_reward needs kl_coef > 0")
        if self.trackers and not self.tracker_folder:
            raise ValueError("trackers need tracker_folder, the folder that they write to")
        if (
            self.delta is not None
            and self.clip_high is not None
            and self.delta <= 1 + self.clip_high
        ):
            raise ValueError(
                f"delta must be > 1 + clip_high = {1 + self.clip_high:g}, got {self.delta}"
            )
        for name in self.options:
            if name in (
                *_SURROGATE,
                "drop_zero_variance",
            ):  # else the manifest would say a value that did not count
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
        algorithms.check_options(self.algorithm, self.surrogate_options())
        if self.algorithm in algorithms.ALGORITHMS:
            algorithms.check_effect(algorithms.ALGORITHMS[self.algorithm], self._changed())
        return self

    def _changed(self) -> dict[str, Any]:
        """The defaults of the fields that have another value. What is written out in full, such as
        a config that travels between processes, is not for that reason changed."""
        defaults = {
            name: field.get_default(call_default_factory=True)
            for name, field in type(self).model_fields.items()
        }
        return {
            name: default for name, default in defaults.items() if getattr(self, name) != default
        }

    def key(self) -> dict[str, Any]:
        """The values that decide the outcome; the source of a user's own algorithm is one of
        them."""
        source = algorithms.source_hash(self.algorithm)
        return {
            **super().key(),
            "algorithm": without_folder(self.algorithm),
            "algorithm_source": source,
        }

    def resolved(self) -> Config:
        """With the algorithm's defaults filled in, so that the manifest says them and a changed
        default is other work."""
        row = algorithms.resolve(self.algorithm)
        try:
            algorithms.check_effect(
                row, self._changed()
            )  # of an algorithm of one's own it is known only now
        except ValueError as error:
            raise ConfigError(
                f"optimize.algorithm {self.algorithm}", str(error), next="leave those options out"
            ) from None
        defaults = {**row.defaults, "aggregation": row.aggregation}
        names = [name for name in (*_SURROGATE, "aggregation") if not callable(defaults.get(name))]
        own = {name: defaults.get(name) for name in names if getattr(self, name) is None}
        if self.drop_zero_variance is None:
            own["drop_zero_variance"] = defaults.get("drop_zero_variance", False)
        return parse(Config, {**self.model_dump(), **own}, "optimize")

    def surrogate_options(self) -> dict[str, Any]:
        """The surrogate's options that are set here; they go before the algorithm's defaults."""
        named = {name: getattr(self, name) for name in _SURROGATE}
        return {
            **{name: value for name, value in named.items() if value is not None},
            **self.options,
        }


def run(
    config: Config,
    store: Store,
    *,
    policy: str | Ref,
    rollouts: Refs,
    rewards: Refs,
    ref_logprobs: Refs | None = None,
    prox_logprobs: Refs | None = None,
    into: str | None = None,
    force: bool = False,
) -> Ref:
    """Train `policy` on `rollouts` with `rewards`; the next policy's reference. Into the policy's
    run by default.

    Of several versions of rollouts each has its own rewards and logprobs, found by what their
    manifests name, in any order. A policy may have sampled any of them that is at most
    `max_staleness` older than `policy`.

    Raises ConfigError, LineageError, NumericError (nothing is committed then), ResourceError when
    memory is short.
    """
    inputs = open_inputs(
        store, policy, rollouts, {"rewards": rewards, "ref": ref_logprobs, "prox": prox_logprobs}
    )
    config = config.resolved()
    inputs = with_base(config.lora, store, inputs)
    _check(config, inputs)
    about = {
        "stage": "optimize",
        "stage_version": STAGE_VERSION,
        "config": config,
        "inputs": inputs,
    }
    about["models"] = (checkpoints.as_model("policy", inputs["policy"]),)
    target = into or inputs["policy"].ref.run
    writer = os.environ.get("RANK", "0") == "0"
    with begin(store, target, "policy", force=force, **about) if writer else nullcontext() as work:
        if writer and work.done and os.environ.get("WORLD_SIZE", "1") == "1":
            return work.done.ref
        learn = partial(_learn, config, store, inputs, work, about, target, force)
        return _train(config, work, learn)


def prepare(config: Config) -> None:
    """Import what takes long, before there is anything to learn from."""
    from transformers import AutoModelForCausalLM  # noqa: F401

    from . import results, rollouts, trainer  # noqa: F401


def _check(config: Config, inputs: dict[str, Version]) -> None:
    """What can be told from names and manifests alone."""
    check_schedule(config, inputs["policy"])
    if config.kl_coef > 0 and "ref" not in inputs:
        raise ConfigError(
            "optimize.kl_coef",
            f"{config.kl_coef} needs the reference's logprobs, and none are given",
            next="score the rollouts under the reference first (stage logprobs), or set kl_coef = "
            "0",
        )


def _train(config: Config, work: Work | None, learn: Callable[[Accelerator], Ref | None]) -> Ref:
    """Call `learn` on every rank, unless the work is done; the reference that the writing rank
    knows, on every rank."""
    with work.phase("import") if work else nullcontext():
        from accelerate.utils import broadcast_object_list

        from . import trainer

        accelerator = trainer.make_accelerator(config)
    answer = [work.done.ref if work and work.done else None]
    broadcast_object_list(answer)
    if answer[0] is None:
        answer = [learn(accelerator)]
        broadcast_object_list(answer)
    # what holds on to the process group goes before the group does: gloo's threads else abort a
    # rank at its exit, now and then
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return answer[0]


def _learn(
    config: Config,
    store: Store,
    inputs: dict[str, Version],
    work: Work | None,
    about: dict[str, Any],
    run: str,
    force: bool,
    accelerator: Accelerator,
) -> Ref | None:
    """Load, audit, train; on the writing rank save and commit. The new policy's reference there,
    None elsewhere."""
    from quiver.stages.common.models.loading import short_of_memory

    from . import results, rollouts

    phase = work.phase if work else (lambda _: nullcontext())
    row = algorithms.resolve(config.algorithm)
    with short_of_memory(
        "optimize", "lower optimize.token_budget, or set optimize.activation_checkpointing = true"
    ):
        with phase("load"):
            loaded = rollouts.load(config, row, store, inputs)
            made, model = _trainer(row, inputs, loaded, accelerator)
        with phase("audit"):
            made.prepare()
        with phase("steps"):
            outcome = made.train()
    if work is None:
        return None
    with phase("save"):
        results.save(config, inputs["policy"], model, made, work)
    return results.commit(store, run, about, loaded, outcome, work, accelerator, force=force)


def _trainer(
    row: algorithms.Algorithm, inputs: dict[str, Version], loaded: Loaded, accelerator: Accelerator
):
    import torch

    from quiver.stages.common.models.loading import load_model

    from . import results, value_head
    from .optimizer import load_state
    from .trainer import Trainer

    policy, lora = inputs["policy"], loaded.config.lora
    critic = loaded.config.critic if row.critic else None
    if lora:
        check_installed()
    load = partial(load_model, dtype=torch.float32, device=accelerator.device)
    model, trunk = (
        load(inputs.get("base", policy)),
        value_head.trunk_of(load(policy)) if critic == "model" else None,
    )
    if lora:
        attach(lora, model, policy, seed=loaded.config.seed)
    step = int(policy.manifest.metrics.get("step", 0))
    made = Trainer(
        loaded.config, model, loaded.batch, row, accelerator, step=step, value_trunk=trunk
    )
    state = (
        results.load_optimizer(policy)
        if loaded.config.load_optimizer and moments_fit(lora, policy)
        else None
    )
    if state:
        load_state(made.optimizer, model, state)
    if critic:
        value_head.resume(
            made.judge, made.optimizer, policy, critic, moments=loaded.config.load_optimizer
        )
    return made, model
