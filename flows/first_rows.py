"""The first rows of a recipe, taken through its own stages in a store that is removed: the prompts
that they become, and what the rewards say to an answer that is made up, and to the right one.

No engine is started and no weights are read. Errors are those that a run would give.

    require_references(recipe)                     # a resolved recipe; needs no model
    rows = first_rows(recipe, is_answered=True)
    rows.prompts["data"].lengths, rows.answers[0].scores["accuracy"].values
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.config import Config
from quiver.stages.common.episodes import first_failure
from quiver.stages.common.models import checkpoints, small
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store, Version
from quiver.stages.common.store.writer import open_staging
from quiver.stages.generate.texts import Texts
from quiver.stages.prompt import sources
from quiver.stages.prompt import stage as prompt_stage
from quiver.stages.prompt.config import Config as PromptConfig
from quiver.stages.prompt.order import choose
from quiver.stages.report.joined import ANSWERS
from quiver.stages.reward.functions.answers import as_text
from quiver.stages.reward.measures import failures
from quiver.stages.reward.pool.habits import column_of, given
from quiver.stages.reward.preview import preview
from quiver.stages.reward.references import refusals

from .recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS = 1024
"""Most rows of a source that are rendered."""
SLOW_ROWS = 8
"""Rows to look at if an environment begins each of them, or pictures are decoded."""
_ANSWER = "The answer is 1."
log = logging.getLogger(__name__)


@dataclass
class Prompts:
    """What the first rows of a source became."""

    num_rows: int
    """Rows of the source."""
    num_looked_at: int
    """Rows that were looked at."""
    num_dropped: int
    """Number of prompts left out because they are too long."""
    longest: int | None
    """Most tokens that a prompt may have; None: any number."""
    num_other_system: int
    """Prompts that do not begin with the recipe's system message."""
    lengths: list[int]
    """Tokens of each prompt that is kept, rising."""
    first_text: str
    """The first prompt as `visible` has it."""
    first_tokens: int

    @classmethod
    def of(cls, version: Version, policy: Version, system: str | None) -> Prompts:
        """Summarize a version of prompts. `system`: the recipe's message."""
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
        """The numbers."""
        lengths = self.lengths
        return {
            "rows": self.num_rows,
            "looked_at": self.num_looked_at,
            "dropped": self.num_dropped,
            "tokens": {"min": lengths[0], "median": median_low(lengths), "max": lengths[-1]},
            "most_tokens": self.longest,
        }

    def in_words(self) -> str:
        """The same for people."""
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
    """What one part of the reward said of the answers."""

    values: list[float | None]
    error: str | None = None
    """Of the first answer that it failed on."""

    def in_words(self) -> str:
        """The values, or the error."""
        values = ["no number" if value is None else f"{value:g}" for value in self.values]
        return self.error or ", ".join(values)


@dataclass
class Answered:
    """What became of one answer to the first prompt."""

    text: str
    """The answer; of an episode the last one."""
    failure: str | None
    """Why the environment failed on it."""
    scores: dict[str, Score]
    """By part of the reward."""


@dataclass
class FirstRows:
    """What became of the first rows."""

    prompts: dict[str, Prompts] = field(default_factory=dict)
    """By section: data, data.held_out."""
    answers: list[Answered] = field(default_factory=list)
    """The made-up one, if it was asked for, and the row's reference, if it has one that a function
    reads; only functions score that."""


def first_rows(recipe: Recipe, folder: Path | None = None, *, is_answered: bool) -> FirstRows:
    """Render the first rows of a resolved recipe. ConfigError, SecurityError, and what scores
    raises.

    Args:
        recipe: What to look at.
        folder: The base model, where it has been made already.
        is_answered: Score answers to the first row, too.
    """
    rows = FirstRows()
    with tempfile.TemporaryDirectory(prefix="quiver-check-") as work:
        store = Store(work)
        policy = small.import_without_weights(recipe.policy, store, recipe.run, folder)
        for section in recipe.columns:
            config = first_config(recipe, section)
            version = _render(config, store, policy)
            rows.prompts[section] = Prompts.of(version, policy, recipe.prompt.system)
            if section == "data" and is_answered:
                rows.answers = _answers(recipe, config, store, policy, version)
    return rows


