"""Commands that run something: a whole recipe, a night, or one stage on saved versions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal

import typer

from quiver.flows.look.words import counted
from quiver.schemas.errors import ConfigError, QuiverError, for_terminal, printable
from quiver.schemas.refs import check_name
from quiver.stages import CHAIN

from . import completion
from .shared import (
    Force,
    NamedVersion,
    NamedVersions,
    Note,
    RecipeFile,
    Settings,
    StorePath,
    by_hand,
    made_line,
    read_recipe,
    say,
)

log = logging.getLogger("quiver")


def run(
    recipe: RecipeFile,
    iterations: Annotated[
        int | None, typer.Option(help="number of iterations, instead of the recipe's")
    ] = None,
    first: Annotated[
        Literal[*CHAIN] | None,
        typer.Option("--from", help="make the versions of this stage and of all later ones again"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="a few rows and a small random model; nothing is kept"),
    ] = False,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Run a whole recipe; resumes by itself. Prompt, generate, reward and optimize repeat, with an
    evaluation before and after."""
    settings = settings or []
    length = [] if iterations is None else [f"iterations={iterations}"]
    loaded = read_recipe(recipe, [*settings, *length], store)
    from quiver.flows.look.live import shown_live
    from quiver.stages.core.store.places import locate

    if dry_run:
        loaded = loaded.for_night(_today())
    else:
        planned = counted(loaded.iterations, "iteration")
        log.info("%s: %s, in %s", loaded.run, planned, locate(loaded.store))

    with shown_live():
        from quiver.flows.preflight import finished, preflight
        from quiver.stages.core.store import Store

        loaded = preflight(loaded)  # Refused here, before a server is started.
        if dry_run:
            from quiver.flows.dry_run import dry_run as rehearse

            answer, lines = rehearse(loaded, recipe)
        else:
            from prefect import tags

            from quiver.flows.calls import prefect_tags
            from quiver.flows.post_train import post_train

            from .summary import next_commands, summary

            Store(loaded.store)
            finished(loaded)  # Warns if another recipe began this run.
            with _from_shell(), tags(*prefect_tags(loaded.run)):
                answer = post_train(loaded, first)
            commands = next_commands(loaded, recipe, settings, answer)
            lines = summary(locate(loaded.store), answer, commands)
    say(answer, lines)
    if not dry_run:
        _warn(loaded.store, loaded.run, answer["iterations"][-1]["policy"])


@contextmanager
def _from_shell() -> Iterator[None]:
    """Run a flow inside: with a Prefect server, on which no run of a dead shell stays running."""
    from prefect import tags

    from quiver.flows.cli.embedded import guard_embedded_server
    from quiver.flows.prefect_server import crash_abandoned, shell_tag

    guard_embedded_server()
    crash_abandoned()
    with tags(shell_tag()):
        yield


def _warn(store: str, run: str, policy: str) -> None:
    """Repeat the report's warnings on the run that ended at `policy`, in colour if the terminal has
    it."""
    from quiver.flows.look.gather import gather
    from quiver.flows.look.troubles import warnings
    from quiver.stages.core.store import Store

    try:
        sentences = warnings(gather(Store(store), run, policy))
    except QuiverError as error:  # The run is finished, and this is only a look back.
        sentences = [f"{error.object}: {error.message}"]
    for sentence in sentences:
        typer.secho(f"warning: {for_terminal(sentence)}", fg="yellow", err=True)


