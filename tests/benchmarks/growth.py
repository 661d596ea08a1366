"""1, 4 and 16 times as many rollouts through optimize, reward and prompt: seconds a token or row,
and memory, which should be flat.

    python -m tests.benchmarks.growth

`optimize` with SmolLM2-135M is what a user waits for; with a model of two tiny layers our own code
is most of the work, so that anything that grows faster than its input shows there. Seconds are
those of the stage's phases in its manifest, memory is the peak of its process; the inputs are made
before, in another process. `optimize` takes as many more steps, so that a step's own cost does not
thin out. Goal: no more than 10 % dearer. Less is the start of workers, which does not grow.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from .made import RUN, make_prompts, make_rewards, make_rollouts, real_policy, tiny_policy
from .side_by_side import answer, machine, make_parser, median, run_side, table, take_turns

TIMES = (1, 4, 16)
CASES = {
    "optimize, SmolLM2-135M": ("optimize", "real", "steps", 32, "token"),
    "optimize, tiny model": ("optimize", "tiny", "steps", 1_024, "token"),
    "reward, numeric": ("reward", "tiny", "score", 4_096, "row"),
    "prompt": ("prompt", "tiny", "render", 4_096, "row"),
}
"""Stage, model, phase, rollouts (or rows) of the smallest size, and what the seconds are divided
by."""
PROMPT, COMPLETION = 64, 64


def main() -> None:
    """Compare sizes, or be one case of one size."""
    parser = make_parser(__doc__, ("make", "stage"))
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--times", type=int)
    arguments = parser.parse_args()
    if arguments.side:
        {"make": _make, "stage": _stage}[arguments.side](arguments)
        return
    rows = [_case(arguments, case) for case in CASES]
    print(machine(), table(rows), sep="\n\n")


def _case(arguments: argparse.Namespace, case: str) -> dict[str, str]:
    *_, smallest, unit = CASES[case]
    found = []
    for times in TIMES:
        with tempfile.TemporaryDirectory() as folder:
            arguments.work = Path(folder)
            rows = times * (max(smallest // 16, 8) if arguments.quick else smallest)
            size = ["--case", case, "--times", str(times), "--rows", str(rows)]
            run_side("growth", "make", "--work", folder, *size)
            found.append(take_turns("growth", ["stage"], arguments, *size)["stage"])
    seconds, peaks = ([median(each, key) for each in found] for key in ("seconds_each", "peak_gb"))
    return {
        "": case,
        "rows": " / ".join(f"{found[at][0]['rows']:,}" for at in range(len(TIMES))),
        "µs a …": f"{unit}: " + " / ".join(f"{1e6 * each:.3g}" for each in seconds),
        "times": " / ".join(f"{each / seconds[0]:.2f}" for each in seconds),
        "peak GB": " / ".join(f"{each:.2f}" for each in peaks),
    }


def _make(arguments: argparse.Namespace) -> None:
    """What the stage reads."""
    from quiver.stages.core.store import Store

    stage, model, *_ = CASES[arguments.case]
    store = Store(arguments.work / "store")
    policy = (real_policy if model == "real" else tiny_policy)(store)
    if stage == "prompt":
        lines = (
            f'{{"question": "What is {row} plus 5?", "answer": {row + 5}}}\n'
            for row in range(arguments.rows)
        )
        (arguments.work / "rows.jsonl").write_text("".join(lines))
    else:
        asked = make_prompts(store, -(-arguments.rows // 8))
        make_rewards(
            store, make_rollouts(store, policy, arguments.rows, PROMPT, COMPLETION, asked=asked)
        )
    answer()


def _stage(arguments: argparse.Namespace) -> None:
    """The stage in this process, alone."""
    import quiver

    stage, _, phase, _, unit = CASES[arguments.case]
    refs = {"policy": f"{RUN}/policy@0"}
    if stage == "optimize":
        config = {
            "audit": {"enabled": False},
            "save_optimizer": False,
            "minibatches": arguments.times,
        }
        refs |= {"rollouts": f"{RUN}/rollouts@1", "rewards": f"{RUN}/rewards@1"}
    elif stage == "reward":
        config = {"functions": [{"use": "numeric"}]}
        refs = {"rollouts": f"{RUN}/rollouts@1"}
    else:
        config = {"source": str(arguments.work / "rows.jsonl"), "prompt": "question"}
    store = quiver.Store(arguments.work / "store")
    made = quiver.run_stage(stage, config, store, in_process=True, force=True, **refs)
    seconds = store.open(made).manifest.seconds[phase]
    each = arguments.rows * (PROMPT + COMPLETION if unit == "token" else 1)
    answer(seconds_each=seconds / each, rows=arguments.rows)


if __name__ == "__main__":
    main()
