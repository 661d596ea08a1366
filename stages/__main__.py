"""One stage, one process: python -m quiver.stages [NAME] --call call.json --answer answer.json

If the call asks for several ranks, this process starts them (`ranks`), each by the same command
with `--rank`, and their answer is its answer.

Given a config beforehand, the process imports the modules that the stage needs. Then it waits for a
line on stdin, which means that the call is written. The answer is one JSON object in a file,
because libraries print to stdout. It holds the fields of `Outcome`, or
{"error": {"code", "object", "message", "next"}}, with the version of Quiver.

A call with "stay" lets the process wait for another call in the same way, if its stage kept
something for it (`staying`), or if the process was started without NAME and so answers calls for
any stage. The answer then has "stays".
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from quiver.schemas.errors import QuiverError, unexpected
from quiver.stages import MODULES
from quiver.stages.common import ranks
from quiver.stages.common.config import parse
from quiver.stages.common.runtime import keeper, staying
from quiver.stages.common.runtime.call import Call, quiver_version
from quiver.stages.common.runtime.prewarm import HINT_NAME
from quiver.stages.common.runtime.runner import perform
from quiver.stages.common.runtime.stage import load

log = logging.getLogger(__name__)


def main() -> int:
    """Answer the calls; return the exit code of the last one, which is its error's."""
    parser = argparse.ArgumentParser(
        prog="python -m quiver.stages", description=__doc__.splitlines()[0]
    )
    parser.add_argument("stage", nargs="?", choices=sorted(MODULES), help="default: as calls say")
    parser.add_argument("--call", type=Path, required=True)
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--rank", action="store_true", help="one of several, as RANK says")
    arguments = parser.parse_args()
    lines, answer_path = begin(arguments)
    code = 0
    try:
        for _ in lines:
            fields = json.loads(arguments.call.read_text())
            count = ranks.needed(fields["stage"], fields["config"])
            if count > 1:
                command = [sys.executable, "-u", "-P", "-m", "quiver.stages", *sys.argv[1:]]
                return ranks.launch([*command, "--rank"], arguments.answer, count)
            staying.ask(fields.pop("stay", False))
            try:
                answer, code = asdict(perform(Call.from_json(fields))), 0
            except Exception as error:
                answer, code = refuse(f"stage {fields['stage']}", error)
            if code or not staying.is_asked():
                staying.close()
            if staying.keeps():
                answer["stays"] = True
            temporary = answer_path.with_suffix(".tmp")
            temporary.write_text(json.dumps({**answer, "quiver": quiver_version()}))
            # a rename, so that the caller never reads half an answer
            temporary.replace(answer_path)
            if not staying.keeps():
                break
            # wakes the caller, which reads the output while it waits for the answer
            print(flush=True)
    except SystemExit as leaving:
        if not staying.keeps():
            raise
        code = leaving.code  # asleep, and asked to end: at once
    finally:
        staying.close()
    return code


def begin(arguments: argparse.Namespace) -> tuple[Iterator[str], Path]:
    """Set this process up, and import what its stage needs.

    Returns:
        A line for each call, once the call is written, and the file for the answers.
    """
    # with Python's default, collecting the objects of imports takes a third of their time
    gc.set_threshold(100_000, 50, 100)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("quiver.stages").setLevel(logging.INFO)
    if arguments.rank:
        keeper.die_with_parent()
        if os.environ["RANK"] != "0":  # rank 0's output is enough
            logging.getLogger("quiver.stages").setLevel(logging.ERROR)
        path = ranks.answer_of(arguments.answer, os.environ["RANK"])
        return iter(["the call is written already"]), path
    if arguments.stage:
        import_beforehand(arguments.stage, arguments.call.with_name(HINT_NAME))
    else:
        staying.serve_all()
    # ends at EOF: the process is not needed any more
    return iter(sys.stdin.readline, ""), arguments.answer


def import_beforehand(name: str, hint: Path) -> None:
    """Import what the stage needs for the config in the file `hint`, if it exists."""
    stage = load(name)
    if not hint.exists() or not hasattr(stage, "import_ahead"):
        return
    try:
        config = json.loads(hint.read_text())
        if ranks.needed(name, config) > 1:
            ranks.import_ahead()
        else:
            stage.import_ahead(parse(stage.Config, config, f"stage {name}"))
    except Exception as error:  # the call, if one comes, will meet and report it itself
        log.debug("%s could not import ahead: %s", name, error)


def refuse(object: str, error: Exception) -> tuple[dict, int]:
    """Return the answer of a call that failed, and the exit code."""
    reported = error
    if not isinstance(error, QuiverError):
        reported = ranks.as_lost(unexpected(object, error))
    if os.environ.get("QUIVER_DEBUG") or reported.code == "E-INTERNAL":
        traceback.print_exc()
    return {"error": reported.to_dict()}, reported.exit_code


def leave(code: int) -> None:
    """End the process at once.

    All output is written, and freeing a model and a million objects would take seconds.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
