"""Terms and coefficients beside the policy's loss: entropy, KL, and answers learned by heart."""

import pytest
import torch

from quiver.stages.optimize import terms
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.stages.optimize.test_batch import batch_of


def test_what_is_learned_by_heart_has_the_least_reward_or_more():
    """0.3 over the three tokens of the rewards 0.5 and 2; not of −1, and not of the last rollout,
    which is no member of the step."""
    batch = batch_of([2, 1, 3, 2, 1], [0.0] * 5, [-1.0, 0.5, 0.49, 2.0, 9.0])
    found = terms.nll_weights(Config(nll_coef=0.3, nll_reward=0.5), batch, [0, 1, 2, 3])
    assert found.tolist() == pytest.approx([0, 0, 0.1, 0, 0, 0, 0.1, 0.1, 0])
    assert terms.nll_weights(Config(), batch, [0, 1, 2, 3]) is None


def test_the_kl_is_a_mean_over_the_tokens_that_are_passed(store, policy, made):
    """Those of a group with equal rewards are not, and do not count. By k2 it is gap² / 2."""
    rollouts, _ = made
    group = rollouts.table()["group_id"][0].as_py()
    rewards = world.write_rewards(
        store, rollouts, lambda row: 1.0 if row["group_id"] == group else world.even_share(row)
    )
    below = world.sampled_logprobs(rollouts, less=0.1)
    ref = world.write_logprobs(store, rollouts, below, "ref", policy)
    inputs = {"policy": policy, "rollouts": rollouts, "rewards": rewards, "ref": ref}
    trainer = world.trainer(store, inputs, world.config(kl_estimator="k2"))
    everyone = list(range(len(trainer.batch.groups)))
    assert 0 < len(trainer.active) < len(everyone)
    assert trainer.accumulate(everyone, trainer.active)["kl"] == pytest.approx(0.005, rel=1e-3)


# -- entropy


def test_the_coefficient_follows_the_entropy_as_in_skyworks_equations():
    config = Config(entropy_target=1.0, entropy_coef_step=0.25, entropy_coef_max=0.5)
    coef = 0.0
    course = []
    for measured in (0.9, 1.0, 0.8, 1.1, 1.2, 1.3, 0.5):
        coef = terms.next_entropy_coef(config, coef, measured)
        course.append((coef, terms.entropy_bonus(config, coef, measured)))
    assert course == [
        (0.25, 0.25),
        (0.5, 0.5),
        (0.5, 0.5),  # no more than the largest
        (0.25, 0.0),  # above the target there is no bonus
        (0.0, 0.0),
        (0.0, 0.0),  # no less than 0
        (0.25, 0.25),
    ]
    assert terms.entropy_bonus(config, 0.3, None) == 0.0  # nothing has been measured


def test_without_a_target_the_entropy_coefficient_stays():
    config = Config(entropy_coef=0.3)
    assert (
        terms.next_entropy_coef(config, 0.3, 5.0) == terms.entropy_bonus(config, 0.3, None) == 0.3
    )


@pytest.mark.parametrize("share, count", [(0.2, 2), (0.5, 5), (1.0, 10)])
def test_the_share_of_highest_entropy(share, count):
    entropies = torch.tensor([3.0, 1.0, 2.0, 9.0, 5.0, 4.0, 8.0, 6.0, 7.0, 0.5])
    learns = terms.uncertain(entropies, share)
    assert sorted(entropies[learns].tolist()) == sorted(entropies.tolist())[-count:]


def test_the_next_training_goes_on_with_the_entropy_coefficient_of_the_last(store, policy, train):
    """The tiny policy's entropy is 5.4 nats: below a target of 6 the coefficient rises a step."""
    config = world.config(
        entropy_target=6.0, entropy_coef_step=0.01, epochs=2, max_staleness=1, learning_rate=1e-6
    )
    first = train(config)
    assert first.manifest.metrics["entropy_coef"] == pytest.approx(0.02)
    second = train(config, start=first)
    assert second.manifest.metrics["entropy_coef"] == pytest.approx(0.04)
    steps = world.updates(store, second)
    for row, coef in zip(steps, (0.02, 0.03), strict=True):
        # token weights of grpo: each rollout's mean, over all rollouts
        assert row["policy_loss"] - row["loss"] == pytest.approx(coef * row["entropy"], rel=0.02)


def test_the_coefficient_is_fed_by_the_entropy_of_the_step(store, train):
    """5.4 nats are above a target of 5, as no other number of the step is: it falls, and there is
    no bonus."""
    config = world.config(
        entropy_coef=0.03, entropy_target=5.0, entropy_coef_step=0.01, epochs=2, learning_rate=1e-6
    )
    done = train(config)
    assert done.manifest.metrics["entropy_coef"] == pytest.approx(0.01)
    steps = world.updates(store, done)
    assert [row["entropy"] for row in steps] == pytest.approx([5.4, 5.4], abs=0.1)
    assert [row["loss"] for row in steps] == [row["policy_loss"] for row in steps]


# -- KL to the reference


