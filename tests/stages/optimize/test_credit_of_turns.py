"""Training on saved turns: what is learned from is what was sampled, whatever stood between; what a
reader that ignores turns would do is stopped; which turn answers for which reward."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import pytest
import torch

from quiver.schemas.errors import ConfigError, NumericError, SchemaError
from quiver.stages.model.loading import load_model
from quiver.stages.optimize import rollouts as loading
from quiver.stages.optimize.critic import token_rewards
from quiver.stages.optimize.estimators import turn_leave_one_out
from quiver.stages.optimize.inputs import open_inputs
from tests import episodes
from tests.episodes import turn
from tests.stages.optimize import world


def load(store, policy, rollouts, rewards, **fields):
    config = world.config(**fields).resolved()
    inputs = open_inputs(store, policy.ref, rollouts.ref, {"rewards": rewards.ref})
    return config, loading.load(config, config.chosen_algorithm(), store, inputs)


def over_turns(row: dict, values: list[float]) -> list[float]:
    """One value of each turn, for each of its tokens."""
    lengths = [part["length"] for part in row["turns"]]
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


# -- what was sampled


@pytest.mark.parametrize("packing", ["shared", "packed", "single"])
def test_a_step_is_the_gradient_of_what_was_sampled(store, policy, packing):
    """One step of plain gradients against a loop over transformers' own passes: the saved first
    moment of AdamW is the gradient, times 1 − β."""
    made = episodes.make(store, policy, groups=3, each=3)
    config = world.config(
        algorithm="rloo", packing=packing, grad_clip=1e9, betas=(0.0, 0.999), learning_rate=1e-4
    )
    done = world.trained(store, policy, made, config)
    assert done.manifest.metrics["packing"] == packing
    assert done.manifest.metrics["audit"]["mean_gap"] < 1e-5
    model = load_model(policy, dtype=torch.float32)
    rows = made[0].table().to_pylist()
    rewards = made[1].table()["reward"].to_pylist()
    num_tokens = sum(len(row["completion_ids"]) for row in rows)
    loss = torch.zeros(())
    for number, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        group = rewards[number // 3 * 3 : number // 3 * 3 + 3]
        advantage = reward - (sum(group) - reward) / 2
        loss = loss - advantage * episodes.own_logprobs(model, row).sum() / num_tokens
    loss.backward()
    state = world.weights(done, "optimizer/state.safetensors")
    for name, parameter in model.named_parameters():
        gap = (state[f"exp_avg.{name}"] - parameter.grad).norm()
        assert gap <= 1e-5 * max(float(parameter.grad.norm()), 1e-2), name


def without_turns(row: dict) -> dict:
    """As a reader that ignores them has it."""
    return {key: value for key, value in row.items() if key not in ("turns", "end_reason")}


def trained_on(row: dict) -> dict:
    """Observations as if they had been sampled: their ids among the completion's, with the
    probability 1 that a writer without one would note."""
    ids, logprobs, turns = [], [], []
    sampled = iter(zip(row["completion_ids"], row["old_logprobs"], strict=True))
    for part in row["turns"]:
        pairs = list(itertools.islice(sampled, part["length"]))
        ids += [id for id, _ in pairs] + part["observation_ids"]
        logprobs += [logprob for _, logprob in pairs] + [0.0] * len(part["observation_ids"])
        length = part["length"] + len(part["observation_ids"])
        turns.append({**part, "length": length, "observation_ids": []})
    return {**row, "completion_ids": ids, "old_logprobs": logprobs, "turns": turns}


@pytest.mark.parametrize("plant", [without_turns, trained_on])
def test_planted_faults_are_stopped(store, policy, plant):
    model = load_model(policy, dtype=torch.float32)
    rows = episodes.sample(model, episodes.prompts(4), 4, restarts=False)
    rollouts = episodes.write(store, policy, [plant(row) for row in rows])
    rewards = world.write_rewards(store, rollouts, world.even_share)
    with pytest.raises(NumericError, match="differ from the engine's by"):
        world.trained(store, policy, (rollouts, rewards))
    assert store.numbers("tiny", "policy") == [0]


# -- credit


def test_without_rewards_of_turns_credit_is_refused(store, policy):
    rollouts, _ = episodes.make(store, policy, groups=2, each=3)
    whole = episodes.write_rewards(store, rollouts, of_turns=False)
    for credit, algorithm in (("turn", "grpo"), ("gae", "ppo")):
        config = world.config(credit=credit, algorithm=algorithm)
        with pytest.raises(ConfigError, match="needs rewards of turns") as caught:
            world.trained(store, policy, (rollouts, whole), config)
        assert caught.value.object == f"optimize.credit {credit}"
    too_few = episodes.write_rewards(store, rollouts, lambda row: episodes.even_ids(row)[:1])
    with pytest.raises(SchemaError, match="scored rollouts do not have one turn reward per turn"):
        world.trained(store, policy, (rollouts, too_few), world.config(credit="turn"))


def expected_credit(rows: list[dict], earned: list[list[float]]) -> list[list[float]]:
    """By the definition, written out: of each turn its return to go less the others' mean."""
    advantages = []
    for row, rewards in zip(rows, earned, strict=True):
        others = [
            theirs
            for peer, theirs in zip(rows, earned, strict=True)
            if peer["group_id"] == row["group_id"] and peer is not row
        ]
        of_turns = [
            sum(rewards[k:]) - fmean(sum(theirs[k:]) for theirs in others)
            for k in range(len(rewards))
        ]
        advantages.append(over_turns(row, of_turns))
    return advantages


