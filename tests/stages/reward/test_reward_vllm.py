"""Reward models on the real vLLM, in one child process: the values of transformers, raw.

The child reads configs of models from stdin and prints the parts on its last line.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quiver.stages.reward.models.config import ModelConfig
from quiver.stages.reward.models.scorer import ModelScorer
from tests.stages.reward.reward_models import make_model

pytestmark = pytest.mark.vllm
TEXTS = ["7", "", "It is seven.", "x" * 250, "7", "no\n" * 30, "x" * 600]
BATCH = {
    "prompts": [
        [{"role": "user", "content": f"What is {row // 2} + 4?"}] for row in range(len(TEXTS))
    ],
    "completions": TEXTS,
    "rollout_ids": [f"r-{row}" for row in range(len(TEXTS))],
}


def score(config: dict, engine: str) -> list:
    scorer = ModelScorer(ModelConfig(engine=engine, dtype="float32", **config))
    try:
        scorer.require([])
        return scorer.score(BATCH)
    finally:
        scorer.close()


def test_scores_are_those_of_transformers(tmp_path):
    def model(*args, **config) -> str:
        return str(make_model(tmp_path / str(len(os.listdir(tmp_path))), *args, **config))

    judge = {"kind": "token", "token": "Y", "against": "N"}
    tied = model("qwen2", "qwen3", labels=0, tie_word_embeddings=True)
    padded = model("llama3", "llama", pad_token_id=260)
    configs = [
        {"model": model("llama3", "llama")},
        {"model": model("qwen2", "qwen3", labels=3), "label": 2},
        {"model": tied, **judge},
        {"model": padded, "pooling": "last_not_pad"},
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.stages.reward.test_reward_vllm"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for config, found in zip(configs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        expected = score(config, "transformers")
        for (value, error, *_), part in zip(found, expected, strict=True):
            assert error == part.error and value == pytest.approx(part.value, abs=1e-3)
        assert [part.error is None for part in expected] == [len(text) < 512 for text in TEXTS]


def main() -> None:
    """Score in a thread, as the stage does."""
    found: list = []
    configs = json.load(sys.stdin)
    thread = threading.Thread(
        target=lambda: found.extend(score(config, "vllm") for config in configs)
    )
    thread.start()
    thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
