"""The policy as the trainer sees it: a micro-batch's layout in; for each completion token out one
logprob, one entropy and, with a value head, one value.

    policy = Policy(model, autocast=False)
    policy.set_mode("shared")              # or choose_mode(policy, …) of verify.py, which tries it
    microbatches = policy.microbatches(rows, prompt_numbers, sequences, budget)
    for layout in policy.layouts(microbatches, sequences):
        logprobs, entropy, values = policy(layout)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from quiver.stages.common.models.loading import decoder_start_id

from .attention import hidden_states, set_mode
from .cpu.projections import Group, casts, fuse_projections
from .cpu.recompute import recompute_norms_and_mlps
from .encoder_decoder import Pairs, decoder_states, make_pairs, pack_pairs
from .gpu.modules import fuse_modules
from .layout import Layout, Sequences, make_layout
from .logprob_head import Shaping, completion_logprobs
from .packing import Piece, make_pieces, pack
from .precision import products


class Policy(nn.Module):
    """A language model behind `forward(layout) -> logprobs [n], entropy [n], values [n] or None`,
    under bfloat16 autocast where asked (see precision.py).

    Causal and encoder-decoder models differ in their layout (`layout`, `microbatches`) and their
    hidden states alone. A value head, hidden states [n, d] -> values [n], reads the same hidden
    states as the output embedding, or those of `value_trunk`, another model of the same
    architecture.
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
        """The id that an encoder-decoder model's decoder reads first."""
        self.varlen = False
        """Attend by the kernel for sequences of any lengths; see `choose_kernel` in verify.py."""
        self.entropy_gradient = False
        """The entropy has a gradient too."""
        self.collision = False
        """Σ p² stands in place of the entropy; see `completion_logprobs`."""
        self.keeps_casts = True
        """Autocast keeps what it has cast."""
        self._projections: list[Group] = []

    @property
    def device(self) -> torch.device:
        return self.model.device

    def set_mode(self, mode: str) -> None:
        """`shared`, `packed` or `single`: see attention.py. An encoder-decoder model always attends
        in its own way."""
        for trunk in (self.model, self.value_trunk):
            if trunk is not None:
                set_mode(trunk, mode if self.is_causal else "single")
        self.mode = mode

    def fuse(self) -> None:
        """Fuse the projections that read the same input, on a GPU norms, MLPs and rotations too,
        and else recompute these in the backward pass; the weights must have their dtype and
        device."""
        self._projections = fuse_projections(self)
        with self.context():
            fuse_modules(self)
            recompute_norms_and_mlps(self)

    def free(self) -> None:
        """Give back the memory of weights and gradients; nothing can be computed after this."""
        for group in self._projections:
            group.free()
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.grad = None
            tensor.data = tensor.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            with suppress(AttributeError):  # not every C library has it
                ctypes.CDLL(None).malloc_trim(0)

    def layout(self, pieces: Sequence[Piece], sequences: Sequences) -> Layout | Pairs:
        """`pieces` as what `forward` reads, on the model's device."""
        if self.is_causal:
            return make_layout(pieces, sequences, self.device, varlen=self.varlen)
        return make_pairs(pieces, sequences, self.decoder_start_id, self.device)

    def layouts(
        self,
        microbatches: Sequence[Sequence[Piece]],
        sequences: Sequences,
        finish: Callable[[Layout | Pairs], Any] = lambda layout: layout,
    ) -> Iterator[Any]:
        """The layout of each micro-batch in turn, or what `finish` makes of it; while one is used,
        a thread makes the next and moves it to the device."""

        def make(pieces: Sequence[Piece]) -> Any:
            return finish(self.layout(pieces, sequences))

        with ThreadPoolExecutor(1) as thread:
            pending = None
            for pieces in microbatches:
                ready = pending
                pending = thread.submit(make, pieces)
                if ready:
                    yield ready.result()
            if pending:
                yield pending.result()

    def microbatches(
        self, rows: Sequence[int], prompt_numbers: Sequence[int], sequences: Sequences, budget: int
    ) -> list[list[Piece]]:
        """Rollouts `rows` as micro-batches of at most `budget` tokens; with `single` one rollout
        each. Rollouts with equal `prompt_numbers` have the same prompt ids."""
        if not self.is_causal and self.mode != "single":
            shared = prompt_numbers if self.mode == "shared" else range(len(prompt_numbers))
            return pack_pairs(rows, shared, sequences, budget)
        pieces = pieces_of(self.mode, rows, prompt_numbers, sequences, budget)
        return [[piece] for piece in pieces] if self.mode == "single" else pack(pieces, budget)

    @contextmanager
    def context(self) -> Iterator[None]:
        """The precision asked for, of backward passes too while it is held open. Over a whole step,
        autocast casts each weight once a step instead of once a pass."""
        with (
            products(self.device),
            casts(self._projections),
            torch.autocast(
                self.device.type,
                dtype=torch.bfloat16,
                enabled=self.autocast,
                cache_enabled=self.keeps_casts,
            ),
        ):
            yield

    def forward(
        self, layout: Layout | Pairs, *, frozen: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logprobs, entropy (without gradient, unless `entropy_gradient`) and values of the
        layout's targets. `frozen`: the values alone have a gradient, for the value head and a trunk
        of its own."""
        with self.context():
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                hidden = self._hidden(self.model, layout)
                logits_bias = getattr(self.model, "final_logits_bias", None)
                logprobs, entropy = completion_logprobs(
                    hidden,
                    self.model.get_output_embeddings(),
                    layout.targets,
                    layout.temperature,
                    self.shaping,
                    None if logits_bias is None else logits_bias.flatten(),
                    entropy_gradient=self.entropy_gradient and not self.collision,
                    collision=self.collision,
                )
            if self.value_head is None:
                return logprobs, entropy, None
            if self.value_trunk is not None:
                hidden = self._hidden(self.value_trunk, layout)
            return logprobs, entropy, self.value_head(hidden)

    def _hidden(self, trunk: nn.Module, layout: Layout | Pairs) -> Tensor:
        """[n, d] hidden states of `trunk` that predict the layout's targets."""
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
    """Rollouts `rows` as pieces: prompts joined when `mode` is `shared`, else one rollout each."""
    return make_pieces(
        rows,
        prompt_numbers if mode == "shared" else range(len(sequences.prompts)),
        sequences.prompts.lengths.tolist(),
        sequences.input_lengths.tolist(),
        budget,
    )


def token_budget(device: torch.device) -> int:
    """Tokens of one micro-batch where nobody said otherwise."""
    return 8192 if device.type == "cuda" else 2048


def score(policy: Policy, microbatches: Sequence[Sequence[Piece]], sequences: Sequences) -> Tensor:
    """[N] float32 logprobs of the completion tokens of the rollouts in `microbatches`, on the CPU;
    0 for the others."""
    return score_and_judge(policy, microbatches, sequences)[0]


@torch.no_grad()
def score_and_judge(
    policy: Policy, microbatches: Sequence[Sequence[Piece]], sequences: Sequences
) -> Tensor:
    """[3, N] float32: logprobs, values where the policy has a value head, and entropy; 0 where
    there is none, and for other rollouts."""
    scores = torch.zeros(3, int(sequences.completions.offsets[-1]))
    with policy.context():
        for layout in policy.layouts(microbatches, sequences):
            places = sequences.completions.positions(layout.rows)
            logprobs, entropy, values = policy(layout)
            scores[0, places] = logprobs.float().cpu()
            scores[2, places] = entropy.float().cpu()
            if values is not None:
                scores[1, places] = values.float().cpu()
    return scores
