"""Losses, gradients and advantages against TRL's own trainers, built for real around the tiny
policy.

TRL has no pure functions to call: a loss is a method of a trainer. So a real `GRPOTrainer` (and
`RLOOTrainer`) is made from a real config; saved rollouts reach it through its public
`rollout_func`, rewards through a reward function, and its own `_generate_and_score_completions` and
`compute_loss` are called. In the tests of a loss alone, logprobs that carry a gradient take the
place of its forward pass; the tests at the end leave that pass in and compare the gradient of every
weight.
"""

import importlib
import math
import warnings

import pytest
import torch

from quiver.stages.model.loading import load_model
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize import advantages, estimators, losses, terms
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import ALGORITHMS, find_algorithm
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from quiver.stages.reward.functions import overlong
from tests.oracles.peers import (
    ADVANTAGES,
    DOCUMENT,
    LENGTHS,
    MASK,
    MAX_TOKENS,
    NOW,
    OFFSETS,
    OLD,
    REF,
    REWARDS,
    B,
    N,
    T,
    agree,
    differ,
    flat,
    gradient_of,
    noise,
    ours,
    padded,
    peer,
)
from tests.stages.optimize import world

pytestmark = pytest.mark.oracle
trl = peer("trl")

EACH = 4
IDS = [list(range(3, 3 + length)) for length in LENGTHS.tolist()]
LOSS = {
    ("clipped", "sequence_mean"): "grpo",
    ("clipped", "token_mean"): "dapo",
    ("clipped", "constant"): "dr_grpo",
    ("sequence_clipped", "sequence_mean"): "grpo",
    ("sequence_clipped", "sequence_sum"): "luspo",
    ("geometric_clipped", "sequence_mean"): None,  # a trainer of its own
    ("cispo", "token_mean"): "cispo",
    ("sapo", "sequence_mean"): "sapo",
}


@pytest.fixture
def trainer(policy, tmp_path):
    """(rows, rewards by completion, trl config…) -> a real trainer that is given these rows instead
    of sampling."""

    def scorer(scores):
        return lambda completion_ids, **_: scores

    def make(rows=None, scores=None, kind="GRPO", parts=None, **config):
        from datasets import Dataset
        from transformers import AutoTokenizer

        rows = rows or [
            {"prompt_ids": [5, 6], "completion_ids": ids, "old_logprobs": [-1.0] * len(ids)}
            for ids in IDS
        ]
        funcs = [scorer(part) for part in parts] if parts else None
        common = {
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
        }
        sizes = {"per_device_train_batch_size": len(rows), "num_generations": EACH}
        own = {} if kind == "RLOO" else {"rollout_func": lambda prompts, _: given}
        module = importlib.import_module("trl.experimental.gmpo") if kind == "GMPO" else trl
        given = {
            "prompt_ids": [row["prompt_ids"] for row in rows],
            "completion_ids": [row["completion_ids"] for row in rows],
        }
        given["logprobs"] = [row["old_logprobs"] for row in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = getattr(module, f"{kind}Trainer")(
                model=load_model(policy, dtype=torch.float32),
                reward_funcs=funcs or scorer(scores or [0.0] * len(rows)),
                args=getattr(module, f"{kind}Config")(
                    str(tmp_path / "trl"), **{**common, **sizes, **config}
                ),
                train_dataset=Dataset.from_dict({"prompt": ["?"] * len(rows)}),
                processing_class=AutoTokenizer.from_pretrained(policy.files.folder),
                **own,
            )
        if kind == "RLOO":  # it has no such hook, so its sampling is replaced
            made._generate = lambda prompts: (
                given["prompt_ids"],
                given["completion_ids"],
                ["?"] * len(rows),
            )
        made.current_gradient_accumulation_steps = 1
        return made

    return make


def scored(made, count: int = B) -> dict:
    """What TRL makes of the rollouts: padded ids and masks, advantages."""
    return made._generate_and_score_completions([{"prompt": "?"} for _ in range(count)])


def theirs(made, inputs: dict, entropies: torch.Tensor | None = None):
    """TRL's loss as a function of logprobs [N]."""
    made.model.train()

    def loss(now):
        made._get_per_token_logps_and_entropies = lambda *_, **__: (
            padded(now),
            torch.zeros(B, T) if entropies is None else padded(entropies),
            None,
        )
        return made.compute_loss(made.model, inputs)

    return loss


def given(made, **columns) -> dict:
    """The batch of `peers` in TRL's form."""
    inputs = {
        **scored(made),
        "advantages": ADVANTAGES,
        "old_per_token_logps": padded(OLD),
        **columns,
    }
    assert torch.equal(inputs["completion_mask"], MASK.long())
    return inputs


def settings(surrogate: str, aggregation: str, options: dict) -> dict:
    """Our surrogate's options as TRL's config names them."""
    named = {"loss_type": LOSS[surrogate, aggregation], "max_completion_length": MAX_TOKENS}
    if surrogate == "geometric_clipped":
        return {
            "kind": "GMPO",
            "epsilon": options["clip_low"],
            "epsilon_high": options["clip_high"],
        }
    if surrogate == "sequence_clipped":
        named["importance_sampling_level"] = "sequence"
    if surrogate == "cispo":
        return {**named, "epsilon_high": options["clip_max"]}
    if surrogate == "sapo":
        return {
            **named,
            "sapo_temperature_pos": options["tau_positive"],
            "sapo_temperature_neg": options["tau_negative"],
        }
    return {
        **named,
        "epsilon": options["clip_low"],
        "epsilon_high": options["clip_high"],
        "delta": options.get("delta"),
    }


# -- losses


@pytest.mark.parametrize(
    "row",
    [row for row in ALGORITHMS.values() if (row.surrogate, row.aggregation) in LOSS],
    ids=lambda row: row.name,
)
def test_every_algorithms_loss_and_gradient(trainer, row):
    options = {key: value for key, value in row.defaults.items() if key != "drop_zero_variance"}
    made = trainer(**settings(row.surrogate, row.aggregation, options))
    agree(ours(row.surrogate, row.aggregation, **options), theirs(made, given(made)))


def test_defaults_of_sapo(trainer):
    made = trainer(loss_type="sapo")
    agree(ours("sapo", "sequence_mean", **ALGORITHMS["sapo"].defaults), theirs(made, given(made)))


def test_bnpo_is_their_token_mean_of_one_micro_batch(trainer):
    made = trainer(loss_type="bnpo")
    agree(ours("clipped", "token_mean", clip_low=0.2, clip_high=0.2), theirs(made, given(made)))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.83])
