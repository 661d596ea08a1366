"""Commands about the versions of a store: list, show, compare, verify, delete, tag and report."""

from __future__ import annotations

import getpass
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quiver.schemas.errors import ConfigError, CorruptError, LineageError, QuiverError, printable
from quiver.schemas.refs import Ref, check_name, parse

from . import completion
from .next_step import complete, options_in
from .shared import (
    CALLED,
    ReadReference,
    Reference,
    StorePath,
    answers_in_json,
    open_store,
    or_latest,
    say,
)

if TYPE_CHECKING:
    from quiver.stages.core.store import Store
    from quiver.stages.core.store.listing import Summary

Compared = "RUN/evaluations@N, or RUN/policy@N or RUN: by its newest evaluation"


def ls(
    run: Annotated[
        str | None, typer.Argument(help="only this run", autocompletion=completion.runs)
    ] = None,
    store: StorePath = None,
    size: Annotated[
        bool, typer.Option("--size", help="bytes of each run and of the store")
    ] = False,
    columns: Annotated[
        str, typer.Option(help="keys of the configs as columns: learning_rate,algorithm")
    ] = "",
    differing: Annotated[
        bool, typer.Option("--differing", help="a column for each config key that differs")
    ] = False,
) -> None:
    """List the versions: score or reward, tags, size, rows, time. Notes and keys of configs too.

    Unreadable versions are listed too, and the exit code is that of their error. A manifest that
    was read before is not read again; `verify` reads all.
    """
    from quiver.stages.core.store.readable import readable_entries

    chosen = {"--size": size, "--columns": bool(columns), "--differing": differing}
    given = [name for name, is_given in chosen.items() if is_given]
    if len(given) > 1:
        raise ConfigError(" ".join(given), "only one of these can be given", next="leave one out")
    opened = open_store(store)
    if size:
        _say_sizes(opened, run)
        return
    entries, unreadable = readable_entries(opened, run)
    if not (entries or unreadable):
        _require_run(opened, run)
    rows = [
        {"ref": str(ref), "error": entry.error}
        if entry.error
        else {"ref": str(ref), "rows": entry.rows, "stage": entry.stage, "created": entry.created}
        | ({"note": entry.note} if entry.note else {})
        for ref, entry in entries
    ]
    whole = [(ref, entry) for ref, entry in entries if not entry.error]
    names: list[str] = []
    values: list[dict[str, Any]] = []
    if columns or differing:
        from quiver.flows.look import columns as config_columns

        configs = config_columns.configs_of(opened, (ref for ref, _ in whole))
        if columns:
            names = [name.strip() for name in columns.split(",")]
        else:
            names = config_columns.differing(configs)
        values = config_columns.picked(configs, names)
        by_ref = {str(ref): picked for (ref, _), picked in zip(whole, values, strict=True)}
        rows = [row | {"columns": by_ref.get(row["ref"], {})} for row in rows]
    rows += [
        {"ref": error.object, "error": f"{error.code}: {error.message}"} for error in unreadable
    ]
    lines = []
    if entries and not answers_in_json():
        from quiver.flows.look.describe import HEADER, listed
        from quiver.flows.look.words import aligned, cell, with_short_hashes

        has_notes = any(entry.note for _, entry in whole)
        table = [(*HEADER[:-1], *names, HEADER.note if has_notes else "")]
        for described, row in zip(listed(opened, whole), values or [{}] * len(whole), strict=True):
            added = [with_short_hashes(cell(row.get(name, ""))) for name in names]
            table.append((*described[:-1], *added, described.note))
        # sizes and row counts are right-aligned
        lines = aligned(table, right=(3, 4))
    _say_readable({"versions": rows}, lines, entries, unreadable)


def _require_run(store: Store, run: str | None) -> None:
    """Raise LineageError if there is no such run."""
    if run and not store.storage.list(run):
        from quiver.flows.look.words import no_run

        raise no_run(run, store.runs())


