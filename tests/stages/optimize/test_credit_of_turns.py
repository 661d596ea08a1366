"""Training on saved turns: what is learned from is what was sampled, whatever stood between; what a
reader that ignores turns would do is stopped; which turn answers for which reward."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from quiver.schemas.errors import ConfigError, NumericError, SchemaError
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.logprobs.stage import Config as LogprobsConfig
from quiver.stages.optimize import rollouts as loading
from quiver.stages.optimize.critic import token_rewards
from quiver.stages.optimize.estimators import turn_leave_one_out
from quiver.stages.optimize.inputs import open_inputs
from tests import episodes
from tests.episodes import turn
from tests.stages.optimize import world
from tests.tiny import make_policy

score = partial(run_stage, "logprobs", in_process=True)
MODES = ["shared", "packed", "single"]


def load(store, policy, rollouts, rewards, **fields):
    config = world.config(**fields).resolved()
    refs = [version.ref for version in rollouts]
    beside = {"rewards": [version.ref for version in rewards]}
    inputs = open_inputs(store, policy.ref, refs, beside)
    return config, loading.load(config, config.row(), store, inputs)


# -- logprobs and gradients


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_logprobs_are_transformers_own(store, kind):
    policy = make_policy(store, kind=kind)
    other = make_policy(store, "other", kind=kind, seed=1)
    rollouts, _ = episodes.make(store, policy, temperature=0.8)
    model = load_model(other, dtype=torch.float32)
    with torch.no_grad():
        expected = [episodes.own_logprobs(model, row) for row in rollouts.table().to_pylist()]
    for packing in MODES:
        config = LogprobsConfig(packing=packing, device="cpu")
        refs = {"rollouts": rollouts.ref, "policy": other.ref}
        version = store.open(score(config, store, force=True, **refs))
        assert version.manifest.metrics["packing"] == packing
        for mine, own in zip(version.table()["logprobs"].to_pylist(), expected, strict=True):
            assert mine == pytest.approx(own.tolist(), abs=1e-5)


@pytest.mark.parametrize("packing", MODES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_step_is_the_gradient_of_what_was_sampled(store, kind, packing):
    """One step of plain gradients against a loop over transformers' own passes: the saved first
    moment of AdamW is the gradient, times 1 − β."""
    policy = make_policy(store, kind=kind)
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
    for row, reward in zip(rows, rewards, strict=True):
        others = [
            other
            for peer, other in zip(rows, rewards, strict=True)
            if peer["group_id"] == row["group_id"] and peer is not row
        ]
        advantage = reward - sum(others) / len(others)
        loss = loss - advantage * episodes.own_logprobs(model, row).sum() / num_tokens
    loss.backward()
    state = load_file(done.files.folder / "optimizer/state.safetensors")
    for name, parameter in model.named_parameters():
        gap = (state[f"exp_avg.{name}"] - parameter.grad).norm()
        assert gap <= 1e-5 * max(float(parameter.grad.norm()), 1e-2), name


# -- what is planted is stopped


def test_a_reader_that_ignores_turns_is_stopped_by_the_audit(store, policy):
    """The same rows without what stood between: the gap to what was sampled is far too large."""
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(4), 4)
    rows_of_one = [
        {k: v for k, v in row.items() if k not in ("turns", "end_reason")} for row in rows
    ]
    rollouts = episodes.write(store, policy, rows_of_one)
    rewards = world.write_rewards(store, rollouts, world.even_share)
    with pytest.raises(NumericError, match="differ from the engine's by"):
        world.trained(store, policy, (rollouts, rewards))
    rollouts = episodes.write(store, policy, rows)
    rewards = world.write_rewards(store, rollouts, world.even_share)
    done = world.trained(store, policy, (rollouts, rewards))
    assert done.manifest.metrics["audit"]["mean_gap"] < 1e-5
    assert done.manifest.metrics["tokens"] == sum(len(row["completion_ids"]) for row in rows)


def trained_on(rows: list[dict]) -> list[dict]:
    """Observations as if they had been sampled: their ids among the completion's, with the
    probability 1 that a writer without one would note."""
    changed = []
    for row in rows:
        ids, logprobs, turns = [], [], []
        sampled = iter(zip(row["completion_ids"], row["old_logprobs"], strict=True))
        for part in row["turns"]:
            pairs = list(itertools.islice(sampled, part["length"]))
            ids += [id for id, _ in pairs] + part["observation_ids"]
            logprobs += [logprob for _, logprob in pairs] + [0.0] * len(part["observation_ids"])
            length = part["length"] + len(part["observation_ids"])
            turns.append({**part, "length": length, "observation_ids": []})
        changed.append({**row, "completion_ids": ids, "old_logprobs": logprobs, "turns": turns})
    return changed


def left_out(rows: list[dict]) -> list[dict]:
    return [
        {**row, "turns": [{**part, "observation_ids": []} for part in row["turns"]]} for row in rows
    ]


def off_by_one(rows: list[dict]) -> list[dict]:
    """Each turn ends one id too late, so the observation stands one id further on."""
    changed = []
    for row in rows:
        turns = [dict(part) for part in row["turns"]]
        for part, following in itertools.pairwise(turns):
            if following["length"] > 1:
                part["length"] += 1
                following["length"] -= 1
        changed.append({**row, "turns": turns})
    return changed


@pytest.mark.parametrize("plant", [trained_on, left_out, off_by_one])
def test_planted_faults_are_stopped(store, policy, plant):
    model = load_model(policy, dtype=torch.float32)
    rows = episodes.sample(model, episodes.prompts(4), 4, restarts=False)
    rollouts = episodes.write(store, policy, plant(rows))
    rewards = world.write_rewards(store, rollouts, world.even_share)
    with pytest.raises(NumericError, match="differ from the engine's by"):
        world.trained(store, policy, (rollouts, rewards))
    assert store.numbers("tiny", "policy") == [0]


# -- what is refused, and what is joined


def test_an_encoder_decoder_model_is_refused(store, policy):
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(2), 2)
    t5 = make_policy(store, "t5", kind="t5")
    rollouts = episodes.write(store, t5, rows)
    with pytest.raises(ConfigError, match="several turns, and an encoder-decoder model") as caught:
        score(LogprobsConfig(), store, rollouts=rollouts.ref, policy=t5.ref)
    assert caught.value.object == str(rollouts.ref)
    rewards = episodes.write_rewards(store, rollouts)
    with pytest.raises(ConfigError, match="several turns, and an encoder-decoder model"):
        world.trained(store, t5, (rollouts, rewards))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"observation_ids": [320]}, "observation_ids holds 320, the policy knows ids below 320"),
        ({"observation_ids": [5] * 250}, "a rollout has 2.. tokens, the policy reads 256"),
        ({}, ""),
    ],
)
def test_an_observation_counts_in_what_the_model_can_read(store, policy, changed, problem):
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(2), 2)
    row = next(row for row in rows if len(row["turns"]) > 1 and not row["turns"][1]["restart_ids"])
    row["turns"][0].update(changed)
    rollouts = episodes.write(store, policy, rows)
    if not problem:
        assert score(LogprobsConfig(), store, rollouts=rollouts.ref, policy=policy.ref)
        return
    with pytest.raises(SchemaError, match=problem):
        score(LogprobsConfig(), store, rollouts=rollouts.ref, policy=policy.ref)


def test_a_history_that_was_rewritten_is_a_sequence_of_its_own(store, policy):
    """Two sequences of 200 tokens fit where 256 can be read."""
    turns = [turn(100), turn(100, restart_ids=[5] * 100)]
    row = {
        **episodes.sample(load_model(policy, dtype=torch.float32), [[7, 8]], 1)[0],
        "completion_ids": [9] * 200,
        "old_logprobs": [-1.0] * 200,
        "turns": turns,
    }
    rollouts = episodes.write(store, policy, [row])
    assert score(LogprobsConfig(), store, rollouts=rollouts.ref, policy=policy.ref)


def test_rollouts_with_and_without_turns_are_trained_on_together(store, policy):
    """Replay: the step is that of each row's own layout, whichever version it stands in."""
    several, rewards = episodes.make(store, policy, groups=2, each=3)
    single = world.make(store, policy, world.even_share, groups=2, each=3)
    rows = single[0].table().to_pylist()
    for row in rows:
        row["rollout_id"] = f"single-{row['rollout_id']}"
    single = world.write_rollouts(store, policy, rows)
    single_rewards = world.write_rewards(store, single, world.even_share)
    config = world.config()
    done = world.trained(
        store,
        policy,
        (several, rewards),
        config,
        rollouts=[several.ref, single.ref],
        rewards=[rewards.ref, single_rewards.ref],
    )
    metrics = done.manifest.metrics
    assert metrics["audit"]["mean_gap"] < 1e-5
    assert metrics["rollouts"] == 12
    reversed_ = world.trained(
        store,
        policy,
        (several, rewards),
        config,
        rollouts=[single.ref, several.ref],
        rewards=[single_rewards.ref, rewards.ref],
    )
    assert reversed_.manifest.metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    assert reversed_.manifest.metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)


