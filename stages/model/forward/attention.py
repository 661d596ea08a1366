"""Attention that keeps the rollouts of one strip apart, and the hidden states it gives.

`shared`: a group's prompt is in the strip once; each completion attends to it and to itself.
`packed`: each rollout is a piece of its own, prompt included. In both modes attention runs over
blocks of spans with similar lengths (layout.py has the picture). On a GPU it may run instead by
torch's FlashAttention for sequences of any lengths, which needs no padding and reads no mask.
`single` is the reference and the last resort: one rollout after another through the model's own
attention.

The block attention is registered in transformers' attention interface, so every decoder that uses
the interface works. It refuses features that it cannot compute (logit caps, sinks, position
biases); `choose_mode` in verify.py then takes the next simpler mode.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.stages.model.loading import own_attention

from .gpu.choice import Copies, fits
from .layout import Block, Layout, Runs
from .pictures import embed, reader_of

NAME = "quiver_blocks"
_SHORT = 256
"""Most keys of a block for which a CPU keeps the attention weights instead of calling the fused
kernel."""
_KEPT_ITEMS = 6 * 1024 * 1024
"""Most attention weights of one block that a CPU keeps in bfloat16, however many keys it has: the
fused kernel takes twice the time."""
_WITHOUT_EFFECT = ("dropout", "is_causal", "output_attentions", "position_ids", "use_cache")
"""Options of transformers' interface that have no effect here: dropout is off, and attention is
causal."""
_ROWS = 128
"""Queries that a CPU computes at once if later keys are hidden from all of them."""


def block_attention(
    module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Compute attention over one strip, as transformers' interface calls it.

    Args:
        module: Unused; part of the interface.
        queries: [1, H, L, e].
        keys: [1, h, L, e].
        values: [1, h, L, e].
        attention_mask: Must be None.
        layout: The row's spans.
        scaling: Factor of the scores. Default: e ** -0.5.
        sliding_window: Keys that a query sees, including its own. Default: no limit.
        softcap: Must be None.
        s_aux: Must be None.
        position_bias: Must be None.

    Returns:
        [1, L, H, e], and None for the attention weights.

    Raises:
        NotImplementedError: An option is given that block attention cannot compute.
    """
    options |= {"masks": attention_mask, "logit caps": softcap, "sinks": s_aux}
    options["position biases"] = position_bias
    for name, option in options.items():
        if option is not None and name not in _WITHOUT_EFFECT:
            raise NotImplementedError(f"block attention knows no {name}")
    queries, keys, values = (
        states.squeeze(0).transpose(0, 1) for states in (queries, keys, values)
    )
    if layout.runs is not None:
        return attend_runs(queries, keys, values, layout.runs, sliding_window, scaling)[None], None
    outputs = [
        attend_block(
            _take(queries, block.queries).transpose(1, 2),
            _take(keys, block.keys).transpose(1, 2),
            _take(values, block.keys).transpose(1, 2),
            block,
            sliding_window,
            scaling,
        )
        .transpose(1, 2)
        .flatten(0, 1)
        for block in layout.blocks
    ]
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _take(joined, layout.gather)[None], None


