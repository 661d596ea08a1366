"""Warnings about settings that may be mistakes; a run accepts them all the same.

For example: a limit above the number of rows, a penalty that is never paid, held-out rows that ask
the same as the training rows.

    for sentence in about_rows(sources, recipe.evaluate.every, recipe.iterations): …
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import printable, quoted_name
from quiver.schemas.outside import read_message
from quiver.schemas.plain import read_json
from quiver.stages.evaluate.config import IS_THE_SUM
from quiver.stages.prompt.chats import columns_of, text_of
from quiver.stages.prompt.config import INPUTS, Config
from quiver.stages.reward.pool.habits import cells_of
from quiver.stages.reward.preview import Reads
from quiver.stages.reward.stage import Config as RewardConfig

from .first_rows import Answered, Prompts, Source
from .recipe import Recipe
from .sections import Data, Evaluate, Generate, Optimize, Prompt
from .slots import visible_gpus

_ROWS_AT_ONCE = 16
"""Rows converted to Python objects at a time, because pictures are large."""


# -- rows


def unused(config: Config, columns: Sequence[str], reads: Reads) -> list[str]:
    """Return the columns of the training rows that neither prompts nor rewards read.

    `reads`: what the rewards read. Empty if that is unknown: a reward may read any column, or
    rollouts have several turns.
    """
    if reads.may_be_all or config.turns is not None:
        return []
    named = {getattr(config, name) for name in (*INPUTS, "group_id")} | {*config.media.values()}
    named.update(columns_of(config, columns).values())
    return [name for name in columns if name not in named.union(reads.by_name.values())]


def about_rows(sources: Mapping[str, Source], every: int, iterations: int) -> Iterator[str]:
    """Yield warnings about the sources: too few rows, duplicates, and held-out rows not measured
    every `every` of all iterations."""
    asked = {}
    for section, source in sources.items():
        num_rows = source.table.num_rows
        asked[section] = questions(source.config, source.table)
        if source.config.limit is not None and source.config.limit > num_rows:
            yield (
                f"{section}.limit is {source.config.limit}, and the source has {num_rows} rows: "
                "all of them are asked each time"
            )
    for section, its_questions in asked.items():
        num_rows, num_different = len(its_questions), len(set(its_questions))
        if section == "data" and 2 * num_different <= num_rows:
            yield (
                f"the {num_rows} rows of data ask {num_different} different questions: keep each "
                "once, and set generate.samples_per_prompt to the number of answers to each"
            )
        elif num_different < num_rows:
            yield (
                f"{num_rows - num_different} of the {num_rows} rows of {section} ask the same as "
                "an earlier row, apart from case and spacing: if their other columns are the same "
                "too, keep each once"
            )
    if "data.held_out" not in asked:
        if every:
            yield (
                "evaluate.every is set, but without data.held_out nothing is measured: set "
                "data.held_out"
            )
        return
    learned = set(asked["data"])
    num_learned = sum(question in learned for question in asked["data.held_out"])
    if num_learned:
        yield (
            f"{num_learned} of the {len(asked['data.held_out'])} rows of data.held_out ask the "
            "same as rows of data, apart from case and spacing: an evaluation cannot tell learning "
            "from memorizing"
        )
    if every > iterations:
        yield (
            f"evaluate.every is {every}, and the run has {iterations} iterations: it is measured "
            "before the first and after the last"
        )


def questions(config: Config, table: pa.Table) -> list[str]:
    """Return each row's question as text that is equal for equal questions, ignoring case and
    spacing.

    An environment may build its question from any column, so the whole row counts there.
    """
    shown = {
        "question": getattr(config, config.input),
        **config.media,
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
        return [_folded(member) for member in cell]
    if isinstance(cell, dict):
        with suppress(ValueError):  # Not a message.
            cell = read_message(cell, "")
            cell["content"] = text_of(cell["content"])
        members = {str(key): _folded(member) for key, member in cell.items()}
        return {key: member for key, member in members.items() if member not in (None, "", [], {})}
    return cell


# -- prompts


def about_prompts(prompt: Prompt, source: Data, prompts: Mapping[str, Prompts]) -> Iterator[str]:
    """Yield warnings about prompts and settings that the policy does not see."""
    for section, of_section in prompts.items():
        if prompt.system is not None and of_section.num_other_system:
            yield (
                f"prompt.system is not shown in {of_section.num_other_system} of the first "
                f"{of_section.num_looked_at} prompts of {section}: they are not chats, or begin "
                "with a system message of their own"
            )
    without_template = source.raw_text or source.prompt_ids
    for name in ("template", "template_arguments"):
        if without_template and getattr(prompt, name):
            yield f"prompt.{name} is not used: the rows are not chats"


# -- engines and steps


def about_engines(recipe: Recipe) -> Iterator[str]:
    """Yield warnings about engines that answer without the policy, and about GPUs that are not
    seen."""
    engines = {"generate": recipe.generate.engine}
    if recipe.data.held_out is not None:
        engines["evaluate.generate"] = recipe.evaluate.generate.get("engine")
    for section, engine in engines.items():
        if engine == "scripted":
            yield (
                f"{section}.engine is scripted: a script answers in place of the policy, so "
                "rewards and scores say nothing about the policy"
            )
    for stage in ("generate", "logprobs", "optimize"):
        is_here = stage not in recipe.placement.pools
        if is_here and getattr(recipe, stage).device == "cuda" and not visible_gpus():
            yield (
                f"{stage}.device is cuda, and this machine shows no GPU: the stage would fail here"
            )


def about_steps(optimize: Optimize, source: Data, num_rows: int, iterations: int) -> Iterator[str]:
    """Yield warnings about the optimizer's steps."""
    num_groups = min(source.limit or num_rows, num_rows)
    if source.refill is not None:
        num_groups *= source.refill.max_rounds
    num_groups *= 1 + optimize.replay
    if optimize.minibatches > num_groups:
        yield (
            f"optimize.minibatches is {optimize.minibatches}, and an iteration has {num_groups} "
            "prompts: each step takes at least one, so there are no more steps than prompts"
        )
    num_steps = iterations * optimize.epochs * min(optimize.minibatches, num_groups)
    if optimize.learning_rate >= (0.1 if optimize.lora else 0.01):
        yield (
            f"optimize.learning_rate is {optimize.learning_rate:g}: AdamW moves each weight by "
            "about that much per step, which makes a policy forget all it knew; 1e-6 to 1e-5 are "
            "usual, with optimize.lora 1e-5 to 1e-4"
        )
    if optimize.warmup_steps >= num_steps:
        yield (
            f"optimize.warmup_steps is {optimize.warmup_steps}, and the run has {num_steps} steps: "
            f"the learning rate never reaches {optimize.learning_rate:g}"
        )
    if optimize.schedule != "constant" and optimize.total_steps < num_steps:
        yield (
            f"optimize.total_steps is {optimize.total_steps}, and the run has {num_steps} steps: "
            f"iterations that begin after it fail; raise it to {num_steps}"
        )


