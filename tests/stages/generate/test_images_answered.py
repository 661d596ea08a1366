"""Answers to prompts with pictures: by both engines, the ids that were rendered and the logprobs of
the model's own pass; with turns; and what is refused."""

import numpy as np
import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from tests import sight, tiny

SAMPLING = {"max_tokens": 12, "temperature": 0.9}
STAGE = {"samples_per_prompt": 3, "dtype": "float32", "sampling": SAMPLING}
ROWS = [
    {"prompt": "What is seven", "images": ["0.png"]},
    {"prompt": "zero one two three", "images": ["1.png", "0.png"]},
    {"prompt": "five", "images": []},
]
IMAGE = sight.words().convert_tokens_to_ids("<image>")


def write_pictures(folder):
    for number, size in enumerate([(20, 40), (50, 30)]):
        (folder / f"{number}.png").write_bytes(sight.png(number, size))


@pytest.fixture(scope="module", params=["idefics3", "llava"])
def store(request, tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp(request.param)
    store = Store(folder / "store")
    sight.make_policy(store, folder / "model", kind=request.param)
    write_pictures(folder)
    config = {"source": sight.write_rows(folder, ROWS), "prompt": "prompt", "images": "images"}
    run_stage("prompt", config, store, policy="sees/policy@0", in_process=True)
    return store


REFS = {"prompts": "sees/prompts@1", "policy": "sees/policy@0"}


def gap_to_own_logprobs(store: Store, rollouts: str) -> float:
    """The largest difference of a row's logprobs to the whole model's own, of what the row sampled
    before an id of a picture, which that model would take for one."""
    policy = store.open(REFS["policy"])
    model = load_model(policy, dtype=torch.float32)
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(policy.files.folder)
    prompts = {row["group_id"]: row for row in store.open(REFS["prompts"]).table().to_pylist()}
    gaps = []
    for row in store.open(rollouts).table().to_pylist():
        sampled = row["completion_ids"]
        if IMAGE in sampled:
            sampled = sampled[: sampled.index(IMAGE)]
        images = [sight.decode(image["bytes"]) for image in prompts[row["group_id"]]["images"]]
        inputs = {}
        if images:
            text = [processor.image_token * len(images)]
            inputs = dict(processor(text=text, images=[images], return_tensors="pt"))
        inputs["input_ids"] = torch.tensor([row["prompt_ids"] + sampled])
        inputs.pop("attention_mask", None)
        with torch.no_grad():
            logits = model(**inputs).logits[0, len(row["prompt_ids"]) - 1 : -1]
        table = (logits / SAMPLING["temperature"]).log_softmax(-1)
        own = table.gather(1, torch.tensor(sampled, dtype=torch.int64)[:, None])[:, 0].numpy()
        gaps += np.abs(own - np.array(row["old_logprobs"][: len(sampled)])).tolist()
    assert len(gaps) > 40
    return max(gaps)


def test_transformers_gives_the_models_own_logprobs(store):
    config = {**STAGE, "engine": "transformers"}
    rollouts = run_stage("generate", config, store, into="a", in_process=True, **REFS)
    assert gap_to_own_logprobs(store, str(rollouts)) < 1e-5
    manifest = store.open(rollouts).manifest
    assert (manifest.kind_schema, manifest.required_features) == ("rollouts/1", ("images",))


def test_rows_of_one_batch_do_not_look_at_each_others_pictures(store):
    config = {**STAGE, "engine": "transformers"}
    together, alone = (
        run_stage("generate", config | options, store, into=run, in_process=True, **REFS)
        for run, options in (("b", {}), ("c", {"options": {"batch_size": 1}}))
    )
    ids = [store.open(each).table()["completion_ids"].to_pylist() for each in (together, alone)]
    assert ids[0] == ids[1]


def test_vllm_gives_the_models_own_logprobs(tmp_path):
    """A model whose file vLLM can import without torchvision."""
    store = Store(tmp_path / "store")
    sight.make_policy(store, tmp_path / "model")
    write_pictures(tmp_path)
    config = {"source": sight.write_rows(tmp_path, ROWS), "prompt": "prompt", "images": "images"}
    run_stage("prompt", config, store, policy="sees/policy@0", in_process=True)
    rollouts = run_stage("generate", {**STAGE, "engine": "vllm"}, store, **REFS)
    assert gap_to_own_logprobs(store, str(rollouts)) < 1e-4


def test_a_policy_that_sees_nothing_does_not_answer_pictures(store):
    tiny.make_policy(store)
    with pytest.raises(ConfigError, match="shows pictures, and tiny/policy@0 sees none"):
        refs = {**REFS, "policy": "tiny/policy@0"}
        run_stage("generate", {**STAGE, "engine": "transformers"}, store, in_process=True, **refs)
