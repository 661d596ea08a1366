"""Answers to prompts with pictures: by both engines, the ids that were rendered and the logprobs of
the model's own pass; with turns; and what is refused."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.generate.config import Config
from quiver.stages.generate.prompts import most_media
from quiver.stages.generate.rows import Rows
from quiver.stages.model.loading import load_model
from tests import sight, sound, tiny

ROWS = [
    {"prompt": "What is seven", "images": ["0.png"]},
    {"prompt": "zero one two three", "images": ["1.png", "0.png"]},
    {"prompt": "five", "images": []},
]
CLIPS = [
    {"prompt": "What is seven", "audio": ["0.flac"]},
    {"prompt": "zero one two three", "audio": ["1.wav", "0.flac"]},
    {"prompt": "five", "audio": []},
]
IMAGE = sight.words().convert_tokens_to_ids("<image>")


@pytest.fixture(scope="module", params=["idefics3", "llava", *sight.THREE_AXES])
def store(request, tmp_path_factory) -> Store:
    return sight.make_prompts(tmp_path_factory.mktemp(request.param), ROWS, request.param)


def gap_to_own_logprobs(store: Store, rollouts: str, shown: Any = sight) -> float:
    """The largest difference of a row's logprobs to the whole model's own, of what the row sampled
    before an id of a picture, which that model would take for one. `shown` is the module `sight` or
    `sound`."""
    policy = store.open(shown.REFS["policy"])
    model = load_model(policy, dtype=torch.float32)
    prompts = {
        row["group_id"]: row for row in store.open(shown.REFS["prompts"]).table().to_pylist()
    }
    column = "images" if shown is sight else "audio"
    gaps = []
    for row in store.open(rollouts).table().to_pylist():
        sampled = row["completion_ids"]
        if IMAGE in sampled:
            sampled = row["completion_ids"] = sampled[: sampled.index(IMAGE)]
        media = [medium["bytes"] for medium in prompts[row["group_id"]][column]]
        inputs = shown.own_inputs(policy.files.folder, row, media)
        with torch.no_grad():
            logits = model(**inputs).logits[0, len(row["prompt_ids"]) - 1 : -1]
        table = (logits / sight.GENERATE["sampling"]["temperature"]).log_softmax(-1)
        own = table.gather(1, torch.tensor(sampled, dtype=torch.int64)[:, None])[:, 0].numpy()
        gaps += np.abs(own - np.array(row["old_logprobs"][: len(sampled)])).tolist()
    assert len(gaps) > 40
    return max(gaps)


@pytest.fixture(scope="module")
def rollouts(store) -> Version:
    """Those of engine `transformers`, all in one batch."""
    ref = run_stage("generate", sight.GENERATE, store, in_process=True, **sight.REFS)
    return store.open(ref)


def test_transformers_gives_the_models_own_logprobs(store, rollouts):
    assert gap_to_own_logprobs(store, str(rollouts.ref)) < 3e-5
    manifest = rollouts.manifest
    assert manifest.kind_schema == "rollouts/1" and manifest.models[0].processor


def test_rows_of_one_batch_do_not_look_at_each_others_pictures(store, rollouts):
    config = {**sight.GENERATE, "options": {"batch_size": 1}}
    alone = run_stage("generate", config, store, into="alone", in_process=True, **sight.REFS)
    ids = [each.table()["completion_ids"].to_pylist() for each in (rollouts, store.open(alone))]
    assert ids[0] == ids[1]


def test_an_engine_is_told_of_the_pictures_of_prompts_and_of_turns(store):
    table = store.open(sight.REFS["prompts"]).table()
    turns = {"tools": ["python"], "max_images": 3}
    most = [
        most_media(Config(**sight.GENERATE, **options), table) for options in ({}, {"turns": turns})
    ]
    assert most == [{"image": 2}, {"image": 5}]


def test_a_row_may_be_null_where_others_have_pictures():
    null = pa.nulls(1, pa.list_(pa.null()))
    prompts = pa.table(dict.fromkeys(("images", "audio", "spans"), null))
    assert Rows(prompts, Config(**sight.GENERATE), "x").media(0) == ()


@pytest.mark.vllm
def test_vllm_gives_the_models_own_logprobs(tmp_path):
    """A model whose file vLLM can import without torchvision."""
    store = sight.make_prompts(tmp_path, ROWS)
    rollouts = run_stage("generate", {**sight.GENERATE, "engine": "vllm"}, store, **sight.REFS)
    assert gap_to_own_logprobs(store, str(rollouts)) < 1e-4


@pytest.mark.vllm
@pytest.mark.parametrize("kind", sound.FAMILIES)
def test_vllm_hears_what_the_policy_hears(tmp_path, kind):
    store = sound.make_prompts(tmp_path, CLIPS, kind, seconds=30)  # as all are on the hub
    rollouts = run_stage("generate", {**sight.GENERATE, "engine": "vllm"}, store, **sound.REFS)
    assert gap_to_own_logprobs(store, str(rollouts), sound) < 1e-4


def test_a_policy_that_sees_nothing_does_not_answer_pictures(store):
    tiny.make_policy(store)
    with pytest.raises(ConfigError, match="tiny/policy@0 sees no pictures"):
        refs = {**sight.REFS, "policy": "tiny/policy@0"}
        run_stage("generate", sight.GENERATE, store, in_process=True, **refs)
