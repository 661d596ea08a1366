"""Which prompts are answered: all that leave room for the completion, with ids that the policy
knows. Nothing is ever cut."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, SchemaError, printable
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Version

from .config import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """The prompts that fit."""

    prompts: pa.Table
    """[prompts] with group_id and prompt_ids."""
    dropped: list[str]
    """Group ids of the others."""
    longest: int
    """Most ids that a row can have."""


def select_prompts(config: Config, prompts: Version, policy: Version) -> Selection:
    """The prompts that `policy` can answer. ConfigError, SchemaError."""
    table = prompts.table(["group_id", "prompt_ids"])
    _require_known_ids(config, prompts, table, policy)
    groups = table["group_id"]
    lengths = pc.list_value_length(table["prompt_ids"]).to_numpy()
    if (lengths == 0).any():
        raise SchemaError(
            str(prompts.ref),
            f"{printable(groups[int(lengths.argmin())].as_py())}: prompt_ids is empty",
            next="correct the source",
        )
    max_tokens = config.sampling.max_tokens
    context = int(min(context_limit(config, policy), np.iinfo(np.int32).max))
    if checkpoints.is_encoder_decoder(policy):  # encoder and decoder have a context each
        row_lengths = np.maximum(lengths, max_tokens)
    else:
        row_lengths = lengths + max_tokens
    fits = row_lengths <= context
    if not fits.all() and config.overlong == "error":
        raise ConfigError(
            f"{prompts.ref} {printable(groups[int(fits.argmin())].as_py())}",
            f"{int((~fits).sum())} of {len(fits)} prompts leave no room: up to "
            f"{int(lengths.max())} tokens and generate.sampling.max_tokens {max_tokens} exceed the "
            f"context of {context}",
            next='lower max_tokens, shorten the prompts, or set generate.overlong = "drop"',
        )
    dropped = groups.filter(pa.array(~fits)).to_pylist()
    if dropped:
        log.warning(
            "%d of %d prompts leave no room for the completion and are dropped",
            len(dropped),
            len(fits),
        )
    longest = int(row_lengths[fits].max(initial=1))
    return Selection(table.filter(pa.array(fits)), dropped, longest)


def context_limit(config: Config, policy: Version) -> float:
    """Most ids of prompt and completion together; infinite where nothing limits them."""
    unlimited = float("inf")
    return min(checkpoints.context_length(policy) or unlimited, config.max_model_len or unlimited)


def _require_known_ids(config: Config, prompts: Version, table: pa.Table, policy: Version) -> None:
    """Every id of the prompts and of the stop tokens is in the policy's vocabulary."""
    vocabulary = checkpoints.vocabulary_size(policy)
    outside = f"is outside the vocabulary of {policy.ref}, {vocabulary}"
    for chunk in table["prompt_ids"].chunks:
        highest = pc.max(chunk.flatten()).as_py()
        if highest is not None and highest >= vocabulary:
            raise SchemaError(
                str(prompts.ref),
                f"id {highest} {outside}",
                next="render the prompts again with this policy",
            )
    for token in config.sampling.stop_token_ids:
        if not 0 <= token < vocabulary:
            raise ConfigError(
                "generate.sampling.stop_token_ids",
                f"{token} {outside}",
                next="name ids of this policy's tokenizer",
            )
