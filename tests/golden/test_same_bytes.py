"""What has no turns is written byte for byte as before there were any: content hashes of versions
in the golden store, made again by force."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quiver.stages.common.runtime.runner import Call, perform
from quiver.stages.common.store import Store

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_bytes())["finished"]
NAMES = {
    "prompt": ["rows of JSONL, first part of a shuffle", "a template of one's own, no limit"],
    "generate": ["scripted", "a script in a file"],
    "reward": ["builtin and own functions", "a builtin function, clipped"],
}
ENTRIES = [entry for entry in EXPECTED if entry["name"] in NAMES.get(entry["stage"], ())]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['stage']}: {entry['name']}")
def test_what_has_no_turns_is_written_as_before(tmp_path, monkeypatch, entry):
    folder = tmp_path / "stores"
    shutil.copytree(HERE / "stores", folder)
    monkeypatch.chdir(folder / "inputs")
    path = folder / "finished"
    before = Store(path).open(entry["ref"]).manifest
    outcome = perform(
        Call(entry["stage"], entry["config"], path, entry["refs"], entry.get("into"), force=True)
    )
    after = Store(path).open(outcome.ref).manifest
    assert after.ref != before.ref
    assert after.content_hash == before.content_hash
    assert (after.kind_schema, after.required_features) == (f"{after.kind}/1", ())
    assert [entry.sha256 for entry in after.files] == [entry.sha256 for entry in before.files]


def test_each_of_them_is_there():
    assert len(ENTRIES) == sum(map(len, NAMES.values()))
