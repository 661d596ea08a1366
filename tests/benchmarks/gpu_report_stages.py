"""A recipe's first iteration without Prefect, for gpu_report.py where that is not installed: each
stage in a process of its own. Prints what `quiver run --json` says of it.

    python -m tests.benchmarks.gpu_report_stages RECIPE
"""

from __future__ import annotations

import json
import sys
import time

from quiver.flows.recipe import load
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store


def main() -> None:
    recipe = load(sys.argv[1])
    store = Store(recipe.store)
    seconds = {}

    def made(stage, config, **refs):
        begun = time.monotonic()
        ref = run_stage(stage, config, store, **refs)
        seconds[stage] = time.monotonic() - begun
        return ref

    base = made("policy", recipe.policy, into=recipe.run)
    prompts = made("prompt", recipe.prompt_config(1), policy=base)
    rollouts = made("generate", recipe.generate_config(1), prompts=prompts, policy=base)
    rewards = made("reward", recipe.reward, rollouts=rollouts)
    made("optimize", recipe.optimize_config(), policy=base, rollouts=rollouts, rewards=rewards)
    print(json.dumps({"iterations": [{"seconds": seconds}]}))


if __name__ == "__main__":
    main()
