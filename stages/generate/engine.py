"""What an engine is: ids in, ids and their logprobs out. The registry, how one is made, and the
check of what it answers.

An engine is a class whose constructor takes a `Setup`, with `info`, `generate` and `close`. It may
answer in any order. It is not trusted: `checked` lets an answer through only when it is one row's,
whole, and a probability; else the stage stops and nothing of the shard is written.

    engine = make_engine("vllm", setup)
    for completion in checked(engine.generate(requests), requests, limits):
        ...
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from quiver.schemas.errors import ConfigError, NumericError, SchemaError, printable
from quiver.schemas.rollouts import FINISH_REASONS
from quiver.stages.common import plugins as dotted
from quiver.stages.common.config import Config, parse
from quiver.stages.common.store import Version
from quiver.stages.generate.options import (
    Sampling,
    ScriptedOptions,
    TransformersOptions,
    VllmOptions,
)


class Request(NamedTuple):
    """One row to make: `index` is its place among all rows; `prompt_ids` [P] int32; `seed` decides
    its draws, alone."""

    index: int
    prompt_ids: np.ndarray
    seed: int


class Completion(NamedTuple):
    """One row's answer: `completion_ids` [T] int32, a sampled end token last; `logprobs` [T]
    float32 of those ids.

    `logprobs` are of the distribution that was sampled from (after temperature and all else of
    `Sampling`). `finish_reason` is stop, length or abort; `stop_reason` the id that stopped it,
    where one did.
    """

    index: int
    completion_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    stop_reason: str | None = None


@dataclass(frozen=True)
class Setup:
    """All that an engine is made from."""

    policy: Version
    sampling: Sampling
    stop_ids: tuple[int, ...]
    """Every id that ends a completion; engines look at nothing else for that."""
    max_model_len: int
    """Most ids of prompt and completion together that the engine has to take."""
    dtype: str = "auto"
    device: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    base: Version | None = None
    """The weights that the policy's adapter goes on, where `options.lora` asks for that; None: load
    the policy's own."""
    longest: int | None = None
    """Most ids that a row of the prompts can have, by which a cache may be sized; None:
    max_model_len."""
    verified: Callable[[], object] = lambda: None
    """Waits until the model's files are checked, which goes on meanwhile: import first, call this,
    then read them. Raises what is wrong with them."""


class Engine(Protocol):
    """What the stage asks of an engine."""

    info: dict[str, Any]
    """Name, version, dtype, device and logprobs mode, for the manifest."""
    ahead: int
    """The next shard's requests come when fewer rows than this are unanswered. May be left out: 1,
    so that a shard's rows stand in no batch with another's, and what comes out does not depend on
    which shards this process does."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """One completion a request, as they finish; takes requests as it has room for them.

        `requests` may end for now: there are more when these are answered, in the same call or in
        another.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class Entry(NamedTuple):
    """A shipped engine: where its class is, what it is, which options it knows."""

    path: str
    description: str
    options: type[Config]


ENGINES = {
    "vllm": Entry(
        "quiver.stages.generate.engines.vllm:VllmEngine",
        "fast; decoder-only models, on a GPU or a CPU; the default",
        VllmOptions,
    ),
    "transformers": Entry(
        "quiver.stages.generate.engines.transformers:TransformersEngine",
        "encoder-decoder models (T5, BART), and whatever vLLM lacks",
        TransformersOptions,
    ),
    "scripted": Entry(
        "quiver.stages.generate.engines.scripted:ScriptedEngine",
        "no model: a small function of prompt and seed; for trying a recipe in a second",
        ScriptedOptions,
    ),
}


def engine_options(engine: str, options: dict[str, Any]) -> Config | None:
    """The options of a shipped engine, checked; None for a user's own engine, which checks its own.
    ConfigError, also for a name that is neither."""
    if engine not in ENGINES and ":" not in engine:
        near = difflib.get_close_matches(engine, ENGINES, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"generate.engine {printable(repr(engine))}",
            f"no such engine, expected one of {', '.join(ENGINES)}, or module:Class or "
            f"file.py:Class of your own{hint}",
            next=f"set generate.engine = {near[0]!r}" if near else "quiver engines",
        )
    return (
        parse(ENGINES[engine].options, options, "generate.options") if engine in ENGINES else None
    )


