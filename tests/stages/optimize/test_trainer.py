"""The step's loss and gradient against a float64 loop over single rollouts, and their independence
of how the work is cut."""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import FuyuConfig, FuyuForCausalLM

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.models.checkpoints import PolicyConfig
from quiver.stages.common.models.loading import load_model, restore_dropout
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.store import Store
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import ALGORITHMS, find_function, resolve
from quiver.stages.optimize.batch import Batch
from quiver.stages.optimize.optimizer import (
    learning_rate,
    load_state,
    make_optimizer,
    state,
    total_norm,
)
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from tests.stages.optimize.world import even_share, import_changed, prompts, sample
from tests.tiny import make_policy, tokenizer
from tests.writing import run_here

import_policy = partial(run_here, "policy")


MOST = 11
OF_ROLLOUTS = [
    name for name, row in ALGORITHMS.items() if row.advantage_of == "rollouts"
]  # a critic's step: test_critic.py; of rewards to go: test_to_go.py


@pytest.fixture(scope="module")
def _rows(tmp_path_factory) -> list[dict]:
    policy = make_policy(Store(tmp_path_factory.mktemp("sampled") / "store"))
    model = load_model(policy, dtype=torch.float32)
    found = sample(model, prompts(4), 4, temperature=0.8)
    generator = torch.Generator().manual_seed(3)
    for row in found:
        noise = torch.randn(len(row["old_logprobs"]), generator=generator) * 0.3
        row["old"] = [
            old + shift for old, shift in zip(row["old_logprobs"], noise.tolist(), strict=True)
        ]
        row["ref"] = [
            old - 0.4 * shift
            for old, shift in zip(row["old_logprobs"], noise.tolist(), strict=True)
        ]
        row["reward"], row["group"] = even_share(row), int(row["group_id"][2:])
    return found


@pytest.fixture
def rows(_rows) -> list[dict]:
    """Sixteen rollouts at temperature 0.8 with old logprobs that are a little off, rewards and a
    group number. The tiny policy has the same weights in every test."""
    return copy.deepcopy(_rows)


def _ragged(rows: list[dict], name: str, dtype: torch.dtype) -> Ragged:
    values = [torch.tensor(row[name], dtype=dtype) for row in rows]
    return Ragged.from_lengths(torch.cat(values), torch.tensor([len(row) for row in values]))


def _trainer(
    policy,
    rows: list[dict],
    config: Config,
    algorithm: str,
    *,
    ref: bool = False,
    prox: bool = False,
) -> Trainer:
    row = resolve(algorithm)
    groups = [each["group"] for each in rows]
    columns = {
        "length_weighted": {"lengths": torch.tensor([len(r["completion_ids"]) for r in rows])},
        "part_normalized": {
            "parts": torch.tensor([[r["reward"]] for r in rows]),
            "part_weights": torch.ones(len(rows), 1),
        },
        "pass_at_k": {"k": 2},
    }.get(row.advantage, {})
    weights = find_function("advantages", row.advantage)(
        torch.tensor([r["reward"] for r in rows]), torch.tensor(groups), **columns
    )
    data = Sequences(
        _ragged(rows, "prompt_ids", torch.int32),
        _ragged(rows, "completion_ids", torch.int32),
        torch.tensor([r["temperature"] for r in rows]),
    )
    batch = Batch(
        data, groups, groups, weights, _ragged(rows, "old", torch.float32).values,
        _ragged(rows, "old_logprobs", torch.float32).values if prox else None,
        _ragged(rows, "ref", torch.float32).values if ref else None,
        max_completion_tokens=MOST,
    )  # fmt: skip
    return Trainer(
        config, load_model(policy, dtype=torch.float32), batch, row, make_accelerator(config)
    )


def _config(**values) -> Config:
    return Config(
        **{"device": "cpu", "max_completion_tokens": MOST, "audit": {"enabled": False}, **values}
    )


def _of_pairs(reward: float, peers: list[float]) -> float:
    """The better of two answers: its mean over the pairs that hold this one, against all pairs."""
    best = [max(pair) for pair in itertools.combinations(peers, 2)]
    others = [*peers]
    others.remove(reward)
    mean_with = fmean(max(reward, other) for other in others)
    return (mean_with - fmean(best)) / (pstdev(best) + 1e-8)


