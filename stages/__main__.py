"""One stage, one process: python -m quiver.stages [NAME] --call call.json --answer answer.json

If the call asks for several ranks, this process starts them (`ranks`), each by the same command
with `--rank`, and their answer is its answer.

Given a config beforehand, the process imports the modules that the stage needs. Then it waits for a
line on stdin, which means that the call is written. The answer is one JSON object in a file,
because libraries print to stdout. It is {"ref", "cached", "rows", "seconds", "metrics"}, or
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
from dataclasses import asdict
from pathlib import Path

from quiver.schemas.errors import QuiverError, unexpected
from quiver.stages.common import ranks
from quiver.stages.common.config import parse
from quiver.stages.common.runtime import keeper, staying
from quiver.stages.common.runtime.prewarm import HINT_NAME
from quiver.stages.common.runtime.runner import Call, perform, quiver_version
from quiver.stages.common.runtime.stage import MODULES, load

log = logging.getLogger(__name__)


def main() -> int:
    """Run the stage; return its exit code, which is the error's."""
    parser = argparse.ArgumentParser(
        prog="python -m quiver.stages", description=__doc__.splitlines()[0]
    )
    parser.add_argument("stage", nargs="?", choices=sorted(MODULES), help="default: as calls say")
    parser.add_argument("--call", type=Path, required=True)
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--rank", action="store_true", help="one of several, as RANK says")
    arguments = parser.parse_args()
    # with Python's default, collecting the objects of imports takes a third of their time
    gc.set_threshold(100_000, 50, 100)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("quiver.stages").setLevel(logging.INFO)
    if arguments.rank:
        keeper.die_with_parent()
        answer_path = ranks.answer_of(arguments.answer, os.environ["RANK"])
        if os.environ["RANK"] != "0":  # rank 0's output is enough
            logging.getLogger("quiver.stages").setLevel(logging.ERROR)
        return serve(json.loads(arguments.call.read_text()), answer_path)
    if arguments.stage:
        import_beforehand(arguments.stage, arguments.call.with_name(HINT_NAME))
    else:
        staying.serve_all()
    code = 0
    try:
        # ends at EOF: the process is not needed any more
        while sys.stdin.readline():
            call = json.loads(arguments.call.read_text())
            count = ranks.needed(call["stage"], call["config"])
            if count > 1:
                command = [sys.executable, "-u", "-P", "-m", "quiver.stages", *sys.argv[1:]]
                return ranks.launch([*command, "--rank"], arguments.answer, count)
            code = serve(call, arguments.answer)
            if not staying.keeps():
                break
            # wakes the caller, which reads the output while it waits for the answer
            print(flush=True)
    except SystemExit as told:
        if not staying.keeps():
            raise
        code = told.code  # asleep, and asked to end: at once
    finally:
        staying.close()
    return code


def serve(call: dict, answer_path: Path) -> int:
    """Answer the call, write the answer to `answer_path`, and return the exit code."""
    staying.ask(call.pop("stay", False))
    answer, code = answer_call(call)
    if code or not staying.is_asked():
        staying.close()
    if staying.keeps():
        answer["stays"] = True
    temporary = answer_path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**answer, "quiver": quiver_version()}))
    # a rename, so that the caller never reads half an answer
    temporary.replace(answer_path)
    return code


def import_beforehand(name: str, hint: Path) -> None:
    """Import what the stage needs for the config in the file `hint`, if it exists."""
    stage = load(name)
    if not hint.exists() or not hasattr(stage, "prepare"):
        return
    try:
        config = json.loads(hint.read_text())
        if ranks.needed(name, config) > 1:
            ranks.prepare()
        else:
            stage.prepare(parse(stage.Config, config, f"stage {name}"))
    except Exception as error:  # the call, if one comes, will meet and report it itself
        log.debug("%s could not prepare: %s", name, error)


def answer_call(fields: dict) -> tuple[dict, int]:
    """Answer a call in plain JSON. Returns the answer and the exit code."""
    try:
        return asdict(perform(Call.from_json(fields))), 0
    except Exception as error:
        is_expected = isinstance(error, QuiverError)
        reported = error
        if not is_expected:
            reported = ranks.as_lost(unexpected(f"stage {fields['stage']}", error))
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