def make_engine(name: str, setup: Setup) -> Engine:
    """The engine of that name, or of that dotted path, ready to generate. ConfigError,
    ResourceError."""
    return dotted.load(ENGINES[name].path if name in ENGINES else name, "generate.engine")[0](setup)


def prepare(name: str, device: str) -> None:
    """Import what the engine of that name needs, where it is one of ours and takes long."""
    if name in ENGINES:
        getattr(dotted.load(ENGINES[name].path, "generate.engine")[0], "prepare", lambda _: None)(
            device
        )


def code_hash(engine: str, options: Config | None) -> str:
    """sha256 of the user's own code that answers, be it an engine or a script; empty where there is
    none. ConfigError."""
    if engine not in ENGINES:
        return dotted.load(engine, "generate.engine")[1]
    if isinstance(options, ScriptedOptions) and ":" in options.script:
        return dotted.load(options.script, "generate.options.script")[1]
    return ""


@dataclass(frozen=True)
class Limits:
    """What an answer may hold."""

    engine: str
    vocabulary_size: int
    max_tokens: int


class Asked(Protocol):
    """What an engine was asked for so far; rows may be added while it answers."""

    asked: set[int]
    waiting: set[int]
    """Those without an answer."""


def checked(completions: Iterable[Completion], rows: Asked, limits: Limits) -> Iterator[Completion]:
    """Pass on each completion that is whole; SchemaError or NumericError for one that is not, or
    that is missing at the end."""
    for completion in completions:
        if completion.index not in rows.waiting:
            what = "answered twice" if completion.index in rows.asked else "never asked for"
            raise _wrong(limits, f"row {printable(completion.index)} was {what}")
        rows.waiting.discard(completion.index)
        _check_one(completion, limits)
        yield completion
    if rows.waiting:
        what = (
            f"{len(rows.waiting)} of {len(rows.asked)} rows were never answered, the first is row "
            f"{min(rows.waiting)}"
        )
        raise _wrong(limits, what)


def _check_one(completion: Completion, limits: Limits) -> None:
    row, ids, logprobs = f"row {completion.index}", completion.completion_ids, completion.logprobs
    for name, array, dtype in (
        ("completion_ids", ids, np.int32),
        ("logprobs", logprobs, np.float32),
    ):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            found = (
                f"{array.dtype} {list(array.shape)}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise _wrong(
                limits, f"{row}: {name} is {found}, expected a flat array of {np.dtype(dtype)}"
            )
    if len(ids) != len(logprobs):
        raise _wrong(limits, f"{row}: {len(ids)} ids but {len(logprobs)} logprobs")
    if len(ids) > limits.max_tokens:
        raise _wrong(limits, f"{row}: {len(ids)} ids, max_tokens is {limits.max_tokens}")
    outside = ids[(ids < 0) | (ids >= limits.vocabulary_size)]
    if len(outside):
        raise _wrong(
            limits, f"{row}: id {outside[0]} is outside the vocabulary of {limits.vocabulary_size}"
        )
    if completion.finish_reason not in FINISH_REASONS:
        expected = ", ".join(FINISH_REASONS)
        raise _wrong(
            limits,
            f"{row}: finish_reason {printable(repr(completion.finish_reason))}, expected one of "
            f"{expected}",
        )
    bad = logprobs[~np.isfinite(logprobs) | (logprobs > 1e-4)]
    if len(bad):
        raise _wrong(
            limits, f"{row}: logprob {bad[0]}, expected a finite number of at most 0", NumericError
        )


def _wrong(limits: Limits, message: str, error: type = SchemaError) -> Exception:
    return error(
        f"engine {limits.engine}",
        message,
        state="nothing of this shard was written; finished shards are kept.",
        next="run the same command again",
    )
