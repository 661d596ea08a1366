"""Which rows of the source an iteration takes.

choose(rows=8, limit=4, seed=7, iteration=1)       # positions of the second four
"""

from __future__ import annotations

import numpy as np


def choose(rows: int, limit: int | None, seed: int, iteration: int) -> list[int]:
    """Positions that `iteration` takes: the next `limit` of seeded shuffles that follow one
    another, none of them twice.

    Where an iteration goes over the end of an epoch, the next shuffle's first rows are those that
    it does not hold yet. The generator is numpy's legacy one, whose stream is frozen: the same seed
    means the same rows on every version.
    """
    if limit is None:
        return list(range(rows))
    size = min(limit, rows)
    order: list[int] = []
    for epoch in range((iteration + 1) * size // rows + 1):
        shuffle = np.random.RandomState([seed % 2**32, epoch]).permutation(rows).tolist()
        num_open = len(order) % size  # rows of an iteration that the epoch before began
        if num_open:
            open_rows = set(order[-num_open:])
            completing = [row for row in shuffle if row not in open_rows][: size - num_open]
            shuffle = list(dict.fromkeys(completing + shuffle))
        order += shuffle
    return order[iteration * size : (iteration + 1) * size]
