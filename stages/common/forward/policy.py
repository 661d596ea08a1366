"""The policy as the trainer sees it: a micro-batch's layout in, one logprob and one entropy for
each completion token out.

`choose_mode` compares each way of packing with the model's own forward pass, one rollout at a time,
on a few of the real rollouts, and takes the fastest that agrees; so an architecture that the block
attention does not suit costs speed, never correctness.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import nn

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward.attention import (
    MODES,
    Layout,
    Sequences,
    hidden_states,
    make_layout,
    set_mode,
    single_hidden_states,
)
from quiver.stages.common.forward.cpu.projections import Merged, merge
from quiver.stages.common.forward.cpu.recompute import lean
from quiver.stages.common.forward.encoder_decoder import (
    Pairs,
    decoder_states,
    make_pairs,
    own_logits,
    pack_pairs,
)
from quiver.stages.common.forward.logprob_head import Shaping, completion_logprobs
from quiver.stages.common.forward.packing import Piece, make_pieces, pack
from quiver.stages.common.forward.precision import products
from quiver.stages.common.models.loading import decoder_start_id

_ENOUGH, _MOST = 16, 256
"""Completion tokens that a rollout of the comparison should have, and the most that are
compared."""
TOLERANCE = 2e-3
"""Nats: the largest difference in float32 between two ways of computing one logprob."""
log = logging.getLogger(__name__)


class Policy(nn.Module):
    """A language model behind `forward(layout) -> logprobs [n], entropy [n], values [n] or None`,
    under bfloat16 autocast or with fast products (see precision.py) where asked.

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
        fast: bool = False,
        value_head: nn.Module | None = None,
        value_trunk: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.model, self.autocast, self.fast, self.mode = model, autocast, fast, "single"
        self.value_head, self.value_trunk = value_head, value_trunk
        self.shaping = Shaping.of(model.config)
        self.start = decoder_start_id(model) if model.config.is_encoder_decoder else None
        self.varlen = False
        """Attend by the kernel for sequences of any lengths; see kernels.py."""
        self._merged: Merged | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    def set_mode(self, mode: str) -> None:
        """`shared`, `packed` or `single`: see attention.py. An encoder-decoder model always attends
        in its own way."""
        for trunk in (self.model, self.value_trunk):
            if trunk is not None:
                set_mode(trunk, mode if self.start is None else "single")
        self.mode = mode

    def merge(self) -> None:
        """Make one product of those that read the same input (see merged.py), and keep less for the
        backward pass (lean.py); the weights must have their dtype and device."""
        self._merged = merge(self)
        with self.context():
            lean(self)

    def free(self) -> None:
        """Give back the memory of weights and gradients; nothing can be computed after this."""
        if self._merged:
            self._merged.free()
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.grad, tensor.data = None, tensor.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            with suppress(AttributeError):  # not every C library has it
                ctypes.CDLL(None).malloc_trim(0)

    def layout(self, pieces: Sequence[Piece], data: Sequences) -> Layout | Pairs:
        """`pieces` as what `forward` reads, on the model's device."""
        if self.start is None:
            return make_layout(pieces, data, self.device, varlen=self.varlen)
        return make_pairs(pieces, data, self.start, self.device)

    def layouts(
        self, micros: Sequence[Sequence[Piece]], data: Sequences
    ) -> Iterator[Layout | Pairs]:
        """The layout of each micro-batch in turn; while one is used, a thread makes the next and
        moves it to the device."""
        with ThreadPoolExecutor(1) as thread:
            coming = None
            for micro in micros:
                before, coming = coming, thread.submit(self.layout, micro, data)
                if before:
                    yield before.result()
            if coming:
                yield coming.result()

    def microbatches(
        self, rows: Sequence[int], prompts: Sequence[int], data: Sequences, budget: int
    ) -> list[list[Piece]]:
        """Rollouts `rows` as micro-batches of at most `budget` tokens; with `single` one rollout
        each."""
        if self.start is not None and self.mode != "single":
            return pack_pairs(
                rows, prompts if self.mode == "shared" else range(len(prompts)), data, budget
            )
        pieces = pieces_of(self.mode, rows, prompts, data, budget)
        return [[piece] for piece in pieces] if self.mode == "single" else pack(pieces, budget)

    @contextmanager
    def context(self) -> Iterator[None]:
        """The precision asked for, of backward passes too while it is held open. Over a whole step,
        autocast casts each weight once a step instead of once a pass."""
        casts = self._merged.casts() if self._merged else nullcontext()
        with (
            products(self.device, fast=self.fast),
            casts,
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast),
        ):
            yield

    def forward(
        self, layout: Layout | Pairs, *, frozen: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`frozen`: the values alone have a gradient, for the value head and a trunk of its own."""
        with self.context():
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                hidden = self._hidden(self.model, layout)
                head, offset = (
                    self.model.get_output_embeddings(),
                    getattr(self.model, "final_logits_bias", None),
                )
                offset = None if offset is None else offset.flatten()
                found = completion_logprobs(
                    hidden, head, layout.targets, layout.temperature, self.shaping, offset
                )
            judged = hidden if self.value_trunk is None else self._hidden(self.value_trunk, layout)
            return *found, None if self.value_head is None else self.value_head(judged)

    def _hidden(self, trunk: nn.Module, layout: Layout | Pairs) -> torch.Tensor:
        if self.start is not None:
            return decoder_states(trunk, layout)
        return (single_hidden_states if self.mode == "single" else hidden_states)(trunk, layout)


def pieces_of(
    mode: str, rows: Sequence[int], prompts: Sequence[int], data: Sequences, budget: int
) -> list[Piece]:
    """Rollouts `rows` as pieces: prompts joined when `mode` is `shared`, else one rollout each."""
    keys = prompts if mode == "shared" else range(len(data.prompts))
    return make_pieces(
        rows, keys, data.prompts.lengths.tolist(), data.completions.lengths.tolist(), budget
    )


def token_budget(device: torch.device) -> int:
    """Tokens of one micro-batch where nobody said otherwise."""
    return 8192 if device.type == "cuda" else 2048


def score(policy: Policy, micros: Sequence[Sequence[Piece]], data: Sequences) -> torch.Tensor:
    """[N] float32 logprobs of the completion tokens of the rollouts in `micros`, on the CPU; 0 for
    the others."""
    return score_and_judge(policy, micros, data)[0]


@torch.no_grad()
def score_and_judge(
    policy: Policy, micros: Sequence[Sequence[Piece]], data: Sequences
) -> torch.Tensor:
    """[2, N] float32: logprobs, and values where the policy has a value head; 0 where there is
    none, and for other rollouts."""
    found = torch.zeros(2, int(data.completions.offsets[-1]))
    with policy.context():
        for layout in policy.layouts(micros, data):
            places = data.completions.positions(layout.rows)
            logprobs, _, values = policy(layout)
            found[0, places] = logprobs.float().cpu()
            if values is not None:
                found[1, places] = values.float().cpu()
    return found


@torch.no_grad()
def choose_mode(policy: Policy, data: Sequences, prompts: Sequence[int], wanted: str) -> str:
    """Set and return the first mode from `wanted` on whose logprobs agree with the model's own.
    ConfigError when none does.

    The comparison is in float32, whatever the precision of the passes to come; so weights must
    still be.
    """
    if wanted != "single" and policy.start is None and depends_on_length(policy.model.config):
        log.warning(
            "packing: the model's positions depend on the length of the row, so one rollout runs "
            "at a time"
        )
        wanted = "single"
    rows = _probe(data, prompts)
    asked = policy.autocast, policy.fast
    policy.autocast = policy.fast = False
    try:
        policy.set_mode("single")
        expected = [_reference(policy, data, row) for row in rows]
        for mode in MODES[MODES.index(wanted) :]:
            gap = _gap(policy, mode, data, prompts, rows, expected)
            if gap <= TOLERANCE:
                return mode
            log.warning(
                "packing %r is not right for this model (logprobs differ by %.4f); trying the next",
                mode,
                gap,
            )
    finally:
        policy.autocast, policy.fast = asked
    raise ConfigError(
        f"model {type(policy.model).__name__}",
        "its logprobs can not be reproduced from its last hidden state and output embedding: "
        f"they differ by {gap:.4f}",
        next="use an architecture whose logits are output_embedding(last hidden state), scaled or "
        "soft-capped at most",
    )


def _probe(data: Sequences, prompts: Sequence[int]) -> list[int]:
    """Up to three rollouts, as short as can be of those with enough tokens: two of one prompt where
    there are two, and one of another."""
    completions = data.completions.lengths.tolist()
    tokens = (data.prompts.lengths + data.completions.lengths).tolist()
    order = [
        (0, tokens[row]) if count >= _ENOUGH else (1, -count)
        for row, count in enumerate(completions)
    ]
    first: dict[int, list[int]] = {}
    for row in sorted(range(len(prompts)), key=order.__getitem__):
        first.setdefault(prompts[row], []).append(row)
    rich = max(first, key=lambda prompt: min(len(first[prompt]), 2))
    return [*first[rich][:2], *[rows[0] for prompt, rows in first.items() if prompt != rich][:1]]


def _gap(
    policy: Policy,
    mode: str,
    data: Sequences,
    prompts: Sequence[int],
    rows: list[int],
    expected: list,
) -> float:
    policy.set_mode(mode)
    pieces = pieces_of(mode, rows, prompts, data, 1 << 30)
    found = {}
    try:
        for group in [[piece] for piece in pieces] if mode == "single" else [pieces]:
            layout = policy.layout(group, data)
            parts = policy(layout)[0].split(
                [len(data.completions[row]) for row in layout.rows.tolist()]
            )
            found.update(zip(layout.rows.tolist(), parts, strict=True))
    except (NotImplementedError, TypeError) as error:
        log.warning("packing %r: %s", mode, error)
        return float("inf")
    gaps = [
        (found[row][: len(wanted)] - wanted).abs().max()
        for row, wanted in zip(rows, expected, strict=True)
    ]
    return float(
        torch.stack(gaps).detach().max()
    )  # NaN wherever it stands, which Python's max would drop


def _reference(policy: Policy, data: Sequences, row: int) -> torch.Tensor:
    """Logprobs of one rollout's first tokens, [_MOST] at most, from the logits that the whole model
    gives."""
    model = policy.model
    prompt, completion = (
        part[row].long().to(model.device) for part in (data.prompts, data.completions)
    )
    completion = completion[:_MOST]
    if policy.start is not None:
        logits = own_logits(model, prompt, completion, policy.start).float()
    else:
        ids = torch.cat([prompt, completion[:-1]])[None]
        logits = (
            model(input_ids=ids, use_cache=False, logits_to_keep=len(completion))
            .logits[0, -len(completion) :]
            .float()
        )
    return (logits / data.temperature[row]).log_softmax(-1).gather(1, completion[:, None])[:, 0]


def depends_on_length(config) -> bool:
    """Whether rotary frequencies change with the row's length, as in `dynamic` and `longrope`: a
    packed row is a longer one."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)]
    return any(kind in ("dynamic", "longrope") for kind in kinds)
