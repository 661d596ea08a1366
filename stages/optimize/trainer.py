"""The optimizer's loop: epochs of mini-batches (a step each) of micro-batches (a pass each).

Each token's weight is computed for the whole step at once, so neither micro-batches nor ranks
change loss or gradient. So a step for which memory is short is repeated in smaller micro-batches.
The model's weights stay in float32, or in bfloat16 with precision `bf16_stochastic` (see
`optimizer`). A step whose loss or gradient is not finite is skipped on every rank; three in a row
stop the stage. Nothing here knows of the store.

Before the first update, the audit compares the trainer's logprobs of tokens that the starting
policy sampled with `old_logprobs`, the engine's; it only measures rollouts of older policies. The
mean over tokens of |trainer − old| may be at most `audit.max_mean_gap`; audit.py has the other
bounds. Beyond a bound, NumericError stops the training before any weight changes. `Trainer.prepare`
says which rollouts are compared.

    trainer = Trainer(config, model, batch, algorithm, make_accelerator(config))
    trainer.prepare()              # a critic's values, the audit
    trainer.train()                # trainer.model holds the next policy's weights
    trainer.train(progress)        # the same, resumed after the last saved step (see `resume`)
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quiver.stages.model.folder import says_no_memory
from quiver.stages.model.forward.layout import Layout, Sequences
from quiver.stages.model.forward.packing import Piece, minibatches
from quiver.stages.model.forward.policy import Outputs, Policy, compute_outputs
from quiver.stages.model.forward.precision import choose_precision
from quiver.stages.model.forward.verify import choose_kernel, choose_mode

from . import critic, terms
from .algorithms import Algorithm
from .audit import audit
from .batch import Batch, StepColumns, TokenColumns
from .budget import choose_budget, narrow_for, recompute_layers
from .checks import not_finite
from .config import Config
from .critic import ValueHead, with_trunk
from .objective import NUM_SUMS, Objective
from .optimizer import (
    SavedState,
    learning_rate,
    make_optimizer,
    total_norm,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

MAX_SKIPPED = 3
_SECONDS_BETWEEN_LINES = 2.0
T = TypeVar("T")
log = logging.getLogger(__name__)


class Progress(Protocol):
    """Saved state of a training while it runs; `resume` keeps it in a store."""

    def load(self, trainer: Trainer) -> tuple[int, int, int]:
        """Put the saved state into the trainer. Return the epoch and mini-batch that come next, and
        the step at which that epoch began."""

    def step_done(self, trainer: Trainer, epoch: int, minibatch: int, epoch_step: int) -> None:
        """Note that a step is done; this mini-batch of this epoch comes next."""

    def not_finite(self, trainer: Trainer, update: dict[str, Any], rows: list[int]) -> None:
        """Keep the rollouts `rows` of a step whose loss or gradient is not finite."""


class Trainer(SavedState):
    """Loop, optimizer and counters over one batch: `prepare()`, then `train()`, once each.

    The base class gives the module `resume` the weights, moments and counters to save, and restores
    them.
    """

    make_policy = Policy

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
        """Prepare model, optimizer and counters. `step`: optimizer steps taken so far in the
        policy's life."""
        self.config = config
        self.model = model
        self.batch = batch
        self.algorithm = algorithm
        self.accelerator = accelerator
        self.step = step
        """Optimizer steps over the policy's whole life, without skipped steps."""
        self.objective = Objective(config, algorithm)
        self.rank_share = slice(accelerator.process_index, None, accelerator.num_processes)
        """This rank's share of all ranks' micro-batches."""
        self.precision = choose_precision(config.precision, accelerator.device)
        self.active = batch.active_rows(self.objective.zero_is_idle)
        """Rollouts that are passed through the model."""
        self._prepare_model(value_trunk)
        self.parameters = [p for p in self.policy.parameters() if p.requires_grad]
        self.num_trained = sum(parameter.numel() for parameter in self.parameters)
        """Trained numbers of the policy, or of its adapters, and of the critic."""
        self.logprobs = torch.full((len(batch.old_logprobs),), torch.nan)
        """[N] under the policy at the rollout's last training step (`score_after`: under the new
        policy); NaN if it was never trained on."""
        self.audit_report: dict[str, Any] = {}
        self.updates: list[dict[str, Any]] = []
        """Rows of updates/1."""
        self.padding = 0
        """Slots without a token, out of all `slots` that this rank passed through the model."""
        self.slots = 0
        self.entropy_coef = config.entropy_coef
        """Coefficient of the next step, unless the target makes it 0; see terms.py."""
        self.last_entropy: float | None = None
        """Mean entropy over the tokens of the previous step, which may belong to an earlier
        training of this policy."""
        self.kl_coef = config.kl_coef
        """KL coefficient of the next step, in the reward too; see terms.py."""

    def _prepare_model(self, value_trunk: nn.Module | None) -> None:
        """Prepare critic, token budget, packing, dtypes, attention kernel and optimizer. Each needs
        the ones before it."""
        config = self.config
        sequences = self.batch.sequences
        value_head = None
        self.critic: nn.Module | None = None
        """The value head, together with its own trunk if it has one."""
        if self.algorithm.has_critic:
            width = self.model.get_output_embeddings().weight.shape[1]
            value_head = ValueHead(width).to(self.accelerator.device)
            self.critic = with_trunk(value_head, value_trunk)
            if config.value_coef == 0:
                self.critic.requires_grad_(False)  # it gives values and learns nothing
        self.policy = self.make_policy(
            self.model,
            autocast=self.precision == "bf16",
            value_head=value_head,
            value_trunk=value_trunk,
        )
        self.budget, self.recomputes = choose_budget(
            config,
            self.model,
            self.batch,
            self.precision,
            self.accelerator,
            has_critic=value_trunk is not None,
        )
        self.halvings = 0
        """How often memory ran out and halved the budget."""
        if self.recomputes:
            for trunk in filter(None, (self.model, value_trunk)):
                recompute_layers(trunk)
        self.mode = config.packing
        if self.batch.groups:
            self.mode = choose_mode(
                self.policy, sequences, self.batch.prompt_numbers, config.packing
            )
        narrow_for(config, self.precision, self.policy)
        self.policy.entropy_gradient = self.objective.has_entropy_bonus
        self.policy.fuse()  # after every change that moves weights in memory
        self.kernel = None
        """Attention kernel; None if nothing is passed through the model."""
        if self.active:
            self.kernel = self.within_memory(
                self.active,
                sequences,
                lambda microbatches: choose_kernel(self.policy, microbatches[0], sequences),
            )
        self.optimizer = make_optimizer(config, self.model, self.critic, step=self.step)
        modules = [self.policy] if value_trunk is None else [self.model, self.critic]
        self.clip_groups = [
            [p for p in module.parameters() if p.requires_grad] for module in modules
        ]
        """Parameters whose gradients are clipped by one norm; a critic with its own trunk is the
        last group."""

    # -- the loop

    @property
    def warming(self) -> bool:
        """True if only the critic learns in the next step, and every weight of the policy stays."""
        return self.algorithm.has_critic and self.step < self.config.critic_warmup_steps

    def prepare(self) -> None:
        """Compute what the first update needs: advantages of tokens, and the audit.

        The audit needs the logprobs of the policy that the training starts from:

        * If the algorithm `needs` a pass before the first step, that pass gives them, and all
          active rollouts are audited here.
        * Otherwise, if there are stale rollouts and an epoch has several steps, a pass of its own
          gives them here, also of all active rollouts. For the first mini-batch may hold only stale
          rollouts, of an older policy, which are measured and not judged.
        * Otherwise the first step's own pass gives them, before any weight changes. `train` then
          audits the rollouts of that mini-batch.

        Raises NumericError.
        """
        if not self.active:
            return
        audits = self.config.audit.enabled
        provided = self._first_pass() if self.algorithm.needs else {}
        if self.algorithm.advantage_of == "tokens":
            self.batch = critic.with_token_advantages(
                self.config, self.algorithm, self.batch, provided
            )
        if audits and provided:
            self.audit_report = audit(self.objective, self.batch, provided["logprobs"], self.active)
        elif audits and self.batch.has_stale and self.config.minibatches > 1:
            logprobs = self.compute_logprobs(self.active)
            self.audit_report = audit(self.objective, self.batch, logprobs, self.active)

    def _first_pass(self) -> dict[str, Tensor]:
        """Run one pass under the current policy, and return what `Algorithm.needs` may ask for."""
        sequences = self.batch.sequences
        sampled = torch.ones(len(self.batch.old_logprobs), dtype=torch.bool)
        cut = self.batch.cut & self.config.bootstrap_length
        if bool(cut.any()):
            # one more id a cut rollout, so that the pass also gives the value after its last token
            sequences, sampled = critic.with_next_state(sequences, cut)
        # Under this flag the policy puts each token's collision probability in place of entropy.
        self.policy.entropy_is_collision = True
        outputs = self._compute_outputs(self.active, sequences)
        self.policy.entropy_is_collision = False
        last_values = torch.zeros(len(cut))
        last_values[cut] = outputs.values[~sampled]
        return {
            "logprobs": outputs.logprobs[sampled],
            "values": outputs.values[sampled],
            "collisions": outputs.entropy[sampled],
            "last_values": last_values,
        }

    def train(self, progress: Progress | None = None) -> None:
        """Run all epochs, from the point that `progress` has saved. Raises NumericError if the
        audit fails or steps are not finite; nothing may be committed then."""
        first_epoch, first_minibatch, epoch_step = 0, 0, self.step
        if progress:
            first_epoch, first_minibatch, epoch_step = progress.load(self)
        for epoch in range(first_epoch, self.config.epochs):
            if epoch != first_epoch:
                first_minibatch, epoch_step = 0, self.step
            for minibatch, members in enumerate(self._members(epoch_step)):
                if minibatch >= first_minibatch:
                    self._train_minibatch(epoch, minibatch, members, progress)
                    if progress:
                        progress.step_done(self, epoch, minibatch + 1, epoch_step)
        if self.updates and not any(update["applied"] for update in self.updates):
            raise not_finite(
                self.batch,
                f"none of {len(self.updates)} optimizer steps had a finite loss and gradient",
            )
        if not bool(total_norm([p.detach() for p in self.parameters]).isfinite()):
            raise not_finite(self.batch, "a weight is not finite after the last step")
        if self.config.score_after and self.batch.groups:
            self.logprobs = self.compute_logprobs(range(len(self.batch.groups)))

    def _members(self, step: int) -> list[list[int]]:
        """Return the rollouts of each mini-batch of the epoch that begins with `step`. Groups are
        shuffled by seed and step, and stay whole."""
        num_groups = max(self.batch.groups, default=-1) + 1
        chance = torch.Generator().manual_seed((self.config.seed * 1_000_003 + step) % 2**63)
        order = torch.randperm(num_groups, generator=chance).tolist()
        shuffled = [order[group] for group in self.batch.groups]
        return minibatches(shuffled, self.config.minibatches)

    def free(self) -> None:
        """Free the memory of model, critic and moments; call it only after `train`."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.policy.free()

    def _train_minibatch(
        self, epoch: int, minibatch: int, members: list[int], progress: Progress | None
    ) -> None:
        """Take one optimizer step over rollouts `members`, unless none of them is passed through
        the model."""
        started = time.monotonic()
        trained = set(self.active)
        active = [row for row in members if row in trained]
        if not active:
            return
        update = {"step": self.step, "epoch": epoch, "minibatch": minibatch}
        # `accumulate` takes no micro-batches: it makes them itself, from the budget at that moment.
        update |= self.within_memory(
            active, self.batch.sequences, lambda _: self.accumulate(members, active)
        )
        if self.config.audit.enabled and not self.audit_report:  # see `prepare`
            self.audit_report = audit(self.objective, self.batch, self.logprobs, active)
        update |= self.apply(update)
        if progress and not update["applied"]:
            progress.not_finite(self, update, active)
        update["seconds"] = time.monotonic() - started
        self.updates.append(update)
        numbers = {name: number for name, number in update.items() if number is not None}
        self.accelerator.log(numbers, step=update["step"])
        log.info(
            "step %(step)d: loss %(loss).4f, grad_norm %(grad_norm).3f, approx_kl %(approx_kl).5f",
            update,
        )
        latest = self.updates[-MAX_SKIPPED:]
        if len(latest) == MAX_SKIPPED and not any(update["applied"] for update in latest):
            raise not_finite(
                self.batch,
                f"{MAX_SKIPPED} optimizer steps in a row had a loss or gradient that is not finite",
            )

    # -- passes through the model

    def _microbatches(self, rows: Sequence[int], sequences: Sequences) -> list[list[Piece]]:
        """Return all ranks' micro-batches, the longest first."""
        return self.policy.microbatches(rows, self.batch.prompt_numbers, sequences, self.budget)

    def within_memory(
        self, rows: Sequence[int], sequences: Sequences, passes: Callable[[list[list[Piece]]], T]
    ) -> T:
        """Return `passes` of all ranks' micro-batches of rollouts `rows`. If memory runs out, halve
        the budget and call it again, until each rollout has a micro-batch of its own.

        With several ranks there is no second try: the others already wait for this one's share of
        a sum, so the error is raised at once.
        """
        while True:
            try:
                return passes(self._microbatches(rows, sequences))
            except (RuntimeError, MemoryError) as error:
                divisible = [
                    sum(piece.tokens for piece in pieces)
                    for pieces in self._microbatches(rows, sequences)
                    if sum(len(piece.rows) for piece in pieces) > 1
                ]
                if not divisible or self.accelerator.num_processes > 1 or not says_no_memory(error):
                    raise
            # only here, after the error and its frames, are the tensors of the pass free
            torch.cuda.empty_cache()
            self.budget = max(divisible) // 2
            self.halvings += 1
            log.warning("memory is short: from now on micro-batches of %d tokens", self.budget)

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor.to(self.accelerator.device), "sum").cpu()

    def compute_logprobs(self, rows: Sequence[int]) -> Tensor:
        """Return the logprobs [N] of rollouts `rows` under the current policy, NaN elsewhere; equal
        on every rank."""
        places = self.batch.places(rows)
        logprobs = torch.full_like(self.logprobs, torch.nan)
        logprobs[places] = self._compute_outputs(rows, self.batch.sequences).logprobs[places]
        return logprobs

    def _compute_outputs(self, rows: Sequence[int], sequences: Sequences) -> Outputs:
        """Return the outputs for all completion tokens of `sequences`, 0 for rollouts outside
        `rows`; equal on every rank."""
        outputs = self.within_memory(
            rows,
            sequences,
            lambda microbatches: compute_outputs(
                self.policy, microbatches[self.rank_share], sequences
            ),
        )
        return Outputs(*self._sum_over_ranks(outputs))

    # -- one step

    def accumulate(self, members: list[int], active: list[int]) -> dict[str, Any]:
        """Sum the step's gradient over all micro-batches, and return the step's numbers.

        `members` count in the denominators; only `active` are passed through the model.
        """
        whole_step = self._step_columns(members, active)
        sequences = self.batch.sequences
        microbatches = self._microbatches(active, sequences)
        rank_microbatches = microbatches[self.rank_share]
        num_passes = len(rank_microbatches)
        device = self.accelerator.device
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
        log_ratio_max = torch.full((), -torch.inf, device=device)
        logprobs = torch.zeros_like(self.logprobs)
        finished = []
        last_line = time.monotonic()
        self.optimizer.zero_grad(set_to_none=True)

        def with_columns(layout: Layout) -> tuple[Layout, TokenColumns, StepColumns]:
            step_columns = whole_step.at(self.batch.places(layout.rows))
            return layout, self.batch.token_columns(layout.rows), step_columns

        with self.policy.context():
            ready = self.policy.layouts(rank_microbatches, sequences, with_columns)
            for number, (layout, token_columns, step_columns) in enumerate(ready, 1):
                # read nothing back before all passes are queued: reading waits for the GPU
                outputs = self.policy(layout, frozen=self.warming)
                loss, loss_sums, largest = self.objective.loss(token_columns, outputs, step_columns)
                loss.backward()
                sums += loss_sums
                log_ratio_max = torch.fmax(log_ratio_max, largest)
                finished.append((layout.rows, outputs.logprobs.detach(), layout.filling))
                if number < num_passes and time.monotonic() - last_line > _SECONDS_BETWEEN_LINES:
                    log.info("step %d: %d of %d micro-batches", self.step, number, num_passes)
                    last_line = time.monotonic()
        for rows, of_microbatch, (padding, slots) in finished:
            logprobs[self.batch.places(rows)] = of_microbatch.cpu()
            self.padding += padding
            self.slots += slots
        if self.accelerator.num_processes > 1:
            self._sum_gradients()
        places = self.batch.places(active)
        self.logprobs[places] = self._sum_over_ranks(logprobs)[places]
        return {
            **self.objective.numbers(self._sum_over_ranks(sums), places, self.warming, whole_step),
            "ratio_max": float(self.accelerator.gather(log_ratio_max.exp()[None]).max()),
            "tokens": len(places),
            "prompt_tokens": int(sequences.prompts.lengths[active].sum()),
            "rollouts": len(active),
            "microbatches": len(microbatches),
        }

    def _step_columns(self, members: list[int], active: list[int]) -> StepColumns:
        """Return the step's columns. With `entropy_share` below 1, a pass of its own computes the
        entropy of all its tokens first."""
        weights = self.objective.weights(self.batch, members)
        coef = terms.entropy_bonus(self.config, self.entropy_coef, self.last_entropy)
        columns = StepColumns(
            weights,
            entropy_coef=coef,
            kl_coef=self.kl_coef if self.objective.kl_in_loss else 0.0,
            nll_weights=terms.nll_weights(self.config, self.batch, members),
        )
        share = self.config.entropy_share
        if share == 1:
            return columns
        entropies = self._compute_outputs(active, self.batch.sequences).entropy
        places = self.batch.places(active)
        learns = torch.zeros(len(entropies), dtype=torch.bool)
        learns[places] = terms.uncertain(entropies[places], share)
        return replace(columns, learns=learns)

    def _sum_gradients(self) -> None:
        """Sum the step's gradient over ranks, in float32 for every weight dtype.

        A weight gets a gradient on all ranks if any rank has one: a rank may have had no
        micro-batch, or sent no token through an expert. While the critic warms up, only the
        critic's weights have one.
        """
        is_given = torch.tensor([parameter.grad is not None for parameter in self.parameters])
        num_given = self._sum_over_ranks(is_given.float()).tolist()
        for parameter, given in zip(self.parameters, num_given, strict=True):
            if given and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            if given:
                gradient = self.accelerator.reduce(parameter.grad.float(), "sum")
                parameter.grad = gradient.to(parameter.grad_dtype)

    def apply(self, update: Mapping[str, Any]) -> dict[str, Any]:
        """Clip the gradient and take the step if loss and gradient are finite. All ranks see the
        same numbers, so they decide alike."""
        rate = learning_rate(self.config, self.step)
        norms = [
            total_norm([p.grad for p in parameters if p.grad is not None])
            for parameters in self.clip_groups
        ]
        norm = norms[-1 if self.warming else 0]
        applied = math.isfinite(update["loss"]) and all(map(math.isfinite, norms))
        if applied:
            for parameters, group_norm in zip(self.clip_groups, norms, strict=True):
                torch.nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip, group_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group.get("scale", 1.0)
            self.optimizer.step()
            self.step += 1
            self.last_entropy = update["entropy"]
            self.entropy_coef = terms.next_entropy_coef(
                self.config, self.entropy_coef, self.last_entropy
            )
            self.kl_coef = terms.next_kl_coef(
                self.config, self.kl_coef, update["kl"], update["rollouts"]
            )
        else:
            log.warning(
                "step %d left out: loss %s, gradient norm %s",
                update["step"],
                update["loss"],
                float(norm),
            )
        return {"grad_norm": float(norm), "learning_rate": rate, "applied": applied}
