"""The prompt stage: the policy's tokenizer renders the user's rows to ids, before any GPU is used.

Refused: rows without a prompt, duplicate group ids, ids outside the vocabulary, and prompts that
leave no room for the completion (`overlong = "drop"` drops and counts them instead; no prompt is
ever shortened). A row's text never becomes a control token of the template: it is split into other
tokens, or refused if that does not help. Every column of the source is kept in `columns`. The
weights do not matter here: other policies with the same tokenizer reuse the prompts of a round, or
of all rounds without `limit`.

    config = resolve(Config(source="sums.jsonl", prompt="question"))    # reads it, once
    ref = run_stage("prompt", config, store, policy="arith/policy@0")
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import pyarrow as pa

from quiver.schemas import prompts as prompts_kind
from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import digest
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import ROWS_PER_SHARD, Writer, shard_rows
from quiver.stages.model import checkpoints
from quiver.stages.model.chat.template import read_template
from quiver.stages.turns.pool import EnvironmentPool

from . import sources
from .chats import warn_unused
from .config import Config
from .openings import identified, openings_of
from .order import choose_rows, name_rows, open_rewards

if TYPE_CHECKING:
    from .rows import Renderer

STAGE_VERSION = 1
log = logging.getLogger(__name__)


def resolve(config: Config) -> Config:
    """Return `config` with the source's hash and input column. Reads the source, unless it is
    remembered. Raises ConfigError."""
    return resolve_with_columns(config)[0]


def resolve_with_columns(config: Config) -> tuple[Config, list[str]]:
    """Do the same as `resolve`, and also return the source's column names.

    Warns about columns that are not used.
    """
    sha256, columns = sources.hash_and_columns(config)
    resolved = sources.fill_in(config, sha256, columns)
    warn_unused(resolved, columns)
    return resolved, columns


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the prompts of `config` for the tokenizer of `policy`.

    With a curriculum, `rewards` decide which rows are chosen. The source is read only if `config`
    is not resolved. Raises ConfigError.
    """
    policy = store.open(refs["policy"])
    if not config.source_sha256 or config.input is None:
        config = resolve(config)
    config = identified(config)  # with hashes of the user's code
    filled_in = {"max_prompt_tokens": _longest_prompt(config, policy)}
    if config.limit is None:
        # each round takes all rows in order, so all have one run key
        filled_in |= {"round": 0, "seed": 0}
    changed = {"weights": ""}  # other weights make the same prompts
    template = read_template(config.template, "prompt.template")
    if template is not None:
        changed["template"] = digest(template)
    model = checkpoints.model_entry("policy", policy).model_copy(update=changed)
    return Plan(
        store,
        stage="prompt",
        stage_version=STAGE_VERSION,
        config=config.model_copy(update=filled_in),
        run=into or policy.ref.run,
        kinds=("prompts",),
        inputs=open_rewards(config, store, refs.get("rewards")),
        models=(model,),
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Render the rows that the plan's round takes. Raises ConfigError or SecurityError.

    With [generate.turns], a prompt includes the first messages of its row's environment, the
    opening.
    """
    from .rows import Renderer, render_rows

    config, writer = plan.config, writers["prompts"]
    source = sources.read(config)
    sources.fill_in(config, source.sha256, source.table.column_names)  # refuses a changed source
    group_ids = name_rows(config, source.table)
    chosen, counts = choose_rows(config, group_ids, [*plan.inputs.values()], plan.store)
    size = writer.rows_per_shard(ROWS_PER_SHARD if config.media else shard_rows(len(chosen)))
    shards = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    policy = plan.store.open(plan.models[0].ref)
    template = read_template(config.template, "prompt.template", plan.models[0].template)
    with (
        writer.phase("render"),
        EnvironmentPool(config.turns) if config.turns else nullcontext() as pool,
        closing(Renderer(config, policy, template, pool and pool.loaded.tools)) as renderer,
    ):
        for index in writer.take_shards(len(shards)):
            rows = shards[index]
            openings = openings_of(config, pool, source.table, rows, group_ids)
            shard = render_rows(source.table, rows, group_ids, renderer, openings, chosen)
            writer.write(index, shard)
            log.info("prompts: shard %d of %d", index + 1, len(shards))
        columns = ["group_id", "messages", "prompt_ids"]
        prompts = pa.concat_tables(writer.read(i).select(columns) for i in range(len(shards)))
        of_assistant = renderer.of_assistant(prompts["messages"])  # how an answer begins and ends
    rendered_ids = set(prompts["group_id"].to_pylist())
    dropped = [group_ids[row] for row in chosen if group_ids[row] not in rendered_ids]
    if dropped:
        _tell_dropped(renderer, len(dropped), len(chosen))
    writer.finish(
        metrics={
            "prompt_tokens": prompts_kind.token_counts([prompts]),
            "source_rows": source.table.num_rows,
            "dropped_group_ids": prompts_kind.listed(dropped),
            **of_assistant,
            **({"curriculum": counts} if counts else {}),
            **({"chat_template": renderer.chat_template} if config.turns else {}),
        },
        status={"kept": prompts.num_rows, "dropped": len(dropped)},
    )


def _tell_dropped(renderer: Renderer, num_dropped: int, num_chosen: int) -> None:
    """Warn that prompts are left out. Raises ConfigError if all are."""
    config = renderer.config
    source, longest = printable(config.source), config.max_prompt_tokens
    if num_dropped == num_chosen:
        raise ConfigError(
            f"source {source}",
            f"all {num_dropped} prompts are longer than the {longest} tokens allowed"
            f"{renderer.limited_by}",
            next=f"shorten them, or {renderer.way_out}",
        )
    message = "%s: %d of %d prompts are left out: they have more than %d tokens"
    log.warning(message, source, num_dropped, num_chosen, longest)


def _longest_prompt(config: Config, policy: Version) -> int | None:
    """Return the maximum tokens of a prompt, by config and model context; None if there is no
    limit."""
    room = checkpoints.room_for_prompt(policy, config.reserve_tokens)
    if room is None:
        return config.max_prompt_tokens
    if room < 1:
        context = checkpoints.context_length(policy)
        raise ConfigError(
            "prompt.reserve_tokens",
            f"{config.reserve_tokens}, by default generate.sampling.max_tokens, leaves no room for "
            f"a prompt in the context of {context} tokens",
            next="lower generate.sampling.max_tokens, or prompt.reserve_tokens if it is set",
        )
    return min(room, config.max_prompt_tokens or room)
