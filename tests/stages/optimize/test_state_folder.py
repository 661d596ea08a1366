"""Tensors below a policy: in one file, or in several of bounded size."""

import json

import pytest
import torch
from safetensors import safe_open

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.checkpoints import PolicyConfig
from quiver.stages.common.runtime.stage import Plan
from quiver.stages.common.store import Store, Version
from quiver.stages.common.store.writer import open_staging
from quiver.stages.optimize import state_folder

TENSORS = {
    "long": torch.arange(300, dtype=torch.float32),  # 1,200 bytes
    "wide": torch.arange(600, dtype=torch.float32).reshape(20, 30).T,  # 2,400
    "short": torch.arange(5),  # 40
    "updates": torch.tensor([3.0]),
}


def commit(store: Store, file_bytes: int, **note) -> Version:
    """A policy with these tensors below it; `note`: what state.json says otherwise."""
    config = PolicyConfig(model="none", source_hash="0" * 64)
    plan = Plan(store, stage="policy", stage_version=1, config=config, run="a", kinds=("policy",))
    with open_staging(plan) as staging:
        writer = staging.writers["policy"]
        state_folder.write(writer.folder / "extra", TENSORS, file_bytes=file_bytes, of="test")
        path = writer.folder / "extra/state.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **note}))
        writer.finish()
        return staging.publish()


@pytest.mark.parametrize(
    "file_bytes, files",
    [
        (10**9, [["long", "short", "updates", "wide"]]),
        (1240, [["long"], ["wide"], ["short", "updates"]]),
        (3640, [["long", "short", "wide"], ["updates"]]),
    ],
)
def test_files_hold_no_more_than_is_allowed_but_one_tensor_at_least(store, file_bytes, files):
    policy = commit(store, file_bytes)
    paths = sorted((policy.files.folder / "extra").glob("*.safetensors"))
    if len(files) > 1:
        names = [f"state-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
        assert [path.name for path in paths] == names
    held = []
    for path in paths:
        with safe_open(path, "pt") as file:
            held.append(sorted(file.keys()))
    assert held == files
    tensors = state_folder.read(policy, "extra", of="test")
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    said = json.loads(policy.files.read("extra/state.json"))
    assert said == {"files": len(files), "of": "test"}


@pytest.mark.parametrize("note", [{"files": "3"}, {"files": 0}, {"of": "else"}])
def test_what_is_no_such_state_is_refused(store, note):
    with pytest.raises(ConfigError, match="expected a number of files and"):
        state_folder.read(commit(store, 1240, **note), "extra", of="test")


def test_a_file_that_is_missing_is_an_error(store):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        state_folder.read(commit(store, 1240, files=4), "extra", of="test")
