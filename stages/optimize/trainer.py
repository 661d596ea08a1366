"""The optimizer's loop: epochs of mini-batches (one optimizer step each) of micro-batches (one pass
each).

Every token's weight is made for the whole step at once, so neither micro-batches nor ranks change
loss or gradient. Weights stay in float32, unless the precision is one of bf16.py. A step whose loss
or gradient is not finite is left out on every rank; three in a row stop the stage. Before the first
update the logprobs are audited against the engine's. Nothing here knows of the store.
"""

from __future__ import annotations

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

from quiver.schemas.errors import ConfigError, NumericError
from quiver.stages.common.forward.packing import Piece, minibatches
from quiver.stages.common.forward.policy import Policy, score, score_and_judge, token_budget
from quiver.stages.common.forward.precision import narrow, resolve
from quiver.stages.common.forward.verify import choose_kernel, choose_mode

from . import audit, bf16, critic
from .algorithms import Algorithm, part
from .lora import narrow_frozen
from .objective import NUM_SUMS, Batch, Objective
from .optimizer import learning_rate, make_optimizer, total_norm
from .value_head import ValueHead, with_trunk

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .stage import Config

MAX_SKIPPED = 3
_SECONDS_BETWEEN_LINES = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run of the loop leaves behind, beside the changed weights."""

    updates: list[dict[str, Any]]
    """Rows of updates/1."""
    logprobs: torch.Tensor
    """[N] under the policy when the rollout was last trained on (`score_after`: under the new one);
    NaN where it never was."""
    audit: dict[str, Any]
    skipped: int
    step: int
    """Optimizer steps over the policy's whole life, this iteration's included."""
    mode: str
    kernel: str | None
    """Of attention; None where nothing was passed through the model."""
    precision: str
    advantages: torch.Tensor | None = None
    """[N] of the tokens, where a critic judged"""
    trainable: int = 0
    """How many numbers were trained: of the policy, or of its adapters, and of the value head."""
    padding_share: float = 0.0
    """Of the places that the first rank passed through the model in training, how many held
    nothing."""


def make_accelerator(config: Config) -> Accelerator:
    """Device, ranks and trackers; nothing else is taken from accelerate's environment. ConfigError
    when it gives another device, another number of processes, or another way to distribute than
    plain ranks."""
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
    if (
        accelerator.device.type != wanted
    ):  # accelerate's state is the process's: a second run stays where the first one was
        message = (
            f"expected {wanted}, found {accelerator.device.type}: there is none, or this process "
            "trained elsewhere before"
        )
        raise ConfigError(
            "optimize.device", message, next='set optimize.device = "auto", or start a new process'
        )
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        message = f"expected plain ranks, found {accelerator.distributed_type.value}"
        raise ConfigError(
            "optimize",
            message,
            next="launch with torch.distributed.run, and with no variable ACCELERATE_USE_* set",
        )
    asked = config.processes or int(
        os.environ.get("WORLD_SIZE") or os.environ.get("ACCELERATE_NUM_PROCESSES") or 1
    )
    if accelerator.num_processes != asked:
        raise ConfigError(
            "optimize.processes",
            f"expected {asked} processes, found {accelerator.num_processes}",
            next="launch with python -m torch.distributed.run --nproc-per-node N (accelerate "
            "launch starts one on a CPU)",
        )
    if config.trackers:
        accelerator.init_trackers("quiver")
    return accelerator


class Trainer:
    """Loop, optimizer and counters over one batch: `prepare()`, then `train()`, once each."""

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        batch: Batch,
        algorithm: Algorithm,
        accelerator: Accelerator,
        *,
        step: int = 0,
        value_trunk: nn.Module | None = None,
    ) -> None:
        self.config, self.model, self.batch, self.accelerator, self.step = (
            config,
            model,
            batch,
            accelerator,
            step,
        )
        device = accelerator.device
        self.objective = Objective(config, algorithm)
        self.critic: Callable[..., Any] | None = (
            part("advantages", algorithm.advantage) if algorithm.critic else None
        )
        skip = algorithm.zero_is_idle and self.objective.kl_coef == 0 and not self.critic
        idle = (
            {row for row, weight in enumerate(batch.advantages.tolist()) if weight == 0}
            if skip
            else set()
        )
        self.active = [row for row in range(len(batch.groups)) if row not in idle]
        self.budget = config.token_budget or token_budget(device)
        if config.activation_checkpointing:
            for trunk in (model, value_trunk):
                if trunk is not None:
                    trunk.train()  # transformers checkpoints in train mode only; every dropout is 0
                    trunk.gradient_checkpointing_enable({"use_reentrant": False})
        self.precision = resolve(config.precision, device)
        self.narrow = self.precision in bf16.PRECISIONS
        head = (
            ValueHead(model.get_output_embeddings().weight.shape[1]).to(device)
            if self.critic
            else None
        )
        self.judge = with_trunk(head, value_trunk) if self.critic else None
        if self.judge is not None and config.value_coef == 0:
            self.judge.requires_grad_(False)  # it judges, and learns nothing
        passes = {"autocast": self.precision == "bf16", "fast": self.precision == "fp32_fast"}
        self.policy = Policy(model, **passes, value_head=head, value_trunk=value_trunk)
        self.mode = (
            choose_mode(self.policy, batch.data, batch.prompts, config.packing)
            if batch.groups
            else config.packing
        )
        wide = narrow(model) if self.narrow else None
        if config.lora and self.precision == "bf16":
            narrow_frozen(model)
        self.wrapped = (
            self.policy if self.narrow else accelerator.prepare_model(self.policy)
        )  # see _reduce
        self.policy.fuse()  # after whatever moves weights
        self.kernel = (
            choose_kernel(self.policy, self._micros(self.active)[0], batch.data)
            if self.active
            else None
        )
        self.optimizer = make_optimizer(config, model, self.judge, wide=wide, step=step)
        self.parameters = [p for p in self.policy.parameters() if p.requires_grad]
        parts = [self.policy] if value_trunk is None else [model, self.judge]
        self.clipped = [[p for p in part.parameters() if p.requires_grad] for part in parts]
        self.logprobs = torch.full((len(batch.old),), torch.nan)
        self.audit: dict[str, Any] = {}
        self.updates: list[dict[str, Any]] = []
        self.filling = [
            0,
            0,
        ]  # of the places that this rank passed through the model: those that only fill up, and all

    # -- the loop

    @property
    def warming(self) -> bool:
        """The critic learns alone: the next step leaves every weight of the policy as it is."""
        return self.critic is not None and self.step < self.config.critic_warmup_steps

    def prepare(self) -> None:
        """What must be known before the first update: a critic's values, and the audit unless the
        first step passes over all rollouts anyway. NumericError."""
        early = self.config.audit.enabled and self.config.minibatches > 1
        if self.active and self.critic:
            logprobs = self._judge()
            early = self.config.audit.enabled
        elif self.active and early:
            logprobs = self.score(self.active)
        if self.active and early:
            self._audit(logprobs, self.active)

    @torch.no_grad()
    def _judge(self) -> torch.Tensor:
        """Let the critic judge every token of the batch; [N] logprobs, which the same pass
        gives."""
        data, own = self.batch.data, torch.ones(len(self.batch.old), dtype=torch.bool)
        cut = self.batch.cut & self.config.bootstrap_length
        if bool(cut.any()):
            data, own = critic.with_next_state(data, cut)
        micros = self.policy.microbatches(self.active, self.batch.prompts, data, self.budget)
        found = score_and_judge(
            self.policy, [micro for micro, counts in self._own(micros) if counts], data
        )
        logprobs, values = self.accelerator.reduce(found.to(self.accelerator.device), "sum").cpu()
        last = torch.zeros(len(cut)).index_copy(0, cut.nonzero()[:, 0], values[~own])
        self.batch = critic.judged(self.config, self.critic, self.batch, values[own], last)
        return logprobs[own]

    def train(self) -> Outcome:
        """Run all epochs. NumericError when the audit fails, or when steps are not finite: then
        nothing may be committed."""
        config, skipped, in_a_row = self.config, 0, 0
        wanted = set(self.active)
        for epoch in range(config.epochs):
            for number, members in enumerate(self._deal()):
                started = time.monotonic()
                active = [row for row in members if row in wanted]
                if not active:
                    continue
                row = {
                    "step": self.step,
                    "epoch": epoch,
                    "minibatch": number,
                    **self.accumulate(members, active),
                }
                if (
                    config.audit.enabled
                    and config.minibatches == 1
                    and not self.updates
                    and not self.audit
                ):
                    self._audit(self.logprobs, active)
                row |= self._apply(row)
                row["seconds"] = time.monotonic() - started
                self.updates.append(row)
                self.accelerator.log(
                    {key: value for key, value in row.items() if value is not None},
                    step=row["step"],
                )
                log.info(
                    "step %(step)d: loss %(loss).4f, grad_norm %(grad_norm).3f, approx_kl "
                    "%(approx_kl).5f",
                    row,
                )
                in_a_row = 0 if row["applied"] else in_a_row + 1
                skipped += not row["applied"]
                if in_a_row >= MAX_SKIPPED:
                    raise _not_finite(
                        f"{in_a_row} optimizer steps in a row had a loss or gradient that is not "
                        "finite"
                    )
        if self.updates and skipped == len(self.updates):
            raise _not_finite(f"none of {skipped} optimizer steps had a finite loss and gradient")
        if not bool(torch.nn.utils.get_total_norm(self.parameters).isfinite()):
            raise _not_finite("a weight is not finite after the last step")
        if config.score_after and self.batch.groups:
            self.logprobs = self.score(range(len(self.batch.groups)))
        judged = self.batch.advantages if self.critic else None
        mode, kernel, precision = self.mode, self.kernel, self.precision
        trainable = sum(p.numel() for p in self.parameters)
        share = self.filling[0] / max(self.filling[1], 1)
        return Outcome(
            self.updates,
            self.logprobs,
            self.audit,
            skipped,
            self.step,
            mode,
            kernel,
            precision,
            judged,
            trainable,
            share,
        )

    def free(self) -> None:
        """Give back the memory of model, critic and moments, of which nothing is needed any more;
        `train` is done."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.policy.free()

    def _deal(self) -> list[list[int]]:
        """This epoch's mini-batches: groups shuffled by seed and step, each group whole."""
        generator = torch.Generator().manual_seed(
            (self.config.seed * 1_000_003 + self.step) % 2**63
        )
        order = torch.randperm(max(self.batch.groups, default=-1) + 1, generator=generator).tolist()
        return minibatches([order[group] for group in self.batch.groups], self.config.minibatches)

    def _micros(self, rows: Sequence[int]) -> list[list[Piece]]:
        return self.policy.microbatches(rows, self.batch.prompts, self.batch.data, self.budget)

    def _own(self, micros: list[list[Piece]]) -> list[tuple[list[Piece], bool]]:
        """This rank's micro-batches and whether each counts; every rank gets equally many, filled
        up with some that do not."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        filled = [(micro, True) for micro in micros] + [(micros[-1], False)] * (
            -len(micros) % world
        )
        return filled[rank::world]

    @torch.no_grad()
    def score(self, rows: Sequence[int]) -> torch.Tensor:
        """[N] logprobs of rollouts `rows` under the policy as it is, NaN elsewhere; the same on
        every rank."""
        own = [micro for micro, counts in self._own(self._micros(rows)) if counts]
        return self._merge(
            score(self.policy, own, self.batch.data),
            rows,
            torch.full_like(self.logprobs, torch.nan),
        )

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        return self.batch.data.completions.positions(rows)

    def _merge(self, found: torch.Tensor, rows: Sequence[int], into: torch.Tensor) -> torch.Tensor:
        places = self._places(torch.tensor(list(rows), dtype=torch.int64))
        summed = self.accelerator.reduce(found.to(self.accelerator.device), "sum").cpu()
        return into.index_copy(0, places, summed[places])

    def _audit(self, logprobs: torch.Tensor, rows: list[int]) -> None:
        """Measure; rollouts of the starting checkpoint must be within the limit. With stale ones
        beside them these are measured apart, under `stale`."""
        stale = (
            self.batch.stale.tolist()
            if self.batch.stale is not None
            else [False] * len(self.batch.groups)
        )
        fresh, older = [row for row in rows if not stale[row]], [row for row in rows if stale[row]]
        self.audit = self._measure(logprobs, fresh or older)
        if fresh and older:
            self.audit["stale"] = self._measure(logprobs, older)
        if fresh:
            audit.require(self.audit, self.config.audit.max_mean_gap, "optimize audit")

    def _measure(self, logprobs: torch.Tensor, rows: list[int]) -> dict[str, Any]:
        own = self.batch.data.completions.with_values(self.batch.old).take(torch.tensor(rows))
        found = logprobs[self._places(torch.tensor(rows))]
        bounds = (self.objective.options.get(name, 0.2) for name in ("clip_low", "clip_high"))
        report = audit.measure(found, own.values, own.offsets, *bounds)
        log.info(
            "audit: mean gap %(mean_gap).1e, largest %(max_gap).1e, effective sample size "
            "%(effective_sample_size).3f",
            report,
        )
        return report

    # -- one step

    def accumulate(self, members: list[int], active: list[int]) -> dict[str, Any]:
        """Sum the step's gradient over all micro-batches; the step's numbers.

        `members` count in the denominators; only `active` are passed through the model.
        """
        weights, micros = self.objective.weights(self.batch, members), self._micros(active)
        found, sums = torch.zeros_like(self.logprobs), torch.zeros(NUM_SUMS, dtype=torch.float64)
        own, ratio_max, spoken = self._own(micros), 0.0, time.monotonic()
        self.optimizer.zero_grad(set_to_none=True)
        with self.policy.context():
            layouts = self.policy.layouts([micro for micro, _ in own], self.batch.data)
            for index, (layout, (_, counts)) in enumerate(zip(layouts, own, strict=True)):
                last = index == len(own) - 1
                with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                    places = self._places(layout.rows)
                    found_here = (
                        self.policy(layout, frozen=True) if self.warming else self.wrapped(layout)
                    )
                    loss, numbers, ratio = self.objective.loss(
                        self.batch, found_here, layout.rows, weights[places] * counts
                    )
                    self.accelerator.backward(loss * self.accelerator.num_processes)
                if counts:
                    self.filling = [
                        sum(pair) for pair in zip(self.filling, layout.filling, strict=True)
                    ]
                    sums += numbers
                    ratio_max = max(ratio_max, ratio)
                    found[places] = found_here[0].detach().cpu()
                if not last and time.monotonic() - spoken > _SECONDS_BETWEEN_LINES:
                    log.info("step %d: %d of %d micro-batches", self.step, index + 1, len(own))
                    spoken = time.monotonic()
        if self.narrow or self.warming:
            self._reduce()
        self.logprobs = self._merge(found, active, self.logprobs)
        return self._numbers(sums, ratio_max, active, len(micros))

    def _reduce(self) -> None:
        """Mean of the gradients over ranks, where torch's own wrapper does not: it adds up in the
        weights' dtype, and these are float32; it wants a gradient of every weight, and while the
        critic warms up the policy has none."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = self.accelerator.reduce(parameter.grad, "mean")

    def _numbers(
        self, sums: torch.Tensor, ratio_max: float, active: list[int], micros: int
    ) -> dict[str, Any]:
        """The step's numbers of all ranks."""
        device, rows = self.accelerator.device, torch.tensor(active)
        sums = self.accelerator.reduce(sums.to(device), "sum").cpu()
        largest = self.accelerator.gather(torch.tensor([ratio_max], device=device)).max()
        prompts, tokens = (
            int(part.lengths[rows].sum())
            for part in (self.batch.data.prompts, self.batch.data.completions)
        )
        counts = {
            "tokens": tokens,
            "prompt_tokens": prompts,
            "rollouts": len(active),
            "microbatches": micros,
        }
        return {
            **self.objective.numbers(sums, tokens, self.warming),
            "ratio_max": float(largest),
            **counts,
        }

    def _apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Clip and step when loss and gradient are finite; they are the same numbers on every rank,
        so all decide alike."""
        rate = learning_rate(self.config, self.step)
        norms = [total_norm([p.grad for p in part if p.grad is not None]) for part in self.clipped]
        norm = norms[-1 if self.warming else 0]
        applied = math.isfinite(row["loss"]) and all(map(math.isfinite, norms))
        if applied:
            for part, own in zip(self.clipped, norms, strict=True):
                torch.nn.utils.clip_grads_with_norm_(part, self.config.grad_clip, own)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group.get("scale", 1.0)
            self.optimizer.step()
            self.step += 1
        else:
            log.warning(
                "step %d left out: loss %s, gradient norm %s", row["step"], row["loss"], float(norm)
            )
        return {"grad_norm": float(norm), "learning_rate": rate, "applied": applied}


def _not_finite(message: str) -> NumericError:
    return NumericError(
        "optimize",
        message,
        state="the starting checkpoint is intact; no version was written.",
        next="lower optimize.learning_rate",
    )
