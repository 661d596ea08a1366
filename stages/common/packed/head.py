"""Log-probabilities of given ids from hidden states, without a [tokens, vocabulary] tensor beyond one chunk.

The forward pass makes the logits of one chunk, takes what it needs, and drops them; the backward pass makes them again. So
memory does not grow with tokens × vocabulary, which is the largest tensor of a naive trainer. Matrix products run in the dtype
that autocast says; temperature, softmax and sums in float32. Legend: n completion positions, d hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

CHUNK_BYTES = 64 * 1024 * 1024
"""Size of one chunk of float32 logits."""


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
    return _Head.apply(hidden, head.weight, bias, targets, temperature, shaping or Shaping())


def _matmul_dtype(hidden: torch.Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, shaping):
        dtype = _matmul_dtype(hidden)
        ctx.shaping, ctx.chunk = shaping, max(1, CHUNK_BYTES // (4 * len(weight)))
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
            entropy[part] = -logits.mul_(normal).sum(-1)  # not a product of vectors: autocast would round it to bfloat16
        ctx.save_for_backward(small_hidden, small_weight, bias, targets, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, bias, targets, temperature = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = grad_bias = None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                logits, slope = _logits(hidden[part], weight, bias, temperature[part], ctx.shaping)
                delta = F.softmax(logits, -1)
                delta.scatter_add_(1, targets[part, None], delta.new_full((len(delta), 1), -1.0))
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
        return (*results, None, None, None)


def _plus(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    """Sum over chunks in float32."""
    return more.float() if total is None else total.add_(more)


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
