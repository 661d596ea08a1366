"""GAE, the value loss and the critic's step against float64 loops written from the formulas, and
the relations between them."""

import itertools
import math
import types

import numpy as np
import pytest
import torch

from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.loading import load_model
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize import advantages, critic, losses
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.tiny import make_policy

RNG = np.random.default_rng(11)
LENGTHS = [3, 1, 6, 2]
OFFSETS = [0, 3, 4, 10, 12]
N = sum(LENGTHS)
REWARDS, VALUES, LAST = RNG.normal(0, 1, N), RNG.normal(0, 1, N), np.array([0.0, 0.7, -0.4, 0.0])


def _gae(rewards=REWARDS, values=VALUES, offsets=OFFSETS, last=LAST, **options):
    columns = (torch.tensor(np.asarray(x), dtype=torch.float32) for x in (rewards, values))
    last = None if last is None else torch.tensor(last, dtype=torch.float32)
    return advantages.gae(*columns, torch.tensor(offsets), last_values=last, **options)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.5, 0.0])
def test_gae_is_the_sum_of_discounted_differences(gamma, lam):
    found, returns = _gae(gamma=gamma, gae_lambda=lam)
    expected = []
    for row, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        following = [*VALUES[start + 1 : end], LAST[row]]
        deltas = REWARDS[start:end] + gamma * np.array(following) - VALUES[start:end]
        for t in range(len(deltas)):
            expected.append(sum((gamma * lam) ** far * each for far, each in enumerate(deltas[t:])))
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert returns.tolist() == pytest.approx(expected + VALUES, abs=1e-6)


def test_gae_of_no_rollouts_and_of_empty_ones():
    found, returns = _gae([], [], [0], np.array([]))
    assert len(found) == len(returns) == 0
    found, _ = _gae([1.0, 2.0], [0.0, 0.0], [0, 0, 2, 2], np.zeros(3), gae_lambda=1.0)
    assert found.tolist() == [3.0, 2.0]


def test_gae_writes_into_nothing_that_it_is_given():
    """Also not in float64, where `.double()` makes no copy."""
    given = [torch.tensor(x, dtype=torch.float64) for x in (REWARDS, VALUES, LAST)]
    kept = [each.clone() for each in given]
    advantages.gae(given[0], given[1], torch.tensor(OFFSETS), last_values=given[2])
    assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))


def test_whitened():
    found = advantages.whitened(torch.tensor(VALUES, dtype=torch.float32))
    np.testing.assert_allclose(
        found.numpy(), (VALUES - VALUES.mean()) / VALUES.std(ddof=1), atol=1e-6
    )
    assert advantages.whitened(torch.tensor([5.0])).tolist() == [0.0]
    assert advantages.whitened(torch.full((7,), 2.0)).tolist() == [0.0] * 7


@pytest.mark.parametrize("clip", [0.2, 0.0, None])
def test_value_loss_golden(clip):
    old, returns = VALUES + RNG.normal(0, 0.4, N), RNG.normal(0, 1, N)
    now = torch.tensor(VALUES, requires_grad=True)
    found = losses.value_loss(now, torch.tensor(old), torch.tensor(returns), clip)
    (gradient,) = torch.autograd.grad(found.sum(), now)
    free = (VALUES - returns) ** 2
    near = VALUES if clip is None else np.clip(VALUES, old - clip, old + clip)
    bounded = (near - returns) ** 2
    is_clipped = bounded > free
    assert found.tolist() == pytest.approx(0.5 * np.maximum(free, bounded), rel=1e-12)
    slopes = np.where(is_clipped, 0.0, VALUES - returns)
    assert gradient.tolist() == pytest.approx(slopes, abs=1e-12)
    assert is_clipped.any() == (clip is not None)


def test_explained_variance_is_numpys():
    values, returns = torch.tensor(VALUES), torch.tensor(REWARDS)
    halves = [critic.value_sums(values[part], returns[part]) for part in (slice(0, 5), slice(5, N))]
    means = [float(a + b) / N for a, b in zip(*halves, strict=True)]
    assert critic.explained_variance(*means) == pytest.approx(
        1 - np.var(REWARDS - VALUES) / np.var(REWARDS), rel=1e-9
    )
    equal = [
        float(x) / 3
        for x in critic.value_sums(torch.tensor([1.0, 2.0, 3.0]), torch.full((3,), 0.3))
    ]
    assert math.isnan(critic.explained_variance(*equal))


