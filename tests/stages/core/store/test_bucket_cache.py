"""Copies of a bucket's files on this host: fetched once, compared with the bucket, bounded. And a
bucket that cannot be used says why."""

import errno
import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path

import obstore
import pytest
from obstore.store import from_url

from quiver.schemas.errors import ConfigError, CorruptError, RemoteError, ResourceError
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store import bucket as bucket_module
from quiver.stages.core.store.bucket import CACHE_GIB
from tests.buckets import two_providers
from tests.faults.proxy import Proxy
from tests.faults.seam import watched
from tests.stages.core.store.histories import make_policy, make_table, plan
from tests.warm import REAL_PYTHON
from tests.writing import begin

HOURS_AGO = time.time() - 2 * 3600


@pytest.fixture
def asked(bucket, monkeypatch):
    """A function that returns the requests for data, of all stores, since the last call."""
    with Proxy(bucket.endpoint) as proxy:
        for name, text in bucket.behind(proxy.url).items():
            monkeypatch.setenv(name, text)
        requests = [proxy.follow()]

        def names() -> list[str]:
            paths = [each.path.partition("?")[0] for each in requests[0] if each.method == "GET"]
            requests[0] = proxy.follow()
            return [Path(path).name for path in paths if path.endswith((".arrow", "tensors"))]

        yield names


def objects(bucket):
    """The bucket, for another program than Quiver."""
    return from_url(bucket.url, client_options={"allow_http": True})


def key_of(version: Version) -> str:
    """The key of a version's first file."""
    return f"{version.manifest.prefix}/{version.files.names[0]}"


def cached(tmp_path: Path) -> dict[str, Path]:
    """The copies of shards on this host, by the version that they belong to."""
    return {path.name: path for path in (tmp_path / "cache").rglob("*.arrow")}


# -- copies


@two_providers
def test_what_was_read_once_is_not_fetched_again(bucket, asked, tmp_path):
    made = make_table(Store(bucket.url), 1)
    shutil.rmtree(tmp_path / "cache")
    asked()
    for fetched in (made.files.names, []):
        version = Store(bucket.url).open("a/logprobs@1")
        assert version.table()["rollout_id"].to_pylist() == ["r10", "r11"]
        version.table()
        assert asked() == fetched


@two_providers
def test_a_policy_that_was_read_once_is_not_fetched_again(bucket, asked, tmp_path):
    make_policy(Store(bucket.url), 1)
    shutil.rmtree(tmp_path / "cache")
    asked()
    for fetched in (["model.safetensors", "state.safetensors"], []):
        version = Store(bucket.url).open("a/policy@0")
        version.verify()
        assert (version.files.folder / "model.safetensors").read_bytes() == b"w1"
        assert sorted(asked()) == fetched


def test_what_this_host_wrote_is_not_fetched(bucket, asked):
    """A library wrote its files into the cache."""
    make_policy(Store(bucket.url), 1)
    asked()
    Store(bucket.url).open("a/policy@0").verify()
    assert asked() == []


@two_providers
def test_a_file_that_changed_in_the_bucket_is_noticed(bucket):
    version = make_table(Store(bucket.url), 1)
    raw = bytearray(version.files.read(version.files.names[0]))
    raw[100] ^= 1
    obstore.put(objects(bucket), key_of(version), bytes(raw))
    with pytest.raises(CorruptError, match="sha256 expected"):
        Store(bucket.url).open("a/logprobs@1").table()


@two_providers
def test_a_file_that_is_gone_from_the_bucket_is_missed(bucket):
    version = make_table(Store(bucket.url), 1)
    version.table()
    obstore.delete(objects(bucket), key_of(version))
    with pytest.raises(CorruptError, match="is missing"):
        Store(bucket.url).open("a/logprobs@1").table()


def test_a_copy_that_was_damaged_here_is_fetched_again(bucket, tmp_path):
    version = make_table(Store(bucket.url), 1)
    version.table()
    (path,) = cached(tmp_path).values()
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)
    os.utime(path, (status.st_atime, status.st_mtime))
    assert Store(bucket.url).open("a/logprobs@1").table().num_rows == 2