def test_the_tokens_of_highest_entropy(trainer, share):
    entropies = noise(15).abs()
    learns = terms.uncertain(entropies, share)
    assert 0 < learns.sum() < N
    made = trainer(loss_type="dapo", top_entropy_quantile=share)
    agree(
        ours("clipped", "token_mean", clip_low=0.2, clip_high=0.2, weight=learns.double()),
        theirs(made, given(made), entropies),
    )


def test_the_adaptive_coefficient(trainer):
    """The course of TRL's coefficient over four steps of constant entropy each."""
    made = trainer(
        loss_type="dapo", use_adaptive_entropy=True, entropy_target=1.0, entropy_coef_delta=0.1
    )
    made.current_gradient_accumulation_steps, made._step = 1, 0
    config = Config(entropy_target=1.0, entropy_coef_step=0.1)
    coef, last = 0.0, None
    inputs = given(made)
    plain = theirs(trainer(loss_type="dapo"), inputs)(NOW).item()
    for mean in (0.5, 0.9, 2.0, 0.7):
        found = theirs(made, inputs, torch.full((N,), mean, dtype=torch.float64))(NOW).item()
        assert plain - found == pytest.approx(
            terms.entropy_bonus(config, coef, last) * mean, abs=1e-6
        )
        coef, last = terms.next_entropy_coef(config, coef, mean), mean
        assert made.entropy_coef == pytest.approx(coef)


@pytest.mark.parametrize("low, high", [(0.1, 0.3), (0.3, 0.05)])
def test_the_bounds_of_gmpo(trainer, low, high):
    options = {"clip_low": low, "clip_high": high}
    made = trainer(**settings("geometric_clipped", "sequence_mean", options))
    agree(ours("geometric_clipped", "sequence_mean", **options), theirs(made, given(made)))


@pytest.mark.parametrize("surrogate", ["clipped", "sequence_clipped"])
@pytest.mark.parametrize("delta", [1.25, 1.6])
def test_delta(trainer, surrogate, delta):
    options = {"clip_low": 0.1, "clip_high": 0.2, "delta": delta}
    made = trainer(**settings(surrogate, "sequence_mean", options))
    agree(ours(surrogate, "sequence_mean", **options), theirs(made, given(made)))


