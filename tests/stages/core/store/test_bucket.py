"""Versions in a bucket: the promises of a disk, whatever happens to a request."""

import itertools
import os
import random
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from urllib.parse import unquote

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import (
    BusyError,
    ConflictError,
    LineageError,
    OutcomeUnknownError,
    RemoteError,
    ResourceError,
)
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Store, leases
from quiver.stages.core.store import bucket as module
from quiver.stages.core.store.leases import Leases
from quiver.stages.core.store.places import open_storage
from quiver.stages.core.store.retention import Rule, collect, remove
from quiver.stages.core.store.writer import open_staging
from tests.buckets import every_provider, two_providers
from tests.faults.proxy import DROP_AFTER, DROP_BEFORE, FORWARD, REPEAT, Proxy, answer, at
from tests.stages.core.store.histories import make_policy, make_table
from tests.stages.core.store.test_store import Settings, commit, table, work_on

QUICK = {
    "max_retries": 1,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {
        "init_backoff": timedelta(milliseconds=1),
        "max_backoff": timedelta(milliseconds=2),
        "base": 2,
    },
}
COLLECT_ALL = Rule(keep=1, grace_seconds=0)


@pytest.fixture
def proxy(bucket, monkeypatch) -> Proxy:
    """A proxy before the bucket's server; clients made from now on ask it, and soon give up."""
    monkeypatch.setattr(module, "_RETRIES", QUICK)
    with Proxy(bucket.endpoint) as between:
        for name, text in bucket.behind(between.url).items():
            monkeypatch.setenv(name, text)
        yield between


def unfinished(store: Store) -> list[str]:
    return store.storage.list("a/logprobs/.work")


def folders_of_data(store: Store) -> list[str]:
    return store.storage.list("a/logprobs/.data")


def require_one(bucket, url: str) -> None:
    """Do the work, without a proxy, and require that one version of it is there, whole, and nothing
    else."""
    with pytest.MonkeyPatch.context() as direct:
        for name, text in bucket.environment.items():
            direct.setenv(name, text)
        made = commit(Store(url))
        assert str(made.ref) == "a/logprobs@1"
        fresh = Store(url)
        version = fresh.open("a/logprobs@latest")
        assert version.table()["rollout_id"].to_pylist() == ["r0", "r1", "r2", "r3"]
        assert version.manifest.commit_id == made.manifest.commit_id
        assert [str(ref) for ref in fresh.refs()] == ["a/logprobs@1"]
        assert verify(fresh) == (1, []) and unfinished(fresh) == []
        collect(fresh, Rule(grace_seconds=0), apply=True)
        assert folders_of_data(fresh) == [version.manifest.place]


@every_provider
def test_a_version_has_the_same_life_as_on_a_disk(bucket):
    store = Store(bucket.url)
    first, second = (commit(store, Settings(seed=seed)) for seed in (1, 2))
    assert commit(Store(bucket.url), Settings(seed=1)).ref == first.ref
    store.tag("a", "prod", first.ref)
    store.tag("a", "prod", second.ref, expected=str(first.ref))
    with pytest.raises(ConflictError):
        store.tag("a", "prod", first.ref, expected=str(first.ref))
    third = commit(store, Settings(seed=3))
    opened = Store(bucket.url).open(third.ref)
    store.tag("a", "prod", third.ref)
    collected = collect(store, COLLECT_ALL, apply=True)  # the tag would go back to the second
    assert [str(expiring.ref) for expiring in collected.deleted] == ["a/logprobs@1"]
    with pytest.raises(LineageError, match="expired"):
        Store(bucket.url).open("a/logprobs@1")
    assert opened.table().num_rows == 4
    again = Store(bucket.url)
    assert again.find("a", "logprobs", first.manifest.run_key) is None
    made_again = commit(again, Settings(seed=1))
    assert str(made_again.ref) == "a/logprobs@4" != str(first.ref)
    assert Store(bucket.url).open("a/logprobs@1").ref == made_again.ref
    with pytest.raises(ConflictError, match="prod"):
        remove(again, third.ref)
    assert verify(Store(bucket.url)) == (3, [])
    assert unfinished(store) == [] and len(folders_of_data(store)) == 3


@two_providers
def test_a_write_into_a_bucket_that_is_not_there_fails(bucket):
    storage = open_storage(bucket.url.replace("bucket-", "gone-"))
    with pytest.raises(FileNotFoundError):
        storage.put("a/logprobs/.work/note", b"{}")