def attend_runs(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    runs: Runs,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Attend over all spans by torch's kernel for sequences of any lengths.

    Queries [L, H, e], keys and values [L, h, e] -> [L, H, e]. The kernel aligns causality with the
    last key, as a completion after its prompt needs. With a window of w, a query sees w keys, its
    own among them; the kernel's option counts only the keys before its own.
    """
    # imported late: it takes 2 s for torch.compile, which nothing else here needs
    from torch.nn.attention.varlen import varlen_attn

    keys = keys.to(values.dtype)
    if fits(keys):
        keys, values = Copies.apply(keys, values, runs.keys, *runs.copies)
    else:
        keys, values = (_take(states, runs.keys) for states in (keys, values))
    return varlen_attn(
        queries.to(values.dtype),
        keys,
        values,
        runs.query_offsets,
        runs.key_offsets,
        *runs.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def attend_block(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    block: Block,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Attend within one block.

    Queries [n, H, q, e], keys and values [n, h, k, e] of the block's spans -> [n, H, q, e].
    """
    num_spans, num_heads, num_queries, width = queries.shape
    num_keys = keys.shape[2]
    queries_per_key = num_heads // keys.shape[1]
    if window is not None and window >= num_keys:
        window = None
    if queries.device.type == "cpu":
        # at this point autocast has cast only the values to bfloat16
        num_weights = num_heads * num_spans * num_queries * num_keys
        fits = values.dtype == torch.bfloat16 and num_weights <= _KEPT_ITEMS
        if num_keys <= _SHORT or fits:
            return attend_by_products(queries, keys, values, block, window, scaling or width**-0.5)
    mask = None
    if window is not None or not block.causal:
        mask = block.mask(window, queries.dtype)
    # of a GPU's fused kernels only flash attention takes fewer key heads than query heads, and it
    # takes neither a mask nor float32
    takes_fewer_heads = mask is None and queries.dtype != torch.float32
    if queries_per_key > 1 and queries.device.type != "cpu" and not takes_fewer_heads:
        keys = keys.repeat_interleave(queries_per_key, 1)
        values = values.repeat_interleave(queries_per_key, 1)
        queries_per_key = 1
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=queries_per_key > 1,
    )


def attend_by_products(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    block: Block,
    window: int | None,
    scaling: float,
) -> Tensor:
    """Attend within one block by two matrix products, with softmax in float32.

    Shapes are those of `attend_block`. All queries of a key head are one matrix. For short spans on
    a CPU, the backward pass in bfloat16 is several times faster than the fused kernel's. If queries
    and keys are the same tokens, `_ROWS` queries at a time meet the keys up to their own.
    """
    mask = block.mask(window, queries.dtype)
    if not block.causal:
        first_hidden = 0 if window is not None else int(block.prefix_lengths.min())
        return _Products.apply(queries, keys, values, mask[..., first_hidden:], scaling)
    outputs = []
    for low in range(0, queries.shape[2], _ROWS):
        high = min(low + _ROWS, keys.shape[2])
        rows = slice(low, low + _ROWS)
        first_hidden = 0 if window is not None else low
        outputs.append(
            _Products.apply(
                queries[:, :, rows],
                keys[:, :, :high],
                values[:, :, :high],
                mask[:, :, rows, first_hidden:high],
                scaling,
            )
        )
    return torch.cat(outputs, 2)


class _Products(torch.autograd.Function):
    """Attention by products that keeps the weights only in the values' dtype.

    Autograd would keep them in float32 too, which is three times the memory. `mask` covers only the
    last keys; every query sees the keys before them.
    """

    @staticmethod
    def forward(ctx, queries, keys, values, mask, scaling):
        ctx.queries_per_key = queries.shape[1] // keys.shape[1]
        ctx.scaling = scaling
        ctx.query_dtype = queries.dtype
        ctx.key_dtype = keys.dtype
        # each is laid out once in the order that the products read; a product of strided matrices
        # would copy them every time
        scaled = torch.empty(queries.shape, device=queries.device)
        torch.mul(queries.float(), scaling, out=scaled)
        scaled = _fold(scaled, ctx.queries_per_key)
        keys = keys.float().contiguous()
        values = values.contiguous()
        # scores in bfloat16 would add a third to the error of the logprobs
        with torch.autocast(queries.device.type, enabled=False):
            scores = scaled @ keys.transpose(-1, -2)
            by_head = scores.unflatten(2, (ctx.queries_per_key, -1))
            by_head[..., -mask.shape[-1] :].add_(mask[:, :, None])
            weights = torch.softmax(scores, -1, out=scores).to(values.dtype)
            output = _unfold(weights @ values, ctx.queries_per_key)
        ctx.save_for_backward(scaled.to(values.dtype), keys.to(values.dtype), values, weights)
        return output

    @staticmethod
    def backward(ctx, grad):
        scaled, keys, values, weights = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad = _fold(grad, ctx.queries_per_key)
            grad_values = weights.transpose(-1, -2) @ grad
            # without the copy the product takes twice the time
            grad_weights = grad @ values.transpose(-1, -2).contiguous()
            # w · (g − Σ w · g); torch has no public name for it
            grad_scores = torch._softmax_backward_data(
                grad_weights, weights, -1, grad_weights.dtype
            )
            grad_queries = (grad_scores @ keys).to(ctx.query_dtype).mul_(ctx.scaling)
            grad_keys = (grad_scores.transpose(-1, -2) @ scaled).to(ctx.key_dtype)
        return _unfold(grad_queries, ctx.queries_per_key), grad_keys, grad_values, None, None


