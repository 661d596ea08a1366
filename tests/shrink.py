"""Shrinks a model config to a tiny one of the same architecture, on which that can be tried.

The tiny config has few narrow layers of every kind, and short windows: an effect that needs a row
longer than a window of 4,096 then shows with a row of 40. The rules go by field names that the
configs of transformers share. If the shrunk sizes do not fit together, building the model fails.

    tiny = shrink(AutoConfig.from_pretrained(folder))
"""

from __future__ import annotations

import copy
from typing import Any

from quiver.stages.model.loading import configs_of
from quiver.stages.model.small import keep_layers

VOCABULARY = 96
_HIDDEN = 64
_HEADS = 4
_HEAD_WIDTH = 32
_MOST_LAYERS = 12
_NAMES = {
    _HIDDEN: """
        hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim
        input_embedding_size output_embedding_size lru_width hidden_size_global
        backbone_hidden_size cross_attention_hidden_size
    """,
    48: """
        intermediate_size intermediate_size_mlp moe_intermediate_size dense_intermediate_size
        shared_intermediate_size shared_expert_intermediate_size n_inner d_inner inner_dim d_ff dff
        dim_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size feed_forward_size
    """,
    512: "max_position_embeddings n_positions n_ctx max_seq_len",
    16: """
        q_lora_rank kv_lora_rank hidden_size_per_layer_input mamba_d_state state_size
        ssm_state_size adapter_rank d_head linear_key_head_dim linear_value_head_dim linear_head_dim
    """,
    8: """
        num_experts num_local_experts n_routed_experts moe_num_experts chunk_size mamba_chunk_size
        rotary_dim floor_scale
    """,
    6: """
        sliding_window sliding_window_size window_size attention_window_size attention_chunk_size
        attention_window local_attention index_topk
    """,
    4: "index_block_size",
    2: """
        num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k n_group n_groups
        topk_group num_expert_group zero_expert_num linear_num_key_heads linear_num_value_heads
        linear_num_heads block_size local_radius global_block_size index_topk_blocks
    """,
    1: "first_k_dense_replace num_random_blocks",
    0: "num_kv_shared_layers num_nextn_predict_layers",
}
"""Upper limit of each size. Widths that determine rotary frequencies are not among them."""
_MOST = {name: most for most, names in _NAMES.items() for name in names.split()}
_LAYERS, _QUERY_HEADS, _KEY_HEADS = (
    names.split()
    for names in (
        """
        num_hidden_layers n_layer n_layers num_layers num_blocks encoder_layers decoder_layers
        num_encoder_layers num_decoder_layers num_layers_per_stack
        """,
        """
        num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
        swa_num_attention_heads
        """,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads",
    )
)
_PERIODS = ("_period", "_interval", "_every_n_layers", "_pattern", "_interleave_step")


def shrink(config: Any) -> Any:
    """Return a copy of `config` with tiny sizes, including the configs inside it."""
    tiny = copy.deepcopy(config)
    for part in [*configs_of(tiny)]:
        _shrink(part)
    return tiny


def _shrink(config: Any) -> None:
    sizes = vars(config)
    num_layers = _first_count(sizes, _LAYERS)
    kept_layers = _kept_layers(sizes, num_layers)
    limits = {**_MOST, **dict.fromkeys(_LAYERS, kept_layers), **dict.fromkeys(_QUERY_HEADS, _HEADS)}
    related = {**_key_heads(sizes), **_widths(sizes), **_mamba_heads(sizes)}
    for name, size in list(sizes.items()):
        is_token = name.endswith(("token_id", "token_index"))
        limit = VOCABULARY if "vocab" in name else VOCABULARY - 1 if is_token else limits.get(name)
        if name in related:
            smaller = related[name]
        elif isinstance(size, list):
            smaller = size
            if num_layers and len(size) == num_layers:
                smaller = size[:kept_layers]
            elif not is_token and _are_layers(size, num_layers):
                smaller = [layer for layer in size if layer < kept_layers]
            if limit is not None:
                smaller = [min(each, limit) if _is_count(each) else each for each in smaller]
        elif _is_count(size) and limit is not None:
            smaller = min(size, limit)
        else:
            continue
        setattr(config, name, smaller)
    keep_layers(config, kept_layers)


def _kept_layers(sizes: dict[str, Any], num_layers: int | None) -> int:
    """Return how many of the first layers contain one layer of every kind."""
    kept = 2
    for name, size in sizes.items():
        if _is_count(size) and name.endswith(_PERIODS):
            kept = max(kept, size + 1)
        if not isinstance(size, list) or not num_layers:
            continue
        kinds = [str(kind) for kind in size]
        if len(size) != num_layers:
            are_layers = not name.endswith("token_id") and _are_layers(size, num_layers)
            kinds = [str(layer in size) for layer in range(num_layers)] if are_layers else []
        kept = max([kept, *(1 + kinds.index(kind) for kind in set(kinds))])
    return min(kept, _MOST_LAYERS, num_layers or kept)


def _key_heads(sizes: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of key heads: one, all, or half of the query heads, as in the original."""
    num_heads = _first_count(sizes, _QUERY_HEADS) or _HEADS
    most = min(num_heads, _HEADS)
    return {
        name: 1 if sizes[name] == 1 else most if sizes[name] == num_heads else max(most // 2, 1)
        for name in _KEY_HEADS
        if _is_count(sizes.get(name))
    }


def _widths(sizes: dict[str, Any]) -> dict[str, int]:
    """Return hidden size and head widths, keeping their relations in `sizes`."""
    num_heads = _first_count(sizes, _QUERY_HEADS)
    width = sizes.get("head_dim")
    smaller = {}
    # with latent attention head_dim is the width of rotary positions, which must not change
    if num_heads and _is_count(width) and "qk_rope_head_dim" not in sizes:
        smaller["head_dim"] = width
        if "[" not in str(sizes.get("rope_parameters")):  # it may list a head's frequencies
            smaller["head_dim"] = min(width, _HEAD_WIDTH)
        if sizes.get("hidden_size") == num_heads * width:
            for name in {"hidden_size", "cross_attention_hidden_size"} & set(sizes):
                smaller[name] = min(num_heads, _HEADS) * smaller["head_dim"]
    if _is_count(sizes.get("attention_hidden_size")):  # Zamba's attention reads two states
        smaller["attention_hidden_size"] = 2 * _HIDDEN
        smaller["attention_head_dim"] = 2 * _HIDDEN // _HEADS
    return smaller


def _mamba_heads(sizes: dict[str, Any]) -> dict[str, int]:
    """Return number and width of a state space's heads; their product is `expand` hidden sizes."""
    expand = sizes.get("expand", sizes.get("mamba_expand"))
    if not (_is_count(expand) and _is_count(sizes.get("hidden_size"))):
        return {}
    inner = expand * _widths(sizes).get("hidden_size", min(sizes["hidden_size"], _HIDDEN))
    smaller = {
        "mamba_d_ssm": inner,
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), _HEADS),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), inner // _HEADS),
    }
    if "num_heads" in sizes:  # Mamba 2
        smaller |= {"num_heads": _HEADS, "head_dim": inner // _HEADS}
    return {name: size for name, size in smaller.items() if name in sizes}


def _first_count(sizes: dict[str, Any], names: list[str]) -> int | None:
    return next((sizes[name] for name in names if _is_count(sizes.get(name))), None)


def _are_layers(numbers: list[Any], num_layers: int | None) -> bool:
    return bool(numbers) and all(
        type(number) is int and 0 <= number < (num_layers or 0) for number in numbers
    )


def _is_count(size: Any) -> bool:
    return type(size) is int and size > 0
