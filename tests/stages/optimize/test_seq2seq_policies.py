"""Encoder-decoder policies through the real chain: sampled by the transformers engine, trained on,
sampled again."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from quiver.schemas.errors import NumericError, SchemaError
from quiver.stages.model.loading import load_model
from tests.stages.optimize import world
from tests.tiny import make_policy


@pytest.fixture(params=["t5", "bart"])
def start(request, store):
    """A tiny encoder-decoder policy."""
    return make_policy(store, request.param, request.param)


def test_the_trainer_finds_what_the_engine_saved(store, start):
    made = world.by_engine(store, start)
    done = world.trained(store, start, made)
    assert 0 < done.manifest.metrics["padding_share"] < 0.8
    audit = done.manifest.metrics["audit"]
    assert audit["max_gap"] < 1e-4 and audit["tokens"] > 60
    model, info = AutoModelForSeq2SeqLM.from_pretrained(done.files.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before = dict(load_model(start, dtype=torch.float32).named_parameters())
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    later = world.by_engine(store, done, seed=1)
    metrics = world.trained(store, done, later, world.config(minibatches=2)).manifest.metrics
    assert metrics["audit"]["max_gap"] < 1e-4 and metrics["step"] == 3
    hot = [{**row, "temperature": 1.6} for row in made[0].table().to_pylist()]
    with pytest.raises(NumericError, match="max_mean_gap"):
        strict = world.config(audit={"max_mean_gap": 1e-3})
        world.trained(store, start, world.scored(store, start, hot), strict)


def test_encoder_and_decoder_have_a_context_each(store):
    policy = make_policy(store, "bart", "bart")
    made = world.by_engine(store, policy, groups=1, each=2, tokens=200, low=150, high=151)
    rows = made[0].table().to_pylist()
    # with the prompt more than BART's 256 positions
    assert max(len(row["completion_ids"]) for row in rows) > 106
    assert world.trained(store, policy, made).manifest.metrics["audit"]["max_gap"] < 1e-4
    rows[0]["prompt_ids"] = [5] * 257
    with pytest.raises(SchemaError, match="257 tokens, the policy reads 256"):
        world.trained(store, policy, world.scored(store, policy, rows))
