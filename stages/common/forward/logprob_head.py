"""Log-probabilities of given ids from hidden states, without a [tokens, vocabulary] tensor beyond
one chunk.

The forward pass makes the logits of one chunk, takes what it needs, and drops them; the backward
pass makes them again, but for the first chunks, whose probabilities are kept. So memory does not
grow with tokens × vocabulary, which is the largest tensor of a naive trainer. Matrix products run
in the dtype that autocast says; temperature, softmax and sums in float32. Legend: n completion
positions, d hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from quiver.stages.common.forward.cpu.projections import product_dtype

CHUNK_BYTES, GPU_CHUNK_BYTES = 64 * 1024 * 1024, 512 * 1024 * 1024
"""Size of one chunk of logits, on a GPU in float32; it wants a thousand positions at once, or
reading the weight takes longest."""
TILE_BYTES = 2 * 1024 * 1024
"""Size of the part of a chunk that a CPU makes float32 at once: what is done to it then stays in
the cache."""
KEPT_BYTES = 128 * 1024 * 1024
"""Most bytes of probabilities that are kept from the forward pass to the backward pass."""
_GRAIN = 64
"""Rows of a chunk are a multiple of it, where there are as many: products are faster so."""
_ROWS = 8192
"""Rows of a gradient that are added at once."""


@dataclass(frozen=True)
class Shaping:
    """What some architectures do to their logits: z ← scale · z, then z ← softcap · tanh(z /
    softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config) -> Shaping:
        """From a model's config: Gemma's `final_logit_softcapping`, Cohere's `logit_scale`,
        Granite's `logits_scaling`, and T5's d_model ** -0.5, which it takes only where the head is
        (or once was) the embedding itself."""
        text = config.get_text_config()
        scale = (getattr(text, "logit_scale", None) or 1.0) / (
            getattr(text, "logits_scaling", None) or 1.0
        )
        tied = text.tie_word_embeddings and text.model_type in ("umt5", "switch_transformers")
        if getattr(text, "scale_decoder_outputs", tied):
            scale *= text.d_model**-0.5
        return cls(scale, getattr(text, "final_logit_softcapping", None))


def completion_logprobs(
    hidden: torch.Tensor,
    head: nn.Module,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    shaping: Shaping | None = None,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that distribution, for each
    position.

    Args:
        hidden: [n, d] the hidden state that predicts each target.
        head: the model's output embedding, with `weight` [V, d] and perhaps `bias` [V].
        targets: [n] int64.
        temperature: [n] float32 > 0, that of the row which the position belongs to.
        shaping: of the architecture; None for none.
        offset: [V] added to the logits before the shaping, such as BART's `final_logits_bias`; None
            for none.
    Returns:
        logprobs [n] float32, with gradient for hidden, weight and bias; entropy [n] float32 in
        nats, without.
    """
    bias = getattr(head, "bias", None)
    if offset is not None:
        bias = offset if bias is None else bias + offset
    kept = KEPT_BYTES if torch.is_grad_enabled() else 0
    return _Head.apply(hidden, head.weight, bias, targets, temperature, shaping or Shaping(), kept)


def _parts(hidden: torch.Tensor, vocabulary: int) -> list[tuple[slice, list[slice]]]:
    """Rows of each chunk of `hidden`, in its dtype, and of the chunk's tiles in it; on a GPU a
    chunk is one tile. On a CPU all rows are one chunk where their probabilities can all be kept."""
    if hidden.device.type == "cpu":
        row = hidden.itemsize * vocabulary
        chunk = (KEPT_BYTES if len(hidden) * row <= KEPT_BYTES else CHUNK_BYTES) // row
        tile = TILE_BYTES // (4 * vocabulary)
    else:
        chunk = tile = GPU_CHUNK_BYTES // (4 * vocabulary)
    chunk = max(1, chunk // _GRAIN * _GRAIN or chunk)
    return [(part, _cut(part.stop - part.start, max(1, tile))) for part in _cut(len(hidden), chunk)]


def _cut(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, shaping, room):
        dtype = product_dtype(hidden)
        ctx.shaping, ctx.kept = shaping, []  # of the first chunks, the probabilities
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for part, tiles in _parts(hidden, len(weight)):
            logits, own = (
                _product(hidden[part], weight),
                (targets[part, None], temperature[part, None]),
            )
            room -= logits.nbytes
            keep = room >= 0 and shaping.softcap is None
            for rows in tiles:
                target, heat = (each[rows] for each in own)
                wide, _ = _shaped(logits[rows], bias, heat, shaping)
                normal = F.log_softmax(wide, -1)
                logprobs[part][rows] = normal.gather(1, target)[:, 0]
                torch.exp(normal, out=wide)
                # not a product of vectors: autocast would round it to bfloat16
                entropy[part][rows] = -normal.mul_(wide).sum(-1)
                if keep:
                    logits[rows] = wide
            if keep:
                ctx.kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, logprobs)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, bias, targets, temperature, logprobs = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = grad_bias = None
        kept, ctx.kept = ctx.kept[::-1], []
        heat, below = (
            temperature[:, None],
            torch.expm1(logprobs[:, None]),
        )  # p − 1, exact also where p is near 1
        factor = -grad[:, None] / heat * ctx.shaping.scale
        with torch.autocast(hidden.device.type, enabled=False):
            for part, tiles in _parts(hidden, len(weight)):
                known = bool(kept)
                delta = kept.pop() if known else _product(hidden[part], weight)
                own = targets[part, None], heat[part], below[part], factor[part]
                for rows in tiles:
                    target, hot, less, times = (each[rows] for each in own)
                    if known:
                        wide, slope = delta[rows].float(), None
                    else:
                        wide, slope = _shaped(delta[rows], bias, hot, ctx.shaping)
                        wide = F.softmax(wide, -1)
                    wide.scatter_(1, target, less)
                    wide *= times if slope is None else times * slope
                    delta[rows] = wide
                    if needs_bias:
                        grad_bias = _plus(grad_bias, wide.sum(0))
                if needs_hidden:
                    torch.mm(delta, weight, out=grad_hidden[part])
                if needs_weight:
                    grad_weight = _plus(grad_weight, delta.T @ hidden[part])
        kinds = ctx.dtypes
        results = [
            None if value is None else value.to(kind)
            for value, kind in zip((grad_hidden, grad_weight, grad_bias), kinds, strict=True)
        ]
        return (*results, None, None, None, None)


def _plus(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    """Sum over chunks in float32; a few rows at a time, because a sum of two dtypes makes a whole
    copy of the narrow one first."""
    if total is None:
        return more.float()
    for rows, added in zip(total.split(_ROWS), more.split(_ROWS), strict=True):
        rows.add_(added)
    return total


def _product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[c, V] logits in the dtype of both."""
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.mm(hidden, weight.T)


def _shaped(
    logits, bias, temperature, shaping: Shaping
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [c, V] in float32, shaped, over the temperature [c, 1]; and, with a softcap, d capped
    / d uncapped. Float32 logits are changed in place."""
    logits = logits.float()
    if bias is not None:
        logits += bias
    if shaping.scale != 1.0:
        logits *= shaping.scale
    slope = None
    if shaping.softcap is not None:
        logits = torch.tanh(logits / shaping.softcap)
        slope = 1 - logits**2
        logits *= shaping.softcap
    logits /= temperature
    return logits, slope
