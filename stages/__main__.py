"""One stage, one process: python -m quiver.stages NAME --spec spec.json --result out.json

The spec holds stage, config, store, refs, into, force and share. The result is one JSON object in a
file, because libraries print on stdout as they like: {"ref", "cached", "rows", "seconds",
"metrics"}, or {"error": {"code", "object", "message", "next"}}.
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
from quiver.stages import MODULES, load
from quiver.stages.common import early
from quiver.stages.common.child import HINT
from quiver.stages.common.process import Call, perform


def main() -> int:
    """Run the stage; the exit code is the error's."""
    parser = argparse.ArgumentParser(
        prog="python -m quiver.stages", description=__doc__.splitlines()[0]
    )
    parser.add_argument("stage", choices=sorted(MODULES))
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument(
        "--waits",
        action="store_true",
        help="import what the stage needs; read the spec when a line comes in",
    )
    arguments = parser.parse_args()
    gc.set_threshold(
        100_000, 50, 100
    )  # at Python's own, walks over what imports made are a third of their time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("quiver.stages").setLevel(logging.INFO)
    if arguments.waits:
        config_class, _ = load(arguments.stage)
        if not early.wait(
            sys.modules[config_class.__module__], config_class, arguments.spec.with_name(HINT)
        ):
            return 0  # nobody needs it
    call = Call(**json.loads(arguments.spec.read_text()))
    try:
        answer, code = asdict(perform(call)), 0
    except Exception as error:
        known = isinstance(error, QuiverError)
        if os.environ.get("QUIVER_DEBUG") or not known:
            traceback.print_exc()
        told = error if known else unexpected(f"stage {call.stage}", error)
        answer, code = {"error": told.to_dict()}, told.exit_code
    temporary = arguments.result.with_suffix(".tmp")
    temporary.write_text(json.dumps(answer))
    temporary.replace(arguments.result)
    return code


def leave(code: int) -> None:
    """End the process now. All is written; taking a model and a million objects apart would take
    seconds that somebody waits."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        leave(main())
    except early.Anew:
        early.begin_anew()
