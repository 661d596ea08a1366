"""A stage in a process of its own: its errors keep their type, and a dead process is one."""

import json
import subprocess
import sys

import pytest

from quiver.schemas.errors import ConfigError, ResourceError
from quiver.stages.common import process
from quiver.stages.common.runtime.runner import Call, run_stage
from quiver.stages.common.work import NotDone, Work


def test_an_unexpected_error_is_told_as_such(store, tmp_path):
    """Not as a dead process, and not with advice to try again."""
    spec, result = tmp_path / "spec.json", tmp_path / "result.json"
    spec.write_text(
        json.dumps(
            {"stage": "policy", "config": {"model": 3}, "store": "s", "refs": {}, "into": "a"}
        )
    )
    command = [
        sys.executable,
        "-m",
        "quiver.stages",
        "policy",
        "--spec",
        str(spec),
        "--result",
        str(result),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error = json.loads(result.read_text())["error"]
    assert (done.returncode, error["code"], error["object"]) == (2, "E-CONFIG", "stage policy")
    spec.write_text(
        json.dumps(
            {
                "stage": "policy",
                "config": {"model": "x"},
                "store": str(store.path),
                "refs": {"x": "y"},
            }
        )
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error = json.loads(result.read_text())["error"]
    assert (done.returncode, error["code"]) == (1, "E-INTERNAL")
    assert error["message"].startswith("TypeError: ") and "Traceback" in done.stderr


def never_done(store):
    """Stands in for a look into the store that finds nothing."""

    def look(*_, **__):
        raise NotDone(Work(store, "b", "policy", "0" * 64, {}))

    return look


def test_a_typed_error_crosses_the_process(store, policy, monkeypatch):
    call = Call("policy", {"model": str(store.path / "nowhere")}, store.path, into="b")
    monkeypatch.setattr(process, "perform", never_done(store))
    with pytest.raises(ConfigError, match="there is no such directory") as caught:
        run_stage(call)
    assert caught.value.next == "correct policy.model"


def test_a_dead_child_is_a_resource_error(store, monkeypatch):
    monkeypatch.setattr(process, "perform", never_done(store))
    killer = store.path.parent / "python"
    killer.write_text("#!/bin/sh\necho about to allocate\nkill -9 $$\n")
    killer.chmod(0o755)
    call = Call("policy", {"model": "x"}, store.path, into="b")
    with pytest.raises(ResourceError, match=r"by SIGKILL \(out of memory\?\).*about to allocate"):
        run_stage(call, python=str(killer))


def test_finished_work_is_found_without_a_child(store, policy, tmp_path):
    from tests.tiny import make_folder

    call = Call("policy", {"model": str(make_folder(tmp_path / "model"))}, store.path, into="b")
    first = run_stage(call)
    assert (first.ref, first.cached) == ("b/policy@0", False)
    again = run_stage(call, python="/nonexistent")
    assert (again.ref, again.cached) == ("b/policy@0", True)
