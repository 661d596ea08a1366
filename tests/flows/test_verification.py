"""What `quiver verify` sees, what is deleted on purpose, and what is put aside."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from quiver.flows.cli import versions as versions_command
from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, CorruptError, LineageError, QuiverError
from quiver.schemas.manifest import FileEntry, ModelEntry, canonical, content_hash, digest
from quiver.stages.core.files import sha256_of as sha256
from quiver.stages.core.lineage import open_input
from quiver.stages.core.store import Store, arrow_child
from quiver.stages.core.store.arrow_check import ArrowCheck
from quiver.stages.core.store.disk import Disk
from quiver.stages.core.store.retention import Rule, collect, put_aside, remove
from quiver.stages.core.store.storage import read_table
from quiver.stages.model.checkpoints import model_entry
from tests.stages.core.store.histories import make_policy, make_table
from tests.stages.core.store.test_store import Settings, commit, work_on
from tests.stages.optimize import world
from tests.writing import begin


def rewrite(version, **changes) -> None:
    """The manifest with other words, and the checksum that fits them."""
    path = version.files.folder / "manifest.json"
    data = {**json.loads(path.read_bytes()), **changes}
    del data["checksum"]
    path.write_bytes(canonical({**data, "checksum": digest(data)}))


def tear(version) -> None:
    (version.files.folder / "manifest.json").write_bytes(b"{")


def said(store, ref=None) -> str:
    return " | ".join(str(error) for error in verify(store, ref)[1])


def test_the_manifest_is_held_to_its_files(store):
    version = commit(store)
    rewrite(version, rows=5)
    assert "says 5 rows" in said(store)
    rewrite(version, rows=4, content_hash="0" * 64)
    assert "content_hash does not match its files" in said(store)


def test_an_unknown_schema_is_refused_by_every_reader(store):
    version = commit(store)
    files = version.manifest.files
    rewrite(version, schema="logprobs/9", content_hash=content_hash("logprobs/9", files))
    for read in (lambda s: s.open("a/logprobs@1").table(), lambda s: s.open("a/logprobs@latest")):
        with pytest.raises(CorruptError, match="logprobs/9") as caught:
            read(Store(store.url))
        assert "expected logprobs/1" in caught.value.message
    assert "logprobs/9" in said(Store(store.url))


def test_models_are_held_to_their_hashes(store, policy):
    model = model_entry("policy", policy)
    commit(store, models=(model,))
    assert said(store) == ""
    for number, part in ((2, "weights"), (3, "tokenizer")):
        other = model.model_copy(update={part: "f" * 64})
        ref = commit(store, Settings(seed=number), models=(other,)).ref
        assert f"{ref}: model tiny/policy@0 has changed" in said(store)
    outside = ModelEntry(role="judge", ref="some/model", weights="w", tokenizer="t", template="t")
    commit(store, Settings(seed=4), models=(outside,))
    assert len(verify(store)[1]) == 2, "what is not in the store is not looked for"


def fields_of(*entries: FileEntry) -> dict:
    """What a manifest says of its files."""
    files = [entry.model_dump(mode="json") for entry in entries]
    return {"files": files, "content_hash": content_hash("logprobs/1", entries)}


def crafted(version) -> None:
    """An Arrow file whose offsets lead outside, with the right hash everywhere."""
    (path,) = version.files.folder.glob("part-00000-*.arrow")
    raw = bytearray(path.read_bytes())
    offsets = raw.find((0).to_bytes(4, "little") + (2).to_bytes(4, "little"))
    raw[offsets + 4 : offsets + 8] = (0x7FFFFFF0).to_bytes(4, "little")
    path.write_bytes(raw)
    entry = FileEntry(name=path.name, bytes=len(raw), sha256=sha256(path), rows=2)
    rewrite(version, **fields_of(entry))


def test_a_crafted_arrow_file_with_the_right_hash_is_told(store, monkeypatch):
    """By verify, and by a reader of a store of somebody else, which parses in a child first."""
    version = commit(store, shards=1)
    monkeypatch.setattr("os.geteuid", lambda: (Path(store.url) / "store.json").stat().st_uid + 1)
    assert Store(store.url).open(version.ref).table().num_rows == 2
    crafted(version)
    with pytest.raises(CorruptError, match="cannot be parsed"):
        Store(store.url).open(version.ref).table()
    assert version.files.names[0] in said(store) and "cannot be parsed" in said(store)


@pytest.fixture
def crashes(tmp_path, monkeypatch):
    """Says which files crash the process that reads them, by a part of their paths."""

    def let_crash(name: str) -> None:
        child = tmp_path / "child.py"
        text = Path(arrow_child.__file__).read_text()
        bomb = f"        import os; {name!r} in line and os.abort()\n        try:\n"
        child.write_text(text.replace("        try:\n", bomb))
        monkeypatch.setattr(arrow_child, "__file__", str(child))

    return let_crash


def test_a_file_is_held_to_the_rows_of_its_entry(store):
    version = commit(store, shards=1)
    entries = [entry.model_copy(update={"rows": 5}) for entry in version.manifest.files]
    rewrite(version, rows=5, **fields_of(*entries))
    with pytest.raises(CorruptError, match="expected 5 rows, found 2"):
        Store(store.url).open(version.ref).table()


def test_what_was_made_of_other_content_is_told(store):
    """A folder that came from elsewhere, whole in itself, has the input's number."""
    first = commit(store)
    commit(store, Settings(seed=1), inputs={"other": first})
    store.tag("a", "prod", first.ref)
    other = commit(Store(Path(store.url).with_name("other")), shards=1)
    shutil.rmtree(first.files.folder)
    shutil.copytree(other.files.folder, first.files.folder)
    assert "input a/logprobs@1 has changed" in said(Store(store.url))
    assert "tag prod pointed at an earlier" in said(Store(store.url))


