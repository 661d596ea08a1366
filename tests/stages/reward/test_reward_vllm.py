"""Reward models on the real vLLM, in one child process: the values of transformers, raw."""

import json
import os
import subprocess
import sys
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


def test_scores_are_those_of_transformers(tmp_path):
    judge = {"kind": "token", "token": "Y", "against": "N"}
    configs = [
        {"model": str(make_model(tmp_path / "scalar", "llama3", "llama"))},
        {"model": str(make_model(tmp_path / "three", "qwen2", "qwen3", labels=3)), "label": 2},
        {
            "model": str(
                make_model(tmp_path / "judge", "qwen2", "qwen3", labels=0, tie_word_embeddings=True)
            ),
            **judge,
        },
        {
            "model": str(make_model(tmp_path / "pad", "llama3", "llama", pad_token_id=260)),
            "pooling": "last_not_pad",
        },
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.stages.reward.reward_vllm_checks"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=json.dumps([[config, BATCH] for config in configs]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for config, found in zip(configs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        scorer = ModelScorer(ModelConfig(dtype="float32", **config))
        expected = scorer.score(BATCH)
        scorer.close()
        for (value, error, *_), part in zip(found, expected, strict=True):
            assert error == part.error and value == pytest.approx(part.value, abs=1e-3)
        assert [part.error is None for part in expected] == [len(text) < 512 for text in TEXTS]
