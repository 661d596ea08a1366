"""Reward models through the stage: parts beside those of functions, which model it was, and when
nothing is done again."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError, RewardError
from quiver.stages.core import user_cache
from quiver.stages.core.run.runner import Call, find_or_make, find_outcome
from quiver.stages.reward.models.config import ModelConfig, fingerprint, model_entry
from quiver.stages.reward.models.scorer import ModelScorer
from tests.stages.model import test_hashes
from tests.stages.reward.reward_models import make_model

hashed = test_hashes.hashed
WEIGHTS = "model.safetensors"


@pytest.fixture
def rollouts(sample):
    return sample([["7", "8"], ["It is 7", ""]], {"answer": [7, 7]})


@pytest.fixture
def score_with(score, rollouts):
    def run(folder, **fields):
        model = {"model": str(folder), "name": "rm", "weight": 0.5, "prefill": "", **fields}
        return score(rollouts, "numeric", models=[model])

    return run


def test_a_models_part_is_its_value_and_the_manifest_names_it(score_with, rollouts, tmp_path):
    folder = make_model(tmp_path / "rm", labels=3)
    version = score_with(folder, label=1, extra=True)
    rows = version.table().to_pylist()
    scorer = ModelScorer(ModelConfig(model=str(folder), label=1))
    batch = {
        "prompts": [[{"role": "user", "content": f"ask {row['group_id']}"}] for row in rows],
        "completions": rollouts.table()["completion_text"].to_pylist(),
        "rollout_ids": [row["rollout_id"] for row in rows],
    }
    for row, part in zip(rows, scorer.score(batch), strict=True):
        assert row["parts"]["rm"] == pytest.approx(part.value, abs=1e-5)
        assert row["reward"] == pytest.approx(row["parts"]["numeric"] + 0.5 * part.value, abs=1e-5)
        assert json.loads(row["extra"]["rm"])["LABEL_1"] == pytest.approx(part.value, abs=1e-5)
    scorer.close()
    entry = model_entry(scorer.config)
    assert version.manifest.model("reward:rm").weights == entry.weights
    assert version.manifest.config["models"][0]["fingerprint"] == fingerprint(entry)
    assert version.manifest.metrics["functions"]["rm"]["seconds"] > 0


def test_the_gpus_of_its_models_are_noted(score_with, tmp_path, monkeypatch):
    folder = make_model(tmp_path / "rm")
    on_cpu = score_with(folder).manifest
    assert on_cpu.environment["device"] == "cpu" and "devices" not in on_cpu.metrics
    monkeypatch.setattr(ModelScorer, "gpus", [0, 3])  # there may be no GPU here
    noted = score_with(folder, weight=0.25).manifest
    assert noted.environment["device"] == "cuda" and noted.metrics["devices"] == 2


def test_another_model_scores_anew_and_the_same_one_elsewhere_does_not(score_with, tmp_path):
    first = score_with(make_model(tmp_path / "rm"))
    moved = score_with(make_model(tmp_path / "moved"), token_budget=7)
    assert moved.ref == first.ref
    assert score_with(make_model(tmp_path / "moved", seed=1)).ref != first.ref


def test_rows_that_a_model_can_not_score_count_as_failed(score_with, tmp_path):
    folder = make_model(tmp_path / "rm")
    with pytest.raises(RewardError, match=r"first: model .*the input has"):
        score_with(folder, max_tokens=36)
    with pytest.raises(ConfigError, match="beginning of the answer"):
        score_with(folder, prefill=None)


@pytest.fixture
def call(store, rollouts, tmp_path):
    """A call of the stage, with the model as a reward model or of the function similarity."""
    folder = str(make_model(tmp_path / "rm"))
    sections = {
        "models": [{"model": folder, "name": "rm", "prefill": ""}],
        "functions": [{"use": "similarity", "arguments": {"model": folder}}],
    }
    refs = {"rollouts": str(rollouts.ref)}
    return lambda kind: Call("reward", {kind: sections[kind]}, store.url, refs)


@pytest.mark.parametrize("kind", ["models", "functions"])
def test_weights_are_read_once_to_plan_and_once_to_score(call, cache, hashed, later, kind):
    """However often it is planned: a flow looks twice before the process that scores does."""
    call = call(kind)
    for _ in range(2):
        assert find_outcome(call) is None and hashed.count(WEIGHTS) == 1
    if kind == "models":
        outcome = find_or_make(call)
        assert not outcome.cached and find_outcome(call).ref == outcome.ref
    else:
        with pytest.raises(RewardError, match="similarity"):  # it is no encoder
            find_or_make(call)
    assert hashed.count(WEIGHTS) == 2


def test_a_model_that_is_not_the_planned_one_does_not_score(
    store, call, cache, hashed, later, tmp_path
):
    """Its file looks unchanged, so the plan believes its memory; the bytes are read to score."""
    call = call("models")
    assert find_outcome(call) is None
    weights = tmp_path / "rm" / WEIGHTS

    def entry() -> Path:
        slot = weights.stat().st_ino % user_cache._MOST_HASHES
        return cache / f"{sha256(str(slot).encode()).hexdigest()}.json"

    note = json.loads(entry().read_text())
    make_model(tmp_path / "rm", seed=1)
    status = weights.stat()
    note["identity"]["files"][0] |= {
        "size": status.st_size,
        "inode": status.st_ino,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }
    entry().write_text(json.dumps(note))
    with pytest.raises(ConfigError, match=r"reward rm: fingerprint expected .*, found"):
        find_or_make(call)
    assert [ref for ref in map(str, store.refs()) if "rewards" in ref] == []
    assert not find_or_make(call).cached  # the memory is right now
