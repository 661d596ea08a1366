"""Reward functions as a scorer: shipped ones and the user's own, called in a pool of processes."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from quiver.schemas.errors import ConfigError, QuiverError, printable
from quiver.stages.reward.functions import shipped
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool import calls
from quiver.stages.reward.pool.habits import given, require, require_sent, takes_of
from quiver.stages.reward.pool.jobs import Function
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.scoring import Batch, Notice, Part
from quiver.stages.reward.tables import Groups

log = logging.getLogger(__name__)


class FunctionScorer(Function):
    """A reward function. The user's code is imported and called only in the pool's processes."""

    gpus = ()

    def __init__(
        self,
        config: FunctionConfig,
        pool: Pool,
        rows: int,
        notice: Notice = lambda *_: None,
        groups: Groups | None = None,
    ) -> None:
        """Prepare the scorer; the user's code is not imported here.

        Args:
            rows: Most rows per call.
            groups: Needed by a function of scope `group`.

        Raises ConfigError if a shipped function does not exist or cannot take its arguments.
        """
        super().__init__(config, rows, notice)
        self.name = config.name
        self._pool = pool
        self._groups = groups
        if config.is_shipped:
            self.about = calls.describe(
                shipped(config.use).function, config.name, config.arguments, config.fingerprint
            )

    def require(self, columns: Iterable[str]) -> None:
        """Raise ConfigError unless the function exists, can work here, and everything that it needs
        is offered or among `columns`."""
        about = self._pool.describe(self)
        require(self.config, about, columns)
        if self.config.is_shipped:
            function = shipped(self.config.use).function
            try:  # on no rows, so that errors show before anything is generated
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
        """Return one part per row. Raises ConfigError if its scope is `group` and groups are
        missing."""
        about = self._pool.describe(self)
        require_sent(self.config, about.needs, batch)
        takes = takes_of(self.config, about)
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
    """Return the error for a function of scope `group` if rows do not come in groups."""
    return ConfigError(
        f"reward function {name}",
        "has scope group, but here rows are scored as they arrive",
        next="leave scope out, or use the function in the recipe itself",
    )
