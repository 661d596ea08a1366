"""`quiver sweep`: compare settings on saved rollouts, and show the comparison again."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quiver.schemas.errors import ConfigError, from_dict, printable

from .shared import RecipeFile, Settings, StorePath, read_recipe, say

if TYPE_CHECKING:
    from quiver.flows.look.sweeps import Shown

_PARTS = ("cells", "then")
"""The tables of a sweep."""


def sweep(
    recipe: RecipeFile,
    over: Annotated[
        list[str] | None, typer.Option(help="KEY=V1,V2: compare these values; may be repeated")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="each cell with so many seeds", min=1)] = None,
    then: Annotated[
        int, typer.Option(help="train the best two for so many iterations more", min=0)
    ] = 0,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="measure only cells that may be the best")
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="show this sweep, else all sweeps of the run; nothing is run"),
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="print comma-separated values")] = False,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Compare settings. Each cell of [sweep] trains on the same saved rollouts; resumes by
    itself."""
    from quiver import flows
    from quiver.flows.look import sweeps
    from quiver.flows.look.live import shown_live
    from quiver.flows.sweep import name_of
    from quiver.flows.sweep import sweep as run_cells
    from quiver.stages.core.store import Store

    if show and (then or estimate):
        name = "--then" if then else "--estimate"
        raise ConfigError(name, "trains, and --show runs nothing", next="leave one of them out")
    loaded = read_recipe(recipe, settings, store)
    values = dict(map(_values, over or ()))
    changes: dict[str, Any] = {"over": {**loaded.sweep.over, **values}}
    changes |= {} if seeds is None else {"num_seeds": seeds}
    loaded = loaded.model_copy(update={"sweep": loaded.sweep.model_copy(update=changes)})
    num_made = flows.num_made
    if show:
        opened = Store(loaded.store, create=False)
        record = sweeps.read(opened, loaded.run, name_of(loaded))
    else:
        with shown_live():
            record = run_cells(loaded, then, estimated=estimate)
    opened = Store(loaded.store)
    if record is None:
        _say_all(sweeps.sweeps_of(opened, loaded.run), loaded.run, as_csv)
        return
    shown = sweeps.show(opened, record)
    lines = _csv_lines([shown.answer]) if as_csv else sweeps.sweep_lines(shown)
    errors = [row["error"] for part in _PARTS for row in shown.answer[part] if row["error"]]
    if not (show or as_csv or errors) and flows.num_made == num_made:
        lines += ["", "All of it was already done: nothing was made now."]
    say(shown.answer, lines)
    if errors:
        raise SystemExit(from_dict(errors[0]).exit_code)


def _say_all(all_shown: list[Shown], run: str, as_csv: bool) -> None:
    """Print all sweeps of a run, because none has the settings that were named."""
    from quiver.flows.look.sweeps import sweep_lines

    if not all_shown:
        raise ConfigError(
            f"sweep of {run}",
            "the run has none in this store",
            next="leave --show out, so that it is made",
        )
    answers = [shown.answer for shown in all_shown]
    lines = [f"{run} has no sweep with exactly these settings; all its sweeps, the newest last:"]
    for shown in all_shown:
        lines += ["", *sweep_lines(shown)]
    say({"run": run, "sweeps": answers}, _csv_lines(answers) if as_csv else lines)


def _values(text: str) -> tuple[str, list[Any]]:
    """Read `KEY=V1,V2`, each value as `--set` reads it."""
    from quiver.flows.sections import put_setting

    key, equals, values = text.partition("=")
    if not (key and equals and values):
        raise ConfigError(
            f"--over {printable(text)}",
            "expected KEY=V1,V2",
            next="write it like --over optimize.learning_rate=1e-6,3e-6",
        )
    section: dict[str, Any] = {}
    put_setting(section, f"all=[{values}]")
    if isinstance(section["all"], list):
        return key, section["all"]
    for index, value in enumerate(values.split(",")):
        put_setting(section, f"each.{index}={value}")
    return key, list(section["each"].values())


def _csv_lines(answers: list[dict[str, Any]]) -> list[str]:
    from quiver.flows.look.sweeps import flat_row

    text = io.StringIO()
    flat = [
        {"sweep": answer["sweep"], **flat_row(part, row)}
        for answer in answers
        for part in _PARTS
        for row in answer[part]
    ]
    names = dict.fromkeys(name for row in flat for name in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().splitlines()