# -- credit


def test_without_rewards_of_turns_credit_is_refused(store, policy):
    rollouts, _ = episodes.make(store, policy, groups=2, each=2)
    rewards = episodes.write_rewards(store, rollouts, of_turns=False)
    for credit, algorithm in (("turn", "grpo"), ("gae", "ppo")):
        config = world.config(credit=credit, algorithm=algorithm)
        with pytest.raises(ConfigError, match="needs rewards of turns") as caught:
            world.trained(store, policy, (rollouts, rewards), config)
        assert caught.value.object == f"optimize.credit {credit}"


def test_a_scored_rollout_needs_a_reward_for_each_turn(store, policy):
    rollouts, _ = episodes.make(store, policy, groups=2, each=3)

    def too_few(row: dict) -> list[float]:
        return episodes.even_ids(row)[:1]

    rewards = episodes.write_rewards(store, rollouts, too_few)
    with pytest.raises(SchemaError, match="scored rollouts have not one turn reward a turn"):
        world.trained(store, policy, (rollouts, rewards), world.config(credit="turn"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"credit": "gae"}, "'grpo' has no critic"),
        ({"credit": "turn", "algorithm": "ppo"}, "take credit = 'gae'"),
        ({"credit": "turn", "algorithm": "otb"}, "a baseline of its own"),
        ({"credit": "turn", "algorithm": "gspo"}, "the whole completion's"),
        ({"credit": "turn", "algorithm": "gmpo"}, "the whole completion's"),
        ({"credit": "turn", "advantage": "leave_one_out"}, "leave advantage out"),
        ({"credit": "turn", "advantage_epsilon": 0.1}, "would have no effect"),
        ({"credit": "turn", "kl_coef": 0.1, "kl_in_reward": True}, "the KL off the reward"),
    ],
)
def test_credit_that_would_have_no_effect_is_refused(fields, problem):
    with pytest.raises(ValueError, match=problem):
        world.config(**fields)


