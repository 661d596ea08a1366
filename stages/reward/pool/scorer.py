"""Reward functions as a scorer: those that come with Quiver and the user's own, called in a pool of
worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from quiver.schemas.errors import ConfigError, QuiverError, printable
from quiver.stages.common.config import Config, Runtime, without_folder
from quiver.stages.common.store import storage
from quiver.stages.reward.functions import FUNCTIONS, Shipped
from quiver.stages.reward.pool import calls
from quiver.stages.reward.pool.jobs import About, Function
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.scoring import Batch, Part, require_columns
from quiver.stages.reward.servers.config import refuse_token, refuse_url

Notice = Callable[[str, str, str], None]
"""Hears of a failed row at once: name of the function, rollout_id, error. What it raises ends the
scoring."""


class FunctionConfig(Config):
    """One reward function."""

    model_config = ConfigDict(hide_input_in_errors=True)

    use: str = Field(min_length=1)
    """A function that comes with Quiver (`quiver rewards`), `module:function`, or
    `file.py:function` seen from the working directory."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Its column in `parts`, unique. Empty: the function's own name."""
    weight: float = 1.0
    """Factor of its part in the reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for every call; they come before columns of the same name."""
    timeout_seconds: Runtime[float] = Field(default=30.0, gt=0)
    """Longest time for one row, in seconds; a row beyond it has failed."""
    extra: bool = False
    """A row's value may be a mapping with the number under `reward`; what stands beside it is kept
    as JSON in `extra`."""
    concurrency: Runtime[int] = Field(default=64, ge=1)
    """Rows of an async function that wait together. Others: see `reward.workers`."""
    fingerprint: str = ""
    """Filled in by the stage: which code scored. If set, the function must have it."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_secret(cls, data: Any) -> Any:
        """With the whole section as its input, so that no message shows what was written."""
        given = (
            data.get("arguments") if isinstance(data, dict) and data.get("use") == "code" else None
        )
        if isinstance(given, dict):
            refuse_token(given.get("sandbox_token"), "sandbox_token")
            if given.get("sandbox_url"):
                refuse_url(given["sandbox_url"], needs_tls=bool(given.get("sandbox_token")))
        return data

    @model_validator(mode="before")
    @classmethod
    def _own_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("use"), str) and not data.get("name"):
            return {**data, "name": data["use"].rpartition(":")[2]}
        return data

    def key(self) -> dict[str, Any]:
        """The file's bytes decide, wherever it lies, once the fingerprint is known."""
        return {**super().key(), **({"use": without_folder(self.use)} if self.fingerprint else {})}


class FunctionScorer:
    """A reward function. The user's code is imported and called in the pool's processes only."""

    def __init__(
        self, config: FunctionConfig, pool: Pool, rows: int, notice: Notice = lambda *_: None
    ) -> None:
        """`rows`: most rows a call. ConfigError where a shipped function of that name is not there
        or can not be called so."""
        self.name, self.weight, self._pool, self._notice = config.name, config.weight, pool, notice
        self._function = Function(
            config.use,
            config.name,
            config.arguments,
            extra=config.extra,
            seconds=config.timeout_seconds,
            at_once=config.concurrency,
            rows=rows,
        )
        if ":" not in config.use:
            ours = calls.load(config.use, config.name, config.arguments, config.extra)
            self._function.about = About(ours.takes, ours.needs, ours.waits, ours.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the user's file, or the version of a shipped function. Nothing is imported for a
        file's."""
        holder = self._function.use.rpartition(":")[0]
        path = Path(holder).expanduser()
        if holder.endswith(".py") and path.is_file():
            return f"sha256:{storage.sha256(path)}"
        return self._pool.describe(self._function).fingerprint

    @property
    def seconds(self) -> float:
        """Time in calls so far, summed over processes."""
        return self._function.spent

    def require(self, columns: Iterable[str]) -> None:
        """ConfigError unless the function exists, can work here, and everything that it needs is
        offered or among `columns`."""
        about = self._pool.describe(self._function)
        if about.fingerprint != self.fingerprint:
            raise ConfigError(
                f"reward function {self.name}",
                "its file changes while it is read",
                next="run again",
            )
        require_columns(self.name, about.needs, columns)
        if self._function.use in FUNCTIONS:
            self._try(FUNCTIONS[self._function.use])

    def _try(self, shipped: Shipped) -> None:
        """Call it on no rows: a wrong argument is told before anything is generated."""
        shipped.ready(self._function.arguments)
        try:
            shipped.function(
                **dict.fromkeys(self._function.about.needs, ()), **self._function.arguments
            )
        except QuiverError:
            raise
        except Exception as error:
            message = f"refuses its arguments: {type(error).__name__}: {printable(error)}"
            raise ConfigError(
                f"reward function {self.name}", message, next="quiver rewards"
            ) from error

    def score(self, batch: Batch) -> list[Part]:
        """One part a row."""
        ids, takes = batch["rollout_ids"], self._pool.describe(self._function).takes
        asked = [
            name
            for name in batch
            if (takes is None or name in takes) and name not in self._function.arguments
        ]
        columns = {name: batch[name] for name in asked}
        return self._pool.run(
            self._function,
            columns,
            len(ids),
            lambda row, part: self._notice(self.name, ids[row], part.error),
        )

    def close(self) -> None:
        """Nothing: the processes belong to the pool."""
