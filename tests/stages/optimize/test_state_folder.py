"""Tensors below a policy: in one file, or in several of bounded size."""

import json

import pytest
import torch
from safetensors import safe_open

from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store.writer import open_staging
from quiver.stages.model.checkpoints import PolicyConfig
from quiver.stages.optimize.optimizer import read_tensors, write_tensors
from tests.stages.optimize import world

TENSORS = {
    "long": torch.arange(300, dtype=torch.float32),  # 1,200 bytes
    "wide": torch.arange(600, dtype=torch.float32).reshape(20, 30).T,  # 2,400
    "short": torch.arange(5),  # 40
    "updates": torch.tensor([3.0]),
}


@pytest.mark.parametrize(
    "file_bytes, files",
    [
        (10**9, [["long", "short", "updates", "wide"]]),
        (1240, [["wide"], ["long", "short"], ["updates"]]),
        (3640, [["long", "short", "wide"], ["updates"]]),
    ],
)
def test_files_hold_no_more_than_is_allowed_but_one_tensor_at_least(store, file_bytes, files):
    config = PolicyConfig(model="none", source_hash="0" * 64)
    plan = Plan(store, stage="policy", stage_version=1, config=config, run="a", kinds=("policy",))
    with open_staging(plan) as staging:
        writer = staging.writers["policy"]
        write_tensors(writer.folder / "extra", TENSORS, file_bytes=file_bytes)
        writer.finish()
        policy = staging.publish()
    paths = sorted((policy.files.folder / "extra").glob("*.safetensors"))
    if len(files) > 1:
        names = [f"state-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
        assert [path.name for path in paths] == names
    contents = []
    for path in paths:
        with safe_open(path, "pt") as file:
            contents.append(sorted(file.keys()))
    assert contents == files
    assert world.are_equal(read_tensors(policy, "extra"), TENSORS)
    assert json.loads(policy.files.read("extra/state.json")) == {"files": len(files)}
