"""`quiver view`: rollouts in a terminal application, or as a plain table for other outputs."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from quiver.schemas.errors import ConfigError
from quiver.schemas.refs import check_name

from . import completion
from .shared import StorePath, answers_in_json, open_store, or_latest, say

if TYPE_CHECKING:
    from quiver.flows.look.joined import Selection
    from quiver.flows.look.paired import Paired

WEB_DRIVER = "TEXTUAL_DRIVER"
"""Variable that textual-serve sets for the process behind a page."""


def view(
    ref: Annotated[
        str | None,
        typer.Argument(
            help="run/kind@version, or a run; default: all versions",
            metavar="[REF]",
            autocompletion=completion.runs_and_references,
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Argument(
            help="a second version, shown side by side",
            metavar="[REF]",
            autocompletion=completion.references,
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option(help="reward, score, tokens, advantage, change, random, …")
    ] = "",
    descending: Annotated[bool, typer.Option("--descending", help="the highest first")] = False,
    where: Annotated[
        str, typer.Option(help="conditions, such as: reward < 0.5, finish_reason = length")
    ] = "",
    search: Annotated[
        str, typer.Option(help="text in the prompt, the completion or any turn")
    ] = "",
    by: Annotated[
        str, typer.Option(help="a table of means by this column: end, or one of your data's")
    ] = "",
    n: Annotated[int, typer.Option("-n", help="rows of the plain table", min=0)] = 20,
    web: Annotated[
        bool, typer.Option("--web", help="the application in a browser on this host")
    ] = False,
    store: StorePath = None,
) -> None:
    """Look at rollouts, down to single tokens. Prints a plain table if the output is not a
    terminal."""
    from quiver.flows.look.joined import Selection

    if web and by:
        raise ConfigError("--by", "prints a table, not a page", next="leave out --web, or --by")
    opened = open_store(store)
    is_served = WEB_DRIVER in os.environ  # this process answers to one page of a browser
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    is_app = is_served or (not answers_in_json() and has_terminal and not by)
    library = "textual_serve" if web else "textual"
    if (is_app or web) and importlib.util.find_spec(library) is None:
        raise ConfigError(
            "quiver view", f"{library} is not installed here", next='pip install "quiver-rl[view]"'
        )
    selection = Selection(sort, descending, where, search)
    if web:
        _serve([word for word in (ref, beside) if word], selection, opened.url)
        return
    if ref is None or "/" not in ref:
        run = check_name(ref, "run") if ref else None
        if is_app:
            from quiver.flows.look.view.app import ViewApp

            ViewApp(opened, run=run).run()
            return
        raise ConfigError(
            "quiver view",
            "a plain table shows one version",
            next="name a version as in: arith/rollouts@latest",
        )
    from quiver.flows.look.paired import pair

    paired = pair(opened, or_latest(ref), or_latest(beside) if beside else None)
    if is_app:
        from quiver.flows.look.view.app import ViewApp

        ViewApp(opened, paired, selection).run()
        return
    _print_plain(paired, selection, by, n)


def _print_plain(paired: Paired, selection: Selection, by: str, n: int) -> None:
    """Print the first `n` selected rollouts, or means by a column."""
    from quiver.flows.look.view.plain import group_lines, lines_of

    joined = paired.first
    answer = {"ref": str(joined.ref), "rewards": joined.rewards}
    order = joined.order(selection)
    if by:
        groups = joined.groups(by, order)
        rows = groups.drop_columns("position").to_pylist()
        say({**answer, "by": by, "groups": rows}, [joined.title, *group_lines(groups)])
        return
    positions = order[:n]
    if answers_in_json():
        rows = joined.rows(positions)
        answer |= {"sources": joined.sources, "matching": len(order), "rows": rows}
        if paired.second is not None:
            partners = paired.partners([row["position"] for row in rows])
            answer |= {"beside": str(paired.second.ref), "partners": partners}
        say(answer, [])
    else:
        say({}, [*paired.titles, *lines_of(paired, positions)])


def _serve(refs: list[str], selection: Selection, store: str) -> None:
    """Serve the application to a browser, and print its address."""
    from quiver.flows.look.view.web import serve

    options = {name: getattr(selection, name) for name in ("sort", "where", "search")}
    words = [f"--{name}={text}" for name, text in {**options, "store": store}.items() if text]
    words += ["--descending"] if selection.descending else []
    serve(["view", *refs, *words], lambda url: say({"url": url}, [f"{url}  (ends with Ctrl-C)"]))
