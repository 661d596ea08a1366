"""Paths of a recipe as a worker elsewhere needs them: absolute, there, and where it can see them;
and nothing else is touched."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from quiver.deployments.paths import PATHS, check_visible, make_absolute
from quiver.flows.keys import sections
from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from tests.flows.conftest import QUICK, write_recipe
from tests.writing import run_iteration

DEMO = Path(__file__).parents[2] / "deployments/recipes/demo.toml"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(write_recipe(tmp_path / "work"))
    return tmp_path / "work"


def resolved(*settings: str) -> dict:
    recipe, _ = make_absolute(load("recipe.toml", settings), "a pool")
    return recipe.model_dump(mode="json", exclude_unset=True)


def test_every_path_is_absolute_and_all_else_is_as_it_was(folder):
    before = load("recipe.toml").model_dump(mode="json", exclude_unset=True)
    after = resolved()
    expected = json.loads(json.dumps(before))
    expected["store"] = f"{folder}/store"
    expected["policy"]["model"] = f"{folder}/model"
    expected["data"]["source"] = f"{folder}/questions.jsonl"
    expected["data"]["held_out"]["source"] = f"{folder}/held_out.jsonl"
    expected["reward"]["functions"][0]["use"] = f"{folder}/rewards.py:evenness"
    assert after == expected


def test_it_means_the_same_from_another_folder(folder, tmp_path, monkeypatch):
    recipe, paths = make_absolute(load("recipe.toml"), "a pool")
    monkeypatch.chdir(tmp_path)
    assert make_absolute(recipe, "a pool") == (recipe, paths)
    assert recipe.generate_config(1).seed == 7, (
        "the run's own seed still goes where a section has none"
    )
    assert not recipe.online


def test_a_deployed_run_finds_what_the_shell_made(folder):
    """Keys hold the bytes of a file and its name, not its folder: with absolute paths every stage
    is "already done"."""
    near = load("recipe.toml", [*QUICK, "generate.samples_per_prompt=2", "iterations=1"])
    far, _ = make_absolute(near, "a pool")

    made = run_iteration(near, Store(near.store))
    assert run_iteration(far, Store(far.store)) == made
    assert Store(far.store).numbers("tiny", "policy") == [0, 1]


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("prompt.template='model/chat_template.jinja'", ("prompt", "template")),
        ("placement.python.generate='bin/python'", ("placement", "python", "generate")),
        ("optimize.algorithm='rewards.py:MINE'", ("optimize", "algorithm")),
        (
            "optimize={algorithm='ppo', critic='model', critic_from='model'}",
            ("optimize", "critic_from"),
        ),
        ("data.source='datasets:./model'", ("data", "source")),
        ("data.source='datasets:model'", ("data", "source")),
        ("data.held_out.source='datasets:./model'", ("data", "held_out", "source")),
        ("optimize.tracker_folder='model'", ("optimize", "tracker_folder")),
        *(
            (f"evaluate.generate={{turns={{{turns}}}}}", ("evaluate", "generate", "turns", *key))
            for turns, key in [
                ("environment='rewards.py:Guess'", ["environment"]),
                ("tools=['python', 'rewards.py:look']", ["tools", 1]),
                ("tools=['python'], parser='rewards.py:parse'", ["parser"]),
            ]
        ),
        ("reward.models=[{model='model'}]", ("reward", "models", 0, "model")),
        (
            "reward.functions=[{use='similarity', arguments={model='model'}}]",
            ("reward", "functions", 0, "arguments", "model"),
        ),
    ],
)
def test_paths_in_other_sections(folder, setting, key):
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "model/chat_template.jinja").touch()
    found = resolved(setting)
    for part in key:
        found = found[part]
    found = found.removeprefix("datasets:")
    assert found.startswith(f"{folder}/") and Path(found.partition(":")[0]).exists()
    assert (
        not found.endswith(os.path.basename(os.path.realpath(sys.executable)))
        or "bin/python" in found
    ), "links are kept"


@pytest.mark.parametrize(
    "setting",
    ["policy.model='some/model'", "policy.model='package:pkg/model.gguf'", "data.source='datasets:some/rows'",
     "data.source='quiver.deployments.recipes.larger:rows'", "reward.functions=[{use='exact_match'}]", "optimize.algorithm='dapo'"],
)  # fmt: skip
def test_names_that_are_no_paths_are_left_alone(folder, setting):
    section, name = setting.partition("=")[0].split(".")
    plain = load("recipe.toml", [setting]).model_dump(mode="json", exclude_unset=True)
    assert resolved(setting)[section][name] == plain[section][name]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("data.source='gone.jsonl'", "data.source"),
        ("policy.model='./gone'", "policy.model"),
        ("reward.functions=[{use='gone.py:score'}]", "reward.functions.0.use"),
        ("data.source='only_here:rows'", "name its file, only_here.py:rows"),
    ],
)
def test_what_is_not_there_is_refused(folder, setting, told):
    (folder / "only_here.py").touch()
    with pytest.raises(ConfigError, match=r"no such file|not installed") as error:
        resolved(setting)
    assert told in str(error.value)


def test_a_container_sees_what_is_mounted_under_the_same_path(folder):
    _, paths = make_absolute(load("recipe.toml"), "a pool")
    check_visible(paths, (str(folder.parent),), "a pool")
    check_visible({"store": Path("/srv/quiver/store")}, (), "a pool")
    for private in (folder / "store", Path.home() / "store", Path("/home/somebody/store")):
        with pytest.raises(ConfigError, match="cannot see"):
            check_visible({"store": private}, ("/mnt/elsewhere",), "a pool")


def test_a_mount_shows_no_folder_whose_name_begins_like_its_own():
    with pytest.raises(ConfigError, match="cannot see"):
        check_visible({"store": Path("/home/ada2/store")}, ("/home/ada",), "a pool")


def test_each_path_must_be_seen_whatever_stands_before_it(folder):
    paths = {"data.source": folder / "questions.jsonl", "policy.model": Path.home() / "model"}
    with pytest.raises(ConfigError, match=r"policy\.model"):
        check_visible(paths, (str(folder),), "a pool")


def test_environments_and_tools_by_their_files(tmp_path):
    (tmp_path / "game.py").write_text("")
    turns = {"tools": ["game.py:look", "python", "mcp:game --fast"], "parser": "game.py:parse"}
    recipe = load(DEMO, [f"generate.turns={_inline(turns)}"])
    resolved, paths = make_absolute(recipe, "there", folder=tmp_path, must_exist=False)
    assert resolved.generate.turns.tools == (
        f"{tmp_path}/game.py:look",
        "python",
        "mcp:game --fast",
    )
    assert paths["generate.turns.tools.0"] == paths["generate.turns.parser"] == tmp_path / "game.py"
    recipe = load(DEMO, ["generate.turns.environment=gymnasium:Some-v0"])
    assert make_absolute(recipe, "there", must_exist=False)[0].generate.turns.environment == (
        "gymnasium:Some-v0"
    )


@pytest.mark.parametrize("must_exist", [True, False])
def test_models_and_datasets_are_looked_for_in_the_folder(
    folder, tmp_path, monkeypatch, must_exist
):
    """`a/b` may be a hub id; the folder that is named tells, not that of the command."""
    (folder / "some/model").mkdir(parents=True)
    (folder / "some/rows").mkdir()
    settings = ["policy.model='some/model'", "data.source='datasets:some/rows'"]
    options = {"must_exist": must_exist}
    loaded = load("recipe.toml", settings)
    image, _ = make_absolute(loaded, "a pool", folder="/not/here", must_exist=False)
    assert image.policy.model == "/not/here/some/model"
    monkeypatch.chdir(tmp_path)
    recipe, paths = make_absolute(loaded, "a pool", folder=folder, **options)
    assert recipe.policy.model == str(paths["policy.model"]) == f"{folder}/some/model"
    assert recipe.data.source == f"datasets:{folder}/some/rows"
    monkeypatch.chdir(folder)
    (tmp_path / "empty").mkdir()
    loaded = load("recipe.toml", ["policy.model='some/model'"])
    recipe, _ = make_absolute(loaded, "a pool", folder=tmp_path / "empty", must_exist=False)
    assert recipe.policy.model == "some/model"


@pytest.mark.parametrize("python", ["/no/such/python", "python3.11"])
def test_the_interpreter_of_a_stage_in_a_pool_is_its_hosts(folder, python):
    setting = f"placement.python.generate={python!r}"
    recipe, paths = make_absolute(load("recipe.toml", [setting, "placement.generate=x"]), "a pool")
    assert recipe.placement.python == {"generate": python}
    assert "placement.python.generate" not in paths


def _inline(section: dict) -> str:
    """A section as a table of TOML in one line."""
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in section.items()) + "}"


def test_the_folder_of_trackers_need_not_be_there_yet(folder):
    recipe, paths = make_absolute(load("recipe.toml", ["optimize.tracker_folder=logs"]), "a pool")
    assert recipe.optimize.tracker_folder == f"{folder}/logs"
    assert paths["optimize.tracker_folder"] == folder / "logs"


NO_PATHS = {
    *("run", "report_url", "policy.arguments", "policy.source_hash", "data.split", "data.images"),
    *("data.source_sha256", "generate.code_sha256", "generate.turns.parser_fingerprint"),
    *("reward.models.question", "reward.servers.urls", "optimize.algorithm_source"),
    "placement.generate",
}
"""Keys whose meaning speaks of files, and that name none."""


def test_every_field_that_may_name_a_file_is_known():
    """A key of a recipe whose meaning speaks of files, folders or code is in the table of paths,
    and so is the same key for the held-out rows."""
    words = re.compile(r"\bfiles?\b|folder|director|\bpath|interpreter|module:", re.IGNORECASE)
    found = {
        key.name
        for section in sections()
        for key in section.keys
        if re.search("text|table", key.type) and words.search(key.description)
    }
    known = {key.replace(".*", "") for key in PATHS}
    assert found - known == NO_PATHS
    for of_rows, section in (("evaluate.generate.", "generate."), ("data.held_out.", "data.")):
        keys = {key.removeprefix(section) for key in found - NO_PATHS if key.startswith(section)}
        assert keys and {of_rows + key for key in keys} <= known
