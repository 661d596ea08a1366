"""Select the prompts to answer: they must leave room for the completion. Nothing is ever cut.

Ids outside the policy's vocabulary or that are other tokens to it, and empty prompts, are errors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import prompts as prompts_kind
from quiver.schemas.errors import ConfigError, SchemaError, printable
from quiver.schemas.prompts import MEDIA
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints
from quiver.stages.model.media import WORDS
from quiver.stages.model.media.processor import require_senses
from quiver.stages.model.same_tokens import require_same_tokens

from .config import Config

log = logging.getLogger(__name__)


def select_prompts(
    config: Config, prompts: Version, policy: Version
) -> tuple[pa.Table, list[str], int]:
    """Select the prompts that `policy` can answer.

    Returns:
        The table of selected prompts, with group_id, prompt_ids and the columns that episodes
        or media need; the group ids of the dropped prompts; the maximum ids that a row can have.

    Raises ConfigError or SchemaError.
    """
    names = ["group_id", "prompt_ids"]
    if config.turns is not None:
        names += ("messages", "columns")
    if prompts.manifest.kind_schema == "prompts/2":
        names += (*MEDIA.values(), "spans")
    table = prompts.table(names)
    _require_read(config, prompts, policy, table)
    groups = table["group_id"]
    vocabulary = checkpoints.vocabulary_size(policy)
    outside = f"is outside the vocabulary of {policy.ref}, {vocabulary}"
    highest = pc.max(pc.list_flatten(table["prompt_ids"])).as_py() or 0
    if highest >= vocabulary:
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
    lengths = pc.list_value_length(table["prompt_ids"]).to_numpy()
    if not lengths.all():
        group = printable(groups[int(lengths.argmin())].as_py())
        raise SchemaError(
            str(prompts.ref), f"{group}: prompt_ids is empty", next="correct the source"
        )
    max_tokens = config.sampling.max_tokens
    context = context_limit(config, policy)
    # Encoder and decoder have a context each.
    if checkpoints.is_encoder_decoder(policy):
        row_lengths = np.maximum(lengths, max_tokens)
    else:
        row_lengths = lengths + max_tokens
    fits = row_lengths <= context
    if not fits.all() and config.overlong == "error":
        group = printable(groups[int(fits.argmin())].as_py())
        raise ConfigError(
            f"{prompts.ref} {group}",
            f"{int((~fits).sum())} of {len(fits)} prompts leave no room: up to {lengths.max()} "
            f"tokens and generate.sampling.max_tokens {max_tokens} exceed the context of {context}",
            next='lower max_tokens, shorten the prompts, or set generate.overlong = "drop"',
        )
    dropped = groups.filter(pa.array(~fits)).to_pylist()
    if dropped:
        message = "%d of %d prompts leave no room for the completion and are dropped"
        log.warning(message, len(dropped), len(fits))
    longest = int(row_lengths[fits].max(initial=1))
    if config.turns is not None:
        longest = min(longest - max_tokens + config.turns.most_read_tokens, context)
    return table.filter(pa.array(fits)), dropped, longest


def require_readable_ids(prompts: Version, policy: Version, open: Callable[[str], Version]) -> None:
    """Raise LineageError if an id of the prompts is another token to `policy` than to the policy
    that they were rendered for, which `open` opens."""
    renderer = prompts.manifest.model("policy")

    def ids() -> set[int]:
        columns = prompts.table(["prompt_ids"])
        return set(pc.unique(pc.list_flatten(columns["prompt_ids"])).to_pylist())

    if renderer is not None:
        next = "render the prompts again with this policy"
        require_same_tokens(renderer, open, policy, next=next, among=ids)


def _require_read(config: Config, prompts: Version, policy: Version, table: pa.Table) -> None:
    """Raise ConfigError if the prompts or turns show media that the policy does not read."""
    most = most_media(config, table)
    if not most:
        return
    shown_by = str(prompts.ref)
    if not prompts_kind.most_media(table):
        shown_by = "generate.turns.max_images" if "image" in most else "generate.turns.max_audio"
    require_senses(shown_by, policy, most)
    if config.turns is not None and config.turns.rewritten == "restart":
        words = " and ".join(f"{WORDS[modality]}s" for modality in most)
        raise ConfigError(
            "generate.turns.rewritten",
            f"a history that is rewritten loses the {words} of {shown_by}",
            next='set generate.turns.rewritten = "refuse" or "append"',
        )


def most_media(config: Config, prompts: pa.Table) -> dict[str, int]:
    """Return the maximum number of media in one request, by modality: a prompt's and its turns'."""
    most = Counter(prompts_kind.most_media(prompts))
    if config.turns is not None:
        most.update(config.turns.most_media)
    return dict(most)


def context_limit(config: Config, policy: Version) -> int:
    """Return the maximum ids of prompt and completion together."""
    no_limit = int(np.iinfo(np.int32).max)
    return min(checkpoints.context_length(policy) or no_limit, config.max_model_len or no_limit)