def _expected(
    policy,
    rows: list[dict],
    algorithm: str,
    *,
    kl_coef: float = 0.0,
    prox: bool = False,
    entropy_coef: float = 0.0,
    entropy_share: float = 1.0,
) -> tuple[float, dict]:
    """Loss and gradients by the formulas, one rollout after another, in float64."""
    model = load_model(policy, dtype=torch.float64)
    tokens, terms = sum(len(row["completion_ids"]) for row in rows), []
    low, high = {
        "dapo": (0.2, 0.28),
        "gspo": (3e-4, 4e-4),
        "luspo": (2e-3, 2.5e-3),
        "dppo": (math.inf, math.inf),  # no probability of the tiny policy can move by 0.15
        "dppo_kl": (math.inf, math.inf),
    }.get(algorithm, (0.2, 0.2))
    everyone = [r["reward"] for r in rows]
    centered = [
        r["reward"] - fmean(p["reward"] for p in rows if p["group"] == r["group"]) for r in rows
    ]
    normalized = [
        deviation / (stdev(r["reward"] for r in rows if r["group"] == row["group"]) + 1e-4)
        for row, deviation in zip(rows, centered, strict=True)
    ]
    for row in rows:
        peers = [r["reward"] for r in rows if r["group"] == row["group"]]
        mean = sum(peers) / len(peers)
        lengths = [len(r["completion_ids"]) for r in rows if r["group"] == row["group"]]
        weighted = sum(n * r for n, r in zip(lengths, peers, strict=True)) / sum(lengths)
        std = math.sqrt(sum((x - mean) ** 2 for x in peers) / (len(peers) - 1))
        advantage = {
            **dict.fromkeys(("dr_grpo", "dppo", "dppo_kl"), row["reward"] - mean),
            "gdpo": (row["reward"] - mean) / (std + 1e-4) / (stdev(normalized) + 1e-4),
            "pass_at_k": _of_pairs(row["reward"], peers),
            "rloo": row["reward"] - (sum(peers) - row["reward"]) / (len(peers) - 1),
            "opo": row["reward"] - weighted,
            "reinforce_pp": (row["reward"] - fmean(everyone)) / (stdev(everyone) + 1e-8),
            "reinforce_pp_baseline": (row["reward"] - mean) / (stdev(centered) + 1e-8),
        }.get(algorithm, (row["reward"] - mean) / (std + 1e-4))
        weight = {
            **dict.fromkeys(
                ("grpo", "gdpo", "pass_at_k", "gspo", "sapo", "gmpo"),
                1 / len(rows) / len(row["completion_ids"]),
            ),
            **dict.fromkeys(("dr_grpo", "dppo", "dppo_kl"), 1 / len(rows) / MOST),
            "luspo": 1 / len(rows),
        }.get(algorithm, 1 / tokens)
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        table = (model(input_ids=ids, use_cache=False).logits[0] / row["temperature"]).log_softmax(
            -1
        )
        start, ids = len(row["prompt_ids"]) - 1, row["completion_ids"]
        anchors = row["old_logprobs" if prox else "old"]
        each = [table[start + t, token] - anchors[t] for t, token in enumerate(ids)]
        for t, token in enumerate(ids):
            now = table[start + t, token]
            anchor = anchors[t]
            of_rollout = algorithm in ("gspo", "luspo")
            ratio = (sum(each) / len(each) if of_rollout else each[t]).exp()
            cost = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            if algorithm == "cispo":
                cost = -min(ratio.item(), 5.0) * advantage * now
            if algorithm == "opo":
                cost = -advantage * now
            if algorithm == "gmpo":
                sign = 1 if advantage > 0 else -1
                bounded = [sign * (sign * e).clamp(max=0.4) for e in each]
                cost = -advantage * (sum(bounded) / len(bounded)).exp()
            if algorithm == "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                cost = -advantage / (1 + (-tau * (ratio - 1)).exp()) * 4 / tau
            if prox:
                cost = cost * min(math.exp(anchor - row["old"][t]), 2.0)
            d = row["ref"][t] - now if kl_coef else torch.zeros(())
            kl = (d.exp() - d - 1).detach() + (d**2 / 2 - (d**2 / 2).detach())
            entropy = -(table[start + t].exp() * table[start + t]).sum()
            terms.append((weight, cost, kl, entropy))
    threshold = np.quantile([entropy.item() for *_, entropy in terms], 1 - entropy_share)
    total = 0.0
    for weight, cost, kl, entropy in terms:
        counted = cost if entropy.item() >= threshold else 0.0
        total = total + weight * (counted + kl_coef * kl - entropy_coef * entropy)
    total.backward()
    return total.item(), {name: p.grad.float() for name, p in model.named_parameters()}


