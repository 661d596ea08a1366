"""Attention that keeps the rollouts of one strip apart, and the hidden states it gives.

`shared`: a group's prompt is in the strip once; each completion attends to it and to itself.
`packed`: each rollout is a piece of its own, prompt included. In both modes attention runs over
blocks of spans with similar lengths (layout.py has the picture). On a GPU it may run instead by
torch's FlashAttention for sequences of any lengths, which needs no padding and reads no mask.
`single` is the reference and the last resort: one rollout after another through the model's own
attention.

The block attention is registered in transformers' attention interface, so every decoder that uses
the interface works. It refuses features that it cannot compute (position biases, chosen keys);
`choose_mode` in verify.py then takes the next simpler mode. Layers with a state (Mamba, gated delta
rule, short convolutions) run over the same blocks; each of them reads a shared prompt anew.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.stages.model.loading import own_attention

from .gpu.flash import Flash
from .layout import Block, Layout, Runs, Scoring
from .media import embed, reader_of

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
    module: nn.Module | None,
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
        module: The layer. None: one without chunks or temperatures.
        queries: [1, H, L, e].
        keys: [1, h, L, e].
        values: [1, h, L, e].
        attention_mask: Must be None.
        layout: The row's spans.
        scaling: Factor of the scores. Default: e ** -0.5.
        sliding_window: Keys that a query sees, including its own. Default: no limit.
        softcap: Limit of the scores. Default: none.
        s_aux: [H] sinks. Default: none.
        position_bias: Must be None.

    Returns:
        [1, L, H, e], and None for the attention weights.

    Raises:
        NotImplementedError: An option is given that block attention cannot compute.
    """
    options |= {"masks": attention_mask, "position biases": position_bias}
    for name, option in options.items():
        if option is not None and name not in _WITHOUT_EFFECT:
            raise NotImplementedError(f"block attention knows no {name}")
    # transformers tells chunks to its own masks alone
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    is_chunk = "chunked_attention" in kinds and kinds[module.layer_idx] == "chunked_attention"
    scoring = Scoring(
        queries.shape[-1] ** -0.5 if scaling is None else scaling,
        module.config.attention_chunk_size if is_chunk else sliding_window,
        is_chunk,
        softcap,
        s_aux,
    )
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        queries = queries * _temperature_ratios(module, layout.positions).to(queries.dtype)
    queries, keys, values = (
        states.squeeze(0).transpose(0, 1) for states in (queries, keys, values)
    )
    if layout.runs is not None and not (
        is_chunk and scoring.window < layout.runs.copied.longest[1]
    ):
        return attend_runs(queries, keys, values, layout.runs, scoring)[None], None
    outputs = [
        attend_block(
            _take(queries, block.queries).transpose(1, 2),
            _take(keys, block.keys).transpose(1, 2),
            _take(values, block.keys).transpose(1, 2),
            block,
            scoring,
        )
        .transpose(1, 2)
        .flatten(0, 1)
        for block in layout.blocks.parts
    ]
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _take(joined, layout.blocks.gather)[None], None


def _temperature_ratios(module: nn.Module, positions: Tensor) -> Tensor:
    """Return [L, 1]: each position's temperature over the temperature at its place in the strip.

    Layers of Llama 4 take the latter for the former.
    """

    def temperatures(places: Tensor) -> Tensor:
        logarithms = torch.log1p(torch.floor((places + 1.0) / module.floor_scale))
        return logarithms * module.attn_scale + 1.0

    places = torch.arange(positions.shape[1], device=positions.device)
    return (temperatures(positions[0]) / temperatures(places))[:, None]