def test_what_was_made_of_a_torn_version_is_told_beside_it(store):
    """It is whole itself, so it is not put aside for that."""
    first = commit(store)
    second = commit(store, Settings(seed=1), inputs={"other": first})
    tear(first)
    torn, dependent = verify(Store(store.url))[1]
    assert isinstance(torn, CorruptError) and torn.object == "a/logprobs@1"
    assert isinstance(dependent, LineageError) and dependent.object == "a/logprobs@2"
    assert dependent.message.startswith("its input a/logprobs@1 is damaged: manifest.json")
    assert str(first.files.folder) in dependent.next
    with pytest.raises(ConfigError, match="is whole"):
        versions_command.verify(None, str(second.ref), True, store.url)


def test_what_is_torn_decides_on_the_exit_code(store, command, monkeypatch):
    """Also if the version that was made of it comes first."""
    policy = make_policy(store, 0)
    make_table(store, 0, models={"policy": policy})
    tear(policy)
    monkeypatch.chdir(Path(store.url).parent)
    code, answer = command("verify", "--store", store.url)
    objects = [(error["code"], error["object"]) for error in answer["bad"]]
    assert objects == [("E-LINEAGE", "a/logprobs@1"), ("E-CORRUPT", "a/policy@0")] and code == 3


def test_a_file_that_crashes_its_reader_crashes_a_child_alone(tmp_path, crashes):
    whole = tmp_path / "whole.arrow"
    with pa.ipc.new_file(whole, pa.schema([("a", pa.int64())])) as file:
        file.write_table(pa.table({"a": [1]}))
    crashes("bomb.arrow")
    with ArrowCheck() as check:
        assert check.problem(whole) == ""
        assert "ended with code -6" in check.problem(tmp_path / "bomb.arrow")
        assert check.problem(whole) == "", "a new child reads on"
        assert "FileNotFoundError" in check.problem(tmp_path / "nowhere.arrow")


def stop(store, written=None, **settings) -> None:
    """A stage that was stopped after the rows of `written`."""
    with pytest.raises(KeyboardInterrupt), work_on(store, Settings(**settings)) as work:
        if written:
            work.write(0, written.table())
        raise KeyboardInterrupt


