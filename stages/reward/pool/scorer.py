"""Reward functions as a scorer: those that come with Quiver and the user's own, called in a pool of
worker processes."""

from __future__ import annotations

from collections.abc import Iterable

from quiver.schemas.errors import ConfigError, QuiverError, printable
from quiver.stages.reward.functions import shipped
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.groups import Groups
from quiver.stages.reward.pool import calls
from quiver.stages.reward.pool.habits import given, require, require_sent
from quiver.stages.reward.pool.jobs import Function
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.scoring import Batch, Notice, Part


class FunctionScorer(Function):
    """A reward function. The user's code is imported and called in the pool's processes only."""

    def __init__(
        self,
        config: FunctionConfig,
        pool: Pool,
        rows: int,
        notice: Notice = lambda *_: None,
        groups: Groups | None = None,
    ) -> None:
        """`rows`: most rows a call; `groups`: for a function of scope `group`. ConfigError where
        a shipped function of that name is not there or cannot be called so."""
        super().__init__(config, rows, notice)
        self.name = config.name
        self._pool = pool
        self._groups = groups
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
            try:  # on no rows: what cannot work here is told before anything is generated
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
        """One part a row. ConfigError: its scope is `group`, and whole groups are not at hand."""
        about = self._pool.describe(self)
        require_sent(self.config, about.needs, batch)
        takes = about.takes
        if self.config.is_shipped:  # a column never stands in for one of its settings
            takes = [*about.needs, *shipped(self.config.use).columns]
        if self.config.scope == "row":
            return self._pool.run(self, given(self.config, takes, batch), batch["rollout_ids"])
        if self._groups is None:
            raise no_groups(self.name)
        whole = self._groups.of(batch["rollout_ids"])
        columns = given(self.config, takes, whole.batch)
        asked = set(whole.rows)
        ids = [
            rollout_id if row in asked else None
            for row, rollout_id in enumerate(whole.batch["rollout_ids"])
        ]
        parts = self._pool.run(self, columns, ids, whole.sizes)
        return [parts[row] for row in whole.rows]


def no_groups(name: str) -> ConfigError:
    """The error for a function of scope `group` where rows do not come in groups."""
    return ConfigError(
        f"reward function {name}",
        "has scope group, and here rows are scored as they come",
        next="leave scope out, or score by it in the recipe itself",
    )
