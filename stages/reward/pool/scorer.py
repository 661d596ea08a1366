"""Reward functions as a scorer: those that come with Quiver and the user's own, called in a pool of
worker processes."""

from __future__ import annotations

from collections.abc import Iterable

from quiver.schemas.errors import ConfigError, QuiverError, printable
from quiver.stages.reward.functions import shipped
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool import calls
from quiver.stages.reward.pool.habits import given, require, require_sent
from quiver.stages.reward.pool.jobs import Function
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.scoring import Batch, Notice, Part


class FunctionScorer(Function):
    """A reward function. The user's code is imported and called in the pool's processes only."""

    def __init__(
        self, config: FunctionConfig, pool: Pool, rows: int, notice: Notice = lambda *_: None
    ) -> None:
        """`rows`: most rows a call. ConfigError where a shipped function of that name is not there
        or can not be called so."""
        super().__init__(config, rows, notice)
        self.name = config.name
        self._pool = pool
        if config.is_shipped:
            self.about = calls.describe(
                shipped(config.use).function, config.name, config.arguments, config.fingerprint
            )

    def require(self, columns: Iterable[str]) -> None:
        """ConfigError unless the function exists, can work here, and everything that it needs is
        offered or among `columns`."""
        about = self._pool.describe(self)
        require(self.config, about.needs, columns)
        if self.config.is_shipped:
            function = shipped(self.config.use).function
            try:  # on no rows: what can not work here is told before anything is generated
                function(**dict.fromkeys(about.needs, ()), **self.config.arguments)
            except QuiverError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"reward function {self.name}",
                    f"refuses its arguments: {type(error).__name__}: {printable(error)}",
                    next="quiver rewards",
                ) from error

    def score(self, batch: Batch) -> list[Part]:
        """One part a row."""
        about = self._pool.describe(self)
        require_sent(self.config, about.needs, batch)
        takes = about.takes
        if self.config.is_shipped:  # a column never stands in for one of its settings
            takes = [*about.needs, *shipped(self.config.use).columns]
        return self._pool.run(self, given(self.config, takes, batch), batch["rollout_ids"])
