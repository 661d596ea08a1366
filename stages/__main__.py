"""One stage, one process: python -m quiver.stages NAME --call call.json --answer answer.json

The process imports what the stage needs, if it is told its config beforehand, and waits for a line
on stdin; then the call is there. The answer is one JSON object in a file, because libraries print
on stdout as they like: {"ref", "cached", "rows", "seconds", "metrics"}, or {"error": {"code",
"object", "message", "next"}}, with the version of Quiver.
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
from quiver.stages.common.config import parse
from quiver.stages.common.runtime.prewarm import HINT_NAME
from quiver.stages.common.runtime.runner import Call, perform, quiver_version
from quiver.stages.common.runtime.stage import MODULES, load

log = logging.getLogger(__name__)


def main() -> int:
    """Run the stage; the exit code is the error's."""
    parser = argparse.ArgumentParser(
        prog="python -m quiver.stages", description=__doc__.splitlines()[0]
    )
    parser.add_argument("stage", choices=sorted(MODULES))
    parser.add_argument("--call", type=Path, required=True)
    parser.add_argument("--answer", type=Path, required=True)
    arguments = parser.parse_args()
    # at Python's own setting, walks over what imports made are a third of their time
    gc.set_threshold(100_000, 50, 100)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("quiver.stages").setLevel(logging.INFO)
    import_beforehand(arguments.stage, arguments.call.with_name(HINT_NAME))
    if not sys.stdin.readline():
        return 0  # nobody needs it
    answer, code = answer_call(arguments.stage, json.loads(arguments.call.read_text()))
    temporary = arguments.answer.with_suffix(".tmp")
    temporary.write_text(json.dumps({**answer, "quiver": quiver_version()}))
    temporary.replace(arguments.answer)
    return code


def import_beforehand(name: str, hint: Path) -> None:
    """Import what the stage needs for the config in the file `hint`, where there is one."""
    stage = load(name)
    if not hint.exists() or not hasattr(stage, "prepare"):
        return
    try:
        stage.prepare(parse(stage.Config, json.loads(hint.read_text()), f"stage {name}"))
    except Exception as error:  # the call meets it again, if there is one, and tells it as its own
        log.debug("%s could not prepare: %s", name, error)


def answer_call(name: str, fields: dict) -> tuple[dict, int]:
    """What to answer a call in plain JSON, and the exit code."""
    try:
        return asdict(perform(Call.from_json(fields))), 0
    except Exception as error:
        is_expected = isinstance(error, QuiverError)
        reported = error if is_expected else unexpected(f"stage {name}", error)
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
