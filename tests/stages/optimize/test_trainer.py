"""The step's loss and gradient against a float64 loop over single rollouts, and their independence
of how the work is cut."""

import copy
import itertools
import math
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import FuyuConfig, FuyuForCausalLM

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.loading import load_model, restore_dropout
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import find_algorithm, find_function
from quiver.stages.optimize.batch import Batch, Origin
from quiver.stages.optimize.optimizer import (
    learning_rate,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    total_norm,
)
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from tests import architectures
from tests.stages.optimize import world
from tests.stages.optimize.world import even_share, import_changed, prompts, sample
from tests.tiny import make_policy, tokenizer

MOST = 11


@pytest.fixture(scope="module")
def _rows(tmp_path_factory) -> list[dict]:
    policy = make_policy(Store(tmp_path_factory.mktemp("sampled") / "store"))
    model = load_model(policy, dtype=torch.float32)
    found = sample(model, prompts(4), 4, temperature=0.8)
    generator = torch.Generator().manual_seed(3)
    for row in found:
        sampled = torch.tensor(row["old_logprobs"], dtype=torch.float64)
        noise = torch.randn(len(sampled), generator=generator) * 0.3
        row["old"] = (sampled + noise).tolist()
        row["ref"] = (sampled - 0.4 * noise).tolist()
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
    row = find_algorithm(algorithm)
    groups = [each["group"] for each in rows]
    sequences = Sequences(
        _ragged(rows, "prompt_ids", torch.int32),
        _ragged(rows, "completion_ids", torch.int32),
        torch.tensor([r["temperature"] for r in rows]),
    )
    advantage = find_function("advantages", row.advantage)
    batch = Batch(
        sequences,
        groups,
        groups,
        advantage(torch.tensor([r["reward"] for r in rows]), torch.tensor(groups)),
        _ragged(rows, "old", torch.float32).values,
        _ragged(rows, "old_logprobs", torch.float32).values if prox else None,
        _ragged(rows, "ref", torch.float32).values if ref else None,
        masked=torch.zeros(len(rows), dtype=torch.bool),
        origins=[Origin(is_stale=False, biases="", quantization="")] * len(rows),
        max_completion_tokens=MOST,
    )
    model = load_model(policy, dtype=torch.float32)
    return Trainer(config, model, batch, row, make_accelerator(config))


def _config(**values) -> Config:
    return Config(
        **{"device": "cpu", "max_completion_tokens": MOST, "audit": {"enabled": False}, **values}
    )


def _expected(
    policy,
    rows: list[dict],
    algorithm: str = "grpo",
    *,
    kl_coef: float = 0.0,
    prox: bool = False,
    entropy_coef: float = 0.0,
    entropy_share: float = 1.0,
) -> tuple[float, dict]:
    """Loss and gradients by the formulas, one rollout after another, in float64. Of grpo, dapo and
    rloo: the parts of the other algorithms have tests of their own."""
    model = load_model(policy, dtype=torch.float64)
    num_tokens = sum(len(row["completion_ids"]) for row in rows)
    high = 0.28 if algorithm == "dapo" else 0.2
    costs, others, entropies = [], [], []
    for row in rows:
        peers = [r["reward"] for r in rows if r["group"] == row["group"]]
        advantage = (row["reward"] - fmean(peers)) / (stdev(peers) + 1e-4)
        weight = 1 / len(rows) / len(row["completion_ids"])
        if algorithm == "rloo":
            advantage = (row["reward"] - fmean(peers)) * len(peers) / (len(peers) - 1)
        if algorithm != "grpo":
            weight = 1 / num_tokens
        table, _ = world.own_pass(model, row)
        now = world.of_ids(table, row)
        old = torch.tensor(row["old"], dtype=torch.float64)
        anchor = torch.tensor(row["old_logprobs"], dtype=torch.float64) if prox else old
        ratio = (now - anchor).exp()
        cost = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1 + high) * advantage)
        if prox:
            cost = cost * (anchor - old).exp().clamp(max=2.0)
        entropy = -(table.exp() * table).sum(-1)
        other = -entropy_coef * entropy
        if kl_coef:
            d = torch.tensor(row["ref"]) - now
            k3, k2 = d.exp() - d - 1, d.square() / 2
            other = other + kl_coef * (k3.detach() + k2 - k2.detach())
        costs.append(weight * cost)
        others.append(weight * other)
        entropies.append(entropy)
    entropies = torch.cat(entropies)
    learns = entropies >= np.quantile(entropies.detach().numpy(), 1 - entropy_share)
    total = torch.cat(costs)[learns].sum() + torch.cat(others).sum()
    total.backward()
    return total.item(), {name: p.grad.float() for name, p in model.named_parameters()}


