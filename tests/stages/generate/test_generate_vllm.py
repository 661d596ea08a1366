"""Engine `vllm`, the real one on a tiny model, in one child process: numbers, seeds, end tokens,
nothing hidden."""

import sys

import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from quiver.stages.generate.engine import Setup
from quiver.stages.generate.engines.transformers import TransformersEngine
from quiver.stages.generate.engines.vllm import VllmEngine
from quiver.stages.generate.options import Sampling
from quiver.stages.model.loading import load_model
from tests.episodes import own_logprobs
from tests.stages.generate.vllm_checks import GREEDY, PIECES, STOPS, answers
from tests.tiny import EOS, make_policy, plain_logprobs
from tests.vllm_process import checked

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Answers of the engines in the child process, and their model."""
    folder = tmp_path_factory.mktemp("vllm") / "store"
    answers = checked("tests.stages.generate.vllm_checks", folder)
    policy = Store(folder).open("tiny/policy@0")
    return {**answers, "policy": policy, "model": load_model(policy, dtype=torch.float32)}


def mean_gap(answered, rows, temperature) -> float:
    """Mean |vLLM − one plain float32 forward pass| over all ids."""
    gaps = [
        plain_logprobs(answered["model"], row["prompt_ids"], row["completion_ids"], temperature)
        - torch.tensor(row["old_logprobs"])
        for row in rows
    ]
    return torch.cat(gaps).abs().mean().item()


def test_logprobs_are_those_of_the_sampled_distribution(answered):
    assert mean_gap(answered, answered["large"].values(), 0.7) < 1e-3
    assert mean_gap(answered, answered["small"], 0.7) < 1e-3
    # the check sees another temperature
    assert mean_gap(answered, answered["large"].values(), 1.0) > 1e-2


def test_logits_in_float32_of_a_model_in_bfloat16(answered):
    """As the trainer has them: hidden states in bfloat16, their product with the output embedding
    in float32."""
    engine = answered["engine with float32 logits"]
    assert (engine["dtype"], engine["logits_dtype"]) == ("bfloat16", "float32")
    assert mean_gap(answered, answered["float32 logits"].values(), 1.0) < 0.02


def test_a_row_depends_on_its_seed_alone(answered):
    """Not on batch-mates, on prompts that wait for the next step, or on being preempted for lack of
    cache. The model's generation config has top_k = 1, which would make a group's rows equal."""
    alone, row = answered["alone"]["11"], answered["large"]["11"]
    assert alone["completion_ids"] == row["completion_ids"]
    assert alone["old_logprobs"] == pytest.approx(row["old_logprobs"], abs=1e-5)
    for index, row in enumerate(answered["small"]):
        assert row["completion_ids"] == answered["large"][str(index)]["completion_ids"]
    assert len({tuple(row["completion_ids"]) for row in answered["small"]}) > 30


def test_end_tokens_are_kept_as_the_last_id(answered):
    """Rows have up to 48 ids; max_new_tokens = 2 of the model's generation config does not
    apply."""
    rows = answered["small"]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        *before, last = row["completion_ids"]
        ended = row["finish_reason"] == "stop"
        assert not {*before} & {*STOPS} and ended == (last in STOPS)
        assert row["stop_reason"] == (str(last) if ended else None)
        assert ended or len(row["completion_ids"]) == 48


@pytest.mark.parametrize("name", ["stopped", "stopped late"])
def test_a_stop_string_ends_a_row_at_the_same_id_as_in_transformers(answered, name):
    setup = Setup(answered["policy"], GREEDY[name], STOPS, 128, "float32", "cpu")
    rows = answered["small"]
    expected = answers(TransformersEngine(setup), rows, list(range(0, len(rows), 2)))
    for index, row in expected.items():
        answer = answered[name][str(index)]
        for field in ("completion_ids", "finish_reason", "stop_reason"):
            assert answer[field] == row[field]
        assert answer["old_logprobs"] == pytest.approx(row["old_logprobs"], abs=1e-4)
    reasons = {row["stop_reason"] for row in answered[name].values()}
    assert reasons >= ({*PIECES} if name == "stopped" else {"us us", "ɽɽ"})


def test_episodes_are_sampled_from_all_ids_before_each_turn(answered):
    rows = answered["episodes"]
    assert len(rows) == 32
    assert max(len(row["turns"]) for row in rows) == 4
    for row in rows:
        with torch.no_grad():
            expected = own_logprobs(answered["model"], row)
        assert row["old_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert len(row["completion_ids"]) <= 48


def test_an_encoder_decoder_is_refused_before_vllm_is_imported(store):
    policy = make_policy(store, "t5", "t5")
    with pytest.raises(ConfigError, match="encoder-decoder") as caught:
        VllmEngine(Setup(policy, Sampling(), (EOS,), 64))
    assert caught.value.next == 'set generate.engine = "transformers"'
    assert "vllm" not in sys.modules