def _say_readable(
    answer: dict[str, Any],
    lines: list[str],
    entries: list[tuple[Ref, Summary]],
    unreadable: list[QuiverError],
) -> None:
    """Print the answer, and what is torn or could not be read; exit with the code of its error."""
    torn = [entry.error for _, entry in entries if entry.error]
    other = [f"{error.code} {error.object}: {error.message}" for error in unreadable]
    say(answer, [*lines, *torn, *other])
    if torn:
        raise SystemExit(CorruptError.exit_code)
    if unreadable:
        raise SystemExit(unreadable[0].exit_code)


def _say_sizes(store: Store, run: str | None) -> None:
    """Print the bytes of each run: by its manifests, and on disk, also of unfinished work and
    expired data."""
    from quiver.flows.look import words
    from quiver.stages.core.store.readable import readable_entries

    def size_below(prefix: str) -> int:
        return sum(size for size, _ in store.storage.files(prefix).values())

    rows = []
    all_entries = []
    unreadable = []
    for name in [run] if run else store.runs():
        entries, errors = readable_entries(store, name)
        all_entries += entries
        unreadable += errors
        num_bytes = sum(entry.bytes for _, entry in entries)
        on_disk = size_below(name)
        rows.append({"run": name, "versions": len(entries), "bytes": num_bytes, "on_disk": on_disk})
    if not (all_entries or unreadable):
        _require_run(store, run)
    on_disk = size_below("")
    num_bytes = sum(row["bytes"] for row in rows)
    table = [("run", "versions", "size", "on disk")]
    table += [
        (row["run"], f"{row['versions']:,}", words.size(row["bytes"]), words.size(row["on_disk"]))
        for row in rows
    ]
    table.append(("the whole store", "", "" if run else words.size(num_bytes), words.size(on_disk)))
    answer = {"runs": rows, "store": on_disk}
    _say_readable(answer, words.aligned(table, right=(1, 2, 3)), all_entries, unreadable)


def show(
    ref: ReadReference,
    n: Annotated[
        int | None, typer.Option("-n", help="how many rows; default: 10, in JSON 3", min=0)
    ] = None,
    store: StorePath = None,
    manifest: Annotated[
        bool,
        typer.Option("--manifest", help="the manifest alone, as JSON; also of data that are gone"),
    ] = False,
) -> None:
    """Show a version, its numbers, and its first rows in words."""
    from quiver.stages.core.store.readable import open_kept

    opened = open_store(store)
    version, gone = open_kept(opened, ref) if manifest else (opened.open(ref), {})
    fields = version.manifest.model_dump(mode="json", by_alias=True)
    if manifest:
        answer = {"ref": str(version.ref), "manifest": fields, "rows": [], **gone}
        say(answer, [json.dumps(fields | gone, indent=2, ensure_ascii=False)])
    elif answers_in_json():
        from quiver.flows.look.episodes import numbers_of

        num_rows = 3 if n is None else n
        first_rows = []
        if num_rows and version.ref.kind != "policy":
            first_rows = version.table().slice(0, num_rows).to_pylist()
        answer = {"ref": str(version.ref), "manifest": fields, "rows": first_rows}
        numbers = numbers_of(version)
        say(answer | ({} if numbers is None else {"episodes": numbers}), [])
    else:
        from quiver.flows.look.describe import describe

        say({}, describe(opened, version, 10 if n is None else n))


_MARKS = {
    "seen": "above",
    "expired": "expired",
    "removed": "removed",
    "missing": "missing",
    "replaced": "replaced: it has other content now",
    "error": "torn",
    "more": "more below",
}
"""Words for the marks of a node of a lineage."""
_MOST_ASKED = 10
"""Rollouts versions that `--row` shows, unless with `--depth all`."""
_MOST_USERS = 5
"""Versions made of a deleted one that are named."""