@every_provider
def test_policies_are_uploaded_and_read_as_folders(bucket, tmp_path, monkeypatch):
    store = Store(bucket.url)
    policy = make_policy(store, 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    there = Store(bucket.url).open(policy.ref)
    there.verify()
    assert (there.files.folder / "model.safetensors").read_bytes() == b"w3"
    assert (there.files.folder / "optimizer/state.safetensors").read_bytes() == b"m3" * 100
    assert there.files.read("config.json") == policy.files.read("config.json")
    make_policy(store, 4)
    deleted = collect(store, Rule(moments=1, grace_seconds=0), apply=True).deleted
    assert [(str(each.ref), each.mark) for each in deleted] == [("a/policy@0", "expired.optimizer")]
    left = Store(bucket.url).open(policy.ref)
    assert "optimizer/state.json" not in left.files.sizes()
    left.verify()


def test_a_small_stage_takes_few_requests(bucket, proxy, monkeypatch):
    """This one reads no version, and is done before its lease needs a renewal."""
    monkeypatch.setattr(leases, "_keep_renewed", lambda lease: None)
    commit(Store(bucket.url), Settings(seed=1))
    store = Store(bucket.url)
    requests = proxy.follow()
    commit(store, Settings(seed=2), shards=1)
    assert len(requests) <= 22
    requests = proxy.follow()
    commit(Store(bucket.url), Settings(seed=2))
    assert len(requests) <= 12


def test_what_a_run_does_not_have_is_not_asked_for(bucket, proxy):
    commit(Store(bucket.url))
    requests = proxy.follow()
    assert verify(Store(bucket.url)) == (1, [])
    collect(Store(bucket.url), COLLECT_ALL)
    asked = [unquote(request.path) for request in requests]
    assert len(asked) <= 95
    assert not [path for path in asked if "/a/policy" in path or "store.json/" in path]


def test_the_files_of_a_policy_are_compared_by_one_listing(bucket, proxy):
    made = make_policy(Store(bucket.url), 1)
    policy = Store(bucket.url).open(made.ref)
    requests = proxy.follow()
    policy.verify(*policy.files.names)
    asked = [request.path.rpartition("/")[2] for request in requests]
    assert len(asked) == 2 and asked[0] == "v000000.expired.optimizer"


def each_request(bucket, proxy) -> int:
    """The number of requests of one commit."""
    requests = proxy.follow()
    commit(Store(f"{bucket.url}/counted"))
    return len(requests)


@two_providers
@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.torture), 12], ids=["all", "some"]
)
def test_a_process_that_dies_at_any_request_loses_nothing_and_leaves_nothing(
    bucket, proxy, every, monkeypatch
):
    """From some request on it hears nothing any more, as if it had died; that one may be done."""
    count = each_request(bucket, proxy)
    cuts = list(itertools.product(range(count), (DROP_BEFORE, DROP_AFTER)))
    random.Random(every).shuffle(cuts)
    dead = replace(leases.Owner.this_process(), pid=2**22 + 1)
    for number, action in cuts[::every]:
        url = f"{bucket.url}/{number}-{action.name}"
        proxy.follow(
            lambda index, method, path, number=number, action=action: (
                FORWARD if index < number else action if index == number else DROP_BEFORE
            )
        )
        with monkeypatch.context() as patched, suppress(RemoteError, OutcomeUnknownError):
            patched.setattr(leases.Owner, "this_process", lambda: dead)
            commit(Store(url))
        require_one(bucket, url)


@two_providers
@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.torture), 24], ids=["all", "some"]
)
def test_one_request_that_goes_wrong_is_made_good(bucket, proxy, every):
    count = each_request(bucket, proxy)
    actions = (DROP_BEFORE, DROP_AFTER, REPEAT, answer(500), answer(503))
    faults = list(itertools.product(range(count), actions))
    random.Random(every).shuffle(faults)
    for number, action in faults[::every]:
        url = f"{bucket.url}/{number}-{action.name}{action.amount}"
        proxy.follow(at(number, action))
        assert str(commit(Store(url)).ref) == "a/logprobs@1"
        require_one(bucket, url)


def test_if_nobody_can_know_the_answer_says_so(bucket, proxy):
    """The manifest was written, the answer was lost, and it cannot be read back."""
    store = Store(bucket.url)
    state = {"lost": False}

    def plan(index, method, path):
        if state["lost"]:
            return DROP_BEFORE
        state["lost"] = method == "PUT" and "v000001/manifest.json" in path
        return DROP_AFTER if state["lost"] else FORWARD

    with work_on(store) as work:
        for index in range(2):
            work.write(index, table(2 * index))
        proxy.follow(plan)
        with pytest.raises(OutcomeUnknownError, match="may have been written"):
            work.commit()
        proxy.follow()
    assert str(Store(bucket.url).open("a/logprobs@latest").ref) == "a/logprobs@1"


