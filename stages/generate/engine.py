"""The engine interface (ids in; ids and their logprobs out), the registry, and `make_engine`.

An engine is a class whose constructor takes a `Setup`, with `info`, `generate` and `close`. It may
answer in any order. Its answers are checked in `requests`.

    engine = make_engine("vllm", setup)
    for completion in engine.generate(requests):
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from quiver.schemas.errors import ConfigError, QuiverError, did_you_mean, printable, unexpected
from quiver.schemas.manifest import canonical
from quiver.stages.core import plugins
from quiver.stages.core.config import Config, parse
from quiver.stages.core.store import Version
from quiver.stages.core.store.sharing import CommittedByOther
from quiver.stages.model import checkpoints
from quiver.stages.model.media import Medium

from .options import Sampling, ScriptedOptions, TransformersOptions, VllmOptions, VllmServerOptions


class Request(NamedTuple):
    """One completion to make.

    `index` is the row's index among all rows. `seed` alone decides the row's draws. The requests of
    one episode come one after another.
    """

    index: int
    prompt_ids: np.ndarray
    """[P] int32: everything that the model reads before the completion."""
    seed: int
    turn: int = 0
    """Turn of the episode, from 0."""
    max_tokens: int | None = None
    """Maximum ids of the completion. Default: `Sampling.max_tokens`."""
    media: tuple[Medium, ...] = ()
    """In the order of their positions in the prompt."""


class Completion(NamedTuple):
    """The answer to one request.

    `completion_ids` [T] int32 include the sampled end token, if any, as the last id. `logprobs` [T]
    float32 belong to the distribution that was sampled from: after temperature and everything else
    in `Sampling`. `finish_reason` is stop, length or abort. `stop_reason` is the id that ended the
    completion, or the stop string that the last id completes, if there is one.
    """

    index: int
    completion_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    stop_reason: str | None = None


@dataclass(frozen=True)
class Setup:
    """Everything that an engine is made from."""

    policy: Version
    sampling: Sampling
    stop_ids: tuple[int, ...]
    """Every id that ends a completion. Besides these only the texts of `sampling.stop` do (see
    `stopping`)."""
    max_model_len: int
    """Maximum ids of prompt and completion together that the engine must accept."""
    dtype: str = "auto"
    device: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    base: Version | None = None
    """Weights to put the policy's adapter on, if `options.lora` asks for it or the policy is only
    an adapter. Default: load the policy's own weights."""
    most_media: Mapping[str, int] = field(default_factory=dict)
    """Maximum media in one prompt, by modality."""
    longest: int | None = None
    """Maximum ids of any row of these prompts, for sizing a cache. Default: max_model_len."""
    resident: bool = False
    """True if the engine should sleep after its rows and take a later policy: see `Engine.sleep`.
    An engine that supports this but cannot do it on this machine raises ConfigError."""
    verified: Callable[[], object] = lambda: None
    """Wait until the model's files are checked, which runs in the background. Import first, call
    this, then read the files. Raises the error if a file is wrong."""


