"""Relations of every algorithm, a user's own among them: how the work is cut, what is masked."""

import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from quiver.stages.core.store import Store
from quiver.stages.optimize import losses
from quiver.stages.optimize.algorithms import ALGORITHMS
from quiver.stages.optimize.trainer import Trainer
from tests.stages.optimize import world
from tests.tiny import make_policy

OWN = """
from quiver.stages.optimize.algorithms import Algorithm
from quiver.stages.optimize.losses import log_ratio

def capped(tokens, *, cap):
    ratio = log_ratio(tokens.logprobs, tokens.anchor).exp()
    return -ratio.clamp(max=cap) * tokens.advantages, ratio > cap

def rooted(lengths, max_completion_tokens):
    weights = lengths.double().rsqrt()
    return (weights / weights.sum() / lengths).repeat_interleave(lengths)

MINE = Algorithm("mine", "leave_one_out", capped, rooted, {"cap": 1.3})
"""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """By kind of model, each made once: a tiny policy, its rollouts of 1 to 9 tokens, rewards,
    reference and proximal logprobs a little off; and the path of a user's algorithm."""
    return cache(lambda kind: make_scene(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(params=["llama"])
def scene(request, scenes):
    return scenes(request.param)


def make_scene(folder, kind: str) -> SimpleNamespace:
    (folder / "own.py").write_text(OWN)
    store = Store(folder / "store")
    policy = make_policy(store, kind, kind)
    rows = world.by_engine(store, policy, groups=3, each=3, temperature=1.0)[0].table().to_pylist()
    for index, row in enumerate(rows):  # as if they had ended earlier
        for name in ("completion_ids", "old_logprobs"):
            row[name] = row[name][: index + 1]
    made = SimpleNamespace(store=store, policy=policy, rows=rows, own=f"{folder}/own.py:MINE")
    made.inputs = inputs_of(made)
    return made


def inputs_of(scene, rows=None, score=world.even_share) -> dict:
    """The versions of the scene's rollouts, or of other `rows`, by role."""
    rows = rows or scene.rows
    rollouts, rewards = world.scored(scene.store, scene.policy, rows, score)
    inputs = {"policy": scene.policy, "rollouts": rollouts, "rewards": rewards}
    for role in ("ref", "prox"):
        off = []
        for row in rows:
            numbers = random.Random(role + row["rollout_id"])
            off.append([min(old + numbers.gauss(0, 0.2), 0.0) for old in row["old_logprobs"]])
        inputs[role] = world.write_logprobs(scene.store, rollouts, off, role, scene.policy)
    return inputs


def trainer(scene, algorithm: str, inputs=None, **fields) -> Trainer:
    """The loop before its first step, with a KL in the loss and off-policy weights."""
    fields = {
        "kl_coef": 0.1,
        "max_completion_tokens": 9,
        "audit": {"enabled": False},
        "drop_zero_variance": False,
        **({"pass_k": 2} if algorithm == "pass_at_k" else {}),  # groups are of three
        **fields,
    }
    algorithm = scene.own if algorithm == "own" else algorithm
    config = world.config(algorithm=algorithm, **fields)
    made = world.trainer(scene.store, inputs or scene.inputs, config)
    if made.critic:
        with torch.no_grad():
            made.policy.value_head.weight.copy_(torch.linspace(-0.3, 0.3, 32))
    if made.algorithm.advantage_of == "tokens":
        made.prepare()
    return made


def gradient(made: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of a step over all rollouts, value head included."""
    loss = made.accumulate(list(range(len(made.batch.groups))), made.active)["loss"]
    slopes = {name: p.grad for name, p in made.policy.named_parameters() if p.grad is not None}
    return loss, {name: slope.clone() for name, slope in slopes.items()}


def same(found: tuple[float, dict], expected: tuple[float, dict]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, slope in expected[1].items():
        torch.testing.assert_close(found[1][name], slope, rtol=0, atol=1e-5)


def cut(made: Trainer, size: int, order: random.Random) -> None:
    """Passes of `size` rollouts each, in a random order."""
    whole = type(made.policy).microbatches

    def micro_batches(rows, prompts, sequences, budget):
        rows = order.sample(rows, len(rows))
        chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
        return [
            [p for micro in whole(made.policy, chunk, prompts, sequences, 1 << 30) for p in micro]
            for chunk in chunks
        ]

    made.policy.microbatches = micro_batches


@pytest.mark.parametrize(
    ("scene", "algorithm"),
    [
        *(("llama", algorithm) for algorithm in (*ALGORITHMS, "own", "prompt_mean")),
        # an algorithm sees tokens alone: these ask for what other passes give
        *(("t5", algorithm) for algorithm in ("grpo", "gspo", "otb", "ppo")),
    ],
    indirect=["scene"],
)
def test_no_cut_order_or_packing_changes_loss_or_gradient(scene, algorithm):
    if algorithm == "prompt_mean":
        made = trainer(scene, "grpo", aggregation="prompt_mean")
    else:
        made = trainer(scene, algorithm)
    order = random.Random(1)
    expected = gradient(made)
    assert max(float(slope.abs().max()) for slope in expected[1].values()) > 1e-3
    for packing, size in ("shared", 2), ("packed", 4), ("single", 1):
        made.policy.set_mode(packing)
        cut(made, size, order)
        batch = made.batch
        passes = made.policy.microbatches(range(9), batch.prompt_numbers, batch.sequences, 0)
        assert len(passes) == -(-9 // size)
        same(gradient(made), expected)


@pytest.mark.parametrize("algorithm", ["grpo", "otb", "ppo", "own"])
def test_rollouts_in_another_order_in_the_dataset_give_the_same_gradient(scene, algorithm):
    inputs = inputs_of(scene, random.Random(2).sample(scene.rows, 9))
    same(gradient(trainer(scene, algorithm, inputs)), gradient(trainer(scene, algorithm)))


def test_the_critic_may_have_a_lambda_of_its_own(scene):
    """Returns are those of the one, advantages those of the other."""
    both, low, high = (
        trainer(scene, "ppo", gae_lambda=gae_lambda, critic_lambda=critic_lambda).batch
        for gae_lambda, critic_lambda in ((0.5, 1.0), (0.5, None), (1.0, None))
    )
    assert torch.equal(both.advantages, low.advantages) and torch.equal(both.returns, high.returns)
    assert (low.returns - high.returns).abs().max() > 1e-3
    assert (low.advantages - high.advantages).abs().max() > 1e-3


# -- masked rollouts


def cut_by_length(scene) -> list[dict]:
    """The rows, the second of each group cut by length."""
    return [
        {**row, "finish_reason": "length" if index % 3 == 1 else "stop"}
        for index, row in enumerate(scene.rows)
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "bnpo", "gspo", "ppo"])
def test_a_rollout_masked_for_its_length_gives_nothing(scene, algorithm):
    """Whatever stands in it: only its reward counts, in its group's mean."""
    found = []
    for filling in (5, 77):
        rows = cut_by_length(scene)
        for row in rows[1::3]:
            row["completion_ids"] = [filling] * (filling % 7 + 1)
            row["old_logprobs"] = [-2.0] * len(row["completion_ids"])
        inputs = inputs_of(scene, rows, lambda row: float(row["sample_index"] == 1))
        made = trainer(scene, algorithm, inputs, kl_coef=0.0, on_length="mask")
        found.append(gradient(made))
    same(*found)


@pytest.mark.parametrize("algorithm", ["grpo", "bnpo", "dr_grpo", "luspo", "otb", "ppo"])
def test_a_masked_rollout_that_is_counted_makes_the_others_weigh_less(scene, algorithm):
    """Of nine rollouts three are cut: counted, they take a third off every weight that is a share
    of the rollouts; a share of the tokens stays what it is."""
    inputs = inputs_of(scene, cut_by_length(scene))
    fields = {"on_length": "mask", "entropy_coef": 0.1, "entropy_share": 0.5}
    without, counted = (
        trainer(scene, algorithm, inputs, mask_counted=is_counted, **fields)
        for is_counted in (False, True)
    )
    assert [len(made.batch.groups) for made in (without, counted)] == [6, 9]
    assert len(without.active) == len(counted.active) == 6
    share = 1 if counted.objective.aggregate is losses.token_mean else 6 / 9
    loss, slopes = gradient(without)
    same(gradient(counted), (share * loss, {name: share * s for name, s in slopes.items()}))
    rows = [
        made.accumulate(list(range(len(made.batch.groups))), made.active)
        for made in (without, counted)
    ]
    for name in ("tokens", "rollouts", "clip_fraction", "entropy", "approx_kl"):
        assert rows[0][name] == pytest.approx(rows[1][name])