def work_of(store, pattern: str) -> Path:
    """The one path of unfinished work that fits."""
    (path,) = (Path(store.url) / "a/logprobs/.work").glob(pattern)
    return path


@pytest.mark.parametrize("damaged", ["*.notes/part-00000.json", "*/part-00000-*.arrow"])
def test_damage_of_unfinished_work_is_told(store, damaged):
    stop(store, commit(Store(Path(store.url).with_name("other")), shards=1))
    assert said(store) == ""
    path = work_of(store, damaged)
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    assert "a/logprobs unfinished part-00000.json: is not what was written" in said(store)
    assert commit(store).manifest.rows == 4 and said(store) == ""


@pytest.mark.parametrize("damage", [None, "note", "state", "gone"])
def test_what_a_stage_goes_on_from_is_looked_at(store, damage):
    commit(store)
    folder = Path(store.url) / f"a/policy/.work/{'0' * 64}.0.resume"
    folder.mkdir(parents=True)
    state = folder / "state-000001-000001.safetensors"
    state.write_bytes(b"weights")
    fields = {"file": state.name, "sha256": sha256(state), "epoch": 0}
    checksum = "0" * 64 if damage == "note" else digest(fields)
    (folder / "progress").write_text(json.dumps({**fields, "checksum": checksum}))
    if damage == "state":
        state.write_bytes(b"Weights")
    elif damage == "gone":
        state.unlink()
    is_told = "unfinished progress: is not what was written" in said(store)
    assert is_told == (damage in ("note", "state"))


def test_a_manifest_that_is_endless_is_not_read(store):
    """Of 100 GB, which take no room on the disk."""
    version = commit(store)
    os.truncate(version.files.folder / "manifest.json", 100 * 10**9)
    assert "has 100000000000 bytes" in said(store)
    for _, summary in store.summaries("a", "logprobs"):
        assert "has 100000000000 bytes" in summary.error


JUNK = {"file": lambda path: path.write_text("x"), "folder": Path.mkdir, "pipe": os.mkfifo}


@pytest.mark.parametrize("beside", ["leases", "leases/work", "notes"])
def test_what_else_lies_in_unfinished_work_is_nobodys(store, beside):
    first = commit(store, shards=1)
    stop(store, first, seed=1)
    place = work_of(store, f"*.{beside}")
    for name, make in JUNK.items():
        make(place / f".{name}")
    assert said(store) == ""
    assert collect(store, Rule()).work == []
    assert remove(store, first.ref)[0] == first.ref
    assert commit(store, Settings(seed=1), shards=1).ref.version == 2
    assert not place.exists()


@pytest.mark.parametrize("place", ["leases", "leases/work", "notes"])
def test_a_file_in_place_of_a_folder_of_unfinished_work_is_told(store, place):
    stop(store)
    path = work_of(store, f"*.{place}")
    shutil.rmtree(path)
    path.write_text("x")
    assert f"{path.relative_to(Path(store.url))}: is not a folder" in said(store)


def test_an_empty_folder_of_a_version_is_deleted_by_hand(store, capsys):
    """It has no file to be put aside; a stage that reads `latest` stops at it."""
    commit(store)
    folder = Path(store.url) / "a/logprobs/v000002"
    folder.mkdir()
    with pytest.raises(CorruptError, match="is missing") as caught:
        store.open("a/logprobs@latest")
    assert caught.value.next == "quiver verify a/logprobs@2"
    for ref in (None, "a/logprobs@2"):
        (error,) = verify(store, ref)[1]
        assert error.next == f"rmdir {folder}" and "refer to this one: nothing" in error.state
    folder.rmdir()
    assert said(store) == ""


def test_a_version_whose_files_were_all_deleted_is_put_aside(store):
    """Its number is not given again, because something refers to it."""
    first = commit(store)
    store.tag("a", "prod", first.ref)
    for path in first.files.folder.iterdir():
        path.unlink()
    error = verify(store, first.ref)[1][0]
    assert error.next == "quiver verify a/logprobs@1 --quarantine"
    versions_command.verify(None, str(first.ref), True, store.url)
    assert commit(store).ref.version == 2


