"""`quiver gc`: list what a store no longer needs, or delete it. `quiver store copy`: take a store
elsewhere."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quiver.flows.look.words import size

from .shared import StorePath, open_store, say


def gc(
    apply: Annotated[
        bool, typer.Option("--apply", help="do it; without it, only print what would be done")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            help="number of versions of each kind to keep in each run, and of its sweeps; "
            "default: all",
            min=1,
        ),
    ] = None,
    moments: Annotated[
        int,
        typer.Option(
            help="number of newest policies of each run that keep their optimizer state", min=1
        ),
    ] = 1,
    grace_hours: Annotated[
        float, typer.Option(help="how long the data of an expired version stay", min=0)
    ] = 24,
    store: StorePath = None,
) -> None:
    """Free what is no longer needed. Optimizer state of older policies expires, and with --keep
    older versions; their data are deleted after --grace-hours, their manifests stay. Abandoned work
    is deleted too. Without --apply, it is only listed."""
    from quiver.stages.core.store.listing import NO_OPTIMIZER
    from quiver.stages.core.store.retention import Expiring, Rule, collect

    def rows(entries: list[Expiring]) -> list[dict[str, Any]]:
        return [
            {"ref": str(entry.ref), "optimizer": entry.mark == NO_OPTIMIZER, "bytes": entry.bytes}
            for entry in entries
        ]

    rule = Rule(keep, moments, grace_hours * 3600)
    collected = collect(open_store(store), rule, apply=apply)
    answer = {
        "applied": apply,
        "expired": rows(collected.marked),
        "waiting": rows(collected.waiting),
        "deleted": rows(collected.deleted),
        "unfinished": [
            {"run": work.run, "run_key": work.run_key, "bytes": num_bytes}
            for work, num_bytes in collected.work
        ],
    }
    lines = ["expired now:" if apply else "would expire now:"] if answer["expired"] else []
    lines += [
        f"{row['ref']} {'optimizer' if row['optimizer'] else '':<10} {size(row['bytes']):>10}"
        for row in answer["expired"]
    ]
    lines += [
        f"{work.run} unfinished {work.run_key[:12]} {size(num_bytes)}"
        for work, num_bytes in collected.work
    ]
    freed = sum(row["bytes"] for name in ("deleted", "unfinished") for row in answer[name])
    left = [*answer["expired"], *answer["waiting"]]
    waiting = sum(row["bytes"] for row in left if row not in answer["deleted"])
    sentence = f"{size(freed) if freed else 'nothing'} {'was' if apply else 'would be'} deleted"
    if waiting:
        is_left = f"{size(waiting)} {'is' if apply else 'would be'} left"
        due = f"{grace_hours:g} hour{'' if grace_hours == 1 else 's'} after they expired"
        if not grace_hours:
            due = "when nothing needs it"
        sentence += f"; {is_left} for quiver gc --apply to delete {due}"
    say(answer, [*lines, sentence])


def copy(
    source: Annotated[str, typer.Argument(help="folder or URL of the store to copy")],
    target: Annotated[str, typer.Argument(help="empty folder or URL, or an earlier copy")],
) -> None:
    """Copy a store between folders and buckets. Every file is checked on the way. After an
    interruption, the same command goes on; later, it adds what is new. Unfinished work is left out.
    """
    from quiver.stages.core.store.copying import copy as copy_store

    copied = copy_store(open_store(source), target)
    lines = [f"{copied.versions} versions are in {target}; {size(copied.bytes)} were copied"]
    say({"versions": copied.versions, "bytes": copied.bytes}, lines)