def test_a_deleted_cache_costs_only_a_new_fetch(bucket, asked, tmp_path):
    store = Store(bucket.url)
    version = make_table(store, 1)
    version.table()
    asked()
    shutil.rmtree(tmp_path / "cache")
    assert version.table()["rollout_id"].to_pylist() == ["r10", "r11"]
    assert asked() == version.files.names


def read_all(store: Store) -> None:
    """Read a table and a policy, in every way."""
    assert store.open("a/logprobs@1").table().num_rows == 2
    files = store.open("a/policy@0").files
    assert files.folder == files.path("config.json").parent
    assert files.read("model.safetensors") == b"w1"
    store.open("a/policy@0").verify()


def test_copies_that_are_deleted_at_any_moment_are_fetched_again(bucket, tmp_path, monkeypatch):
    make_table(Store(bucket.url), 1), make_policy(Store(bucket.url), 1)
    local, moments = bucket_module.Bucket.local, itertools.count()
    cache = tmp_path / "cache"

    def delete_at(call: str, path: str, really):
        done = really()
        if str(cache) in path and next(moments) == fatal:
            shutil.rmtree(cache, ignore_errors=True)  # another thread may write at this moment
        return done

    def found(storage, key, *arguments, **options):
        return delete_at("local", str(cache), lambda: local(storage, key, *arguments, **options))

    monkeypatch.setattr(bucket_module.Bucket, "local", found)
    for fatal in range(100):
        shutil.rmtree(cache, ignore_errors=True)
        store, moments = Store(bucket.url), itertools.count()
        with watched(delete_at):
            read_all(store)
        if next(moments) <= fatal:
            break
    assert 20 < fatal < 99


@two_providers
def test_what_was_written_again_is_fetched_again(bucket):
    storage = Store(bucket.url).storage
    for raw in (b"first", b"again"):
        storage.put("a/progress", raw)
        assert storage.local("a/progress").read_bytes() == raw


# -- their room


@pytest.fixture
def three(bucket, tmp_path) -> list[str]:
    """The names of the shards of three versions of the same size; there are no copies."""
    versions = [make_table(Store(bucket.url), number) for number in (1, 2, 3)]
    shutil.rmtree(tmp_path / "cache")
    assert len({version.manifest.bytes["data"] for version in versions}) == 1
    return [version.files.names[0] for version in versions]


def read(bucket, number: int) -> int:
    """Read a version as a new process does. Returns its bytes."""
    version = Store(bucket.url).open(f"a/logprobs@{number}")
    assert version.table().num_rows == 2
    return version.manifest.bytes["data"]


def test_copies_that_were_not_used_for_longest_make_room(bucket, three, tmp_path, monkeypatch):
    num_bytes = read(bucket, 1) + read(bucket, 2)
    for age, name in enumerate(three[:2]):  # the first one was used after the second one
        path = cached(tmp_path)[name]
        os.utime(path, (HOURS_AGO - age, path.stat().st_mtime))
    monkeypatch.setenv(CACHE_GIB, str(1.3 * num_bytes / 1024**3))
    read(bucket, 3)
    assert cached(tmp_path).keys() == {three[0], three[2]}


def test_copies_in_use_stay_in_a_full_cache(bucket, three, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_GIB, "1e-9")
    for number in (1, 2, 3):
        read(bucket, number)
    assert cached(tmp_path).keys() == set(three)


def test_reading_a_copy_is_using_it(bucket, three, tmp_path, monkeypatch):
    read(bucket, 1)
    path = cached(tmp_path)[three[0]]
    os.utime(path, (HOURS_AGO, path.stat().st_mtime))
    monkeypatch.setenv(CACHE_GIB, "1e-9")
    read(bucket, 1)
    read(bucket, 2)
    assert cached(tmp_path).keys() == set(three[:2])


def test_a_size_that_is_none(bucket, three, monkeypatch):
    for text in ("many", "0", "-1", "nan", ""):
        monkeypatch.setenv(CACHE_GIB, text)
        with pytest.raises(ConfigError, match="is not a number above 0") as caught:
            read(bucket, 1)
        assert caught.value.next == f"export {CACHE_GIB}=100"