@two_providers
def test_an_object_whose_answer_was_lost_is_replaced_by_its_stamp(bucket, proxy):
    storage = open_storage(bucket.url)
    proxy.follow(at(0, DROP_AFTER))
    stamp = storage.put_if_absent("note", b"first")
    proxy.follow()
    assert storage.put("note", b"second", stamp)
    assert storage.put("note", b"late", stamp) is None and storage.read("note") == b"second"


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_on_google_it_is_not_replaced_but_safe(bucket, proxy):
    """obstore does not tell the generation of an object that it reads."""
    storage = open_storage(bucket.url)
    proxy.follow(at(0, DROP_AFTER))
    stamp = storage.put_if_absent("note", b"first")
    proxy.follow()
    with pytest.raises(RemoteError, match="Version required") as caught:
        storage.put("note", b"second", stamp)
    assert caught.value.next == "run the same command again"
    assert storage.read("note") == b"first"


@two_providers
def test_all_below_a_folder_is_deleted_by_as_many_requests_as_it_takes(bucket, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    storage = open_storage(bucket.url)
    for name in ("folder/a", "folder/b", "folder/c/d", "folder/e", "folder/f", "folders"):
        storage.put(name, b"")
    storage.delete("folder/")
    assert list(storage.files("")) == ["folders"]


def test_a_deleted_folder_alone_is_listed(bucket, proxy):
    """Not those beside it: `.data` holds a folder for every version."""
    storage = open_storage(bucket.url)
    for name in ("kind/.data/one/a", "kind/.data/one.b/a", "kind/.data/two/a"):
        storage.put(name, b"")
    requests = proxy.follow()
    storage.delete("kind/.data/one/")
    listed = [unquote(request.path) for request in requests if request.method == "GET"]
    assert len(listed) == 1 and "kind/.data/one/" in listed[0]
    assert list(storage.files("kind/.data")) == ["one.b/a", "two/a"]


# -- what others put beside the store


def upload(bucket, key: str) -> None:
    """Put an empty object under any key, as other programs do."""
    url = f"{bucket.endpoint}/{bucket.url.removeprefix('s3://')}/{key}"
    urllib.request.urlopen(urllib.request.Request(url, b"", method="PUT"), timeout=60).close()


def test_folders_that_a_console_made_are_no_objects(bucket):
    store = Store(bucket.url)
    made = commit(store)
    store.tag("a", "prod", made.ref)
    for key in ("", "a/", "a/tags/", "a/logprobs/", "a/logprobs/.data/", f"{made.prefix}/"):
        upload(bucket, key)
    assert Store(bucket.url).tag_names("a") == ["prod"] and Store(bucket.url).runs() == ["a"]
    assert store.storage.files(made.prefix).keys() == set(made.files.names)


@pytest.mark.parametrize("junk", ["/x", "a//x", "a/logprobs//x", "a/logprobs/./x"])
def test_an_object_that_cannot_be_named_is_told(bucket, junk):
    commit(Store(bucket.url))
    upload(bucket, junk)
    with pytest.raises(ResourceError, match=f"cannot be listed.*/{junk[:-1]}") as caught:
        Store(bucket.url).summaries(*Store(bucket.url).runs(), "logprobs")
    assert caught.value.next.startswith("delete it")


def test_what_was_taken_away_is_not_published(bucket):
    storage = open_storage(bucket.url)
    storage.put("kind/.data/work/one", b"1")
    for sizes in ({"one": 2}, {"one": 1, "two": 1}):
        with pytest.raises(FileNotFoundError, match="taken away"):
            storage.publish("kind/.data/work", "token", "kind/v000001", b"{}", sizes)
    assert storage.list("kind") == [".data"]


@every_provider
def test_of_many_writers_each_gets_a_number_and_equal_work_is_made_once(bucket):
    seeds = [*range(6), *range(6)]

    def write(seed: int) -> str:
        while True:
            with suppress(BusyError):
                return str(commit(Store(bucket.url), Settings(seed=seed)).ref)

    with ThreadPoolExecutor(6) as pool:
        refs = list(pool.map(write, seeds))
    assert refs[:6] == refs[6:]
    assert sorted(refs[:6]) == [f"a/logprobs@{number}" for number in range(1, 7)]
    assert verify(Store(bucket.url)) == (6, [])


@every_provider
def test_a_lease_that_was_cleared_and_taken_again_is_not_the_first_holders(bucket):
    """Its object has the same key; the holder renews by the stamp of what it wrote."""
    storage = open_storage(bucket.url)
    first = Leases(storage, "a/x.leases").take("work")
    assert first.renew() and first.renew()
    storage.delete("a/x.leases/")
    second = Leases(storage, "a/x.leases").take("work")
    assert not first.renew() and not first.is_held()
    first.release()
    assert second.is_held() and second.renew()
    assert Leases(storage, "a/x.leases").take("work") is None
    second.release()
    assert Leases(storage, "a/x.leases").take("work") is not None


@every_provider
def test_what_a_sleeper_publishes_after_gc_deleted_its_data_is_marked(bucket, monkeypatch):
    """It slept between its look at the data and the request that publishes."""
    real, deleting = module.Bucket.put_if_absent, module.Bucket.delete
    manifest = {}

    def publish_late(bucket, *keys):
        deleting(bucket, *keys)
        if any("/.data/" in key for key in keys):  # it wakes up at the worst moment
            real(bucket, *manifest["object"])

    def sleep(self, key, data, **options):
        if key.endswith("v000001/manifest.json"):
            manifest["object"] = key, data
            with monkeypatch.context() as patched:
                patched.setattr(leases, "SECONDS_TO_LIVE", 0.0)
                patched.setattr(module.Bucket, "delete", publish_late)
                assert collect(Store(bucket.url), Rule(grace_seconds=0), apply=True).work
        return real(self, key, data, **options)

    with monkeypatch.context() as patched, suppress(BusyError, LineageError):
        patched.setattr(module.Bucket, "put_if_absent", sleep)
        commit(Store(bucket.url))
    fresh = Store(bucket.url)
    assert fresh.listing("a", "logprobs").marks["removed"] == {1}
    assert str(commit(fresh).ref) == "a/logprobs@2"
    assert verify(Store(bucket.url)) == (1, [])


def test_a_shard_that_a_dead_process_left_beside_a_version_is_no_damage(bucket):
    """It died before the shard's note, and the next process wrote other bytes."""
    version = commit(Store(bucket.url))
    left = f"{version.manifest.prefix}/part-00000-0123456789ab.arrow"
    Store(bucket.url).storage.put(left, b"other bytes")
    assert verify(Store(bucket.url)) == (1, [])
    remove(Store(bucket.url), version.ref)
    with pytest.raises(FileNotFoundError):
        Store(bucket.url).storage.read(left)


def test_no_version_has_the_files_of_one_that_was_removed(bucket):
    """A process planned its work before another one published it, and began after its removal."""
    late = Plan(Store(bucket.url), "logprobs", 1, Settings(), "a", ("logprobs",))
    assert late.repetition == 0
    store = Store(bucket.url)
    first = commit(store)
    remove(store, first.ref)
    with pytest.raises(BusyError, match="took over"), open_staging(late) as staging:
        for index in staging.last.take_shards(2):
            staging.last.write(index, table(2 * index))
        staging.last.finish()
        staging.publish()
    second = commit(Store(bucket.url))
    assert second.manifest.place != first.manifest.place
    collect(store, Rule(grace_seconds=0), apply=True)
    assert Store(bucket.url).open(second.ref).table().num_rows == 4
    assert verify(Store(bucket.url)) == (1, []) and unfinished(store) == []


@every_provider
def test_a_file_is_fetched_in_parts_and_its_optimizer_state_is_not(bucket, monkeypatch, tmp_path):
    policy = make_policy(Store(bucket.url), 3)
    monkeypatch.setattr(module, "_PART_BYTES", 7)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    there = Store(bucket.url).open(policy.ref)
    assert not (there.files.folder / "optimizer").exists()
    assert there.files.path("optimizer/state.safetensors").read_bytes() == b"m3" * 100
    (there.files.folder / "config.json").unlink()
    assert (there.files.folder / "config.json").read_bytes() == policy.files.read("config.json")


def test_a_killed_process_leaves_work_that_another_host_goes_on_with(bucket, tmp_path, monkeypatch):
    script = (
        "import os, signal\n"
        "from quiver.stages.core.store import Store\n"
        "from tests.stages.core.store.test_store import table, work_on\n"
        f"with work_on(Store({bucket.url!r})) as work:\n"
        "    work.write(0, table(0))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=os.getcwd(), check=False)
    assert killed.returncode == -9
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    monkeypatch.setattr(leases, "SECONDS_TO_LIVE", 0.05)
    store = Store(bucket.url)
    with work_on(store) as work:
        shards = work.hand_out(2)
        assert shards.unfinished() == [1]
        work.write(1, table(2))
        work.commit()
    require_one(bucket, bucket.url)


def test_random_histories_lose_no_version_that_is_kept(bucket):
    chance = random.Random(7)
    store = Store(bucket.url)
    for _ in range(12):
        make_table(store, chance.randrange(6))
        if chance.random() < 0.3:
            store.tag("a", "prod", "a/logprobs@latest")
        if chance.random() < 0.4:
            collect(store, COLLECT_ALL, apply=True)
        latest = Store(bucket.url).open("a/logprobs@latest")
        assert latest.table().num_rows == 2
    assert verify(Store(bucket.url))[1] == []