def test_each_turn_answers_for_what_comes_with_and_after_it(store, policy):
    """Over several turns, and over rollouts without any, in one training."""
    several, rewards = episodes.make(store, policy, groups=2, each=3)
    rows = world.rows_of(policy, 2, 3)
    rows = [{**row, "rollout_id": f"s-{row['rollout_id']}"} for row in rows]
    single = world.write_rollouts(store, policy, rows)
    single_rewards = episodes.write_rewards(store, single, lambda row: [world.even_share(row)])
    refs = {
        "rollouts": [single.ref, several.ref],
        "rewards": [rewards.ref, single_rewards.ref],
    }
    made = several, rewards
    done = world.trained(store, policy, made, world.config(credit="turn"), **refs)
    expected = []
    for version, earned in ((single, single_rewards), (several, rewards)):
        rows = version.table().to_pylist()
        for row in rows:
            row.setdefault("turns", [turn(len(row["completion_ids"]))])
        expected += expected_credit(rows, earned.table()["turn_rewards"].to_pylist())
    for mine, own in zip(world.gains(store, done), expected, strict=True):
        assert mine == pytest.approx(own, abs=1e-6)
    assert done.manifest.metrics["audit"]["mean_gap"] < 1e-4


def test_what_is_not_scored_or_aborted_is_in_nobodys_baseline(store, policy):
    model = load_model(policy, dtype=torch.float32)
    rows = episodes.sample(model, episodes.prompts(2), 4)
    rows[1]["finish_reason"] = rows[1]["turns"][-1]["finish_reason"] = "abort"
    rollouts = episodes.write(store, policy, rows)
    unscored = [rows[index]["rollout_id"] for index in (0, 5, 6, 7)]
    rewards = episodes.write_rewards(
        store,
        rollouts,
        lambda row: None if row["rollout_id"] in unscored else episodes.even_ids(row),
    )
    done = world.trained(store, policy, (rollouts, rewards), world.config(credit="turn"))
    assert done.manifest.metrics["dropped"] == {"abort": 1, "not_scored": 4, "small_group": 1}
    saved = [gains for gains in world.gains(store, done) if gains is not None]
    expected = expected_credit(rows[2:4], [episodes.even_ids(row) for row in rows[2:4]])
    for mine, own in zip(saved, expected, strict=True):
        assert mine == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize(
    ("earned", "expected"),
    [
        ({"a": [1.0, 0.0], "b": [0.0, 1.0]}, [0.0, -1.0]),
        ({"a": [0.0, 2.0, 0.0], "b": [1.0, 0.0, 1.0]}, [0.0, 1.0, -1.0]),
    ],
)
def test_equal_sums_of_other_turns_are_learned_from(store, policy, earned, expected):
    """The first turn of both answers for the same, the later ones for what is left of it; though
    the advantages of a rollout may add up to nothing."""
    turns = [turn(1 + number) for number in range(len(expected))]
    rows = [episodes.row("g-0", turns, rollout_id=name) for name in earned]
    rollouts = episodes.write(store, policy, rows)
    rewards = episodes.write_rewards(store, rollouts, lambda row: earned[row["rollout_id"]])
    fields = {"credit": "turn", "drop_zero_variance": True}
    _, loaded = load(store, policy, rollouts, rewards, **fields)
    assert loaded.reasons == [None, None]
    first = over_turns(rows[0], expected)
    assert loaded.batch.advantages.tolist() == [*first, *(-gain for gain in first)]


OWN = """
from quiver.stages.optimize.algorithms import Algorithm

def advantage(rewards, offsets, groups):
    return 2 * rewards

ALGORITHM = Algorithm("own", advantage, "clipped", "token_mean",
                      {"clip_low": 0.2, "clip_high": 0.2}, advantage_of="turns")
"""


