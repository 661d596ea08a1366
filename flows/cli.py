"""The command line. With --json one JSON object is the last line of stdout and nothing else is there; logs go to stderr.

Every command is thin: it reads the recipe, calls what Python users call, and prints. Heavy imports wait until a command needs them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.main import get_command

from schemas.errors import ConfigError, QuiverError, printable, unexpected
from schemas.refs import Ref

_ANSWER: TextIO | None = None
_UsageError = typer.BadParameter.__base__  # of the click that typer brings along
app = typer.Typer(
    help="Post-training of language models as a chain of stages, linked by versioned datasets.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
RecipeFile = Annotated[Path, typer.Argument(help="the recipe, a TOML file", metavar="RECIPE")]
Reference = Annotated[str, typer.Argument(help="run/kind@version", metavar="REF")]
StorePath = Annotated[str | None, typer.Option("--store", help="folder of the store")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE over the recipe's, e.g. optimize.learning_rate=1e-6")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")]
Debug = Annotated[bool, typer.Option("--debug", help="traceback of an error")]
Force = Annotated[bool, typer.Option("--force", help="do it anew, even where a finished version exists")]
Given = typer.Option(help="run/kind@version; default: the run's latest")
Several = typer.Option(help="run/kind@version; default: the run's latest. For optimize it may stand several times (replay)")


def _recipe(path: Path, settings: list[str] | None, store: str | None):
    from .recipe import load

    return load(path, [*(settings or []), *([f"store={json.dumps(store)}"] if store else [])])


def _store(path: str | None):
    from stages.common.store import Store

    return Store(path or os.environ.get("QUIVER_STORE", "store"), create=False)


def _print(as_json: bool, data: dict[str, Any], lines: list[str]) -> None:
    """The command's answer, on the stdout that this process was started with (see `main`)."""
    text = json.dumps(_plain(data), ensure_ascii=False) if as_json else "\n".join(lines)
    print(text, file=_ANSWER or sys.stdout, flush=True)


def _plain(data: Any) -> Any:
    """`data` as JSON has it: a number that is not finite is null, a date or anything else of the user's columns its text."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data if data is None or isinstance(data, str | int) else str(data)


# -- stages ---------------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    recipe: RecipeFile,
    iterations: Annotated[int | None, typer.Option(help="how many, instead of the recipe's")] = None,
    first: Annotated[str | None, typer.Option("--from", help="do this stage and those after it anew")] = None,
    store: StorePath = None,
    settings: Settings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """All of it: prompt, generate, reward, optimize, again and again, evaluated before and after. Resumes by itself."""
    from .embedded import guard_embedded_server
    from .post_train import STAGES, post_train
    from .summary import summary

    if first and first not in STAGES:
        raise ConfigError(f"--from {printable(first)}", f"expected one of {', '.join(STAGES)}", next="correct --from")
    loaded = _recipe(recipe, [*(settings or []), *([f"iterations={iterations}"] if iterations is not None else [])], store)
    guard_embedded_server()
    result = post_train(loaded, first)
    _print(json, result, summary(loaded, recipe, settings or [], result))


def _stage_command(name: str, roles: tuple[str, ...], help: str) -> None:
    """Add `quiver NAME RECIPE`: this one stage on saved versions; a reference that is not given is the run's latest."""

    def command(
        recipe: RecipeFile,
        prompts: Annotated[str | None, Given] = None,
        rollouts: Annotated[list[str] | None, Several] = None,
        rewards: Annotated[list[str] | None, Several] = None,
        retry: Annotated[str | None, typer.Option(help="reward: score again only the rows that have none in these")] = None,
        policy: Annotated[str | None, Given] = None,
        iteration: Annotated[int, typer.Option(help="whose prompts and seeds are meant")] = 1,
        force: Force = False,
        store: StorePath = None,
        settings: Settings = None,
        json: Json = False,
        debug: Debug = False,
    ) -> None:
        from .rerun import rerun

        given = {"prompts": prompts, "rollouts": rollouts, "rewards": rewards, "retry": retry, "policy": policy}
        outcome = rerun(_recipe(recipe, settings, store), name, roles, given, iteration, force)
        what = "already done" if outcome.cached else f"{outcome.seconds:.1f} s"
        _print(json, asdict(outcome), [f"{outcome.ref}  {outcome.rows} rows  {what}"])

    app.command(name, help=help)(command)


_stage_command("prompt", ("policy",), "Render the source's rows to token ids: a new prompts version.")
_stage_command("generate", ("prompts", "policy"), "Sample completions: a new rollouts version.")
_stage_command("reward", ("rollouts", "retry"), "Score saved rollouts: a new rewards version.")
_stage_command("logprobs", ("rollouts", "policy"), "Score saved completions again, under a reference: a new logprobs version.")
_stage_command("optimize", ("policy", "rollouts", "rewards"), "Update the policy on saved rollouts: the next policy.")
_stage_command("evaluate", ("policy",), "Measure a policy on the held-out rows: a new evaluations version.")


# -- versions -------------------------------------------------------------------------------------------------------------------