def test_credit_of_turns_needs_two_samples():
    assert world.config(credit="turn", algorithm="gspo", token_form=True).least_samples == 2


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
            sum(rewards[k:]) - sum(sum(theirs[k:]) for theirs in others) / len(others)
            for k in range(len(rewards))
        ]
        lengths = [part["length"] for part in row["turns"]]
        advantages.append([a for a, n in zip(of_turns, lengths, strict=True) for _ in range(n)])
    return advantages


def test_each_turn_answers_for_what_comes_with_and_after_it(store, policy):
    made = episodes.make(store, policy)
    done = world.trained(store, policy, made, world.config(credit="turn"))
    rows = made[0].table().to_pylist()
    earned = made[1].table()["turn_rewards"].to_pylist()
    saved = store.open(done.manifest.metrics["advantages"]).table()
    assert saved["rollout_id"].to_pylist() == [row["rollout_id"] for row in rows]
    for mine, own in zip(
        saved["advantage"].to_pylist(), expected_credit(rows, earned), strict=True
    ):
        assert mine == pytest.approx(own, abs=1e-6)
    again = world.trained(store, policy, made, world.config())
    assert again.ref != done.ref


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
    saved = store.open(done.manifest.metrics["advantages"]).table()["advantage"].to_pylist()
    rows = made[0].table().to_pylist()
    for mine, row, earned in zip(
        saved, rows, made[1].table()["turn_rewards"].to_pylist(), strict=True
    ):
        lengths = [part["length"] for part in row["turns"]]
        expected = [2 * r for r, n in zip(earned, lengths, strict=True) for _ in range(n)]
        assert mine == pytest.approx(expected)
    with pytest.raises(ConfigError, match="has advantages of turns: set credit = 'turn'"):
        world.trained(store, policy, made, world.config(algorithm="own.py:ALGORITHM"))


