"""The optimizer's loop: epochs of mini-batches (one optimizer step each) of micro-batches (one pass each).

Every token's weight is made for the whole step at once, so neither micro-batches nor ranks change loss or gradient. Weights
stay in float32; autocast makes the passes cheap. A step whose loss or gradient is not finite is left out on every rank; three
in a row stop the stage. Before the first update the logprobs are audited against the engine's. Nothing here knows of the store.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from schemas.errors import ConfigError, NumericError
from stages.common.packed.attention import Sequences
from stages.common.packed.forward import Policy, choose_mode, score, token_budget
from stages.common.packed.packing import Piece, minibatches
from stages.common.ragged import Ragged

from . import audit, losses
from .algorithms import Algorithm, part
from .optimizer import learning_rate, make_optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .stage import Config

MAX_SKIPPED = 3
_SUMS = ("policy_loss", "kl_loss", "clip_fraction", "approx_kl", "entropy")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """The K rollouts that take part, N completion tokens."""

    data: Sequences
    groups: list[int]
    """[K] rollouts of one prompt bear one number."""
    prompts: list[int]
    """[K] rollouts with the same number have the same prompt ids, so they can share them."""
    advantages: torch.Tensor
    """[K] float32"""
    old: torch.Tensor
    """[N] float32"""
    prox: torch.Tensor | None
    ref: torch.Tensor | None
    stale: bool = False
    """The rollouts are of an older policy than the starting checkpoint: their logprobs differ by right, so the audit only
    reports."""

    @property
    def anchor(self) -> torch.Tensor:
        """[N] the ratio's denominator."""
        return self.old if self.prox is None else self.prox


@dataclass(frozen=True)
class Outcome:
    """What a run of the loop leaves behind, beside the changed weights."""

    updates: list[dict[str, Any]]
    """Rows of updates/1."""
    logprobs: torch.Tensor
    """[N] under the policy when the rollout was last trained on (`score_after`: under the new one); NaN where it never was."""
    audit: dict[str, float]
    skipped: int
    step: int
    """Optimizer steps over the policy's whole life, this iteration's included."""
    mode: str
    precision: str


