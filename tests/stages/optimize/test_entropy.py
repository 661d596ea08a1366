"""The coefficient of the entropy bonus: fixed, or steered towards a target over the policy's
life."""

from functools import partial

import pytest
import torch

from quiver.stages.optimize import terms
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.writing import run_here

run = partial(run_here, "optimize")


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


def test_without_a_target_it_stays():
    config = Config(entropy_coef=0.3)
    assert (
        terms.next_entropy_coef(config, 0.3, 5.0) == terms.entropy_bonus(config, 0.3, None) == 0.3
    )


@pytest.mark.parametrize("share, count", [(0.2, 2), (0.5, 5), (1.0, 10)])
def test_the_share_of_highest_entropy(share, count):
    entropies = torch.tensor([3.0, 1.0, 2.0, 9.0, 5.0, 4.0, 8.0, 6.0, 7.0, 0.5])
    learns = terms.uncertain(entropies, share)
    assert sorted(entropies[learns].tolist()) == sorted(entropies.tolist())[-count:]


def test_a_bonus_keeps_the_entropy_up(store, policy):
    made = world.make(store, policy, world.even_share)
    last = {}
    for coef in (0.0, 0.5):
        done = world.trained(store, policy, made, world.config(entropy_coef=coef, epochs=4))
        last[coef] = done.manifest.metrics["entropy"]
    assert last[0.5] > last[0.0] + 1e-4
    assert done.manifest.metrics["entropy_coef"] == 0.5


def test_the_next_training_goes_on_with_the_coefficient_of_the_last(store, policy):
    """The tiny policy's entropy is 5.4 nats: below a target of 6 the coefficient rises a step."""
    config = world.config(
        entropy_target=6.0, entropy_coef_step=0.01, epochs=2, max_staleness=1, learning_rate=1e-6
    )
    made = world.make(store, policy, world.even_share)
    first = world.trained(store, policy, made, config)
    assert first.manifest.metrics["entropy_coef"] == pytest.approx(0.02)
    second = world.trained(store, first, made, config)
    assert second.manifest.metrics["entropy_coef"] == pytest.approx(0.04)
    steps = store.open(second.manifest.metrics["updates"]).table().to_pylist()
    for row, coef in zip(steps, (0.02, 0.03), strict=True):
        # token weights of grpo: each rollout's mean, over all rollouts
        assert row["policy_loss"] - row["loss"] == pytest.approx(coef * row["entropy"], rel=0.02)


def test_the_coefficient_is_fed_by_the_entropy_of_the_step(store, policy):
    """5.4 nats are above a target of 5, as no other number of the step is: it falls, and there is
    no bonus."""
    config = world.config(
        entropy_coef=0.03, entropy_target=5.0, entropy_coef_step=0.01, epochs=2, learning_rate=1e-6
    )
    done = world.trained(store, policy, world.make(store, policy, world.even_share), config)
    assert done.manifest.metrics["entropy_coef"] == pytest.approx(0.01)
    steps = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert [row["entropy"] for row in steps] == pytest.approx([5.4, 5.4], abs=0.1)
    assert [row["loss"] for row in steps] == [row["policy_loss"] for row in steps]
