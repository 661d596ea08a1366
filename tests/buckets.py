"""Buckets of S3, Google and Azure on this host, in moto's server and Azurite, which `make servers`
installs. Google's is moto's S3 with generations (see `moto_server`).

A process of pytest starts each at most once, at the first test that wants it; its buckets are in
memory and end with it. Scripts and processes of their own use `server`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.warm import REAL_PYTHON

_ROOT = Path(__file__).parents[1]
_MOTO = _ROOT / ".servers/moto"
_AZURITE = _ROOT / ".servers/azurite"
_MAIN = _AZURITE / "node_modules/azurite/dist/src/blob/main.js"
_ACCOUNT = "devstoreaccount1"
# of every Azurite: no secret
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_OPTIONS = "--blobPort 0 --inMemoryPersistence --silent --skipApiVersionCheck --disableTelemetry"
_COMMANDS = {
    "s3": [REAL_PYTHON, "-m", "tests.moto_server"],
    "gs": [REAL_PYTHON, "-m", "tests.moto_server", "google"],
    "az": ["node", str(_MAIN), *_OPTIONS.split()],
}
_INSTALLED = {"s3": _MOTO / ".installed", "gs": _MOTO / ".installed", "az": _AZURITE / ".installed"}


@dataclass(frozen=True)
class Bucket:
    """An empty bucket, with a prefix in its `url`, and the variables by which obstore finds it."""

    url: str
    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        return self.behind(self.endpoint)

    def behind(self, endpoint: str) -> dict[str, str]:
        """Variables by which obstore asks `endpoint`, a proxy before the server."""
        if self.url.startswith("s3:"):
            return {
                "AWS_ENDPOINT_URL_S3": endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "anyone",
                "AWS_SECRET_ACCESS_KEY": "anything",
            }
        if self.url.startswith("gs:"):
            account = {"gcs_base_url": endpoint, "disable_oauth": True}
            account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
            return {
                "GOOGLE_ALLOW_HTTP": "true",
                "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            }
        return {
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        }


@dataclass(frozen=True)
class Server:
    """A running server of buckets; its `kind` is the scheme of their URLs."""

    kind: str
    endpoint: str

    def make_bucket(self) -> Bucket:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        url, headers = f"{self.endpoint}/{name}", {}
        if self.kind == "az":
            path = f"/{_ACCOUNT}/{name}"
            url = f"{self.endpoint}{path}?restype=container"
            headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
            lines = [f"{header}:{text}" for header, text in headers.items()]
            signed = "\n".join(
                ["PUT", *[""] * 11, *lines, f"/{_ACCOUNT}{path}", "restype:container"]
            )
            digest = hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)
            headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
        urllib.request.urlopen(
            urllib.request.Request(url, method="PUT", headers=headers), timeout=60
        ).close()
        return Bucket(f"{self.kind}://{name}/some/prefix", self.endpoint)


@contextmanager
def server(kind: str) -> Iterator[Server]:
    """Run a server of `s3` or `az` until the end of the block."""
    search_path = os.pathsep.join([str(_MOTO), str(_ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="quiver-buckets.") as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            # it ends with this process, even a killed one
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *_COMMANDS[kind]],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": search_path},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            until = time.monotonic() + 120
            while not (listens := re.search(r"listens on (\S+)", log.read_text())):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server does not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield Server(kind, listens[1])
        finally:
            process.kill()
            process.wait()


@contextmanager
def _server_if_installed(kind: str) -> Iterator[Server]:
    if not _INSTALLED[kind].exists():
        end = pytest.fail if kind == "s3" and "CI" in os.environ else pytest.skip
        end(f"no server of {kind}:// is installed: `make servers` brings it")
    with server(kind) as running:
        yield running


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    with _server_if_installed("s3") as running:
        yield running


@pytest.fixture(scope="session")
def az_server() -> Iterator[Server]:
    with _server_if_installed("az") as running:
        yield running


@pytest.fixture(scope="session")
def gs_server() -> Iterator[Server]:
    with _server_if_installed("gs") as running:
        yield running


every_provider = pytest.mark.parametrize("bucket", ["s3", "az", "gs"], indirect=True)
two_providers = pytest.mark.parametrize("bucket", ["s3", "az"], indirect=True)


@pytest.fixture(params=["s3"])
def bucket(request, monkeypatch, tmp_path) -> Bucket:
    """An empty bucket; obstore finds it in this process and in its children. Of S3, unless the test
    asks for the providers between which what it tests may differ."""
    bucket = request.getfixturevalue(f"{request.param}_server").make_bucket()
    for name, text in bucket.environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return bucket
