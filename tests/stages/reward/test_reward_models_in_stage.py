"""Reward models through the stage: parts beside those of functions, which model it was, and when
nothing is done again."""

import json
from functools import partial

import pytest

from quiver.schemas.errors import ConfigError, RewardError
from quiver.stages.common.config import parse
from quiver.stages.common.runtime.runner import Call, find, perform
from quiver.stages.reward.models.config import ModelConfig, fingerprint, model_entry
from quiver.stages.reward.models.scorer import ModelScorer
from quiver.stages.reward.stage import Config
from tests.stages.common import test_hashes
from tests.stages.reward.reward_models import make_model
from tests.writing import run_here

run = partial(run_here, "reward")
cache, hashed, later = test_hashes.cache, test_hashes.hashed, test_hashes.later
WEIGHTS = "model.safetensors"


@pytest.fixture
def rollouts(sample):
    return sample([["7", "8"], ["It is 7", ""]], {"answer": [7, 7]})


def config(folder, **more) -> Config:
    given = {"model": str(folder), "name": "rm", "weight": 0.5, "prefill": "", **more}
    return parse(Config, {"functions": [{"use": "numeric"}], "models": [given]}, "reward")


def test_a_models_part_is_its_value_and_the_manifest_names_it(store, rollouts, tmp_path):
    folder = make_model(tmp_path / "rm", labels=3)
    version = store.open(run(config(folder, label=1, extra=True), store, rollouts=rollouts.ref))
    scorer = ModelScorer(ModelConfig(model=str(folder), label=1))
    for row, rollout in zip(version.table().to_pylist(), rollouts.table().to_pylist(), strict=True):
        chat = [{"role": "user", "content": f"ask {row['group_id']}"}]
        batch = {
            "prompts": [chat],
            "completions": [rollout["completion_text"]],
            "rollout_ids": ["r"],
        }
        (part,) = scorer.score(batch)
        assert row["parts"]["rm"] == pytest.approx(part.value, abs=1e-5)
        assert row["reward"] == pytest.approx(row["parts"]["numeric"] + 0.5 * part.value, abs=1e-5)
        assert json.loads(row["extra"]["rm"])["LABEL_1"] == pytest.approx(part.value, abs=1e-5)
    scorer.close()
    entry = model_entry(scorer.config)
    assert version.manifest.model("reward:rm").weights == entry.weights
    assert version.manifest.config["models"][0]["fingerprint"] == fingerprint(entry)
    assert version.manifest.metrics["functions"]["rm"]["seconds"] > 0


def test_another_model_scores_anew_and_the_same_one_elsewhere_does_not(store, rollouts, tmp_path):
    first = run(config(make_model(tmp_path / "rm")), store, rollouts=rollouts.ref)
    assert (
        run(config(make_model(tmp_path / "moved"), token_budget=7), store, rollouts=rollouts.ref)
        == first
    )
    assert (
        run(config(make_model(tmp_path / "moved", seed=1)), store, rollouts=rollouts.ref) != first
    )


def test_rows_that_a_model_can_not_score_count_as_failed(store, rollouts, tmp_path):
    with pytest.raises(RewardError, match=r"first: model .*the input has"):
        run(config(make_model(tmp_path / "rm"), max_tokens=36), store, rollouts=rollouts.ref)
    with pytest.raises(ConfigError, match="beginning of the answer"):
        run(config(make_model(tmp_path / "rm"), prefill=None), store, rollouts=rollouts.ref)


def test_weights_are_read_once_to_plan_and_once_to_score(
    store, rollouts, cache, hashed, later, tmp_path
):
    """However often it is planned: a flow looks twice before the process that scores does."""
    section = config(make_model(tmp_path / "rm")).model_dump(mode="json")
    call = Call("reward", section, store.path, {"rollouts": str(rollouts.ref)})
    assert find(call) is None and hashed.count(WEIGHTS) == 1
    assert find(call) is None and hashed.count(WEIGHTS) == 1
    outcome = perform(call)
    assert not outcome.cached and hashed.count(WEIGHTS) == 2
    assert find(call).ref == outcome.ref and hashed.count(WEIGHTS) == 2


def test_the_model_of_a_function_is_read_once_to_plan_and_once_to_score(
    store, rollouts, cache, hashed, later, tmp_path
):
    section = {"functions": [{"use": "similarity", "arguments": {"model": str(tmp_path / "rm")}}]}
    make_model(tmp_path / "rm")
    call = Call("reward", section, store.path, {"rollouts": str(rollouts.ref)})
    assert find(call) is None and find(call) is None and hashed.count(WEIGHTS) == 1
    with pytest.raises(RewardError, match="similarity"):  # it is no encoder
        perform(call)
    assert hashed.count(WEIGHTS) == 2


def test_a_model_that_is_not_the_planned_one_does_not_score(
    store, rollouts, cache, hashed, later, tmp_path
):
    """Its file looks unchanged, so the plan believes its memory; the bytes are read to score."""
    folder = make_model(tmp_path / "rm")
    call = Call(
        "reward",
        config(folder).model_dump(mode="json"),
        store.path,
        {"rollouts": str(rollouts.ref)},
    )
    assert find(call) is None
    make_model(folder, seed=1)
    (entry,) = (path for path in cache.iterdir() if f"/{WEIGHTS}" in path.read_text())
    note = json.loads(entry.read_text())
    status = (folder / WEIGHTS).stat()
    note["identity"] |= {
        "size": status.st_size,
        "inode": status.st_ino,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }
    entry.write_text(json.dumps(note))
    with pytest.raises(ConfigError, match=r"reward rm: fingerprint expected .*, found"):
        perform(call)
    assert [ref for ref in map(str, store.refs()) if "rewards" in ref] == []
    assert not perform(call).cached  # the memory is right now
