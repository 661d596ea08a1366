"""Relations of every algorithm, a user's own among them: how the work is cut, what is masked, where
it starts."""

import random
from types import SimpleNamespace

import pytest
import torch

from quiver.stages.common.models.loading import load_model
from quiver.stages.common.store import Store
from quiver.stages.optimize import losses
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import ALGORITHMS, resolve
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from tests.stages.optimize import world
from tests.stages.optimize.test_seq2seq_policies import sampled
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


@pytest.fixture(scope="module", params=["llama", "t5"])
def world_of(request, tmp_path_factory):
    """A tiny policy, its rollouts, rewards, reference and proximal logprobs a little off; and the
    path of a user's algorithm."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    (folder / "own.py").write_text(OWN)
    store = Store(folder / "store")
    policy = make_policy(store, kind, kind)
    rows = sampled(store, policy, groups=3, each=3, temperature=1.0).table().to_pylist()
    for index, row in enumerate(rows):  # as if they had ended earlier: 1 to 9 tokens
        row["completion_ids"], row["old_logprobs"] = (
            row[name][: index + 1] for name in ("completion_ids", "old_logprobs")
        )
    rollouts = world.write_rollouts(store, policy, rows, run=kind)
    columns = {}
    for role in ("ref", "prox"):
        numbers = random.Random(role)
        off = [
            [min(old + numbers.gauss(0, 0.2), 0.0) for old in row["old_logprobs"]]
            for row in rollouts.table().to_pylist()
        ]
        columns[role] = world.write_logprobs(store, rollouts, off, role, policy)
    rewards = world.write_rewards(store, rollouts, world.even_share, run=kind)
    inputs = {"policy": policy, "rollouts": rollouts, "rewards": rewards, **columns}
    return SimpleNamespace(
        store=store,
        kind=kind,
        policy=policy,
        rollouts=rollouts,
        inputs=inputs,
        own=f"{folder}/own.py:MINE",
    )


def trainer(world_of, algorithm: str, inputs=None, **config) -> Trainer:
    """The loop before its first step, with a KL in the loss and off-policy weights."""
    given = {
        "kl_coef": 0.1,
        "max_completion_tokens": 9,
        "audit": {"enabled": False},
        "drop_zero_variance": False,
        **({"pass_k": 2} if algorithm == "pass_at_k" else {}),  # groups are of three
        **config,
    }
    config, row = Config(algorithm=algorithm, device="cpu", **given).resolved(), resolve(algorithm)
    loaded = joining.load(config, row, world_of.store, inputs or world_of.inputs)
    made = Trainer(
        config,
        load_model(world_of.policy, dtype=torch.float32),
        loaded.batch,
        row,
        make_accelerator(config),
    )
    if made.critic:
        with torch.no_grad():
            made.policy.value_head.weight.copy_(torch.linspace(-0.3, 0.3, 32))
    if row.advantage_of == "tokens":
        made.prepare()
    return made


def gradient(made: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of a step over all rollouts, value head included."""
    everyone = list(range(len(made.batch.groups)))
    loss = made.accumulate(everyone, everyone)["loss"]
    return loss, {
        name: value.grad.clone()
        for name, value in made.policy.named_parameters()
        if value.grad is not None
    }


def same(found: tuple[float, dict], expected: tuple[float, dict]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-5)


def cut(made: Trainer, size: int | None, order: random.Random) -> None:
    """Passes of `size` rollouts each (None: of all), in a random order."""
    whole = type(made.policy).microbatches

    def micro_batches(rows, prompts, data, budget):
        rows = order.sample(rows, len(rows))
        each = size or len(rows)
        chunks = [rows[at : at + each] for at in range(0, len(rows), each)]
        return [
            [p for micro in whole(made.policy, chunk, prompts, data, 1 << 30) for p in micro]
            for chunk in chunks
        ]

    made.policy.microbatches = micro_batches


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "own"])
def test_no_cut_order_or_packing_changes_loss_or_gradient(world_of, algorithm):
    made, order = (
        trainer(world_of, world_of.own if algorithm == "own" else algorithm),
        random.Random(1),
    )
    expected = gradient(made)
    assert max(float(value.abs().max()) for value in expected[1].values()) > 1e-3
    for packing, size, passes in (
        ("shared", 1, 9),
        ("shared", 2, 5),
        ("shared", None, 1),
        ("packed", 2, 5),
        ("packed", None, 1),
        ("single", 1, 9),
    ):
        made.policy.set_mode(packing)
        cut(made, size, order)
        assert (
            len(
                made.policy.microbatches(
                    range(9), made.batch.prompt_numbers, made.batch.sequences, 0
                )
            )
            == passes
        )
        same(gradient(made), expected)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "own"])
