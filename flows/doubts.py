"""Warnings about settings that may be mistakes; a run accepts them all the same.

For example: a limit above the number of rows, a penalty that is never paid, held-out rows that ask
the same as the training rows.

    for sentence in doubts(recipe, rows, tables): …      # a resolved recipe and its rows
    unused(recipe)                                       # columns that nothing reads
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import printable, quoted_name
from quiver.schemas.outside import read_message
from quiver.schemas.plain import read_json
from quiver.stages.prompt.chats import columns_of, text_of
from quiver.stages.prompt.config import INPUTS, Config
from quiver.stages.reward.preview import preview

from .first_rows import Answered, FirstRows, Prompts, prompt_config
from .recipe import Recipe

_ROWS_AT_ONCE = 16
"""Rows converted to Python objects at a time, because pictures are large."""


def doubts(recipe: Recipe, rows: FirstRows, tables: Mapping[str, pa.Table]) -> list[str]:
    """Return warnings about a resolved recipe.

    `rows`: its first rows, if they were rendered. `tables`: all rows of its sources, by section.
    """
    return [
        *about_rows(recipe, tables),
        *about_prompts(recipe, rows.prompts),
        *about_steps(recipe, tables["data"].num_rows),
        *about_rewards(recipe, tables["data"]),
        *about_answers(recipe, rows.answers),
    ]


def unused(recipe: Recipe) -> list[str]:
    """Return the columns of the training rows that neither prompts nor rewards read.

    Empty if that is unknown: a reward may read any column, or rollouts have several turns.
    """
    columns = recipe.columns["data"]
    reads = preview(recipe.reward, [*columns, *recipe.offered_columns])
    if reads.may_be_all or recipe.generate.turns is not None:
        return []
    config = prompt_config(recipe, "data")
    named = {getattr(config, name) for name in (*INPUTS, "group_id", "images")}
    named.update(columns_of(config, columns).values())
    return [name for name in columns if name not in named | reads.by_name]


# -- rows


def about_rows(recipe: Recipe, tables: Mapping[str, pa.Table]) -> Iterator[str]:
    """Yield warnings about the sources: too few rows, and duplicates."""
    asked = {}
    for section, table in tables.items():
        config = prompt_config(recipe, section)
        asked[section] = questions(config, table)
        if config.limit is not None and config.limit > table.num_rows:
            yield (
                f"{section}.limit is {config.limit}, and the source has {table.num_rows} rows: all "
                "of them are asked each time"
            )
    num_different = len(set(asked["data"]))
    if 2 * num_different <= len(asked["data"]):
        yield (
            f"the {len(asked['data'])} rows of data ask {num_different} different things: keep "
            "each once, and set generate.samples_per_prompt to how often it is to be answered"
        )
    if "data.held_out" in asked:
        learned = set(asked["data"])
        num_learned = sum(question in learned for question in asked["data.held_out"])
        if num_learned:
            yield (
                f"{num_learned} of the {len(asked['data.held_out'])} rows of data.held_out ask "
                "the same as rows of data, but for case and spacing: an evaluation does not tell "
                "what is learned from what is known by heart"
            )
    elif recipe.evaluate.every:
        yield (
            "evaluate.every is set, and without data.held_out nothing is measured: set "
            "data.held_out"
        )
    if recipe.data.held_out is not None and recipe.evaluate.every > recipe.iterations:
        yield (
            f"evaluate.every is {recipe.evaluate.every}, and the run has {recipe.iterations} "
            "iterations: it is measured before the first and after the last"
        )


def questions(config: Config, table: pa.Table) -> list[str]:
    """Return each row's question as text that is equal for equal questions, ignoring case and
    spacing.

    An environment may build its question from any column, so the whole row counts there.
    """
    shown = {
        "question": getattr(config, config.input),
        "images": config.images,
        **columns_of(config, table.column_names),
    }
    if config.turns is not None and config.turns.environment:
        shown = {name: name for name in table.column_names}
    asked = []
    for start in range(0, table.num_rows, _ROWS_AT_ONCE):
        rows = table.slice(start, _ROWS_AT_ONCE)
        cells = {name: rows[column].to_pylist() for name, column in shown.items() if column}
        for row in zip(*cells.values(), strict=True):
            folded = _folded(dict(zip(cells, row, strict=True)))
            question = folded.get("question")
            if isinstance(question, str):  # A chat of one text asks the same as the text.
                folded["question"] = [{"role": "user", "content": question}]
            asked.append(json.dumps(folded, sort_keys=True, default=repr))
    return asked


def _folded(cell: Any) -> Any:
    """Return `cell` in a form that is equal for equal questions.

    JSON text is parsed, messages are read as the policy reads them, other text loses case and
    spelling variants, bytes become their hash, and empty members are dropped.
    """
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            cell = read_json(cell)
    if isinstance(cell, str):
        return " ".join(unicodedata.normalize("NFC", cell).casefold().split())
    if isinstance(cell, bytes):
        return hashlib.sha256(cell).hexdigest()
    if isinstance(cell, list):
        return [_folded(item) for item in cell]
    if isinstance(cell, dict):
        with suppress(ValueError):  # Not a message.
            cell = read_message(cell, "")
            cell["content"] = text_of(cell["content"])
        members = {str(key): _folded(member) for key, member in cell.items()}
        return {key: member for key, member in members.items() if member not in (None, "", [], {})}
    return cell


# -- prompts


def about_prompts(recipe: Recipe, prompts: Mapping[str, Prompts]) -> Iterator[str]:
    """Yield warnings about prompts and settings that the policy does not see."""
    for section, of_section in prompts.items():
        if of_section.num_dropped:
            yield (
                f"{of_section.num_dropped} of the first {of_section.num_looked_at} prompts of "
                f"{section} are left out: they have more than {of_section.longest} tokens"
            )
        if recipe.prompt.system is not None and of_section.num_other_system:
            yield (
                f"prompt.system is not shown in {of_section.num_other_system} of the first "
                f"{of_section.num_looked_at} prompts of {section}: they are no chats, or begin "
                "with a system message of their own"
            )
    without_template = recipe.data.raw_text or recipe.data.prompt_ids
    for name in ("template", "template_arguments"):
        if without_template and getattr(recipe.prompt, name):
            yield f"prompt.{name} is not used: the rows are no chats"


# -- steps


def about_steps(recipe: Recipe, num_rows: int) -> Iterator[str]:
    """Yield warnings about the optimizer's steps."""
    optimize = recipe.optimize
    num_groups = min(recipe.data.limit or num_rows, num_rows)
    if recipe.data.refill is not None:
        num_groups *= recipe.data.refill.max_rounds
    num_groups *= 1 + optimize.replay
    if optimize.minibatches > num_groups:
        yield (
            f"optimize.minibatches is {optimize.minibatches}, and an iteration has {num_groups} "
            "prompts, of which each step takes one at least: there are no more steps than prompts"
        )
    num_steps = recipe.iterations * optimize.epochs * min(optimize.minibatches, num_groups)
    if optimize.learning_rate >= (0.1 if optimize.lora else 0.01):
        yield (
            f"optimize.learning_rate is {optimize.learning_rate:g}: AdamW moves each weight by "
            "about so much a step, which unlearns all that a policy knew; 1e-6 to 1e-5 are usual, "
            "with optimize.lora 1e-5 to 1e-4"
        )
    if optimize.warmup_steps >= num_steps:
        yield (
            f"optimize.warmup_steps is {optimize.warmup_steps}, and the run has {num_steps} "
            f"steps: the learning rate never comes to {optimize.learning_rate:g}"
        )
    if optimize.schedule != "constant" and optimize.total_steps < num_steps:
        yield (
            f"optimize.total_steps is {optimize.total_steps}, and the run has {num_steps} steps: "
            f"iterations that begin after it fail; raise it to {num_steps}"
        )


