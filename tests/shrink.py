"""Shrinks a model config to a tiny one of the same architecture, on which that can be tried.

Vocabulary, context and windows become tiny, too: an effect that needs a row longer than a window of
4,096 then shows with a row of 40.

    tiny = shrink(AutoConfig.from_pretrained(folder))
"""

from __future__ import annotations

import copy
from typing import Any

from quiver.stages.model.loading import configs_of
from quiver.stages.model.shrink import shrink as shrink_part

VOCABULARY = 96
_NAMES = {
    512: "max_position_embeddings n_positions n_ctx max_seq_len",
    6: """
        sliding_window sliding_window_size window_size attention_window_size attention_chunk_size
        attention_window local_attention index_topk
    """,
    4: "index_block_size",
}
_MOST = {name: most for most, names in _NAMES.items() for name in names.split()}


def shrink(config: Any) -> Any:
    """Return a copy of `config` with tiny sizes, including the configs inside it."""
    tiny = copy.deepcopy(config)
    for part in [*configs_of(tiny)]:
        ids = {name: VOCABULARY for name in vars(part) if "vocab" in name}
        for name in vars(part):
            if name.endswith(("token_id", "token_index")):
                ids[name] = VOCABULARY - 1
        shrink_part(part, _MOST | ids)
    return tiny
