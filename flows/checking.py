"""What `quiver check` says of a recipe: what its first rows become, what its rewards say of a
made-up answer, and settings that may be mistakes.

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
from quiver.stages.common.models.from_function import is_function
from quiver.stages.common.store import Store
from quiver.stages.report.words import counted

from .doubts import doubts, unused
from .first_rows import Answered, FirstRows, first_rows
from .preflight import finished, preflight, try_out
from .recipe import Recipe

log = logging.getLogger(__name__)


@dataclass
class Looked:
    """The answer of `quiver check`."""

    answer: dict[str, Any]
    """In JSON."""
    lines: list[str]
    """For people."""
    error: ConfigError | None
    """The first failure on the made-up answer, if any."""


def look(recipe: Recipe, path: Path, *, is_shown: bool = False, is_tried: bool = False) -> Looked:
    """Look at the recipe in `path`. Raises what a run would raise before its first rollouts.

    Args:
        recipe: The recipe.
        path: Its file.
        is_shown: Say how the policy reads the first prompt.
        is_tried: Start what scores, and let it score a made-up answer.
    """
    with heard_warnings() as warnings:
        recipe = preflight(recipe)
        versions = finished(recipe)
        rows = FirstRows()
        if "policy" in versions:
            folder = Store(recipe.store).open(versions["policy"]).files.folder
            rows = first_rows(recipe, folder, is_answered=is_tried)
        elif is_shown or is_tried or not is_function(recipe.policy.model):
            rows = first_rows(recipe, is_answered=is_tried)
        else:
            log.warning(
                "prompts are not looked at: policy.model is a function, which the first run calls "
                "to make the base model; --show and --try call it, too"
            )
        error = rows.answered and failure(recipe, rows.answered)
        tried = try_out(recipe) if is_tried and error is None else []
        for sentence in doubts(recipe, rows.prompts):
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
    if rows.answered is not None:
        scores = rows.answered.scores
        answer["answer"] = rows.answered.text
        answer["rewards"] = {name: asdict(score) for name, score in scores.items()}
        lines.append(f"of the answer {printable(repr(rows.answered.text))}")
        lines += [f"  {name}: {score.in_words()}" for name, score in scores.items()]
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
    """Return the first failure on the made-up answer, the environment first; None if none."""
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
    """The warnings that are logged inside, each once, in place of the log. Where the block raises,
    the log has them after all."""
    heard: dict[str, None] = {}
    logger = logging.getLogger("quiver")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.setdefault(record.getMessage())
    propagates = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    is_done = False
    try:
        yield heard
        is_done = True
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        if not is_done:
            for sentence in heard:
                log.warning("%s", sentence)