def test_a_folder_for_copies_that_cannot_be_made(bucket, tmp_path, monkeypatch):
    """Versions are not told to be damaged for that."""
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", "/proc/none"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        with pytest.raises(ConfigError, match="cannot hold copies") as caught:
            Store(bucket.url)
        assert caught.value.next == "export XDG_CACHE_HOME=FOLDER"


def test_a_full_disk_is_told_and_the_version_is_read_later(bucket, three, tmp_path):
    def full(call: str, path: str, really):
        if call == "replace" and str(tmp_path / "cache") in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return really()

    with pytest.raises(ResourceError, match="the disk is full") as caught, watched(full):
        read(bucket, 1)
    assert caught.value.object.startswith(str(tmp_path / "cache"))
    read(bucket, 1)


READ = """
import hashlib, sys
from quiver.stages.core.store import Store
version = Store(sys.argv[1]).open("a/policy@0")
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(version.files.read("model.safetensors")).hexdigest())
"""


def test_two_processes_that_fetch_a_file_at_once_read_it_whole(bucket, tmp_path):
    with begin(Store(bucket.url), "a", "policy", **plan(1)) as work:
        (work.folder / "model.safetensors").write_bytes(os.urandom(1 << 24))
        expected = work.commit().manifest.files[0].sha256
    shutil.rmtree(tmp_path / "cache")
    readers = [
        subprocess.Popen(
            [REAL_PYTHON, "-c", READ, bucket.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [reader.stdout.readline() for reader in readers] == ["ready\n"] * 2
    for reader in readers:
        reader.stdin.write("\n")
        reader.stdin.flush()
    assert [reader.communicate()[0].strip() for reader in readers] == [expected] * 2


# -- a bucket that cannot be used


@two_providers
def test_a_bucket_that_does_not_exist(bucket):
    url = f"{bucket.url.partition(':')[0]}://nowhere-at-all/prefix"
    with pytest.raises(ResourceError, match="404 Not Found") as caught:
        Store(url)
    assert "look if the bucket exists" in caught.value.next


@two_providers
def test_a_server_that_nobody_runs(bucket, monkeypatch):
    for name, text in bucket.behind("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, text)
    with pytest.raises(RemoteError, match="the bucket does not answer") as caught:
        Store(bucket.url)
    assert caught.value.next == "run the same command again"
    require_no_secret(caught.value, bucket)


def test_a_key_that_the_bucket_does_not_know(az_server, monkeypatch):
    bucket = az_server.make_bucket()
    for name, text in bucket.environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "QUFBQUFBQUFBQUFBQUFBQUFBQUE=")
    with pytest.raises(ResourceError, match="403 Forbidden") as caught:
        Store(bucket.url)
    assert caught.value.next.startswith("give this process the right to")
    require_no_secret(caught.value, bucket)


def test_a_key_that_is_none(az_server, monkeypatch):
    bucket = az_server.make_bucket()
    for name, text in bucket.environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not a key")
    with pytest.raises(ConfigError, match="Invalid Access Key") as caught:
        Store(bucket.url)
    require_no_secret(caught.value, bucket)
    assert "not a key" not in str(caught.value) and "Debug" not in str(caught.value)


@two_providers
def test_a_key_with_a_line_break(bucket, monkeypatch):
    """As in a file from which it was read whole."""
    name = next(name for name in bucket.environment if name.endswith("KEY"))
    monkeypatch.setenv(name, f"{bucket.environment[name]}\n")
    with pytest.raises(ConfigError, match="line break") as caught:
        Store(bucket.url)
    assert caught.value.object == name
    require_no_secret(caught.value, bucket)


def require_no_secret(error: Exception, bucket) -> None:
    secrets = {text for name, text in bucket.environment.items() if "KEY" in name}
    assert len(secrets) > 0 and not [secret for secret in secrets if secret in str(error)]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://bucket/prefix",
        "memory:///prefix",
        "file:///prefix",
        "https://me:secret@host/prefix",
        "s3://me:secret@host/prefix",
        "s3://bucket/prefix?key=secret",
        "s3://",
        "az:///prefix",
    ],
)
def test_a_url_of_no_bucket(url, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Store(url)
    assert "s3://bucket/folder" in caught.value.next
    assert list(tmp_path.iterdir()) == []
