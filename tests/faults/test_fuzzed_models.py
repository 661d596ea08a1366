"""Model folders: every JSON file broken in text or meaning, weights that are cut, empty or not
numbers. The import refuses them by name, or what was imported works, or is refused by the first
stage that needs it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from quiver.stages.common.models.loading import load_model
from quiver.stages.common.runtime.runner import Call, plan_of, run_stage
from quiver.stages.common.store import Store
from tests.faults.broken import error_of, garbled, mutated, snapshot, to_text

NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
EXTRA = (
    *("null", "true", "-1", "[]", "[2, 3]", "[null]", '["2"]', "2.0", '"2"', "1000000000", "98"),
    *('{"auto_map": {"AutoModel": "evil.Model"}}', '[{"auto_map": {}}]', '"evil.Model"', '"llama"'),
    *(
        '"t5"',
        '"gpt2"',
        '"LlamaForCausalLM"',
        '"PreTrainedTokenizerFast"',
        '"LlamaTokenizer"',
        '"BPE"',
    ),
    *(
        '"WordLevel"',
        '"float64"',
        '"int8"',
        '"gelu"',
        '"dynamic"',
        '{"rope_type": "yarn"}',
        '"<|im_end|>"',
    ),
    *(
        '{"quant_method": "gptq"}',
        '{"quant_method": "bitsandbytes", "load_in_8bit": true}',
        '"eager"',
    ),
)
GENERATE = {"engine": "scripted", "samples_per_prompt": 2, "sampling": {"max_tokens": 4}}


@pytest.fixture(scope="module")
def inputs(finished):
    """The working directory, which has rows and a model."""
    before = Path.cwd()
    os.chdir(finished / "inputs")
    yield
    os.chdir(before)


def break_folder(random: Random, folder: Path) -> None:
    """Break one or two files of a model folder, or add one."""
    for name in random.sample(NAMES, random.choice((1, 1, 2))):
        path = folder / name
        if random.random() < 0.1:
            path.write_bytes(garbled(random, path.read_bytes()))
            continue
        text = to_text(mutated(random, json.loads(path.read_bytes()), EXTRA))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if random.random() < 0.1:
        break_weights(random, folder)
    if random.random() < 0.1:
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}}
        text = to_text(mutated(random, index))
        (folder / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def break_weights(random: Random, folder: Path) -> None:
    """Break the header of a weight file, or its numbers."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if random.random() < 0.4:
        path.write_bytes(garbled(random, raw))
        return
    header = to_text(mutated(random, json.loads(raw[8 : 8 + length])))
    encoded = header.encode("utf-8", "surrogatepass")
    claimed = random.choice((len(encoded), len(encoded), 0, 2**40, 2**63))
    path.write_bytes(claimed.to_bytes(8, "little") + encoded + raw[8 + length :])


def first_stages(store: Store, model: Path) -> dict[str, Callable[[], object]]:
    """What is done with a model first, in this order."""
    refs = {"policy": "a/policy@0", "rollouts": "a/rollouts@1"}

    def make(stage: str, config: dict, **refs: str) -> None:
        run_stage(stage, config, store, in_process=True, into="a", **refs)

    def train() -> None:
        load_model(store.open("a/policy@0"), dtype=torch.float32)

    rows = {"source": "ids.jsonl", "limit": 2}
    return {
        "policy": lambda: make("policy", {"model": str(model)}),
        "prompt": lambda: make("prompt", rows, policy="a/policy@0"),
        "generate": lambda: make("generate", GENERATE, policy="a/policy@0", prompts="a/prompts@1"),
        "load": train,
        "logprobs": lambda: plan_of(Call("logprobs", {"role": "ref"}, store.path, refs)),
    }


def fuzz(folder: Path, seed: int, count: int) -> None:
    """`count` model folders."""
    random = Random(seed)
    refused = 0
    for number in range(count):
        model = folder / "model"
        store = Store(folder / "store")
        shutil.copytree("model", model)
        break_folder(random, model)
        state = snapshot(model)
        uses = first_stages(store, model)
        for name, use in uses.items():
            try:
                error = error_of(use)
            except BaseException as caught:
                texts = {file: (model / file).read_bytes()[:1500] for file in NAMES}
                caught.add_note(f"seed {seed}, model {number}, {name}: {texts}")
                raise
            if name == "policy" and error is not None:
                refused += 1
                assert list(store.refs()) == []
                break
            if error is not None and name in ("prompt", "generate"):
                break
        assert snapshot(model) == state
        shutil.rmtree(model)
        shutil.rmtree(store.path)
    assert refused > count / 10


def test_wrong_model_folders_are_typed_errors(inputs, tmp_path):
    fuzz(tmp_path, seed=1, count=8)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10, 20))
def test_5000_wrong_model_folders_are_typed_errors(inputs, tmp_path, seed):
    fuzz(tmp_path, seed=seed, count=500)
