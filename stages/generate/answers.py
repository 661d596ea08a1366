"""Whether an engine's answers are whole. It is not trusted: an answer counts only when it is one
row's that was asked for, once, and a probability; else the stage stops and nothing of the shard is
written."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quiver.schemas.errors import NumericError, QuiverError, SchemaError, printable
from quiver.schemas.rollouts import FINISH_REASONS

from .engine import Completion


class Answers:
    """Which rows the engine was asked for, and which it has answered."""

    def __init__(self, engine: str, vocabulary_size: int, max_tokens: int) -> None:
        self.unanswered: set[int] = set()
        self._asked: set[int] = set()
        self._engine = engine
        self._vocabulary_size = vocabulary_size
        self._max_tokens = max_tokens

    def expect(self, indices: Iterable[int]) -> None:
        """These rows are asked for."""
        self._asked.update(indices)
        self.unanswered.update(indices)

    def check(self, completion: Completion) -> None:
        """SchemaError or NumericError unless the completion is whole, and of a row that was asked
        for and has no answer."""
        index, ids, logprobs, finish_reason, _ = completion
        row = f"row {printable(index)}"
        if index not in self.unanswered:
            problem = "answered twice" if index in self._asked else "never asked for"
            raise self._error(f"{row} was {problem}")
        self.unanswered.remove(index)
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
        if len(ids) > self._max_tokens:
            raise self._error(f"{row}: {len(ids)} ids, max_tokens is {self._max_tokens}")
        outside = ids[(ids < 0) | (ids >= self._vocabulary_size)]
        if len(outside):
            raise self._error(
                f"{row}: id {outside[0]} is outside the vocabulary of {self._vocabulary_size}"
            )
        if finish_reason not in FINISH_REASONS:
            raise self._error(
                f"{row}: finish_reason {printable(repr(finish_reason))}, expected one of "
                f"{', '.join(FINISH_REASONS)}"
            )
        impossible = logprobs[~np.isfinite(logprobs) | (logprobs > 1e-4)]
        if len(impossible):
            raise self._error(
                f"{row}: logprob {impossible[0]}, expected a finite number of at most 0",
                NumericError,
            )

    def require_all(self) -> None:
        """SchemaError where a row has no answer."""
        if self.unanswered:
            raise self._error(
                f"{len(self.unanswered)} of {len(self._asked)} rows were never answered, the first "
                f"is row {min(self.unanswered)}"
            )

    def _error(self, message: str, kind: type[QuiverError] = SchemaError) -> QuiverError:
        return kind(
            f"engine {self._engine}",
            message,
            state="nothing of this shard was written; finished shards are kept.",
            next="run the same command again",
        )
