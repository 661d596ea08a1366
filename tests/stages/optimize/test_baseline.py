"""The greedy baseline of remax: found by the prompts and the policy that it is of, joined by
group_id, never trained on."""

from functools import partial

import pytest

from quiver.schemas.errors import ConfigError, LineageError, NumericError
from quiver.stages.optimize.checks import Sampled, baselines
from tests.stages.optimize import world
from tests.writing import run_here

run = partial(run_here, "optimize")


def _refs(policy, made, greedy) -> dict:
    return {
        "policy": policy.ref,
        "rollouts": made[0].ref,
        "rewards": made[1].ref,
        "baseline_rollouts": greedy["baseline"].ref,
        "baseline_rewards": greedy["baseline_rewards"].ref,
    }


def _advantages(store, ref) -> list[dict]:
    return store.open(store.open(ref).manifest.metrics["advantages"]).table().to_pylist()


def test_each_reward_is_less_that_of_the_greedy_answer_to_its_prompt(store, policy):
    """In the reverse order of the prompts: nothing goes by position. One greedy answer is not
    scored: its rollouts are dropped, and say why."""
    made = world.make(store, policy, world.even_share)

    def score(row):
        group = int(row["group_id"][2:])
        return None if group == 2 else group / 10

    greedy = world.write_greedy(store, made[0], policy, score)
    ref = run(world.config(algorithm="remax"), store, **_refs(policy, made, greedy))
    rewards = {row["rollout_id"]: row["reward"] for row in made[1].table().to_pylist()}
    for row in _advantages(store, ref):
        group = int(row["rollout_id"][2:5])
        if group == 2:
            assert row["drop_reason"] == "no_baseline" and row["advantage"] is None
        else:
            expected = rewards[row["rollout_id"]] - group / 10
            assert row["advantage"] == pytest.approx(expected, abs=1e-6)
    inputs = {entry.role: str(entry.ref) for entry in store.open(ref).manifest.inputs}
    assert inputs["baseline"] == str(greedy["baseline"].ref)
    assert inputs["baseline_rewards"] == str(greedy["baseline_rewards"].ref)
    updates = store.open(store.open(ref).manifest.metrics["updates"]).table().to_pylist()
    assert updates[0]["rollouts"] == 12  # of 4 groups of 4, and no greedy answer


def test_rewards_of_greedy_answers_are_joined_by_id(store, policy):
    """They stand in another order than the answers."""
    made = world.make(store, policy, world.even_share, groups=3, each=1)
    greedy = world.write_greedy(store, made[0], policy, lambda row: None)
    values = {"greedy-g-001": 0.5, "greedy-g-000": 0.25, "greedy-g-002": 0.75}
    answers = {row["rollout_id"]: row for row in greedy["baseline"].table().to_pylist()}
    assert [*answers] == ["greedy-g-002", "greedy-g-001", "greedy-g-000"]
    rows = [
        {
            "rollout_id": name,
            "group_id": answers[name]["group_id"],
            "reward": value,
            "parts": {"f": value},
        }
        for name, value in values.items()
    ]
    rewards = world.write_rewards(store, greedy["baseline"], rows, "tiny.greedy")
    version = Sampled(
        {"rollouts": made[0], "baseline": greedy["baseline"], "baseline_rewards": rewards}
    )
    assert version.table["group_id"].to_pylist() == ["g-000", "g-001", "g-002"]
    assert baselines(version).to_pylist() == [0.25, 0.5, 0.75]


def test_single_rollouts_of_a_prompt_are_enough(store, policy):
    made = world.make(store, policy, world.even_share, groups=6, each=1)
    greedy = world.write_greedy(store, made[0], policy, lambda row: 0.5)
    ref = run(world.config(algorithm="remax"), store, **_refs(policy, made, greedy))
    assert store.open(ref).manifest.metrics["kept"] == 6


def test_where_no_greedy_answer_is_scored_it_is_told(store, policy):
    """It is not told that a prompt wants two rollouts: with a baseline one is enough."""
    made = world.make(store, policy, world.even_share, groups=6, each=1)
    greedy = world.write_greedy(store, made[0], policy, lambda row: None)
    with pytest.raises(NumericError, match="a baseline its own reward"):
        run(world.config(algorithm="remax"), store, **_refs(policy, made, greedy))