def test_tags_are_looked_at(store):
    first, second = commit(store), commit(store, Settings(seed=1))
    store.tag("a", "old", first.ref)
    store.tag("a", "prod", second.ref)
    assert said(store) == ""
    shutil.rmtree(first.files.folder)
    assert "tag old: points at a/logprobs@1: there is no such version" in said(store)
    versions_command.tag("old", str(second.ref), store=store.url)
    assert said(store) == "" and store.tagged("a", "old") == str(second.ref)


def test_a_tag_of_a_torn_version_is_told_beside_it(store):
    first = commit(store)
    store.tag("a", "prod", first.ref)
    tear(first)
    torn, tag = verify(Store(store.url))[1]
    assert (torn.object, tag.object) == ("a/logprobs@1", "a tag prod")
    assert tag.message.startswith("points at a/logprobs@1: manifest.json")


def test_a_tag_moves_though_an_earlier_entry_cannot_be_read(store):
    first, second = commit(store), commit(store, Settings(seed=1))
    store.tag("a", "prod", first.ref)
    (Path(store.url) / "a/tags/prod/000001.json").write_text("{")
    versions_command.tag("prod", str(second.ref), store=store.url)
    assert store.tagged("a", "prod") == str(second.ref)


def test_a_version_that_is_deleted_on_purpose_is_no_error(store):
    first = commit(store)
    commit(store, Settings(seed=1), inputs={"other": first})
    assert remove(store, "a/logprobs@1", "no longer needed") == (first.ref, ["a/logprobs@2"])
    assert verify(store) == (1, []) and store.has_manifest(first.ref)


UNSIGNED = json.dumps({"checksum": digest({})})  # whole, and says neither when nor why
FIELDS = {"ref": "a/logprobs@1", "commit_id": "", "at": "2026-01-01T00:00:00+00:00", "why": ""}
CHANGED = json.dumps({**FIELDS, "checksum": digest({})})
UNDATED = {**FIELDS, "at": "yesterday"}
UNDATED = json.dumps({**UNDATED, "checksum": digest(UNDATED)})


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"at": 1}', "[" * 100_000, UNSIGNED, CHANGED, UNDATED]
)
def test_a_mark_that_cannot_be_read_is_told(store, text):
    commit(store)
    commit(store, Settings(seed=1))
    remove(store, "a/logprobs@1")
    mark = Path(store.url) / "a/logprobs/v000001.removed"
    mark.write_text(text)
    assert "the mark that the version's data may be deleted cannot be read" in said(store)
    assert f"Next: rm {mark}" in said(store)
    with pytest.raises(CorruptError, match="the mark"):
        store.open("a/logprobs@1")
    assert commit(store).ref.version == 3, "it is a mark all the same"


@pytest.mark.parametrize("name", ["README", ".DS_Store", "vx.y", "v000003.old", "v0000001", "v1"])
def test_what_else_lies_beside_versions_is_nobodys(store, name):
    version = commit(store)
    shutil.copytree(version.files.folder, version.files.folder.with_name(name))
    assert verify(store) == (1, [])
    assert commit(store, Settings(seed=1)).ref.version == 2


