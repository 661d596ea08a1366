"""The fields of `[optimize]`: what is refused and how it is said, and what an algorithm fills in."""

import dataclasses

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import parse
from quiver.stages.optimize import algorithms, config
from quiver.stages.optimize.stage import Config

NARROW = {"precision": "bf16_stochastic"}
REFUSED = [
    ({"algorithm": "dapoo"}, "did you mean dapo?"),
    ({"algorithm": "cispo", "clip_high": 0.2}, "leave it out; it takes clip_max"),
    ({"clip_max": 5.0}, "clip_max is not an option of algorithm 'grpo'"),
    ({"algorithm": "ppo", "options": {"cap": 5.0}}, "cap is not an option of algorithm 'ppo'"),
    ({"algorithm": "cispo", "clip_max": 0.0}, "greater than 0"),
    ({"options": {"clip_low": 0.5}}, "set optimize.clip_low"),
    ({"algorithm": "a.py:A", "options": {"drop_zero_variance": 1}}, "drop_zero_variance has a"),
    ({"clip_high": 0.28, "delta": 1.25}, "delta must be > 1 + clip_high = 1.28"),
    ({"correction": {"mode": "mask", "low": 3.0}}, "low must be < high = 2, got 3"),
    ({"correction": {"reject": "k3"}}, "reject needs reject_high, above reject_low = 0"),
    ({"correction": {"reject_high": 0.1}}, "reject_high have no effect without reject"),
    ({"betas": (0.9, 1.0)}, "betas.1: Input should be less than 1, got 1.0"),
    ({"schedule": "linear"}, "schedule 'linear' needs total_steps"),
    ({"warmup_steps": 5, "total_steps": 5}, "total_steps must be > warmup_steps = 5"),
    ({"value_coef": 0.5, "gamma": 0.5}, "value_coef, gamma would have no effect"),
    ({"algorithm": "reinforce_pp_to_go", "gae_lambda": 0.5}, "gae_lambda would have no effect"),
    ({"algorithm": "ppo", "value_coef": 0, "critic_warmup_steps": 3}, "nothing would learn"),
    ({"algorithm": "ppo", "bootstrap_length": True, "on_length": "mask"}, "leaves them out"),
    ({"algorithm": "ppo", "advantage": "group_centered"}, "without its advantages of tokens"),
    ({"algorithm": "rloo", "advantage_epsilon": 0.1}, "the advantage is 'leave_one_out'"),
    ({"advantage": "group_centered", "advantage_epsilon": 0.1}, "would have no effect"),
    ({"algorithm": "gdpo", "kl_in_reward": True, "kl_coef": 0.1}, "kl_in_reward would have no"),
    ({"algorithm": "ppo", "kl_in_reward": True}, "kl_in_reward needs kl_coef > 0"),
    ({"kl_target": 0.1}, "kl_target needs kl_coef > 0"),
    ({"mask_counted": True}, "mask_counted applies only with"),
    ({"trackers": ["wandb"]}, "trackers need tracker_folder"),
    ({"credit": "gae"}, "'grpo' has no critic"),
    ({"credit": "turn", "algorithm": "ppo"}, "take credit = 'gae'"),
    ({"credit": "turn", "algorithm": "otb"}, "a baseline of its own"),
    ({"credit": "turn", "algorithm": "gspo"}, "the whole completion's"),
    ({"credit": "turn", "algorithm": "gmpo"}, "the whole completion's"),
    ({"credit": "turn", "advantage": "leave_one_out"}, "leave advantage out"),
    ({"credit": "turn", "advantage_epsilon": 0.1}, "would have no effect"),
    (
        {"credit": "turn", "kl_coef": 0.1, "kl_in_reward": True},
        "the KL from the whole rollout's reward",
    ),
    ({"lora": {}, "train_vision": True}, "adapters change only the language model"),
    ({"lora": {"rank": 0}}, "rank"),
    ({"lora": {"target_modules": []}}, "target_modules"),
    ({"lora": {"dropout": 0.1}}, "unknown key lora.dropout"),
    ({"save_dtype": "bfloat16", "lora": {"save": "adapter"}}, "save_dtype is for merged weights"),
    ({"save_dtype": "bfloat16", "save_optimizer": False}, "keeps half of the float32 weights"),
    ({"save_dtype": "bfloat16", "load_optimizer": False}, "set load_optimizer = true"),
    ({"save_dtype": "bfloat16", "algorithm": "gspo"}, "does not go with bounds this tight"),
    ({"save_dtype": "bfloat16", "prox_of": "start"}, "does not go with bounds this tight"),
    ({**NARROW, "lora": {"rank": 4}}, "does not go with lora: take 'bf16'"),
    ({**NARROW, "algorithm": "ppo", "critic": "model"}, "does not go with critic = 'model'"),
    ({**NARROW, "shard": True}, "precision 'bf16_stochastic' does not go with shard"),
    ({"moments_on_host": True, "shard": True}, "moments_on_host does not go with shard"),
    ({"precision": "bf16_master"}, "'auto', 'fp32', 'bf16' or 'bf16_stochastic'"),
]
CRITIC_VALUES = {
    "critic": "model", "critic_from": "judge", "value_coef": 0.5, "value_clip": None, "gamma": 0.9, "gae_lambda": 0.5,
    "critic_lambda": 1.0, "reward_scaling": "running", "bootstrap_length": True,
    "critic_learning_rate": 1e-3, "critic_warmup_steps": 3,
}  # fmt: skip