def check(
    recipe: RecipeFile,
    show: Annotated[
        bool, typer.Option("--show", help="print the first prompt as the policy reads it")
    ] = False,
    try_out: Annotated[
        bool,
        typer.Option("--try", help="also start the scorers, and let them score two answers"),
    ] = False,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Check if a recipe can run, without running it. Paths, columns and names are checked and the
    first rows rendered; nothing is written."""
    from quiver.flows.checking import look

    loaded = read_recipe(recipe, settings, store).for_night(_today())
    looked = look(loaded, recipe, is_shown=show, is_tried=try_out)
    error = looked.error
    if error is None:
        say(looked.answer, looked.lines)
        return
    say({**looked.answer, "error": error.to_dict()}, [*looked.lines, str(error)])
    raise SystemExit(error.exit_code)


def nightly(
    recipe: RecipeFile,
    night: Annotated[
        str | None, typer.Option(help="name of the night; default: the date in UTC")
    ] = None,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Run one night: train on new prompts, promote what is better. It improves the policy in use; a
    decided night stays decided."""
    from quiver.flows.look.live import shown_live
    from quiver.flows.preflight import preflight
    from quiver.stages.core.store.places import locate

    loaded = read_recipe(recipe, settings, store)
    log.info("%s: night %s, in %s", loaded.run, night or _today(), locate(loaded.store))
    with shown_live():
        # Refused here, before a server is started.
        preflight(loaded.for_night(night or _today()))
        from quiver.flows.nightly import nightly as flow
        from quiver.flows.nightly import plan_night

        plan_night(loaded, night or _today())
        with _from_shell():
            outcome = flow(loaded, night)
    decision = f"{outcome['decision']}: {outcome['tag']} is {outcome['in_use']}"
    say(outcome, [decision, printable(outcome["why"], 1000)])


def _today() -> str:
    """Return the default name of a night: the date in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def estimate(
    recipe: RecipeFile,
    policy: Annotated[
        list[str],
        typer.Option(
            help="run/policy@version; may be repeated", autocompletion=completion.references
        ),
    ],
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="evaluation whose rollouts to use; may be repeated. Default: the run's newest one "
            "of a policy that the first --policy was trained from",
            autocompletion=completion.references,
        ),
    ] = None,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Estimate held-out scores from rollouts of another policy. Nothing is sampled; what cannot be
    estimated is refused."""
    from quiver.flows.estimation import estimate as estimate_policies
    from quiver.flows.look.comparisons import estimate_lines

    loaded = read_recipe(recipe, settings, store)
    with by_hand(loaded):
        answer = estimate_policies(loaded, policy, source or [])
    say(answer, estimate_lines(answer, str(recipe)))


def bisect(
    recipe: RecipeFile,
    good: Annotated[
        str, typer.Option(help="a policy that is good", autocompletion=completion.references)
    ],
    bad: Annotated[
        str,
        typer.Option(
            help="a worse policy that descends from it", autocompletion=completion.references
        ),
    ],
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Find the first policy that is worse. Measures few of those between two on the held-out rows;
    finished measurements are not repeated."""
    from quiver.flows.bisection import bisect as search
    from quiver.flows.look.comparisons import bisection_lines

    loaded = read_recipe(recipe, settings, store)
    with by_hand(loaded):
        answer = search(loaded, good, bad)
    say(answer, bisection_lines(answer))


def _stage_command(name: str, help: str) -> Callable[..., None]:
    """Return the command `quiver NAME RECIPE`: one stage on saved versions.

    A missing reference is the run's latest.
    """

    def command(
        recipe: RecipeFile,
        prompts: Annotated[str | None, NamedVersion] = None,
        rollouts: Annotated[list[str] | None, NamedVersions] = None,
        rewards: Annotated[list[str] | None, NamedVersions] = None,
        retry: Annotated[
            str | None,
            typer.Option(help="reward: score only the rows that have no reward in this version"),
        ] = None,
        override: Annotated[
            str | None,
            typer.Option(
                help="reward: JSON file {author, reason, overrides} of rewards to replace"
            ),
        ] = None,
        policy: Annotated[str | None, NamedVersion] = None,
        iteration: Annotated[
            int, typer.Option(help="iteration whose prompts and seeds to use", min=0, max=2**63 - 1)
        ] = 1,
        into: Annotated[
            str | None, typer.Option(help="optimize: run of the new policy; default: the recipe's")
        ] = None,
        note: Note = "",
        force: Force = False,
        store: StorePath = None,
        settings: Settings = None,
    ) -> None:
        from quiver.flows.rerun import rerun

        references = {
            "prompts": prompts,
            "rollouts": rollouts,
            "rewards": rewards,
            "retry": retry,
            "override": override,
            "policy": policy,
        }
        if into is not None and name != "optimize":
            problem = "only optimize takes it"
            raise ConfigError("--into", problem, next="set another run: --set run=NAME")
        into = into and check_name(into, "run")
        loaded = read_recipe(recipe, settings, store, measures=name == "evaluate")
        if override and name == "reward":
            from quiver.stages.reward.override import load

            del references["override"]
            overrides = load(override)
            run_it = partial(rerun, loaded, "override", references, overrides=overrides)
        else:
            run_it = partial(rerun, loaded, name, references, iteration, into=into)
        with by_hand(loaded, note):
            outcome = run_it(force=force)
        if note and outcome.cached:
            log.warning("%s was there before, and keeps its own note", outcome.ref)
        say(asdict(outcome), [made_line(outcome)])

    command.__name__ = name
    command.__doc__ = help
    return command


STAGES = [
    _stage_command(name, help)
    for name, help in {
        "prompt": "Render rows to token ids: a new prompts version.",
        "generate": "Sample completions: a new rollouts version.",
        "reward": "Score saved rollouts: a new rewards version.",
        "logprobs": "Saved completions under a reference: new logprobs.",
        "optimize": "Update the policy on saved rollouts: the next policy.",
        "evaluate": "Measure a policy on held-out rows: a new evaluation.",
    }.items()
]