def _compare(trainer: Trainer, expected: tuple[float, dict]) -> None:
    assert world.step(trainer)["loss"] == pytest.approx(expected[0], abs=1e-6)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm, terms",
    [
        ("rloo", {}),
        ("grpo", {"kl_coef": 0.3}),
        ("grpo", {"prox": True}),
        ("grpo", {"entropy_coef": 0.3}),
        ("dapo", {"entropy_coef": 0.2, "entropy_share": 0.5}),
    ],
)
def test_loss_and_gradient_are_those_of_the_formula(policy, rows, algorithm, terms):
    """In three micro-batches: which tokens are the highest is told of the whole step."""
    fields = {name: value for name, value in terms.items() if name != "prox"}
    columns = {"prox": "prox" in terms, "ref": "kl_coef" in terms}
    made = _trainer(policy, rows, _config(token_budget=60, **fields), algorithm, **columns)
    _compare(made, _expected(policy, rows, algorithm, **terms))


def test_a_reference_changes_nothing_where_the_loss_has_no_kl(policy, rows):
    _compare(_trainer(policy, rows, _config(), "grpo", ref=True), _expected(policy, rows))


def test_accelerates_environment_changes_nothing(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state(True)
    assert make_accelerator(_config()).mixed_precision == "no"


@pytest.mark.parametrize("dropout", [{}, {"attention_dropout": 0.5}])
def test_activation_checkpointing_changes_nothing(store, tmp_path, rows, dropout):
    """Dropout stays off in train mode; layers copy the config's rate when they are made."""
    policy = import_changed(store, tmp_path / "model", "drops", config=dropout)
    made = _trainer(policy, rows, _config(activation_checkpointing=True), "grpo")
    _compare(made, _expected(policy, rows))


@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_activation_checkpointing_turns_no_noise_of_routers_on(store, tmp_path, rows, family):
    """Routers of some models draw it in train mode; the ratio must be 1 before the first update."""
    config = architectures.config_of(family)
    config.router_jitter_noise = 0.5
    architectures.make_tiny(config).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    policy = world.imported(store, tmp_path / "model", "routes")
    for row in rows:
        for name in ("prompt_ids", "completion_ids"):
            row[name] = [id % architectures.VOCABULARY for id in row[name]]
    made = _trainer(policy, rows, _config(activation_checkpointing=True), "grpo")
    first, second = (made.compute_logprobs(range(len(rows))) for _ in "ab")
    assert torch.equal(first, second)
    passes = []
    made.model.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    assert 2 * world.step(made)["microbatches"] == len(passes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        make_accelerator(_config(device="cuda"))


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
    policy = world.imported(store, tmp_path / "model", "nested")
    model, ids = load_model(policy, dtype=torch.float32).train(), torch.arange(3, 30)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    restore_dropout(model, policy)
    assert {name: getattr(model.config.text_config, name) for name in rates} == rates


def test_moments_travel_by_name(policy):
    """A weight without a gradient has none; tensors of other names or shapes are refused."""
    model = load_model(policy, dtype=torch.float32)
    made, fresh = (make_optimizer(_config(), model) for _ in range(2))
    first = next(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == first else torch.ones_like(parameter)
    made.step()
    found = optimizer_state(made, model)
    assert f"exp_avg.{first}" not in found
    load_optimizer_state(fresh, model, found)
    assert world.are_equal(optimizer_state(fresh, model), found)
    moment = next(name for name in found if name.startswith("exp_avg."))
    for wrong in ({**found, moment: torch.zeros(1)}, {**found, "exp_avg.other": torch.zeros(1)}):
        with pytest.raises(ConfigError, match="missing or of another shape"):
            load_optimizer_state(fresh, model, wrong)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_weight_goes_on_from_its_own_number_of_steps(optimizer):
    """An expert has a gradient only in the steps that send it a token."""
    config = _config(optimizer=optimizer, learning_rate=1e-2)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("rare", "late", "head")})
    again = copy.deepcopy(model)
    made, fresh = (make_optimizer(config, each) for each in (model, again))

    def take(optimizer, model, number):
        for name, parameter in model.named_parameters():
            is_given = {"rare": number in (0, 3), "late": number > 1}.get(name[:4], True)
            parameter.grad = torch.full_like(parameter, number + 1.0) if is_given else None
        optimizer.step()

    for number in range(4):
        take(made, model, number)
    state = {name: tensor.clone() for name, tensor in optimizer_state(made, model).items()}
    assert {name: float(state[name]) for name in state if name.startswith("updates")} == {
        "updates": 4.0,
        **dict.fromkeys(["updates.rare.weight", "updates.rare.bias"], 2.0),
        **dict.fromkeys(["updates.late.weight", "updates.late.bias"], 2.0),
    }
    again.load_state_dict(model.state_dict())
    load_optimizer_state(fresh, again, state)
    take(made, model, 4)
    take(fresh, again, 4)
    assert world.are_equal(model.state_dict(), again.state_dict())


def test_seed_and_step_decide_which_groups_are_taken_together(policy, rows):
    """Half of the groups in each mini-batch. A seed may be a time in nanoseconds."""
    made = _trainer(policy, rows, _config(minibatches=2), "grpo")
    halves = {}
    for seed, step in itertools.product((0, 1, 2, 1_790_000_000_000_000_000), range(3)):
        made.config = _config(minibatches=2, seed=seed)
        first, second = made._members(step)
        assert sorted(first + second) == list(range(len(rows)))
        assert made._members(step) == [first, second]
        halves[seed, step] = frozenset(first)
    assert len({halves[seed, 0] for seed in range(3)}) > 1
    assert len({halves[0, step] for step in range(3)}) > 1


@pytest.mark.parametrize("prox", [False, True])
def test_numbers_of_a_step(policy, rows, prox):
    """Distances are to what sampled; with proximal logprobs, here the policy's own, the ratio is 1,
    and nothing is clipped."""
    made = _trainer(policy, rows, _config(), "grpo", prox=prox)
    numbers = world.step(made)
    now, old = (
        torch.cat([torch.tensor(row[name]) for row in rows]) for name in ("old_logprobs", "old")
    )
    gaps = now - old
    assert numbers["tokens"] == len(gaps)
    assert numbers["prompt_tokens"] == sum(len(row["prompt_ids"]) for row in rows)
    assert numbers["approx_kl"] == pytest.approx(float((gaps.exp() - 1 - gaps).mean()), rel=1e-4)
    assert numbers["ratio_max"] == pytest.approx(math.exp(gaps.max()), rel=1e-4)
    advantages = made.batch.token_advantages
    rises = (gaps.exp() > 1.2) & (advantages > 0)
    taken = rises | ((gaps.exp() < 0.8) & (advantages < 0))
    share = 0.0 if prox else float(taken.float().mean())
    assert numbers["clip_fraction"] == pytest.approx(share, abs=1e-9)
    torch.testing.assert_close(made.logprobs, now, rtol=0, atol=1e-5)


def test_good_answers_are_learned_by_heart(policy, rows):
    """−0.3 · mean logprob over the tokens of the answers of reward 0.5 and more; those of equal
    rewards are passed too."""
    for row in rows[:4]:
        row["reward"] = 1.0
    made = _trainer(policy, rows, _config(nll_coef=0.3, nll_reward=0.5, token_budget=60), "grpo")
    made.batch = replace(made.batch, rewards=torch.tensor([row["reward"] for row in rows]))
    assert len(made.active) == len(rows)
    expected, gradients = _expected(policy, rows)
    model = load_model(policy, dtype=torch.float64)
    good = [{**row, "old_logprobs": [0.0]} for row in rows if row["reward"] >= 0.5]
    assert 4 < len(good) < len(rows)
    tokens = sum(len(row["completion_ids"]) for row in good)
    nll = sum(-0.3 / tokens * world.own_logprobs(model, row).sum() for row in good)
    nll.backward()
    for name, parameter in model.named_parameters():
        gradients[name] += parameter.grad.float()
    _compare(made, (expected + nll.item(), gradients))


def test_a_step_divides_by_the_idle_rollouts_too(policy, rows):
    """Through `train`: the loss of twelve rollouts over the weights of all sixteen."""
    for row in rows[:4]:
        row["reward"] = 1.0
    made = _trainer(policy, rows, _config(), "grpo")
    made.train()
    (update,) = made.updates
    assert update["rollouts"] == 12
    assert update["loss"] == pytest.approx(_expected(policy, rows)[0], abs=1e-6)


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
    found = made.compute_logprobs([3, 7])
    places = made.batch.sequences.completions.places(torch.tensor([3, 7]))
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
