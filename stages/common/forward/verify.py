"""Checks on real rollouts, before a stage relies on them: the packing and the attention kernel.

`choose_mode` asks `judge` (architecture.py) which ways of packing suit the architecture. It
compares them on real rollouts with the model's own forward pass, one rollout at a time, and takes
the fastest that agrees. So an architecture that block attention does not suit costs speed, never
correctness.

`choose_kernel` may replace torch's fused kernels on blocks by one kernel for sequences of any
lengths. This needs a GPU, bfloat16, a build with the kernel, and agreement with attention in
float32 on the real inputs of the first micro-batch. No timing decides, so two runs use the same
kernel. In all other cases attention uses blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.models.folder import says_no_memory

from .architecture import FAILURES, judge, own_logprobs, turn_logprobs
from .attention import MODES, NAME, block_attention
from .layout import Layout, Sequences, make_layout
from .packing import Piece
from .policy import Policy, score
from .precision import layers_in_float32

TOLERANCE = 2e-3
"""Largest difference, in nats, in float32 between two ways of computing one logprob."""
_ENOUGH_TOKENS = 16
"""Completion tokens that a compared rollout should have."""
_MOST_TOKENS = 256
"""Most completion tokens of a rollout that are compared."""
_KERNEL_TOLERANCE = 0.02
"""Largest error of an output or gradient, as a share of its norm: bfloat16's own error is near
0.005, a wrong key gives far more."""
log = logging.getLogger(__name__)


# -- the packing


@torch.no_grad()
def choose_mode(
    policy: Policy, sequences: Sequences, prompt_numbers: Sequence[int], preferred: str
) -> str:
    """Set and return the first mode from `preferred` on that gives the model's own logprobs.

    The comparison is in float32, in every precision of later passes, so call it before `narrow`
    rounds the weights. Raises ConfigError if no mode agrees.
    """
    verdict = judge(policy.model.config)
    verdict.require(f"model {type(policy.model).__name__}")
    if MODES.index(preferred) < MODES.index(verdict.mode):
        log.warning("packing %r is not used: %s", preferred, verdict.reason)
        preferred = verdict.mode
    if preferred != "single" and policy.is_causal and depends_on_length(policy.model.config):
        log.warning(
            "packing: the model's positions depend on the length of the row, so one rollout runs "
            "at a time"
        )
        preferred = "single"
    rows = _probe(sequences, prompt_numbers)
    prompt_numbers = [prompt_numbers[row] for row in rows]
    sequences = sequences.take(rows)
    autocast = policy.autocast
    policy.autocast = False
    try:
        policy.set_mode("single")
        with layers_in_float32(policy.model):
            with _forward_errors(policy.model):
                expected = [_own_logprobs(policy, sequences, row).cpu() for row in range(len(rows))]
            for mode in MODES[MODES.index(preferred) :]:
                gap = largest_gap(policy, mode, sequences, prompt_numbers, expected)
                if gap <= TOLERANCE:
                    return mode
                log.warning(
                    "packing %r is not right for this model (logprobs differ by %.4f); "
                    "trying the next",
                    mode,
                    gap,
                )
    finally:
        policy.autocast = autocast
    raise ConfigError(
        f"model {type(policy.model).__name__}",
        "its logprobs cannot be reproduced from its last hidden state and output embedding: "
        f"they differ by {gap:.4f}",
        next="use an architecture whose logits are output_embedding(last hidden state), scaled or "
        "soft-capped at most",
    )


def _own_logprobs(policy: Policy, sequences: Sequences, row: int) -> Tensor:
    """Return logprobs of the first tokens of rollout `row`, by the model's own pass over it."""
    completion = sequences.completions[row][:_MOST_TOKENS]
    temperature = float(sequences.temperature[row])
    pictures = sequences.pictures
    if pictures is not None:
        # stop before a sampled picture id: the model would take it for a picture's position
        sampled = (completion == pictures.token).nonzero()[:, 0].tolist()
        completion = completion[: sampled[0] if sampled else None]
    if not len(completion):
        return torch.empty(0)
    if sequences.turns is None:
        return own_logprobs(
            policy.model,
            sequences.prompts[row],
            completion,
            temperature,
            policy.decoder_start_id,
            pictures and pictures.of_rollout(row, policy.device),
        )
    return turn_logprobs(policy.model, sequences, row, completion, temperature)


@contextmanager
def _forward_errors(model: nn.Module) -> Iterator[None]:
    """Convert errors of modeling code at plain rows of text into ConfigError about the model."""
    try:
        yield
    except FAILURES as error:
        if says_no_memory(error):
            raise
        raise ConfigError(
            f"model {type(model).__name__}",
            f"its forward pass over one row of ids fails: {type(error).__name__}: "
            f"{printable(error)}",
            next="name a causal language model",
        ) from error


def depends_on_length(config) -> bool:
    """True if rotary frequencies change with the row's length, as with `dynamic` and `longrope`;
    packing makes rows longer."""
    kinds = [rope.get("rope_type") for rope in _rotations(config)]
    return "dynamic" in kinds or "longrope" in kinds


