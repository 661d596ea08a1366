"""Commands about what rewards teach: `quiver teach` before a training, `quiver audit` after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quiver.schemas.errors import ConfigError
from quiver.schemas.refs import check_name

from . import completion
from .shared import Settings, StorePath, by_hand, open_store, or_latest, read_recipe, say


def teach(
    rewards: Annotated[
        list[str],
        typer.Argument(
            help="run/rewards@version, all of the same rollouts",
            metavar="REWARDS...",
            autocompletion=completion.references,
        ),
    ],
    beta: Annotated[
        float | None,
        typer.Option(
            help="strength of the KL term, in units of reward; default: the reward's standard "
            "deviation within prompts"
        ),
    ] = None,
    store: StorePath = None,
) -> None:
    """Show what rewards would teach, from saved answers alone. For each measure: the mean now, and
    under the policy that the reward pulls to."""
    from quiver.flows.look.teaching import teach as compare_lessons
    from quiver.flows.look.templates import lines

    answer = compare_lessons(open_store(store), [or_latest(ref) for ref in rewards], beta)
    say(answer, lines("lessons", answer))


def audit(
    run: Annotated[str, typer.Argument(help="the run", autocompletion=completion.runs)],
    judges: Annotated[
        list[str],
        typer.Option(
            "--with",
            help="the second reward: a recipe, or run/rewards@version; versions may be repeated",
            autocompletion=completion.references,
        ),
    ],
    prompts: Annotated[
        int, typer.Option(help="prompts of each iteration that the recipe scores", min=1)
    ] = 64,
    iterations: Annotated[
        int, typer.Option(help="iterations that the recipe scores, evenly spaced", min=2)
    ] = 20,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Look back at a run for reward hacking. Its training reward is compared with a second reward;
    it is no early warning."""
    from quiver.flows import auditing
    from quiver.flows.look.templates import lines
    from quiver.flows.placement import check_places
    from quiver.stages.core.store import Store

    check_name(run, "run")
    recipes = [judge for judge in judges if judge.endswith(".toml")]
    if recipes and len(judges) > 1:
        problem = "names a recipe and something else"
        raise ConfigError("--with", problem, next="name one recipe, or rewards versions alone")
    if recipes:
        loaded = read_recipe(Path(recipes[0]), settings, store, measures=False)
        with by_hand(loaded):
            check_places(loaded.placement, loaded.store)
            opened = Store(loaded.store)
            judge = auditing.by_reward(loaded.reward, opened, run, prompts)
            answer = auditing.audit(opened, run, judge, iterations)
    else:
        opened = open_store(store)
        judge = auditing.by_versions(opened, [or_latest(ref) for ref in judges])
        answer = auditing.audit(opened, run, judge, iterations)
    say(answer, lines("audit", answer))
