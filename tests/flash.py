"""FlashAttention for sequences of any lengths on a CPU: torch's operations as plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.attention import _registry, register_flash_attention_impl


def _stretches(query, key, query_starts, key_starts, longest, window, scale, wrong=False):
    """For each stretch: its slices of queries and keys, and its scores [H, q, k]. Query i of n sees
    of m keys those from m − n + i − window[0] up to m − n + i + window[1]; a negative number is no
    limit. `wrong`: as if each query stood one key later."""
    times = query.shape[1] // key.shape[1]
    for number in range(len(query_starts) - 1):
        queries, keys = (
            slice(*starts[number : number + 2].tolist()) for starts in (query_starts, key_starts)
        )
        q, k = query[queries], key[keys].repeat_interleave(times, 1)
        assert len(q) <= longest[0] and len(k) <= longest[1]
        own = torch.arange(len(q))[:, None] + len(k) - len(q) + wrong
        place = torch.arange(len(k))
        is_seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if window[0] >= 0:
            is_seen &= place >= own - window[0]
        if window[1] >= 0:
            is_seen &= place <= own + window[1]
        scores = torch.einsum("qhe,khe->hqk", q, k) * scale
        yield queries, keys, scores.masked_fill(~is_seen, -torch.inf)


def forward(
    query, key, value, query_starts, key_starts, most_queries, most_keys, dropout, causal, debug,
    *, scale, window_size_left, window_size_right, wrong=False, **_,
):  # fmt: skip
    """A query without keys has an output of 0 and an infinite log-sum, as on a GPU."""
    assert dropout == 0.0 and not (causal and (window_size_left, window_size_right) != (-1, 0))
    wide = torch.promote_types(query.dtype, torch.float32)
    output = torch.zeros_like(query)
    log_sums = torch.full((query.shape[1], len(query)), torch.inf, dtype=wide)
    window = window_size_left, window_size_right
    sizes = query_starts, key_starts, (most_queries, most_keys), window, scale
    times = query.shape[1] // key.shape[1]
    for queries, keys, scores in _stretches(query.to(wide), key.to(wide), *sizes, wrong):
        if scores.shape[2]:
            log_sums[:, queries] = scores.logsumexp(-1)
            weights = (scores - log_sums[:, queries, None]).exp()
            v = value[keys].to(wide).repeat_interleave(times, 1)
            output[queries] = torch.einsum("hqk,khe->qhe", weights, v).to(query.dtype)
    random = torch.empty(2, dtype=torch.int64)
    return output, log_sums, random, torch.empty(0), torch.empty(0)


def backward(
    grad, query, key, value, output, log_sums, query_starts, key_starts, most_queries, most_keys,
    dropout, causal, random, unused, *, scale, window_size_left, window_size_right, wrong=False,
):  # fmt: skip
    """The formula of every flash backward pass: it needs no more than the output and log-sums."""
    wide = log_sums.dtype
    times = query.shape[1] // key.shape[1]
    g, q, k, v, o = (states.to(wide) for states in (grad, query, key, value, output))
    grads = [torch.zeros_like(states) for states in (q, k, v)]
    window = window_size_left, window_size_right
    sizes = query_starts, key_starts, (most_queries, most_keys), window, scale
    for queries, keys, scores in _stretches(q, k, *sizes, wrong):
        weights = (scores - log_sums[:, queries, None]).exp()
        wide_v = v[keys].repeat_interleave(times, 1)
        slope = torch.einsum("qhe,khe->hqk", g[queries], wide_v)
        slope = weights * (slope - (g[queries] * o[queries]).sum(-1).T[..., None]) * scale
        wide_k = k[keys].repeat_interleave(times, 1)
        grads[0][queries] = torch.einsum("hqk,khe->qhe", slope, wide_k)
        for found, total in (
            (torch.einsum("hqk,qhe->khe", slope, q[queries]), grads[1]),
            (torch.einsum("hqk,qhe->khe", weights, g[queries]), grads[2]),
        ):
            total[keys] = found.unflatten(1, (-1, times)).sum(2)
    return tuple(each.to(query.dtype) for each in grads)


@contextmanager
def on_cpu(
    forward: Callable[..., tuple[Tensor, ...]] = forward,
    backward: Callable[..., tuple[Tensor, ...]] = backward,
) -> Iterator[None]:
    """Inside, torch's operations run these functions on a CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def installed(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]] = forward,
    backward: Callable[..., tuple[Tensor, ...]] = backward,
    error: Exception | None = None,
) -> Iterator[None]:
    """Inside, torch's switch puts these functions in place of its operations on a CPU under `name`,
    or raises `error`."""

    def register():
        if error is not None:
            raise error
        stack = ExitStack()
        stack.enter_context(on_cpu(forward, backward))
        return SimpleNamespace(remove=stack.close)

    before = _registry._FLASH_ATTENTION_IMPLS[name]
    register_flash_attention_impl(name, register_fn=register)
    try:
        yield
    finally:
        register_flash_attention_impl(name, register_fn=before)
