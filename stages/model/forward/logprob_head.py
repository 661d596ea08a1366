"""Log-probabilities of given ids from hidden states, with logits for one chunk of tokens at a time.

The forward pass makes the logits of one chunk, uses them, and drops them. The backward pass makes
them again, except for the first chunks, whose probabilities are kept. So memory does not grow with
tokens × vocabulary, the largest tensor of a naive trainer.

Matrix products run in autocast's dtype and give float32 results if the device can. Temperature,
softmax and sums are in float32. On a GPU, one kernel does the work after a product (gpu/head.py),
for heads without bias or softcap. Legend: n completion positions, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gpu.choice import float32_product, makes_float32
from .gpu.head import FusedHead, is_fused
from .projections import product_dtype

CHUNK_BYTES = 64 * 1024 * 1024
"""Size of one chunk of logits on a CPU."""
GPU_CHUNK_BYTES = 512 * 1024 * 1024
"""Size of one chunk of float32 logits on a GPU. It should hold about a thousand positions, else
reading the weight dominates."""
TILE_BYTES = 2 * 1024 * 1024
"""Size of the tile of a chunk that a CPU converts to float32 at once, so that it stays in the
cache."""
KEPT_BYTES = 128 * 1024 * 1024
"""Most bytes of probabilities that are kept from the forward pass for the backward pass."""
_GRAIN = 64
"""The number of rows of a chunk is a multiple of it, if it has as many: products are faster."""
_ROWS = 8192
"""Rows of a gradient that are added at once."""


@dataclass(frozen=True)
class Shaping:
    """Changes that some architectures make to their logits.

    z ← scale · z, then z ← softcap · tanh(z / softcap)
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config) -> Shaping:
        """Read the shaping from a model's config.

        The fields are Gemma's `final_logit_softcapping` (RecurrentGemma and xLSTM have other names
        for it), Cohere's `logit_scale`, Granite's `logits_scaling`, Inkling's
        `logits_mup_width_multiplier`, and T5's factor d_model ** -0.5, which applies only if the
        head is (or once was) the embedding itself.
        """
        text = config.get_text_config()
        scale = getattr(text, "logit_scale", None) or 1.0
        for name in ("logits_scaling", "logits_mup_width_multiplier"):
            scale /= getattr(text, name, None) or 1.0
        tied = getattr(text, "tie_word_embeddings", False) and text.model_type in (
            "umt5",
            "switch_transformers",
        )
        if getattr(text, "scale_decoder_outputs", tied):
            scale *= text.d_model**-0.5
        for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
            if getattr(text, name, None):
                return cls(scale, getattr(text, name))
        return cls(scale)


