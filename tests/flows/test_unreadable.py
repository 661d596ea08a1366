"""A store that cannot be written, or of which a part cannot be read: every other part is listed and
checked, what cannot be read is told, and what writes says so."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quiver.stages.core.store import Store
from tests.flows.conftest import RECIPE, command_environment, command_line
from tests.stages.core.store.histories import make_policy, make_table
from tests.tiny import make_folder

NO_POWERS = "-dac_override,-dac_read_search,-fowner"
"""What lets root read whatever the mode says."""
AS_ANYBODY = ["setpriv", "--bounding-set", NO_POWERS, "--inh-caps", NO_POWERS, "--"]


@pytest.fixture
def folder(tmp_path):
    store = Store(tmp_path / "store")
    policy = make_policy(store, 0)
    for number in range(2):
        make_table(store, number, models={"policy": policy})
    make_table(store, 2, run="b")
    store.tag("a", "prod", policy.ref)
    yield tmp_path
    subprocess.run(["chmod", "-R", "u+rwX", tmp_path], check=True)


def called(folder: Path, *arguments: str) -> tuple[int, dict]:
    """Exit code and JSON object of a command, for which modes count."""
    prefix = [] if os.geteuid() else AS_ANYBODY
    if subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("root cannot give up its powers here")
    command = [*prefix, *command_line(), *arguments, "--json"]
    env = command_environment(folder)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    (line,) = done.stdout.splitlines()
    return done.returncode, json.loads(line)


@pytest.mark.parametrize(
    "places",
    [
        {
            "a/logprobs/v000001/manifest.json": "a/logprobs@1",
            "b/logprobs": "b/logprobs",
            "a/tags": "a/tags",
        },
        {"a/logprobs/v000001": "a/logprobs@1"},
    ],
)
def test_what_can_not_be_read_hides_nothing_else(folder, places):
    for place in places:
        (folder / "store" / place).chmod(0)
    unreadable = set(places.values())
    (folder / "store/a/logprobs/.index").unlink()
    (part,) = folder.glob("store/a/logprobs/v000002/part-*.arrow")
    part.write_bytes(part.read_bytes()[:-1])
    code, answer = called(folder, "ls")
    rows = {row["ref"]: row.get("error", "") for row in answer["versions"]}
    versions = {"a/policy@0", "a/logprobs@1", "a/logprobs@2", "b/logprobs@1"}
    assert code == 7 and versions - set(rows) <= {f"{about}@1" for about in unreadable}
    assert {ref for ref in rows if rows[ref]} == unreadable
    assert all("permission denied" in rows[about] for about in unreadable)
    if "b/logprobs" in places:
        assert called(folder, "ls", "--size")[0] == 7
    code, answer = called(folder, "verify")
    told = {error["object"]: error["code"] for error in answer["bad"]}
    assert code in (3, 7) and told.pop(f"a/logprobs@2 {part.name}") == "E-CORRUPT"
    assert {told[about] for about in unreadable} == {"E-RESOURCE"}
    assert all(name.startswith(tuple(unreadable)) for name in told)


def loop(store: bytes) -> None:
    os.symlink("rewards", store + b"/a/rewards")


def garble(store: bytes) -> None:
    with open(store + b"/a/logprobs/v000001/manifest.json", "wb") as file:
        file.write(b"\xff\xfe\x00")


def misname(store: bytes) -> None:
    with open(store + b"/a/logprobs/v000001/\xff\xfe", "w"):
        pass


@pytest.mark.parametrize(
    ("damage", "checked", "about"),
    [(loop, 4, "a/rewards"), (garble, 4, "a/logprobs@1"), (misname, 4, "a/logprobs@1 ")],
)
def test_what_is_damaged_hides_nothing_else(folder, command, monkeypatch, damage, checked, about):
    monkeypatch.chdir(folder)
    damage(os.fsencode(folder / "store"))
    code, answer = command("verify")
    assert (code, answer["checked"]) == (3, checked)
    objects = [error["object"] for error in answer["bad"]]
    assert objects and all(name.startswith(about) for name in objects)


# -- a store that cannot be written

READS = [
    ["ls"],
    ["show", "a/logprobs@1"],
    ["lineage", "a/policy@1"],
    ["diff", "a/logprobs@1", "a/logprobs@2"],
    ["history", "a/policy@prod"],
    ["verify", "a/policy@1"],
    ["gc", "--keep", "1"],
]
WRITES = [
    ["gc", "--keep", "1", "--apply"],
    ["rm", "a/logprobs@2"],
    ["tag", "best", "a/policy@1"],
    ["verify", "b/logprobs@1", "--quarantine"],
    ["report", "a"],
    ["prompt", "recipe.toml"],
]


@contextmanager
def read_only(path: str) -> Iterator[None]:
    """Nothing below `path` can be written: by its mount for root, who may write whatever the mode
    says, else by its mode."""
    if os.geteuid():
        subprocess.run(["chmod", "-R", "a-w", path], check=True)
    else:
        if subprocess.run(["mount", "--bind", path, path], check=False).returncode:
            pytest.skip("mounting is not permitted here")
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
    try:
        yield
    finally:
        undo = ["chmod", "-R", "u+w"] if os.geteuid() else ["umount"]
        subprocess.run([*undo, path], check=True)


def test_a_store_that_can_not_be_written_is_read_and_says_what_it_is(
    tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "model")
    (tmp_path / "questions.jsonl").write_text('{"question": "What is 1 plus 5?"}\n')
    (tmp_path / "recipe.toml").write_text(RECIPE)
    store = Store(tmp_path / "store")
    for number in range(2):
        table = make_table(store, number)
        policy = make_policy(store, number, inputs={"rollouts": table})
    store.tag("a", "prod", policy.ref)
    damaged = make_table(store, 0, "b")
    damaged.files.path(damaged.files.names[0]).write_bytes(b"")
    (Path(store.url) / "a/logprobs/.index").unlink()
    with read_only(store.url):
        answers = [command(*words, "--store", store.url) for words in (*READS, *WRITES)]
    assert [code for code, _ in answers[: len(READS)]] == [0] * len(READS)
    for words, (code, answer) in zip(WRITES, answers[len(READS) :], strict=True):
        error = answer["error"]
        assert (code, error["code"]) == (7, "E-RESOURCE"), (words, error)
        assert "make the store writable" in error["next"]
