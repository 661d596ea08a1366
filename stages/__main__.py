"""One stage, one process: python -m quiver.stages STAGE FOLDER

If FOLDER has a `call.json` at the start, that names the stage and config of a call that will come,
and the process imports the modules that they need. Then it waits for a line on stdin, which means
that the call itself is written there. The answer is one JSON object in `answer.json`, because
libraries print to stdout. It is {"ref", "cached", "rows", "seconds", "metrics"}, or {"error":
{"code", "object", "message", "next"}}, with the version of Quiver.

A call with "resident" lets the process wait for another call in the same way, if its stage kept an
engine for it, or if STAGE is "any". The answer has "resident" too: true if the process waits
(`stage_process`).

If the call asks for several ranks, this process starts them (`ranks`), each by the same command
with `--rank`, and their answer is its answer.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from quiver.schemas.errors import QuiverError, unexpected
from quiver.stages.core import ranks
from quiver.stages.core.config import parse
from quiver.stages.core.processes import keeper
from quiver.stages.core.run.call import Call, quiver_version
from quiver.stages.core.run.runner import find_or_make
from quiver.stages.core.run.stage import load_stage
from quiver.stages.core.run.stage_process import ANSWER_NAME, ANY_STAGE, CALL_NAME, this_process

log = logging.getLogger(__name__)


def main() -> int:
    """Answer the calls; return the exit code, which is that of the last answer."""
    stage, folder, *rank = sys.argv[1:]
    call_path, answer_path = Path(folder, CALL_NAME), Path(folder, ANSWER_NAME)
    set_up()
    if rank:
        keeper.die_with_parent()
        if os.environ["RANK"] != "0":  # rank 0's output is enough
            logging.getLogger("quiver.stages").setLevel(logging.ERROR)
        answer_path = ranks.answer_of(answer_path, os.environ["RANK"])
    else:
        with suppress(Exception):  # the call, if one comes, will meet and report it itself
            import_for(json.loads(call_path.read_text()))
    code, is_resident = 0, False
    try:
        # a rank has its one call; otherwise EOF means that no further call comes
        while rank or sys.stdin.readline():
            is_resident = False
            call = json.loads(call_path.read_text())
            count = 1 if rank else ranks.needed(call["stage"], call["config"])
            if count > 1:
                command = [sys.executable, "-u", "-P", "-m", "quiver.stages", stage, folder]
                return ranks.launch([*command, "--rank"], answer_path, count)
            this_process.may_be_resident = call.pop("resident", False) and not rank
            try:
                answer = asdict(find_or_make(Call.from_json(call)))
                code = 0
            except Exception as error:
                answer, code = answer_to(error, call["stage"])
            keeps = stage == ANY_STAGE or this_process.resident_engine is not None
            is_resident = this_process.may_be_resident and not code and keeps
            answer |= {"resident": is_resident, "quiver": quiver_version()}
            temporary = answer_path.with_suffix(".tmp")
            temporary.write_text(json.dumps(answer))
            # a rename, so that the caller never reads half an answer
            temporary.replace(answer_path)
            if not is_resident:
                break
            # wakes the caller, which reads the output while it waits for the answer
            print(flush=True)
    except SystemExit as ended:
        if not is_resident:
            raise
        code = ended.code  # it waits, and is asked to end: at once
    finally:
        if this_process.resident_engine is not None:
            with suppress(Exception):  # all that it started ends with this process
                this_process.resident_engine.close()
    return code


def set_up() -> None:
    """Set how this process collects garbage, ends by SIGTERM, and logs."""
    # with Python's default, collecting the objects of imports takes a third of their time
    gc.set_threshold(100_000, 50, 100)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("quiver.stages").setLevel(logging.INFO)


def import_for(call: dict) -> None:
    """Import what the call's stage needs for its config."""
    stage = load_stage(call["stage"])
    if ranks.needed(call["stage"], call["config"]) > 1:
        ranks.import_ahead()
    elif hasattr(stage, "import_ahead"):
        stage.import_ahead(parse(stage.Config, call["config"], f"stage {call['stage']}"))


def answer_to(error: Exception, stage: str) -> tuple[dict, int]:
    """Return the answer to a call of `stage` that raised `error`, and the exit code."""
    is_expected = isinstance(error, QuiverError)
    reported = error
    if not is_expected:
        reported = ranks.as_lost(unexpected(f"stage {stage}", error))
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