def test_rollouts_in_another_order_in_the_dataset_give_the_same_gradient(world_of, algorithm):
    rows = random.Random(2).sample(world_of.rollouts.table().to_pylist(), 9)
    store, kind = world_of.store, world_of.kind
    rollouts = world.write_rollouts(store, world_of.policy, rows, run=kind)
    inputs = {"policy": world_of.policy, "rollouts": rollouts}
    inputs["rewards"] = world.write_rewards(store, rollouts, world.even_share, run=kind)
    for role in ("ref", "prox"):
        known = {
            row["rollout_id"]: row["logprobs"] for row in world_of.inputs[role].table().to_pylist()
        }
        inputs[role] = world.write_logprobs(
            store, rollouts, [known[row["rollout_id"]] for row in rows], role, world_of.policy
        )
    name = world_of.own if algorithm == "own" else algorithm
    same(gradient(trainer(world_of, name, inputs)), gradient(trainer(world_of, name)))


def test_prompts_count_alike_in_every_cut(world_of):
    """Two of the groups' rollouts hold 1 + 2 + 3 and 7 + 8 + 9 tokens."""
    made = trainer(world_of, "grpo", aggregation="prompt_mean")
    weights = made.objective.weights(made.batch, list(range(9)))
    of_rollouts = made.batch.sequences.completions.with_values(weights).segment_sum().view(3, 3)
    tokens = made.batch.sequences.completions.lengths.view(3, 3).double()
    torch.testing.assert_close(of_rollouts, tokens / tokens.sum(1, keepdim=True) / 3)
    step = made.objective.weights(made.batch, [0, 1, 2])
    assert float(step.sum()) == pytest.approx(1.0) and not step[int(tokens[0].sum()) :].any()
    expected = gradient(made)
    cut(made, 2, random.Random(3))
    same(gradient(made), expected)


def test_the_critic_may_have_a_lambda_of_its_own(world_of):
    """Returns are those of the one, advantages those of the other."""
    both, low, high = (
        trainer(world_of, "ppo", gae_lambda=gae_lambda, critic_lambda=critic_lambda).batch
        for gae_lambda, critic_lambda in ((0.5, 1.0), (0.5, None), (1.0, None))
    )
    assert torch.equal(both.advantages, low.advantages) and torch.equal(both.returns, high.returns)
    assert (low.returns - high.returns).abs().max() > 1e-3
    assert (low.advantages - high.advantages).abs().max() > 1e-3


# -- masked tokens