class Engine(Protocol):
    """Methods and attributes that the stage needs from an engine."""

    info: dict[str, Any]
    """Name, version, dtype, device and logprobs mode, for the manifest."""
    ahead: int
    """The next shard's requests arrive when fewer rows than this are unanswered. Optional, default
    1: no batch then mixes rows of two shards, and results do not depend on which shards this
    process makes."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield one completion per request, as they finish; draw requests as there is room for
        them.

        `requests` may end for now, and may be empty. More can follow once these are answered, in
        the same call or a later one.
        """
        ...

    def sleep(self) -> bool:
        """Free the device's memory until `take`. Return False if it cannot; it is then closed.

        Optional, together with `take`. Without them each policy gets a fresh engine in its own
        process.
        """
        ...

    def take(self, setup: Setup) -> bool:
        """Wake up with the policy and settings of `setup`, like an engine newly made from it.

        The policy's files are already checked. If in doubt, return False or raise: this engine is
        then closed and a fresh one does the work. `info` and `ahead` may change here.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class Entry(NamedTuple):
    """A shipped engine: its class path, description and options."""

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
        "vLLM servers that you start, named by their URLs; their weights are checked",
        VllmServerOptions,
    ),
    "transformers": Entry(
        "quiver.stages.generate.engines.transformers:TransformersEngine",
        "encoder-decoder models (T5, BART), and models that vLLM lacks",
        TransformersOptions,
    ),
    "scripted": Entry(
        "quiver.stages.generate.engines.scripted:ScriptedEngine",
        "no model: a small function of prompt and seed; to try stages in a second, not to train",
        ScriptedOptions,
    ),
}


def require_decoder(engine: str, policy: Version, section: str = "generate") -> None:
    """Raise ConfigError if `engine` is one of vLLM's and the policy has an encoder. `section` of a
    recipe names the engine."""
    if engine in ("vllm", "vllm-server") and checkpoints.is_encoder_decoder(policy):
        raise ConfigError(
            f"engine {engine}",
            f"{policy.ref} is an encoder-decoder model",
            next=f'set {section}.engine = "transformers"',
        )


def engine_options(name: str, options: dict[str, Any]) -> Config | None:
    """Return a shipped engine's checked options; None for your own engine, which checks its own.

    Raises ConfigError for a wrong option, and if `name` is neither a shipped name nor a path.
    """
    if name in ENGINES:
        for option in options.keys() - ENGINES[name].options.model_fields.keys():
            owners = [other for other in ENGINES if option in ENGINES[other].options.model_fields]
            if owners:
                raise ConfigError(
                    "generate.options",
                    f"options.{option} belongs to engine {' and '.join(owners)}, not to {name}",
                    next="quiver keys generate.engine",
                )
        return parse(ENGINES[name].options, options, "generate.options", is_section=True)
    if ":" in name:
        return None
    raise ConfigError(
        f"generate.engine {printable(repr(name))}",
        f"no such engine, expected one of {', '.join(ENGINES)}, or module:Class or "
        f"file.py:Class of your own{did_you_mean(name, ENGINES)}",
        next="quiver engines",
    )


def make_engine(name: str, setup: Setup) -> Engine:
    """Return a ready engine by its registered name or dotted path.

    Raises ConfigError or ResourceError.
    """
    path = ENGINES[name].path if name in ENGINES else name
    engine_class, _ = plugins.load(path, "generate.engine")
    with errors_of_own(name):
        return engine_class(setup)


@contextmanager
def errors_of_own(name: str) -> Iterator[None]:
    """Raise errors of your own engine as ConfigError: they are no bug in Quiver.

    Errors that say what is wrong pass, such as those of its requests, and so does a lack of memory
    or disk. A shipped engine's errors pass too.
    """
    try:
        yield
    except (QuiverError, CommittedByOther):
        raise
    except Exception as error:
        if name in ENGINES or unexpected(name, error).code != QuiverError.code:
            raise
        raise ConfigError(
            f"engine {printable(name)}",
            f"raised {type(error).__name__}: {printable(error)}",
            state="finished shards are kept.",
            next="correct the engine; QUIVER_DEBUG=1 shows where it was raised",
        ) from error


def info_of(name: str, engine: Engine) -> dict[str, Any]:
    """Return a copy of the engine's `info`. Raises ConfigError if no manifest can hold it."""
    info = getattr(engine, "info", None)
    try:
        if not isinstance(info, dict):
            raise TypeError(f"it is {type(info).__name__}")
        canonical(info)
        return dict(info)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"engine {printable(name)}",
            f"its info must be a dict of plain values: {printable(error)}",
            next="correct the engine's info",
        ) from error


def code_hash(name: str, options: Config | None) -> str:
    """Return the hash of your own engine or script, or "" if there is none.

    The code is not run. Raises ConfigError if it cannot be located.
    """
    if name not in ENGINES:
        return plugins.fingerprint(plugins.locate(name, "generate.engine"))
    if isinstance(options, ScriptedOptions) and ":" in options.script:
        return plugins.fingerprint(plugins.locate(options.script, "generate.options.script"))
    return ""
