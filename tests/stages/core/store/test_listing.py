"""Numbers and summaries of one kind: what the manifests say, however the index looks."""

import builtins
import json
import re
import shutil
from pathlib import Path

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import ConflictError
from quiver.schemas.manifest import canonical, digest
from quiver.schemas.plain import read_json
from quiver.stages.core.store import Store
from quiver.stages.core.store import disk as disk_module
from quiver.stages.core.store.listing import Summary, checksum_of, manifest_fields
from quiver.stages.core.store.retention import put_aside, remove
from tests.faults.seam import watched
from tests.stages.core.store.test_store import Settings, commit


def commits(store, *seeds):
    return [commit(store, Settings(seed=seed), shards=1) for seed in seeds]


def index_of(store):
    return Path(store.url) / "a/logprobs/.index"


def test_few_files_are_opened_with_many_versions_as_with_few(store, monkeypatch):
    """To find a version, and to commit one. The index is not counted: how often it is written
    depends on whether the folder's clock tells two changes apart."""
    counts = []
    opened = []

    def count(function, place):
        def counted(*arguments, **keywords):
            if "/.index" not in f"/{arguments[place]}":
                opened.append(function)
            return function(*arguments, **keywords)

        return counted

    monkeypatch.setattr(builtins, "open", count(builtins.open, 0))
    monkeypatch.setattr(disk_module.Disk, "read", count(disk_module.Disk.read, 1))
    for number in (3, 12):
        while len(store.numbers("a", "logprobs")) < number:
            commits(store, len(store.numbers("a", "logprobs")))
        version = store.open("a/logprobs@2")
        opened.clear()
        assert store.find("a", "logprobs", version.manifest.run_key).ref == version.ref
        assert store.find("a", "logprobs", "0" * 64) is None
        commits(store, 100 + number)
        counts.append(len(opened))
    assert counts[0] == counts[1] > 0


