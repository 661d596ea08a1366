"""A config of the same architecture in tiny: few narrow layers of every kind, short windows.

What a row longer than a window of 4,096 shows, a row of 40 shows then. The rules go by the names
that the configs of transformers share; where they do not fit together, building the model fails.

    tiny = shrink(AutoConfig.from_pretrained(folder))
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

VOCABULARY = 96
_HIDDEN = 64
_HEADS = 4
_WINDOW = 6
_MOST_LAYERS = 12
_LAYERS = """
    num_hidden_layers n_layer n_layers num_layers num_blocks encoder_layers decoder_layers
    num_encoder_layers num_decoder_layers num_layers_per_stack
""".split()
_QUERY_HEADS = """
    num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
    decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
    swa_num_attention_heads
""".split()
_KEY_HEADS = "num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads".split()
_WINDOWS = """
    sliding_window sliding_window_size window_size attention_window_size attention_chunk_size
    local_attention index_topk
""".split()
_PERIODS = ("_period", "_interval", "_every_n_layers", "_pattern", "_interleave_step")
_MOST = {
    **dict.fromkeys(
        """
        hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim
        input_embedding_size output_embedding_size lru_width
        hidden_size_global backbone_hidden_size cross_attention_hidden_size
        """.split(),
        _HIDDEN,
    ),
    **dict.fromkeys(
        """
        intermediate_size intermediate_size_mlp moe_intermediate_size dense_intermediate_size
        shared_intermediate_size shared_expert_intermediate_size n_inner d_inner inner_dim d_ff dff
        dim_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size feed_forward_size
        """.split(),
        48,
    ),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 8),
    **dict.fromkeys(
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k".split(), 2
    ),
    **dict.fromkeys("n_group n_groups topk_group num_expert_group zero_expert_num".split(), 2),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx max_seq_len".split(), 512),
    **dict.fromkeys("q_lora_rank kv_lora_rank hidden_size_per_layer_input".split(), 16),
    **dict.fromkeys("mamba_d_state state_size ssm_state_size adapter_rank".split(), 16),
    **dict.fromkeys("chunk_size mamba_chunk_size".split(), 8),
    **dict.fromkeys("linear_num_key_heads linear_num_value_heads linear_num_heads".split(), 2),
    **dict.fromkeys("linear_key_head_dim linear_value_head_dim linear_head_dim".split(), 16),
    "rotary_dim": 8,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
    "num_nextn_predict_layers": 0,
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
"""What is cut to at most so much; widths of heads stay, because rotary frequencies go by them."""


def shrink(config: Any) -> Any:
    """A copy of `config`, those of its parts too, with the sizes of a toy."""
    tiny = copy.deepcopy(config)
    for part in _parts(tiny):
        _shrink(part)
    return tiny


def _parts(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield config
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            yield from _parts(inner)


def _shrink(config: Any) -> None:
    sizes = vars(config)
    heads = _heads(sizes)
    num_layers = next((sizes[name] for name in _LAYERS if _is_count(sizes.get(name))), None)
    kept_layers = _kept_layers(sizes, num_layers)
    num_heads = next((sizes[name] for name in _QUERY_HEADS if _is_count(sizes.get(name))), None)
    for name, size in list(sizes.items()):
        if name in heads:
            size = heads[name]
        elif name == "per_layer_config" and isinstance(size, dict):
            size = {layer: about for layer, about in size.items() if int(layer) < kept_layers}
        elif isinstance(size, list) and name.endswith("token_id"):
            size = [min(token, VOCABULARY - 1) for token in size]
        elif isinstance(size, list) and num_layers:
            if len(size) == num_layers:
                most = _MOST.get(name)
                size = [min(each, most) if most else each for each in size[:kept_layers]]
            elif _are_layers(size, num_layers):
                size = [layer for layer in size if layer < kept_layers]
        elif not _is_count(size):
            continue
        elif name in _LAYERS:
            size = min(size, kept_layers)
        elif name in _QUERY_HEADS:
            size = min(size, _HEADS)
        elif name in _KEY_HEADS:
            size = 1 if size == 1 else _HEADS if size == num_heads else 2
        elif name in _WINDOWS:
            size = min(size, _WINDOW)
        elif "vocab" in name:
            size = min(size, VOCABULARY)
        elif name.endswith(("token_id", "token_index")):
            size = min(size, VOCABULARY - 1)
        else:
            size = min(size, _MOST.get(name, size))
        setattr(config, name, size)


def _kept_layers(sizes: dict[str, Any], num_layers: int | None) -> int:
    """As many of the first layers as hold one of every kind."""
    kept = 2
    for name, size in sizes.items():
        if _is_count(size) and name.endswith(_PERIODS):
            kept = max(kept, size + 1)
        elif isinstance(size, list) and num_layers and size:
            kinds = [str(kind) for kind in size]
            if len(size) != num_layers:
                if not _are_layers(size, num_layers):
                    continue
                kinds = [str(layer in size) for layer in range(num_layers)]
            kept = max(kept, 1 + max(kinds.index(kind) for kind in set(kinds)))
    return min(kept, _MOST_LAYERS, num_layers or kept)


def _heads(sizes: dict[str, Any]) -> dict[str, int]:
    """Hidden size and width of heads, as they hang together in `sizes`."""
    num_heads = next((sizes[name] for name in _QUERY_HEADS if _is_count(sizes.get(name))), None)
    expand = sizes.get("expand", sizes.get("mamba_expand"))
    changed = {}
    width = sizes.get("head_dim")
    hidden = sizes.get("hidden_size")
    if "qk_rope_head_dim" in sizes:
        width = None  # that of rotary positions alone, which stays
    if num_heads and _is_count(width) and _is_count(hidden):
        if "[" not in str(sizes.get("rope_parameters")):  # it may list frequencies of a head
            width = changed["head_dim"] = min(width, 32)
        if hidden == num_heads * sizes["head_dim"]:
            changed["hidden_size"] = _HEADS * width
            if "cross_attention_hidden_size" in sizes:
                changed["cross_attention_hidden_size"] = _HEADS * width
    if _is_count(sizes.get("attention_hidden_size")):  # Zamba's attention reads two states
        changed["attention_hidden_size"] = 2 * _HIDDEN
        changed["attention_head_dim"] = 2 * _HIDDEN // _HEADS
    if _is_count(expand) and _is_count(hidden):
        inner = expand * changed.get("hidden_size", min(hidden, _HIDDEN))
        if "mamba_d_ssm" in sizes:
            changed["mamba_d_ssm"] = inner
        for name in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
            if name in sizes:
                changed[name] = _HEADS
        names = ["mamba_d_head", "mamba_head_dim", "mamba_headdim"]
        if "num_heads" in sizes:  # Mamba 2
            changed["num_heads"] = _HEADS
            names.append("head_dim")
        for name in names:
            if name in sizes:
                changed[name] = inner // _HEADS
    return changed


def _are_layers(numbers: list[Any], num_layers: int) -> bool:
    return bool(numbers) and all(
        isinstance(number, int) and 0 <= number < num_layers for number in numbers
    )


def _is_count(size: Any) -> bool:
    return type(size) is int and size > 0