def _compare(trainer: Trainer, expected: tuple[float, dict]) -> None:
    everyone = list(range(len(trainer.batch.groups)))
    numbers = trainer.accumulate(everyone, everyone)
    assert numbers["loss"] == pytest.approx(expected[0], abs=1e-6)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", OF_ROLLOUTS)
def test_loss_and_gradient_are_those_of_the_formula(policy, rows, algorithm):
    _compare(_trainer(policy, rows, _config(), algorithm), _expected(policy, rows, algorithm))


def test_kl_to_the_reference(policy, rows):
    made = _trainer(policy, rows, _config(kl_coef=0.3), "grpo", ref=True)
    _compare(made, _expected(policy, rows, "grpo", kl_coef=0.3))


@pytest.mark.parametrize("coef, share", [(0.3, 1.0), (0.0, 0.3), (0.2, 0.5)])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_entropy_bonus_and_the_tokens_of_highest_entropy(policy, rows, algorithm, coef, share):
    """In three micro-batches: which tokens are the highest is told of the whole step."""
    options = {"entropy_coef": coef, "entropy_share": share}
    made = _trainer(policy, rows, _config(token_budget=60, **options), algorithm)
    assert len(made.active) == len(rows)  # a token of advantage 0 has an entropy too
    _compare(made, _expected(policy, rows, algorithm, **options))


def test_good_answers_are_learned_by_heart(policy, rows):
    """−coef · mean logprob over the tokens of the answers of reward 0.5 and more, in every cut;
    those of equal rewards are passed too."""
    for row in rows[:4]:
        row["reward"] = 1.0
    made = _trainer(policy, rows, _config(nll_coef=0.3, nll_reward=0.5, token_budget=60), "grpo")
    rewards = torch.tensor([row["reward"] for row in rows])
    made.batch = replace(made.batch, rewards=rewards)
    assert len(made.active) == len(rows)
    expected, gradients = _expected(policy, rows, "grpo")
    model = load_model(policy, dtype=torch.float64)
    good = [row for row in rows if row["reward"] >= 0.5]
    assert 4 < len(good) < len(rows)
    nll = torch.zeros((), dtype=torch.float64)
    for row in good:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        table = model(input_ids=ids, use_cache=False).logits[0] / row["temperature"]
        table = table.log_softmax(-1)[len(row["prompt_ids"]) - 1 : -1]
        nll = nll - table.gather(1, torch.tensor(row["completion_ids"])[:, None]).sum()
    nll = nll * 0.3 / sum(len(row["completion_ids"]) for row in good)
    nll.backward()
    of_nll = {name: p.grad.float() for name, p in model.named_parameters()}
    summed = {name: gradient + of_nll[name] for name, gradient in gradients.items()}
    _compare(made, (expected + nll.item(), summed))


def test_decoupled_ratio_with_correction(policy, rows):
    _compare(
        _trainer(policy, rows, _config(), "grpo", prox=True),
        _expected(policy, rows, "grpo", prox=True),
    )