def lineage(
    ref: Annotated[
        str | None,
        typer.Argument(
            help="run/kind@version; run/kind is its latest",
            metavar="[REF]",
            autocompletion=completion.references,
        ),
    ] = None,
    down: Annotated[bool, typer.Option("--down", help="what was made from it instead")] = False,
    row: Annotated[
        str | None, typer.Option(help="where this rollout or group was asked and trained on")
    ] = None,
    depth: Annotated[
        str, typer.Option(help="levels to show; `all` also shows each of a long line of policies")
    ] = "3",
    store: StorePath = None,
) -> None:
    """Show what a version was made from. With --down, what was made from it."""
    from quiver.flows.look import lineage as trace

    if (ref is None) == (row is None) or (down and row):
        problem = "expected one of REF, REF --down and --row ID"
        raise ConfigError("lineage", problem, next="name one of these")
    if not (depth == "all" or depth.isdecimal()):
        problem = f"expected a number or all, got {printable(depth)}"
        raise ConfigError("--depth", problem, next="leave it out for 3")
    opened = open_store(store)
    most = None if depth == "all" else int(depth)
    if row is not None:
        answer = trace.trace_row(opened, row, None if most is None else _MOST_ASKED)
        say(answer, _row_lines(answer))
        return
    root = (trace.descent if down else trace.lineage)(opened, or_latest(ref), most)
    lines = []
    torn = []
    waiting = [(root, "")]
    while waiting:
        node, indent = waiting.pop()
        role = f"{printable(node['role'])}: " if "role" in node else ""
        text = printable(node["ref"])
        if "to" in node:
            text += f" … {printable(node['to'])} × {node['count']:,} {node['folded']}"
        mark = "".join(f" ({words})" for name, words in _MARKS.items() if name in node)
        lines.append(f"{indent}{role}{text}{mark}")
        torn += [node["error"]] if "error" in node else []
        children = node.get("outputs", node.get("inputs", []))
        waiting += [(child, f"{indent}  ") for child in reversed(children)]
    say(root, [*lines, *torn])
    if torn:
        raise SystemExit(CorruptError.exit_code)


def _row_lines(answer: dict[str, Any]) -> list[str]:
    """Return lines about where a row went, from `trace_row`."""
    lines = []
    rows: dict[int | None, list[dict[str, Any]]] = {}  # an id may stand for several
    for asked in answer["asked"]:
        rows.setdefault(asked.get("row_of"), []).append(asked)
    for number, asked_in in rows.items():
        if number is not None:
            lines.append(f"prompt          {printable(asked_in[0]['prompt'], 80)}")
        for asked in asked_in:
            prompts = f" of {printable(asked['prompts'])}" if asked["prompts"] else ""
            lines.append(f"asked in        {printable(asked['rollouts'])}{prompts}")
            for use in asked["policies"]:
                counts = {"kept": use["kept"], **(use["dropped"] or {})}
                words = ", ".join(f"{count} {printable(name)}" for name, count in counts.items())
                words = words if use["dropped"] is not None else "its advantages are gone"
                lines.append(f"trained on by   {printable(use['policy'])} ({words})")
        line = asked_in[0].get("line", answer["line"])
        lines += [f"in the line of  {printable(policy)}" for policy in line]
    num_more = answer["num_asked"] - len(answer["asked"])
    if num_more:
        lines.append(f"{num_more:,} earlier rollouts versions of its prompts: --depth all")
    return lines


def cost(
    run: Annotated[str, typer.Argument(help="the run", autocompletion=completion.runs)],
    by: Annotated[
        Literal["stage", "iteration", "day"], typer.Option(help="what a row adds up")
    ] = "stage",
    store: StorePath = None,
) -> None:
    """Show what a run cost. Seconds by phase, processor and device seconds, memory, tokens."""
    from quiver.flows.look import cost as costs

    answer = costs.cost(open_store(store), check_name(run, "run"), by)
    say(answer, costs.cost_lines(answer))


def diff(
    first: ReadReference,
    second: ReadReference,
    store: StorePath = None,
) -> None:
    """Show the differences of two versions: config, metrics, rows."""
    from quiver.flows.look.templates import lines

    from .compare import diff as find_changes

    changes = find_changes(open_store(store), first, second)
    say(changes, lines("differences", changes))


