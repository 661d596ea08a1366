"""One stage, one process: python -m quiver.stages [NAME] --call call.json --answer answer.json

Where the call asks for several ranks this process starts them (`ranks`), each by the same command
with `--rank`, and its answer is theirs.

The process imports what the stage needs, if it is told its config beforehand, and waits for a line
on stdin; then the call is there. The answer is one JSON object in a file, because libraries print
on stdout as they like: {"ref", "cached", "rows", "seconds", "metrics"}, or {"error": {"code",
"object", "message", "next"}}, with the version of Quiver.

A call that says "stay" lets the process wait for another call in the same way, where its stage kept
something for that (`staying`), or it was started without NAME: it then does what each call says, of
whatever stage. The answer then says "stays".
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
    """Run the stage; the exit code is the error's."""
    parser = argparse.ArgumentParser(
        prog="python -m quiver.stages", description=__doc__.splitlines()[0]
    )
    parser.add_argument("stage", nargs="?", choices=sorted(MODULES), help="default: as calls say")
    parser.add_argument("--call", type=Path, required=True)
    parser.add_argument("--answer", type=Path, required=True)
    parser.add_argument("--rank", action="store_true", help="one of several, as RANK says")
    arguments = parser.parse_args()
    # at Python's own setting, walks over what imports made are a third of their time
    gc.set_threshold(100_000, 50, 100)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("quiver.stages").setLevel(logging.INFO)
    if arguments.rank:
        keeper.die_with_parent()
        answer_path = ranks.answer_of(arguments.answer, os.environ["RANK"])
        if os.environ["RANK"] != "0":  # what rank 0 says goes for all
            logging.getLogger("quiver.stages").setLevel(logging.ERROR)
        return serve(json.loads(arguments.call.read_text()), answer_path)
    if arguments.stage:
        import_beforehand(arguments.stage, arguments.call.with_name(HINT_NAME))
    else:
        staying.serve_all()
    code = 0
    try:
        while sys.stdin.readline():  # else nobody needs it, or nobody needs it any more
            call = json.loads(arguments.call.read_text())
            count = ranks.needed(call["stage"], call["config"])
            if count > 1:
                command = [sys.executable, "-u", "-P", "-m", "quiver.stages", *sys.argv[1:]]
                return ranks.launch([*command, "--rank"], arguments.answer, count)
            code = serve(call, arguments.answer)
            if not staying.keeps():
                break
            print(flush=True)  # whoever waits for the answer reads what is printed
    except SystemExit as told:
        if not staying.keeps():
            raise
        code = told.code  # asleep, and told to end: at once
    finally:
        staying.close()
    return code


def serve(call: dict, answer_path: Path) -> int:
    """Do what the call says, and write the answer to `answer_path`; the exit code."""
    staying.ask(call.pop("stay", False))
    answer, code = answer_call(call)
    if code or not staying.is_asked():
        staying.close()
    if staying.keeps():
        answer["stays"] = True
    temporary = answer_path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**answer, "quiver": quiver_version()}))
    temporary.replace(answer_path)
    return code


def import_beforehand(name: str, hint: Path) -> None:
    """Import what the stage needs for the config in the file `hint`, where there is one."""
    stage = load(name)
    if not hint.exists() or not hasattr(stage, "prepare"):
        return
    try:
        config = json.loads(hint.read_text())
        if ranks.needed(name, config) > 1:
            ranks.prepare()
        else:
            stage.prepare(parse(stage.Config, config, f"stage {name}"))
    except Exception as error:  # the call meets it again, if there is one, and tells it as its own
        log.debug("%s could not prepare: %s", name, error)


def answer_call(fields: dict) -> tuple[dict, int]:
    """What to answer a call in plain JSON, and the exit code."""
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
    """End the process now. All is written; taking a model and a million objects apart would take
    seconds that somebody waits."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
