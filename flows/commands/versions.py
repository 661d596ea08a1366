"""Commands about what a store holds: versions, what they came from, how they differ, whether they
are whole; tags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quiver.schemas.errors import printable
from quiver.schemas.refs import Ref, check_name

from .next_step import complete, options_in
from .shared import CALLED, Debug, Json, Reference, StorePath, open_store, say


def ls(
    run: Annotated[str | None, typer.Argument(help="only this run")] = None,
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the versions."""
    from .inspect_store import listing

    rows = listing(open_store(store), run)
    lines = [
        row.get("error")
        or f"{row['ref']:<40} {row['rows']:>8}  {row['stage']:<10} {row['created'][:19]}"
        for row in rows
    ]
    say(json, {"versions": rows}, lines)


def show(
    ref: Reference,
    n: Annotated[int, typer.Option("-n", help="how many rows", min=0)] = 3,
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """A version's manifest and first rows."""
    import json as codec

    from .inspect_store import rows

    version = open_store(store).open(ref)
    manifest = version.manifest.model_dump(mode="json", by_alias=True)
    first_rows = rows(version, n)
    lines = [codec.dumps(manifest, indent=2, ensure_ascii=False)]
    lines += [printable(row, 2000) for row in first_rows]
    say(json, {"ref": str(version.ref), "manifest": manifest, "rows": first_rows}, lines)


def lineage(
    ref: Reference, store: StorePath = None, json: Json = False, debug: Debug = False
) -> None:
    """What a version was made of, down to the sources."""
    from quiver.stages.report.lineage import lineage as trace

    def tree(node: dict[str, Any], depth: int = 0) -> list[str]:
        line = "  " * depth + (f"{node.get('role', '')}: " if depth else "") + node["ref"]
        if node.get("seen"):
            line += " (above)"
        elif node.get("expired"):
            line += " (expired)"
        lines = [line]
        for child in node["inputs"]:
            lines += tree(child, depth + 1)
        return lines

    root = trace(open_store(store), ref)
    say(json, root, tree(root))


def diff(
    first: Reference,
    second: Reference,
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """What differs between two versions of one kind: config, models, metrics, rows."""
    from .inspect_store import diff as compare

    differences = compare(open_store(store), first, second)
    lines = [
        f"{path}: {printable(before)} → {printable(after)}"
        for path, (before, after) in differences["changed"].items()
    ]
    lines += [f"{key}: {differences[key]}" for key in ("rows", "rewards") if key in differences]
    say(json, differences, lines)


def verify(
    context: typer.Context,
    ref: Annotated[str | None, typer.Argument(help="only this version", metavar="[REF]")] = None,
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check every byte: sizes, hashes, schemas, and that no input is missing."""
    checked, bad = open_store(store).verify(ref)
    for error in bad:
        error.next = complete(error.next, CALLED, options_in(context.parent.command.commands))
    lines = [*(str(error) for error in bad), f"{checked} checked, {len(bad)} bad"]
    say(json, {"checked": checked, "bad": [error.to_dict() for error in bad]}, lines)
    if bad:
        raise SystemExit(bad[0].exit_code)


def tag(
    name: Annotated[str, typer.Argument(help="the tag")],
    ref: Reference,
    reason: Annotated[str, typer.Option(help="why, for its history")] = "",
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Point a tag of the version's run at it; `run/kind@tag` then means this version."""
    from ..by_hand import tell_moved

    opened = open_store(store)
    target: Ref = opened.resolve(ref)
    before = opened.tagged(target.run, name)
    opened.tag(target.run, name, target, why=reason)
    if before != str(target):
        tell_moved(f"{target.run}/{target.kind}@{name}", opened.history(target.run, name)[-1])
    say(json, {"tag": name, "ref": str(target)}, [f"{target.run}/{target.kind}@{name} is {target}"])


def report(
    run: Annotated[str, typer.Argument(help="the run")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="the file; default: report.html in the run's folder"),
    ] = None,
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """One self-contained HTML file over a whole run: how well it went, curves, answers before and
    after, what it was made of."""
    from quiver.stages.report.stage import write

    path = write(open_store(store), check_name(run, "run"), output)
    say(json, {"run": run, "file": str(path), "bytes": path.stat().st_size}, [str(path)])


def history(
    name: Annotated[str, typer.Argument(help="the tag, as RUN/KIND@TAG", metavar="RUN/KIND@TAG")],
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """What a tag pointed at, when and why; what it was refused, too."""
    from .inspect_store import history as of_tag

    entries = of_tag(open_store(store), name)
    lines = [
        f"{entry['at'][:19]}  {entry['before'] or 'none'} → {entry['ref']}  "
        f"{printable(entry['why'])}"
        for entry in entries
    ]
    say(json, {"tag": name, "entries": entries}, lines)
