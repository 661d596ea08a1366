"""GAE, the value loss and the critic's step against float64 loops written from the formulas, and
the relations between them."""

import itertools
import math
import types

import numpy as np
import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.ragged import Ragged
from quiver.stages.optimize import advantages, critic, losses
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import resolve
from quiver.stages.optimize.optimizer import make_optimizer
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from quiver.stages.optimize.critic import ValueHead
from tests.stages.optimize import world
from tests.stages.optimize.test_seq2seq_policies import sampled
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
    for row, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        following = [*VALUES[start + 1 : end], LAST[row]]
        for t in range(start, end):
            deltas = [REWARDS[k] + gamma * following[k - start] - VALUES[k] for k in range(t, end)]
            expected = sum((gamma * lam) ** far * delta for far, delta in enumerate(deltas))
            assert found[t].item() == pytest.approx(expected, abs=1e-6)
            assert returns[t].item() == pytest.approx(expected + VALUES[t], abs=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lambda_1_it_is_the_reward_to_come_minus_the_value(gamma):
    found, returns = _gae(last=None, gamma=gamma, gae_lambda=1.0)
    for start, end in itertools.pairwise(OFFSETS):
        for t in range(start, end):
            to_come = sum(gamma ** (k - t) * REWARDS[k] for k in range(t, end))
            assert returns[t].item() == pytest.approx(to_come, abs=1e-6)
            assert found[t].item() == pytest.approx(to_come - VALUES[t], abs=1e-6)


def test_nothing_passes_from_one_rollout_to_another():
    whole, _ = _gae(gamma=0.9)
    for row, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        alone, _ = _gae(
            REWARDS[start:end], VALUES[start:end], [0, end - start], LAST[row : row + 1], gamma=0.9
        )
        assert torch.equal(alone, whole[start:end])
    order = [2, 0, 3, 1]
    rows = [np.arange(OFFSETS[i], OFFSETS[i + 1]) for i in order]
    places = np.concatenate(rows)
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    moved, _ = _gae(REWARDS[places], VALUES[places], offsets, LAST[order], gamma=0.9)
    assert torch.equal(moved, whole[places])
    other, _ = _gae(np.where(np.arange(N) < 4, 99.0, REWARDS), gamma=0.9)
    assert torch.equal(other[4:], whole[4:])


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
    taken = 0
    for t in range(N):
        free = (VALUES[t] - returns[t]) ** 2
        near = VALUES[t] if clip is None else min(max(VALUES[t], old[t] - clip), old[t] + clip)
        bounded = (near - returns[t]) ** 2
        assert found[t].item() == pytest.approx(0.5 * max(free, bounded), rel=1e-12)
        clipped = bounded > free
        taken += clipped
        assert gradient[t].item() == pytest.approx(
            0.0 if clipped else VALUES[t] - returns[t], abs=1e-12
        )
    assert bool(taken) == (clip is not None)


def test_explained_variance_is_numpys():
    values, returns = torch.tensor(VALUES), torch.tensor(REWARDS)
    halves = [
        critic.value_moments(values[part], returns[part]) for part in (slice(0, 5), slice(5, N))
    ]
    means = [float(a + b) / N for a, b in zip(*halves, strict=True)]
    assert critic.explained_variance(*means) == pytest.approx(
        1 - np.var(REWARDS - VALUES) / np.var(REWARDS), rel=1e-9
    )
    equal = [
        float(x) / 3
        for x in critic.value_moments(torch.tensor([1.0, 2.0, 3.0]), torch.full((3,), 0.3))
    ]
    assert math.isnan(critic.explained_variance(*equal))


def test_one_more_id_for_cut_rollouts_only():
    rows = Ragged(torch.tensor([5, 6, 7, 8], dtype=torch.int32), torch.tensor([0, 1, 3, 4]))
    longer, own = critic.with_next_state(
        Sequences(rows, rows, torch.ones(3)), torch.tensor([True, False, True])
    )
    assert [row.tolist() for row in longer.completions] == [[5, 0], [6, 7], [8, 0]]
    assert own.tolist() == [True, False, True, True, True, False]


def test_rewards_stand_on_the_last_token_and_the_kl_on_each():
    rows = Ragged(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([0, 1, 3]))
    old, ref = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    batch = types.SimpleNamespace(
        turn_rewards=None,
        sequences=Sequences(rows, rows, torch.ones(2)),
        old_logprobs=old,
        ref_logprobs=ref,
        rewards=torch.tensor([4.0, 8.0]),
        reward_scale=1.0,
    )
    plain = critic.token_rewards(Config(), batch)
    assert plain.tolist() == [4.0, 0.0, 8.0]
    penalised = critic.token_rewards(Config(kl_coef=0.5, kl_in_reward=True), batch)
    assert penalised.tolist() == pytest.approx([4.0 - 0.25, 0.5, 8.0])  # k1 = old − ref


def test_the_kl_in_the_reward_is_not_scaled_with_it():
    """k1 = old − ref is 0.5, −1 and 0; half of it comes off. Rewards 4 and 8 over a deviation of
    4."""
    rows = Ragged(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([0, 1, 3]))
    batch = types.SimpleNamespace(
        turn_rewards=None,
        sequences=Sequences(rows, rows, torch.ones(2)),
        old_logprobs=torch.tensor([-1.0, -2.0, -3.0]),
        ref_logprobs=torch.tensor([-1.5, -1.0, -3.0]),
        rewards=torch.tensor([4.0, 8.0]),
        reward_scale=0.25,
    )
    found = critic.token_rewards(Config(kl_coef=0.5, kl_in_reward=True), batch)
    assert found.tolist() == pytest.approx([1.0 - 0.25, 0.5, 2.0])


def test_a_head_of_another_width_is_refused():
    head = ValueHead(8)
    with pytest.raises(ConfigError, match=r"weight was saved as \[16\], the model has \[8\]"):
        restore(
            head,
            torch.optim.AdamW(head.parameters()),
            {"weight": torch.zeros(16), "bias": torch.zeros(1)},
            moments=True,
        )


def test_the_head_has_a_rate_of_its_own(policy):
    model, head = load_model(policy, dtype=torch.float32), ValueHead(32)
    groups = make_optimizer(
        Config(algorithm="ppo", learning_rate=1e-4, critic_learning_rate=3e-3), model, head
    ).param_groups
    assert groups[-1]["scale"] == pytest.approx(30.0) and groups[-1]["weight_decay"] == 0.0
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in head.parameters()}
    assert (
        make_optimizer(Config(algorithm="ppo", learning_rate=1e-4), model, head).param_groups[-1][
            "scale"
        ]
        == 1.0
    )


