"""What somebody meets who uses the command line for the first time: what is wrong is told at once,
by the keys of the recipe, advice does what it says, and a shell completes words."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from quiver.flows.cli.main import app
from quiver.flows.cli.running import check, run
from quiver.flows.cli.shared import open_store, read_recipe
from quiver.schemas.errors import UNCHANGED, ConfigError, QuiverError
from quiver.stages.core.store import Store
from tests.flows.conftest import command_environment, command_line, write_recipe

WRONG = [
    (
        "data.prompt=problem",
        "data.prompt problem",
        "questions.jsonl has no such column; it has question, answer",
        "set data.prompt to one of them",
    ),
    (
        "data.held_out.prompt=problem",
        "data.held_out.prompt problem",
        "held_out.jsonl has no such column; it has question, answer",
        "set data.held_out.prompt to one of them",
    ),
    (
        "reward.functions=[{use='rewards.py:evennes'}]",
        "reward.functions.use rewards.py:evennes",
        "did you mean evenness?",
        "correct reward.functions.use",
    ),
    (
        "reward.functions=[{use='rewards.py:strict'}]",
        "reward function strict",
        "needs answers, which is neither a column",
        "rename the column",
    ),
    (
        "reward.functions=[{use='rewards.py:strict', arguments={answers=1, tolerance=2}}]",
        "reward function strict",
        "takes no argument tolerance",
        "correct arguments",
    ),
    (
        "reward.functions=[{use='length', arguments={target=true}}]",
        "reward function length",
        "target is a number, true or false was given",
        "correct arguments",
    ),
    ("reward.functions=[{use='broken.py:score'}]", "broken.py", "SyntaxError", "python broken.py"),
    (
        "reward.functions=[{use='os:system'}]",
        "reward.functions.use os",
        "No module named 'os' with a source file of its own",
        "import os",
    ),
    ("iterations=3\nseed=1", "recipe", "iterations: Input should be a valid integer", "iterations"),
    ("store=/proc/none", "store /proc/none", "cannot be used", "name another folder"),
    ("reward.functions=[{use='lenght'}]", "lenght", "did you mean length?", "quiver rewards"),
    ("data.source=~nobody9/a.jsonl", "~nobody9/a.jsonl", "there is no file", "correct the source"),
    ("policy.model=./gone", "policy.model ./gone", "no such directory", "correct policy.model"),
    ("generate.engine=own.py:Engine", "generate.engine own.py", "there is no file", "correct"),
    ("evaluate.generate.engine=own.py:Engine", "generate.engine", "there is no file", "correct"),
    ("policy.model=rewards.py:gone", "policy.model", "has no function gone; it has", "correct"),
    ("generate.engine=rewards.py:Gone", "generate.engine", "has no class Gone; it has", "correct"),
    ("prompt.template=gone.jinja", "prompt.template gone.jinja", "No such file", "name a jinja"),
    (
        "optimize={trackers=['wandb'], tracker_folder='logs'}",
        "optimize.trackers wandb",
        "wandb is not installed here",
        "pip install wandb",
    ),
    (
        "optimize={trackers=['tensorbord'], tracker_folder='logs'}",
        "optimize.trackers 'tensorbord'",
        "did you mean tensorboard?",
        "correct optimize.trackers",
    ),
    (
        "optimize={trackers=['tensorboard'], tracker_folder='recipe.toml'}",
        "optimize.tracker_folder recipe.toml",
        "is a file, not a folder",
        "name another folder",
    ),
    ("learning_rate=1e-5", "recipe", "mean optimize.learning_rate?", "keys optimize.learning_rate"),
    ("store=~nobody9/store", "store ~nobody9", "home directory", "name another folder"),
    (
        "reward.functions={use='rewards.py:evenness'}",
        "recipe",
        "is one table, expected a list of them: write [[reward.functions]]",
        "quiver keys reward.functions",
    ),
    (
        "reward.functions=[{use='environment'}]",
        "reward.functions environment",
        "there is no [generate.turns]",
        "name a generate.turns.environment",
    ),
    ("store=questions.jsonl", "store", "is a file, not a folder", "name a folder in --store"),
]
"""A setting; the error's object, message and next step."""
REWARDS = """

def strict(completions, answers):
    return [0.0] * len(completions)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_recipe(tmp_path_factory.mktemp("first"))
    with (folder / "rewards.py").open("a") as file:
        file.write(REWARDS)
    (folder / "broken.py").write_text("def score(:\n")
    (folder / "mine").mkdir()
    (folder / "mine/helper.py").write_text(
        "def score(completions):\n    return [1] * len(completions)\n"
    )
    (folder / "mine/rewards.py").write_text("from .helper import score\n")
    (folder / "untried.py").write_text("import nowhere\n\ndef score(completions): ...\n")
    return folder


@pytest.mark.parametrize("called", [check, run])
def test_what_paths_columns_and_names_tell_is_told_before_anything_runs(
    folder, monkeypatch, called
):
    """No store is made."""
    monkeypatch.chdir(folder)
    for setting, about, message, next_step in WRONG:
        with pytest.raises(QuiverError) as caught:
            called(Path("recipe.toml"), settings=[setting])
        error = caught.value
        assert error.exit_code == 2 and error.state == UNCHANGED, setting
        assert about in error.object, setting
        assert message in error.message and "[Errno" not in error.message, setting
        assert next_step in error.next, setting
    assert not (folder / "store").exists()


def test_it_is_told_before_prefect_and_torch_are_imported_and_the_first_line_at_once(folder):
    program = (
        "import sys; sys.argv = ['quiver', 'run', 'recipe.toml', '--set', 'data.prompt=x'];"
        "from quiver.flows.cli import main as cli\n"
        "try: cli.main()\n"
        "finally: print({'prefect', 'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "set()\n")
    first, error, *_ = done.stderr.splitlines()
    assert first == f"tiny: 2 iterations, in {folder / 'store'}"
    assert error.startswith("E-CONFIG data.prompt x")


def test_check_says_what_a_run_would_find(folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    columns = ["question", "answer"]
    code, plain = command("check", "recipe.toml")
    assert code == 0 and plain == {
        "run": "tiny",
        "iterations": 2,
        "store": "store",
        "columns": {"data": columns, "data.held_out": columns},
        "unused": [],
        "prompts": plain["prompts"],
        "tried": [],
        "finished": {},
        "warnings": [],
    }
    untried = ["--set", "reward.functions=[{use='untried.py:score'}]"]
    neighbour = ["--set", "reward.functions=[{use='mine/rewards.py:score'}]"]
    assert command("check", "recipe.toml", *untried)[0] == 0
    code, refused = command("check", "recipe.toml", "--try", *untried)
    assert code == 2 and "No module named 'nowhere'" in refused["error"]["message"]
    assert command("check", "recipe.toml", "--try", *neighbour)[0] == 0, "its helper.py is found"
    assert not (folder / "store").exists(), "and nothing is written"


def test_what_was_made_before_an_error_is_said(folder, command, monkeypatch):
    """An evaluation's base model and prompts are made before its reward is tried."""
    untried = ["--set", "reward.functions=[{use='untried.py:score'}]", "--store", "half"]
    monkeypatch.chdir(folder)
    code, answer = command("evaluate", "recipe.toml", *untried)
    sources = "tiny.eval/prompts@1 and what it was made of"
    assert code == 2
    assert answer["error"]["state"] == f"{sources} are kept; nothing was generated."
    assert Store(folder / "half").numbers("tiny", "policy") == [0], "of the run itself"


