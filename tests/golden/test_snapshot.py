"""The store as it was when its format was made: what reads it, and what is written now, agree."""

import json
import re
import shutil
from pathlib import Path

import pytest

from quiver.flows.verification import verify
from quiver.schemas.manifest import FORMAT
from quiver.schemas.plain import flatten
from quiver.stages.core.store import Store
from tests.golden import make_snapshot


@pytest.fixture
def snapshot(tmp_path) -> Store:
    return Store(shutil.copytree(make_snapshot.PATH, tmp_path / "snapshot"))


def keys_by_file(path: Path) -> dict[str, set[str]]:
    """What a store's small files say of what, by their names below it; hashes are left out of
    names, packages out of keys."""
    keys = {}
    for file in filter(Path.is_file, path.rglob("*")):
        name = file.relative_to(path)
        if make_snapshot.NOT_KEPT & set(name.parts):
            continue
        is_json = file.read_bytes()[:1] == b"{"
        fields = flatten(json.loads(file.read_bytes())) if is_json else {}
        named = {key for key in fields if not key.startswith("environment.packages")}
        keys[re.sub(r"-[0-9a-f]{8}\.", "-HASH.", str(name))] = named
    return keys


def test_the_snapshot_is_whole_and_reads_back(snapshot, tmp_path):
    assert verify(snapshot) == (3, [])
    assert make_snapshot.rows(snapshot) == make_snapshot.rows(make_snapshot.make(tmp_path / "new"))
    (entry,) = snapshot.history("bench", "best")
    assert entry.ref == str(snapshot.resolve("bench/rewards@best")) == "bench/rewards@1"


def test_the_same_files_and_keys_are_written_now(tmp_path):
    """Otherwise the format is another one: give it the next number, then make the snapshot anew."""
    new = make_snapshot.make(tmp_path / "new")
    assert keys_by_file(Path(new.url)) == keys_by_file(make_snapshot.PATH)
    for version in new.versions():
        written = make_snapshot.PATH / version.ref.folder / "manifest.json"
        fields = json.loads(written.read_bytes())
        assert (fields["format"], fields["schema"]) == (FORMAT, version.manifest.kind_schema)
        if not fields["inputs"]:  # whose hashes are those of files that pyarrow writes
            assert fields["run_key"] == version.manifest.run_key
