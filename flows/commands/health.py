"""`quiver doctor`: find problems of an installation and a store, or put a damaged version aside."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import completion
from .cleaning import in_words
from .next_step import complete, default_store, options_in
from .placing import room_above
from .shared import CALLED, StorePath, open_store, say

_BESIDES = {
    "optimizer_bytes": "optimizer state of older policies",
    "staging_bytes": "staged and given up",
    "trash_bytes": "trash",
    "quarantine_bytes": "put aside",
}
"""Sizes that `quiver gc` frees, or that can be freed by hand."""


def doctor(
    context: typer.Context,
    quarantine: Annotated[
        str | None,
        typer.Option(
            help="put this damaged version aside",
            metavar="REF",
            autocompletion=completion.references,
        ),
    ] = None,
    store: StorePath = None,
) -> None:
    """Find problems of installation, server and store. Each comes with a next step; `verify` reads
    every byte. With --quarantine, put a damaged version aside."""
    if quarantine:
        from quiver.stages.common.store.retention import quarantine as put_aside

        ref, folder = put_aside(open_store(store), quarantine)
        lines = [f"{ref} is in {folder}", "the command that made it makes it again"]
        say({"quarantined": str(ref), "folder": str(folder)}, lines)
        return
    from ..doctor import examine

    CALLED.store = store
    if store is not None:
        open_store(store)  # A store that was named must exist.
    findings = examine(store or default_store(), lambda: room_above("server").check_api())
    for problem in findings.problems:
        problem.next = complete(problem.next, CALLED, options_in(context.parent.command.commands))
    lines = [*_in_lines(findings.facts), *map(str, findings.problems)]
    if not findings.problems:
        lines.append("nothing is wrong")
    problems = [problem.to_dict() for problem in findings.problems]
    say({**findings.facts, "problems": problems}, lines)
    if findings.problems:
        raise SystemExit(findings.problems[0].exit_code)


def _in_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts as lines for people."""
    installed = {name: version for name, version in facts["versions"].items() if version}
    devices = ", ".join(facts["gpu"]["devices"]) or "none: stages run on the CPU"
    api = facts["prefect"]["api"] or "none: each run starts its own"
    store = facts["store"]
    lines = [
        " · ".join(f"{name} {version}" for name, version in installed.items()),
        f"GPU      {devices}",
        f"Prefect  server {api}; home {facts['prefect']['home']}",
    ]
    if store["versions"]:
        kinds = [f"{kind} {in_words(size)}" for kind, size in store["bytes"].items() if size]
        lines.append(
            f"store    {store['path']}: {store['versions']} versions ({', '.join(kinds)}); "
            f"{in_words(store['free_bytes'])} are free"
        )
        besides = [
            f"{words} {in_words(store[key])}" for key, words in _BESIDES.items() if store.get(key)
        ]
        lines += [f"         besides: {', '.join(besides)}"] if besides else []
    else:
        lines.append(f"store    none at {store['path']}")
    lines += [
        f"not installed: {', '.join(extra['packages'])}, for {extra['for']}: "
        f'pip install "quiver-rl[{name}]"'
        for name, extra in facts["missing_extras"].items()
    ]
    return lines
