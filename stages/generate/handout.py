"""The requests that an engine draws: shard after shard, each claimed when it is needed.

While the engine still has rows unanswered, the next shard comes only when fewer than `ahead` are
left, and only where the other processes that share the work find one as well: so an engine that
decodes many rows at once has no empty places at the end of a shard, and none takes everything. With
`ahead` = 1 a batch never holds rows of two shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quiver.stages.common.claims import Alone, Claims
from quiver.stages.generate.engine import Request

from .rows import Rows


class Handout:
    """An iterator of requests that may end for now, and go on when rows are answered."""

    def __init__(
        self, rows: Rows, rows_of: Callable[[int], range], claims: Alone | Claims, ahead: int
    ) -> None:
        """`rows_of`: the rows of a shard."""
        self.asked: set[int] = set()
        self.waiting: set[int] = set()
        """Rows of claimed shards that have no answer; who checks the answers takes them out."""
        self._rows, self._rows_of, self._claims, self._ahead = rows, rows_of, claims, ahead
        self._coming: Iterator[Request] = iter(())

    def __iter__(self) -> Handout:
        return self

    def __next__(self) -> Request:
        request = next(self._coming, None)
        if request is None and len(self.waiting) < self._ahead and self.open():
            request = next(self._coming, None)
        if request is None:
            raise StopIteration
        return request

    def open(self) -> bool:
        """Claim the next shard; whether there was one."""
        index = self._claims.take()
        if index is None:
            return False
        rows = self._rows_of(index)
        self.asked.update(rows)
        self.waiting.update(rows)
        self._coming = self._rows.requests(rows)
        return True
