"""Positions of three axes (M-RoPE): the time, row and column of each token.

Text counts all three on together. A picture of h × w features begins at the next position p: its
feature k is at p, p + k // w and p + k % w, and the text after it goes on at p + max(h, w).
Source: Qwen2-VL, arXiv:2409.12191, section 2.1. So a picture takes fewer positions than ids.

    ids     7  f0 f1 f2 f3 f4 f5  8  9      one picture of 2 × 3 features
    plain   0  1  2  3  4  5  6   7  8
    time    0  1  1  1  1  1  1   4  5
    row     0  1  1  1  2  2  2   4  5
    column  0  1  2  3  1  2  3   4  5

Not of the spine: only prompts with pictures need it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Grid = tuple[int, int]
"""Rows and columns of a picture's features."""


def shifts(length: int, places: np.ndarray, grids: Sequence[Grid], before: int = 0) -> np.ndarray:
    """Return what a sequence's plain positions are shifted by: [3, length + 1] int64.

    Args:
        length: Ids of the sequence. The last column is the shift of what follows it.
        places: [m] int64, ascending: positions of the pictures' features in the sequence.
        grids: Grid of each picture, in the order of the places.
        before: Shift of what precedes the sequence.
    """
    shift = np.full((3, length + 1), before)
    counts = [rows * columns for rows, columns in grids]
    firsts = np.cumsum([0, *counts])[:-1]
    for (rows, columns), count, start in zip(grids, counts, places[firsts], strict=True):
        feature = np.arange(count)
        axes = np.stack([np.zeros_like(feature), feature // columns, feature % columns])
        end = start + count
        shift[:, end:] = shift[0, start] + max(rows, columns) - count
        shift[:, start:end] += axes - feature
    return shift