def test_which_store_is_meant(folder, monkeypatch):
    """--store, then QUIVER_STORE, then the recipe's; a setting counts as an option."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("QUIVER_STORE", "by-variable")
    for store, settings, expected in (
        (None, [], "by-variable"),
        ("by-option", [], "by-option"),
        (None, ["store='by-setting'"], "by-setting"),
    ):
        assert read_recipe(Path("recipe.toml"), settings, store).store == expected
    for variable, expected in (("by-variable", "by-variable"), ("", "store")):
        monkeypatch.setenv("QUIVER_STORE", variable)
        with pytest.raises(ConfigError) as caught:
            open_store(None)
        assert caught.value.object == f"store {folder / expected}"


def test_a_kind_alone_is_its_latest_version_where_nothing_is_changed(
    finished, command, monkeypatch
):
    monkeypatch.chdir(finished)
    monkeypatch.setenv("QUIVER_STORE", "finished")
    latest = command("ls")[1]["versions"][-1]["ref"]
    kind = latest.partition("@")[0]
    assert command("show", kind, "-n", "0")[1]["ref"] == latest
    assert command("lineage", kind)[1]["ref"] == latest
    assert command("diff", kind, latest)[1]["changed"] == {}
    for words in (["rm", kind], ["tag", "best", kind]):
        assert command(*words)[0] == 2, "none is deleted by a short name"


UNUSABLE = {
    "report RUN -o nowhere/report.html": "No such file",
    "report RUN -o .": "Is a directory",
    f"report RUN -o {'n' * 300}": "too long",
    "ls --store store/store.json": "not a folder",
    f"ls --store {'n' * 300}": "too long",
    "ls --store ~nobody-here": "home",
}


def test_paths_that_can_not_be_used_are_told(finished, tmp_path, command, monkeypatch):
    shutil.copytree(finished / "finished", tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    for line, problem in UNUSABLE.items():
        code, answer = command(*line.replace("RUN", "golden").split())
        assert (code, answer["error"]["code"]) == (2, "E-CONFIG"), line
        assert problem in answer["error"]["message"]


def test_the_help_is_whole_in_80_columns(tmp_path):
    for name, command in get_command(app).commands.items():
        summary = command.get_short_help_str(64)
        assert summary and not summary.endswith("..."), f"{name}: {summary}"
        assert summary.endswith("."), f"{name}: {summary}"
    environment = {**command_environment(tmp_path), "COLUMNS": "80"}
    outputs = [
        subprocess.run(
            [*command_line(), option],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout
        for option in ("-h", "--help", "--version")
    ]  # fmt: skip
    assert outputs[0] == outputs[1] and "..." not in outputs[0].partition("Commands:")[2]
    assert re.fullmatch(r"quiver \d+\.\d+\.\d+\n", outputs[2])


# -- words that are not finished, asked as a shell asks

EACH = """
import contextlib, io, json, os, sys
from quiver.flows.cli import main as cli
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
def completing(finished, tmp_path_factory) -> Path:
    completing = tmp_path_factory.mktemp("completion")
    shutil.copytree(finished / "finished", completing / "store")
    shutil.copytree(finished / "finished", completing / "other")
    store = Store(completing / "store")
    store.tag("golden", "in-use", store.resolve("golden/policy@1"), why="a test")
    (completing / "recipe.toml").write_text('store = "other"\n')
    return completing


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


def test_references_runs_tags_and_keys_are_offered(completing):
    (
        runs, kinds, versions, in_view, dataset, tagged, by_hand, keys, setting, nowhere,
    ) = offered(
        completing,
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
