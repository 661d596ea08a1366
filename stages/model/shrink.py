"""Shrink a model config to a tiny one of the same architecture: few narrow layers of every kind.

    shrink(config)                                     # vocabulary and context stay
    shrink(config, {"max_position_embeddings": 512})   # with a limit of one's own

The rules go by field names that the configs of transformers share. If the shrunk sizes do not fit
together, building the model fails, or its first pass.

Not of the spine: dry runs and the trials of families use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    16: """
        q_lora_rank kv_lora_rank hidden_size_per_layer_input mamba_d_state state_size
        ssm_state_size adapter_rank d_head linear_key_head_dim linear_value_head_dim linear_head_dim
    """,
    8: """
        num_experts num_local_experts n_routed_experts moe_num_experts chunk_size mamba_chunk_size
        rotary_dim floor_scale
    """,
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


def shrink(config: PretrainedConfig, limits: Mapping[str, int] | None = None) -> None:
    """Limit every size in `config`, and cut its per-layer lists to the layers that are left.

    Configs inside it stay as they are.

    Args:
        config: Config of a model, or of a part of one; it is changed.
        limits: Upper limits by field name, besides the built-in ones.
    """
    sizes = vars(config)
    num_layers = _first_count(sizes, _LAYERS)
    kept_layers = _kept_layers(sizes, num_layers)
    most = {**_MOST, **dict.fromkeys(_LAYERS, kept_layers), **dict.fromkeys(_QUERY_HEADS, _HEADS)}
    most |= limits or {}
    related = {**_key_heads(sizes), **_widths(sizes), **_mamba_heads(sizes)}
    width = _head_width(config)
    for name, size in list(sizes.items()):
        if name in related:
            smaller = related[name]
        elif isinstance(size, list):
            smaller = size
            if num_layers and len(size) == num_layers:
                smaller = size[:kept_layers]
            elif _are_layers(name, size, num_layers):
                smaller = [layer for layer in size if layer < kept_layers]
            if name in most:
                smaller = [min(each, most[name]) if _is_count(each) else each for each in smaller]
        elif _is_count(size) and name in most:
            smaller = min(size, most[name])
        else:
            continue
        setattr(config, name, smaller)
    rope = sizes.get("rope_parameters") or {}
    if "mrope_section" in rope:  # how many frequencies turn by time, by height and by width
        half = sum(rope["mrope_section"]) * _head_width(config) // width
        section = half // 3
        config.rope_parameters = {**rope, "mrope_section": [half - 2 * section, section, section]}
    keep_layers(config, kept_layers)


def keep_layers(config: PretrainedConfig, count: int) -> None:
    """Drop the config's settings of single layers from number `count` on.

    Gemma 4 has other sizes in some layers, and transformers refuses a config with settings for
    layers that do not exist.
    """
    own_sizes = getattr(vars(config).get("_heterogeneity_spec"), "per_layer_overrides", {})
    if own_sizes:
        kept = {layer: sizes for layer, sizes in own_sizes.items() if layer < count}
        config.per_layer_config = kept or None


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
            are_layers = _are_layers(name, size, num_layers)
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
        rope = {**(sizes.get("rope_parameters") or {}), "mrope_section": None}
        is_bound = "[" in str(rope)  # by a list of a head's frequencies
        smaller["head_dim"] = width if is_bound else min(width, _HEAD_WIDTH)
        if sizes.get("hidden_size") == num_heads * width:
            for name in {"hidden_size", "cross_attention_hidden_size"} & set(sizes):
                smaller[name] = min(num_heads, _HEADS) * smaller["head_dim"]
    if _is_count(sizes.get("attention_hidden_size")):  # Zamba's attention reads two states
        smaller["attention_hidden_size"] = 2 * _HIDDEN
        smaller["attention_head_dim"] = 2 * _HIDDEN // _HEADS
    return smaller


def _head_width(config: PretrainedConfig) -> int:
    """Return the width of an attention head; 0 if the config does not say it."""
    sizes = vars(config)
    num_heads, hidden_size = _first_count(sizes, _QUERY_HEADS), sizes.get("hidden_size", 0)
    return sizes.get("head_dim") or (hidden_size // num_heads if num_heads else 0)


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


def _are_layers(name: str, numbers: list[Any], num_layers: int | None) -> bool:
    """Return whether the list holds numbers of layers, such as those with attention."""
    is_token = name.endswith(("token_id", "token_index"))
    return bool(numbers and not is_token) and all(
        type(number) is int and 0 <= number < (num_layers or 0) for number in numbers
    )


def _is_count(size: Any) -> bool:
    return type(size) is int and size > 0
