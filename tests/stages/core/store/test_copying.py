"""A store copied from a disk to buckets and back: the same versions, tags and marks; and a copy that
was interrupted goes on."""

import os
import resource
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

import obstore
import pytest
from obstore.store import from_url

from quiver.flows.verification import verify
from quiver.schemas.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    LineageError,
    QuiverError,
    ResourceError,
)
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store, copying, marks
from quiver.stages.core.store.copying import copy
from quiver.stages.core.store.listing import EXPIRED, NO_OPTIMIZER, REMOVED
from quiver.stages.core.store.places import open_storage
from quiver.stages.core.store.retention import Rule, collect, put_aside, remove
from tests.faults.proxy import DROP_BEFORE, FORWARD, Proxy, answer
from tests.faults.seam import watched
from tests.stages.core.store.histories import make_policy, make_table, visible
from tests.stages.core.store.test_store import Settings, commit, table, work_on

MARKS = {
    Ref("a", "policy", 0): EXPIRED,
    Ref("a", "policy", 1): NO_OPTIMIZER,
    Ref("a", "logprobs", 2): REMOVED,
}


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    """What is written here need not outlive a power loss."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory) -> Path:
    """The folder of a store with tables and policies, a tag that moved, data that expired and are
    gone, a removed version, and unfinished work."""
    store = Store(tmp_path_factory.mktemp("full") / "store")
    make_policy(store, 0)
    make_table(store, 1, models={"policy": make_policy(store, 2)})
    collect(store, Rule(keep=1, moments=1, grace_seconds=0), apply=True)
    make_table(store, 3, "b")
    make_policy(store, 4)
    collect(store, Rule(keep=None, moments=1, grace_seconds=0), apply=True)
    commit(store, Settings(seed=1))
    remove(store, "a/logprobs@2", "not wanted")
    store.tag("a", "prod", "a/policy@1", why="the first")
    store.tag("a", "prod", "a/policy@2", why="the second", about={"gain": 0.5})
    with work_on(store, Settings(seed=9)) as work:
        work.write(0, table(0))
    return Path(store.url)


@pytest.fixture
def full(made_once, tmp_path) -> Store:
    """That store, to be changed."""
    return Store(shutil.copytree(made_once, tmp_path / "store"))


def contents(store: Store) -> dict[str, object]:
    """Everything that a reader can learn from a store, by name."""
    seen = store.with_expired()
    told: dict[str, object] = {"id": store.id, "visible": visible(store)}
    for ref in seen.refs():
        told[f"{ref} manifest"] = store.storage.read(f"{ref.folder}/manifest.json")
    for version in store.versions():
        for name in version.files.names:
            with suppress(LineageError):
                told[f"{version.ref} {name}"] = version.files.read(name)
    for ref, name in MARKS.items():
        with suppress(FileNotFoundError):
            told[f"{ref} {name}"] = store.storage.read(f"{ref.folder}.{name}")
    for run in store.runs():
        for name in store.tag_names(run):
            told[f"{run} {name}"] = store.history(run, name)
    return told


def objects(bucket):
    """The bucket, for another program than Quiver."""
    return from_url(bucket.url, client_options={"allow_http": True})


def is_store(place: str) -> bool:
    try:
        Store(place, create=False)
    except ConfigError:
        return False
    return True


# -- whole copies


def test_a_copy_holds_all_that_a_reader_can_learn(full, bucket, tmp_path):
    """Also a copy of the copy, in a folder."""
    expected = contents(full)
    assert {f"{ref} {name}" for ref, name in MARKS.items()} < expected.keys()
    copy(full, bucket.url)
    assert contents(Store(bucket.url, create=False)) == expected
    copy(Store(bucket.url), str(tmp_path / "back"))
    assert contents(Store(tmp_path / "back", create=False)) == expected


def test_a_copy_from_one_provider_to_another(full, s3_server, az_server, monkeypatch, tmp_path):
    buckets = [server.make_bucket() for server in (s3_server, az_server)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for bucket in buckets:
        for name, text in bucket.environment.items():
            monkeypatch.setenv(name, text)
    copy(full, buckets[0].url)
    copied = copy(Store(buckets[0].url), buckets[1].url)
    assert copied == copying.Copied(len([*full.with_expired().refs()]) + 1, copied.bytes)
    assert contents(Store(buckets[1].url)) == contents(full)
    copy(Store(buckets[1].url), str(tmp_path / "back"))
    assert contents(Store(tmp_path / "back", create=False)) == contents(full)


def test_a_copy_is_whole_and_has_no_unfinished_work(full, bucket):
    expected, problems = verify(full)
    copy(full, bucket.url)
    copied = Store(bucket.url)
    assert verify(copied) == (expected, problems) and problems == []
    for run, kind in (("a", "logprobs"), ("a", "policy"), ("b", "logprobs")):
        assert copied.storage.list(f"{run}/{kind}/.work") == []
        assert copied.storage.list(f"{run}/{kind}/.data") == []


def test_data_that_expired_and_are_still_there(store, tmp_path):
    """Those of a version, and the optimizer state of another."""
    make_policy(store, 0), make_policy(store, 1), make_policy(store, 2)
    collect(store, Rule(keep=2, moments=1, grace_seconds=86400), apply=True)
    copy(store, str(tmp_path / "copy"))
    assert contents(Store(tmp_path / "copy")) == contents(store)
    assert verify(Store(tmp_path / "copy"))[1] == []


def test_a_damaged_version_that_was_put_aside(store, tmp_path):
    version = make_table(store, 1)
    version.files.path(version.files.names[0]).write_bytes(b"damaged")
    put_aside(store, "a/logprobs@1")
    make_table(store, 1)
    copy(store, str(tmp_path / "copy"))
    assert contents(Store(tmp_path / "copy")) == contents(store)


def test_work_that_is_done_is_found_in_a_copy(full, bucket):
    copy(full, bucket.url)
    copied = Store(bucket.url)
    assert make_table(copied, 3, "b").ref == Ref("b", "logprobs", 1)
    assert copied.written == set()


# -- versions whose data lie elsewhere than in their own folder


@pytest.fixture
def folder(bucket, tmp_path) -> Store:
    """A store that was made in a bucket, in a folder."""
    store = Store(bucket.url)
    policy = make_policy(store, 0)
    make_table(store, 1, models={"policy": policy})
    make_table(store, 2)
    copy(store, str(tmp_path / "folder"))
    return Store(tmp_path / "folder")


def test_a_version_of_a_bucket_is_read_in_a_folder(folder):
    version = folder.open("a/logprobs@1")
    assert version.manifest.place
    assert version.table()["rollout_id"].to_pylist() == ["r10", "r11"]
    assert folder.open("a/policy@0").files.read("model.safetensors") == b"w0"
    assert make_table(folder, 2).ref == Ref("a", "logprobs", 2) and not folder.written


def test_gc_deletes_data_of_a_bucket_s_version_in_a_folder(folder):
    files = folder.open("a/logprobs@1").files
    path = files.path(files.names[0])
    collect(folder, Rule(keep=1, moments=1, grace_seconds=0), apply=True)
    assert not path.exists()
    assert folder.open("a/logprobs@2").table().num_rows == 2
    run_key = folder.with_expired().open("a/logprobs@1").manifest.run_key
    assert folder.with_expired().find("a", "logprobs", run_key).ref == Ref("a", "logprobs", 1)
    assert verify(folder)[1] == []


def test_gc_deletes_data_of_a_folder_s_version_in_a_bucket(full, bucket):
    copy(full, bucket.url)
    there = Store(bucket.url)
    make_table(there, 30, "b")
    collect(there, Rule(keep=1, moments=1, grace_seconds=0), apply=True)
    assert there.storage.list("b/logprobs/v000001") == ["manifest.json"]
    assert verify(Store(bucket.url))[1] == []


# -- interrupted, repeated, refused


@pytest.mark.parametrize(("number", "action"), [(4, answer(403)), (25, DROP_BEFORE)])
def test_an_interrupted_copy_is_no_store_and_goes_on(full, bucket, monkeypatch, number, action):
    """No file that arrived is sent again."""
    with Proxy(bucket.endpoint) as proxy:
        for name, text in bucket.behind(proxy.url).items():
            monkeypatch.setenv(name, text)
        requests = proxy.follow(lambda index, *_: FORWARD if index < number else action)
        with pytest.raises(QuiverError):
            copy(full, bucket.url)
        sent = puts(requests[:number])
        proxy.follow()
        assert not is_store(bucket.url)
        requests = proxy.follow()
        copy(full, bucket.url)
        assert not {path for path in sent & puts(requests) if path.endswith((".arrow", "tensors"))}
        assert contents(Store(bucket.url)) == contents(full)


def puts(requests) -> set[str]:
    """Paths of the objects that were put."""
    return {request.path.partition("?")[0] for request in requests if request.method == "PUT"}


def test_a_second_copy_sends_nothing(full, bucket, tmp_path):
    for place in (bucket.url, str(tmp_path / "folder")):
        first = copy(full, place)
        assert first.bytes > 0
        assert copy(full, place) == copying.Copied(first.versions, 0)


def test_a_copy_to_a_bucket_fetches_no_file_and_fills_no_cache(full, bucket, tmp_path, monkeypatch):
    with Proxy(bucket.endpoint) as proxy:
        for name, text in bucket.behind(proxy.url).items():
            monkeypatch.setenv(name, text)
        requests = proxy.follow()
        copy(full, bucket.url), copy(full, bucket.url)
    fetched = [request.path for request in requests if request.method in ("GET", "HEAD")]
    assert not [path for path in fetched if path.partition("?")[0].endswith((".arrow", "tensors"))]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("most_bytes", [resource.RLIM_INFINITY, 100], ids=["whole", "failed"])
def test_two_copies_to_one_folder_at_once(store, tmp_path, most_bytes):
    """The one that ends later may fail halfway: the first one's files stay."""
    make_table(store, 1)
    target = str(tmp_path / "copy")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def another(call: str, path: str, really):
        really()
        if call == "mkdir" and path == f"{target}/a/logprobs/v000001":
            copy(store, target)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))

    try:
        with suppress(ResourceError), watched(another):
            copy(store, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(Store(target, create=False)) == contents(store)
    assert verify(Store(target)) == (1, [])


def test_copies_of_two_stores_into_one_folder_at_once_are_not_mixed(store, tmp_path):
    other = Store(tmp_path / "other")
    make_table(other, 1)
    make_table(store, 2)
    target = tmp_path / "copy"
    began = []

    def another(call: str, path: str, really):
        if call == "link" and Path(path).parent == target and not began:
            began.append(path)
            copy(other, str(target))
        return really()

    with pytest.raises(ConfigError, match="another store"), watched(another):
        copy(store, str(target))
    assert began and contents(Store(target, create=False)) == contents(other)
    assert not (target / copying._UNFINISHED).exists()


def test_a_copy_made_later_adds_what_is_new(full, bucket):
    first = copy(full, bucket.url)
    new = make_table(full, 10, "b")
    full.tag("a", "prod", "a/policy@1", why="back")
    added = copy(full, bucket.url)
    assert added == copying.Copied(first.versions + 1, new.manifest.bytes["data"])
    assert contents(Store(bucket.url)) == contents(full)


def test_a_copy_in_which_the_same_expired_by_its_own_gc_goes_on(store, tmp_path):
    for number in range(3):
        make_table(store, number)
    copied = tmp_path / "copy"
    copy(store, str(copied))
    for each in (Store(copied), store):
        collect(each, Rule(keep=1, grace_seconds=0), apply=True)
    marks_before = [path.read_bytes() for path in sorted(copied.rglob("*.expired"))]
    new = make_table(store, 3)
    assert copy(store, str(copied)).bytes == new.manifest.bytes["data"]
    assert [str(ref) for ref in Store(copied).refs()] == ["a/logprobs@3", "a/logprobs@4"]
    assert [path.read_bytes() for path in sorted(copied.rglob("*.expired"))] == marks_before
    assert len(marks_before) == 2


def test_a_tag_that_is_made_meanwhile_is_not_copied_without_its_version(
    full, tmp_path, monkeypatch
):
    real = copying._copy_files

    def late(version, *others):
        if str(version.ref) == "b/logprobs@1":  # the last one that the copy looked for
            full.tag("b", "late", make_table(full, 30, "b").ref)
        return real(version, *others)

    monkeypatch.setattr(copying, "_copy_files", late)
    copy(full, str(tmp_path / "copy"))
    copied = Store(tmp_path / "copy", create=False)
    assert full.tag_names("b") == ["late"] and copied.tag_names("b") == []
    assert verify(copied)[1] == []


def test_what_expires_meanwhile_is_copied_with_its_mark(store, tmp_path, monkeypatch):
    """A version that was listed without a mark, and the optimizer state of another."""
    for number in range(4):
        make_policy(store, number)
    store.tag("a", "prod", "a/policy@0")
    real, expired = copying._copy_files, []

    def late(version, *others):
        if not expired:  # at the first version, which stays
            expired.extend(collect(store, Rule(keep=2, moments=1), apply=True).marked)
        return real(version, *others)

    monkeypatch.setattr(copying, "_copy_files", late)
    copy(store, str(tmp_path / "copy"))
    copied = Store(tmp_path / "copy", create=False)
    assert len(expired) == 2 and contents(copied) == contents(store)
    assert copied.listing("a", "policy").marks == store.listing("a", "policy").marks
    assert verify(copied)[1] == []


@pytest.mark.parametrize(("name", "is_refused"), [(EXPIRED, False), (NO_OPTIMIZER, True)])
def test_a_mark_that_is_taken_back_meanwhile(store, tmp_path, monkeypatch, name, is_refused):
    """After the listing alone, all is copied; after data were left out for it, the copy stops."""
    ref = make_policy(store, 0).ref
    real_files, real_objects = copying._copy_files, copying._copy_objects

    def late(*arguments):
        if is_refused:
            marks.write(store.storage, ref, name, "gc")
        return real_files(*arguments)

    def taken_back(source, target, keys):
        store.storage.delete(marks.key_of(ref, name))
        real_objects(source, target, keys)

    if not is_refused:
        marks.write(store.storage, ref, name, "gc")
    with monkeypatch.context() as changed:
        changed.setattr(copying, "_copy_files", late)
        changed.setattr(copying, "_copy_objects", taken_back)
        with pytest.raises(ConflictError, match="mark") if is_refused else nullcontext():
            copy(store, str(tmp_path / "copy"))
    assert is_store(str(tmp_path / "copy")) is not is_refused
    copy(store, str(tmp_path / "copy"))
    assert contents(Store(tmp_path / "copy")) == contents(store)


def test_another_store_is_refused(full, bucket):
    other = Store(bucket.url)
    make_table(other, 1)
    before = contents(other)
    with pytest.raises(ConfigError, match="another store"):
        copy(full, bucket.url)
    assert contents(Store(bucket.url)) == before


def test_a_copy_in_which_work_was_done_is_a_conflict(full, bucket):
    """Its next version has the number that the source gave another one."""
    copy(full, bucket.url)
    make_table(Store(bucket.url), 20, "b")
    make_table(full, 21, "b")
    with pytest.raises(ConflictError, match="differs from the source"):
        copy(full, bucket.url)
    assert Store(bucket.url).open("b/logprobs@2").table()["rollout_id"].to_pylist()[0] == "r200"


DAMAGES = {
    "another byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_copied(full, bucket, damage):
    version = full.open("b/logprobs@1")
    DAMAGES[damage](version.files.path(version.files.names[0]))
    with pytest.raises(CorruptError, match="b/logprobs@1"):
        copy(full, bucket.url)
    assert not is_store(bucket.url)
    keys = (entry["path"] for chunk in obstore.list(objects(bucket)) for entry in chunk)
    assert not [key for key in keys if key.startswith("b/logprobs/v")]


def test_a_torn_file_of_the_copy_is_sent_again(full, bucket, tmp_path):
    version = full.open("b/logprobs@1")
    key = f"{version.ref.folder}/{version.files.names[0]}"
    for place in (bucket.url, str(tmp_path / "folder")):
        copy(full, place)
        torn = b"x" * (version.manifest.bytes["data"] - 1)
        open_storage(place).put(key, torn)
        assert copy(full, place).bytes == len(torn) + 1
        assert contents(Store(place)) == contents(full)


def test_data_of_a_copy_in_which_other_work_was_done_stay(store, tmp_path):
    """Its policy has the number, and its file the name, of one that the source made since."""
    make_policy(store, 1)
    copy(store, str(tmp_path / "copy"))
    copied = Store(tmp_path / "copy")
    other = make_policy(copied, 22)
    make_policy(store, 333)
    with pytest.raises(ConflictError, match="differs from the source"):
        copy(store, str(tmp_path / "copy"))
    Store(tmp_path / "copy").open(other.ref).verify()


# -- a folder that any tool took to a bucket


def test_a_store_goes_on_where_any_tool_copied_its_files(full, bucket):
    commit_id = full.open("b/logprobs@1").manifest.commit_id
    for path in Path(full.url).rglob("*"):
        if path.is_file():
            obstore.put(objects(bucket), path.relative_to(full.url).as_posix(), path)
    there = Store(bucket.url, create=False)
    assert contents(there) == contents(full)
    assert make_table(there, 3, "b").manifest.commit_id == commit_id
    assert make_table(there, 50, "b").ref == Ref("b", "logprobs", 2)
    assert commit(there, Settings(seed=9)).ref == Ref("a", "logprobs", 3), "unfinished work"
    assert verify(Store(bucket.url))[1] == []
