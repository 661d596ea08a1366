"""The first rows of a recipe, taken through its own stages in a temporary store.

Look here for what `quiver check` shows: the prompts made from the rows, and the rewards for a
made-up answer and for the right one. No engine is started and no weights are read. Errors are those
a run would raise.

    # of a resolved recipe; needs no model
    sources = {"data": read_source(recipe.prompt_config(1), recipe.iterations)}
    require_references(recipe.reward, sources)
    rows = first_rows(recipe, sources, is_answered=True)
    rows.prompts["data"].lengths, rows.answers[0].scores["accuracy"].values
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.flows.look.joined import ANSWERS
from quiver.schemas.errors import ConfigError, SchemaError, printable
from quiver.stages.core.config import Config
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import open_staging
from quiver.stages.generate.prompts import select_prompts
from quiver.stages.generate.texts import Texts
from quiver.stages.model import checkpoints, small
from quiver.stages.prompt import stage as prompt_stage
from quiver.stages.prompt.config import Config as PromptConfig
from quiver.stages.prompt.order import choose
from quiver.stages.prompt.sources import read
from quiver.stages.reward.functions.answers import as_text
from quiver.stages.reward.measures import failures
from quiver.stages.reward.pool.habits import column_of, given
from quiver.stages.reward.preview import preview, refusals
from quiver.stages.reward.stage import Config as RewardConfig
from quiver.stages.turns.statistics import first_failure

from .preflight import check_base
from .recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS = 1024
"""Most rows of a source that are rendered."""
SLOW_ROWS = 8
"""Most rows if an environment begins each of them, or if pictures are decoded."""
_ANSWER = "The answer is 1."
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A source of the recipe, with all its rows."""

    config: PromptConfig
    """Config of the prompt stage: in the first iteration, or for evaluation."""
    first: PromptConfig
    """`config`, limited to the first rows that the run takes over all its iterations."""
    table: pa.Table


