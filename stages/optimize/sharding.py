"""Training with sharded weights (torch's FSDP2): `optimize.shard = true`.

Each of n ranks holds one n-th of every weight, gradient and moment. A layer is whole only while it
computes.

    rank 0   rows 0 … 3 of each weight ─┐                                  ┌─ rows 0 … 3 of the
    rank 1   rows 4 … 7                 ├─ all, of one layer ─ gradient ───┤  gradient, summed
    rank 2   rows 8 … 9                ─┘  (in each pass)                  └─ over ranks, …

Input and output embedding are gathered by themselves, like a layer, unless they share their weight.
What is gathered is float32, as the probes of packing need it.

Every pass is an exchange in which all ranks take part, so a rank that has no micro-batch left runs
a pass with a gradient of 0. Gradients are summed in float32, not averaged, since each token's
weight is computed for the whole step. Policies, optimizer states and saved trainings are read and
written whole. Their format is the same as without sharding, for any number of ranks.

Not used here: fused projections and autocast's cache of cast weights, which would be a whole copy.

    trainer = ShardedTrainer(config, model, batch, algorithm, accelerator)
    trainer.prepare(); trainer.train(); trainer.gather(folder)    # then rank 0 saves as always

Reference: https://arxiv.org/abs/2304.11277.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from quiver.schemas.errors import ConfigError
from quiver.stages.model.forward.encoder_decoder import Pairs
from quiver.stages.model.forward.layout import Layout, Sequences
from quiver.stages.model.forward.modules import fuse_modules
from quiver.stages.model.forward.policy import Outputs, Policy
from quiver.stages.model.memory import layers_of, uses_of

from .optimizer import is_sharded
from .trainer import Trainer

_REGION_BYTES = 1 << 32
_ALIGNMENT = 64
T = TypeVar("T")
log = logging.getLogger(__name__)


class ShardedPolicy(Policy):
    """A policy whose weights are sharded over the ranks between passes. The model may be on a CPU,
    mapped from its files: each layer moves to the device when it is sharded."""

    def __init__(self, model: nn.Module, *, device: torch.device, **options: Any) -> None:
        """Shard the weights of `model`. Raises ConfigError if a weight cannot be sharded."""
        super().__init__(model, **options)
        self._device = device
        self._is_running = False
        self.keeps_casts = False
        self.given: set[str] = set()
        """Names of the parameters that got a gradient on this rank since the last step."""
        self._watched: set[nn.Parameter] = set()
        for name, parameter in self.named_parameters():
            if not parameter.ndim:
                raise ConfigError(
                    f"model {type(model).__name__}",
                    f"{name} is a single number, which has no rows to be sharded",
                    next="set optimize.shard = false",
                )
        trunks = [trunk for trunk in (model, self.value_trunk) if trunk is not None]
        layers = [layer for trunk in trunks for layer in layers_of(trunk)]
        if not layers:
            log.warning(
                "transformers names no layers of this model, so each pass gathers the whole model"
            )
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        in_layers = {module for layer in layers for module in layer.modules()}
        for unit in [*layers, *self._embeddings(trunks)]:
            self._place(unit.parameters())
            self._recompute(unit)
            fully_shard(unit, mesh=mesh)
        self._place(parameter for parameter in self.parameters() if not is_sharded(parameter))
        for module in self.modules():
            if module not in in_layers and not [*module.children()]:
                self._recompute(module)
        fully_shard(self, mesh=mesh, reshard_after_forward=True)
        for name, module in self.named_modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
                module.set_reduce_scatter_unused_params(True)  # another rank may have used them
                module.register_forward_pre_hook(partial(self.watch, f"{name}." if name else ""))
        # packing "single" calls the model itself, so that call must gather the weights too
        model_forward = model.forward

        def whole_pass(*arguments: Any, **named: Any) -> Any:
            call = partial(model_forward, *arguments, **named)
            return call() if self._is_running else self(call)

        model.forward = whole_pass

    def _embeddings(self, trunks: Sequence[nn.Module]) -> Iterator[nn.Module]:
        """Yield the input and output embeddings of `trunks` whose weight is used only there."""
        uses = uses_of(self)
        for trunk in trunks:
            for module in (trunk.get_input_embeddings(), trunk.get_output_embeddings()):
                if module is not None and uses[id(module.weight)] == 1:
                    yield module

    def _place(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = parameter.data.to(self._device, torch.float32)

    def _recompute(self, module: nn.Module) -> None:
        module.to(self._device)  # its buffers
        with self.context():
            fuse_modules(module)

    @property
    def device(self) -> torch.device:
        return self._device

    def fuse(self) -> None:
        """Do nothing: a layer's projections stay separate tensors while it is whole, and norms and
        MLPs are recomputed already."""

    def forward(self, layout: Layout | Pairs | partial, **options: Any) -> Any:
        """Run the policy's forward pass, or the call `layout` if it is a `partial`. The weights
        outside the layers are whole meanwhile."""
        self._is_running = True
        try:
            if isinstance(layout, partial):
                return layout()
            return super().forward(layout, **options)
        except Exception:
            self.reset_iter_state()  # the caller may try another packing after a failed one
            raise
        finally:
            self._is_running = False

    def read_head(self, head: nn.Module, read: Callable[[Tensor], T], hidden: Tensor) -> T:
        """Call `read` as the forward pass of `head`, so that its weights are whole meanwhile."""
        if not isinstance(head, FSDPModule):
            return read(hidden)
        forward = head.forward
        head.forward = read
        try:
            return head(hidden)
        finally:
            head.forward = forward

    def watch(self, prefix: str, module: nn.Module, arguments: object) -> None:
        """Add to `given`, from now on, the weights of `module` that get a gradient; they are whole
        in its pass."""
        for name, parameter in module.named_parameters():
            is_whole = parameter.requires_grad and not is_sharded(parameter)
            if is_whole and parameter not in self._watched:
                self._watched.add(parameter)
                full_name = prefix + name
                parameter.register_post_accumulate_grad_hook(
                    lambda _, full_name=full_name: self.given.add(full_name)
                )


class ShardedTrainer(Trainer):
    """The trainer with weights, gradients and moments sharded over the ranks."""

    step_rows: list[int]
    """Rollouts that the step passes through the model."""

    def _prepare_model(self, value_trunk: nn.Module | None) -> None:
        super()._prepare_model(value_trunk)
        turns = self.batch.sequences.turns
        if self.mode == "single" and turns is not None and len(turns.histories.values):
            raise ConfigError(
                f"model {type(self.model).__name__}",
                "runs one rollout at a time, and rollouts whose history was rewritten take several "
                "passes each: the ranks would need different numbers of passes",
                next="set optimize.shard = false",
            )

    def make_policy(self, model: nn.Module, **options: Any) -> Policy:
        return ShardedPolicy(model, device=self.accelerator.device, **options)

    def _run_along(self, rows: Sequence[int], sequences: Sequences, *, frozen: bool) -> None:
        """Run one more pass, with a gradient of 0, if this rank has one micro-batch of rollouts
        `rows` less than rank 0."""
        microbatches = self._microbatches(rows, sequences)
        num_ranks = self.accelerator.num_processes
        if self.accelerator.process_index < num_ranks - -len(microbatches) % num_ranks:
            return
        layout = self.policy.layout(microbatches[-1], sequences)
        outputs = self.policy(layout, frozen=frozen)
        outputs = [each for each in outputs if each is not None and each.requires_grad]
        torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])

    def _compute_outputs(self, rows: Sequence[int], sequences: Sequences) -> Outputs:
        with torch.no_grad():
            self._run_along(rows, sequences, frozen=False)
        return super()._compute_outputs(rows, sequences)

    def accumulate(self, members: list[int], active: list[int]) -> dict[str, Any]:
        self.step_rows = active
        return super().accumulate(members, active)

    def _sum_gradients(self) -> None:
        """Finish the step's gradients, which the backward passes have summed already. A weight that
        got no gradient on any rank has None, not 0: a step would decay its moments."""
        self._run_along(self.step_rows, self.batch.sequences, frozen=self.warming)
        names = [name for name, p in self.policy.named_parameters() if p.requires_grad]
        is_given = torch.tensor([name in self.policy.given for name in names])
        num_given = self._sum_over_ranks(is_given.float()).tolist()
        for parameter, given in zip(self.parameters, num_given, strict=True):
            if not given:
                parameter.grad = None
        self.policy.given.clear()

    def agree(self, is_time: bool) -> bool:
        """Return the first rank's `is_time`."""
        answer = torch.tensor([is_time and self.accelerator.is_main_process])
        return bool(self._sum_over_ranks(answer.float()))

    def copies(self, tensors: Mapping[str, Tensor], room: Path | None) -> dict[str, Tensor]:
        files = Room(room)
        return {name: files.copy(tensor) for name, tensor in tensors.items()}

    def gather(self, room: Path | None) -> None:
        """Make model, critic and moments whole on rank 0, which saves them; the other ranks lose
        theirs. Nothing can be computed after this."""
        files = Room(room)
        whole: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                module.__class__ = type(module).__mro__[2]  # the class before fully_shard
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in whole:
                    whole[parameter] = nn.Parameter(files.copy(parameter), parameter.requires_grad)
                    moments = self.optimizer.state.pop(parameter, {})
                    if self.config.save_optimizer:
                        copies = {key: files.copy(moment) for key, moment in moments.items()}
                        self.optimizer.state[whole[parameter]] = copies
                module._parameters[name] = whole[parameter]


