"""The command line: gathers the commands of this folder and turns their errors into exit codes.

With --json, stdout holds only one JSON object, in its last line; logs go to stderr. Heavy imports
wait until a command needs them.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Annotated

import typer
from typer.main import get_command

from quiver import flows
from quiver.flows.look.words import counted
from quiver.flows.stopping import leave_if_told, refused_thread, watch_signals
from quiver.schemas.errors import (
    UNCHANGED,
    ConfigError,
    QuiverError,
    for_terminal,
    printable,
    unexpected,
)
from quiver.stages.core.ranks import follows_rank_0

from . import (
    cleaning,
    doctor,
    episodes,
    exporting,
    fitting,
    judging,
    listing,
    placing,
    running,
    sweeping,
    versions,
    viewing,
)
from .next_step import command_line, complete, options_in
from .shared import CALLED, keep_stdout, nobody_reads, say, with_options

_UsageError = typer.BadParameter.__base__  # The class of the click that typer brings along.
COMMANDS = (
    running.run, running.check, fitting.fit, running.nightly, *running.STAGES,
    running.estimate, running.bisect, sweeping.sweep, judging.teach, judging.audit,
    episodes.reenact, episodes.branch, episodes.import_, exporting.export, exporting.push,
    placing.serve, placing.deploy, doctor.doctor,
    versions.ls, versions.show, viewing.view, versions.lineage, versions.cost,
    versions.diff, versions.compare, versions.verify, versions.rm, cleaning.gc,
    versions.tag, versions.history, versions.report,
    listing.keys, listing.algorithms, listing.rewards, listing.engines,
)  # fmt: skip
app = typer.Typer(
    help="Post-training of language models as a chain of stages, linked by versioned datasets.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"quiver {version('quiver-rl')}")
        raise typer.Exit


@app.callback()
def _program(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Declare the options that come before a command.

    Raises ConfigError if ranks of a launcher cannot share the command's work.
    """
    if follows_rank_0() and context.invoked_subcommand != "optimize":
        raise ConfigError(
            "command line",
            "only `quiver optimize` shares its work among a launcher's ranks",
            next="start this command once, without RANK in the environment",
        )


for _command in COMMANDS:
    app.command(_command.__name__.rstrip("_"))(with_options(_command))
_store = typer.Typer(help="Take a store elsewhere.", rich_markup_mode=None)
_store.command("copy")(with_options(cleaning.copy))
_store.callback()(lambda: None)  # otherwise typer leaves the word `copy` out
app.add_typer(_store, name="store")


def _say_stopped() -> None:
    """Print what a stopped command leaves behind, and the command that continues from there."""
    if follows_rank_0():
        return
    text = "stopped"
    writes_nothing = sys.argv[1:2] in (["check"], ["fit"]) or "--dry-run" in sys.argv
    if CALLED.recipe is not None and not writes_nothing:
        versions = f"{counted(flows.num_made, 'new version')} and " if flows.num_made else ""
        text += f"; {versions}the finished shards of unfinished versions are kept\n"
        text += f"to continue: {command_line()}"
    with suppress(OSError):
        print(text, file=sys.stderr)


def _run() -> int:
    """Run the command and return its exit code.

    An error is printed to stderr, and to stdout with --json, if these can be written to.
    """
    trace = ""
    try:
        watch_signals()
        odd = [word for word in sys.argv[1:] if word.encode(errors="ignore").decode() != word]
        if odd:
            problem = f"{printable(odd[0])} is not UTF-8"
            raise ConfigError("command line", problem, next="quiver --help")
        code = get_command(app).main(standalone_mode=False) or 0
        if code == 128 + signal.SIGINT:  # Typer's exit code for Ctrl-C inside a command.
            raise KeyboardInterrupt
        return code
    except (typer.Abort, KeyboardInterrupt):
        refusal = refused_thread()
        if refusal is None:
            _say_stopped()
            return 128 + signal.SIGINT
        error = unexpected("quiver", refusal)
    except SystemExit as leaving:
        if leaving.code == 128 + signal.SIGTERM:
            _say_stopped()
        pipe = leaving.__context__
        if leaving.code != 1 or not isinstance(pipe, BrokenPipeError):
            raise
        if nobody_reads():
            return 128 + signal.SIGPIPE
        # The broken pipe is not stdout; typer exits silently for it, too.
        trace = traceback.format_exc()
        error = unexpected("quiver", pipe)
    except _UsageError as usage_error:
        context = usage_error.ctx
        command = [context.info_name] if context and context.parent else []
        message = usage_error.format_message()
        words = ["quiver", *command, "--help"]
        error = ConfigError("command line", message, next=" ".join(words))
    except Exception as caught:
        error = caught if isinstance(caught, QuiverError) else unexpected("quiver", caught)
        if error.code == "E-INTERNAL" or "--debug" in sys.argv:
            trace = traceback.format_exc()
    if error.state == UNCHANGED and flows.num_made:
        count = counted(flows.num_made, "version")
        error.state = f"this command has made {count}, kept for the next run."
    error.next = complete(error.next, CALLED, options_in(get_command(app).commands))
    with suppress(OSError):
        print(trace + for_terminal(error), file=sys.stderr)
    with suppress(OSError):  # The error may be that stdout cannot be written to.
        say({"error": error.to_dict()}, [])
    return error.exit_code


class _ForTerminal(logging.Formatter):
    """Escapes control characters: a log line may hold what a user's code printed."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(super().format(record))


def _settle_streams() -> None:
    """Make each standard stream writable, however this process was started.

    A closed stream is opened on /dev/null, and characters that the encoding lacks are escaped.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            # Otherwise a stream opened as exactly this number would be closed in every child
            # process.
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    for stream in (sys.stdout, sys.stderr):
        # Otherwise the caller of `main` replaced the stream.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command line; an error becomes its exit code, with the next step on stderr."""
    # with Python's default, collecting the objects of imports takes a sixth of their time
    gc.set_threshold(100_000, 50, 100)
    _settle_streams()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if follows_rank_0() and not {"--help", "--version"} & {*sys.argv}:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if "--json" in sys.argv:
        keep_stdout()
    debug = "--debug" in sys.argv
    os.environ["QUIVER_DEBUG"] = "1" if debug else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ForTerminal("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("quiver").setLevel(logging.INFO)
    if follows_rank_0():
        logging.getLogger("quiver").setLevel(logging.ERROR)
    # A stage's process logs these itself.
    logging.getLogger("quiver.stages").setLevel(logging.WARNING)
    # Runs of `serve` are read on Prefect's pages, so they log there as under a worker.
    served = sys.argv[1:2] == ["serve"]
    flows.has_forms = served or sys.argv[1:2] == ["deploy"]
    if not served:
        os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    if not (debug or served):
        # Prefect logs a stage's error with its traceback; we print the error once, at the end.
        os.environ.setdefault("PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL", "CRITICAL")
        os.environ.setdefault("PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL", "CRITICAL")
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # Otherwise Python flushes again at exit, and the exit code is 120.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        leave_if_told()


if __name__ == "__main__":
    main()
