"""An iteration of the demo with and without processes that import ahead of time what their stage
needs (`stages/core/run/stage_process.py`).

    python -m tests.benchmarks.warm_imports

32 prompts × 8 × 12 tokens, by vLLM and by transformers. Counted is the second iteration and later
ones, from the end of one to the end of the next. `without` replaces `hold` by nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from quiver.stages.core.store import Store

from .side_by_side import (
    ROOT,
    answer,
    machine,
    make_parser,
    median,
    prefect_home,
    python_path,
    table,
    take_turns,
)

RECIPE = ROOT / "deployments/recipes/demo.toml"
SIDES = ("with", "without")
ENGINES = ("vllm", "transformers")
ITERATIONS = 3
_COMMAND = (
    "from quiver.flows import dispatch\n{replace}from quiver.flows.cli.main import main\nmain()"
)
_REPLACE = {"with": "", "without": "dispatch.start_ahead = lambda *_: None\n"}


def main() -> None:
    """Compare, or be one side of a comparison."""
    parser = make_parser(__doc__, SIDES, repeat=3)
    parser.add_argument("--engine", choices=ENGINES)
    arguments = parser.parse_args()
    if arguments.side:
        _run(arguments)
        return
    rows = []
    for engine in ENGINES:
        with tempfile.TemporaryDirectory() as folder:
            arguments.work = Path(folder)
            found = take_turns("warm_imports", SIDES, arguments, "--engine", engine)
        seconds = {side: median(found[side], "seconds") for side in SIDES}
        rows.append(
            {
                "engine": engine,
                "with, s an iteration": f"{seconds['with']:.1f}",
                "without": f"{seconds['without']:.1f}",
                "without / with": f"{seconds['without'] / seconds['with']:.2f}",
            }
        )
    print(machine(), table(rows), sep="\n\n")


def _run(arguments: argparse.Namespace) -> None:
    """The demo's recipe without its evaluation, in a store of its own."""
    recipe = arguments.work / "recipe.toml"
    lines = RECIPE.read_text().splitlines(keepends=True)
    recipe.write_text("".join(line for line in lines if not line.startswith("held_out")))
    store = arguments.work / f"store{time.monotonic_ns()}"
    settings = [
        f"iterations={ITERATIONS}",
        f"data.limit={4 if arguments.quick else 32}",
        f"generate.engine={arguments.engine}",
        "generate.options={}",
    ]
    given = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-c", _COMMAND.format(replace=_REPLACE[arguments.side])]
    environment = {**os.environ, "PYTHONPATH": python_path(), **prefect_home(arguments.work)}
    done = subprocess.run(
        [*command, "run", str(recipe), "--store", str(store), "--json", *given],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    iterations = json.loads(done.stdout.strip().splitlines()[-1])["iterations"]
    made = [Store(store).open(each["policy"]).manifest for each in iterations]
    ends = [datetime.fromisoformat(manifest.created).timestamp() for manifest in made]
    answer(seconds=(ends[-1] - ends[0]) / (len(ends) - 1))


if __name__ == "__main__":
    main()
