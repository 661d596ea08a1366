"""The optimize stage on a CUDA device: the CPU's step in float32, and its own logprobs in bfloat16 within the audit's limit."""

import pytest
import torch
from safetensors.torch import load_file

from stages.optimize.stage import Config, run
from tests.stages.optimize import world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def optimize(store, policy, made, **values):
    config = Config(learning_rate=1e-3, grad_clip=1e9, **values)
    return store.open(run(config, store, policy=policy.ref, rollouts=made[0].ref, rewards=made[1].ref, force=True))


def test_float32_takes_the_cpus_step(store, policy, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    made = world.make(store, policy, world.even_share)
    rows = [
        store.open(optimize(store, policy, made, device=device, precision="fp32").manifest.metrics["updates"]).table()
        for device in ("cpu", "cuda")
    ]
    for name in ("loss", "grad_norm", "entropy"):
        assert rows[1][name].to_pylist() == pytest.approx(rows[0][name].to_pylist(), rel=1e-4, abs=1e-6)


def test_bfloat16_passes_the_audit_and_keeps_float32_weights(store, policy):
    made = world.make(store, policy, world.even_share)
    done = optimize(store, policy, made, device="cuda")
    assert done.manifest.environment["device"].startswith("cuda")
    assert 0 < done.manifest.metrics["audit"]["mean_gap"] < 0.1
    assert {tensor.dtype for tensor in load_file(done.path / "model.safetensors").values()} == {torch.float32}