def compare(
    first: Annotated[
        str,
        typer.Argument(metavar="A", help=Compared, autocompletion=completion.runs_and_references),
    ],
    second: Annotated[
        str,
        typer.Argument(metavar="B", help=Compared, autocompletion=completion.runs_and_references),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[C]...",
            help="more to compare with A; Holm's correction is for all of them",
            autocompletion=completion.runs_and_references,
        ),
    ] = None,
    store: StorePath = None,
) -> None:
    """Show how much better B scores than A, prompt by prompt. Also C, D and so on. A policy's
    evaluation is chosen for the same prompts, score and reward before the newest."""
    from quiver.flows.look.comparisons import comparison_lines
    from quiver.flows.look.paired import find_evaluations
    from quiver.flows.look.templates import lines
    from quiver.stages.evaluate import comparison

    opened = open_store(store)
    pairs = [find_evaluations(opened, first, other) for other in (second, *(more or []))]
    pairs = list({(a.ref, b.ref): (a, b) for a, b in pairs}.values())
    if more:
        answer = comparison.compare_each(opened, pairs)
        say(answer, comparison_lines(answer))
    else:
        answer = comparison.compare(opened, *pairs[0])
        say(answer, lines("comparison", answer))


def verify(
    context: typer.Context,
    ref: Annotated[
        str | None,
        typer.Argument(
            help="only this version", metavar="[REF]", autocompletion=completion.references
        ),
    ] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="put REF aside if it is damaged")
    ] = False,
    store: StorePath = None,
) -> None:
    """Check every byte. Covers sizes, hashes, schemas and missing inputs. With --quarantine, put a
    damaged version aside."""
    from quiver.flows.verification import verify as verify_store
    from quiver.stages.core.store import retention

    opened = open_store(store)
    if quarantine:
        if ref is None:
            raise ConfigError(
                "--quarantine",
                "needs the reference of the version to put aside",
                next="quiver verify",
            )
        if not any(isinstance(error, CorruptError) for error in verify_store(opened, ref)[1]):
            raise ConfigError(ref, "is whole", next=f"quiver rm {ref}")
        # before the mark: an error here leaves the version as it is
        tags, users = retention.users_of(opened, opened.resolve(ref))
        put_aside = retention.put_aside(opened, ref)
        folder = f"{opened.url}/{opened.version(put_aside).prefix}"
        lines = [
            f"{put_aside} is put aside; its files stay in {folder}",
            "the command that made it makes it again, under another number",
            *(f"tag {name} points at it: give the tag to another version" for name in tags),
            *_users_lines(users),
        ]
        answer = {"quarantined": str(put_aside), "folder": str(folder)}
        say(answer | {"tags": tags, "users": users}, lines)
        return
    checked, bad = verify_store(opened, ref)
    for error in bad:
        error.next = complete(error.next, CALLED, options_in(context.parent.command.commands))
    lines = [*(str(error) for error in bad), f"{checked} checked, {len(bad)} bad"]
    say({"checked": checked, "bad": [error.to_dict() for error in bad]}, lines)
    if bad:
        # what is torn comes before what depends on it
        raise SystemExit(min(error.exit_code for error in bad))


def _users_lines(users: list[str]) -> list[str]:
    """Return lines about the versions made of one that is deleted: the first few, and of many the
    number of each kind."""
    lines = [f"{user} was made of it" for user in users[:_MOST_USERS]]
    num_more = len(users) - len(lines)
    if num_more > 0:
        counts = Counter(parse(user).kind for user in users)
        words = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
        lines.append(f"and {num_more:,} more; in all {words} (--json names each)")
    return lines


def rm(
    ref: Reference,
    reason: Annotated[str, typer.Option(help="why, for its mark")] = "",
    store: StorePath = None,
) -> None:
    """Delete the data of a version. Its number and its manifest stay, and versions made from it are
    kept."""
    from quiver.stages.core.store.retention import remove

    removed, users = remove(open_store(store), ref, reason)
    lines = [f"{removed} is deleted", *_users_lines(users)]
    say({"removed": str(removed), "users": users}, lines)


