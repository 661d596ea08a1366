"""A store is named by a folder or by the URL of a bucket."""

from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store.disk import Disk
from quiver.stages.core.store.places import is_url, locate, open_storage


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "az://container/a b"])
@pytest.mark.parametrize("slashes", ["", "/", "//"])
def test_the_url_of_a_bucket_ends_in_no_slash(url, slashes):
    assert is_url(url) and locate(url + slashes) == url


@pytest.mark.parametrize("url", ["s3:/bucket", "ftp://host/folder", "https://host"])
def test_a_wrong_url_is_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not the URL of a bucket"):
        open_storage(locate(url))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")
    assert locate("store") == locate(Path("store")) == str(tmp_path / "store")
    assert locate("~/store") == "/home/user/store"
    storage = open_storage(locate("s3"))
    assert isinstance(storage, Disk) and storage.url == str(tmp_path / "s3")
