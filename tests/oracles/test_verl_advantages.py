"""Advantages, GAE and the KL in the reward against verl's own estimators, called on the padded
batch; and where they part."""

import types

import numpy as np
import pytest
import torch

from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize import advantages, critic, estimators, terms
from quiver.stages.optimize.stage import Config
from tests.oracles.peers import (
    GROUPS,
    LENGTHS,
    MASK,
    OFFSETS,
    OLD,
    REF,
    REWARDS,
    B,
    N,
    T,
    flat,
    noise,
    padded,
    peer,
)

pytestmark = pytest.mark.oracle
core = peer("verl.trainer.ppo.core_algos")

INDEX = np.array([f"g-{number}" for number in GROUPS.tolist()], dtype=object)
GAMMA_1 = types.SimpleNamespace(gamma=1.0)


def on_the_last_token(
    rewards: torch.Tensor = REWARDS, lengths: torch.Tensor = LENGTHS
) -> torch.Tensor:
    """[B] -> [B, T]: verl takes rewards of tokens."""
    return torch.zeros(len(rewards), T, dtype=torch.float64).scatter(
        1, lengths[:, None] - 1, rewards[:, None]
    )


def of_rollouts(rows: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B], where every token of a rollout has the same."""
    assert (rows == rows[:, :1] * MASK).all()
    return rows[:, 0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=1e-6)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized"])
def test_group_normalized_up_to_epsilon(estimator):
    theirs = of_rollouts(core.get_adv_estimator_fn(estimator)(on_the_last_token(), MASK, INDEX)[0])
    close(advantages.group_normalized(REWARDS, GROUPS, epsilon=1e-6), theirs)
    std = torch.stack([REWARDS[number == GROUPS].std() for number in GROUPS])
    close(advantages.group_normalized(REWARDS, GROUPS) * (std + 1e-4), theirs * (std + 1e-6))


def test_group_centered():
    theirs, _ = core.compute_grpo_outcome_advantage(
        on_the_last_token(), MASK, INDEX, norm_adv_by_std_in_grpo=False
    )
    close(advantages.group_centered(REWARDS, GROUPS), of_rollouts(theirs))


def test_opo():
    theirs, _ = core.compute_opo_outcome_advantage(on_the_last_token(), MASK, INDEX)
    close(estimators.length_weighted(REWARDS, GROUPS, lengths=LENGTHS), of_rollouts(theirs))


def test_opos_group_of_one_has_the_raw_reward_there():
    alone = np.array([str(row) for row in range(B)], dtype=object)
    theirs, _ = core.compute_opo_outcome_advantage(on_the_last_token(), MASK, alone)
    assert torch.equal(of_rollouts(theirs), REWARDS)
    ours = estimators.length_weighted(REWARDS, torch.arange(B), lengths=LENGTHS)
    assert ours.isnan().all()


@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized"])
def test_leave_one_out(estimator):
    theirs = core.get_adv_estimator_fn(estimator)(on_the_last_token(), MASK, INDEX)[0]
    close(advantages.leave_one_out(REWARDS, GROUPS), of_rollouts(theirs))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_gae_and_whitening(gamma, lam):
    """Rewards on every token, as with a KL in the reward. Whitened: verl / √(var + 1e-8), here /
    (std + 1e-8)."""
    rewards, values = noise(10), noise(11)
    found, returns = advantages.gae(rewards, values, OFFSETS, gamma=gamma, gae_lambda=lam)
    expected, targets = core.compute_gae_advantage_return(
        padded(rewards) * MASK, padded(values) * MASK, MASK, gamma=gamma, lam=lam
    )
    close(returns, flat(targets))
    close(advantages.whitened(found), flat(expected))


def test_the_kl_in_the_reward():
    data = Sequences(
        Ragged(torch.zeros(N, dtype=torch.int32), OFFSETS),
        Ragged(torch.zeros(N), OFFSETS),
        torch.ones(B),
    )
    batch = types.SimpleNamespace(
        sequences=data,
        old_logprobs=OLD,
        ref_logprobs=REF,
        rewards=REWARDS,
        reward_scale=1.0,
        turn_rewards=None,
    )
    found = critic.token_rewards(Config(kl_in_reward=True, kl_coef=0.3), batch)
    close(found, flat(core.compute_rewards(on_the_last_token(), padded(OLD), padded(REF), 0.3)))


def test_gdpo_but_for_the_count_of_tokens():
    """verl whitens over tokens what is of rollouts: mean and deviation of the parts' sum repeated
    once a token."""
    parts = torch.stack([REWARDS, noise(15, count=B).float().double()], dim=1)
    weights = [1.0, 0.25]
    config = {"gdpo_reward_keys": ["f", "g"], "gdpo_reward_weights": weights}
    columns = dict(zip("fg", parts.unbind(1), strict=True))
    attention = torch.cat([torch.ones(B, 1), MASK], dim=1).long()
    theirs, _ = core.compute_gdpo_outcome_advantage(
        on_the_last_token(),
        MASK,
        INDEX,
        config=config,
        non_tensor_batch=columns,
        batch={"prompts": torch.ones(B, 1), "attention_mask": attention},
    )
    found = estimators.part_normalized(
        REWARDS,
        GROUPS,
        parts=parts,
        part_weights=torch.tensor([weights]).expand(B, 2),
        epsilon=1e-6,
    )
    once = torch.zeros(N, dtype=torch.int64)
    of_tokens = advantages.batch_normalized(found.repeat_interleave(LENGTHS), once)
    torch.testing.assert_close(of_tokens, flat(theirs).float(), rtol=1e-4, atol=1e-5)
    assert (found - theirs[:, 0]).abs().max() > 1e-2


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_of_rewards_to_go(gamma):
    """With the KL in the reward of every token."""
    rewards = on_the_last_token() - 0.3 * (padded(OLD) - padded(REF)) * MASK
    config = types.SimpleNamespace(gamma=gamma)
    theirs, returns = core.compute_reinforce_plus_plus_outcome_advantage(
        rewards, MASK, config=config
    )
    found = estimators.reward_to_go(flat(rewards), OFFSETS, gamma=gamma)
    close(found, flat(returns))
    close(advantages.whitened(found), flat(theirs))


def test_the_optimal_token_baseline():
    """Rewards on every token."""
    rewards = noise(10)
    collisions = (2 * OLD).exp() + 0.1 * noise(16).abs()
    given = padded(rewards) * MASK, MASK, INDEX, padded(OLD), padded(collisions)
    theirs, returns = core.compute_optimal_token_baseline_advantage(*given, handle_zero_tail=False)
    found = estimators.optimal_token_baseline(rewards, OFFSETS, GROUPS, OLD, collisions)
    close(found, flat(theirs))
    default, _ = core.compute_optimal_token_baseline_advantage(*given)
    alone = (flat(default) - flat(theirs)).abs() > 1e-6  # the longest's last tokens
    assert alone.any() and (found[alone] == 0).all()
    torch.testing.assert_close(flat(default)[alone], flat(returns)[alone])


def test_the_adaptive_coefficient_of_the_kl():
    config = Config(kl_coef=0.1, kl_target=0.5, kl_horizon=100)
    theirs = core.AdaptiveKLController(init_kl_coef=0.1, target_kl=0.5, horizon=100)
    coef = 0.1
    for kl, rollouts in ((0.5, 50), (0.55, 50), (9.0, 50), (0.45, 100), (0.0, 100)):
        theirs.update(kl, rollouts)
        coef = terms.next_kl_coef(config, coef, kl, rollouts)
        assert coef == pytest.approx(theirs.value, rel=1e-12)


# -- where the definitions differ: deployments/docs/who-does-what.md


def test_a_group_of_one_keeps_its_raw_reward_in_verl_and_is_dropped_here():
    alone, groups = INDEX.copy(), GROUPS.clone()
    alone[0], groups[0] = "g-9", 9
    rewards = on_the_last_token()
    raw = {
        "grpo": REWARDS[0] / (1 + 1e-6),
        "rloo": REWARDS[0],
        "grpo_vectorized": REWARDS[0] / (1 + 1e-6),
    }
    for estimator, expected in raw.items():
        theirs = core.get_adv_estimator_fn(estimator)(rewards, MASK, alone)[0]
        assert theirs[0, 0].item() == pytest.approx(expected.item(), rel=1e-6)
    assert core.get_adv_estimator_fn("rloo_vectorized")(rewards, MASK, alone)[0][0, 0] == 0.0
    for function in (
        advantages.group_normalized,
        advantages.leave_one_out,
        advantages.batch_normalized_baseline,
    ):
        found = function(REWARDS, groups)
        assert found[0].isnan() and not found[1:].isnan().any()


def test_over_the_batch_verl_counts_tokens_and_here_rollouts_count():
    """verl's advantages are ours of rollouts repeated once a token; √(var + 1e-8) there, std + 1e-8
    here."""
    centered = advantages.group_centered(REWARDS, GROUPS).double()
    plain, _ = core.compute_reinforce_plus_plus_outcome_advantage(
        on_the_last_token(), MASK, config=GAMMA_1
    )
    baseline, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(
        on_the_last_token(), MASK, INDEX
    )
    once = torch.zeros(N, dtype=torch.int64)
    for theirs, rewards, ours in (
        (plain, REWARDS, advantages.batch_normalized),
        (baseline, centered, advantages.batch_normalized_baseline),
    ):
        close(advantages.batch_normalized(rewards.repeat_interleave(LENGTHS), once), flat(theirs))
        assert (ours(REWARDS, GROUPS) - theirs[:, 0]).abs().max() > 1e-2


def test_completions_of_one_length_leave_only_the_count_of_tokens():
    """The unbiased std of T equal tokens a rollout is √((BT − T)/(BT − 1)) times that of the
    rollouts."""
    mask, rewards = (
        torch.ones(B, T, dtype=torch.float64),
        on_the_last_token(lengths=torch.full((B,), T)),
    )
    theirs, _ = core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=GAMMA_1)
    scale = ((B * T - T) / (B * T - 1)) ** 0.5
    close(advantages.batch_normalized(REWARDS, GROUPS), theirs[:, 0] * scale)


def test_verl_carries_gae_over_masked_tokens_which_do_not_exist_here():
    """A masked token in the middle of a rollout, with any value: as if it had never been there."""
    rewards, values, hole = noise(10), noise(11), 5  # in the third rollout
    mask = MASK.clone()
    mask[2, hole - 4] = 0.0
    rewards[hole] = 0.0
    expected, targets = core.compute_gae_advantage_return(
        padded(rewards), padded(values), mask, gamma=0.9, lam=0.95
    )
    keep = torch.arange(N) != hole
    shorter = LENGTHS - (torch.arange(B) == 2).long()
    found, returns = advantages.gae(
        rewards[keep],
        values[keep],
        Ragged.from_lengths(rewards[keep], shorter).offsets,
        gamma=0.9,
        gae_lambda=0.95,
    )
    close(returns, targets[mask.bool()])
    close(advantages.whitened(found), expected[mask.bool()])


def test_verl_has_no_value_after_a_cut():
    """`bootstrap_length` has no counterpart: with it the last step's return is not verl's."""
    rewards, values, last = noise(10), noise(11), noise(12, count=B)
    _, targets = core.compute_gae_advantage_return(
        padded(rewards), padded(values), MASK, gamma=1.0, lam=0.95
    )
    _, returns = advantages.gae(rewards, values, OFFSETS, gae_lambda=0.95, last_values=last)
    ends = OFFSETS[1:] - 1
    close(returns[ends] - last, flat(targets)[ends])
