"""The requests that an engine draws, and the checks on its answers.

While rows are unanswered, the next shard is taken only if fewer than the engine's `ahead` are left.
The processes that share the work must be able to find one as well. So an engine that decodes many
rows at once has no empty slots at the end of a shard, and no process takes everything. With `ahead`
= 1 a batch never mixes rows of two shards.

Engines are not trusted. An answer counts only if its row was requested and is unanswered, and if
its logprobs are finite and at most 0 (up to rounding). Otherwise the stage stops and
nothing of the shard is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.schemas.errors import NumericError, QuiverError, SchemaError, printable
from quiver.schemas.rollouts import FINISH_REASONS

from .engine import ENGINES, Completion, Request
from .rows import Rows
from .texts import Texts


@dataclass(kw_only=True)
class Requests:
    """Iterator of requests that may end for now, and continue when rows are answered."""

    rows: Rows
    texts: Texts
    take_shard: Callable[[], range | None]
    """Returns the rows of the next shard; None if there is none, at least for now."""
    ahead: int
    vocabulary_size: int
    num_tokens: int = 0
    """Ids sampled so far."""
    _asked: set[int] = field(default_factory=set)
    _unanswered: set[int] = field(default_factory=set)
    _finished: list[tuple[int, Any]] = field(default_factory=list)
    _of_shard: Iterator[Request] = field(default_factory=lambda: iter(()))

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> Request:
        request = next(self._of_shard, None)
        if request is None and len(self._unanswered) < self.ahead and self.open_shard():
            request = next(self._of_shard, None)
        if request is None:
            raise StopIteration
        return request

    def open_shard(self) -> bool:
        """Take the next shard; return False if there was none."""
        indices = self.take_shard()
        if indices is None:
            return False
        self._asked.update(indices)
        self._unanswered.update(indices)
        self._of_shard = self.rows.requests(indices)
        return True

    def is_done(self) -> bool:
        """True if all rows that were taken are finished."""
        return not self._unanswered

    def answer(self, completion: Completion) -> None:
        """Accept a completion. Raises SchemaError or NumericError: see `check`."""
        self.check(completion, self.rows.config.sampling.max_tokens)
        self._finished.append((completion.index, completion))

    def finished_rows(self) -> list[tuple[int, Any]]:
        """Return (index, input for `table`) of each row that finished since the last call."""
        finished_rows = self._finished
        self._finished = []
        return finished_rows

    def table(self, start: int, finished: list[Any]) -> pa.Table:
        """Return the finished rows from `start` on, ordered by index. [rows]"""
        ids = [completion.completion_ids for completion in finished]
        return self.rows.table(start, finished, self.texts.decode_all(ids))

    def require_completion(self, answer: object) -> None:
        """Raise SchemaError unless an answer is a Completion with the index of a row."""
        if not isinstance(answer, Completion):
            raise self._error(f"it answered with {type(answer).__name__}, expected a Completion")
        if not isinstance(answer.index, int | np.integer):
            raise self._error(f"it answered row {type(answer.index).__name__}, expected an int")

    def check(self, completion: Completion, max_tokens: int) -> None:
        """Check a completion and mark its row as answered.

        Raises SchemaError or NumericError if the completion is malformed, or if its row was not
        requested or already has an answer.
        """
        index = completion.index
        ids = completion.completion_ids
        logprobs = completion.logprobs
        row = f"row {printable(index)}"
        if index not in self._unanswered:
            problem = "answered twice" if index in self._asked else "never asked for"
            raise self._error(f"{row} was {problem}")
        self._unanswered.remove(index)
        for name, array, dtype in (
            ("completion_ids", ids, "int32"),
            ("logprobs", logprobs, "float32"),
        ):
            shape = type(array).__name__
            if isinstance(array, np.ndarray):
                if array.dtype == dtype and array.ndim == 1:
                    continue
                shape = f"{array.dtype} {list(array.shape)}"
            raise self._error(f"{row}: {name} is {shape}, expected a flat array of {dtype}")
        if len(ids) != len(logprobs):
            raise self._error(f"{row}: {len(ids)} ids but {len(logprobs)} logprobs")
        if len(ids) > max_tokens:
            raise self._error(f"{row}: {len(ids)} ids, max_tokens is {max_tokens}")
        outside = ids[(ids < 0) | (ids >= self.vocabulary_size)]
        if len(outside):
            raise self._error(
                f"{row}: id {outside[0]} is outside the vocabulary of {self.vocabulary_size}"
            )
        if completion.finish_reason not in FINISH_REASONS:
            reason = printable(repr(completion.finish_reason))
            raise self._error(
                f"{row}: finish_reason {reason}, expected one of {', '.join(FINISH_REASONS)}"
            )
        if not isinstance(completion.stop_reason, str | None):
            found = type(completion.stop_reason).__name__
            raise self._error(f"{row}: stop_reason is {found}, expected str or None")
        impossible = logprobs[~np.isfinite(logprobs) | (logprobs > 1e-4)]
        if len(impossible):
            raise self._error(
                f"{row}: logprob {impossible[0]}, expected a finite number of at most 0",
                NumericError,
            )
        self.num_tokens += len(ids)

    def settle(self) -> None:
        """Check that the engine answered every row before it stopped. Raises SchemaError."""
        if self._unanswered:
            raise self._error(
                f"{len(self._unanswered)} of {len(self._asked)} rows were never answered, the "
                f"first is row {min(self._unanswered)}"
            )

    def _error(self, message: str, kind: type[QuiverError] = SchemaError) -> QuiverError:
        name = self.rows.config.engine
        next = "run the same command again" if name in ENGINES else "correct the engine"
        if kind is NumericError:  # the same weights give the same again
            next = f"{'look' if name in ENGINES else f'{next}, or look'} at the policy's weights"
        return kind(
            f"engine {name}",
            message,
            state="nothing of this shard was written; finished shards are kept.",
            next=next,
        )