def test_one_more_id_for_cut_rollouts_only():
    rows = Ragged(torch.tensor([5, 6, 7, 8], dtype=torch.int32), torch.tensor([0, 1, 3, 4]))
    longer, own = critic.with_next_state(
        Sequences(rows, rows, torch.ones(3)), torch.tensor([True, False, True])
    )
    assert [row.tolist() for row in longer.completions] == [[5, 0], [6, 7], [8, 0]]
    assert own.tolist() == [True, False, True, True, True, False]


@pytest.mark.parametrize(
    "kl_coef, scale, expected",
    [(0.0, 1.0, [4.0, 0.0, 8.0]), (0.5, 1.0, [3.75, 0.5, 8.0]), (0.5, 0.25, [0.75, 0.5, 2.0])],
)
def test_rewards_stand_on_the_last_token_and_the_kl_on_each(kl_coef, scale, expected):
    """k1 = old − ref is 0.5, −1 and 0; it is not scaled with the rewards 4 and 8."""
    rows = Ragged(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([0, 1, 3]))
    batch = types.SimpleNamespace(
        turn_rewards=None,
        sequences=Sequences(rows, rows, torch.ones(2)),
        old_logprobs=torch.tensor([-1.0, -2.0, -3.0]),
        ref_logprobs=torch.tensor([-1.5, -1.0, -3.0]),
        rewards=torch.tensor([4.0, 8.0]),
        reward_scale=scale,
    )
    config = Config(kl_coef=kl_coef, kl_in_reward=kl_coef > 0)
    assert critic.token_rewards(config, batch).tolist() == pytest.approx(expected)


# -- the step


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize(
    "fields",
    [
        {"token_budget": 40},
        {"packing": "single"},
        {"bootstrap_length": True, "gamma": 0.9, "gae_lambda": 0.8},
        {"value_clip": None, "value_coef": 0.7},
    ],
)
def test_loss_and_gradient_are_those_of_the_formula(store, kind, fields):
    """Some rollouts were cut by length. The values have moved since they were taken, some by more
    than the bound."""
    policy = make_policy(store, kind, kind)
    rows = world.by_engine(store, policy, each=3)[0].table().to_pylist()
    for index, row in enumerate(rows):
        row["finish_reason"] = "length" if index % 3 else "stop"
    made = world.scored(store, policy, rows)
    inputs = world.inputs_of(policy, made)
    config = world.config(algorithm="ppo", audit={"enabled": False}, **fields)
    trainer = world.trainer(store, inputs, config)
    head = trainer.policy.value_head
    before = torch.linspace(-0.3, 0.3, len(head.weight))
    with torch.no_grad():
        head.weight.copy_(before)
        trainer.prepare()
        head.weight.mul_(1.4)
        head.bias.add_(0.1)
    numbers = world.step(trainer)

    model = load_model(policy, dtype=torch.float64)
    weight, bias = (p.detach().double().requires_grad_() for p in (head.weight, head.bias))
    columns = []
    for row in rows:
        table, hidden = world.own_pass(model, row)
        logprobs = world.of_ids(table, row)
        old = (hidden @ before.double()).tolist()
        if row["finish_reason"] == "stop" or not config.bootstrap_length:
            old[-1] = 0.0
        gain, gains = 0.0, []
        for t in reversed(range(len(logprobs))):
            reward = world.even_share(row) if t == len(logprobs) - 1 else 0.0
            delta = reward + config.gamma * old[t + 1] - old[t]
            gain = delta + config.gamma * config.gae_lambda * gain
            gains.insert(0, gain)
        sampled, old, gains = (
            torch.tensor(numbers, dtype=torch.float64)
            for numbers in (row["old_logprobs"], old[:-1], gains)
        )
        columns.append((logprobs - sampled, (hidden @ weight + bias)[:-1], old, gains))
    log_ratios, values, old, gains = (torch.cat(column) for column in zip(*columns, strict=True))
    advantages = (gains - gains.mean()) / gains.std()
    ratio, returns = log_ratios.exp(), gains + old
    policy_loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    clip = config.value_clip
    near = values if clip is None else torch.clamp(values, old - clip, old + clip)
    value_loss = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()
    loss = policy_loss + config.value_coef * value_loss
    loss.backward()
    assert numbers["policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-5)
    assert numbers["value_loss"] == pytest.approx(value_loss.item(), rel=1e-5)
    assert numbers["loss"] == pytest.approx(loss.item(), abs=1e-5)
    explained = 1 - (returns - values).var() / returns.var()
    assert numbers["explained_variance"] == pytest.approx(explained.item(), abs=1e-4)
    expected = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].float(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(head.weight.grad, weight.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.bias.grad, bias.grad.float(), rtol=1e-4, atol=1e-5)