@pytest.mark.parametrize("fields, said", REFUSED)
def test_what_cannot_be_meant_is_refused(fields, said):
    with pytest.raises(ConfigError) as caught:
        parse(Config, fields, "optimize")
    assert said in caught.value.message


def test_what_looks_alike_and_can_be_meant_is_taken():
    Config(save_dtype="bfloat16", save_optimizer=False, load_optimizer=False, lora={})
    Config(save_dtype="bfloat16", load_optimizer=False, **NARROW)
    Config(algorithm="gspo", save_dtype="bfloat16", **NARROW)
    Config(algorithm="reinforce_pp_to_go", gamma=0.9)
    assert Config(delta=1.25).resolved().delta == 1.25
    assert Config(credit="turn", algorithm="gspo", token_form=True).least_samples == 2
    with pytest.raises(ConfigError, match="delta must be"):
        Config(algorithm="dapo", delta=1.25).resolved()


def test_options_of_a_critic_are_refused_without_one():
    assert CRITIC_VALUES.keys() == {*config.CRITIC_OPTIONS}
    for name, value in CRITIC_VALUES.items():
        assert Config(algorithm="ppo", **{"critic": "model", name: value}).resolved()
        with pytest.raises(ConfigError, match=f"{name} would have no effect: .* no critic"):
            parse(Config, {name: value}, "optimize")


def test_defaults_that_are_written_out_go_with_every_algorithm():
    for name in algorithms.ALGORITHMS:
        assert parse(Config, Config(algorithm=name).model_dump(mode="json"), "optimize").resolved()


@pytest.mark.parametrize("name", ["dapo", "cispo", "sapo"])
def test_what_the_table_fills_in_is_part_of_the_work(monkeypatch, name):
    row = algorithms.ALGORITHMS[name]
    filled = Config(algorithm=name).resolved()
    assert {field: getattr(filled, field) for field in row.defaults} == row.defaults
    assert filled.aggregation == row.aggregation
    assert filled.key() == Config(algorithm=name, **row.defaults).resolved().key()
    for field in row.defaults.keys() - {"drop_zero_variance"}:
        defaults = {**row.defaults, field: 2.0}
        monkeypatch.setitem(
            algorithms.ALGORITHMS, name, dataclasses.replace(row, defaults=defaults)
        )
        assert Config(algorithm=name).resolved().key() != filled.key()
    assert Config(algorithm=name, drop_zero_variance=False).resolved().drop_zero_variance is False


@pytest.mark.parametrize(
    "values, needed",
    [
        ({}, False),
        ({"algorithm": "gspo"}, True),
        ({"algorithm": "luspo"}, True),
        ({"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.2}, False),
        ({"clip_high": 0.01}, True),
        ({"algorithm": "cispo"}, False),
        ({"algorithm": "dppo_kl", "divergence_low": 0.01}, False),
        ({"prox_of": "start"}, True),
    ],
)
def test_tight_bounds_and_decoupled_ppo_need_proximal_logprobs(values, needed):
    assert Config(**values).needs_prox is Config(**values).resolved().needs_prox is needed
