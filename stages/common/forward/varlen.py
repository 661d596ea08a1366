"""Attention over one packed row by torch's kernel for sequences of any lengths (FlashAttention): no
fill, and no mask is read.

Each span of the row is one sequence of the kernel: a prompt with its own keys, a completion with
its prompt's keys before its own. The kernel aligns causality with the last key, which is just what
a completion after its prompt needs. It runs on a GPU alone, in bfloat16 or float16; `kernels.py`
decides where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Runs:
    """Spans in the row's order: the queries of span i stand at query_ends[i] … query_ends[i + 1] −
    1 in the row, its keys are those of `keys` at key_ends[i] … key_ends[i + 1] − 1."""

    keys: torch.Tensor
    """[K] int64, index into the row; a prompt's once for each of its completions, and once for
    itself."""
    query_ends: torch.Tensor
    """[s + 1] int32"""
    key_ends: torch.Tensor
    """[s + 1] int32"""
    longest: tuple[int, int]
    """Most queries and most keys of one span."""


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, … for each of `lengths` [n] in turn: [Σ lengths] int64."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def make_runs(spans: np.ndarray, device: torch.device | str = "cpu") -> Runs:
    """The runs of `spans` [s, 4] (prefix start, prefix end, own start, own end), whose own parts
    make up the whole row."""
    spans = spans[np.argsort(spans[:, 2])]
    own = spans[:, 3] - spans[:, 2]
    lengths = own + spans[:, 1] - spans[:, 0]
    parts = spans.reshape(-1, 2)
    keys = ranges(parts[:, 0], parts[:, 1] - parts[:, 0])
    ends = (
        torch.from_numpy(np.append(0, each.cumsum()).astype(np.int32)).to(device)
        for each in (own, lengths)
    )
    return Runs(torch.from_numpy(keys).to(device), *ends, (int(own.max()), int(lengths.max())))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Runs,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Query [N, H, e] in the row's order, key and value [K, h, e] in that of `runs.keys`, all of
    one dtype -> [N, H, e].

    A window of w lets a query see w keys, its own among them.
    """
    from torch.nn.attention.varlen import (
        varlen_attn,
    )  # 2 s, for torch.compile, which nothing else here needs

    return varlen_attn(
        query, key, value, runs.query_ends, runs.key_ends, *runs.longest,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