def test_an_advantage_of_turns_of_ones_own(store, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    made = episodes.make(store, policy, groups=2, each=2)
    config = world.config(algorithm="own.py:ALGORITHM", credit="turn")
    done = world.trained(store, policy, made, config)
    earned = made[1].table()["turn_rewards"].to_pylist()
    rows = made[0].table().to_pylist()
    for mine, row, rewards in zip(world.gains(store, done), rows, earned, strict=True):
        assert mine == pytest.approx(over_turns(row, [2 * reward for reward in rewards]))
    with pytest.raises(ConfigError, match="has advantages of turns: set credit = 'turn'"):
        world.trained(store, policy, made, world.config(algorithm="own.py:ALGORITHM"))


def test_gae_has_each_turns_reward_on_its_last_token(store, policy):
    made = episodes.make(store, policy, groups=2, each=3)
    config, loaded = load(store, policy, *made, algorithm="ppo", credit="gae")
    rows = made[0].table().to_pylist()
    expected = []
    for row, rewards in zip(rows, made[1].table()["turn_rewards"].to_pylist(), strict=True):
        for part, reward in zip(row["turns"], rewards, strict=True):
            expected += [0.0] * (part["length"] - 1) + [reward]
    assert token_rewards(config, loaded.batch).tolist() == pytest.approx(expected, abs=1e-6)
    longest = max(len(row["completion_ids"]) for row in rows)
    assert loaded.batch.max_completion_tokens == longest, "turns name no limit of all together"


def test_a_turn_without_a_reward_earned_nothing(store, policy):
    """Ids 10 to 12, of turns of one, two and no ids; 10 and 11, of one each."""
    rows = [
        episodes.row("g-0", [turn(1, [20]), turn(2, [21]), turn(0)]),
        episodes.row("g-1", [turn(1, [20]), turn(1)]),
    ]
    rollouts = episodes.write(store, policy, rows, max_tokens=2)
    earned = {"g-0": [None, 4.0, None], "g-1": [None, None]}
    rewards = episodes.write_rewards(store, rollouts, lambda row: earned[row["rollout_id"]])
    config, loaded = load(store, policy, rollouts, rewards, algorithm="ppo", credit="gae")
    assert [row.tolist() for row in loaded.batch.turn_rewards] == [[0.0, 4.0, 0.0], [0.0, 0.0]]
    assert token_rewards(config, loaded.batch).tolist() == [0.0, 0.0, 4.0, 0.0, 0.0]


def test_a_critic_learns_from_turns(store, policy):
    """Cut episodes are worth the critic's value of the state after their last id."""
    made = episodes.make(store, policy, groups=2, each=3)
    assert "length" in made[0].table()["finish_reason"].to_pylist()
    config = world.config(algorithm="ppo", credit="gae", bootstrap_length=True, epochs=2)
    done = world.trained(store, policy, made, config)
    assert done.manifest.metrics["audit"]["mean_gap"] < 1e-5
    assert math.isfinite(done.manifest.metrics["value_loss"])


def test_where_nothing_is_scored_it_is_said_how_episodes_ended(store, policy):
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(1), 4)
    for row in rows:
        row["end_reason"] = "max_tokens"
    rows[0]["end_reason"] = "environment_error"
    rows[0]["turns"][-1]["info"] = '{"quiver_failure": "the dice are lost"}'
    rollouts = episodes.write(store, policy, rows)
    rewards = episodes.write_rewards(store, rollouts, lambda row: None)
    with pytest.raises(NumericError) as refusal:
        load(store, policy, rollouts, rewards, credit="turn")
    ends = "ended: 3 by max_tokens, 1 by environment_error (the dice are lost)"
    assert ends in refusal.value.message
    assert refusal.value.next == "raise generate.sampling.max_tokens"


# -- by exact enumeration


REWARDS = {
    (0,): [0.3],
    (1, 0): [-0.5, 1.1],
    (1, 1, 0): [-0.5, 0.2, -2.0],
    (1, 1, 1): [-0.5, 0.2, 1.7],
}
"""All episodes of a tiny environment: at each of three turns the policy stops (0), which ends the
episode, or goes on; and the reward of each turn."""


@pytest.mark.parametrize("num_rollouts", [2, 3])
def test_the_gradient_is_unbiased(num_rollouts):
    """The mean step, over every group that there can be, is the true gradient of the expected
    reward. One parameter a state, and one that all states share."""
    theta = torch.tensor([0.2, -0.7, 0.4, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs = {
        actions: torch.nn.functional.logsigmoid(
            torch.stack([(theta[k] + theta[3]) * (2 * a - 1) for k, a in enumerate(actions)])
        )
        for actions in REWARDS
    }
    chances = {actions: logprobs[actions].sum().exp() for actions in REWARDS}
    value = sum(chances[actions] * sum(REWARDS[actions]) for actions in REWARDS)
    (true,) = torch.autograd.grad(value, theta, retain_graph=True)
    scores = {
        actions: [torch.autograd.grad(each, theta, retain_graph=True)[0] for each in row]
        for actions, row in logprobs.items()
    }
    mean = torch.zeros_like(true)
    for group in itertools.product(REWARDS, repeat=num_rollouts):
        rewards = torch.tensor(
            [r for actions in group for r in REWARDS[actions]], dtype=torch.float64
        )
        offsets = torch.tensor([0, *itertools.accumulate(map(len, group))])
        gains = turn_leave_one_out(rewards, offsets, torch.zeros(num_rollouts, dtype=torch.int64))
        of_turns = [score for actions in group for score in scores[actions]]
        step = sum(gain * score for gain, score in zip(gains, of_turns, strict=True))
        mean += math.prod(float(chances[actions]) for actions in group) * step / num_rollouts
    assert float((mean - true).abs().max()) < 1e-12
    assert float(true.abs().max()) > 0.1
