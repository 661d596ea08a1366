"""Log-probabilities of given ids from hidden states, without a [tokens, vocabulary] tensor beyond one chunk.

The forward pass makes the logits of one chunk, takes what it needs, and drops them; the backward pass makes them again, but for
the first chunks, whose probabilities are kept. So memory does not grow with tokens × vocabulary, which is the largest tensor of
a naive trainer. Matrix products run in the dtype that autocast says; temperature, softmax and sums in float32. Legend: n
completion positions, d hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .merged import product_dtype

CHUNK_BYTES, GPU_CHUNK_BYTES = 64 * 1024 * 1024, 512 * 1024 * 1024
"""Size of one chunk of float32 logits; a GPU wants a thousand positions at once, or reading the weight takes longest."""
KEPT_BYTES = 128 * 1024 * 1024
"""Most bytes of probabilities that are kept from the forward pass to the backward pass."""
_ROWS = 8192
"""Rows of a gradient that are added at once."""


@dataclass(frozen=True)
class Shaping:
    """What some architectures do to their logits: z ← scale · z, then z ← softcap · tanh(z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config) -> Shaping:
        """From a model's config: Gemma's `final_logit_softcapping`, Cohere's `logit_scale`, Granite's `logits_scaling`, and T5's
        d_model ** -0.5, which it takes only where the head is (or once was) the embedding itself."""
        text = config.get_text_config()
        scale = (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)
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
    """log softmax(logits / temperature)[target] and the entropy of that distribution, for each position.

    Args:
        hidden: [n, d] the hidden state that predicts each target.
        head: the model's output embedding, with `weight` [V, d] and perhaps `bias` [V].
        targets: [n] int64.
        temperature: [n] float32 > 0, that of the row which the position belongs to.
        shaping: of the architecture; None for none.
        offset: [V] added to the logits before the shaping, such as BART's `final_logits_bias`; None for none.
    Returns:
        logprobs [n] float32, with gradient for hidden, weight and bias; entropy [n] float32 in nats, without.
    """
    bias = getattr(head, "bias", None)
    if offset is not None:
        bias = offset if bias is None else bias + offset
    kept = KEPT_BYTES if torch.is_grad_enabled() else 0
    return _Head.apply(hidden, head.weight, bias, targets, temperature, shaping or Shaping(), kept)


def _chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, shaping, room):
        dtype = product_dtype(hidden)
        ctx.shaping, ctx.chunk = shaping, max(1, _chunk_bytes(hidden.device) // (4 * len(weight)))
        ctx.kept = []  # of the first chunks, the probabilities
        small_hidden, small_weight = hidden.to(dtype), weight.to(dtype)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits, _ = _logits(small_hidden[part], small_weight, bias, temperature[part], shaping)
            normal = F.log_softmax(logits, -1)
            logprobs[part] = normal.gather(1, targets[part, None])[:, 0]
            torch.exp(normal, out=logits)
            entropy[part] = -normal.mul_(logits).sum(-1)  # not a product of vectors: autocast would round it to bfloat16
            room -= logits.numel() * dtype.itemsize
            if room >= 0 and shaping.softcap is None:
                ctx.kept.append(logits.to(dtype))
        ctx.save_for_backward(small_hidden, small_weight, bias, targets, temperature, logprobs)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, bias, targets, temperature, logprobs = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = grad_bias = None
        kept, ctx.kept = ctx.kept[::-1], []
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                if kept:
                    delta, slope = kept.pop().float(), None
                else:
                    logits, slope = _logits(hidden[part], weight, bias, temperature[part], ctx.shaping)
                    delta = F.softmax(logits, -1)
                delta.scatter_(1, targets[part, None], torch.expm1(logprobs[part, None]))  # p − 1, exact also where p is near 1
                delta *= (-grad[part] / temperature[part] * ctx.shaping.scale)[:, None]
                delta = delta if slope is None else delta * slope
                small = delta.to(hidden.dtype)
                if needs_hidden:
                    torch.mm(small, weight, out=grad_hidden[part])
                if needs_weight:
                    grad_weight = _plus(grad_weight, small.T @ hidden[part])
                if needs_bias:
                    grad_bias = _plus(grad_bias, delta.sum(0))
        kinds = ctx.dtypes
        results = [
            None if value is None else value.to(kind)
            for value, kind in zip((grad_hidden, grad_weight, grad_bias), kinds, strict=True)
        ]
        return (*results, None, None, None, None)


def _plus(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    """Sum over chunks in float32; a few rows at a time, because a sum of two dtypes makes a whole copy of the narrow one first."""
    if total is None:
        return more.float()
    for rows, added in zip(total.split(_ROWS), more.split(_ROWS), strict=True):
        rows.add_(added)
    return total


def _logits(hidden, weight, bias, temperature, shaping: Shaping) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Float32 logits [c, V] of one chunk over the temperature; and, with a softcap, d capped / d uncapped."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = torch.mm(hidden, weight.T).float()
    if bias is not None:
        logits += bias
    if shaping.scale != 1.0:
        logits *= shaping.scale
    slope = None
    if shaping.softcap is not None:
        logits = torch.tanh(logits / shaping.softcap)
        slope = 1 - logits**2
        logits *= shaping.softcap
    logits /= temperature[:, None]
    return logits, slope