def test_of_one_turn_it_is_rloo(store, policy):
    """Rollouts without turns too, where each has its reward as that of its turn."""
    made = episodes.make(store, policy, most_turns=1)
    rollouts = world.write_rollouts(
        store,
        policy,
        [
            {k: v for k, v in row.items() if k not in ("turns", "end_reason")}
            for row in made[0].table().to_pylist()
        ],
    )
    rewards = episodes.write_rewards(store, rollouts, lambda row: [world.even_share(row)])
    losses = []
    for fields in ({"credit": "turn"}, {"advantage": "leave_one_out"}):
        for pair in (made, (rollouts, rewards)):
            done = world.trained(store, policy, pair, world.config(**fields))
            losses.append((done.manifest.metrics["loss"], done.manifest.metrics["grad_norm"]))
    assert losses == [pytest.approx(losses[0], rel=1e-4, abs=1e-6)] * 4


def test_credit_of_turns_goes_over_rollouts_without_any(store, policy):
    """Replay of both, each with rewards of its turns."""
    several, rewards = episodes.make(store, policy, groups=2, each=3)
    single, _ = world.make(store, policy, world.even_share, groups=2, each=3)
    rows = [{**row, "rollout_id": f"s-{row['rollout_id']}"} for row in single.table().to_pylist()]
    single = world.write_rollouts(store, policy, rows)
    single_rewards = episodes.write_rewards(store, single, lambda row: [world.even_share(row)])
    done = world.trained(
        store,
        policy,
        (several, rewards),
        world.config(credit="turn"),
        rollouts=[single.ref, several.ref],
        rewards=[rewards.ref, single_rewards.ref],
    )
    expected = []
    for version, earned in ((single, single_rewards), (several, rewards)):
        rows = version.table().to_pylist()
        for row in rows:
            row.setdefault("turns", [turn(len(row["completion_ids"]))])
        expected += expected_credit(rows, earned.table()["turn_rewards"].to_pylist())
    saved = store.open(done.manifest.metrics["advantages"]).table()["advantage"].to_pylist()
    for mine, own in zip(saved, expected, strict=True):
        assert mine == pytest.approx(own, abs=1e-6)
    assert done.manifest.metrics["audit"]["mean_gap"] < 1e-5


def test_what_is_not_scored_takes_no_part(store, policy):
    rollouts, _ = episodes.make(store, policy, groups=2, each=4)

    def some(row: dict) -> list[float] | None:
        if row["group_id"] == "g-000" and row["sample_index"] == 0:
            return None
        if row["group_id"] == "g-001" and row["sample_index"] > 0:
            return None
        return episodes.even_ids(row)

    rewards = episodes.write_rewards(store, rollouts, some)
    done = world.trained(store, policy, (rollouts, rewards), world.config(credit="turn"))
    assert done.manifest.metrics["dropped"] == {"not_scored": 4, "small_group": 1}
    rows = [row for row in rollouts.table().to_pylist() if some(row) and row["group_id"] == "g-000"]
    saved = store.open(done.manifest.metrics["advantages"]).table()["advantage"].to_pylist()
    expected = expected_credit(rows, [episodes.even_ids(row) for row in rows])
    for mine, own in zip([a for a in saved if a is not None], expected, strict=True):
        assert mine == pytest.approx(own, abs=1e-6)


def test_an_aborted_rollout_is_in_nobodys_baseline(store, policy):
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(1), 4)
    rows[0]["finish_reason"] = rows[0]["turns"][-1]["finish_reason"] = "abort"
    rollouts = episodes.write(store, policy, rows)
    rewards = episodes.write_rewards(store, rollouts)
    done = world.trained(store, policy, (rollouts, rewards), world.config(credit="turn"))
    saved = store.open(done.manifest.metrics["advantages"]).table()["advantage"].to_pylist()
    expected = expected_credit(rows[1:], [episodes.even_ids(row) for row in rows[1:]])
    assert saved[0] is None
    for mine, own in zip(saved[1:], expected, strict=True):
        assert mine == pytest.approx(own, abs=1e-6)