class Room:
    """An unnamed file on rank 0 that holds whole tensors. It is freed with the last of them, or
    when the process dies.

    The kernel writes its pages out and reads them again, so it needs disk, not memory.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder`: where the file is made, created if absent; None on ranks that only send their
        rows."""
        if folder is not None:
            folder.mkdir(exist_ok=True)
        self._file = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._end = 0
        """End of the mapped part of the file, in bytes."""
        self._pages: mmap.mmap | None = None
        """The last mapped region. Each region holds a file open, so one for each tensor would be
        too many."""
        self._used = 0
        """Bytes used in the last region."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Return all of `tensor`, in CPU memory backed by the file; an empty tensor on a rank
        without a file. Every rank calls this, for the same tensors in the same order. Raises
        OSError if the disk is full."""
        whole = tensor.detach()
        if is_sharded(whole):
            whole = whole.full_tensor()
        if self._file is None:
            return torch.empty(0, dtype=tensor.dtype)
        if not whole.numel() or not whole.ndim:
            return whole.to("cpu", copy=True)
        if self._pages is None or self._used + whole.nbytes > len(self._pages):
            pages = -(-max(whole.nbytes, _REGION_BYTES) // mmap.ALLOCATIONGRANULARITY)
            size = pages * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self._file.fileno(), self._end + size)
            self._pages = mmap.mmap(self._file.fileno(), size, offset=self._end)
            self._end += size
            self._used = 0
        # reserve the disk first: writing a mapped page to a full disk kills the process
        start = self._end - len(self._pages) + self._used
        os.posix_fallocate(self._file.fileno(), start, whole.nbytes)
        copy = torch.frombuffer(
            self._pages, dtype=whole.dtype, count=whole.numel(), offset=self._used
        )
        self._used += -(-whole.nbytes // _ALIGNMENT) * _ALIGNMENT
        return copy.view(whole.shape).copy_(whole)
