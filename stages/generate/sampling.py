"""The distribution that the `transformers` engine samples from, and one draw from it.

Pure functions on tensors; B rows, V ids. The steps and their order are vLLM's: mask end tokens
before min_tokens, penalties, temperature, min_p, top_k and top_p. The remaining ids are
renormalised in float32. The logprob of a sampled id is always read from this distribution.
"""

from __future__ import annotations

import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .options import Sampling


def processed_logprobs(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    position: int,
    stop_ids: torch.Tensor,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of the next id, [B, V] float32.

    Args:
        logits: [B, V], raw.
        sampling: The penalties, temperature and filters to apply.
        position: Place of the next id in the completion, from 0.
        stop_ids: [S] int64: masked before `min_tokens`.
        seen: [B, V] bool: the id is in the prompt or completion. Needed only for the repetition
            penalty.
        counts: [B, V]: how often the id is in the completion. Needed only for the other penalties.

    At temperature 0 the logprobs are those at temperature 1, as vLLM reports them.
    """
    logits = logits.float()
    if position < sampling.min_tokens:
        logits = logits.index_fill(-1, stop_ids, -torch.inf)
    if seen is not None:
        penalty = sampling.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, penalized, logits)
    if counts is not None:
        logits = logits - sampling.frequency_penalty * counts
        logits = logits - sampling.presence_penalty * (counts > 0)
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        logits = MinPLogitsWarper(sampling.min_p)(None, logits)
    if sampling.top_k > 0:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits.log_softmax(-1)


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """Draw one id per row, [B].

    Inverts the cumulative distribution of `logprobs` [B, V] at `uniforms` [B] float64 in [0, 1). A
    row's id depends on its own number only, not on its batch-mates. At temperature 0 the likeliest
    id is taken.
    """
    if temperature == 0:
        return logprobs.argmax(-1)
    mass = logprobs.double().exp().cumsum(-1)
    thresholds = (uniforms * mass[:, -1]).unsqueeze(-1)
    ids = torch.searchsorted(mass, thresholds, right=True).squeeze(-1)
    return ids.clamp(max=logprobs.shape[-1] - 1)
