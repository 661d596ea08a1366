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

from quiver.schemas.errors import ConfigError, printable, quoted_name
from quiver.stages.common.environments import pool as environment_pool
from quiver.stages.common.models.from_function import is_function
from quiver.stages.report.words import counted
from quiver.stages.reward.pool import pool as function_pool

from .doubts import doubts, unused
from .first_rows import Answered, FirstRows, first_rows, read_sources, require_references
from .preflight import finished, made_policy, preflight, try_out
from .recipe import Recipe

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
        tables = read_sources(recipe)
        require_references(recipe, tables)
        rows = FirstRows()
        policy = made_policy(recipe)
        must_make = policy is None and is_function(recipe.policy.model)
        if is_shown or is_tried or not must_make:
            if must_make:
                log.info(
                    "policy.model is a function: it makes the base model now, which takes as long "
                    "as in a run; without --show and --try all is looked at that needs no model"
                )
            folder = policy and policy.files.folder
            rows = first_rows(recipe, folder, is_answered=is_tried)
        else:
            log.warning(
                "prompts are not looked at: policy.model is a function, which the first run calls "
                "to make the base model; --show and --try call it, too"
            )
        error = next(filter(None, (failure(recipe, each) for each in rows.answers)), None)
        tried = try_out(recipe) if is_tried and error is None else []
        for sentence in doubts(recipe, rows, tables):
            log.warning("%s", sentence)
    without_use = unused(recipe)
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
    lines += [f"{stage} can do its part" for stage in tried]
    lines += [f"iteration 1, {stage}: {ref} is there" for stage, ref in versions.items()]
    lines += [f"warning: {sentence}" for sentence in warnings]
    if error is None:
        planned = counted(recipe.iterations, "iteration")
        lines.append(f"{path} can run: {recipe.run}, {planned}")
    return Looked(answer, lines, error)


def failure(recipe: Recipe, answered: Answered) -> ConfigError | None:
    """Return the first failure on an answer, the environment's first; None if there is none."""
    problems = {f"reward {name}": score.error for name, score in answered.scores.items()}
    if recipe.generate.turns is not None:
        sources = printable(", ".join(recipe.generate.turns.sources))
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