@app.command()
def ls(
    run: Annotated[str | None, typer.Argument(help="only this run")] = None,
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the versions."""
    from .inspect_store import listing

    rows = listing(_store(store), run)
    lines = [r.get("error") or f"{r['ref']:<40} {r['rows']:>8}  {r['stage']:<10} {r['created'][:19]}" for r in rows]
    _print(json, {"versions": rows}, lines)


@app.command()
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

    version = _store(store).open(ref)
    manifest, found = version.manifest.model_dump(mode="json", by_alias=True), rows(version, n)
    lines = [codec.dumps(manifest, indent=2, ensure_ascii=False), *(printable(row, 2000) for row in found)]
    _print(json, {"ref": str(version.ref), "manifest": manifest, "rows": found}, lines)


@app.command()
def lineage(ref: Reference, store: StorePath = None, json: Json = False, debug: Debug = False) -> None:
    """What a version was made of, down to the sources."""
    from .inspect_store import lineage as trace

    def tree(node: dict[str, Any], depth: int = 0) -> list[str]:
        mark = " (above)" if node.get("seen") else " (expired)" if node.get("expired") else ""
        own = f"{'  ' * depth}{node.get('role', '')}{': ' if depth else ''}{node['ref']}{mark}"
        return [own, *(line for child in node["inputs"] for line in tree(child, depth + 1))]

    found = trace(_store(store), ref)
    _print(json, found, tree(found))


@app.command()
def diff(first: Reference, second: Reference, store: StorePath = None, json: Json = False, debug: Debug = False) -> None:
    """What differs between two versions of one kind: config, models, metrics, rows."""
    from .inspect_store import diff as compare

    found = compare(_store(store), first, second)
    lines = [f"{path}: {printable(a)} → {printable(b)}" for path, (a, b) in found["changed"].items()]
    _print(json, found, [*lines, *(f"{part}: {found[part]}" for part in ("rows", "rewards") if part in found)])


@app.command()
def verify(
    ref: Annotated[str | None, typer.Argument(help="only this version", metavar="[REF]")] = None,
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check every byte: sizes, hashes, schemas, and that no input is missing."""
    checked, bad = _store(store).verify(ref)
    lines = [*(str(error) for error in bad), f"{checked} checked, {len(bad)} bad"]
    _print(json, {"checked": checked, "bad": [error.to_dict() for error in bad]}, lines)
    if bad:
        raise SystemExit(bad[0].exit_code)


@app.command()
def tag(
    name: Annotated[str, typer.Argument(help="the tag")],
    ref: Reference,
    store: StorePath = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Point a tag of the version's run at it; `run/kind@tag` then means this version."""
    opened = _store(store)
    target: Ref = opened.resolve(ref)
    opened.tag(target.run, name, target)
    _print(json, {"tag": name, "ref": str(target)}, [f"{target.run}/{target.kind}@{name} is {target}"])


# -- what there is --------------------------------------------------------------------------------------------------------------


def _list(word: str, entries: list[dict[str, Any]], details: str, as_json: bool) -> None:
    """`entries`, one a line; below it what stands under the key `details` of one, and its reference."""
    lines = []
    for entry in entries:
        lines.append(f"{entry['name']:<24} {entry['description']}")
        below = [f"{key}: {value}" for key, value in (entry.get(details) or {}).items()]
        below += [entry["reference"]] if entry.get("reference") else []
        lines += [f"{'':<24} {' · '.join(below)}"] if below else []
    _print(as_json, {word: entries}, lines)


@app.command()
def algorithms(json: Json = False, debug: Debug = False) -> None:
    """The algorithms, with defaults and references."""
    from stages.optimize.algorithms import ALGORITHMS

    shown = ("name", "description", "advantage", "surrogate", "aggregation", "defaults", "reference")
    _list("algorithms", [{key: getattr(row, key) for key in shown} for row in ALGORITHMS.values()], "defaults", json)


@app.command()
def rewards(json: Json = False, debug: Debug = False) -> None:
    """What can score: functions that come with Quiver, with their arguments, and the dialects in which servers are asked."""
    from stages.reward.functions import FUNCTIONS
    from stages.reward.servers.dialects import DIALECTS

    shipped = [
        {"name": name, "kind": "function", "description": found.description, "arguments": found.arguments}
        for name, found in FUNCTIONS.items()
    ]
    spoken = [{"name": name, "kind": "server", "description": found.description} for name, found in DIALECTS.items()]
    _list("rewards", [*shipped, *spoken], "arguments", json)


@app.command()
def engines(json: Json = False, debug: Debug = False) -> None:
    """The generation engines, with the defaults of their options."""
    from stages.generate.engine import ENGINES

    shipped = ENGINES.items()
    defaults = {name: entry.options().model_dump(mode="json") for name, entry in shipped}
    _list("engines", [{"name": n, "description": e.description, "options": defaults[n]} for n, e in shipped], "options", json)


# -- errors ---------------------------------------------------------------------------------------------------------------------


def _report(error: QuiverError) -> int:
    if "--json" in sys.argv:
        _print(True, {"error": error.to_dict()}, [])
    print(error, file=sys.stderr)
    return error.exit_code


def _run() -> int:
    try:
        return get_command(app).main(standalone_mode=False) or 0
    except typer.Abort:  # Ctrl-C
        print("stopped; what is finished is kept: the same command goes on from there", file=sys.stderr)
        return 130
    except _UsageError as error:
        told = ConfigError("command line", error.format_message(), next="quiver --help, or quiver COMMAND --help")
    except QuiverError as error:
        told = error
        if "--debug" in sys.argv:
            traceback.print_exc()
    except Exception as error:
        traceback.print_exc()
        told = unexpected("quiver", error)
    return _report(told)


def main() -> None:
    """Entry point: an error becomes its exit code, with what to do next on stderr.

    With --json, whatever else prints on stdout (a library, a user's reward as it is imported) is sent to stderr.
    """
    global _ANSWER  # noqa: PLW0603
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if "--json" in sys.argv:
        _ANSWER = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    debug = "--debug" in sys.argv
    os.environ["QUIVER_DEBUG"] = "1" if debug else ""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("quiver").setLevel(logging.INFO)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    if not debug:  # Prefect logs a stage's error with its traceback; the error itself is printed once, at the end
        os.environ.setdefault("PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL", "CRITICAL")
        os.environ.setdefault("PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL", "CRITICAL")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