def require_references(recipe: Recipe) -> None:
    """ConfigError if shipped functions cannot read the references of more of the first rows that a
    resolved recipe takes than its reward.max_invalid allows; up to there, a warning."""
    for section in recipe.columns:
        config = first_config(recipe, section)
        table = sources.read(config).table
        chosen = choose(table.num_rows, config.limit, config.seed, config.iteration)[:ROWS]
        refused = refusals(recipe.reward, table.take(pa.array(chosen, pa.int64())))
        if not refused:
            continue
        position, (name, column, problem) = next(iter(sorted(refused.items())))
        error = ConfigError(
            f"{printable(config.source)} row {chosen[position] + 1}",
            f"column {printable(column)}: the reward function {name} cannot read it: {problem}; "
            f"that is so of {len(refused)} of the first {len(chosen)} rows of {section}",
            next="correct the row, or take it out of the source; or name another column under "
            "columns of that function",
        )
        if len(refused) > recipe.reward.max_invalid * len(chosen):
            raise error
        log.warning("%s: %s", error.object, error.message)


def prompt_config(recipe: Recipe, section: str) -> PromptConfig:
    """The prompt stage's config of data, in the first iteration, or of data.held_out."""
    is_held_out = section == "data.held_out"
    return recipe.prompt_config(0 if is_held_out else 1, evaluation=is_held_out)


def first_config(recipe: Recipe, section: str) -> PromptConfig:
    """Return `prompt_config` limited to the first rows that the run takes over all its
    iterations."""
    config = prompt_config(recipe, section)
    has_environment = config.turns is not None and bool(config.turns.environment)
    first = SLOW_ROWS if has_environment or config.images else ROWS
    limit = config.limit
    if limit is not None and section == "data":
        limit *= recipe.iterations
    return config.model_copy(update={"first": first, "limit": limit})


def _render(config: PromptConfig, store: Store, policy: Version) -> Version:
    """Return the prompts of the first rows. If some are too long, logs how many. ConfigError,
    SecurityError."""
    try:
        return _made("prompt", config, store, policy=policy)
    except ConfigError:
        if config.overlong == "error":
            with suppress(ConfigError):  # something else is wrong
                lenient = config.model_copy(update={"overlong": "drop"})
                status = _made("prompt", lenient, store, policy=policy).manifest.status
                log.warning(
                    "%d of the first %d prompts of %s are too long",
                    status["dropped"],
                    sum(status.values()),
                    printable(config.source),
                )
        raise


def visible(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """The text of a prompt, with each added token (control tokens, `<think>`) in ⟦brackets⟧: what
    looks like one without them is text."""
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


def _answers(
    recipe: Recipe, config: PromptConfig, store: Store, policy: Version, prompts: Version
) -> list[Answered]:
    """Score `_ANSWER`, cut to max_tokens, as an answer to the first of the prompts, and then its
    reference if that is short enough; a group of them if a scorer needs groups."""
    one_row = config.model_copy(update={"first": 1})
    plan = prompt_stage.plan(one_row, store, {"policy": str(policy.ref)})
    with open_staging(plan) as staging:
        writer = staging.writers["prompts"]
        writer.write_table(prompts.table().slice(0, 1))
        writer.finish(metrics=prompts.manifest.metrics)
        prompt = staging.publish()
    generate = recipe.generate_config(1)
    room = max(1, generate.sampling.max_tokens - 1)  # one is the end token's
    tokenizer = checkpoints.load_tokenizer(policy)
    ids = tokenizer.encode(_ANSWER, add_special_tokens=False)[:room]
    tries = [(ids, recipe.reward.model_copy(update={"max_invalid": 1.0}))]
    reference = reference_of(recipe, prompts.table(["columns"])["columns"][0].as_py())
    if reference is not None and generate.turns is None:
        ids = tokenizer.encode(reference, add_special_tokens=False)
        if 0 < len(ids) <= room:
            tries.append((ids, tries[0][1].model_copy(update={"models": (), "servers": ()})))
    answers = []
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
        answers.append(
            Answered(
                text=rollouts["completion_text"][0].as_py(),
                failure=first_failure(rollouts) if generate.turns is not None else None,
                scores=scores,
            )
        )
    return answers


def reference_of(recipe: Recipe, row: dict[str, Any]) -> str | None:
    """Return the right answer that a reward function of a resolved recipe reads in a row of the
    source, as text. None if there is no text or number of that name that one reads."""
    offered = [*recipe.columns["data"], *recipe.offered_columns]
    batch = {name: [cell] for name, cell in row.items()}
    for function in recipe.reward.functions:
        only = {"functions": (function,), "models": (), "servers": ()}
        reads = preview(recipe.reward.model_copy(update=only), offered)
        for name in ANSWERS:
            column = column_of(name, function, row)
            if reads.may_be_all or column.partition(".")[0] in reads.by_name:
                for (cell,) in given(function, [name], batch).values():
                    with suppress(ValueError):  # neither text nor a number
                        return as_text(cell)
    return None


def _made(stage: str, config: Config, store: Store, **inputs: Version) -> Version:
    refs = {role: str(version.ref) for role, version in inputs.items()}
    return store.open(str(run_stage(stage, config, store, in_process=True, **refs)))
