"""The coefficient of the KL: steered towards a target over the policy's life."""

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.common.config import parse
from quiver.stages.optimize import terms
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world


def test_the_coefficient_follows_the_kl_as_in_zieglers_equation():
    """The error is clipped to ±0.2, and weighed by the step's rollouts over the horizon."""
    config = Config(kl_coef=0.1, kl_target=0.5, kl_horizon=100)
    coef = 0.1
    course = []
    for kl, rollouts in ((0.5, 50), (0.55, 50), (9.0, 50), (0.45, 100), (0.0, 100)):
        coef = terms.next_kl_coef(config, coef, kl, rollouts)
        course.append(coef)
    factors = [1.0, 1 + 0.1 * 0.5, 1 + 0.2 * 0.5, 1 - 0.1, 1 - 0.2]
    expected = 0.1
    for found, factor in zip(course, factors, strict=True):
        expected *= factor
        assert found == pytest.approx(expected)


def test_without_a_target_it_stays():
    assert terms.next_kl_coef(Config(kl_coef=0.1), 0.1, 9.0, 50) == 0.1


@pytest.fixture
def inputs(store, policy):
    """Rollouts, rewards, and a reference that is 0.3 nats off on every token."""
    made = world.make(store, policy, world.even_share)
    rows = made[0].table().to_pylist()
    off = [[old - 0.3 for old in row["old_logprobs"]] for row in rows]
    ref = world.write_logprobs(store, made[0], off, "ref", policy)
    return made, ref


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum"])
def test_every_step_and_the_next_training_go_on_with_it(store, policy, inputs, aggregation):
    """The KL is 0.3 nats a token (k1), however the tokens are weighed; of 16 rollouts, over a
    horizon of 16, the coefficient moves by the whole error."""
    made, ref = inputs
    config = world.config(
        kl_coef=0.1, kl_estimator="k1", kl_target=0.27, kl_horizon=16, epochs=2,
        max_staleness=1, learning_rate=1e-9, aggregation=aggregation,
    )  # fmt: skip
    error = 0.3 / 0.27 - 1
    first = world.trained(store, policy, made, config, ref_logprobs=ref.ref)
    assert first.manifest.metrics["kl_coef"] == pytest.approx(0.1 * (1 + error) ** 2, rel=1e-4)
    second = world.trained(store, first, made, config, ref_logprobs=ref.ref)
    assert second.manifest.metrics["kl_coef"] == pytest.approx(0.1 * (1 + error) ** 4, rel=1e-4)
    steps = store.open(second.manifest.metrics["updates"]).table().to_pylist()
    for row, power in zip(steps, (2, 3), strict=True):
        coef = (row["loss"] - row["policy_loss"]) / row["kl_loss"]
        assert coef == pytest.approx(0.1 * (1 + error) ** power, rel=1e-3)


def test_in_the_reward_a_training_has_the_coefficient_that_the_last_one_ended_with(
    store, policy, inputs
):
    made, ref = inputs
    config = world.config(
        algorithm="rloo", kl_coef=0.1, kl_in_reward=True, kl_estimator="k1", kl_target=0.2,
        kl_horizon=16, max_staleness=1, learning_rate=1e-9,
    )  # fmt: skip
    coef = 0.1
    for _ in range(2):
        policy = world.trained(store, policy, made, config, ref_logprobs=ref.ref)
        lengths = [len(row["completion_ids"]) for row in made[0].table().to_pylist()]
        rewards = [
            reward - coef * 0.3 * length
            for reward, length in zip(made[1].table()["reward"].to_pylist(), lengths, strict=True)
        ]
        expected = [
            reward - (sum(rewards[i // 4 * 4 : i // 4 * 4 + 4]) - reward) / 3
            for i, reward in enumerate(rewards)
        ]
        table = store.open(policy.manifest.metrics["advantages"]).table()
        assert table["advantage"].to_pylist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        coef *= 1.2  # the error is clipped
        assert policy.manifest.metrics["kl_coef"] == pytest.approx(coef, rel=1e-5)


def test_a_target_needs_a_beginning():
    with pytest.raises(ConfigError, match="kl_target needs kl_coef > 0"):
        parse(Config, {"kl_target": 0.1}, "optimize")
