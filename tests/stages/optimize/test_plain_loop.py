"""The whole stage against a plain float64 loop that reads the same rows: final weights, and what is
said of every rollout."""

import copy
import math
from statistics import fmean, stdev

import pytest
import torch

from quiver.stages.common.models.loading import load_model
from tests.stages.optimize import world
from tests.stages.optimize.world import config as _config
from tests.stages.optimize.world import trained as _run

BETAS, RATE, EPS, KL = (0.8, 0.9), 1e-3, 1e-3, 0.2
EPOCHS = 3


def _rewards(row: dict) -> float | None:
    """One rollout of group 1 has none; those of group 2 are equal."""
    if row["rollout_id"] == "r-001-1":
        return None
    return 0.5 if row["group_id"] == "g-002" else world.even_share(row)


def _advantages(rows: list[dict]) -> dict[str, float]:
    """(R − mean) / (std + 1e-4) over the scored rollouts of each group, by rollout."""
    advantages = {}
    for group in {row["group_id"] for row in rows}:
        scored = {r["rollout_id"]: _rewards(r) for r in rows if r["group_id"] == group}
        scored = {name: reward for name, reward in scored.items() if reward is not None}
        mean, std = fmean(scored.values()), stdev(scored.values())
        advantages |= {name: (reward - mean) / (std + 1e-4) for name, reward in scored.items()}
    return advantages


def _logprobs(model, row: dict) -> torch.Tensor:
    """[t] of one rollout at its own temperature."""
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(row["prompt_ids"]) - 1 : -1]
    table = (logits / row["temperature"]).log_softmax(-1)
    return table.gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]


def test_three_epochs_are_those_of_a_plain_loop(store, policy):
    """A dropped rollout in the middle, temperatures that differ from row to row, a KL that moves
    the group of equal rewards too, other decay rates, and ratios to what the engine said."""
    start = load_model(policy, dtype=torch.float32)
    rows = [
        row
        for number, prompt in enumerate(world.prompts(4))
        for index, row in enumerate(
            sampled
            for temperature in (0.7, 1.0, 1.3)
            for sampled in world.sample(start, [prompt], 1, temperature=temperature, seed=number)
        )
        if not row.update(
            rollout_id=f"r-{number:03d}-{index}", group_id=f"g-{number:03d}", sample_index=index
        )
    ]
    generator = torch.Generator().manual_seed(1)
    for row in rows:
        shifts = torch.rand(len(row["old_logprobs"]), generator=generator).tolist()
        row["ref"] = [old - shift for old, shift in zip(row["old_logprobs"], shifts, strict=True)]
    advantages = _advantages(rows)
    kept = [row for row in rows if row["rollout_id"] in advantages]

    model = load_model(policy, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0
    )
    for _ in range(EPOCHS):
        before = copy.deepcopy(model)
        loss = 0.0
        for row in kept:
            now, advantage = _logprobs(model, row), advantages[row["rollout_id"]]
            ratio = (now - torch.tensor(row["old_logprobs"])).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            gap = torch.tensor(row["ref"]) - now
            loss = loss + (-gain + KL * gap.square() / 2).mean() / len(kept)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    rollouts = world.write_rollouts(
        store, policy, [{k: v for k, v in row.items() if k != "ref"} for row in rows]
    )
    made = rollouts, world.write_rewards(store, rollouts, _rewards)
    reference = world.write_logprobs(store, rollouts, [row["ref"] for row in rows])
    chosen = _config(
        learning_rate=RATE, betas=BETAS, eps=EPS, epochs=EPOCHS, kl_coef=KL, grad_clip=1e9
    )
    done = _run(store, policy, made, chosen, ref_logprobs=reference.ref)

    expected = dict(model.named_parameters())
    moved = 0.0
    for name, weight in world.weights(done).items():
        torch.testing.assert_close(weight, expected[name].float(), rtol=0, atol=2e-6)
        moved = max(moved, float((weight - world.weights(policy)[name]).abs().max()))
    assert moved > 5e-4
    said = store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    assert [row["rollout_id"] for row in said] == [row["rollout_id"] for row in rows]
    for row, told in zip(rows, said, strict=True):
        if row["rollout_id"] not in advantages:
            assert (told["drop_reason"], told["mean_ratio"]) == ("not_scored", None)
            continue
        assert told["advantage"] == pytest.approx(advantages[row["rollout_id"]], abs=1e-5)
        with torch.no_grad():
            last = _logprobs(before, row)
        ratio = (last - torch.tensor(row["old_logprobs"])).exp()
        assert told["mean_ratio"] == pytest.approx(float(ratio.mean()), abs=1e-4)
        assert told["mean_logprob"] == pytest.approx(float(last.mean()), abs=1e-4)
        assert not math.isclose(told["mean_ratio"], 1.0, abs_tol=1e-4)


def test_each_epoch_deals_the_groups_out_anew(store, policy):
    """Four mini-batches of one group each, told apart by their tokens."""
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(4), 2)
    for number, row in enumerate(rows):
        end = number // 2 + 1
        row["completion_ids"], row["old_logprobs"] = (
            row[name][:end] for name in ("completion_ids", "old_logprobs")
        )
    lengths = [sum(len(row["completion_ids"]) for row in rows[at : at + 2]) for at in (0, 2, 4, 6)]
    assert len(set(lengths)) == 4
    rollouts = world.write_rollouts(store, policy, rows)
    rewards = world.write_rewards(store, rollouts, lambda row: float(row["sample_index"]))
    done = _run(store, policy, (rollouts, rewards), _config(minibatches=4, epochs=4))
    tokens = store.open(done.manifest.metrics["updates"]).table()["tokens"].to_pylist()
    orders = [tuple(tokens[at : at + 4]) for at in (0, 4, 8, 12)]
    assert all(sorted(order) == sorted(lengths) for order in orders)
    assert len(set(orders)) > 1
