"""What a shell offers where a word is not finished, asked as a shell asks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from quiver.flows.cli import app
from quiver.stages.common.store import Store

EACH = """
import contextlib, io, json, os, sys
from quiver.flows import cli
answers = []
for words in json.loads(sys.argv[1]):
    os.environ["COMP_WORDS"] = "\\n".join(["quiver", *words])
    os.environ["COMP_CWORD"] = str(len(words))
    text = io.StringIO()
    sys.argv = ["quiver"]
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main()
    answers.append(text.getvalue().split())
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    shutil.copytree(finished / "finished", folder / "store")
    shutil.copytree(finished / "finished", folder / "other")
    store = Store(folder / "store")
    store.tag("golden", "in-use", store.resolve("golden/policy@1"), why="a test")
    (folder / "recipe.toml").write_text('store = "other"\n')
    return folder


def offered(folder: Path, *commands: list[str]) -> list[list[str]]:
    """What bash is offered for the last word of each."""
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(commands)],
        cwd=folder,
        env={**os.environ, "_QUIVER_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_references_runs_tags_and_keys_are_offered(folder):
    (
        runs, kinds, versions, in_view, dataset, tagged, by_hand, keys, setting, nowhere,
    ) = offered(
        folder,
        ["ls", "go"],
        ["show", "golden/r"],
        ["show", "golden/policy"],
        ["view", "golden/roll"],
        ["deploy", "--on", "golden/policy"],
        ["history", ""],
        ["generate", "recipe.toml", "--policy", "golden/policy@"],
        ["keys", "optimize.audit"],
        ["run", "recipe.toml", "--set", "optimize.learning_r"],
        ["show", "--store", "none", "golden"],
    )  # fmt: skip
    assert runs == ["golden", "golden.ref"]
    assert kinds == ["golden/rollouts", "golden/rewards"]
    assert "golden/policy@in-use" in versions
    assert versions[:4] == [f"golden/policy@{name}" for name in ("latest", 2, 1, 0)]
    assert (in_view, dataset) == (["golden/rollouts"], ["golden/policy"])
    assert "golden/policy@in-use" in tagged and "held/rollouts@" not in "".join(tagged)
    assert "golden/policy@in-use" not in by_hand and by_hand[0] == "golden/policy@latest"
    assert {"optimize.audit", "optimize.audit.enabled"} <= {*keys}
    assert setting == ["optimize.learning_rate="]
    assert nowhere == []


def test_every_command_offers_references_where_it_takes_one():
    missing = [
        f"{name} {parameter.name}"
        for name, command in get_command(app).commands.items()
        for parameter in command.params
        if "run/kind" in (parameter.help or "").lower() or "REF" in (parameter.metavar or "")
        if not parameter._custom_shell_complete
    ]
    assert missing == []
