"""Every command on a store that cannot be written: what reads answers, what writes says so."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quiver.stages.common.store import Store
from tests.flows.conftest import RECIPE, quiver_each
from tests.stages.common.store.histories import make_policy, make_table
from tests.tiny import make_folder

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
    ["gc", "--restore", "a/logprobs@1"],
    ["rm", "a/logprobs@2"],
    ["tag", "best", "a/policy@1"],
    ["verify", "b/logprobs@1", "--quarantine"],
    ["report", "a"],
    ["prompt", "recipe.toml"],
]


@contextmanager
def read_only(path: Path) -> Iterator[None]:
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


def test_a_store_that_can_not_be_written_is_read_and_says_what_it_is(tmp_path):
    make_folder(tmp_path / "model")
    (tmp_path / "questions.jsonl").write_text('{"question": "What is 1 plus 5?"}\n')
    (tmp_path / "recipe.toml").write_text(RECIPE)
    store = Store(tmp_path / "store")
    for number in range(2):
        table = make_table(store, number)
        policy = make_policy(store, number, inputs={"rollouts": table})
    store.tag("a", "prod", policy.ref)
    damaged = make_table(store, 0, "b")
    damaged.files.path("part-00000.arrow").write_bytes(b"")
    shutil.rmtree(store.path / "a/logprobs/.index")
    commands = [[*command, "--store", str(store.path)] for command in [*READS, *WRITES]]
    with read_only(store.path):
        answers = quiver_each(tmp_path, *commands)
    assert [code for code, _ in answers[: len(READS)]] == [0] * len(READS)
    for command, (code, answer) in zip(WRITES, answers[len(READS) :], strict=True):
        error = answer["error"]
        assert (code, error["code"]) == (7, "E-RESOURCE"), (command, error)
        assert "make the store writable" in error["next"]
