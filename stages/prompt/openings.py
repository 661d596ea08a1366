"""The opening messages of environments: each row's prompt includes its own, so a group shares it.

config = identified(config)                            # at planning; runs no user code
with EnvironmentPool(config.turns) as pool:
    openings = openings_of(config, pool, source, rows, group_ids)    # per row
"""

from __future__ import annotations

from collections.abc import Sequence

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


def openings_of(
    config: Config,
    pool: EnvironmentPool | None,
    source: pa.Table,
    rows: Sequence[int],
    group_ids: Sequence[str],
) -> list[list[Message]]:
    """Begin and end the environment of each of the `rows` of `source`, and return its opening
    messages; they are empty without a pool.

    `group_ids` has the ids of all its rows. Raises ConfigError if an environment cannot begin.
    """
    if pool is None:
        return [[] for _ in rows]
    openings: dict[int, list[Message]] = {}
    for start in range(0, len(rows), _MOST_OPEN):
        some_rows = rows[start : start + _MOST_OPEN]
        chunk = source.take(pa.array(some_rows, pa.int64()))
        columns = without_media(chunk, config).to_pylist()
        row_of_key = {
            pool.open(row_columns, environment_seed(group_ids[row])): row
            for row, row_columns in zip(some_rows, columns, strict=True)
        }
        while row_of_key:
            for reply in pool.replies(wait=None):
                row = row_of_key.pop(reply.key, None)
                if row is None:  # its environment has ended
                    pool.forget(reply.key)
                elif reply.failure is not None:
                    raise ConfigError(
                        f"generate.turns {printable(', '.join(config.turns.sources))}",
                        f"cannot begin with prompt {printable(group_ids[row])}: "
                        f"{printable(reply.why)}",
                        next="correct the environment, or the row",
                    )
                else:
                    openings[row] = reply.step.observation()
                    pool.finish(reply.key)
    return [openings[row] for row in rows]