@pytest.mark.parametrize("clip_max", [0.8, 1.3])
def test_cispo_has_the_same_absolute_bound(trainer, clip_max):
    made = trainer(**settings("cispo", "token_mean", {"clip_max": clip_max}))
    agree(ours("cispo", "token_mean", clip_max=clip_max), theirs(made, given(made)))


def test_at_ratio_1_the_gradient_of_the_kl_is_the_unbiased_one(trainer):
    """TRL multiplies k3 by the ratio, verl and we take k2's gradient: −d both, where the policy is
    the one that sampled."""
    made, policy_loss = (
        trainer(loss_type="dapo", beta=0.3),
        ours("clipped", "token_mean", clip_low=0.2, clip_high=0.2),
    )
    inputs = given(made, ref_per_token_logps=padded(REF))
    agree(
        lambda now: policy_loss(now) + 0.3 * losses.kl(now, REF).mean(), theirs(made, inputs), OLD
    )


@pytest.mark.parametrize("corrected", [False, True])
def test_kl_in_the_loss_is_k3(trainer, corrected):
    """With `use_bias_correction_kl`, which is on by default there, times the ratio; else with k3's
    own gradient."""
    made = trainer(loss_type="dapo", beta=0.3, use_bias_correction_kl=corrected)
    policy_loss = ours("clipped", "token_mean", clip_low=0.2, clip_high=0.2)

    def loss(now):
        ratio = (now - OLD).exp() if corrected else 1.0
        return (
            policy_loss(now)
            + 0.3 * (ratio * losses.kl(now, REF, "k3", unbiased_gradient=False)).mean()
        )

    agree(loss, theirs(made, given(made, ref_per_token_logps=padded(REF))))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "clamp", "mask"])
def test_importance_weights_and_the_loss_under_them(trainer, level, mode):
    """`prox` is what TRL scores again, `old` what the sampler reported."""
    rows = [
        {"prompt_ids": [5, 6], "completion_ids": ids, "old_logprobs": old.tolist()}
        for ids, old in zip(IDS, Ragged(OLD, OFFSETS), strict=True)
    ]
    bounds = {
        "vllm_importance_sampling_clip_min": None if mode == "truncate" else 0.7,
        "vllm_importance_sampling_clip_max": 1.3,
    }
    made = trainer(
        rows,
        loss_type="dapo",
        vllm_importance_sampling_mode=f"{level}_{mode.replace('clamp', 'truncate')}",
        **bounds,
    )
    made.use_vllm, made._last_loaded_step = True, 0
    made._get_per_token_logps_and_entropies = lambda *_, **__: (padded(REF).float(), None, None)
    inputs = scored(made)
    found = losses.correction(REF, OLD, OFFSETS, mode=mode, level=level, low=0.7, high=1.3)
    torch.testing.assert_close(
        found.float(), flat(inputs["importance_sampling_ratio"].expand(B, T)), rtol=1e-5, atol=1e-6
    )
    assert found.unique().numel() > 1 and (found == (0.0 if mode == "mask" else 1.3)).any()
    inputs |= {"advantages": ADVANTAGES, "old_per_token_logps": padded(REF)}
    inputs["importance_sampling_ratio"] = inputs["importance_sampling_ratio"].double()
    expected = flat(inputs["importance_sampling_ratio"].expand(B, T))
    agree(
        ours("clipped", "token_mean", clip_low=0.2, clip_high=0.2, weight=expected, old=REF),
        theirs(made, inputs),
        REF + NOW - OLD,
    )


# -- advantages


@pytest.mark.parametrize(
    "scale, function", [("group", advantages.group_normalized), ("none", advantages.group_centered)]
)
def test_group_advantages(trainer, scale, function):
    groups = torch.arange(B) // EACH
    found = scored(trainer(scores=REWARDS.tolist(), scale_rewards=scale))["advantages"]
    torch.testing.assert_close(function(REWARDS, groups), found, rtol=1e-5, atol=1e-6)


def test_leave_one_out_and_the_kl_in_the_reward(trainer):
    groups = torch.arange(B) // EACH
    for beta in (0.0, 0.3):
        made = trainer(scores=REWARDS.tolist(), kind="RLOO", normalize_advantages=False, beta=beta)
        answers = iter([padded(OLD).float(), padded(REF).float()])
        made._get_per_token_logps_and_entropies = lambda *_, answers=answers, **__: (
            next(answers),
            None,
            None,
        )
        kl = Ragged(OLD - REF, OFFSETS).segment_sum()
        found = advantages.leave_one_out(REWARDS - beta * kl, groups)
        torch.testing.assert_close(found, scored(made)["advantages"], rtol=1e-5, atol=1e-6)


