"""A store on a read-only disk: it is read like any other, and whatever would write there says so,
typed. A bind mount in a mount namespace of its own, since root is kept out by no permission."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quiver.stages.common.store import Store
from tests.faults.broken import snapshot
from tests.faults.test_fuzzed_recipes import RECIPE

GOLDEN = Path(__file__).parents[1] / "golden/stores"
MOUNT = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
EACH = """
import json, os, sys
from quiver.flows import cli, rerun
for command in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv = ["quiver", *command, "--json"]
        cli.main()
    print("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def can_mount() -> bool:
    """Whether a mount namespace can be had."""
    command = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and not subprocess.run(command, check=False).returncode


pytestmark = pytest.mark.skipif(not can_mount(), reason="no mount namespace")


@pytest.fixture
def folder(tmp_path):
    """The inputs of a recipe, and a finished store beside them, of which one version is damaged."""
    shutil.copytree(GOLDEN / "inputs", tmp_path / "inputs")
    store = tmp_path / "inputs/store"
    shutil.copytree(GOLDEN / "finished", store)
    (tmp_path / "inputs/recipe.toml").write_text(RECIPE)
    (store / "own/updates/v000001/part-00000.arrow").write_bytes(b"")
    return tmp_path / "inputs"


def outcomes(folder: Path, *commands: list[str]) -> list[tuple[int, dict]]:
    """Exit code and answer of each command, while the store can not be written."""
    store = str(folder / "store")
    script = [sys.executable, "-c", EACH, json.dumps(commands)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNT, "sh", store, *script],
        cwd=folder,
        env={**os.environ, "PREFECT_HOME": str(folder / "prefect")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(commands), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    answers = map(json.loads, lines[::2])
    codes = [int(line.removeprefix("code ")) for line in lines[1::2]]
    return list(zip(codes, answers, strict=True))


READ = [
    ["ls"],
    ["show", "golden/rollouts@1"],
    ["lineage", "golden/policy@2"],
    ["diff", "golden/rewards@1", "golden/rewards@2"],
    ["history", "golden/policy@prod"],
    ["verify", "golden/rewards@1"],
    ["report", "golden", "-o", "report.html"],
    ["prompt", "recipe.toml"],
]
WRITE = [
    ["report", "golden"],
    ["tag", "best", "golden/policy@1"],
    ["rm", "golden/prompts@4"],
    ["doctor", "--quarantine", "own/updates@1"],
    ["generate", "recipe.toml", "--force"],
]


def test_a_store_that_can_not_be_written_is_read_and_says_so(folder):
    Store(folder / "store").find("golden", "prompts", "0" * 64)
    before = snapshot(folder / "store")
    answers = outcomes(folder, *READ, *WRITE, ["verify"])
    assert [code for code, _ in answers] == [0] * len(READ) + [7] * len(WRITE) + [3]
    for _, answer in answers[len(READ) : -1]:
        error = answer["error"]
        assert error["code"] == "E-RESOURCE" and "read-only" in error["message"], error
    assert (folder / "report.html").stat().st_size > 10_000
    assert snapshot(folder / "store") == before


@pytest.mark.torture
@pytest.mark.prefect
def test_a_run_in_a_store_that_can_not_be_written_says_so(folder):
    ((code, answer),) = outcomes(folder, ["run", "recipe.toml", "--iterations", "3"])
    assert (code, answer["error"]["code"]) == (7, "E-RESOURCE")