def attend_runs(
    queries: Tensor, keys: Tensor, values: Tensor, runs: Runs, scoring: Scoring
) -> Tensor:
    """Attend over all spans by torch's kernel for sequences of any lengths.

    Queries [L, H, e], keys and values [L, h, e] -> [L, H, e]. A prefix is read where it stands, in
    a call of its own, unless a window ends within it. A chunk must hold all keys. Raises
    NotImplementedError for logit caps and sinks.
    """
    if scoring.softcap is not None or scoring.sinks is not None:
        raise NotImplementedError("it knows no logit caps and no sinks")
    window = None if scoring.is_chunk else scoring.window
    if window is not None and window >= runs.copied.longest[1]:
        window = None
    queries = queries.to(values.dtype)
    keys = keys.to(values.dtype)
    calls = runs.calls
    if not calls or (window is not None and len(calls) > 1):
        calls = (runs.copied,)
        keys, values = (_take(states, runs.keys) for states in (keys, values))
    return Flash.apply(queries, keys, values, calls, scoring.scaling, window)


def attend_block(
    queries: Tensor, keys: Tensor, values: Tensor, block: Block, scoring: Scoring
) -> Tensor:
    """Attend within one block.

    Queries [n, H, q, e], keys and values [n, h, k, e] of the block's spans -> [n, H, q, e].
    """
    num_spans, num_heads, num_queries, _ = queries.shape
    num_keys, width = values.shape[2:]
    queries_per_key = num_heads // keys.shape[1]
    if scoring.window is not None and scoring.window >= num_keys:
        scoring = scoring._replace(window=None)
    if scoring.sinks is not None:
        # one more key, the first, whose score is the sink, and whose value is zero; kernels want
        # widths that are multiples of 8
        queries = F.pad(queries, (0, 8))
        queries[..., -1] = (scoring.sinks / scoring.scaling)[:, None]
        keys, values = (F.pad(states, (0, 8, 1, 0)) for states in (keys, values))
        keys[:, :, 0, -1] = 1
    is_short = num_keys <= _SHORT
    if queries.device.type == "cpu" and values.dtype == torch.bfloat16:
        # at this point autocast has cast only the values to bfloat16
        is_short |= num_heads * num_spans * num_queries * num_keys <= _KEPT_ITEMS
    if scoring.softcap is not None or (queries.device.type == "cpu" and is_short):
        return attend_by_products(queries, keys, values, block, scoring)[..., :width]
    mask = None
    if scoring.window is not None or scoring.sinks is not None or not block.has_no_prefix:
        mask = block.mask(scoring, queries.dtype)
    # of a GPU's fused kernels only flash attention takes fewer key heads than query heads, and it
    # takes neither a mask nor float32
    takes_fewer_heads = mask is None and queries.dtype != torch.float32
    if queries_per_key > 1 and queries.device.type != "cpu" and not takes_fewer_heads:
        keys = keys.repeat_interleave(queries_per_key, 1)
        values = values.repeat_interleave(queries_per_key, 1)
        queries_per_key = 1
    output = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scoring.scaling,
        enable_gqa=queries_per_key > 1,
    )
    return output[..., :width]


def attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, block: Block, scoring: Scoring
) -> Tensor:
    """Attend within one block by two matrix products, with softmax in float32.

    Shapes are as in `attend_block`; with sinks, the first key is theirs. All queries of a key
    head are one matrix. For short spans on a CPU, the backward pass in bfloat16 is several times
    faster than the fused kernel's. If queries and keys are the same tokens, `_ROWS` queries at a
    time meet the keys up to their own.
    """
    mask = block.mask(scoring, queries.dtype)
    if not block.has_no_prefix or scoring.sinks is not None:
        first_hidden = 0 if scoring.window is not None else int(block.prefix_lengths.min())
        return _Products.apply(queries, keys, values, mask[..., first_hidden:], scoring)
    outputs = []
    for low in range(0, queries.shape[2], _ROWS):
        high = min(low + _ROWS, keys.shape[2])
        rows = slice(low, low + _ROWS)
        first_hidden = 0 if scoring.window is not None else low
        outputs.append(
            _Products.apply(
                queries[:, :, rows],
                keys[:, :, :high],
                values[:, :, :high],
                mask[:, :, rows, first_hidden:high],
                scoring,
            )
        )
    return torch.cat(outputs, 2)


