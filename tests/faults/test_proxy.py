"""The proxy does what its plan says, in terms of obstore 0.12, on both servers.

What obstore does by itself with its default `retry_config`:

* A dropped connection, a 5xx, a 408 and a 429 are asked again, whatever the operation: after 0.1 s
  first, at most 10 times and 180 s. Where all are refused it gives up after 2 to 30 s, by chance.
* A silent server costs 30 s a request; then get, head, list and overwrite are asked again, and
  create, update and delete are not.
* So after a lost answer a create says AlreadyExistsError and an update PreconditionError, although
  both were done; in Azure a delete says FileNotFoundError.

`{"max_retries": 0}` asks once. `client_options` takes the place of what the environment says about
plain http.
"""

import http.client
from collections.abc import Iterator
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError
from obstore.store import from_url

from tests.buckets import Bucket, two_providers
from tests.faults.proxy import (
    DROP_AFTER,
    DROP_BEFORE,
    FORWARD,
    REPEAT,
    Action,
    Proxy,
    answer,
    at,
    delay,
)

ONCE = {"max_retries": 0}


@pytest.fixture
def proxy(bucket, monkeypatch) -> Iterator[Proxy]:
    with Proxy(bucket.endpoint) as proxy:
        for name, text in bucket.behind(proxy.url).items():
            monkeypatch.setenv(name, text)
        yield proxy


def actions(requests) -> list[tuple[str, Action]]:
    return [(request.method, request.action) for request in requests]


def content(bucket: Bucket, key: str) -> bytes:
    return bytes(obstore.get(from_url(bucket.url), key).bytes())


@pytest.mark.parametrize("action", [DROP_BEFORE, answer(500), answer(503)], ids=str)
def test_a_request_that_the_server_never_heard_is_asked_again(bucket, proxy, action):
    requests = proxy.follow(at(0, action))
    obstore.put(from_url(bucket.url), "key", b"own", mode="create")
    assert actions(requests) == [("PUT", action), ("PUT", FORWARD)]
    assert content(bucket, "key") == b"own"

    proxy.follow(at(0, action))
    with pytest.raises(GenericError):
        obstore.put(from_url(bucket.url, retry_config=ONCE), "other", b"", mode="create")
    with pytest.raises(FileNotFoundError):
        content(bucket, "other")


@two_providers
@pytest.mark.parametrize("action", [DROP_AFTER, REPEAT], ids=str)
def test_a_write_that_is_done_twice_meets_itself(bucket, proxy, action):
    store = from_url(bucket.url)
    requests = proxy.follow(at(0, action))
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "key", b"own", mode="create")
    assert actions(requests)[0] == ("PUT", action)
    assert len(requests) == (2 if action == DROP_AFTER else 1)
    assert content(bucket, "key") == b"own"

    seen = {"e_tag": obstore.head(store, "key")["e_tag"]}
    proxy.follow(at(0, action))
    with pytest.raises(PreconditionError):
        obstore.put(store, "key", b"new", mode=seen)
    assert content(bucket, "key") == b"new"


def test_an_answer_that_is_lost_may_stand_for_a_write(bucket, proxy):
    proxy.follow(at(0, DROP_AFTER))
    with pytest.raises(GenericError):
        obstore.put(from_url(bucket.url, retry_config=ONCE), "key", b"own", mode="create")
    assert content(bucket, "key") == b"own"


def test_an_answer_that_is_late_is_not_waited_for(bucket, proxy):
    requests = proxy.follow(at(0, delay(1)))
    store = from_url(bucket.url, client_options={"timeout": "300ms", "allow_http": True})
    with pytest.raises(GenericError, match="TimedOut"):
        obstore.put(store, "key", b"own", mode="create")
    assert actions(requests) == [("PUT", delay(1))]


def test_a_plan_may_go_by_method_and_path(bucket, proxy):
    requests = proxy.follow(
        lambda number, method, path: answer(503) if "odd" in path and number < 2 else FORWARD
    )
    store = from_url(bucket.url)
    obstore.put(store, "even", b"")
    obstore.put(store, "odd", b"")
    assert [action for _, action in actions(requests)] == [FORWARD, answer(503), FORWARD]


@two_providers
def test_it_passes_on_what_it_is_given(bucket, proxy):
    """Parts of a large object, ranges, heads, lists, deletions, over connections that stay."""
    store = from_url(bucket.url)
    written = bytes(range(256)) * 30_000
    obstore.put(store, "folder/large", written)
    obstore.put(store, "folder/empty", b"")
    assert bytes(obstore.get(store, "folder/large").bytes()) == written
    assert bytes(obstore.get_range(store, "folder/large", start=255, length=3)) == b"\xff\0\1"
    assert obstore.head(store, "folder/large")["size"] == len(written)
    listed = obstore.list_with_delimiter(store, "folder")["objects"]
    assert [entry["path"] for entry in listed] == ["folder/empty", "folder/large"]
    obstore.delete(store, ["folder/empty", "folder/large"])
    assert not obstore.list_with_delimiter(store, "folder")["objects"]


def test_a_body_may_come_in_chunks_and_ask_first(s3_server, monkeypatch):
    bucket = s3_server.make_bucket()
    for name, text in bucket.environment.items():
        monkeypatch.setenv(name, text)
    url = urlsplit(bucket.url)
    headers = {"Expect": "100-continue", "Transfer-Encoding": "chunked"}
    with Proxy(bucket.endpoint) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=60)
        for key in ("first", "second"):
            chunks = iter([b"in ", b"chunks of ", key.encode()])
            path = f"/{url.netloc}{url.path}/{key}"
            connection.request("PUT", path, chunks, headers, encode_chunked=True)
            assert connection.getresponse().read() == b""
            assert content(bucket, key) == f"in chunks of {key}".encode()
        connection.close()


def test_connections_end_with_it(s3_server):
    with Proxy(s3_server.endpoint) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=60)
        connection.request("HEAD", "/")
        connection.getresponse().read()
    with pytest.raises(OSError):
        connection.request("HEAD", "/")
        connection.getresponse()
    connection.close()