def test_equal_rewards_of_turns_leave_nothing_to_learn(store, policy):
    rollouts, _ = episodes.make(store, policy, groups=2, each=3, most_turns=1)
    rewards = episodes.write_rewards(store, rollouts, lambda row: [0.25])
    done = world.trained(store, policy, (rollouts, rewards), world.config(credit="turn"))
    assert done.manifest.metrics["all_advantages_zero"]
    assert all(
        torch.equal(mine, own)
        for mine, own in zip(
            world.weights(done).values(), world.weights(policy).values(), strict=True
        )
    )


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
    rows = episodes.sample(
        load_model(policy, dtype=torch.float32), [[7, 8, 9]], 3, most_turns=3, restarts=False
    )
    row = next(row for row in rows if len(row["turns"]) == len(expected))
    rollouts = episodes.write(store, policy, [dict(row, rollout_id=name) for name in earned])
    rewards = episodes.write_rewards(store, rollouts, lambda row: earned[row["rollout_id"]])
    config = world.config(credit="turn", drop_zero_variance=True)
    done = world.trained(store, policy, (rollouts, rewards), config)
    assert done.manifest.metrics["kept"] == 2
    saved = store.open(done.manifest.metrics["advantages"]).table()["advantage"].to_pylist()
    lengths = [part["length"] for part in row["turns"]]
    first = [a for a, n in zip(expected, lengths, strict=True) for _ in range(n)]
    assert saved == [first, [-advantage for advantage in first]]


def test_gae_has_each_turns_reward_on_its_last_token(store, policy):
    made = episodes.make(store, policy, groups=2, each=3)
    config, loaded = load(store, policy, [made[0]], [made[1]], algorithm="ppo", credit="gae")
    rows = made[0].table().to_pylist()
    expected = []
    for row, rewards in zip(rows, made[1].table()["turn_rewards"].to_pylist(), strict=True):
        for part, reward in zip(row["turns"], rewards, strict=True):
            expected += [0.0] * (part["length"] - 1) + [reward]
    assert token_rewards(config, loaded.batch).tolist() == pytest.approx(expected, abs=1e-6)
    _, whole = load(store, policy, [made[0]], [made[1]], algorithm="ppo")
    on_last = token_rewards(config, whole.batch)
    assert on_last[whole.batch.sequences.completions.offsets[1:] - 1].tolist() == pytest.approx(
        made[1].table()["reward"].to_pylist()
    )
    assert int((on_last != 0).sum()) <= len(rows)


def test_a_turn_without_a_reward_earned_nothing(store, policy):
    """Ids 10 to 12, of turns of one, two and no ids; 10 and 11, of one each."""
    rows = [
        episodes.row("g-0", [turn(1, [20]), turn(2, [21]), turn(0)]),
        episodes.row("g-1", [turn(1, [20]), turn(1)]),
    ]
    rollouts = episodes.write(store, policy, rows)
    earned = {"g-0": [None, 4.0, None], "g-1": [None, None]}
    rewards = episodes.write_rewards(store, rollouts, lambda row: earned[row["rollout_id"]])
    config, loaded = load(store, policy, [rollouts], [rewards], algorithm="ppo", credit="gae")
    assert [row.tolist() for row in loaded.batch.turn_rewards] == [[0.0, 4.0, 0.0], [0.0, 0.0]]
    assert token_rewards(config, loaded.batch).tolist() == [0.0, 0.0, 4.0, 0.0, 0.0]


@pytest.mark.parametrize("critic", ["trunk", "model"])
def test_a_critic_learns_from_turns(store, policy, critic):
    """Cut episodes are worth the critic's value of the state after their last id."""
    made = episodes.make(store, policy, groups=2, each=3)
    assert "length" in made[0].table()["finish_reason"].to_pylist()
    config = world.config(
        algorithm="ppo", credit="gae", critic=critic, bootstrap_length=True, epochs=2
    )
    done = world.trained(store, policy, made, config)
    assert done.manifest.metrics["audit"]["mean_gap"] < 1e-5
    assert math.isfinite(done.manifest.metrics["value_loss"])


def test_a_constant_divisor_is_what_all_turns_were_allowed(store, policy):
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(2), 3)
    longest = max(len(row["completion_ids"]) for row in rows)
    rollouts = episodes.write(store, policy, rows, max_tokens=2)
    rewards = episodes.write_rewards(store, rollouts)
    _, loaded = load(store, policy, [rollouts], [rewards])
    assert loaded.batch.max_completion_tokens == longest


# -- by exact enumeration