DAMAGES = {
    "lost": lambda path, text: path.unlink(),
    "torn": lambda path, text: path.write_bytes(text[: len(text) // 2]),
    "empty": lambda path, text: path.write_bytes(b""),
    "zeros": lambda path, text: path.write_bytes(bytes(len(text))),
    "flipped": lambda path, text: path.write_bytes(text.replace(b"2026", b"2025")),
    "nested": lambda path, text: path.write_bytes(b"[" * 200_000),
    "no file": lambda path, text: (path.unlink(), path.mkdir()),
    "a number that is not there": lambda path, text: path.write_bytes(
        sealed(text.replace(b"\n2 ", b"\n7 "))
    ),
}


def sealed(text: bytes) -> bytes:
    """The index with the checksum that fits."""
    _, lines = text.split(b"\n", 1)
    return b"%s\n%s" % (checksum_of(lines), lines)


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_index_is_made_anew_from_the_manifests(store, damage):
    versions = commits(store, 0, 1, 2)
    store.find("a", "logprobs", "0" * 64)
    path = index_of(store)
    text = path.read_bytes()
    DAMAGES[damage](path, text)
    run_keys = [version.manifest.run_key for version in versions]
    summaries = [summary for _, summary in store.summaries("a", "logprobs")]
    assert [summary.run_key for summary in summaries] == run_keys
    for version, run_key in zip(versions, run_keys, strict=True):
        assert store.find("a", "logprobs", run_key).ref == version.ref
    assert damage == "no file" or path.read_bytes() == text


def test_versions_that_come_or_go_by_hand_are_seen(store):
    version = commits(store, 0, 1, 2)[1]
    folder, run_key = version.files.folder, version.manifest.run_key
    elsewhere = Path(store.url).with_name("elsewhere")
    store.summaries("a", "logprobs")
    shutil.move(folder, elsewhere)
    assert store.find("a", "logprobs", run_key) is None
    summaries = store.listing("a", "logprobs").summaries()
    assert [summary.number for summary in summaries] == [1, 3]
    shutil.move(elsewhere, folder)
    assert store.find("a", "logprobs", run_key).ref == version.ref


def test_versions_are_seen_beside_an_older_copy_that_was_put_back(store):
    """`cp -a` brings the folder's old modification time and the old index."""
    commits(store, 0)
    store.find("a", "logprobs", "0" * 64)
    copy = Path(store.url).with_name("copy")
    shutil.copytree(store.url, copy)
    (second,) = commits(store, 1)
    shutil.copytree(copy, store.url, dirs_exist_ok=True)
    assert store.find("a", "logprobs", second.manifest.run_key).ref == second.ref
    refs = [str(ref) for ref, _ in store.summaries("a", "logprobs")]
    assert refs == ["a/logprobs@1", "a/logprobs@2"]


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_manifest_that_was_torn_and_mended_is_seen(store, is_indexed):
    (version,) = commits(store, 0)
    run_key = version.manifest.run_key
    if is_indexed:
        assert store.find("a", "logprobs", run_key).ref == version.ref
    path = version.files.path("manifest.json")
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    assert store.find("a", "logprobs", run_key) is None
    index_of(store).unlink(missing_ok=True)
    ((_, summary),) = store.summaries("a", "logprobs")
    assert summary.error.startswith("E-CORRUPT a/logprobs@1")
    path.write_bytes(whole)
    assert store.find("a", "logprobs", run_key).ref == version.ref
    ((_, summary),) = store.summaries("a", "logprobs")
    assert summary.error == "" and summary.rows == 2


def test_a_manifest_of_other_spaces_has_the_same_summary(store):
    """Another program wrote it; its checksum is that of its fields."""
    (version,) = commits(store, 0)
    before = store.summaries("a", "logprobs")
    path = version.files.path("manifest.json")
    path.write_text(json.dumps(read_json(path.read_bytes()), indent=1))
    index_of(store).unlink()
    assert store.summaries("a", "logprobs") == before


def test_a_version_that_was_made_again_while_it_was_torn_keeps_its_place(store):
    first, _ = commits(store, 0, 1)
    path = first.files.path("manifest.json")
    whole = path.read_bytes()
    path.write_bytes(b"{")
    (again,) = commits(store, 0)
    path.write_bytes(whole)
    remove(store, again.ref)
    assert store.listing("a", "logprobs").visible(expired=False) == [1, 2]


@pytest.mark.parametrize("stage", ["two words", f"x\n2 {'0' * 64} x 1 1 x"])
def test_a_manifest_whose_words_would_forge_a_line_is_told(store, stage):
    """It comes from elsewhere, with the right checksum."""
    (version,) = commits(store, 0)
    path = version.files.path("manifest.json")
    fields = read_json(path.read_bytes())
    del fields["checksum"]
    fields["stage"] = stage
    path.write_bytes(canonical({**fields, "checksum": digest(fields)}))
    for _ in range(2):
        ((_, summary),) = store.summaries("a", "logprobs")
        assert summary.error.startswith("E-CORRUPT a/logprobs@1")


def test_a_store_that_cannot_be_written_is_read(store):
    (version,) = commits(store, 0)

    def refuse(name, path, call):
        if name == "fsync":
            return call()
        raise OSError(30, "Read-only file system")

    index_of(store).unlink(missing_ok=True)
    with watched(refuse):
        assert store.find("a", "logprobs", version.manifest.run_key).ref == version.ref
        assert len(store.summaries("a", "logprobs")) == 1
    assert not index_of(store).exists()


# -- numbers


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_number_is_given_once(store, is_lost):
    """Also that of a removed version, and of one whose mark alone is left."""
    commits(store, 0, 1, 2)
    remove(store, "a/logprobs@3")
    if is_lost:
        shutil.rmtree(Path(store.url) / "a/logprobs/v000003")
    index_of(store).unlink(missing_ok=True)
    (again,) = commits(store, 2)
    assert str(again.ref) == "a/logprobs@4" and commits(store, 3)[0].ref.version == 5
    assert store.numbers("a", "logprobs") == [1, 2, 4, 5]
    assert verify(store) == (4, [])


def test_a_version_that_is_made_again_has_a_new_number_and_the_same_content(store):
    """Its first folder was deleted by hand; what was made of it says what it was made of."""
    first, _ = commits(store, 0, 1)
    commit(store, Settings(seed=2), inputs={"other": first})
    shutil.rmtree(first.files.folder)
    assert [error.code for error in verify(store)[1]] == ["E-LINEAGE"]
    (again,) = commits(store, 0)
    assert again.ref.version == 4
    assert again.manifest.content_hash == first.manifest.content_hash
    assert again.manifest.run_key == first.manifest.run_key


def test_a_version_that_one_look_at_the_folder_missed_is_seen(store, monkeypatch):
    """POSIX leaves open if a name that is added meanwhile is listed."""
    commits(store, 0, 1)
    real = disk_module.Disk.list
    looks = []

    def look(self, prefix):
        names = real(self, prefix)
        looks.append(prefix)
        is_first = looks.count("a/logprobs") == missed
        return [name for name in names if not (is_first and re.fullmatch("v0*[12]", name))]

    for missed in range(1, 12):
        looks.clear()
        with monkeypatch.context() as patch:
            patch.setattr(disk_module.Disk, "list", look)
            (version,) = commits(store, missed + 10)
        assert version.ref.version == missed + 2


def test_the_highest_number_may_have_more_digits(store):
    for name in ("v000999", "v0001000", "v999999.expired", "v0000001", "v1000001.txt"):
        (Path(store.url) / "a/logprobs" / name).mkdir(parents=True)
    assert str(commits(store, 1)[0].ref) == "a/logprobs@1000000"
    assert Store(store.url).numbers("a", "logprobs") == [999, 1_000_000]


def test_no_version_is_committed_where_no_number_is_left(store):
    """A copy by hand has the highest number."""
    (first,) = commits(store, 0)
    shutil.copytree(first.files.folder, Path(store.url) / "a/logprobs/v999999999999")
    with pytest.raises(ConflictError, match="has the highest number") as caught:
        commits(store, 1)
    assert caught.value.next == f"move {store.url}/a/logprobs/v999999999999* away"
    shutil.rmtree(Path(store.url) / "a/logprobs/v999999999999")
    assert commits(store, 1)[0].ref.version == 2


def test_a_copy_of_a_version_under_another_number_is_neither(store):
    (first,) = commits(store, 0)
    shutil.copytree(first.files.folder, Path(store.url) / "a/logprobs/v000009")
    assert store.find("a", "logprobs", first.manifest.run_key).ref == first.ref
    assert "its number is 1" in store.summaries("a", "logprobs")[1][1].error
    assert put_aside(store, "a/logprobs@9").version == 9
    assert verify(store) == (1, [])
    assert commits(store, 1)[0].ref.version == 10


def test_a_version_is_no_source_of_itself():
    fields = {"version": 1, "run": "a", "kind": "policy", "run_key": "0" * 64, "stage": "optimize"}
    fields |= {"rows": 0, "created": "2026-01-01", "bytes": {}, "content_hash": "1" * 64}
    fields["models"] = [{"ref": "a/policy@1", "role": "policy"}]
    fields["inputs"] = [{"ref": "a/policy@0", "role": "start"}]
    assert Summary.of(fields, 1).sources == {"a/policy@0": "start"}


def test_fields_are_read_of_a_whole_manifest_alone(store):
    raw = commit(store).files.path("manifest.json").read_bytes()
    assert manifest_fields(raw)["metrics"] == {"x": 1.5}
    damaged = raw.replace(b"1.5", b"2.5")
    assert damaged != raw and manifest_fields(damaged) is None


def test_a_summary_tells_of_what_a_version_was_made():
    sources = {"a/policy@1": "policy", "a/rollouts@2": "rollouts"}
    trained, averaged = (
        Summary(3, stage=stage, sources=sources) for stage in ("optimize", "average")
    )
    assert (trained.source("rollouts"), trained.source("base")) == ("a/rollouts@2", None)
    assert (trained.trained_from, averaged.trained_from) == ("a/policy@1", None)


def test_what_a_sweep_made_is_newest_only_if_there_is_nothing_else(store):
    for seed in range(3):
        commit(store, Settings(seed=seed), note=f"sweep 0123456789ab, cell {seed} (7)")
    listing = store.listing("a", "logprobs")
    assert listing.newest_not_of_sweep([1, 2, 3]) == 3
    commit(store, Settings(seed=3))
    commit(store, Settings(seed=4), note="sweep 0123456789ab, cell 4 (7)")
    assert store.listing("a", "logprobs").newest_not_of_sweep([1, 2, 3, 4, 5]) == 4