def tag(
    name: Annotated[str, typer.Argument(help="the tag")],
    ref: Reference,
    reason: Annotated[str, typer.Option(help="reason, kept in its history")] = "",
    store: StorePath = None,
) -> None:
    """Give a version a tag; `run/kind@tag` then refers to it."""
    from quiver.flows.prefect_server import tell_moved

    opened = open_store(store)
    target: Ref = opened.resolve(ref)
    before = None
    with suppress(CorruptError):  # An entry cannot be read; the new one settles it.
        before = opened.tagged(target.run, name)
    author = ""
    with suppress(OSError, KeyError):  # In some containers the account has no name.
        author = getpass.getuser()
    opened.tag(target.run, name, target, why=reason, about={"author": author})
    if before != str(target):
        with suppress(CorruptError):  # An earlier entry cannot be read.
            tell_moved(f"{target.run}/{target.kind}@{name}", opened.history(target.run, name)[-1])
    say({"tag": name, "ref": str(target)}, [f"{target.run}/{target.kind}@{name} is {target}"])


def report(
    run: Annotated[
        str,
        typer.Argument(
            help="the run; RUN/policy@N: the line of its policies that ends there",
            autocompletion=completion.runs_and_references,
        ),
    ],
    beside: Annotated[
        str | None,
        typer.Argument(
            help="another run to show beside it",
            metavar="[RUN]",
            autocompletion=completion.runs,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="the file; default: report*.html in the run's folder"),
    ] = None,
    store: StorePath = None,
) -> None:
    """Write one HTML file about a whole run. It shows results, curves, answers before and after,
    and lineage."""
    from quiver.flows.look.stage import default_path, write

    opened = open_store(store)
    policy = None
    name = "report"
    if "/" in run:
        ref = opened.resolve(or_latest(run))
        if ref.kind != "policy":
            raise ConfigError(
                str(ref), "a report shows a run or the line of a policy", next="quiver ls"
            )
        policy, run = str(ref), ref.run
        name += f"-{ref.kind}-{ref.version}"
    sentences = []
    if beside is not None:
        sentences = _difference(opened, policy or run, check_name(beside, "run"))
        name += f"-beside-{beside}"
    output = output or default_path(opened.url, check_name(run, "run"), f"{name}.html")
    path = write(opened, run, output, beside, sentences, policy)
    say({"run": run, "file": str(path), "bytes": path.stat().st_size}, [str(path)])


def _difference(store: Store, name: str, other: str) -> list[str]:
    """Return how the last evaluations of the run `other` and of `name`, a run or a policy, compare
    on the same prompts."""
    from quiver.flows.look.paired import find_evaluations
    from quiver.flows.look.templates import lines
    from quiver.stages.evaluate.comparison import compare as compare_evaluations

    try:
        answer = compare_evaluations(store, *find_evaluations(store, name, other))
    except LineageError as error:
        return [f"{other} and {name} cannot be compared: {error.message}."]
    return lines("difference", answer)


def history(
    name: Annotated[
        str,
        typer.Argument(
            help="the tag, as RUN/KIND@TAG",
            metavar="RUN/KIND@TAG",
            autocompletion=completion.tags,
        ),
    ],
    store: StorePath = None,
) -> None:
    """Show a tag's history: versions, times, authors, reasons. For nights it also shows rejected
    policies and their numbers."""
    from quiver.flows.look.nights import nights_of, table_of
    from quiver.flows.look.words import aligned

    opened = open_store(store)
    tag = parse(name)
    entries = opened.history(tag.run, str(tag.version))
    if not entries:
        opened.resolve(tag)  # Its error lists what exists.
    nights = nights_of(entries)
    answer = {
        "tag": name,
        "nights": [night._asdict() for night in nights],
        "entries": [entry.model_dump(mode="json") for entry in entries],
    }
    lines = []
    if entries:
        target = parse(entries[-1].ref)  # may be of another kind than the name says
        in_use = f"{target.run}/{target.kind}@{tag.version} is {target}"
        lines = [*aligned(table_of(nights)), in_use]
    say(answer, lines)
