"""A stage's process as its caller sees it; see `test_subprocesses` for how it ends."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quiver.schemas.errors import ResourceError
from quiver.stages.core.run import stage_process
from quiver.stages.core.run.call import Call, Where, quiver_version
from quiver.stages.core.run.folders import sweep_folders, temporary_folder
from quiver.stages.core.run.stage_process import (
    StageProcess,
    Terms,
    allocator_environment,
    end_waiting,
    run_call,
    start_ahead,
)

CONFIG = {"options": {}}
SERVES = """
n=0
while read line; do
    n=$((n + 1))
    {body}
    grep -q '"resident": true' "$6/call.json" && stays=true || stays=false
    echo '{{"ref": "'$n'", "resident": '$stays', {rest}}}' > "$6/answer.json"
    echo
done
"""
"""Answers each call by the number of calls that it has had; $6 is the folder of its files."""
REST = f'"cached": false, "rows": 0, "seconds": 0, "metrics": {{}}, "quiver": "{quiver_version()}"'


@pytest.fixture
def interpreter(tmp_path):
    """Make an interpreter that runs a shell script, whatever it is asked to run."""

    def make(script: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    yield make
    end_waiting()


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    processes = []
    monkeypatch.setattr(
        stage_process,
        "StageProcess",
        lambda *about: processes.append(StageProcess(*about)) or processes[-1],
    )
    return processes


def call_by(python: str, config: dict = CONFIG, **where) -> Call:
    """A call that a process of this interpreter answers."""
    return Call("policy", config, "store", where=Where(python=python, **where))


# -- one call


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("exit 3", "with exit code 3 without an answer; its last output: 8 / 7 / 6 / 5 / 4"),
        ("kill -9 $$", r"by SIGKILL \(out of memory\?\) without"),
        ("kill -15 $$", "by SIGTERM without"),
    ],
)
def test_a_process_that_ends_without_an_answer_is_described(interpreter, end, problem):
    lines = []
    with pytest.raises(ResourceError, match=problem) as caught:
        run_call(call_by(interpreter(f"seq 8; {end}")), on_line=lines.append)
    assert caught.value.object == "stage policy" and "last output: 8" in caught.value.message
    assert lines == list("12345678")


def test_a_time_limit_is_the_stages(interpreter):
    with pytest.raises(ResourceError, match="limit of 1 s") as caught:
        run_call(call_by(interpreter("sleep 600"), timeout_seconds=1))
    assert caught.value.object == "stage policy"
    assert "placement.timeout_seconds" in caught.value.next


def test_a_time_limit_of_the_reader_of_its_lines_is_not_its_own(interpreter):
    def on_line(line):
        raise TimeoutError("the server does not answer")

    with pytest.raises(TimeoutError, match="the server does not answer"):
        run_call(call_by(interpreter("echo hello; sleep 600")), on_line=on_line)


def test_one_that_was_never_called_is_not_asked_to_end(interpreter, tmp_path):
    """It is often deep in an import, and does not react to SIGTERM."""
    script = f"trap 'touch {tmp_path}/asked' TERM; echo up; while true; do sleep 0.1; done"
    with StageProcess(Terms("policy", interpreter(script))) as child:
        assert child.process.stdout.readline() == b"up\n"
    assert not (tmp_path / "asked").exists()


# -- resident


@pytest.mark.parametrize(
    ("changed", "env", "starts"),
    [
        ({}, None, 1),
        ({"online": True}, None, 2),
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, 2),
        ({"config": {"options": {"seed": 1}}}, None, 2),
    ],
)
def test_a_resident_process_gets_only_calls_with_its_terms(
    interpreter, started, changed, env, starts
):
    python = interpreter(SERVES.format(body="", rest=REST))
    start_ahead("policy", CONFIG, python)
    start_ahead("policy", {}, python)  # there is one
    assert run_call(call_by(python, **changed), env=env).ref == "1"
    assert len(started) == starts
    assert not stage_process._waiting


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ('echo \'{"error": {"object": "o", "message": "m"}}\' > "$6/answer.json"; exit 1', "o: m"),
        ("exit 3", "its process ended with exit code 3"),
    ],
)
def test_a_call_that_fails_in_a_resident_process_is_repeated_in_a_fresh_one(
    interpreter, started, caplog, fault, reason
):
    caplog.set_level("INFO", "quiver")
    python = interpreter(SERVES.format(body=f"if [ $n = 3 ]; then {fault}; fi", rest=REST))
    call = call_by(python, resident_engine=True, timeout_seconds=60)
    refs = [run_call(call).ref for _ in range(5)]
    assert refs == ["1", "2", "1", "2", "1"] and len(started) == 3
    assert f"stage policy: trying again in a fresh process: {reason}" in caplog.text


# -- its environment


def test_tcmalloc_gives_it_its_memory_unless_its_user_chose(interpreter, monkeypatch):
    python = interpreter("exec /usr/bin/env cat /proc/self/maps")
    installed = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False
    ).stdout
    for user_choice, expected in ((None, "libtcmalloc" in installed), ("", False)):
        monkeypatch.delenv("LD_PRELOAD", raising=False)
        if user_choice is not None:
            monkeypatch.setenv("LD_PRELOAD", user_choice)
        lines = []
        with pytest.raises(ResourceError):
            run_call(call_by(python), on_line=lines.append)
        assert ("libtcmalloc" in "\n".join(lines)) == expected


@pytest.fixture
def temporary(monkeypatch):
    """The folder for temporary files, of this test alone; its path is short, for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_its_temporary_files_go_with_it_and_what_torch_compiles_stays(
    interpreter, temporary, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it once it compiled
    script = (
        'mkdir $TMPDIR/sub; touch "$TMPDIR/a socket"; echo $TORCHINDUCTOR_CACHE_DIR; ls $TMPDIR'
    )
    lines = []
    with pytest.raises(ResourceError):
        run_call(call_by(interpreter(script)), on_line=lines.append)
    assert lines == ["/caches/quiver/torchinductor", "a socket", "call.json", "lock", "sub"]
    assert os.listdir(temporary) == []


HOLDER = """
import time
from quiver.stages.core.run.folders import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_folders_of_dead_processes_are_swept(temporary):
    """Not those of live ones, without an owner, or of another user."""
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = [Path(process.stdout.readline().strip()) for process in holders]
    (temporary / "quiver-of-before").mkdir()
    (temporary / "other").mkdir()
    (temporary / "quiver-link").symlink_to(temporary / "other")
    kept = {"other", "quiver-link", "quiver-of-before", folders[0].name}
    for process in holders[1:]:
        process.send_signal(signal.SIGKILL)
        process.wait()
    if os.getuid() == 0:  # only root can give a folder to another user
        os.chown(folders[2], 12345, 12345)
        kept.add(folders[2].name)
    sweep_folders()
    assert set(os.listdir(temporary)) == kept
    with temporary_folder() as folder:
        assert folder.parent == temporary
    assert not folder.exists()
    holders[0].kill()
    holders[0].wait()


def test_stages_of_passes_get_segments_that_grow_unless_the_user_chose(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    grows = {
        stage: "PYTORCH_ALLOC_CONF" in allocator_environment(stage)
        for stage in ("optimize", "logprobs", "generate", "evaluate", "any")
    }
    assert [stage for stage, does in grows.items() if does] == ["optimize", "logprobs"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_ALLOC_CONF" not in allocator_environment("optimize")