def test_replayed_rollouts_each_have_their_own_baseline(store, policy):
    """Both of one policy and the same prompts share one; of another policy it is another."""
    made = world.make(store, policy, world.even_share, groups=2)
    rows = [
        {**row, "rollout_id": f"again-{row['rollout_id']}"} for row in made[0].table().to_pylist()
    ]
    again = world.write_rollouts(store, policy, rows)
    rewards = world.write_rewards(store, again, world.even_share)
    greedy = world.write_greedy(store, made[0], policy, lambda row: 0.25)
    refs = _refs(policy, made, greedy)
    refs |= {"rollouts": [made[0].ref, again.ref], "rewards": [rewards.ref, made[1].ref]}
    ref = run(world.config(algorithm="remax"), store, **refs)
    roles = [entry.role for entry in store.open(ref).manifest.inputs]
    assert {"baseline", "baseline.2", "baseline_rewards.2"} <= set(roles)
    assert all(row["kept"] for row in _advantages(store, ref))
    trained = world.trained(store, policy, made)
    other = world.write_greedy(store, made[0], trained, lambda row: 0.25)
    with pytest.raises(LineageError, match="no greedy answers of the policy that sampled"):
        run(world.config(algorithm="remax"), store, **_refs(policy, made, other))


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({"temperature": 1.0}, "sampled at temperature 1, expected 0"),
        ({"prompt_ids": [5, 6, 7]}, "other prompt_ids under the same group_id"),
        ({"group_id": "g-000"}, "several answers to one prompt"),
    ],
)
def test_what_is_no_baseline_of_these_rollouts_is_refused(store, policy, changed, problem):
    made = world.make(store, policy, world.even_share)
    greedy = world.write_greedy(store, made[0], policy, world.even_share, **changed)
    with pytest.raises(LineageError, match=problem):
        run(world.config(algorithm="remax"), store, **_refs(policy, made, greedy))


def test_a_prompt_without_greedy_answer_is_refused(store, policy):
    made = world.make(store, policy, world.even_share)
    greedy = world.write_greedy(store, made[0], policy, world.even_share)
    rows = greedy["baseline"].table().to_pylist()[1:]
    fewer = world.write_rollouts(store, policy, rows, "fewer")
    rewards = world.write_rewards(store, fewer, world.even_share, "fewer")
    greedy = {"baseline": fewer, "baseline_rewards": rewards}
    with pytest.raises(LineageError, match="no answer to the prompts of 4 rollouts"):
        run(world.config(algorithm="remax"), store, **_refs(policy, made, greedy))


def test_the_baseline_is_asked_for_and_refused_by_name(store, policy):
    made = world.make(store, policy, world.even_share)
    greedy = world.write_greedy(store, made[0], policy, world.even_share)
    refs = _refs(policy, made, greedy)
    with pytest.raises(ConfigError, match="remax: needs greedy answers"):
        plain = {role: refs[role] for role in ("policy", "rollouts", "rewards")}
        run(world.config(algorithm="remax"), store, **plain)
    with pytest.raises(ConfigError, match="grpo: makes no use of greedy answers"):
        run(world.config(), store, **refs)
    with pytest.raises(ConfigError, match="and no greedy answers"):
        run(world.config(algorithm="remax"), store, **{**refs, "baseline_rollouts": None})
    with pytest.raises(LineageError, match="made of tiny/rollouts"):
        run(
            world.config(algorithm="remax"),
            store,
            **{**refs, "baseline_rewards": made[1].ref},
        )


def test_an_own_advantage_sees_lengths_and_baselines(store, policy, tmp_path):
    (tmp_path / "own_algo.py").write_text(
        "from quiver.stages.optimize.algorithms import Algorithm\n"
        "def mine(rewards, groups, *, lengths, baselines):\n"
        "    return (lengths - baselines).float()\n"
        "MINE = Algorithm('mine', mine, 'reinforce', 'token_mean', baseline=True)\n"
    )
    made = world.make(store, policy, world.even_share)
    greedy = world.write_greedy(store, made[0], policy, lambda row: 2.0)
    config = world.config(algorithm=f"{tmp_path}/own_algo.py:MINE")
    ref = run(config, store, **_refs(policy, made, greedy))
    lengths = [len(row["completion_ids"]) for row in made[0].table().to_pylist()]
    assert [row["advantage"] for row in _advantages(store, ref)] == [n - 2.0 for n in lengths]
    with pytest.raises(ConfigError, match="needs greedy answers"):
        plain = {"policy": policy.ref, "rollouts": made[0].ref, "rewards": made[1].ref}
        run(config, store, **plain)
