"""Run by test_reward_vllm.py in a process of its own: reward models on vLLM, their parts as JSON on
the last line.

python -m tests.stages.reward.reward_vllm_checks < [[model's config, batch], …]
"""

from __future__ import annotations

import json
import sys
import threading

from quiver.stages.reward.models.config import ModelConfig
from quiver.stages.reward.models.scorer import ModelScorer


def score_all(asked: list, found: list) -> None:
    for config, batch in asked:
        scorer = ModelScorer(ModelConfig(engine="vllm", dtype="float32", **config))
        scorer.require([])
        found.append(scorer.score(batch))
        scorer.close()


def main() -> None:
    found: list = []
    thread = threading.Thread(
        target=score_all, args=(json.load(sys.stdin), found)
    )  # as the stage does
    thread.start()
    thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
