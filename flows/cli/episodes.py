"""Commands for saved trajectories: play them again, branch from a turn, import another system's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quiver import flows
from quiver.schemas.errors import CorruptError, for_terminal, printable

from . import completion
from .shared import ReadReference, Reference, StorePath, made_line, open_store, say

if TYPE_CHECKING:
    from quiver.stages.core.run.call import Outcome
    from quiver.stages.core.store import Store

_MOST_SHOWN = 5
_MOST_TEXT = 300
_Into = Annotated[
    str | None,
    typer.Option(help="run that the new version belongs to", autocompletion=completion.runs),
]


def reenact(
    ref: ReadReference,
    rows: Annotated[
        int | None,
        typer.Option(help="number of episodes to play, from the first; default: all", min=1),
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="my_env.py:Guess, in place of the recorded one")
    ] = None,
    tools: Annotated[
        list[str] | None, typer.Option(help="my_tools.py:search, in place of the recorded ones")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="processes for the environments; default: one per core", min=1),
    ] = None,
    store: StorePath = None,
) -> None:
    """Play saved episodes again, against their environment. Exit code 3 if it answers differently.
    The environment's current code runs."""
    from quiver.stages.turns.reenact import reenact as play

    report = play(
        open_store(store),
        ref,
        rows=rows,
        environment=environment,
        tools=tools or (),
        processes=processes,
    )
    if report.is_changed:
        names = ", ".join(report.sources)
        warning = f"the code of {names} has changed since {report.ref} was sampled"
        typer.secho(f"warning: {for_terminal(warning)}", fg="yellow", err=True)
    lines = [
        f"{report.ref} against {', '.join(report.sources)}",
        f"episodes  {report.episodes_agree} of {report.episodes} agree",
        f"turns     {report.turns_agree} of {report.turns} agree",
    ]
    if report.failed:
        lines[1] += f"; {report.failed} failed when they were sampled, and are not played"
    for difference in report.differences[:_MOST_SHOWN]:
        place = "before its first turn" if difference.turn is None else f"turn {difference.turn}"
        lines += [
            f"{printable(difference.rollout_id)} {place}: {difference.what}",
            f"   recorded  {printable(difference.recorded, _MOST_TEXT)}",
            f"   replayed  {printable(difference.came, _MOST_TEXT)}",
        ]
    num_more = len(report.differences) - _MOST_SHOWN
    if num_more > 0:
        lines.append(f"and {num_more} more")
    answer = {**vars(report), "differences": [d._asdict() for d in report.differences]}
    say(answer, lines)
    if report.differences:
        raise SystemExit(CorruptError.exit_code)


def branch(
    ref: Reference,
    turn: Annotated[
        int,
        typer.Option(
            help="number of the turn to sample again; the first turn of an episode is 0",
            min=1,
        ),
    ],
    into: _Into = None,
    store: StorePath = None,
) -> None:
    """Make prompts from saved episodes, up to a turn. `generate` continues from this prompts
    version."""
    outcome = _perform(open_store(store), "branch", {"turn": turn}, {"rollouts": ref}, into)
    _say_made({"prompts": outcome})


def import_(
    file: Annotated[Path, typer.Argument(help="JSON lines", metavar="FILE")],
    policy: Annotated[
        str,
        typer.Option(
            help="run/policy@version that sampled them", autocompletion=completion.references
        ),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            help="run/prompts@version that they answer, by group_id; default: made from the lines",
            autocompletion=completion.references,
        ),
    ] = None,
    into: _Into = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="how they were sampled, e.g. sampling.max_tokens=512"),
    ] = None,
    store: StorePath = None,
) -> None:
    """Import rollouts of another system. Each line holds ids with their logprobs, and may hold
    rewards. The audit of optimize shows if they are of that policy."""
    from quiver.flows.sections import put_setting
    from quiver.stages.core.config import parse
    from quiver.stages.generate import imported

    fields: dict[str, Any] = {"source": str(file)}
    for setting in settings or ():
        put_setting(fields, setting)
    opened = open_store(store)
    config = imported.resolve(parse(imported.Config, fields, "import"))
    source = {"source": str(file), "source_sha256": config.source_sha256}
    made = {}
    if prompts is None:
        imported.check(config, opened.open(policy))
        made["prompts"] = _perform(opened, "imported_prompts", source, {"policy": policy}, into)
        prompts = made["prompts"].ref
    refs = {"policy": policy, "prompts": prompts}
    made["rollouts"] = _perform(opened, "imported", config.model_dump(mode="json"), refs, into)
    if made["rollouts"].metrics["rewarded"]:
        refs = {"rollouts": made["rollouts"].ref}
        made["rewards"] = _perform(opened, "imported_rewards", source, refs, into)
    _say_made(made)


def _perform(
    store: Store, stage: str, config: dict[str, Any], refs: dict[str, str], into: str | None
) -> Outcome:
    """Run a stage in this process."""
    from quiver.flows.prefect_server import tell_version
    from quiver.stages.core.run.call import Call
    from quiver.stages.core.run.runner import find_or_make

    call = Call(stage, config, store.url, refs, into)
    outcome = find_or_make(call, store)
    flows.num_made += not outcome.cached
    tell_version(call, outcome)
    return outcome


def _say_made(made: dict[str, Outcome]) -> None:
    answer = {kind: asdict(outcome) for kind, outcome in made.items()}
    say(answer, list(map(made_line, made.values())))