# -- where the definitions differ: deployments/docs/who-does-what.md


def test_what_is_not_scored_has_advantage_0_there_and_is_dropped_here(trainer):
    rewards, groups = REWARDS.clone(), torch.arange(B) // EACH
    rewards[2] = torch.nan
    made = trainer(scores=[None if math.isnan(value) else value for value in rewards.tolist()])
    found, expected = advantages.group_normalized(rewards, groups), scored(made)["advantages"]
    assert expected[2] == 0.0 and found[2].isnan()
    others = torch.arange(B) != 2
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-6)


def test_over_the_batch_trl_takes_the_group_mean_off_and_divides_by_the_std_of_the_raw_rewards(
    trainer,
):
    groups = torch.arange(B) // EACH
    expected = scored(trainer(scores=REWARDS.tolist(), scale_rewards="batch"))["advantages"]
    found = estimators.batch_scaled(REWARDS, groups)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for function in (advantages.batch_normalized, advantages.batch_normalized_baseline):
        assert (function(REWARDS, groups) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("missing", [False, True])
def test_gdpo_is_normalize_then_sum(trainer, missing):
    parts = torch.stack([REWARDS, noise(15, count=B).float()], dim=1)
    if missing:
        parts[1, 0] = torch.nan
    weights = [1.0, 0.25]
    made = trainer(
        parts=[
            [None if math.isnan(value) else value for value in part.tolist()]
            for part in parts.unbind(1)
        ],
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=weights,
    )
    found = estimators.part_normalized(
        REWARDS,
        torch.arange(B) // EACH,
        parts=parts,
        part_weights=torch.tensor([weights]).expand(B, 2),
    )
    torch.testing.assert_close(found, scored(made)["advantages"].float(), rtol=1e-5, atol=1e-6)


def test_cispos_bound_is_0_2_where_nothing_is_set(trainer):
    made = trainer(loss_type="cispo")
    differ(ours("cispo", "token_mean", clip_max=5.0), theirs(made, given(made)))
    agree(ours("cispo", "token_mean", clip_max=0.2), theirs(made, given(made)))


def test_trl_clamps_no_log_ratio(trainer):
    made = trainer(loss_type="dapo")
    sign = ADVANTAGES.repeat_interleave(LENGTHS)
    now = OLD + torch.where(sign == ADVANTAGES.min(), 30.0, 0.0)
    expected, found = (
        theirs(made, given(made))(now),
        ours("clipped", "token_mean", clip_low=0.2, clip_high=0.2)(now),
    )
    scale = -float(ADVANTAGES.min()) * int(LENGTHS[ADVANTAGES.argmin()]) / N
    assert float(expected) == pytest.approx(
        scale * torch.tensor(30.0).double().exp().item(), rel=1e-6
    )
    assert float(found) == pytest.approx(scale * torch.tensor(20.0).double().exp().item(), rel=1e-6)


@pytest.mark.parametrize("row", ["dapo", "cispo", "grpo", "dr_grpo", "bnpo"])
def test_a_step_of_two_micro_batches_is_the_whole_there_too_but_for_bnpo(trainer, row):
    """bnpo's gradient is the mean of the micro-batches' token means. The others need micro-batches
    of equally many rollouts."""
    row = find_algorithm(row)
    options = {key: value for key, value in row.defaults.items() if key != "drop_zero_variance"}
    named = settings(row.surrogate, row.aggregation, options) | (
        {"loss_type": "bnpo"} if row.name == "bnpo" else {}
    )
    made = trainer(**named, gradient_accumulation_steps=2, steps_per_generation=2)
    made.current_gradient_accumulation_steps = 2
    whole, total = given(made), torch.zeros(N, dtype=torch.float64)
    made.model.train()
    for rows in (slice(0, B // 2), slice(B // 2, B)):
        half = {name: value if value.ndim == 0 else value[rows] for name, value in whole.items()}

        def loss(now, half=half, rows=rows):
            made._get_per_token_logps_and_entropies = lambda *_, **__: (
                padded(now)[rows],
                torch.zeros_like(MASK[rows]),
                None,
            )
            return made.compute_loss(made.model, half)

        total += gradient_of(loss)[1]
    expected = gradient_of(ours(row.surrogate, row.aggregation, **options))[1]
    assert torch.allclose(total, expected, rtol=1e-6, atol=1e-9) == (row.name != "bnpo")


def test_rloo_of_trl_weighs_a_rollout_by_its_product_of_ratios(trainer):
    """At ratio 1 its gradient is the mean over rollouts of the sum over tokens: N/B times that of
    token_mean."""
    made = trainer(kind="RLOO", normalize_advantages=False, epsilon=0.2)
    made._get_per_token_logps_and_entropies = lambda *_, **__: (padded(OLD).float(), None, None)
    inputs = {**scored(made), "advantages": ADVANTAGES, "old_logps": (padded(OLD) * MASK).sum(1)}
    made.model.train()

    def loss(now):
        made._get_per_token_logps_and_entropies = lambda *_, **__: (
            padded(now),
            torch.zeros(B, T),
            None,
        )
        return made.compute_loss(made.model, inputs)

    gradient = gradient_of(loss, OLD)[1]
    mine = gradient_of(ours("clipped", "token_mean", clip_low=0.2, clip_high=0.2), OLD)[1]
    torch.testing.assert_close(gradient, mine * N / B, rtol=1e-6, atol=1e-9)
    product = Ragged(NOW - OLD, OFFSETS).segment_sum().exp()
    expected = -torch.minimum(product * ADVANTAGES, product.clamp(0.8, 1.2) * ADVANTAGES).mean()
    assert loss(NOW).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_group_of_one_is_refused_there_and_dropped_here(trainer):
    with pytest.raises(ValueError, match="at least 2 generations"):
        trainer(num_generations=1)
    assert advantages.group_normalized(REWARDS, torch.arange(B)).isnan().all()


def test_trl_has_no_ppo():
    assert not hasattr(trl, "PPOTrainer")


def test_the_table_names_this_version():
    assert f"TRL {trl.__version__}" in DOCUMENT


def test_the_overlong_penalty():
    from trl.rewards import get_soft_overlong_punishment

    lengths = range(1, 30)
    theirs = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)(
        [[1] * n for n in lengths]
    )
    assert overlong([[1] * n for n in lengths], max_tokens=20, cache=8) == pytest.approx(theirs)


# -- the whole way: saved rollouts in, the gradient of every weight out


@pytest.fixture
def sampled(store, policy):
    """(rollouts, rewards): 16 rollouts of the tiny policy at temperature 0.8."""
    rows = world.sample(
        load_model(policy, dtype=torch.float32), world.prompts(4), EACH, temperature=0.8
    )
    rollouts = world.write_rollouts(store, policy, rows)
    return rollouts, world.write_rewards(store, rollouts, world.even_share)


@pytest.mark.parametrize("algorithm", ["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"])
def test_the_gradient_of_every_weight(store, policy, sampled, trainer, algorithm):
    row = find_algorithm(algorithm)
    config = Config(
        algorithm=algorithm,
        device="cpu",
        max_completion_tokens=MAX_TOKENS,
        drop_zero_variance=False,
    ).resolved()
    inputs = dict(zip(("policy", "rollouts", "rewards"), (policy, *sampled), strict=True))
    loaded = joining.load(config, row, store, inputs)
    shifts = noise(7, 0.2, len(loaded.batch.old_logprobs)).float()
    moved = {"old_logprobs": loaded.batch.old_logprobs + shifts}
    batch = loaded.batch.__class__(**{**vars(loaded.batch), **moved})
    mine = Trainer(
        config, load_model(policy, dtype=torch.float32), batch, row, make_accelerator(config)
    )
    everyone = list(range(len(batch.groups)))
    numbers = mine.accumulate(everyone, everyone)

    rows = sampled[0].table().to_pylist()
    options = {key: value for key, value in row.defaults.items() if key != "drop_zero_variance"}
    named = {**settings(row.surrogate, row.aggregation, options), "temperature": 0.8}
    made = trainer(
        rows,
        list(map(world.even_share, rows)),
        **named,
        **({"scale_rewards": "none"} if "dr_" in algorithm else {}),
    )
    inputs = scored(made, len(rows))
    torch.testing.assert_close(inputs["advantages"], batch.advantages, rtol=1e-5, atol=1e-6)
    old = torch.nn.utils.rnn.pad_sequence(
        list(batch.sequences.completions.with_values(batch.old_logprobs)), batch_first=True
    )
    loss = made.compute_loss(made.model, {**inputs, "old_per_token_logps": old})
    loss.backward()
    assert numbers["policy_loss"] == pytest.approx(loss.item(), abs=1e-6)
    wanted = dict(made.model.named_parameters())
    for name, parameter in mine.model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6)