def make_accelerator(config: Config) -> Accelerator:
    """Device, ranks and trackers; nothing else is taken from accelerate's environment. ConfigError when it gives another device,
    another number of processes, or another way to distribute than plain ranks."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    if cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no",
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        log_with=list(config.trackers) or None,
        project_dir=config.tracker_folder,
    )
    wanted = "cpu" if cpu else "cuda"
    if accelerator.device.type != wanted:  # accelerate's state is the process's: a second run stays where the first one was
        message = f"expected {wanted}, found {accelerator.device.type}: there is none, or this process trained elsewhere before"
        raise ConfigError("optimize.device", message, next='set optimize.device = "auto", or start a new process')
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        message = f"expected plain ranks, found {accelerator.distributed_type.value}"
        raise ConfigError("optimize", message, next="unset the ACCELERATE_USE_… variables, launch with torch.distributed.run")
    asked = config.processes or int(os.environ.get("WORLD_SIZE") or os.environ.get("ACCELERATE_NUM_PROCESSES") or 1)
    if accelerator.num_processes != asked:
        raise ConfigError(
            "optimize.processes",
            f"expected {asked} processes, found {accelerator.num_processes}",
            next="launch with python -m torch.distributed.run --nproc-per-node N (accelerate launch starts one on a CPU)",
        )
    if config.trackers:
        accelerator.init_trackers("quiver")
    return accelerator


class Trainer:
    """Loop, optimizer and counters over one batch: `audit_ahead()`, then `train()`, once each."""

    def __init__(
        self, config: Config, model: nn.Module, batch: Batch, algorithm: Algorithm, accelerator: Accelerator, *, step: int = 0
    ) -> None:
        self.config, self.model, self.batch, self.accelerator, self.step = config, model, batch, accelerator, step
        device = accelerator.device
        self.options = {**algorithm.defaults, **config.surrogate_options()}
        self.options.pop("drop_zero_variance", None)
        self.surrogate: Callable[..., Any] = part("losses", algorithm.surrogate)
        _check_options(self.surrogate, self.options, algorithm.name)
        self.aggregate: Callable[..., Any] = part("losses", config.aggregation or algorithm.aggregation)
        skip = algorithm.zero_is_idle and config.kl_coef == 0
        self.active = [row for row, weight in enumerate(batch.advantages.tolist()) if weight != 0 or not skip]
        self.budget = config.token_budget or token_budget(device)
        if config.activation_checkpointing:
            model.train()  # transformers checkpoints in train mode only; every dropout is 0
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.precision = config.precision if config.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"
        self.policy = Policy(model, autocast=self.precision == "bf16")
        self.mode = choose_mode(self.policy, batch.data, batch.prompts, config.packing) if batch.groups else config.packing
        self.wrapped = accelerator.prepare_model(self.policy)
        self.optimizer = make_optimizer(config, model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.logprobs = torch.full((len(batch.old),), torch.nan)
        self.audit: dict[str, float] = {}
        self.updates: list[dict[str, Any]] = []

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def audit_ahead(self) -> None:
        """Audit by a pass of its own, unless the first step passes over all rollouts anyway. NumericError."""
        if self.config.audit.enabled and self.config.minibatches > 1 and self.active:
            self._audit(self.score(self.active), self.active)

    def train(self) -> Outcome:
        """Run all epochs. NumericError when the audit fails, or when steps are not finite: then nothing may be committed."""
        config, skipped, in_a_row = self.config, 0, 0
        wanted = set(self.active)
        for epoch in range(config.epochs):
            for number, members in enumerate(self._deal()):
                started = time.monotonic()
                active = [row for row in members if row in wanted]
                if not active:
                    continue
                row = {"step": self.step, "epoch": epoch, "minibatch": number, **self.accumulate(members, active)}
                if config.audit.enabled and config.minibatches == 1 and not self.updates:
                    self._audit(self.logprobs, active)
                row |= self._apply(row)
                row["seconds"] = time.monotonic() - started
                self.updates.append(row)
                self.accelerator.log({key: value for key, value in row.items() if value is not None}, step=row["step"])
                log.info("step %(step)d: loss %(loss).4f, grad_norm %(grad_norm).3f, approx_kl %(approx_kl).5f", row)
                in_a_row = 0 if row["applied"] else in_a_row + 1
                skipped += not row["applied"]
                if in_a_row >= MAX_SKIPPED:
                    raise _not_finite(f"{in_a_row} optimizer steps in a row had a loss or gradient that is not finite")
        if self.updates and skipped == len(self.updates):
            raise _not_finite(f"none of {skipped} optimizer steps had a finite loss and gradient")
        if not bool(torch.nn.utils.get_total_norm(self.parameters).isfinite()):
            raise _not_finite("a weight is not finite after the last step")
        if config.score_after and self.batch.groups:
            self.logprobs = self.score(range(len(self.batch.groups)))
        return Outcome(self.updates, self.logprobs, self.audit, skipped, self.step, self.mode, self.precision)

    def _deal(self) -> list[list[int]]:
        """This epoch's mini-batches: groups shuffled by seed and step, each group whole."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        order = torch.randperm(max(self.batch.groups, default=-1) + 1, generator=generator).tolist()
        return minibatches([order[group] for group in self.batch.groups], self.config.minibatches)

    def _micros(self, rows: Sequence[int]) -> list[list[Piece]]:
        return self.policy.microbatches(rows, self.batch.prompts, self.batch.data, self.budget)

    def _own(self, micros: list[list[Piece]]) -> list[tuple[list[Piece], bool]]:
        """This rank's micro-batches and whether each counts; every rank gets equally many, filled up with some that do not."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        filled = [(micro, True) for micro in micros] + [(micros[-1], False)] * (-len(micros) % world)
        return filled[rank::world]

    @torch.no_grad()
    def score(self, rows: Sequence[int]) -> torch.Tensor:
        """[N] logprobs of rollouts `rows` under the policy as it is, NaN elsewhere; the same on every rank."""
        own = [micro for micro, counts in self._own(self._micros(rows)) if counts]
        return self._merge(score(self.policy, own, self.batch.data), rows, torch.full_like(self.logprobs, torch.nan))

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        return self.batch.data.completions.positions(rows)

    def _merge(self, found: torch.Tensor, rows: Sequence[int], into: torch.Tensor) -> torch.Tensor:
        places = self._places(torch.tensor(list(rows), dtype=torch.int64))
        summed = self.accelerator.reduce(found.to(self.accelerator.device), "sum").cpu()
        return into.index_copy(0, places, summed[places])

    def _audit(self, logprobs: torch.Tensor, rows: list[int]) -> None:
        own = self.batch.data.completions.with_values(self.batch.old).take(torch.tensor(rows))
        found = logprobs[self._places(torch.tensor(rows))]
        bounds = self.options.get("clip_low", 0.2), self.options.get("clip_high", 0.2)
        self.audit = audit.measure(found, own.values, own.offsets, *bounds)
        log.info(
            "audit: mean gap %(mean_gap).1e, largest %(max_gap).1e, effective sample size %(effective_sample_size).3f",
            self.audit,
        )
        if not self.batch.stale:
            audit.require(self.audit, self.config.audit.max_mean_gap, "optimize audit")

    # -- one step -----------------------------------------------------------------------------------------------------------

    def accumulate(self, members: list[int], active: list[int]) -> dict[str, Any]:
        """Sum the step's gradient over all micro-batches; the step's numbers.

        `members` count in the denominators; only `active` are passed through the model.
        """
        completions = self.batch.data.completions
        chosen = torch.tensor(members)
        weights = torch.zeros(len(self.batch.old), dtype=torch.float64)
        weights[self._places(chosen)] = self.aggregate(completions.lengths[chosen], self.config.max_completion_tokens)
        micros, found = self._micros(active), torch.zeros_like(self.logprobs)
        own, sums, ratio_max = self._own(micros), torch.zeros(len(_SUMS), dtype=torch.float64), 0.0
        self.optimizer.zero_grad(set_to_none=True)
        with self.policy.context():
            for index, (micro, counts) in enumerate(own):
                last = index == len(own) - 1
                with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                    layout = self.policy.layout(micro, self.batch.data)
                    places = self._places(layout.rows)
                    logprobs, entropy = self.wrapped(layout)
                    loss, numbers, ratio = self._loss(logprobs, entropy, layout.rows, places, weights[places] * counts)
                    self.accelerator.backward(loss * self.accelerator.num_processes)
                if counts:
                    sums += numbers
                    ratio_max = max(ratio_max, ratio)
                    found[places] = logprobs.detach().cpu()
        self.logprobs = self._merge(found, active, self.logprobs)
        tokens = int(completions.lengths[torch.tensor(active)].sum())
        return self._numbers(sums, ratio_max, tokens, active, len(micros))

    def _loss(self, logprobs, entropy, rows, places, weights) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Weighted loss of one micro-batch; its share of the step's sums; its largest ratio."""
        batch, device = self.batch, logprobs.device
        old, anchor = batch.old[places].to(device), batch.anchor[places].to(device)
        lengths = batch.data.completions.lengths[rows]
        offsets = Ragged.from_lengths(old, lengths.to(device)).offsets
        advantages = batch.advantages[rows].repeat_interleave(lengths).to(device)
        weights = weights.to(device, torch.float32)
        costs, clipped = self.surrogate(losses.Tokens(logprobs, anchor, advantages, offsets), **self.options)
        if batch.prox is not None:
            costs = costs * losses.correction(anchor, old, offsets, **self.config.correction.model_dump())
        policy_loss = loss = (weights * costs).sum()
        kl_loss = torch.zeros((), device=device)
        if batch.ref is not None:
            kl = losses.kl(logprobs, batch.ref[places].to(device), self.config.kl_estimator, self.config.kl_unbiased)
            kl_loss = (weights * kl).sum()
            loss = policy_loss + self.config.kl_coef * kl_loss
        with torch.no_grad():
            ratio = losses.log_ratio(logprobs, old)
            parts = [policy_loss, kl_loss, clipped.sum(), (torch.expm1(ratio) - ratio).sum(), entropy.sum()]
            return loss, torch.stack([part.double() for part in parts]).cpu(), float(ratio.max().exp())

    def _numbers(self, sums: torch.Tensor, ratio_max: float, tokens: int, active: list[int], micros: int) -> dict[str, Any]:
        device = self.accelerator.device
        sums = self.accelerator.reduce(sums.to(device), "sum").cpu()
        each = dict(zip(_SUMS, sums.tolist(), strict=True))
        largest = self.accelerator.gather(torch.tensor([ratio_max], device=device)).max()
        for name in _SUMS[2:]:
            each[name] /= tokens
        prompts = self.batch.data.prompts.lengths[torch.tensor(active)]
        counts = {"tokens": tokens, "prompt_tokens": int(prompts.sum()), "rollouts": len(active), "microbatches": micros}
        return {
            "loss": each["policy_loss"] + self.config.kl_coef * each["kl_loss"],
            **each,
            "ratio_max": float(largest),
            **counts,
        }

    def _apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Clip and step when loss and gradient are finite; they are the same numbers on every rank, so all decide alike."""
        rate = learning_rate(self.config, self.step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        applied = math.isfinite(row["loss"]) and math.isfinite(norm)
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.step += 1
        else:
            log.warning("step %d left out: loss %s, gradient norm %s", row["step"], row["loss"], float(norm))
        return {"grad_norm": float(norm), "learning_rate": rate, "applied": applied}


def _check_options(surrogate: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    try:
        inspect.signature(surrogate).bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"optimize.algorithm {name}", f"its surrogate does not take these options: {error}", next="correct optimize.options"
        ) from None


def _not_finite(message: str) -> NumericError:
    return NumericError(
        "optimize",
        message,
        state="the starting checkpoint is intact; no version was written.",
        next="lower optimize.learning_rate",
    )