def most_tokens_alike(config) -> int | None:
    """Return the most tokens of a row that `longrope` treats like every shorter row.

    Returns None if there is no such limit. `dynamic` changes only beyond the context's end, which
    no row reaches.
    """
    limits = [
        rope.get("original_max_position_embeddings")
        for rope in _rotations(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(filter(None, limits), default=None)


def _rotations(config) -> list[dict[str, Any]]:
    """Return the rotary parameters: one set for all layers, or one for each kind of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope for rope in [parameters, *parameters.values()] if isinstance(rope, dict)]


def _probe(sequences: Sequences, prompt_numbers: Sequence[int]) -> list[int]:
    """Return up to three rollouts, the shortest that have enough tokens: two of one prompt if
    possible, and one of another."""
    completion_tokens = sequences.completions.lengths.tolist()
    tokens = (sequences.prompts.lengths + sequences.input_lengths).tolist()

    def preference(row: int) -> tuple[int, int]:
        if completion_tokens[row] >= _ENOUGH_TOKENS:
            return 0, tokens[row]
        return 1, -completion_tokens[row]

    rows_of: dict[int, list[int]] = {}
    for row in sorted(range(len(prompt_numbers)), key=preference):
        rows_of.setdefault(prompt_numbers[row], []).append(row)
    prompt = max(rows_of, key=lambda prompt: min(len(rows_of[prompt]), 2))
    rows = rows_of.pop(prompt)[:2]
    rows_of_another = next(iter(rows_of.values()), [])
    return rows + rows_of_another[:1]


def largest_gap(
    policy: Policy,
    mode: str,
    sequences: Sequences,
    prompt_numbers: Sequence[int],
    expected: list[Tensor],
) -> float:
    """Return the largest difference between logprobs by `mode` and `expected`.

    `expected` has the logprobs of the first tokens of each rollout of `sequences`. Returns infinity
    if the mode does not run.
    """
    policy.set_mode(mode)
    microbatches = policy.microbatches(range(len(expected)), prompt_numbers, sequences, 1 << 30)
    try:
        logprobs = sequences.completions.with_values(score(policy, microbatches, sequences))
    except FAILURES as error:
        if says_no_memory(error):
            raise
        log.warning("packing %r: %s", mode, error)
        return float("inf")
    gaps = [
        (packed_logprobs[: len(own_logprobs)] - own_logprobs).abs().max()
        for packed_logprobs, own_logprobs in zip(logprobs, expected, strict=True)
        if len(own_logprobs)
    ]
    if not gaps:
        log.warning("packing %r cannot be tried: each completion begins with a picture's id", mode)
        return 0.0
    # torch's max propagates NaN, which Python's max could drop
    return float(torch.stack(gaps).max())


# -- the kernel


@dataclass(frozen=True)
class Call:
    """Arguments of one attention call in a layer: queries [1, H, N, e], keys and values
    [1, h, N, e], and the options."""

    states: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]


def choose_kernel(policy: Policy, pieces: Sequence[Piece], sequences: Sequences) -> str:
    """Set and return the kernel of the policy's passes.

    The result is `blocks`, `varlen`, or `model` if the model attends in its own way. If gradients
    are enabled, the backward pass is checked too. `pieces` are one micro-batch.
    """
    policy.varlen = False
    if policy.mode == "single" or not policy.is_causal:
        return "model"
    if policy.device.type != "cuda":
        return "blocks"
    layout = make_layout(pieces, sequences, policy.device, varlen=True)
    with policy.context():
        with torch.no_grad(), recorded() as calls:
            policy(replace(layout, runs=None))
        policy.varlen = varlen_is_right(list(calls.values()), layout)
    return "varlen" if policy.varlen else "blocks"


@contextmanager
def recorded() -> Iterator[dict[tuple, Call]]:
    """Record, inside the context, the first call of block attention of each kind."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: dict[tuple, Call] = {}

    def record(module, queries, keys, values, attention_mask, *, layout, **options):
        states = queries.detach(), keys.detach(), values.detach()
        shapes = tuple(tensor.shape for tensor in states)
        kind = shapes, options.get("sliding_window"), options.get("scaling")
        calls.setdefault(kind, Call(states, options))
        return block_attention(
            module, queries, keys, values, attention_mask, layout=layout, **options
        )

    ALL_ATTENTION_FUNCTIONS.register(NAME, record)
    try:
        yield calls
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, block_attention)


def varlen_is_right(calls: Sequence[Call], layout: Layout) -> bool:
    """True if the kernel for any lengths runs here and is right in each of `calls`; `layout` must
    have runs."""
    if any(call.states[2].dtype != torch.bfloat16 for call in calls):
        return False
    try:
        for call in calls:
            error = _varlen_error(call, layout)
            if not error <= _KERNEL_TOLERANCE:  # written so that NaN fails too
                log.warning(
                    "attention: varlen is wrong here by %.3f of the norm; using blocks", error
                )
                return False
    except Exception as error:  # Triton, its compilers and the driver raise many types
        if says_no_memory(error):
            raise
        log.warning("attention: varlen does not run here (%s); using blocks", error)
        return False
    return True


def _varlen_error(call: Call, layout: Layout) -> float:
    """Return the largest difference of output and gradients from blocks in float32, as a share of
    the norm."""
    narrow = tuple(states.to(torch.bfloat16) for states in call.states)
    wide = tuple(states.float() for states in narrow)
    outputs = _pass(Call(narrow, call.options), layout)
    with torch.autocast(wide[0].device.type, enabled=False):
        exact = _pass(Call(wide, call.options), replace(layout, runs=None))
    errors = [
        (output.float() - expected).norm() / expected.norm()
        for output, expected in zip(outputs, exact, strict=True)
    ]
    return float(torch.stack(errors).max())


def _pass(call: Call, layout: Layout) -> list[Tensor]:
    """Return the output and, if gradients are enabled, the gradients of the states, for the same
    random output gradient each time."""
    with_gradients = torch.is_grad_enabled()
    leaves = [states.detach().requires_grad_(with_gradients) for states in call.states]
    output, _ = block_attention(None, *leaves, None, layout=layout, **call.options)
    if not with_gradients:
        return [output]
    generator = torch.Generator(output.device).manual_seed(0)
    grad = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]