def _fold(states: Tensor, queries_per_key: int) -> Tensor:
    """[n, h · queries_per_key, q, e] -> [n, h, queries_per_key · q, e]"""
    return states.unflatten(1, (-1, queries_per_key)).flatten(2, 3)


def _unfold(states: Tensor, queries_per_key: int) -> Tensor:
    """[n, h, queries_per_key · q, e] -> [n, h · queries_per_key, q, e]"""
    return states.unflatten(2, (queries_per_key, -1)).flatten(1, 2)


def _take(states: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` […] of [L, H, e]: […, H, e].

    It is an embedding lookup, whose gradient adds up rows far faster on a CPU than indexing's.
    """
    return F.embedding(index, states.flatten(1)).unflatten(-1, states.shape[1:])


def hidden_states(model: nn.Module, layout: Layout, *, single: bool = False) -> Tensor:
    """Return [n, d] last hidden states that predict the layout's targets.

    By block attention; if `single`, by the model's own attention on a layout of one rollout.
    """
    trunk = trunk_of(model)
    rows = [{"input_ids": layout.ids}]
    if layout.pictures is not None:
        rows = [embed(trunk, layout.ids, layout.pictures)]
        trunk = reader_of(trunk, rows[0])
    options = {"attention_mask": None, "position_ids": layout.positions, "layout": layout}
    if single:
        if layout.sequence_lengths:  # such rollouts show no pictures
            rows = [{"input_ids": part} for part in layout.ids.split(layout.sequence_lengths, 1)]
        # plain positions are the model's own
        options = {} if layout.positions.ndim == 2 else {"position_ids": layout.positions}
    outputs = [trunk(**row, use_cache=False, **options) for row in rows]
    states = [output.last_hidden_state.squeeze(0) for output in outputs]
    joined = torch.cat(states) if len(states) > 1 else states[0]
    return F.embedding(layout.predictors, joined)


def trunk_of(model: nn.Module) -> nn.Module:
    """Return `model` without its head.

    Llama 4 names a base that it does not have; its trunk is the part with the embeddings.
    """
    from transformers import PreTrainedModel

    is_whole = model.base_model is model and model.get_output_embeddings() is not None
    if is_whole and not model.config.is_encoder_decoder:
        embeddings = model.get_input_embeddings()
        for part in model.children():
            if isinstance(part, PreTrainedModel) and embeddings in part.modules():
                return trunk_of(part)
    return model.base_model


def set_mode(model: nn.Module, mode: str) -> None:
    """Set the block attention, or for `single` the model's own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, block_attention)
    implementation = own_attention(model) if mode == "single" else NAME
    text_config = model.config.get_text_config()
    if mode != "single" and text_config is not model.config:
        of_text = [n for n in model.config.sub_configs if getattr(model.config, n) is text_config]
        implementation = dict.fromkeys(of_text, implementation)  # the vision part keeps its own
    model.set_attn_implementation(implementation)