# -- the step


def _config(**values) -> Config:
    return Config(
        **{
            "algorithm": "ppo",
            "device": "cpu",
            "audit": {"enabled": False},
            "learning_rate": 1e-3,
            **values,
        }
    ).resolved()


@pytest.fixture(params=["llama", "t5"])
def scored(request, store):
    """(policy, rollouts, rewards), some rollouts of which were cut by length."""
    policy = make_policy(store, request.param, request.param)
    rows = sampled(store, policy, each=3).table().to_pylist()
    for index, row in enumerate(rows):
        row["finish_reason"] = "length" if index % 3 else "stop"
    rollouts = world.write_rollouts(store, policy, rows, run=request.param)
    return (
        policy,
        rollouts,
        world.write_rewards(store, rollouts, world.even_share, run=request.param),
    )


def _trainer(store, scored, config: Config) -> Trainer:
    policy, rollouts, rewards = scored
    row = resolve("ppo")
    loaded = joining.load(
        config, row, store, {"policy": policy, "rollouts": rollouts, "rewards": rewards}
    )
    made = Trainer(
        config, load_model(policy, dtype=torch.float32), loaded.batch, row, make_accelerator(config)
    )
    with torch.no_grad():
        made.policy.value_head.weight.copy_(
            torch.linspace(-0.3, 0.3, len(made.policy.value_head.weight))
        )
    made.prepare()
    with (
        torch.no_grad()
    ):  # the values have moved since they were taken, some by more than the bound
        made.policy.value_head.weight.mul_(1.4)
        made.policy.value_head.bias.add_(0.1)
    return made


