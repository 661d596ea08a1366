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
        index = completion.index
        if index not in self.unanswered:
            problem = "answered twice" if index in self._asked else "never asked for"
            raise self._error(SchemaError, f"row {printable(index)} was {problem}")
        self.unanswered.remove(index)
        problem = self._problem(completion)
        if problem:
            raise self._error(SchemaError, f"row {index}: {problem}")
        logprobs = completion.logprobs
        impossible = logprobs[~np.isfinite(logprobs) | (logprobs > 1e-4)]
        if len(impossible):
            problem = f"logprob {impossible[0]}, expected a finite number of at most 0"
            raise self._error(NumericError, f"row {index}: {problem}")

    def require_all(self) -> None:
        """SchemaError where a row has no answer."""
        if self.unanswered:
            problem = (
                f"{len(self.unanswered)} of {len(self._asked)} rows were never answered, the first "
                f"is row {min(self.unanswered)}"
            )
            raise self._error(SchemaError, problem)

    def _problem(self, completion: Completion) -> str:
        """What is wrong with types, lengths, ids and reason; empty where nothing is."""
        for name, dtype in (("completion_ids", np.int32), ("logprobs", np.float32)):
            array = getattr(completion, name)
            shape = type(array).__name__
            if isinstance(array, np.ndarray):
                if array.dtype == dtype and array.ndim == 1:
                    continue
                shape = f"{array.dtype} {list(array.shape)}"
            return f"{name} is {shape}, expected a flat array of {np.dtype(dtype)}"
        ids = completion.completion_ids
        if len(ids) != len(completion.logprobs):
            return f"{len(ids)} ids but {len(completion.logprobs)} logprobs"
        if len(ids) > self._max_tokens:
            return f"{len(ids)} ids, max_tokens is {self._max_tokens}"
        outside = ids[(ids < 0) | (ids >= self._vocabulary_size)]
        if len(outside):
            return f"id {outside[0]} is outside the vocabulary of {self._vocabulary_size}"
        if completion.finish_reason not in FINISH_REASONS:
            reason = printable(repr(completion.finish_reason))
            return f"finish_reason {reason}, expected one of {', '.join(FINISH_REASONS)}"
        return ""

    def _error(self, kind: type[QuiverError], message: str) -> QuiverError:
        return kind(
            f"engine {self._engine}",
            message,
            state="nothing of this shard was written; finished shards are kept.",
            next="run the same command again",
        )
