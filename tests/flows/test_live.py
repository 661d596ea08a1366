"""How far a run is, as a terminal and a log show it."""

import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from quiver.flows.look import live
from quiver.flows.look.live import StageProgress
from tests.flows.conftest import command_environment, left_behind
from tests.flows.test_embedded import SCRIPTED

REWARDS = """
import time
from pathlib import Path

def evenness(completion_ids, **_):
    time.sleep(600)
"""
PATIENT = """
from quiver.flows import stopping
from quiver.flows.cli import main as cli
stopping.STOP_SECONDS = 600
cli.main()
"""
HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"
PROGRAM = """
import logging, sys, time
from pathlib import Path
from quiver.flows.look.live import followed, shown_live

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
log = logging.getLogger("quiver.generate")
with shown_live(), followed("tiny · generate 1/2", {}, log.info) as hear:
    hear("generate: 256 of 1024 rows, 900 tokens/s")
    hear("a line of the engine, [bold]longer[/bold] than the terminal is wide: " + 60 * "x")
    while not Path("go").exists():
        time.sleep(0.01)
log.info("generate: 1024 of 1024 rows, 900 tokens/s")
"""


class Terminal:
    """A command in a terminal of 100 columns, and all that it has written there."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._reader, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, "TERM": "xterm-256color"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  it has no threads
        )
        os.close(terminal)
        self.written = b""

    def read_until(self, expected: str) -> None:
        """What is written until this stands there; AssertionError where the command ends first."""
        while expected not in self.text:
            assert self._read(), f"no {expected!r} in {self.text}"

    def type(self, keys: bytes) -> None:
        os.write(self._reader, keys)

    def end(self) -> int:
        """The exit code, once all is read."""
        while self._read():
            pass
        os.close(self._reader)
        return self.process.wait()

    def _read(self) -> bytes:
        try:
            chunk = os.read(self._reader, 65536)
        except OSError:  # nobody has the terminal open any more
            chunk = b""
        self.written += chunk
        return chunk

    @property
    def text(self) -> str:
        """Without colours and movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written.decode(errors="replace"))


def test_a_stage_has_a_bar_with_rows_speed_and_no_line_for_each_count(tmp_path):
    terminal = Terminal([sys.executable, "-c", PROGRAM], tmp_path, dict(os.environ))
    terminal.read_until("tiny · generate 1/2")
    terminal.read_until("256 of 1,024 rows, 900 tokens/s")
    terminal.read_until("a line of the engine, [bold]longer[/bold]")
    (tmp_path / "go").touch()
    assert terminal.end() == 0
    assert 1 == terminal.written.count(HIDDEN) == terminal.written.count(SHOWN)
    lines = re.split(r"[\r\n]+", terminal.text)
    assert "generate: 256 of 1024 rows, 900 tokens/s" not in lines
    # as one line, which the terminal itself wraps and a person copies whole
    assert any(line.endswith(f"terminal is wide: {60 * 'x'}") for line in lines)
    assert lines[-2] == "generate: 1024 of 1024 rows, 900 tokens/s", "later all is as before"


@pytest.mark.prefect
def test_a_run_shows_its_stages_and_ctrl_c_leaves_the_terminal_as_it_was(workplace):
    (workplace / "rewards.py").write_text(REWARDS)
    command = [sys.executable, "-c", PATIENT, "run", "recipe.toml", *SCRIPTED]
    terminal = Terminal(command, workplace, command_environment(workplace))
    terminal.read_until("getting ready")
    assert terminal.text.startswith("tiny: 1 iteration, in ")
    for label in ("import policy", "prompt 1/1", "generate 1/1", "reward 1/1"):
        terminal.read_until(f"tiny · {label}")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert 1 == terminal.written.count(HIDDEN) == terminal.written.count(SHOWN)
    end = terminal.text.rpartition("stopped; ")[2]
    assert end.startswith("3 new versions and the finished shards of unfinished versions are kept")
    assert "to continue: quiver run recipe.toml --set " in end
    assert left_behind(workplace) == []


def test_a_log_has_a_line_from_time_to_time_instead_of_each_count(monkeypatch):
    monkeypatch.setattr(live, "SECONDS_BETWEEN_LINES", 0.01)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("quiver"), "level", logging.INFO)
    child = logging.getLogger("quiver.optimize")
    with live.shown_live(), live.followed("tiny · optimize 1/2", {"epochs": 4}, child.info) as hear:
        while "so far" not in stream.getvalue():
            time.sleep(0.01)
        hear("step 0: loss 0.0000, grad_norm 1.389")
        hear("step 1: 1 of 2 micro-batches")
        while "1 of 4 steps" not in stream.getvalue():
            time.sleep(0.01)
    child.info("step 1: 2 of 2 micro-batches")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "tiny · optimize 1/2: 0 s so far"
    assert "step 0: loss 0.0000, grad_norm 1.389" in lines, "it tells more than how far it is"
    assert "step 1: 1 of 2 micro-batches" not in lines
    assert "step 1: 2 of 2 micro-batches" in lines, "outside nothing is left out"


def test_time_left_is_told_by_the_pace_since_the_first_count(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: seconds)
    monkeypatch.setattr(live, "time", clock)
    seconds = 100.0
    progress = StageProgress({})
    seconds = 190.0
    assert str(progress) == "1 min 30 s so far"
    progress.hear("generate: 256 of 2048 rows, 900 tokens/s")
    assert str(progress) == "256 of 2,048 rows, 900 tokens/s"
    seconds = 200.0
    progress.hear("generate: 512 of 2048 rows, 950 tokens/s")
    assert str(progress) == "512 of 2,048 rows, 950 tokens/s, 1 min 0 s left"
    seconds = 215.0
    assert str(progress) == "512 of 2,048 rows, 950 tokens/s, 45 s left"
    seconds = 500.0
    assert str(progress) == "512 of 2,048 rows, 950 tokens/s, 0 s left"


def test_speeds_of_processes_that_share_a_stage_are_summed():
    progress = StageProgress({})
    for line in (
        "generate: 20 of 84 rows, 900 tokens/s  [GPU 0]",
        "generate: 30 of 84 rows, 800 tokens/s  [GPU 1]",
        "generate: 40 of 84 rows, 700 tokens/s  [GPU 0]",
        "generate: 35 of 84 rows, 800 tokens/s  [GPU 1]",
    ):
        assert live.only_counts(line)
        progress.hear(line)
    assert str(progress).startswith("40 of 84 rows, 1500 tokens/s")
