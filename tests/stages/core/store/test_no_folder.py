"""Where the store needs a folder there is a plain file, or a link that leads nowhere: it is told, and
nothing is taken away for what cannot be read."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import CorruptError
from quiver.stages.core.store import Store
from quiver.stages.core.store.retention import Rule, collect
from tests.stages.core.store.histories import make_policy, make_table

PLACES = ["a/tags", "a/tags/prod", "a/logprobs", "a/logprobs/.work"]
WORDS = {"file": "is not a folder", "dangling link": "is a link", "loop": "is a link"}
WRONG = {
    "file": lambda path: path.write_text(""),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.fixture
def full(store, monkeypatch) -> Store:
    """Three policies, the first of which is tagged; a table by the first; one more run."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    first = make_policy(store, 0)
    for number in (1, 2):
        make_policy(store, number)
    make_table(store, 0, models={"policy": first})
    make_table(store, 1, run="b")
    store.tag("a", "prod", first.ref)
    return store


def replace(store: Store, place: str, wrong: str) -> None:
    path = Path(store.url) / place
    if path.exists():
        shutil.move(path, Path(store.url).with_name("moved away"))
    WRONG[wrong](path)


def objects(store: Store) -> set[str]:
    """Names of all but caches."""
    return {name for name in store.storage.files("") if not name.endswith(".index")}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", PLACES)
def test_verify_tells_and_gc_takes_nothing(full, place, wrong):
    replace(full, place, wrong)
    before = objects(full)
    (error,) = {str(error) for error in verify(full)[1] if WORDS[wrong] in str(error)}
    assert error.startswith(f"E-CORRUPT {place}: ")
    assert f" {full.url}/{place} " in error.partition("Next: ")[2]
    for apply in (False, True):
        with pytest.raises(CorruptError, match=WORDS[wrong]):
            collect(full, Rule(keep=1, grace_seconds=0), apply=apply)
    assert objects(full) == before


def test_a_run_that_is_a_link_to_nowhere_is_told(full):
    path = Path(full.url)
    (path / "a").rename(path.with_name("another disk"))
    (path / "a").symlink_to("nowhere")
    assert [error.object for error in verify(full)[1]] == ["a"]
    with pytest.raises(CorruptError, match="is a link"):
        collect(full, Rule(keep=1, grace_seconds=0), apply=True)


def test_what_verify_tells_does_not_hide_the_rest(full):
    replace(full, "a/logprobs", "file")
    (path,) = Path(full.url).glob("b/logprobs/v000001/*.arrow")
    path.write_bytes(path.read_bytes()[:-1])
    count, errors = verify(full)
    assert count == 4  # three policies, and the table of b
    assert {error.object for error in errors} == {"a/logprobs", f"b/logprobs@1 {path.name}"}


def test_gc_says_it_as_every_command_does(full, monkeypatch, capsys):
    from quiver.flows.cli import main as cli

    replace(full, "a/logprobs/.work", "file")
    arguments = ["gc", "--keep", "1", "--apply", "--store", full.url]
    monkeypatch.setattr(sys, "argv", ["quiver", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    assert "E-CORRUPT a/logprobs/.work: is not a folder" in capsys.readouterr().err


def test_a_store_in_the_home_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Store("~/mine").url == str(tmp_path / "mine") == Store("mine").url
