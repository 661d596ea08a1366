"""What a recipe says under [reward]: what scores rollouts, and what becomes of the parts; and which
code, model or server that is now (`pinned`), told from files alone.

No process is started for it, no code of a user's runs, and torch is not imported.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import Model
from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime
from quiver.stages.common.store.writer import ROWS_PER_SHARD

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
    """Completion tokens, end token included, from which the penalty is whole. Usually what
    generation allows."""
    cache: int = Field(ge=1)
    """Tokens before `max_tokens` over which it grows."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of it in the reward."""

    @model_validator(mode="after")
    def _fits(self) -> Overlong:
        if self.cache > self.max_tokens:
            limit = f"max_tokens = {self.max_tokens}"
            raise ValueError(f"cache must be at most {limit}, got {self.cache}")
        return self


class Config(Base):
    """How rollouts are scored."""

    functions: tuple[FunctionConfig, ...] = ()
    """The reward is the weighted sum of all parts; a function that returns None is left out of
    it."""
    models: tuple[ModelConfig, ...] = ()
    """Reward models, each with a part of its own."""
    servers: tuple[ServerConfig, ...] = ()
    """Servers that score over HTTP, each with a part of its own."""
    reward_clip: Interval | None = None
    """Lowest and highest reward, applied to the sum before the overlong penalty."""
    overlong: Overlong | None = None
    """Penalty on long completions, added to the clipped sum; in `parts` as `overlong`. A row
    without a reward stays without. None: off."""
    max_invalid: Runtime[float] = Field(default=0.0, ge=0, le=1)
    """Largest share of rows in which a function may fail before the stage does. Rewards that were
    made with a larger one are refused too, not made anew; with a larger one the finished shards of
    a stage that failed count."""
    workers: Runtime[int | None] = Field(default=None, ge=1, le=1024)
    """Processes in which functions run. None: one a core."""
    max_memory_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Private memory of each of these processes; beyond it a call fails with MemoryError. None: an
    equal share of the machine's memory, and at least 4 GiB where it has twice as much."""
    batch_rows: Runtime[int] = Field(default=ROWS_PER_SHARD, ge=1)
    """Most rows a call. What a function says of a row must not depend on the others in its call,
    unless its scope is `group`: then a call holds one group, whatever its size."""
    patience_seconds: Runtime[float | None] = Field(default=None, ge=0)
    """Processes that share the work: how long an idle one waits for another's shard before it
    scores that shard too. None: twice as long as the slowest shard took so far, and at least 30
    s."""

    @property
    def scorers(self) -> tuple[FunctionConfig | ModelConfig | ServerConfig, ...]:
        """Everything that scores, of every kind."""
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
                "nothing scores: name something under [[reward.functions]], [[reward.models]] or "
                "[[reward.servers]]"
            )
        for name in sorted(names):
            if names.count(name) > 1:
                raise ValueError(f"name {name} stands twice: give each a name of its own")
        if self.overlong and OVERLONG in names:
            raise ValueError(
                f"name {OVERLONG} is the penalty's column in parts: give what scores another name"
            )
        return self


def pinned(config: Config, *, remembered: bool = True) -> tuple[Config, tuple[Model, ...]]:
    """`config` with the fingerprints of what scores, and the manifest's entries of all reward
    models. ConfigError where it asks for other code or another model than there is; SecurityError
    where a model is not whole.

    Not `remembered`: every byte of the models is read, as for a hash that goes into a new manifest.
    """
    models = tuple(model_entry(model, remembered=remembered) for model in config.models)
    found = {
        "functions": [
            function_fingerprint(function, remembered=remembered) for function in config.functions
        ],
        "models": map(model_fingerprint, models),
        "servers": map(server_fingerprint, config.servers),
    }
    pins = {}
    for kind, fingerprints in found.items():
        pins[kind] = ()
        for scorer, fingerprint in zip(getattr(config, kind), fingerprints, strict=True):
            if scorer.fingerprint not in ("", fingerprint):
                raise ConfigError(
                    f"reward {scorer.name}",
                    f"fingerprint expected {printable(scorer.fingerprint)}, found {fingerprint}",
                    next="restore what scored then, or run again without that fingerprint",
                )
            pins[kind] += (scorer.model_copy(update={"fingerprint": fingerprint}),)
    return config.model_copy(update=pins), models
