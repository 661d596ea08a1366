"""The opening messages of environments: each row's prompt includes its own, so a group shares it.

config = identified(config)                            # at planning; runs no user code
with open_environments(config) as environments:
    openings = environments.openings(source, rows, group_ids)    # per row; empty without one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.turns.environment import Message, environment_seed
from quiver.stages.turns.pool import EnvironmentPool

from .config import Config
from .media import without_media

_MOST_OPEN = 256
"""Maximum environments that begin at once."""


def identified(config: Config) -> Config:
    """Add the hashes of the code that [generate.turns] names.

    Raises ConfigError if prompts cannot show an environment's messages.
    """
    if config.turns is None:
        return config
    if config.raw_text or config.input == "prompt_ids":
        raise ConfigError(
            "data.raw_text" if config.raw_text else "data.prompt_ids",
            "a prompt for [generate.turns] must be a chat, which the policy's template writes",
            next="name a column with a chat in data.messages, or with text in data.prompt",
        )
    return config.model_copy(update={"turns": config.turns.with_fingerprint()})


@contextmanager
def open_environments(config: Config) -> Iterator[Environments]:
    """Yield the environments of [generate.turns]; their openings are empty without it."""
    if config.turns is None:
        yield Environments(config, None)
        return
    with EnvironmentPool(config.turns) as pool:
        yield Environments(config, pool)


class Environments:
    """The environments of [generate.turns], begun and ended again."""

    def __init__(self, config: Config, pool: EnvironmentPool | None) -> None:
        self.tools: list[dict[str, Any]] = pool.loaded.tools if pool else []
        """The tools that the environments offer."""
        self._config = config
        self._pool = pool

    def openings(
        self, source: pa.Table, rows: Sequence[int], group_ids: Sequence[str]
    ) -> list[list[Message]]:
        """Return the opening messages of each of the `rows` of `source`.

        `group_ids` has the ids of all its rows. Raises ConfigError if an environment cannot
        begin.
        """
        if self._pool is None:
            return [[] for _ in rows]
        openings: dict[int, list[Message]] = {}
        for start in range(0, len(rows), _MOST_OPEN):
            some_rows = rows[start : start + _MOST_OPEN]
            chunk = source.take(pa.array(some_rows, pa.int64()))
            columns = without_media(chunk, self._config).to_pylist()
            row_of_key = {
                self._pool.open(row_columns, environment_seed(group_ids[row])): row
                for row, row_columns in zip(some_rows, columns, strict=True)
            }
            while row_of_key:
                for reply in self._pool.replies(wait=None):
                    row = row_of_key.pop(reply.key, None)
                    if row is None:  # its environment has ended
                        self._pool.forget(reply.key)
                    elif reply.failure is not None:
                        raise ConfigError(
                            f"generate.turns {printable(', '.join(self._config.turns.sources))}",
                            f"cannot begin with prompt {printable(group_ids[row])}: "
                            f"{printable(reply.why)}",
                            next="correct the environment, or the row",
                        )
                    else:
                        openings[row] = reply.step.observation()
                        self._pool.finish(reply.key)
        return [openings[row] for row in rows]
