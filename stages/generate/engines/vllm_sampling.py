"""The sampling parameters of a row in vLLM's names, for vLLM in this process or over HTTP."""

from __future__ import annotations

from typing import Any

from quiver.stages.generate.engine import Request, Setup


def sampling_parameters(setup: Setup, request: Request) -> dict[str, Any]:
    """Return every value that shapes the row, as plain JSON, so that none of vLLM's defaults
    applies."""
    sampling = setup.sampling
    most_tokens = request.max_tokens or sampling.max_tokens
    shape = sampling.model_dump(
        exclude={"stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "stop"}
    )
    return {
        **shape,
        "n": 1,
        "seed": request.seed,
        "max_tokens": most_tokens,
        "min_tokens": min(sampling.min_tokens, most_tokens),
        "stop": list(sampling.stop),
        "logprobs": 0,
        "flat_logprobs": True,
        # Text is needed only for stop strings; their ids are kept.
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        # Every id that ends a completion is named, including the model's own.
        "ignore_eos": True,
        "stop_token_ids": list(setup.stop_ids),
    }
