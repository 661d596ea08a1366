"""Child processes: nobody is left behind, whatever happens to the parent; some are there before their call."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from schemas.errors import ResourceError
from stages.common import child
from stages.common.process import Call, run_stage
from tests.benchmarks.made import make_prompts, make_rollouts, tiny_policy

# A child that starts a child of its own, both ignoring SIGTERM, and says both ids.
STUBBORN = """
    import os, signal, subprocess, sys, time
    from stages.common.child import watch_lifeline
    watch_lifeline(int(sys.argv[sys.argv.index("--lifeline") + 1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    other = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
    print("ids", os.getpid(), other.pid, flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.fixture
def stubborn(tmp_path) -> list[str]:
    script = tmp_path / "stubborn.py"
    script.write_text(textwrap.dedent(STUBBORN))
    return [sys.executable, str(script)]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.5)


def follow(command: list[str], on_line, timeout: float | None = None) -> tuple[int, list[str]]:
    with child.started(command, os.environ) as process:
        return child.follow(process, "test", on_line, timeout)


def test_a_failing_caller_leaves_nobody(stubborn):
    pids: list[int] = []

    def fail(line: str) -> None:
        pids.extend(map(int, line.split()[1:]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(stubborn, fail)
    assert len(pids) == 2 and gone(pids)


def test_a_time_limit_ends_the_group(stubborn):
    pids: list[int] = []
    with pytest.raises(ResourceError, match="limit of 3 s") as caught:
        follow(stubborn, lambda line: pids.extend(map(int, line.split()[1:])), 3)
    assert "placement.timeout_seconds" in caught.value.next
    assert len(pids) == 2 and gone(pids)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_nobody(stubborn, tmp_path, end):
    out = tmp_path / "ids"
    parent_code = f"""
        import os, sys
        from stages.common import child
        with child.started({stubborn!r}, os.environ) as process:
            child.follow(process, "test", lambda line: open({str(out)!r}, "w").write(line + chr(10)))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent_code)])
    while not out.exists() or not out.read_text().endswith("\n"):
        assert parent.poll() is None
        time.sleep(0.05)
    pids = list(map(int, out.read_text().split()[1:]))
    assert all(map(alive, pids))
    parent.send_signal(end)
    parent.wait(10)
    assert gone(pids)


def test_a_grandchild_that_holds_the_pipe_is_ended(tmp_path):
    """The stage is done, something that it started is not: the caller goes on, and the other is killed."""
    code = """
        import subprocess, sys
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("ids", other.pid, flush=True)
    """
    script = tmp_path / "leaving.py"
    script.write_text(textwrap.dedent(code))
    pids: list[int] = []
    code, _ = follow([sys.executable, str(script)], lambda line: pids.append(int(line.split()[1])))
    assert code == 0 and gone(pids)


def test_only_the_last_state_of_a_progress_bar_is_a_line():
    code = "import sys; sys.stdout.write('10%\\r50%\\r100%\\nnext\\n\\nlast without end')"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert list(child.lines_of(other, "test", None)) == ["100%", "next", "last without end"]
    other.wait()
    other.stdout.close()


def test_a_child_that_never_stops_writing_meets_its_time_limit():
    other = subprocess.Popen(["yes", "x" * 1000], stdout=subprocess.PIPE)
    with pytest.raises(ResourceError, match="limit of 1 s"):
        for _ in child.lines_of(other, "test", 1):
            pass
    other.kill()
    other.wait()
    other.stdout.close()


def test_a_line_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(child, "_LONGEST_LINE", 1000)
    other = subprocess.Popen([sys.executable, "-c", "print('a' * 10_000_000 + 'b')"], stdout=subprocess.PIPE)
    (line,) = child.lines_of(other, "test", None)
    assert line.endswith("b") and len(line) < 200_000
    other.wait()
    other.stdout.close()


@pytest.fixture
def early():
    """Starts a child early; at the end it is gone."""
    children = []

    def begin(stage: str, config: dict) -> subprocess.Popen:
        child.begin_early(stage, config)
        children.append(child._early[stage, None, False].process)
        return children[-1]

    yield begin
    child.end_early()
    assert gone([process.pid for process in children])


def test_a_child_that_is_there_early_is_told_its_call(early, store, tmp_path):
    """One waits of a kind; a dead one is replaced, and one that began in another environment is left alone."""
    (tmp_path / "seen.py").write_text(
        "import os\n\n\ndef one(completions, **_):\n    return [float(os.environ.get('HINT', 0))] * len(completions)\n"
    )
    rollouts = make_rollouts(store, tiny_policy(store), 4, 8, 8, 2, asked=make_prompts(store, 2))
    config = {"functions": [{"use": f"{tmp_path}/seen.py:one"}]}
    call = Call("reward", config, str(store.path), {"rollouts": str(rollouts.ref)}, force=True)
    first = early("reward", config)
    assert early("reward", config) is first
    assert run_stage(call, env={"HINT": "0.5"}).metrics["reward_mean"] == 0.5
    assert first.poll() is None
    assert run_stage(call).metrics["reward_mean"] == 0
    assert first.returncode == 0, "it was this one that did it"
    dead = early("reward", config)
    dead.kill()
    dead.wait()
    assert run_stage(call).metrics["reward_mean"] == 0


def test_what_can_not_be_prepared_for_is_told_by_the_call(early, store):
    early("generate", {"engine": "vllm", "device": "no device"})
    call = Call("generate", {"engine": "scripted", "options": {"script": "nowhere"}}, str(store.path))
    spec = {**call.__dict__, "refs": {"prompts": "a/prompts@1", "policy": "a/policy@0"}}
    with child.taken("generate") as mine:
        mine.tell(spec)
        child.follow(mine.process, "generate", print)
        assert mine.answer()["error"]["code"] == "E-LINEAGE"


def test_who_begins_with_its_call_prepares_for_nothing(store):
    """Its phases are its own: a bad config is its error, never a death without an answer."""
    spec = {**Call("generate", {"engine": "vllm", "device": "no device"}, str(store.path)).__dict__}
    with child.Child("generate") as mine:
        mine.tell(spec)
        code, _ = child.follow(mine.process, "generate", print)
        assert (code, mine.answer()["error"]["code"]) == (2, "E-CONFIG")


@pytest.mark.vllm
def test_what_generate_prepares_is_the_engine():
    code = """
        import sys
        from stages.generate.stage import Config, prepare
        prepare(Config(engine="scripted", options={"script": "echo"}))
        before = "vllm" in sys.modules
        prepare(Config(engine="vllm"))
        print(before, "vllm.entrypoints.llm" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["False", "True"]