@dataclass
class Prompts:
    """Summary of the prompts made from the first rows of a source."""

    num_rows: int
    """Rows of the source."""
    num_looked_at: int
    """Number of rows that were rendered."""
    num_dropped: int
    """Number of prompts left out because they are too long."""
    longest: int | None
    """Most tokens a prompt may have; None: any number."""
    num_other_system: int
    """Number of prompts that do not begin with the recipe's system message."""
    lengths: list[int]
    """Tokens of each prompt that is kept, in rising order."""
    first_text: str
    """The first prompt, as rendered by `visible`."""
    first_tokens: int

    @classmethod
    def of(cls, version: Version, policy: Version, system: str | None) -> Prompts:
        """Summarize a version of prompts. `system` is the recipe's system message."""
        manifest = version.manifest
        table = version.table(["prompt_ids", "messages"])
        ids = table["prompt_ids"]
        first_ids = ids[0].as_py()
        expected = {"role": "system", "content": system}.items()
        chats = table["messages"].to_pylist()
        return cls(
            num_rows=manifest.metrics["source_rows"],
            num_looked_at=sum(manifest.status.values()),
            num_dropped=manifest.status["dropped"],
            longest=manifest.config["max_prompt_tokens"],
            num_other_system=sum(not chat or not expected <= chat[0].items() for chat in chats),
            lengths=sorted(pc.list_value_length(ids).to_pylist()),
            first_text=visible(checkpoints.load_tokenizer(policy), first_ids),
            first_tokens=len(first_ids),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for JSON output."""
        lengths = self.lengths
        return {
            "rows": self.num_rows,
            "looked_at": self.num_looked_at,
            "dropped": self.num_dropped,
            "tokens": {"min": lengths[0], "median": median_low(lengths), "max": lengths[-1]},
            "most_tokens": self.longest,
        }

    def in_words(self) -> str:
        """Return the numbers as a sentence."""
        lengths = self.lengths
        rows = f"{self.num_rows:,} rows"
        if self.num_looked_at < self.num_rows:
            rows = f"the first {self.num_looked_at:,} of {rows}"
        allowed = "" if self.longest is None else f"; {self.longest:,} are allowed"
        return (
            f"prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, median {median_low(lengths):,}, "
            f"in {rows}{allowed}"
        )


@dataclass
class Score:
    """Scores of the answers by one part of the reward."""

    values: list[float | None]
    error: str | None = None
    """Error on the first answer that it failed on."""

    def in_words(self) -> str:
        """Return the values as text, or the error."""
        values = ["no number" if value is None else f"{value:g}" for value in self.values]
        return self.error or ", ".join(values)


@dataclass
class Answered:
    """One answer to the first prompt, with its scores."""

    text: str
    """The answer; for an episode, the last one."""
    failure: str | None
    """The environment's error on it, if any."""
    scores: dict[str, Score]
    """Scores by part of the reward."""


@dataclass
class FirstRows:
    """Prompts and scored answers made from the first rows."""

    prompts: dict[str, Prompts] = field(default_factory=dict)
    """Prompts by section: data, data.held_out."""
    answers: list[Answered] = field(default_factory=list)
    """The made-up answer, if requested, and the row's reference, if a function reads one. Only
    functions score the reference."""


def read_source(config: PromptConfig, iterations: int) -> Source:
    """Read a source of a resolved recipe that has so many iterations."""
    has_environment = config.turns is not None and bool(config.turns.environment)
    limit = config.limit
    if limit is not None and config.round > 0:  # each evaluation, round 0, takes the same rows
        limit *= iterations
    first = SLOW_ROWS if has_environment or config.media else ROWS
    limited = config.model_copy(update={"first": first, "limit": limit})
    return Source(config, limited, read(config).table)


def require_references(reward: RewardConfig, sources: Mapping[str, Source]) -> None:
    """Raise ConfigError if shipped reward functions cannot read the references of too many first
    rows.

    The limit is `reward.max_invalid`; below it, a warning is logged.
    """
    for section, source in sources.items():
        config = source.first
        chosen = choose(source.table.num_rows, config.limit, config.seed, config.round)[:ROWS]
        refused = refusals(reward, source.table.take(pa.array(chosen, pa.int64())))
        if not refused:
            continue
        position, (name, column, problem) = next(iter(sorted(refused.items())))
        error = ConfigError(
            f"{printable(config.source)} row {chosen[position] + 1}",
            f"column {printable(column)}: the reward function {name} cannot read it: {problem}; "
            f"this affects {len(refused)} of the first {len(chosen)} rows of {section}",
            next="correct the row, or take it out of the source; or name another column under "
            "columns of that function",
        )
        if len(refused) > reward.max_invalid * len(chosen):
            raise error
        log.warning("%s: %s", error.object, error.message)


def first_rows(
    recipe: Recipe,
    sources: Mapping[str, Source],
    folder: Path | None = None,
    *,
    is_answered: bool,
) -> FirstRows:
    """Render the first rows of a resolved recipe.

    The first answer to its first row is `_ANSWER`, cut to max_tokens; the second is the row's
    reference, if it is short enough. Each is repeated as a group if a scorer needs groups.

    Args:
        recipe: A resolved recipe.
        sources: Its sources by section (data, data.held_out).
        folder: The base model's folder, if it was made already.
        is_answered: If true, also score answers to the first row.

    Raises:
        ConfigError: If a row or a key is wrong.
        SecurityError: If a file must not be used.
        QuiverError: Any error of a scorer.
    """
    rows = FirstRows()
    with tempfile.TemporaryDirectory(prefix="quiver-check-") as work:
        store = Store(work)
        policy = small.import_without_weights(recipe.policy, store, recipe.run, folder)

        def open_there(ref: str) -> Version:
            return Store(recipe.store, create=False).with_expired().open(ref)  # It may not exist.

        check_base(recipe, open_there, policy)
        prompts = {}
        for section, source in sources.items():
            prompts[section] = _made("prompt", source.first, store, policy=policy)
            rows.prompts[section] = Prompts.of(prompts[section], policy, recipe.prompt.system)
            sampled = recipe.generate_config(1, evaluation=section == "data.held_out")
            try:
                select_prompts(sampled, prompts[section], policy)  # raises what generate would
            except (ConfigError, SchemaError) as error:
                error.object = error.object.replace(str(prompts[section].ref), section)
                raise
        if not is_answered:
            return rows
        single = sources["data"].first.model_copy(update={"first": 1})
        plan = prompt_stage.plan(single, store, {"policy": str(policy.ref)})
        with open_staging(plan) as staging:
            writer = staging.writers["prompts"]
            writer.write_table(prompts["data"].table().slice(0, 1))
            writer.finish(metrics=prompts["data"].manifest.metrics)
            prompt = staging.publish()
        generate = recipe.generate_config(1)
        room = max(1, generate.sampling.max_tokens - 1)  # One token is the end token.
        tokenizer = checkpoints.load_tokenizer(policy)
        ids = tokenizer.encode(_ANSWER, add_special_tokens=False)[:room]
        tries = [(ids, recipe.reward.model_copy(update={"max_invalid": 1.0}))]
        row = prompt.table(["columns"])["columns"][0].as_py()
        offered = [*recipe.columns["data"], *recipe.offered_columns]
        reference = reference_of(recipe.reward, offered, row)
        if reference is not None and generate.turns is None:
            ids = tokenizer.encode(reference, add_special_tokens=False)
            if 0 < len(ids) <= room:
                tries.append((ids, tries[0][1].model_copy(update={"models": (), "servers": ()})))
        for ids, reward in tries:
            scopes = {getattr(scorer, "scope", "row") for scorer in reward.scorers}
            changes = {
                "engine": "scripted",
                "options": {"script": "fixed", "completion_ids": ids},
                "samples_per_prompt": generate.samples_per_prompt if "group" in scopes else 1,
            }
            scripted = generate.model_copy(update=changes)
            version = _made("generate", scripted, store, prompts=prompt, policy=policy)
            rollouts = version.table()
            rewards = _made("reward", reward, store, rollouts=version).table()
            parts = rewards["parts"].combine_chunks()
            scores = {name: Score(parts.field(name).to_pylist()) for name in reward.part_names}
            for name, _, error in failures(rewards):
                scores[name].error = scores[name].error or error
            text = rollouts["completion_text"][0].as_py()
            failure = first_failure(rollouts) if generate.turns is not None else None
            rows.answers.append(Answered(text, failure, scores))
    return rows


def visible(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """Return the text of a prompt, with each added token (control tokens, `<think>`) in ⟦brackets⟧.

    The same characters without brackets are plain text.
    """
    added = {
        id: token.content
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.content.replace("▁", "").strip()
    }
    pieces = []
    for is_added, run in itertools.groupby(ids, added.__contains__):
        if is_added:
            pieces += [f"⟦{added[id]}⟧" for id in run]
        else:
            pieces.append(Texts(tokenizer, [], begins_text=not pieces).decode(run))
    return "".join(pieces)


def reference_of(reward: RewardConfig, offered: Sequence[str], row: dict[str, Any]) -> str | None:
    """Return the right answer in a source row, as text, that one of the reward functions reads.

    None if no function reads a column of that name with text or a number. `offered`: the columns
    that functions may read.
    """
    batch = {name: [cell] for name, cell in row.items()}
    for function in reward.functions:
        reads = preview(RewardConfig(functions=(function,)), offered)
        for name in ANSWERS:
            if reads.may_be_all or column_of(name, function, row) in reads.by_name:
                for (cell,) in given(function, [name], batch).values():
                    with suppress(ValueError):  # Neither text nor a number.
                        return as_text(cell)
    return None


def _made(stage: str, config: Config, store: Store, **inputs: Version) -> Version:
    refs = {role: version.ref for role, version in inputs.items()}
    return store.open(run_stage(stage, config, store, in_process=True, **refs))