def tree(theta: torch.Tensor) -> list[tuple[list[int], list[float], torch.Tensor]]:
    """All episodes of a tiny environment: their actions, the reward of each turn, and the logprob
    of each action [turns], with gradient. One parameter a state, and one that all states share.

    At each of three turns the policy stops or goes on; stopping ends the episode.
    """
    rewards = {
        (0,): [0.3],
        (1, 0): [-0.5, 1.1],
        (1, 1, 0): [-0.5, 0.2, -2.0],
        (1, 1, 1): [-0.5, 0.2, 1.7],
    }
    episodes_ = []
    for actions, earned in rewards.items():
        logprobs = []
        for turn_number, action in enumerate(actions):
            logit = theta[turn_number] + theta[3]
            logprobs.append(torch.nn.functional.logsigmoid(logit if action else -logit))
        episodes_.append((list(actions), earned, torch.stack(logprobs)))
    return episodes_


def gradients(
    theta: torch.Tensor, num_rollouts: int, advantage
) -> tuple[torch.Tensor, torch.Tensor]:
    """The true gradient of the expected reward, and what a step over groups of `num_rollouts` has
    in the mean over every group that there can be."""
    outcomes = tree(theta)
    value = sum(logprobs.sum().exp() * sum(earned) for _, earned, logprobs in outcomes)
    (true,) = torch.autograd.grad(value, theta, retain_graph=True)
    scores = [
        [torch.autograd.grad(logprob, theta, retain_graph=True)[0] for logprob in logprobs]
        for _, _, logprobs in outcomes
    ]
    probabilities = [float(logprobs.detach().sum().exp()) for _, _, logprobs in outcomes]
    mean = torch.zeros_like(true)
    for group in itertools.product(range(len(outcomes)), repeat=num_rollouts):
        rewards = torch.tensor(
            [reward for number in group for reward in outcomes[number][1]], dtype=torch.float64
        )
        counts = torch.tensor([len(outcomes[number][1]) for number in group])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        weights = advantage(rewards, offsets, torch.zeros(num_rollouts, dtype=torch.int64))
        probability = math.prod(probabilities[number] for number in group)
        of_tokens = [score for number in group for score in scores[number]]
        step = sum(w * score for w, score in zip(weights, of_tokens, strict=True)) / num_rollouts
        mean = mean + probability * step
    return true, mean


def means_of_those_that_came_so_far(rewards, offsets, groups):
    """As MT-GRPO has it: a turn against the mean of all in the group that have this turn."""
    to_go = [
        [float(rewards[i:end].sum()) for i in range(int(start), int(end))]
        for start, end in itertools.pairwise(offsets.tolist())
    ]
    advantages = []
    for mine in to_go:
        for k, value in enumerate(mine):
            there = [theirs[k] for theirs in to_go if len(theirs) > k]
            advantages.append(value - sum(there) / len(there))
    return torch.tensor(advantages, dtype=torch.float64)


THETA = torch.tensor([0.2, -0.7, 0.4, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("num_rollouts", [2, 3, 4])
def test_the_gradient_is_unbiased(num_rollouts):
    theta = THETA.clone().requires_grad_()
    true, mean = gradients(theta, num_rollouts, turn_leave_one_out)
    assert float((mean - true).abs().max()) < 1e-12
    assert float(true.abs().max()) > 0.1


def test_means_of_those_that_came_so_far_point_elsewhere():
    """All states share one parameter, and the mean step on it goes the wrong way."""
    theta = torch.tensor([1.8, 0.2, -0.4, 0.0], dtype=torch.float64, requires_grad=True)
    true, mean = gradients(theta, 2, means_of_those_that_came_so_far)
    assert float(mean[3] / true[3]) == pytest.approx(-0.974, abs=1e-3)
    assert float(true[3]) > 0.05
    _, mean = gradients(theta, 2, turn_leave_one_out)
    assert float((mean - true).abs().max()) < 1e-12


def test_where_nothing_is_scored_it_is_said_how_episodes_ended(store, policy):
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(1), 4)
    for row in rows:
        row["end_reason"] = "max_tokens"
    rows[0]["end_reason"] = "environment_error"
    rows[0]["turns"][-1]["info"] = '{"quiver_failure": "the dice are lost"}'
    rollouts = episodes.write(store, policy, rows)
    rewards = episodes.write_rewards(store, rollouts, lambda row: None)
    with pytest.raises(NumericError) as refusal:
        world.trained(store, policy, (rollouts, rewards), world.config(credit="turn"))
    told = "ended: 3 by max_tokens, 1 by environment_error (the dice are lost)"
    assert told in refusal.value.message
    assert refusal.value.next == "raise generate.sampling.max_tokens"
