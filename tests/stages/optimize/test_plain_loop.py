"""The whole stage against a plain float64 loop that reads the same rows: final weights, and what is
said of every rollout."""

import copy
import math
from statistics import fmean, stdev

import pytest
import torch

from quiver.stages.model.loading import load_model
from tests.stages.optimize import world

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


def test_three_epochs_are_those_of_a_plain_loop(store, policy):
    """A dropped rollout in the middle, temperatures that differ from row to row, a KL that moves
    the group of equal rewards too, other decay rates, and ratios to what the engine said."""
    start = load_model(policy, dtype=torch.float32)
    rows = []
    for number, prompt in enumerate(world.prompts(4)):
        for index, temperature in enumerate((0.7, 1.0, 1.3)):
            rows += world.sample(start, [prompt], 1, temperature=temperature, seed=number)
            rows[-1] |= {"rollout_id": f"r-{number:03d}-{index}", "group_id": f"g-{number:03d}"}
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
            now, advantage = world.own_logprobs(model, row), advantages[row["rollout_id"]]
            ratio = (now - torch.tensor(row["old_logprobs"])).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            gap = torch.tensor(row["ref"]) - now
            loss = loss + (-gain + KL * gap.square() / 2).mean() / len(kept)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    refs = [row.pop("ref") for row in rows]
    made = world.scored(store, policy, rows, _rewards)
    reference = world.write_logprobs(store, made[0], refs)
    chosen = world.config(
        learning_rate=RATE, betas=BETAS, eps=EPS, epochs=EPOCHS, kl_coef=KL, grad_clip=1e9
    )
    done = world.trained(store, policy, made, chosen, ref_logprobs=reference.ref)

    expected = dict(model.named_parameters())
    moved = 0.0
    for name, weight in world.weights(done).items():
        torch.testing.assert_close(weight, expected[name].float(), rtol=0, atol=2e-6)
        moved = max(moved, float((weight - world.weights(policy)[name]).abs().max()))
    assert moved > 5e-4
    said = world.advantages(store, done)
    assert [row["rollout_id"] for row in said] == [row["rollout_id"] for row in rows]
    for row, told in zip(rows, said, strict=True):
        if row["rollout_id"] not in advantages:
            assert (told["drop_reason"], told["mean_ratio"]) == ("not_scored", None)
            continue
        assert told["advantage"] == pytest.approx(advantages[row["rollout_id"]], abs=1e-5)
        with torch.no_grad():
            last = world.own_logprobs(before, row)
        ratio = (last - torch.tensor(row["old_logprobs"])).exp()
        assert told["mean_ratio"] == pytest.approx(float(ratio.mean()), abs=1e-4)
        assert told["mean_logprob"] == pytest.approx(float(last.mean()), abs=1e-4)
        assert not math.isclose(told["mean_ratio"], 1.0, abs_tol=1e-4)