def completion_logprobs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: Tensor,
    shaping: Shaping | None = None,
    offset: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
    collision: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(logits / temperature)[target] and that distribution's entropy.

    Args:
        hidden: [n, d] the hidden state that predicts each target.
        head: The model's output embedding, with `weight` [V, d] and perhaps `bias` [V].
        targets: [n] int64.
        temperature: [n] float32 > 0, the temperature of each position's row.
        shaping: The architecture's shaping. Default: none.
        offset: [V] added to the logits before the shaping, such as BART's `final_logits_bias`.
            Default: none.
        entropy_gradient: If true, the entropy has a gradient too; its backward pass needs one
            tile more.
        collision: If true, return Σ p² in place of the entropy: the probability that two draws
            are the same id. Not with `entropy_gradient`.

    Returns:
        logprobs [n] float32, with gradient for hidden, weight and bias; entropy [n] float32 in
        nats, without gradient unless `entropy_gradient`.
    """
    bias = getattr(head, "bias", None)
    if offset is not None:
        bias = offset if bias is None else bias + offset
    shaping = shaping or Shaping()
    dtype = product_dtype(hidden)
    if bias is None and shaping.softcap is None and is_fused(hidden, head.weight, dtype):
        return FusedHead.apply(
            hidden,
            head.weight,
            targets,
            shaping.scale / temperature,
            _chunks(hidden, len(head.weight)),
            dtype,
            entropy_gradient,
            collision,
        )
    kept_bytes = KEPT_BYTES if torch.is_grad_enabled() else 0
    return _Head.apply(
        hidden,
        head.weight,
        bias,
        targets,
        temperature,
        shaping,
        kept_bytes,
        entropy_gradient,
        collision,
    )


class _Head(torch.autograd.Function):
    """One product makes a chunk's logits; the steps after it work tile by tile, in place."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        shaping,
        kept_bytes,
        entropy_gradient,
        collision,
    ):
        dtype = product_dtype(hidden)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.shaping = shaping
        ctx.probabilities = []  # kept for the first chunks only
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
        temperature = temperature[:, None]
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for chunk in _chunks(hidden, len(weight)):
            logits = _product(hidden[chunk], weight)
            kept_bytes -= logits.nbytes
            keep = kept_bytes >= 0 and shaping.softcap is None
            for rows, tile in _tiles(chunk, logits):
                shaped, _ = _shape(tile, bias, temperature[rows], shaping)
                table = F.log_softmax(shaped, -1)
                logprobs[rows] = table.gather(1, targets[rows, None])[:, 0]
                probabilities = torch.exp(table, out=shaped)
                # no products of vectors, because autocast would round them to bfloat16
                if collision:
                    entropy[rows] = torch.mul(probabilities, probabilities, out=table).sum(-1)
                else:
                    entropy[rows] = -table.mul_(probabilities).sum(-1)
                if keep:
                    tile.copy_(probabilities)
            if keep:
                ctx.probabilities.append(logits)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, logprobs, entropy)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        hidden, weight, bias, targets, temperature, logprobs, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        grad_bias = None
        # kept tensors are overwritten with gradients below; a second backward pass recomputes them
        probabilities = ctx.probabilities[::-1]
        ctx.probabilities = []
        target_minus_one = torch.expm1(logprobs[:, None])  # p − 1, exact also where p is near 1
        factors = -grad[:, None] / temperature * ctx.shaping.scale
        entropy_factors = -entropy_grad[:, None] / temperature * ctx.shaping.scale
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(hidden, len(weight)):
                is_kept = bool(probabilities)
                grad_logits = probabilities.pop() if is_kept else _product(hidden[chunk], weight)
                for rows, tile in _tiles(chunk, grad_logits):
                    factor = factors[rows]
                    entropy_factor = entropy_factors[rows]
                    if is_kept:
                        slope = tile.float()
                    else:
                        shaped, cap_slope = _shape(tile, bias, temperature[rows], ctx.shaping)
                        slope = F.softmax(shaped, -1)
                        if cap_slope is not None:
                            factor = factor * cap_slope
                            entropy_factor = entropy_factor * cap_slope
                    if ctx.entropy_gradient:  # dH/dlogit = −p (log p + H)
                        entropy_slope = torch.xlogy(slope, slope)
                        entropy_slope.addcmul_(slope, entropy[rows, None])
                        entropy_slope *= entropy_factor
                    slope.scatter_(1, targets[rows, None], target_minus_one[rows])
                    slope *= factor
                    if ctx.entropy_gradient:
                        slope += entropy_slope
                    tile.copy_(slope)
                    if needs_bias:
                        grad_bias = _add(grad_bias, slope.sum(0))
                grad_logits = grad_logits.to(weight.dtype)
                if needs_hidden:
                    torch.mm(grad_logits, weight, out=grad_hidden[chunk])
                if needs_weight:
                    grad_weight = _add(grad_weight, grad_logits.T @ hidden[chunk])
        gradients = [
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(
                (grad_hidden, grad_weight, grad_bias), ctx.dtypes, strict=True
            )
        ]
        return (*gradients, None, None, None, None, None, None)


def _chunks(hidden: Tensor, vocabulary: int) -> list[slice]:
    """Return the rows of each chunk of `hidden`.

    On a CPU, all rows are one chunk if their probabilities can all be kept.
    """
    if hidden.device.type == "cpu":
        row_bytes = hidden.itemsize * vocabulary
        fits = len(hidden) * row_bytes <= KEPT_BYTES
        num_rows = (KEPT_BYTES if fits else CHUNK_BYTES) // row_bytes
    else:
        num_rows = GPU_CHUNK_BYTES // (4 * vocabulary)
    num_rows = max(1, num_rows // _GRAIN * _GRAIN or num_rows)
    return [slice(start, start + num_rows) for start in range(0, len(hidden), num_rows)]


def _tiles(chunk: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield each tile of a chunk's logits [c, V] with its rows among all; on a GPU one tile."""
    num_rows = len(logits)
    if logits.device.type == "cpu":
        num_rows = max(1, TILE_BYTES // (4 * logits.shape[1]))
    start = chunk.start
    for tile in logits.split(num_rows):
        yield slice(start, start + len(tile)), tile
        start += len(tile)


def _add(total: Tensor | None, more: Tensor) -> Tensor:
    """Add `more` to the float32 sum over chunks.

    It adds a few rows at a time, because adding a narrower dtype first copies it whole.
    """
    if total is None:
        return more.float()
    for rows, more_rows in zip(total.split(_ROWS), more.split(_ROWS), strict=True):
        rows.add_(more_rows)
    return total


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return [c, V] logits in the dtype of both, or in float32 if the device makes it directly."""
    if makes_float32(hidden):
        return float32_product(hidden, weight.T)
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.mm(hidden, weight.T)


def _shape(
    logits: Tensor, bias: Tensor | None, temperature: Tensor, shaping: Shaping
) -> tuple[Tensor, Tensor | None]:
    """Shape logits [c, V] in float32 and divide them by the temperature [c, 1].

    Also returns, for a softcap, d capped / d uncapped. Float32 logits are changed in place.
    """
    logits = logits.float()
    if bias is not None:
        logits += bias
    if shaping.scale != 1.0:
        logits *= shaping.scale
    cap_slope = None
    if shaping.softcap is not None:
        logits = torch.tanh(logits / shaping.softcap)
        cap_slope = 1 - logits**2
        logits *= shaping.softcap
    logits /= temperature
    return logits, cap_slope
