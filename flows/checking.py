"""The answer of `quiver check`: first rows, scores of two answers, and settings in doubt.

Look here for the order of the checks. The two answers are a made-up one and the row's own.

    looked = look(load("recipe.toml"), Path("recipe.toml"), is_tried=True)
    looked.answer["prompts"]["data"]["tokens"], looked.lines, looked.error
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quiver.flows.look.words import counted
from quiver.schemas.cells import fields_of
from quiver.schemas.errors import ConfigError, printable, quoted_name
from quiver.stages.core.run.stage import load_stage
from quiver.stages.model.from_function import is_function
from quiver.stages.reward.pool import pool as function_pool
from quiver.stages.reward.preview import preview
from quiver.stages.reward.scoring import OFFERED
from quiver.stages.turns import pool as environment_pool

from .doubts import (
    about_answers,
    about_cells,
    about_engines,
    about_prompts,
    about_rewards,
    about_rows,
    about_steps,
    unused,
)
from .first_rows import Answered, FirstRows, first_rows, read_source, require_references
from .placement import runs_here
from .preflight import finished, made_policy, preflight
from .recipe import Recipe
from .sections import Generate

log = logging.getLogger(__name__)
SHOWN = (__name__, environment_pool.log.name, function_pool.log.name)
"""Loggers whose lines below a warning are shown: this module's progress, and prints of the recipe's
code."""


@dataclass
class Looked:
    """The answer of `quiver check`."""

    answer: dict[str, Any]
    """The answer as JSON."""
    lines: list[str]
    """The answer as lines for people."""
    error: ConfigError | None
    """The first failure on an answer, if any."""


def look(recipe: Recipe, path: Path, *, is_shown: bool = False, is_tried: bool = False) -> Looked:
    """Check the recipe in `path`. Raises the errors a run would raise before its first rollouts.

    Args:
        recipe: The recipe.
        path: Its file.
        is_shown: Show the first prompt as the policy reads it.
        is_tried: Start the scorers, and let them score answers to the first prompt.
    """
    with heard_warnings() as warnings:
        recipe = preflight(recipe)
        versions = finished(recipe)
        sources = {}
        for section in recipe.columns:
            config = recipe.prompt_config(1, evaluation=section == "data.held_out")
            sources[section] = read_source(config, recipe.iterations)
        require_references(recipe.reward, sources)
        rows = FirstRows()
        base = made_policy(recipe.policy, recipe.store, recipe.run)
        if base or can_make(recipe.policy.model, is_forced=is_shown or is_tried):
            rows = first_rows(recipe, sources, base and base.files.folder, is_answered=is_tried)
        failures = (failure(recipe.generate, answered) for answered in rows.answers)
        error = next(filter(None, failures), None)
        tried = []
        if is_tried and error is None:
            tried = try_stages(recipe)
        reads_by_section = {}
        for section, source in sources.items():  # the held-out rows may lack a field, too
            fields = fields_of(source.table) or {}
            names = [*recipe.columns[section], *recipe.offered_columns]
            offered = {name: fields.get(name) for name in names}
            reads_by_section[section] = preview(recipe.reward, offered)
        reads = reads_by_section["data"]
        num_rows = sources["data"].table.num_rows
        for sentence in (
            *about_rows(sources, recipe.evaluate.every, recipe.iterations),
            *about_prompts(recipe.prompt, recipe.data, rows.prompts),
            *about_engines(recipe),
            *about_steps(recipe.optimize, recipe.data, num_rows, recipe.iterations),
            *about_rewards(recipe.data, recipe.generate, recipe.reward, recipe.evaluate),
            *about_cells(sources, reads, [*OFFERED, *recipe.offered_columns]),
            *about_answers(recipe.reward, rows.answers),
        ):
            log.warning("%s", sentence)
    without_use = unused(sources["data"].config, recipe.columns["data"], reads)
    answer = {
        "run": recipe.run,
        "iterations": recipe.iterations,
        "store": recipe.store,
        "columns": recipe.columns,
        "unused": without_use,
        "prompts": {section: prompts.to_json() for section, prompts in rows.prompts.items()},
        "tried": tried,
        "finished": versions,
        "warnings": [*warnings],
    }
    lines = [
        f"{section}: {', '.join(map(quoted_name, names))}"
        for section, names in recipe.columns.items()
    ]
    lines += [f"{section}: {prompts.in_words()}" for section, prompts in rows.prompts.items()]
    if without_use:
        lines.append(f"nothing reads {', '.join(map(quoted_name, without_use))}")
    lines.append(f"scored by {', '.join(recipe.reward.part_names)}")
    keys = (("answer", "rewards"), ("reference", "reference_rewards"))
    for (key, of_key), answered in zip(keys, rows.answers, strict=False):
        answer[key] = answered.text
        answer[of_key] = {name: asdict(score) for name, score in answered.scores.items()}
        lines.append(f"of the {key} {printable(repr(answered.text))}")
        lines += [f"  {name}: {score.in_words()}" for name, score in answered.scores.items()]
    if is_shown:
        first = rows.prompts["data"]
        answer["first_prompt"] = {"text": first.first_text, "tokens": first.first_tokens}
        lines += [f"first prompt, {first.first_tokens} tokens:", first.first_text]
    lines += [
        *(f"{stage} can do its part" for stage in tried),
        *(f"iteration 1, {stage}: {ref} is there" for stage, ref in versions.items()),
        *(f"warning: {sentence}" for sentence in warnings),
    ]
    if error is None:
        lines.append(f"{path} can run: {recipe.run}, {counted(recipe.iterations, 'iteration')}")
    return Looked(answer, lines, error)


def can_make(model: str, *, is_forced: bool) -> bool:
    """Return True if the base model may be made for the check, and log what that means.

    If `model` is a function, it is called only if `is_forced`.
    """
    if is_function(model):
        if not is_forced:
            log.warning(
                "prompts are not checked: policy.model is a function that the first run calls to "
                "make the base model; --show and --try also call it"
            )
            return False
        log.info(
            "policy.model is a function: it makes the base model now, which takes as long as in a "
            "run; --show and --try need the model, the other checks do not"
        )
    return True


def try_stages(recipe: Recipe) -> list[str]:
    """Start what the recipe's stages need: processes, scorers, servers. Return the stages' names.

    `first_rows` has tried the rewards with the columns of the training rows.
    """
    columns = recipe.columns["data"]
    for held_out in recipe.columns.values():
        if held_out != columns:
            load_stage("reward").check(recipe.reward, [*held_out, *recipe.offered_columns])
    tried = ["reward"] if recipe.generate.turns is None else ["generate", "reward"]
    if runs_here(recipe.placement, "optimize"):
        config = recipe.optimize_config()
        load_stage("optimize").check(config, [*columns, *recipe.offered_columns])
        tried.append("optimize")
    return tried


def failure(generate: Generate, answered: Answered) -> ConfigError | None:
    """Return the first failure on an answer, the environment's first; None if there is none."""
    problems = {f"reward {name}": score.error for name, score in answered.scores.items()}
    if generate.turns is not None:
        sources = printable(", ".join(generate.turns.sources))
        problems = {f"generate.turns {sources}": answered.failure, **problems}
    for name, why in problems.items():
        if why is not None:
            return ConfigError(
                name,
                f"fails on the answer {printable(repr(answered.text))}: {printable(why, 1000)}",
                next="correct it, or take it out of the recipe, and check again",
            )
    return None


@contextmanager
def heard_warnings() -> Iterator[dict[str, None]]:
    """Collect the warnings that are logged inside, each once, instead of logging them.

    If the block raises, they are logged after all. Output of the recipe's code and this module's
    lines are logged at once; other lines below a warning are dropped.
    """
    heard: dict[str, None] = {}

    def hear(record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            heard.setdefault(record.getMessage())
        elif record.name in SHOWN:
            logging.getLogger().handle(record)

    root = logging.getLogger("quiver")
    stages = logging.getLogger("quiver.stages")  # of which a command shows only warnings
    before = root.propagate, stages.level
    handler = logging.Handler(logging.INFO)
    handler.emit = hear
    root.propagate = False
    root.addHandler(handler)
    stages.setLevel(logging.INFO)
    try:
        try:
            yield heard
        finally:
            root.removeHandler(handler)
            root.propagate, level = before
            stages.setLevel(level)
    except BaseException:
        for sentence in heard:
            log.warning("%s", sentence)
        raise