# -- rewards


def about_rewards(recipe: Recipe, table: pa.Table) -> Iterator[str]:
    """Yield warnings about rewards that are never paid, and about the columns that they read."""
    reward = recipe.reward
    if not any(scorer.weight for scorer in reward.scorers) and reward.overlong is None:
        yield "every part of the reward has weight 0: nothing is learned"
    turns = recipe.generate.turns
    most = recipe.generate.sampling.max_tokens if turns is None else turns.max_tokens
    overlong = reward.overlong
    if overlong is not None and overlong.max_tokens - overlong.cache >= most:
        yield (
            f"reward.overlong begins behind {overlong.max_tokens - overlong.cache} tokens, and a "
            f"completion has at most {most}: it is never paid"
        )
    reads = preview(reward, [*recipe.columns["data"], *recipe.offered_columns])
    for name in sorted(reads.by_name & {*table.column_names}):
        num_empty = table.column(name).null_count
        if num_empty:
            yield (
                f"column {quoted_name(name)}, which the reward reads, is empty in {num_empty} of "
                f"{table.num_rows} rows"
            )


def about_answers(recipe: Recipe, answers: Sequence[Answered]) -> Iterator[str]:
    """Yield a warning if no function pays more for the reference than for the made-up answer.

    `answers`: the made-up one and, if the row has one, the reference.
    """
    if len(answers) < 2 or answers[1].text in answers[0].text:
        return
    made_up, right = (
        [
            function.weight * (answer.scores[function.name].values[0] or 0.0)
            for function in recipe.reward.functions
        ]
        for answer in answers
    )
    if not any(more > less for less, more in zip(made_up, right, strict=True)):
        yield (
            f"no reward function pays more for the first row's own answer, "
            f"{printable(repr(answers[1].text))}, than for {printable(repr(answers[0].text))}: "
            "unless it lacks a form that is asked for, a box or tags say, no right answer is paid"
        )