# -- rewards


def about_rewards(
    data: Data, generate: Generate, reward: RewardConfig, evaluate: Evaluate
) -> Iterator[str]:
    """Yield warnings about rewards that are never paid, and a part that is taken for the sum."""
    own = [scorer for scorer in reward.scorers if scorer.name == "reward"]
    is_sum = len(reward.part_names) == 1 and own and own[0].weight == 1 and not reward.reward_clip
    if own and not is_sum and data.held_out and evaluate.score == "reward":
        yield IS_THE_SUM
    if not any(scorer.weight for scorer in reward.scorers) and reward.overlong is None:
        yield "every part of the reward has weight 0: nothing is learned"
    turns = generate.turns
    most = generate.sampling.max_tokens if turns is None else turns.max_tokens
    overlong = reward.overlong
    if overlong is not None and overlong.max_tokens - overlong.cache >= most:
        yield (
            f"reward.overlong begins after {overlong.max_tokens - overlong.cache} tokens, but a "
            f"completion has at most {most}: the penalty is never applied"
        )


def about_cells(sources: Mapping[str, Source], reads: Reads, given: Sequence[str]) -> Iterator[str]:
    """Yield warnings about empty cells that the rewards read, nulls inside of cells, and columns
    that the rewards cannot read.

    `given`: names under which rewards get something of Quiver's, whatever the columns are called.
    """
    for (section, source), (name, column) in product(
        sources.items(), sorted(reads.by_name.items())
    ):
        table = source.table
        if column not in table.column_names:
            continue  # the stage adds it, as `turns`
        if column in given:
            config = source.config
            if column not in {*(getattr(config, each) for each in INPUTS), *config.media.values()}:
                yield (
                    f"{section} has a column {column}, but Quiver gives rewards its own {column}: "
                    "give the column another name if a reward should read it"
                )
            continue
        num_empty = 0
        num_with_nulls = 0
        places: dict[str, None] = {}
        for start in range(0, table.num_rows, _ROWS_AT_ONCE):
            cells = table[column].slice(start, _ROWS_AT_ONCE).to_pylist()
            for cell in cells_of(name, {column: cells}):
                # an empty cell of a CSV file is text
                is_empty = cell is None or (isinstance(cell, str) and not cell.strip())
                nulls = [] if is_empty else [*_nulls_in(cell, name)]
                num_empty += is_empty
                num_with_nulls += bool(nulls)
                places |= dict.fromkeys(nulls)
        read = f"column {quoted_name(name)}, which the reward reads,"
        rows = f"{table.num_rows} rows{'' if section == 'data' else f' of {section}'}"
        if num_empty:
            yield f"{read} is empty in {num_empty} of {rows}"
        if num_with_nulls:
            inside = "" if [*places] == [name] else f": {', '.join(map(quoted_name, places))}"
            yield f"{read} holds nulls in {num_with_nulls} of {rows}{inside}"


def _nulls_in(cell: Any, place: str) -> Iterator[str]:
    """Yield the place of each null inside a cell: `place` with the keys of objects, as in `a.b`."""
    if cell is None:
        yield place
    if isinstance(cell, dict):
        for key, member in cell.items():
            yield from _nulls_in(member, f"{place}.{key}")
    if isinstance(cell, list):
        for member in cell:
            yield from _nulls_in(member, place)


def about_answers(reward: RewardConfig, answers: Sequence[Answered]) -> Iterator[str]:
    """Yield a warning if no function pays more for the reference than for the made-up answer.

    `answers`: the made-up one and, if the row has one, the reference.
    """
    if len(answers) < 2 or answers[1].text in answers[0].text:
        return
    made_up, right = (
        [
            function.weight * (answer.scores[function.name].values[0] or 0.0)
            for function in reward.functions
        ]
        for answer in answers
    )
    if not any(more > less for less, more in zip(made_up, right, strict=True)):
        yield (
            "no reward function pays more for the first row's own answer, "
            f"{printable(repr(answers[1].text))}, than for {printable(repr(answers[0].text))}: "
            "right answers are not rewarded, unless this one only lacks a required form, such as a "
            "box or tags"
        )