class _Products(torch.autograd.Function):
    """Attention by products that keeps the weights only in the values' dtype.

    Autograd would keep them in float32 too, which is three times the memory. `mask` covers only the
    last keys; every query sees the keys before them.
    """

    @staticmethod
    def forward(ctx, queries, keys, values, mask, scoring):
        ctx.queries_per_key = queries.shape[1] // keys.shape[1]
        ctx.scaling = scoring.scaling
        ctx.softcap = scoring.softcap
        ctx.query_dtype = queries.dtype
        ctx.key_dtype = keys.dtype
        # each is laid out once in the order that the products read; a product of strided matrices
        # would copy them every time
        scaled = torch.empty(queries.shape, device=queries.device)
        torch.mul(queries.float(), scoring.scaling, out=scaled)
        scaled = _fold(scaled, ctx.queries_per_key)
        keys = keys.float().contiguous()
        values = values.contiguous()
        # scores in bfloat16 would add a third to the error of the logprobs
        with torch.autocast(queries.device.type, enabled=False):
            scores = scaled @ keys.transpose(-1, -2)
            if ctx.softcap is not None:
                scores.div_(ctx.softcap).tanh_().mul_(ctx.softcap)
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
            if ctx.softcap is not None:
                capped = (scaled @ keys.transpose(-1, -2)).div_(ctx.softcap).tanh_()
                grad_scores *= 1 - capped.square_()
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
    if layout.media is not None:
        rows = [embed(trunk, layout.ids, layout.media)]
        trunk = reader_of(trunk, rows[0])
    options = {"attention_mask": None, "position_ids": layout.positions, "layout": layout}
    if single:
        if layout.sequence_lengths:  # such rollouts show no pictures
            rows = [{"input_ids": part} for part in layout.ids.split(layout.sequence_lengths, 1)]
        # plain positions are the model's own
        options = {} if layout.positions.ndim == 2 else {"position_ids": layout.positions}
    else:
        for layer in state_layers(trunk):
            layer.forward = partial(run_over_spans, layer, layout=layout)
    outputs = [trunk(**row, use_cache=False, **options) for row in rows]
    states = [output.last_hidden_state.squeeze(0) for output in outputs]
    joined = torch.cat(states) if len(states) > 1 else states[0]
    return F.embedding(layout.predictors, joined)


def state_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the language model whose state runs on from token to token.

    All of them also mix neighbouring tokens by a convolution.
    """
    return [
        module
        for module in model.get_decoder().modules()
        if any(isinstance(part, nn.Conv1d) for part in module.children())
    ]


def run_over_spans(
    layer: nn.Module, hidden_states: Tensor, *, layout: Layout, **options: object
) -> Tensor:
    """Run a layer with a state over each span and the prefix before it: [1, L, d] -> [1, L, d].

    A line of a block is padded at its end, which no token before it reads.
    """
    outputs = []
    places = []  # of each query among the outputs, laid end to end
    first = 0
    for block in layout.blocks.parts:
        states = F.embedding(block.keys, hidden_states[0])
        outputs.append(type(layer).forward(layer, states, **options).flatten(0, 1))
        starts = torch.arange(first, first + block.keys.numel(), block.keys.shape[1])
        starts = starts.to(block.keys.device) + block.prefix_lengths
        columns = torch.arange(block.queries.shape[1], device=block.keys.device)
        places.append((starts[:, None] + columns).flatten())
        first += block.keys.numel()
    return F.embedding(torch.cat(places)[layout.blocks.gather], torch.cat(outputs))[None]


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
    for layer in state_layers(model):
        vars(layer).pop("forward", None)  # `hidden_states` sets another
    implementation = own_attention(model) if mode == "single" else NAME
    text_config = model.config.get_text_config()
    if mode != "single" and text_config is not model.config:
        of_text = [n for n in model.config.sub_configs if getattr(model.config, n) is text_config]
        implementation = dict.fromkeys(of_text, implementation)  # the vision part keeps its own
    model.set_attn_implementation(implementation)
