"""A part of a store cannot be read: every other is listed and checked, and what cannot be read is
told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quiver.stages.common.store import Store
from tests.flows.conftest import command_environment
from tests.stages.common.store.histories import make_policy, make_table

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
    command = [*prefix, sys.executable, "-m", "quiver.flows.cli", *arguments, "--json"]
    env = command_environment(folder)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    (line,) = done.stdout.splitlines()
    return done.returncode, json.loads(line)


@pytest.mark.parametrize(
    "place, about",
    [
        ("a/logprobs/v000001/manifest.json", "a/logprobs@1"),
        ("a/logprobs/v000001", "a/logprobs@1"),
        ("b/logprobs", "b/logprobs"),
        ("a/tags", "a/tags"),
    ],
)
def test_what_can_not_be_read_hides_nothing_else(folder, place, about):
    (folder / "store" / place).chmod(0)
    part = folder / "store/a/logprobs/v000002/part-00000.arrow"
    part.write_bytes(part.read_bytes()[:-1])
    code, answer = called(folder, "ls")
    rows = {row["ref"]: row.get("error", "") for row in answer["versions"]}
    versions = {"a/policy@0", "a/logprobs@1", "a/logprobs@2", "b/logprobs@1"}
    assert code == 7 and versions - set(rows) <= {f"{about}@1"}
    assert [ref for ref in rows if rows[ref]] == [about] and "permission denied" in rows[about]
    assert called(folder, "ls", "--size")[0] == 7
    code, answer = called(folder, "verify")
    told = {error["object"]: error["code"] for error in answer["bad"]}
    assert code in (3, 7) and told.pop("a/logprobs@2 part-00000.arrow") == "E-CORRUPT"
    assert told[about] == "E-RESOURCE" and all(name.startswith(about) for name in told)


def test_a_loop_of_links_hides_nothing_else(folder):
    (folder / "store/a/rewards").symlink_to("rewards")
    code, answer = called(folder, "verify")
    assert code == 3 and answer["checked"] == 4
    told = [(error["object"], error["message"]) for error in answer["bad"]]
    assert ("a/rewards", "is not a folder") in told


def test_a_manifest_of_bad_bytes_hides_nothing_else(folder):
    (folder / "store/a/logprobs/v000001/manifest.json").write_bytes(b"\xff\xfe\x00")
    code, answer = called(folder, "verify")
    assert code == 3 and answer["checked"] == 4
    assert {error["object"] for error in answer["bad"]} == {"a/logprobs@1"}


def test_a_name_of_bad_bytes_in_a_version_is_told(folder):
    version = os.fsencode(folder / "store/a/logprobs/v000001")
    with open(version + b"/\xff\xfe", "w"):
        code, answer = called(folder, "verify")
    (error,) = answer["bad"]
    assert code == 3 and error["object"].startswith("a/logprobs@1 ")
    done = subprocess.run(
        [sys.executable, "-m", "quiver.flows.cli", "verify"],
        cwd=folder, env=command_environment(folder), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3 and b"Traceback" not in done.stderr
