"""otb: the baseline of each token, by what the policy says of the whole vocabulary before the first
step."""

import pytest
import torch

from quiver.stages.model.loading import load_model
from tests.stages.optimize import world


@pytest.mark.parametrize("packing", ["shared", "single"])
def test_the_stage_takes_the_baseline_from_the_policy_that_it_starts_from(store, policy, packing):
    """Σ p² and p by a plain pass in float64 at each rollout's temperature; a rollout without a
    reward and one that is masked count in no baseline. The entropy of the first step is −Σ p log p,
    by the same pass."""
    rows = world.rows_of(policy, 2, 4, temperature=0.8)
    for row in rows:
        row["finish_reason"] = "length" if row["rollout_id"] == "r-001-2" else "stop"
    made = world.scored(
        store,
        policy,
        rows,
        lambda row: None if row["rollout_id"] == "r-000-1" else world.even_share(row),
    )
    config = world.config(
        algorithm="otb", on_length="mask", mask_counted=True, epochs=2, packing=packing
    )
    done = world.trained(store, policy, made, config)
    model = load_model(policy, dtype=torch.float64)
    members = [row for row in rows if row["rollout_id"] not in ("r-000-1", "r-001-2")]
    weights = {}
    entropies = []
    for row in members:
        table, _ = world.own_pass(model, row)
        chances = table.exp()
        entropies += (-chances * table).sum(-1).tolist()
        energies = 1 - 2 * world.of_ids(chances, row) + chances.square().sum(-1)
        weights[row["rollout_id"]] = energies.cumsum(0).tolist()
    found = {
        row["rollout_id"]: row["advantage"] for row in world.advantages(store, done) if row["kept"]
    }
    assert found.keys() == weights.keys()
    for row in members:
        expected = []
        for t in range(len(row["completion_ids"])):
            peers = [
                (weights[peer["rollout_id"]][t], world.even_share(peer))
                for peer in members
                if peer["group_id"] == row["group_id"] and len(peer["completion_ids"]) > t
            ]
            baseline = sum(w * reward for w, reward in peers) / sum(w for w, _ in peers)
            expected.append(world.even_share(row) - baseline)
        assert found[row["rollout_id"]] == pytest.approx(expected, abs=1e-5)
    assert done.manifest.metrics["audit"]["mean_gap"] < 1e-4
    # the pass before the first step gave Σ p² in place of the entropy; the steps do not
    first = world.updates(store, done)[0]
    assert first["entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