def _states(model, row: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs [T] of the completion, and the T + 1 hidden states before its tokens and after the
    last."""
    ids = torch.tensor(row["completion_ids"])
    if model.config.is_encoder_decoder:
        inputs = torch.cat([torch.tensor([model.config.decoder_start_token_id]), ids])[None]
        out = model(
            input_ids=torch.tensor([row["prompt_ids"]]),
            decoder_input_ids=inputs,
            use_cache=False,
            output_hidden_states=True,
        )
        logits, hidden = out.logits[0], out.decoder_hidden_states[-1][0]
    else:
        whole = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        out = model(input_ids=whole, use_cache=False, output_hidden_states=True)
        first = len(row["prompt_ids"]) - 1
        logits, hidden = out.logits[0, first:], out.hidden_states[-1][0, first:]
    table = (logits[:-1] / row["temperature"]).log_softmax(-1)
    return table.gather(1, ids[:, None])[:, 0], hidden


@pytest.mark.parametrize(
    "changed",
    [{}, {"token_budget": 40}, {"token_budget": 1}, {"packing": "single"},
     {"bootstrap_length": True, "gamma": 0.9, "gae_lambda": 0.8}, {"value_clip": None, "value_coef": 0.7}],
)  # fmt: skip
def test_loss_and_gradient_are_those_of_the_formula(store, scored, changed):
    made = _trainer(store, scored, _config(**changed))
    config, head = made.config, made.policy.value_head
    everyone = list(range(len(made.batch.groups)))
    numbers = made.accumulate(everyone, everyone)

    model = load_model(scored[0], dtype=torch.float64)
    weight, bias = (p.detach().double().requires_grad_() for p in (head.weight, head.bias))
    before = torch.linspace(-0.3, 0.3, len(weight)).double()
    rows, found = scored[1].table().to_pylist(), []
    for row in rows:
        logprobs, hidden = _states(model, row)
        values = (hidden @ weight + bias)[:-1]
        with torch.no_grad():
            old = hidden @ before
        if row["finish_reason"] == "stop" or not config.bootstrap_length:
            old[-1] = 0.0
        gain, returns, gains = 0.0, [], []
        for t in reversed(range(len(values))):
            reward = world.even_share(row) if t == len(values) - 1 else 0.0
            delta = reward + config.gamma * float(old[t + 1]) - float(old[t])
            gain = delta + config.gamma * config.gae_lambda * gain
            gains.insert(0, gain)
            returns.insert(0, gain + float(old[t]))
        found.append(
            (
                logprobs,
                torch.tensor(row["old_logprobs"]).double(),
                values,
                old[:-1],
                gains,
                torch.tensor(returns).double(),
            )
        )
    gains = np.concatenate([each[4] for each in found])
    mean, std = gains.mean(), gains.std(ddof=1)
    policy_loss, value_loss = torch.zeros(()), torch.zeros(())
    for logprobs, old_logprobs, values, old, own, returns in found:
        advantage, ratio = (torch.tensor(own) - mean) / std, (logprobs - old_logprobs).exp()
        policy_loss = policy_loss - torch.minimum(
            ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
        ).sum() / len(gains)
        near = (
            values
            if config.value_clip is None
            else torch.minimum(torch.maximum(values, old - 0.2), old + 0.2)
        )
        value_loss = value_loss + 0.5 * torch.maximum(
            (values - returns) ** 2, (near - returns) ** 2
        ).sum() / len(gains)
    (policy_loss + config.value_coef * value_loss).backward()
    assert numbers["policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-5)
    assert numbers["value_loss"] == pytest.approx(value_loss.item(), rel=1e-5)
    assert numbers["loss"] == pytest.approx(
        numbers["policy_loss"] + config.value_coef * numbers["value_loss"]
    )
    errors = torch.cat([each[5] - each[2].detach() for each in found]).numpy()
    returns = torch.cat([each[5] for each in found]).numpy()
    assert numbers["explained_variance"] == pytest.approx(
        1 - errors.var() / returns.var(), abs=1e-4
    )
    wanted = dict(model.named_parameters())
    for name, parameter in made.model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad.float(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(head.weight.grad, weight.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.bias.grad, bias.grad.float(), rtol=1e-4, atol=1e-5)