WRONG = {
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "pipe": os.mkfifo,
    "deep": lambda path: path.write_text("[" * 100_000),
    "file": lambda path: path.write_text("7"),
}
PLACES = [
    "store.json",
    "a/logprobs/v000001/manifest.json",
    "a/logprobs/v000001/SHARD",
    "a/logprobs/v000001.expired",
    "a/logprobs/v000002.removed",
    "a/logprobs/v000003",
    "a/logprobs/.index",
    "a/logprobs/.work",
    "a/tags/prod",
    "a/tags/prod/000001.json",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A store with two versions, a tag and an index."""
    store = Store(tmp_path_factory.mktemp("whole") / "store")
    first = commit(store, shards=1)
    commit(store, Settings(seed=1), shards=1)
    store.tag("a", "prod", first.ref)
    store.find("a", "logprobs", "0" * 64)
    return Path(store.url)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", PLACES)
def test_something_else_in_place_of_an_object_is_a_typed_error(whole, tmp_path, place, wrong):
    """And never waited for: a pipe has nothing to read."""
    store = Store(shutil.copytree(whole, tmp_path / "store"))
    shard = store.open("a/logprobs@1").files.names[0]
    path = Path(store.url) / place.replace("SHARD", shard)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    WRONG[wrong](path)
    uses = [
        lambda here: here.summaries("a", "logprobs"),
        lambda here: here.open("a/logprobs@1").table(),
        lambda here: here.open("a/logprobs@prod").table(),
        lambda here: here.history("a", "prod"),
        lambda here: here.tag("a", "prod", "a/logprobs@2"),
        lambda here: here.find("a", "logprobs", "1" * 64),
        lambda here: commit(here, Settings(seed=2), shards=1),
        lambda here: remove(here, "a/logprobs@2"),
        lambda here: collect(here, Rule(keep=1), apply=True),
        verify,
    ]
    for use in uses:
        with suppress(QuiverError):
            use(Store(store.url))


def test_what_refers_to_a_version_that_is_put_aside_is_named(store, in_json):
    first = commit(store)
    second = commit(store, Settings(seed=1), inputs={"other": first})
    store.tag("a", "prod", first.ref)
    store.tag("a", "other", second.ref)
    tear(first)
    answer = in_json(versions_command.verify, None, str(first.ref), True, store.url)
    assert (answer["tags"], answer["users"]) == (["prod"], ["a/logprobs@2"])


def test_a_damaged_version_is_put_aside_and_made_again(store):
    first = commit(store)
    commit(store, Settings(seed=1), inputs={"other": first})
    tear(first)
    assert put_aside(store, "a/logprobs@1") == first.ref
    collect(store, Rule(grace_seconds=0), apply=True)
    names = {path.name for path in first.files.folder.iterdir()}
    assert names == {"manifest.json", *first.files.names}, "they stay to be looked at"
    with pytest.raises(LineageError, match=r"on purpose: 20.* damaged"):
        store.open(first.ref)
    assert commit(store).ref.version == 3 and store.listing("a", "logprobs").visible(expired=True)
    assert remove(store, first.ref) == (first.ref, ["a/logprobs@2"])
    assert [path.name for path in first.files.folder.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["ab", "ab"], "two columns have the same name"),
        (["ab", "a\xff"], "the name of a column is not UTF-8"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_names_of_columns_that_no_reader_can_ask_for_are_told(tmp_path, is_nested, names, problem):
    columns = pa.table({"ab": [1], "aX": [2]})
    table = pa.table({"s": columns.to_struct_array()}) if is_nested else columns
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    raw = (tmp_path / "t.arrow").read_bytes()
    assert raw.count(b"aX") == 2  # before the rows and after them
    (tmp_path / "t.arrow").write_bytes(raw.replace(b"aX", names[1].encode("latin-1")))
    with pytest.raises(pa.ArrowInvalid, match=problem):
        read_table(Disk(tmp_path), "t.arrow")


def test_an_input_of_another_kind_than_its_role_is_told(store, policy):
    """Whoever reads its columns would not find them."""
    rollouts, rewards = world.make(store, policy, world.even_share, groups=1)
    about = {"stage": "reward", "stage_version": 1, "config": Settings()}
    with begin(store, "wrong", "rewards", inputs={"rollouts": rewards}, **about) as work:
        work.write(0, rewards.table())
        wrong = work.commit()
    assert open_input(store, rewards, "rollouts").ref == rollouts.ref
    with pytest.raises(
        LineageError, match="its rollouts must be a version of rollouts, found tiny/rewards@1"
    ):
        open_input(store, wrong, "rollouts")
