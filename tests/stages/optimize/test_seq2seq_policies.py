"""Encoder-decoder policies through the real chain: sampled by the transformers engine, scored
again, trained on."""

import math
from functools import partial

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from quiver.schemas.errors import NumericError, SchemaError
from quiver.stages.common.config import parse
from quiver.stages.common.models.loading import load_model
from quiver.stages.generate import stage as generate
from quiver.stages.logprobs import stage as logprobs
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import resolve
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from tests.stages.generate.making import random_prompts
from tests.stages.optimize import world
from tests.tiny import make_policy
from tests.writing import run_here

run = partial(run_here, "optimize")


START = {"t5": 0, "bart": 2}


def sampled(store, policy, *, groups=4, each=4, seed=0, temperature=0.8, tokens=9, low=2, high=14):
    """rollouts/1 of the transformers engine."""
    given = {
        "engine": "transformers",
        "samples_per_prompt": each,
        "dtype": "float32",
        "seed": seed,
        "sampling": {"temperature": temperature, "max_tokens": tokens},
    }
    prompts = random_prompts(store, groups, low=low, high=high, run=policy.ref.run)
    config = parse(generate.Config, given, "generate")
    return store.open(run_here("generate", config, store, prompts=prompts.ref, policy=policy.ref))


def _config(**values) -> Config:
    return Config(**{"device": "cpu", "learning_rate": 1e-3, **values}).resolved()


@pytest.fixture(params=["t5", "bart"])
def world_of(request, store):
    """(policy, rollouts, rewards) of a tiny encoder-decoder model, sampled by the engine."""
    policy = make_policy(store, request.param, request.param)
    rollouts = sampled(store, policy)
    return (
        policy,
        rollouts,
        world.write_rewards(store, rollouts, world.even_share, run=request.param),
    )


def _own(model, kind: str, row: dict) -> torch.Tensor:
    """Logprobs of one rollout by transformers' own forward pass."""
    ids = torch.tensor(row["completion_ids"])
    inputs = torch.cat([torch.tensor([START[kind]]), ids[:-1]])[None]
    logits = model(
        input_ids=torch.tensor([row["prompt_ids"]]), decoder_input_ids=inputs, use_cache=False
    ).logits[0]
    return (logits / row["temperature"]).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def test_the_trainer_finds_what_the_engine_saved(store, world_of):
    policy, rollouts, rewards = world_of
    named = {"policy": policy.ref, "rollouts": rollouts.ref, "rewards": rewards.ref}
    done = store.open(run(_config(), store, **named))
    assert 0 < done.manifest.metrics["padding_share"] < 0.8
    audit = done.manifest.metrics["audit"]
    assert audit["max_gap"] < 1e-4 and audit["tokens"] > 60
    model, info = AutoModelForSeq2SeqLM.from_pretrained(done.files.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before = dict(load_model(policy, dtype=torch.float32).named_parameters())
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    # the next iteration, from the trained policy
    policy, kind = done, policy.ref.run
    rollouts = sampled(store, policy, seed=1)
    rewards = world.write_rewards(store, rollouts, world.even_share, run=kind)
    done = store.open(
        run(
            _config(minibatches=2),
            store,
            policy=policy.ref,
            rollouts=rollouts.ref,
            rewards=rewards.ref,
        )
    )
    assert done.manifest.metrics["audit"]["max_gap"] < 1e-4 and done.manifest.metrics["step"] == 3


def test_scoring_again_is_the_models_own_logprob(store, world_of):
    policy, rollouts, _ = world_of
    kind = policy.ref.run
    other = make_policy(store, f"{kind}-ref", kind, seed=1)
    for role, version in (("prox", policy), ("ref", other)):
        model = load_model(version, dtype=torch.float32)
        ref = run_here(
            "logprobs",
            logprobs.Config(role=role, token_budget=50),
            store,
            rollouts=rollouts.ref,
            policy=version.ref,
        )
        rows = zip(
            rollouts.table().to_pylist(),
            store.open(ref).table()["logprobs"].to_pylist(),
            strict=True,
        )
        for row, found in rows:
            with torch.no_grad():
                assert found == pytest.approx(_own(model, kind, row).tolist(), abs=1e-5)
            assert role == "ref" or found == pytest.approx(row["old_logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    "packing, budget", [("shared", None), ("shared", 30), ("packed", 80), ("single", None)]
)
def test_the_steps_gradient_is_that_of_a_loop_over_rollouts(store, world_of, packing, budget):
    policy, rollouts, rewards = world_of
    config, row = _config(packing=packing, token_budget=budget), resolve("grpo")
    loaded = joining.load(
        config, row, store, {"policy": policy, "rollouts": rollouts, "rewards": rewards}
    )
    made = Trainer(
        config, load_model(policy, dtype=torch.float32), loaded.batch, row, make_accelerator(config)
    )
    assert made.mode == packing
    everyone = list(range(len(loaded.batch.groups)))
    numbers = made.accumulate(everyone, everyone)
    model, total = load_model(policy, dtype=torch.float64), 0.0
    rows = rollouts.table().to_pylist()
    for each in rows:
        peers = [world.even_share(other) for other in rows if other["group_id"] == each["group_id"]]
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((value - mean) ** 2 for value in peers) / (len(peers) - 1))
        advantage = (world.even_share(each) - mean) / (std + 1e-4)
        ratio = (_own(model, policy.ref.run, each) - torch.tensor(each["old_logprobs"])).exp()
        total = total - torch.minimum(
            ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
        ).mean() / len(rows)
    total.backward()
    assert numbers["loss"] == pytest.approx(total.item(), abs=1e-6)
    wanted = dict(model.named_parameters())
    for name, parameter in made.model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad.float(), rtol=1e-4, atol=1e-5)