def test_a_token_that_is_rejected_has_no_loss_and_counts(policy, rows):
    """Each gap is (old − engine's); the others keep their weight, and the denominators stay."""
    options = {"reject": "ratio", "reject_level": "token", "reject_low": 0.9, "reject_high": 1.1}
    made = _trainer(policy, rows, _config(correction=options), "grpo", prox=True)
    plain = _trainer(policy, rows, _config(), "grpo", prox=True)
    gaps = [
        now - old for row in rows for now, old in zip(row["old_logprobs"], row["old"], strict=True)
    ]
    is_kept = torch.tensor([0.9 <= math.exp(gap) <= 1.1 for gap in gaps])
    everyone = list(range(len(rows)))
    weights = plain.objective.weights
    plain.objective.weights = lambda batch, members: weights(batch, members) * is_kept
    assert made.accumulate(everyone, everyone)["loss"] == pytest.approx(
        plain.accumulate(everyone, everyone)["loss"], rel=1e-5
    )
    for one, other in zip(made.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert 0 < is_kept.sum() < len(gaps)


@pytest.mark.parametrize("packing", ["shared", "packed", "single"])
@pytest.mark.parametrize("budget", [1, 30, 60, None])
def test_the_cut_into_micro_batches_changes_nothing(policy, rows, packing, budget):
    made = _trainer(policy, rows, _config(packing=packing, token_budget=budget), "grpo")
    assert made.mode == packing
    _compare(made, _expected(policy, rows, "grpo"))


def test_activation_checkpointing_changes_nothing(policy, rows):
    _compare(
        _trainer(policy, rows, _config(activation_checkpointing=True), "grpo"),
        _expected(policy, rows, "grpo"),
    )


def test_accelerates_environment_changes_nothing(policy, rows, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state(True)
    made = _trainer(policy, rows, _config(), "grpo")
    assert made.accelerator.mixed_precision == "no"
    _compare(made, _expected(policy, rows, "grpo"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        make_accelerator(_config(device="cuda"))


def test_dropout_stays_off_under_activation_checkpointing(store, tmp_path, rows):
    """Layers copy the config's rate when they are made."""
    policy = import_changed(store, tmp_path / "model", "drops", config={"attention_dropout": 0.5})
    made = _trainer(policy, rows, _config(activation_checkpointing=True), "grpo")
    _compare(made, _expected(policy, rows, "grpo"))


def test_dropout_of_a_config_within_a_config_is_off_too(store, tmp_path):
    """Fuyu's layers read the rate from the config of its text part when they run."""
    text = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 320,
    }
    rates = {"attention_dropout": 0.5, "hidden_dropout": 0.5}
    FuyuForCausalLM(
        FuyuConfig(text_config={**text, **rates}, patch_size=2, **text)
    ).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    policy = store.open(
        import_policy(PolicyConfig(model=str(tmp_path / "model")), store, into="nested")
    )
    model, ids = load_model(policy, dtype=torch.float32).train(), torch.arange(3, 30)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    restore_dropout(model, policy)
    assert {name: getattr(model.config.text_config, name) for name in rates} == rates


def test_weights_without_a_gradient_have_no_moments(policy):
    model = load_model(policy, dtype=torch.float32)
    made, fresh = (make_optimizer(_config(), model) for _ in range(2))
    first = next(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == first else torch.ones_like(parameter)
    made.step()
    found = state(made, model)
    assert f"exp_avg.{first}" not in found
    load_state(fresh, model, found)
    again = state(fresh, model)
    assert again.keys() == found.keys() and all(
        torch.equal(again[name], found[name]) for name in found
    )
    moment = next(name for name in found if name.startswith("exp_avg."))
    for wrong in ({**found, moment: torch.zeros(1)}, {**found, "exp_avg.other": torch.zeros(1)}):
        with pytest.raises(ConfigError, match="missing or of another shape"):
            load_state(fresh, model, wrong)
    del found[moment]
    with pytest.raises(ConfigError, match="missing or of another shape"):
        load_state(fresh, model, found)


def test_rollouts_of_advantage_zero_need_no_pass_but_count(policy, rows):
    for row in rows[:4]:
        row["reward"] = 1.0
    made, whole = (
        _trainer(policy, rows, _config(), "grpo"),
        _trainer(policy, rows, _config(), "grpo"),
    )
    everyone = list(range(len(rows)))
    whole.accumulate(everyone, everyone)
    numbers = made.accumulate(everyone, everyone[4:])
    assert numbers["rollouts"] == 12
    assert made.places < whole.places
    for one, other in zip(made.parameters, whole.parameters, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_step_divides_by_the_idle_rollouts_too(policy, rows):
    """Through `train`: the loss of twelve rollouts over the weights of all sixteen."""
    for row in rows[:4]:
        row["reward"] = 1.0
    made = _trainer(policy, rows, _config(), "grpo")
    made.train()
    (update,) = made.updates
    assert update["rollouts"] == 12
    assert update["loss"] == pytest.approx(_expected(policy, rows, "grpo")[0], abs=1e-6)


def test_seed_and_step_decide_which_groups_are_taken_together(policy, rows):
    """Half of the groups in each mini-batch; the same wherever the same step is taken."""
    taken = {}
    for seed, step in itertools.product(range(3), range(3)):
        first, second = _trainer(policy, rows, _config(minibatches=2, seed=seed), "grpo")._members(
            step
        )
        assert sorted(first + second) == list(range(len(rows)))
        taken[seed, step] = frozenset(first), frozenset(second)
    assert len({taken[seed, 0] for seed in range(3)}) > 1
    assert len({taken[0, step] for step in range(3)}) > 1
    again = _trainer(policy, rows, _config(minibatches=2, seed=1), "grpo")
    assert tuple(map(frozenset, again._members(2))) == taken[1, 2]


def test_numbers_of_a_step(policy, rows):
    made = _trainer(policy, rows, _config(), "grpo")
    everyone = list(range(len(rows)))
    numbers = made.accumulate(everyone, everyone)
    logprobs = [value for row in rows for value in row["old_logprobs"]]
    gaps = [
        now - old
        for now, old in zip(logprobs, [value for row in rows for value in row["old"]], strict=True)
    ]
    assert numbers["tokens"] == len(gaps)
    assert numbers["prompt_tokens"] == sum(len(row["prompt_ids"]) for row in rows)
    assert numbers["approx_kl"] == pytest.approx(
        sum(math.exp(x) - 1 - x for x in gaps) / len(gaps), rel=1e-4
    )
    assert numbers["ratio_max"] == pytest.approx(math.exp(max(gaps)), rel=1e-4)
    advantages = made.batch.advantages.repeat_interleave(
        made.batch.sequences.completions.lengths
    ).tolist()
    taken = [
        (math.exp(x) > 1.2 and a > 0) or (math.exp(x) < 0.8 and a < 0)
        for x, a in zip(gaps, advantages, strict=True)
    ]
    assert numbers["clip_fraction"] == pytest.approx(sum(taken) / len(taken), abs=1e-9)
    assert made.logprobs.tolist() == pytest.approx(logprobs, abs=1e-5)


def test_a_steps_distance_is_to_what_sampled_whatever_the_ratio_is_against(policy, rows):
    """With proximal logprobs, here the policy's own, the ratio is 1, and nothing is clipped."""
    made = _trainer(policy, rows, _config(), "grpo", prox=True)
    everyone = list(range(len(rows)))
    numbers = made.accumulate(everyone, everyone)
    gaps = [
        now - old for row in rows for now, old in zip(row["old_logprobs"], row["old"], strict=True)
    ]
    expected = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
    assert numbers["approx_kl"] == pytest.approx(expected, rel=1e-4)
    assert numbers["ratio_max"] == pytest.approx(math.exp(max(gaps)), rel=1e-4)
    assert numbers["clip_fraction"] == 0.0


def test_weight_decay_is_of_matrices_alone():
    """Without a gradient a step of AdamW is its decay: 1 − 0.1 · 0.5."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    for parameter in model.parameters():
        parameter.data.fill_(2.0)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(_config(learning_rate=0.1, weight_decay=0.5), model).step()
    found = {name: value.flatten().tolist() for name, value in model.named_parameters()}
    assert found.pop("0.weight") == pytest.approx([1.9] * 4)
    assert found == {"0.bias": [2.0] * 2, "1.weight": [2.0] * 2, "1.bias": [2.0] * 2}


def test_the_norm_of_many_numbers_is_exact():
    gradients = [torch.randn(1 << 24), torch.randn(1000, 3).T, torch.full((5,), 300.0).bfloat16()]
    expected = math.sqrt(sum(float(each.double().square().sum()) for each in gradients))
    assert float(total_norm(gradients)) == pytest.approx(expected, rel=1e-6)


def test_score_is_what_sampling_said(policy, rows):
    made = _trainer(policy, rows, _config(), "grpo")
    found = made.score([3, 7])
    places = made.batch.sequences.completions.positions(torch.tensor([3, 7]))
    assert found[places].tolist() == pytest.approx(
        rows[3]["old_logprobs"] + rows[7]["old_logprobs"], abs=1e-5
    )
    assert found.isnan().sum() == len(found) - len(places)


def test_the_audit_counts_what_is_outside_the_algorithms_own_bounds(policy, rows):
    """dapo leaves more room upwards than downwards."""
    checked = {"enabled": True, "max_mean_gap": 9.0}
    made = _trainer(policy, rows, _config(minibatches=2, audit=checked), "dapo")
    members = made._members(0)
    made.prepare()
    made.train()
    ratios = [
        math.exp(now - old)
        for row in members[0]
        for now, old in zip(rows[row]["old_logprobs"], rows[row]["old"], strict=True)
    ]
    assert len(members) == 2 and members[1], "the second is scored under other weights"
    assert any(1.2 < ratio < 1.28 for ratio in ratios)
    outside = [ratio < 0.8 or ratio > 1.28 for ratio in ratios]
    assert made.audit_report["outside_clip"] == pytest.approx(sum(outside) / len(outside), abs=1e-9)


@pytest.mark.parametrize(
    "schedule, step, expected",
    [("constant", 0, 0.25), ("constant", 3, 1.0), ("linear", 3, 1.0), ("linear", 8, 0.5), ("linear", 13, 0.0), ("cosine", 8, 0.5),
     ("cosine", 5, 0.5 * (1 + math.cos(math.pi * 0.2))), ("linear", 99, 0.0)],
)  # fmt: skip
def test_schedules(schedule, step, expected):
    config = _config(learning_rate=1.0, schedule=schedule, warmup_steps=3, total_steps=13)
    assert learning_rate(config, step) == pytest.approx(expected)