def test_the_coefficient_follows_the_kl_as_in_zieglers_equation():
    """The error is clipped to ±0.2, and weighed by the step's rollouts over the horizon."""
    config = Config(kl_coef=0.1, kl_target=0.5, kl_horizon=100)
    for kl, rollouts, factor in (
        (0.5, 50, 1.0), (0.55, 50, 1.05), (9.0, 50, 1.1), (0.45, 100, 0.9), (0.0, 100, 0.8)
    ):  # fmt: skip
        assert terms.next_kl_coef(config, 0.2, kl, rollouts) == pytest.approx(0.2 * factor)


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (9.0, 1.2)])
@pytest.mark.parametrize("rollouts", [100, 101, 600, 100_000])
def test_a_step_of_more_rollouts_than_the_horizon_moves_the_coefficient_by_a_fifth(
    kl, factor, rollouts
):
    """Else it would be below 0 after a step of more than five horizons."""
    config = Config(kl_coef=0.1, kl_target=0.5, kl_horizon=100)
    assert terms.next_kl_coef(config, 0.1, kl, rollouts) == pytest.approx(0.1 * factor)


def test_without_a_target_the_kl_coefficient_stays():
    assert terms.next_kl_coef(Config(kl_coef=0.1), 0.1, 9.0, 50) == 0.1


@pytest.fixture
def ref(store, policy, made):
    """Of a reference that is 0.3 nats off on every token."""
    off = world.sampled_logprobs(made[0], less=0.3)
    return world.write_logprobs(store, made[0], off, "ref", policy).ref


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum"])
def test_every_step_and_the_next_training_go_on_with_the_kl_coefficient(
    store, train, ref, aggregation
):
    """The KL is 0.3 nats per token (k1), however the tokens are weighed; of 16 rollouts, over a
    horizon of 16, the coefficient moves by the whole error."""
    config = world.config(
        kl_coef=0.1, kl_estimator="k1", kl_target=0.27, kl_horizon=16, epochs=2,
        max_staleness=1, learning_rate=1e-9, aggregation=aggregation,
    )  # fmt: skip
    error = 0.3 / 0.27 - 1
    first = train(config, ref_logprobs=ref)
    assert first.manifest.metrics["kl_coef"] == pytest.approx(0.1 * (1 + error) ** 2, rel=1e-4)
    second = train(config, start=first, ref_logprobs=ref)
    assert second.manifest.metrics["kl_coef"] == pytest.approx(0.1 * (1 + error) ** 4, rel=1e-4)
    steps = world.updates(store, second)
    for row, power in zip(steps, (2, 3), strict=True):
        coef = (row["loss"] - row["policy_loss"]) / row["kl_loss"]
        assert coef == pytest.approx(0.1 * (1 + error) ** power, rel=1e-3)


def test_in_the_reward_a_training_has_the_coefficient_that_the_last_one_ended_with(
    store, policy, made, ref
):
    config = world.config(
        algorithm="rloo", kl_coef=0.1, kl_in_reward=True, kl_estimator="k1", kl_target=0.2,
        kl_horizon=16, max_staleness=1, learning_rate=1e-9,
    )  # fmt: skip
    coef = 0.1
    for _ in range(2):
        policy = world.trained(store, policy, made, config, ref_logprobs=ref)
        lengths = [len(row["completion_ids"]) for row in made[0].table().to_pylist()]
        rewards = [
            reward - coef * 0.3 * length
            for reward, length in zip(made[1].table()["reward"].to_pylist(), lengths, strict=True)
        ]
        expected = [
            reward - (sum(rewards[i // 4 * 4 : i // 4 * 4 + 4]) - reward) / 3
            for i, reward in enumerate(rewards)
        ]
        assert world.gains(store, policy) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        coef *= 1.2  # the error is clipped
        assert policy.manifest.metrics["kl_coef"] == pytest.approx(coef, rel=1e-5)


@pytest.mark.parametrize(
    ("coef", "fields"),
    [
        ("kl_coef", {"kl_target": 0.27, "kl_horizon": 16, "kl_estimator": "k1"}),
        ("entropy_coef", {"entropy_target": 6.0}),
    ],
)
def test_another_start_value_has_no_effect_on_a_later_policy_and_that_is_said(
    policy, train, ref, caplog, coef, fields
):
    caplog.set_level("INFO", "quiver.stages.optimize")
    given = {"max_staleness": 1, "learning_rate": 1e-9, **fields}

    def said(start, value):
        caplog.clear()
        config = world.config(**given, **{coef: value})
        done = train(config, start=start, ref_logprobs=ref)
        lines = [
            (r.levelname, r.message) for r in caplog.records if f"optimize.{coef}" in r.message
        ]
        return done, lines

    first, lines = said(policy, 0.1)
    assert lines == [("INFO", f"optimize.{coef} starts at 0.1")]
    left = first.manifest.metrics[coef]
    started = ("INFO", f"optimize.{coef} starts at {left:g}")
    again, lines = said(first, 0.1)
    assert lines == [started]
    changed, lines = said(first, 0.3)
    assert lines[0] == started and [level for level, _ in lines] == ["INFO", "WARNING"]
    assert lines[1][1].startswith(f"optimize.{coef} = 0.3 has no effect: ")
    assert f"goes on with {left:g}, where {first.ref} left it" in lines[1][1]
    assert world.are_equal(world.weights(again), world.weights(changed))