def test_other_logprobs_stop_the_audit(store, world_of):
    policy, rollouts, _ = world_of
    rows = [{**row, "temperature": 1.6} for row in rollouts.table().to_pylist()]
    wrong = world.write_rollouts(store, policy, rows, run=policy.ref.run)
    rewards = world.write_rewards(store, wrong, world.even_share, run=policy.ref.run)
    with pytest.raises(NumericError, match="max_mean_gap"):
        run(
            _config(audit={"max_mean_gap": 1e-3}),
            store,
            policy=policy.ref,
            rollouts=wrong.ref,
            rewards=rewards.ref,
        )


def test_encoder_and_decoder_have_a_context_each(store):
    policy = make_policy(store, "bart", "bart")
    rollouts = sampled(store, policy, groups=1, each=2, tokens=200, low=150, high=151)
    rows = rollouts.table().to_pylist()
    assert (
        max(len(row["completion_ids"]) for row in rows) > 106
    )  # with the prompt more than BART's 256 positions
    rewards = world.write_rewards(store, rollouts, world.even_share, run="bart")
    done = store.open(
        run(_config(), store, policy=policy.ref, rollouts=rollouts.ref, rewards=rewards.ref)
    )
    assert done.manifest.metrics["audit"]["max_gap"] < 1e-4
    rows[0]["prompt_ids"] = [5] * 257
    longer = world.write_rollouts(store, policy, rows, run="bart")
    rewards = world.write_rewards(store, longer, world.even_share, run="bart")
    with pytest.raises(SchemaError, match="257 tokens, the policy reads 256"):
        run(_config(), store, policy=policy.ref, rollouts=longer.ref, rewards=rewards.ref)


def test_activation_checkpointing_gives_the_same_policy(store, world_of):
    policy, rollouts, rewards = world_of
    named = {"policy": policy.ref, "rollouts": rollouts.ref, "rewards": rewards.ref}
    done = store.open(run(_config(activation_checkpointing=True), store, **named, force=True))
    plain = store.open(run(_config(), store, **named, force=True))
    theirs = dict(load_model(plain, dtype=torch.float32).named_parameters())
    for name, value in load_model(done, dtype=torch.float32).named_parameters():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-5)
