"""`quiver gc`: list what a store no longer needs, or delete it."""

from __future__ import annotations

from typing import Annotated

import typer

from quiver.flows.look.words import size

from . import completion
from .shared import StorePath, open_store, say


def gc(
    apply: Annotated[
        bool, typer.Option("--apply", help="do it; without it, only print what would be done")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            help="number of versions of each kind to keep in each run; default: all", min=1
        ),
    ] = None,
    moments: Annotated[
        int,
        typer.Option(
            help="number of newest policies of each run that keep their optimizer state", min=1
        ),
    ] = 1,
    grace_hours: Annotated[
        float, typer.Option(help="hours for which removed files stay in the trash", min=0)
    ] = 24,
    restore: Annotated[
        str | None,
        typer.Option(
            help="bring this version back instead",
            metavar="REF",
            autocompletion=completion.references,
        ),
    ] = None,
    store: StorePath = None,
) -> None:
    """Free what is no longer needed. This covers optimizer state of older policies, abandoned
    staging and trash; with --keep older versions too. Manifests stay. Without --apply, it is
    only listed."""
    from quiver.stages.core.store import retention
    from quiver.stages.core.store.collection import Rule, collect

    opened = open_store(store)
    if restore is not None:
        ref, what = retention.restore(opened, restore)
        say({"restored": str(ref), "what": what}, [f"{ref} is back"])
        return
    rule = Rule(keep, moments, grace_hours * 3600)
    collected = collect(opened, rule, apply=apply)
    to_trash = [*collected.optimizer, *collected.versions]
    lines = [
        f"{candidate.ref} {candidate.folder:<10} {size(candidate.bytes):>10}"
        for candidate in to_trash
    ]
    lines += [
        f"{leftover.run} staged {leftover.run_key[:12]} {size(leftover.bytes)}"
        for leftover in collected.staging
    ]
    lines += [
        f".quarantine/{name} {size(count)}: delete it by hand when you do not need it any more"
        for name, count in collected.quarantine.items()
    ]
    answer = {
        "applied": apply,
        "versions": [
            {"ref": str(candidate.ref), "bytes": candidate.bytes}
            for candidate in collected.versions
        ],
        "optimizer": [
            {"ref": str(candidate.ref), "bytes": candidate.bytes}
            for candidate in collected.optimizer
        ],
        "staging": [
            {"run": candidate.run, "run_key": candidate.run_key, "bytes": candidate.bytes}
            for candidate in collected.staging
        ],
        "deleted_bytes": collected.deleted_bytes,
        "trash_bytes": collected.trash_bytes,
        "quarantine": collected.quarantine,
    }
    moved = sum(candidate.bytes for candidate in to_trash)
    freed = collected.deleted_bytes + sum(candidate.bytes for candidate in collected.staging)
    would = "" if apply else "would be "
    lines += [
        f"{size(moved)} {would}moved to the trash, {size(freed)} {would}deleted",
        f"{size(collected.trash_bytes)} {'lie' if apply else 'would lie'} in the trash: the next "
        f"quiver gc --apply deletes what has been there for {grace_hours:g} hours",
    ]
    say(answer, lines)