@pytest.mark.parametrize("algorithm", ["grpo", "bnpo", "gspo", "ppo"])
def test_a_rollout_masked_for_its_length_gives_nothing(world_of, algorithm):
    """Whatever stands in it: only its reward counts, in its group's mean."""
    store, kind, found = world_of.store, world_of.kind, []
    for filling in (5, 77):
        rows = world_of.rollouts.table().to_pylist()
        for index, row in enumerate(rows):
            row["finish_reason"] = "length" if index % 3 == 1 else "stop"
            if index % 3 == 1:
                row["completion_ids"] = [filling] * (filling % 7 + 1)
                row["old_logprobs"] = [-2.0] * len(row["completion_ids"])
        rollouts = world.write_rollouts(store, world_of.policy, rows, run=kind)
        rewards = world.write_rewards(
            store, rollouts, lambda row: float(row["sample_index"] == 1), run=kind
        )
        inputs = {"policy": world_of.policy, "rollouts": rollouts, "rewards": rewards}
        found.append(gradient(trainer(world_of, algorithm, inputs, kl_coef=0.0, on_length="mask")))
    same(*found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_masked_rollout_that_is_counted_makes_the_others_weigh_less(world_of, algorithm):
    """Of nine rollouts three are cut: counted, they take a third off every weight that is a share
    of the rollouts; a share of the tokens stays what it is."""
    store, kind = world_of.store, world_of.kind
    rows = world_of.rollouts.table().to_pylist()
    for index, row in enumerate(rows):
        row["finish_reason"] = "length" if index % 3 == 1 else "stop"
    rollouts = world.write_rollouts(store, world_of.policy, rows, run=kind)
    rewards = world.write_rewards(store, rollouts, world.even_share, run=kind)
    inputs = {"policy": world_of.policy, "rollouts": rollouts, "rewards": rewards}
    for role in ("ref", "prox"):
        scores = world_of.inputs[role].table().to_pylist()[::-1]
        values = [row["logprobs"] for row in scores]
        inputs[role] = world.write_logprobs(store, rollouts, values, role, world_of.policy)
    found = []
    for counted in (False, True):
        made = trainer(
            world_of,
            algorithm,
            inputs,
            on_length="mask",
            mask_counted=counted,
            entropy_coef=0.1,
            entropy_share=0.5,
        )
        members = list(range(len(made.batch.groups)))
        assert (len(members), len(made.active)) == ((9, 6) if counted else (6, 6))
        numbers = made.accumulate(members, made.active)
        slopes = {
            name: value.grad.clone()
            for name, value in made.policy.named_parameters()
            if value.grad is not None
        }
        found.append((numbers, slopes))
    (without, slopes), (with_them, fewer) = found
    share = 1 if made.objective.aggregate is losses.token_mean else 6 / 9
    same(
        (with_them["loss"], fewer),
        (share * without["loss"], {n: share * s for n, s in slopes.items()}),
    )
    for name in ("tokens", "rollouts", "clip_fraction", "entropy", "approx_kl"):
        assert with_them[name] == pytest.approx(without[name])


def test_a_token_that_the_correction_masks_has_no_gradient():
    now = torch.tensor([-1.0, -2.0, -3.0, -1.5], requires_grad=True)
    prox, old = torch.tensor([-1.0, -2.0, -3.0, -1.5]), torch.tensor([-1.1, -4.0, -3.0, -0.1])
    offsets = torch.tensor([0, 2, 4])
    costs, _ = losses.clipped(
        losses.Tokens(now, prox, torch.ones(4), offsets), clip_low=0.2, clip_high=0.2
    )
    weights = losses.correction(prox, old, offsets, mode="mask", level="token", low=0.5, high=2.0)
    (slope,) = torch.autograd.grad((costs * weights).sum(), now)
    assert (slope != 0).tolist() == [True, False, True, False]


# -- where it starts


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "ppo"])
def test_the_first_step_is_on_policy_and_old_logprobs_stay_what_they_were(world_of, algorithm):
    """Three mini-batches, two epochs: ratio 1 at the first step; at the others it is against what
    the engine saved, still."""
    inputs = {role: world_of.inputs[role] for role in ("policy", "rollouts", "rewards")}
    made = trainer(
        world_of, algorithm, inputs, kl_coef=0.0, minibatches=3, epochs=2, learning_rate=3e-3
    )
    made.train()
    steps = made.updates
    assert [(row["epoch"], row["minibatch"]) for row in steps] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert steps[0]["ratio_max"] == pytest.approx(1.0, abs=1e-4) and steps[0][
        "approx_kl"
    ] == pytest.approx(0.0, abs=1e-6)
    if algorithm != "gspo":  # its bounds are narrower than rounding
        assert steps[0]["clip_fraction"] == 0.0
    assert all(row["ratio_max"] > 1.001 and row["approx_kl"] > 1e-6 for row in steps[1:])
    saved = torch.tensor(
        [old for row in world_of.rollouts.table().to_pylist() for old in row["old_logprobs"]]
    )
    last = torch.nan_to_num(made.logprobs - saved, nan=-torch.inf)
    assert max(row["ratio_max"] for row in steps[3:]) == pytest.approx(
        float(last.max().exp()), rel=1e-5
    )
