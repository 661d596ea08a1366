"""Checks on real rollouts, before a stage relies on them: the packing and the attention kernel.

`choose_mode` takes the ways of packing that suit the model's family (../families.py), compares
them on real rollouts with the model's own forward pass, one rollout at a time, and takes the
fastest that agrees. So a model that block attention does not suit costs speed, never correctness.

`choose_kernel` may replace torch's fused kernels on blocks by one kernel for sequences of any
lengths. This needs a GPU, bfloat16, a build with the kernel, and agreement with attention in
float32 on the real inputs of the first micro-batch. FlashAttention 3 and 4 are tried before
torch's own, if they are installed. No timing decides, so two runs use the same kernel. In all other
cases attention uses blocks.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.model.families import MODES, fastest_mode
from quiver.stages.model.folder import says_no_memory
from quiver.stages.model.ragged import Ragged
from quiver.stages.model.turns import after_prompts

from .attention import NAME, block_attention
from .gpu.flash import IMPLEMENTATIONS, implemented_by
from .layout import Layout, Sequences, make_layout
from .packing import Piece
from .policy import Policy, compute_logprobs
from .precision import layers_in_float32
from .transfer import to_device

TOLERANCE = 2e-3
"""Largest difference, in nats, in float32 between two ways of computing one logprob."""
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that modeling code raises at inputs it is not made for."""
_LATER_TOLERANCE = 0.02
"""Largest mean difference of logprobs, in nats, if the later half of a rollout is cut off."""
_ENOUGH_TOKENS = 16
"""Completion tokens that a compared rollout should have."""
_MOST_TOKENS = 256
"""Most completion tokens of a rollout that are compared."""
_PROBED_TOKENS = 512
"""Most tokens of a prompt, and of a completion, on which the kernel is tried."""
KERNELS = (*IMPLEMENTATIONS, "varlen")
"""Kernels for sequences of any lengths, in the order in which they are tried; `varlen` is torch's
own."""
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

    Modes that do not suit the model's family are left out. The comparison is in float32, in every
    precision of later passes, so call it before `narrow` rounds the weights.

    Raises:
        ConfigError: No mode agrees, the model's own pass fails, or it reads later tokens.
    """
    title = f"model {type(policy.model).__name__}"
    fastest, reason = fastest_mode(policy.model.config)
    if MODES.index(preferred) < MODES.index(fastest):
        log.warning("packing %r is not used: %s", preferred, reason)
        preferred = fastest
    rows = _probe(sequences, prompt_numbers)
    prompt_numbers = [prompt_numbers[row] for row in rows]
    sequences = sequences.take(rows)
    autocast = policy.autocast
    policy.autocast = False
    try:
        policy.set_mode("single")
        with layers_in_float32(policy.model):
            try:
                counts = _comparable(sequences)
                expected = [own_logprobs(policy, sequences, *pair) for pair in enumerate(counts)]
                longest = counts.index(max(counts))
                half = own_logprobs(policy, sequences, longest, (counts[longest] + 1) // 2)
            except FAILURES as error:
                if says_no_memory(error):
                    raise
                raise ConfigError(
                    title,
                    f"its forward pass over one row of ids fails: {type(error).__name__}: "
                    f"{printable(error)}",
                    next="name a causal language model",
                ) from error
            # on average, since rounding may send single tokens to other experts
            gap = float((half - expected[longest][: len(half)]).abs().mean())
            if gap > _LATER_TOLERANCE:
                raise ConfigError(
                    title,
                    "a token's logprob depends on later tokens",
                    next="name a causal language model",
                )
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
        title,
        "its logprobs cannot be reproduced from its last hidden state and output embedding: "
        f"they differ by {gap:.4f}",
        next="use an architecture whose logits are output_embedding(last hidden state), scaled or "
        "soft-capped at most",
    )


def _comparable(sequences: Sequences) -> list[int]:
    """Return how many tokens of each rollout are compared.

    A sampled picture id ends them: the model's own pass would take it for a picture's position.
    """
    counts = []
    for row in sequences.completions:
        completion = row[:_MOST_TOKENS]
        if sequences.media is not None:
            tokens = torch.tensor(sequences.media.tokens).to(completion)
            sampled = torch.isin(completion, tokens).nonzero()
            completion = completion[: sampled[0, 0] if len(sampled) else None]
        counts.append(len(completion))
    return counts


def own_logprobs(policy: Policy, sequences: Sequences, row: int, count: int) -> Tensor:
    """Return [count] float32 logprobs of the first ids of rollout `row`, on the CPU, by the model's
    own forward pass over each of its sequences alone."""
    model = policy.model
    completion = sequences.completions[row][:count].long().to(model.device)
    prompt = sequences.prompts[row].long().to(model.device)
    if not count:
        return torch.empty(0)
    if not policy.is_causal:
        start = torch.tensor([policy.decoder_start_id], device=model.device)
        inputs = torch.cat([start, completion[:-1]])[None]
        # without masks, some models treat ids equal to the pad id as padding
        logits = model(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            decoder_input_ids=inputs,
            decoder_attention_mask=torch.ones_like(inputs),
            use_cache=False,
        ).logits[0]
    else:
        after = after_prompts(sequences.completions, sequences.turns, np.array([row]))
        ids = torch.cat([prompt, torch.tensor(after.ids[0]).to(prompt)])
        predictors = torch.from_numpy(after.predictors[:count]).to(prompt) + len(prompt)
        starts = [0, *(after.restarts + len(prompt)).tolist(), len(ids)]
        tables = []
        for start, end in itertools.pairwise(starts):
            places = predictors[(start <= predictors) & (predictors < end)] - start
            if len(places):
                read = ids[None, start : start + int(places.max()) + 1]
                options = {"use_cache": False, "logits_to_keep": places}
                if start == 0 and sequences.media is not None:
                    num_read = read.shape[1] - len(prompt)
                    options |= sequences.media.of_rollout(row, model.device, len(prompt), num_read)
                table = model(input_ids=read, **options).logits[0]
                # some models give all logits all the same
                tables.append(table if len(table) == len(places) else table[places])
        logits = torch.cat(tables)
    table = (logits.float() / float(sequences.temperature[row])).log_softmax(-1)
    return table.gather(1, completion[:, None])[:, 0].cpu()


def _probe(sequences: Sequences, prompt_numbers: Sequence[int]) -> list[int]:
    """Return up to three rollouts, the shortest that have enough tokens: two of one prompt if
    possible, and one of another. None of them is empty."""
    completion_tokens = sequences.completions.lengths.tolist()
    tokens = (sequences.prompts.lengths + sequences.input_lengths).tolist()

    def preference(row: int) -> tuple[int, int]:
        if completion_tokens[row] >= _ENOUGH_TOKENS:
            return 0, tokens[row]
        return 1, -completion_tokens[row]

    rows_of: dict[int, list[int]] = {}
    nonempty_rows = [row for row, count in enumerate(completion_tokens) if count]
    for row in sorted(nonempty_rows, key=preference):
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
        packed = compute_logprobs(policy, microbatches, sequences)
        logprobs = sequences.completions.with_values(packed)
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


Call = tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]
"""Arguments of one attention call in a layer: queries [1, H, L, e], keys and values [1, h, L, e],
and the options."""


def choose_kernel(policy: Policy, pieces: Sequence[Piece], sequences: Sequences) -> str:
    """Set and return the kernel of the policy's passes.

    The result is one of KERNELS, `blocks`, or `model` if the model attends in its own way. If
    gradients are enabled, the backward pass is checked too. `pieces` are one micro-batch.
    """
    policy.kernel = "blocks"
    if policy.mode == "single" or not policy.is_causal:
        return "model"
    if policy.device.type == "cuda":
        with policy.context():
            # a picture's own tower would attend by FA3 or FA4 too, and is not in the probe
            kernels = KERNELS if sequences.media is None else ["varlen"]
            policy.kernel = right_kernel(*probe_calls(policy, pieces, sequences), kernels)
        log.info("attention: by %s", policy.kernel)
    return policy.kernel


def right_kernel(calls: Sequence[Call], layout: Layout, kernels: Sequence[str] = KERNELS) -> str:
    """Return the first of `kernels` that is right, or `blocks`."""
    return next((kernel for kernel in kernels if is_right(kernel, calls, layout)), "blocks")


@torch.no_grad()
def probe_calls(
    policy: Policy, pieces: Sequence[Piece], sequences: Sequences
) -> tuple[list[Call], Layout]:
    """Return the attention calls of a pass over the beginnings of a few rollouts of `pieces`, and
    their layout, with runs. Longer ones would need masks of gigabytes."""
    kept = [(number, row) for number, piece in enumerate(pieces) for row in piece.rows[:4]][:8]
    numbers, rows = zip(*kept, strict=True)
    taken = sequences.take(rows)
    prompts, completions = (
        Ragged.from_lengths(
            torch.cat([row[:_PROBED_TOKENS] for row in ragged]),
            ragged.lengths.clamp(max=_PROBED_TOKENS),
        )
        for ragged in (taken.prompts, taken.completions)
    )
    cut = Sequences(prompts, completions, taken.temperature)
    (microbatch,) = policy.microbatches(range(len(rows)), numbers, cut, 1 << 30)
    layout = to_device(make_layout(microbatch, cut, varlen=True), policy.device)
    with recorded() as calls:
        # by the whole policy, whose call gathers the weights of other ranks
        policy(replace(layout, runs=None))
    return list(calls.values()), layout


@contextmanager
def recorded() -> Iterator[dict[tuple, Call]]:
    """Record, inside the context, the first call of block attention of each kind."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: dict[tuple, Call] = {}

    def record(module, queries, keys, values, attention_mask, *, layout, **options):
        states = queries.detach(), keys.detach(), values.detach()
        shapes = tuple(tensor.shape for tensor in states)
        kind = shapes, options.get("sliding_window"), options.get("scaling")
        calls.setdefault(kind, (states, options))
        return block_attention(
            module, queries, keys, values, attention_mask, layout=layout, **options
        )

    ALL_ATTENTION_FUNCTIONS.register(NAME, record)
    try:
        yield calls
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, block_attention)


