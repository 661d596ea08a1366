"""What starting things costs: commands, imports, a run in which all is done already, and every
second of one iteration of the demo.

    python -m tests.benchmarks.startup

The iteration is the demo's second, without evaluation: a run of two iterations in a store that
holds the first. Its seconds are those of the flow, taken apart as it runs, and of the stages: the
phases of their manifests, what they did between the phases, and the start and end of their
processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .side_by_side import (
    ROOT,
    answer,
    machine,
    make_parser,
    prefect_home,
    quiver,
    run_side,
    since_start,
    table,
)

RECIPE = "deployments/recipes/demo.toml"
IMPORTS = ("quiver.schemas.manifest", "quiver.stages.core.store", "quiver.stages.generate.stage", "quiver.flows.cli.main", "quiver.flows.recipe", "quiver.flows.post_train",
           "torch", "transformers", "accelerate", "vllm.entrypoints.llm")  # fmt: skip
SIDES = ("import", "run")
_FIRST = ("--prompts", "demo/prompts@1", "--policy", "demo/policy@0")


def main() -> None:
    """Measure, or be the process that is measured."""
    parser = make_parser(__doc__, SIDES, repeat=3)
    parser.add_argument("--module")
    arguments = parser.parse_args()
    if arguments.side:
        {"import": _import, "run": _run}[arguments.side](arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        iteration = _iteration(arguments)
        commands = _commands(arguments)
    imports = [{"import": name, "seconds": f"{_least(arguments, name):.2f}"} for name in IMPORTS]
    print(machine(), table(commands), table(imports), table(iteration), sep="\n\n")


def _settings(arguments: argparse.Namespace, iterations: int) -> list[str]:
    recipe = arguments.work / "recipe.toml"
    lines = (ROOT / RECIPE).read_text().splitlines(keepends=True)
    recipe.write_text("".join(line for line in lines if not line.startswith("held_out")))
    settings = [f"iterations={iterations}", *(["data.limit=4"] if arguments.quick else [])]
    given = [part for setting in settings for part in ("--set", setting)]
    return [str(recipe), "--store", str(arguments.work / "store"), *given]


def _commands(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """The least of some calls of each command, in a store that holds two iterations."""
    again = _settings(arguments, 2)
    called = {
        "quiver --help": (["--help"], "0.3"),
        "quiver reward, done already": (["reward", *again], "1.0"),
        "quiver generate, done already": (["generate", *again, *_FIRST], "1.0"),
        "quiver run, done already": (["run", *again], ""),
    }
    rows = []
    for name, (command, goal) in called.items():
        seconds = min(quiver(arguments.work, *command)[1] for _ in range(arguments.repeat))
        rows.append({"command": name, "seconds": f"{seconds:.2f}", "goal": goal})
    return rows


# -- one iteration


def _iteration(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Every second of the second iteration."""
    quiver(arguments.work, "run", *_settings(arguments, 1))
    given, started = (
        ["--work", str(arguments.work), *(["--quick"] if arguments.quick else [])],
        time.monotonic(),
    )
    done = run_side("startup", "run", *given, env=prefect_home(arguments.work))
    whole = time.monotonic() - started
    names, ends = list(done["marks"]), [0.0, *done["marks"].values()]
    flow = {f"flow: {name}": ends[at + 1] - ends[at] for at, name in enumerate(names)}
    stages = _stages(arguments.work, done["iteration"])
    flow[f"flow: {names[-1]}"] -= sum(stages.values())
    rows = {**flow, "flow: end": whole - ends[-1], **stages, "all": whole}
    return [
        {"one iteration": name, "seconds": f"{spent:.2f}", "%": f"{100 * spent / whole:.0f}"}
        for name, spent in rows.items()
    ]


def _run(arguments: argparse.Namespace) -> None:
    """`quiver run` for two iterations, step by step; seconds since the process began at the end of
    each."""
    marks = {"interpreter": since_start()}
    from quiver.flows.recipe import load

    recipe, _, store, *settings = _settings(arguments, 2)
    loaded = load(
        Path(recipe),
        [*(each for each in settings if each != "--set"), f"store={json.dumps(store)}"],
    )
    marks["reading the recipe"] = since_start()
    from quiver.flows.cli.embedded import guard_embedded_server
    from quiver.flows.post_train import post_train

    marks["import of Prefect"] = since_start()
    guard_embedded_server()
    marks["start of Prefect's server"] = since_start()
    result = post_train(loaded)
    marks["nine tasks and their artifacts, without the stages below"] = since_start()
    answer(marks=marks, iteration=result["iterations"][-1])


def _stages(work: Path, iteration: dict[str, Any]) -> dict[str, float]:
    """Of each stage its phases, what it did between them, and its process around it."""
    from quiver.stages.core.store import Store

    found = {}
    kinds = {"prompt": "prompts", "generate": "rollouts", "reward": "rewards", "optimize": "policy"}
    for stage, kind in kinds.items():
        seconds = dict(Store(work / "store").open(iteration[kind]).manifest.seconds)
        total = seconds.pop("total")
        found[f"{stage}: process, imports, end"] = iteration["seconds"][stage] - total
        found |= {f"{stage}: {phase}": value for phase, value in seconds.items()}
        found[f"{stage}: between its phases"] = total - sum(seconds.values())
    return found


# -- imports


def _least(arguments: argparse.Namespace, module: str) -> float:
    return min(
        run_side("startup", "import", "--module", module)["seconds"]
        for _ in range(arguments.repeat)
    )


def _import(arguments: argparse.Namespace) -> None:
    """Seconds of a fresh interpreter that imports one module, its own start left out."""
    code = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    done = subprocess.run(
        [sys.executable, "-c", code.format(arguments.module)],
        capture_output=True,
        text=True,
        check=True,
    )
    answer(seconds=float(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
