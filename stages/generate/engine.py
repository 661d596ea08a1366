"""What an engine is: ids in, ids and their logprobs out. The registry, and how one is made.

An engine is a class whose constructor takes a `Setup`, with `info`, `generate` and `close`. It may
answer in any order. What it answers is checked: see `requests`.

    engine = make_engine("vllm", setup)
    for completion in engine.generate(requests):
        ...
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common import plugins
from quiver.stages.common.config import Config, parse
from quiver.stages.common.store import Version

from .options import Sampling, ScriptedOptions, TransformersOptions, VllmOptions, VllmServerOptions


class Picture(NamedTuple):
    """A picture in a prompt."""

    content: bytes
    """A PNG, JPEG or WebP that was checked."""
    start: int
    """Where its ids begin in the prompt."""
    length: int
    """How many there are."""


class Request(NamedTuple):
    """One completion to make. `index` is the row's place among all rows; `seed` decides its draws,
    alone. In an episode of turns a row's requests follow one another."""

    index: int
    prompt_ids: np.ndarray
    """[P] int32: all that the model reads before the completion."""
    seed: int
    turn: int = 0
    """Of an episode; its number, from 0."""
    max_tokens: int | None = None
    """Most ids of the completion; None: those of `Sampling`."""
    pictures: tuple[Picture, ...] = ()
    """In the order of their places."""


class Completion(NamedTuple):
    """The answer to a row's request: `completion_ids` [T] int32, a sampled end token last;
    `logprobs` [T] float32 of those ids.

    `logprobs` are of the distribution that was sampled from (after temperature and all else of
    `Sampling`). `finish_reason` is stop, length or abort; `stop_reason` the id that stopped it, or
    the stop string that the last id completes, where one did.
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
    """Every id that ends a completion; beside these only the texts of `sampling.stop` do (see
    `stopping`)."""
    max_model_len: int
    """Most ids of prompt and completion together that the engine has to take."""
    dtype: str = "auto"
    device: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    base: Version | None = None
    """The weights that the policy's adapter goes on, where `options.lora` asks for that or the
    policy has no others; None: load the policy's own."""
    most_pictures: int = 0
    """In one prompt."""
    longest: int | None = None
    """Most ids that a row of the prompts can have, by which a cache may be sized; None:
    max_model_len."""
    resident: bool = False
    """Whether the engine is asked to sleep behind its rows and to take a later policy: see
    `Engine.sleep`. ConfigError where one that has this cannot do it here."""
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

        `requests` may end for now, and may be empty: there are more when these are answered, in the
        same call or in another.
        """
        ...

    def sleep(self) -> bool:
        """Give back the device's memory until `take`. False where it cannot; it is closed then.

        May be left out, with `take`: each policy has a fresh engine in a process of its own.
        """
        ...

    def take(self, setup: Setup) -> bool:
        """Wake up with the policy of `setup`, and all else that it says, as one does that is made
        from it; its files are checked. At any doubt False, or an error: it is closed, and a fresh
        one does the work. `info` and `ahead` may be others then."""
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
    "vllm-server": Entry(
        "quiver.stages.generate.engines.vllm_server:VllmServerEngine",
        "vLLM servers that somebody runs, named by their URLs; their weights are checked",
        VllmServerOptions,
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
    if engine in ENGINES:
        for name in options.keys() - ENGINES[engine].options.model_fields.keys():
            owners = [other for other in ENGINES if name in ENGINES[other].options.model_fields]
            if owners:
                raise ConfigError(
                    "generate.options",
                    f"options.{name} is of engine {' and '.join(owners)}, not of {engine}",
                    next="quiver keys generate.engine",
                )
        return parse(ENGINES[engine].options, options, "generate.options", is_section=True)
    if ":" in engine:
        return None
    near = difflib.get_close_matches(engine, ENGINES, 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"generate.engine {printable(repr(engine))}",
        f"no such engine, expected one of {', '.join(ENGINES)}, or module:Class or "
        f"file.py:Class of your own{hint}",
        next=f"set generate.engine = {near[0]!r}" if near else "quiver engines",
    )


def make_engine(name: str, setup: Setup) -> Engine:
    """The engine of that name, or of that dotted path, ready to generate. ConfigError,
    ResourceError."""
    path = ENGINES[name].path if name in ENGINES else name
    engine_class, _ = plugins.load(path, "generate.engine")
    return engine_class(setup)


def code_hash(engine: str, options: Config | None) -> str:
    """Hash of the user's own code that answers, be it an engine or a script; empty where there is
    none. The code is not run. ConfigError."""
    if engine not in ENGINES:
        return plugins.fingerprint(plugins.locate(engine, "generate.engine"))
    if isinstance(options, ScriptedOptions) and ":" in options.script:
        return plugins.fingerprint(plugins.locate(options.script, "generate.options.script"))
    return ""