def is_right(kernel: str, calls: Sequence[Call], layout: Layout) -> bool:
    """True if `kernel` runs here and is right in each of `calls`, compared with blocks in float32;
    `layout` must have runs. A call with a window is tried without one, and with one that ends
    within the spans."""
    if any(values.dtype != torch.bfloat16 for (_, _, values), _ in calls):
        return False
    in_blocks = replace(layout, runs=None)
    try:
        for states, options in calls:
            narrow = [tensor.to(torch.bfloat16) for tensor in states]
            wide = [tensor.float() for tensor in narrow]
            windows = {None, options.get("sliding_window") and layout.runs.copied.longest[1] // 2}
            for window in windows:
                tried = {**options, "sliding_window": window}
                with implemented_by(kernel):
                    outputs = _attend(narrow, tried, layout)
                with torch.autocast(wide[0].device.type, enabled=False):
                    exact = _attend(wide, tried, in_blocks)
                error = _largest_error(outputs, exact)
                if not error <= _KERNEL_TOLERANCE:  # written so that NaN fails too
                    log.warning("attention: %s is wrong here by %.3f of the norm", kernel, error)
                    return False
    except Exception as error:  # Triton, its compilers and the driver raise many types
        if says_no_memory(error):
            raise
        if not isinstance(error, ModuleNotFoundError):
            log.warning("attention: %s does not run here (%s)", kernel, error)
        return False
    return True


def _largest_error(outputs: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest error of an output as a share of its norm; NaN if an output has NaN."""
    errors = [
        (output.float() - expected).norm() / expected.norm()
        for output, expected in zip(outputs, exact, strict=True)
    ]
    return float(torch.stack(errors).max())


def _attend(states: Sequence[Tensor], options: dict[str, Any], layout: Layout) -> list[Tensor]:
    """Return the output and, if gradients are enabled, the gradients of the states, for the same
    random output gradient each time."""
    with_gradients = torch.is_grad_enabled()
    leaves = [tensor.detach().requires_grad_(with_gradients) for tensor in states]
    output, _ = block_attention(None, *leaves, None, layout=layout, **options)
    if not with_gradients:
        return [output]
    generator = torch.Generator(output.device).manual_seed(0)
    grad = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]
