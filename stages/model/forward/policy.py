"""The policy as the trainer sees it: a layout in; logprobs, entropy and values out, per token.

policy = Policy(model, autocast=False)
policy.set_mode("shared")              # or choose_mode(policy, …) of verify.py, which tries it
microbatches = policy.microbatches(rows, prompt_numbers, sequences, budget)
for layout in policy.layouts(microbatches, sequences):
    logprobs, entropy, values = policy(layout)     # values: None without a value head

Not of the spine: `layout` draws the rows, and the rest is the model's own forward pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from quiver.stages.model.loading import decoder_start_id

from .attention import hidden_states, set_mode
from .encoder_decoder import Pairs, decoder_states, make_pairs, pack_pairs
from .gpu.flash import implemented_by
from .layout import Layout, Sequences, make_layout
from .logprob_head import Shaping, completion_logprobs
from .modules import fuse_modules
from .packing import Piece, make_pieces, pack
from .precision import products
from .projections import Group, casts, fuse_projections
from .transfer import to_device

T = TypeVar("T")


class Outputs(NamedTuple):
    """What a pass gives for the completion tokens, [n] each."""

    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution that the token is drawn from; its collision probability Σ p² if
    `Policy.entropy_is_collision`."""
    values: Tensor | None
    """None without a value head."""


class Policy(nn.Module):
    """A language model behind `forward(layout) -> Outputs` of the layout's targets.

    If `autocast`, it runs under bfloat16 autocast (see precision.py). Causal and encoder-decoder
    models differ only in their layout (`layout`, `microbatches`) and their hidden states. A value
    head, hidden states [n, d] -> values [n], reads the same hidden states as the output embedding,
    or the hidden states of `value_trunk`, another model of the same architecture.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        autocast: bool,
        value_head: nn.Module | None = None,
        value_trunk: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.value_head = value_head
        self.value_trunk = value_trunk
        self.autocast = autocast
        self.mode = "single"
        self.shaping = Shaping.of(model.config)
        self.is_causal = not model.config.is_encoder_decoder
        self.decoder_start_id = None if self.is_causal else decoder_start_id(model)
        """Id that an encoder-decoder model's decoder reads first."""
        self.kernel = "blocks"
        """Attend over blocks, or by the kernel for sequences of any lengths with this name
        (`choose_kernel`)."""
        self.entropy_gradient = False
        """If true, the entropy has a gradient too."""
        self.entropy_is_collision = False
        """If true, `Outputs.entropy` holds Σ p² instead; see `completion_logprobs`."""
        self.keeps_casts = True
        """If true, each weight is cast once in a step; else in each pass, and casts take no memory
        between passes."""
        self._projections: list[Group] = []

    @property
    def device(self) -> torch.device:
        return self.model.device

    def set_mode(self, mode: str) -> None:
        """Set the mode `shared`, `packed` or `single` (see attention.py). An encoder-decoder model
        always attends in its own way."""
        for trunk in (self.model, self.value_trunk):
            if trunk is not None:
                set_mode(trunk, mode if self.is_causal else "single")
        self.mode = mode

    def fuse(self) -> None:
        """Fuse projections that read the same input, and make norms and MLPs cheaper.

        On a GPU, kernels replace norms, MLPs and rotations. Otherwise norms and MLPs are recomputed
        in the backward pass. The weights must have their final dtype and device.
        """
        self._projections = fuse_projections(self)
        with self.context():
            fuse_modules(self)

    def free(self) -> None:
        """Release the memory of weights and gradients; the policy is unusable afterwards."""
        for group in self._projections:
            group.free()
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.grad = None
            tensor.data = tensor.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            with suppress(AttributeError):  # not every C library has malloc_trim
                ctypes.CDLL(None).malloc_trim(0)

    def layout(
        self,
        pieces: Sequence[Piece],
        sequences: Sequences,
        finish: Callable[[Layout | Pairs], Any] = lambda layout: layout,
    ) -> Any:
        """Lay out `pieces` for `forward`, and move the result of `finish` for the layout to the
        model's device, by one copy. By default the result is the layout itself."""
        if self.is_causal:
            layout = make_layout(pieces, sequences, varlen=self.kernel != "blocks")
        else:
            layout = make_pairs(pieces, sequences, self.decoder_start_id)
        return to_device(finish(layout), self.device)

    def layouts(
        self,
        microbatches: Sequence[Sequence[Piece]],
        sequences: Sequences,
        finish: Callable[[Layout | Pairs], Any] = lambda layout: layout,
    ) -> Iterator[Any]:
        """Yield the `layout` of each micro-batch in turn.

        While one is used, a thread makes the next and moves it to the device.
        """
        with ThreadPoolExecutor(1) as thread:
            pending = None
            for pieces in microbatches:
                ready = pending
                pending = thread.submit(self.layout, pieces, sequences, finish)
                if ready:
                    yield ready.result()
            if pending:
                yield pending.result()

    def microbatches(
        self, rows: Sequence[int], prompt_numbers: Sequence[int], sequences: Sequences, budget: int
    ) -> list[list[Piece]]:
        """Pack rollouts `rows` into micro-batches of at most `budget` tokens; `single` gives one
        rollout each. Rollouts with equal `prompt_numbers` have the same prompt ids."""
        if not self.is_causal and self.mode != "single":
            shared = prompt_numbers if self.mode == "shared" else range(len(prompt_numbers))
            return pack_pairs(rows, shared, sequences, budget)
        pieces = pieces_of(self.mode, rows, prompt_numbers, sequences, budget)
        return [[piece] for piece in pieces] if self.mode == "single" else pack(pieces, budget)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Set the policy's precision and its kernel, for backward passes too while it is open.

        Held open over a whole step, it makes autocast cast each weight once per step instead of
        once per pass.
        """
        with (
            products(self.device),
            implemented_by(self.kernel),
            casts(self._projections if self.keeps_casts else ()),
            torch.autocast(
                self.device.type,
                dtype=torch.bfloat16,
                enabled=self.autocast,
                cache_enabled=self.keeps_casts,
            ),
        ):
            yield

    def forward(self, layout: Layout | Pairs, *, frozen: bool = False) -> Outputs:
        """Return the outputs for the layout's targets.

        The entropy has no gradient unless `entropy_gradient`. If `frozen`, only the values have a
        gradient, for the value head and a trunk of its own.
        """
        with self.context():
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                hidden = self._hidden(self.model, layout)
                logits_bias = getattr(self.model, "final_logits_bias", None)
                head = self.model.get_output_embeddings()
                read = partial(
                    completion_logprobs,
                    head=head,
                    targets=layout.targets,
                    temperature=layout.temperature,
                    shaping=self.shaping,
                    offset=None if logits_bias is None else logits_bias.flatten(),
                    entropy_gradient=self.entropy_gradient and not self.entropy_is_collision,
                    collision=self.entropy_is_collision,
                )
                logprobs, entropy = self.read_head(head, read, hidden)
            if self.value_head is None:
                return Outputs(logprobs, entropy, None)
            if self.value_trunk is not None:
                hidden = self._hidden(self.value_trunk, layout)
            return Outputs(logprobs, entropy, self.value_head(hidden))

    def read_head(self, head: nn.Module, read: Callable[[Tensor], T], hidden: Tensor) -> T:
        """Return `read(hidden)`, which reads the weights of the output embedding `head`."""
        return read(hidden)

    def _hidden(self, trunk: nn.Module, layout: Layout | Pairs) -> Tensor:
        """Return [n, d] hidden states of `trunk` that predict the layout's targets."""
        if self.is_causal:
            return hidden_states(trunk, layout, single=self.mode == "single")
        return decoder_states(trunk, layout)


