"""The section [reward] of a recipe: the scorers, and how their parts become rewards.

`with_fingerprints` adds the fingerprint of each scorer's code, model or server, from files alone.

It starts no process, runs no user code and does not import torch.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import ModelEntry
from quiver.stages.core.config import Config as Base
from quiver.stages.core.config import Runtime
from quiver.stages.core.store.writer import ROWS_PER_SHARD

from .functions.config import FunctionConfig
from .functions.config import fingerprint as function_fingerprint
from .models.config import ModelConfig, model_entry
from .models.config import fingerprint as model_fingerprint
from .scoring import OVERLONG, Interval
from .servers.config import ServerConfig
from .servers.config import fingerprint as server_fingerprint

SCORERS = ("functions", "models", "servers")
"""The lists of scorers in Config, in the order of their parts."""


class Overlong(Base):
    """A penalty for completions that come near a length: 0 up to max_tokens − cache, falling
    linearly to −1 at max_tokens."""

    max_tokens: int = Field(ge=1)
    """Completion tokens, end token included, from which the penalty is −1. Usually the limit of
    generation."""
    cache: int = Field(ge=1)
    """Tokens before `max_tokens` over which it grows."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of the penalty in the reward."""

    @model_validator(mode="after")
    def _fits(self) -> Overlong:
        if self.cache > self.max_tokens:
            limit = f"max_tokens = {self.max_tokens}"
            raise ValueError(f"cache must be at most {limit}, got {self.cache}")
        return self


class Config(Base):
    """The scorers of rollouts and the arithmetic of their parts."""

    functions: tuple[FunctionConfig, ...] = ()
    """Reward functions. The reward is the weighted sum of all parts; a function that returns None
    is left out of it."""
    models: tuple[ModelConfig, ...] = ()
    """Reward models, each with a part of its own."""
    servers: tuple[ServerConfig, ...] = ()
    """Servers that score over HTTP, each with a part of its own."""
    reward_clip: Interval | None = None
    """Lowest and highest reward, applied to the sum before the overlong penalty."""
    overlong: Overlong | None = None
    """Penalty on long completions, added to the clipped sum; in `parts` as `overlong`. A row
    without a reward stays without one. Default: off."""
    max_invalid: Runtime[float] = Field(default=0.0, ge=0, le=1)
    """Largest share of rows that may fail before the stage fails. Finished rewards with a larger
    share are refused, not made anew. After raising it, the finished shards of a failed stage are
    reused."""
    workers: Runtime[int | None] = Field(default=None, ge=1, le=1024)
    """Processes in which functions run. Default: one per core."""
    max_memory_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Private memory of each of these processes; beyond it a call fails with MemoryError. Default:
    an equal share of the machine's memory, and at least 4 GiB if the machine has twice as much."""
    batch_rows: Runtime[int] = Field(default=ROWS_PER_SHARD, ge=1)
    """Most rows per call. A function's value for a row must not depend on the other rows in its
    call, unless its scope is `group`: then a call holds one group of any size."""
    patience_seconds: Runtime[float | None] = Field(default=None, ge=0)
    """Seconds that an idle process waits for another process's shard before it scores it too, if
    several share the work. Default: twice the longest time of a shard so far, and at least 30."""

    @property
    def scorers(self) -> tuple[FunctionConfig | ModelConfig | ServerConfig, ...]:
        """All scorers, of every kind."""
        return (*self.functions, *self.models, *self.servers)

    @property
    def part_names(self) -> list[str]:
        """The fields of `parts`, in order."""
        names = [scorer.name for scorer in self.scorers]
        return [*names, OVERLONG] if self.overlong else names

    @model_validator(mode="after")
    def _names_differ(self) -> Config:
        names = [scorer.name for scorer in self.scorers]
        if not names:
            raise ValueError(
                "there is no scorer: add one under [[reward.functions]], [[reward.models]] or "
                "[[reward.servers]]"
            )
        for name in sorted(names):
            if names.count(name) > 1:
                raise ValueError(f"name {name} is used twice: give each scorer a name of its own")
        if self.overlong and OVERLONG in names:
            raise ValueError(
                f"name {OVERLONG} is the penalty's column in parts: give the scorer another name"
            )
        return self


def with_fingerprints(
    config: Config, *, remembered: bool = True
) -> tuple[Config, tuple[ModelEntry, ...]]:
    """Return `config` with the fingerprints of its scorers, and the manifest's entries of all
    reward models.

    Args:
        remembered: If false, every byte of the models is read, as for a hash in a new manifest.

    Raises:
        ConfigError: The config asks for other code or another model than there is now.
        SecurityError: A model is not whole.
    """
    models = tuple(model_entry(model, remembered=remembered) for model in config.models)
    by_kind = {
        "functions": [
            function_fingerprint(function, remembered=remembered) for function in config.functions
        ],
        "models": map(model_fingerprint, models),
        "servers": map(server_fingerprint, config.servers),
    }
    scorers = {}
    for kind, fingerprints in by_kind.items():
        scorers[kind] = ()
        for scorer, fingerprint in zip(getattr(config, kind), fingerprints, strict=True):
            if scorer.fingerprint not in ("", fingerprint):
                raise ConfigError(
                    f"reward {scorer.name}",
                    f"fingerprint expected {printable(scorer.fingerprint)}, found {fingerprint}",
                    next="restore that scorer, or run again without the fingerprint",
                )
            scorers[kind] += (scorer.model_copy(update={"fingerprint": fingerprint}),)
    return config.model_copy(update=scorers), models