def pieces_of(
    mode: str,
    rows: Sequence[int],
    prompt_numbers: Sequence[int],
    sequences: Sequences,
    budget: int,
) -> list[Piece]:
    """Return rollouts `rows` as pieces: prompts joined if `mode` is `shared`, else one each."""
    return make_pieces(
        rows,
        prompt_numbers if mode == "shared" else range(len(sequences.prompts)),
        sequences.prompts.lengths.tolist(),
        sequences.input_lengths.tolist(),
        budget,
    )


def compute_logprobs(
    policy: Policy, microbatches: Sequence[Sequence[Piece]], sequences: Sequences
) -> Tensor:
    """Return [N] float32 logprobs of the completion tokens of the rollouts in `microbatches`, on
    the CPU; 0 for other rollouts."""
    return compute_outputs(policy, microbatches, sequences)[0]


@torch.no_grad()
def compute_outputs(
    policy: Policy, microbatches: Sequence[Sequence[Piece]], sequences: Sequences
) -> Tensor:
    """Return [3, N] float32 on the CPU, with one row for each of `Outputs`, in its order.

    Values are 0 without a value head; all three are 0 for other rollouts.
    """
    outputs = torch.zeros(3, int(sequences.completions.offsets[-1]))
    with policy.context():
        # read nothing back before all passes are queued: reading waits for the GPU
        finished = [
            (layout.rows, policy(layout)) for layout in policy.layouts(microbatches, sequences)
        ]
    for rows, of_microbatch in finished:
        places = sequences.completions.places(rows)
        for row, output in zip(outputs, of_microbatch, strict=True):
            if output is not None:
                row[places] = output.float().cpu()
    return outputs
