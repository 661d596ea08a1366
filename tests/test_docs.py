"""The documents against the code: every file, command, option, target and name that they mention
exists, and the reverse."""

import ast
import doctest
import importlib
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from quiver.flows.cli.main import app
from quiver.flows.keys import sections
from quiver.flows.recipe import Recipe, load
from quiver.schemas.refs import KINDS
from quiver.stages.core.run.stage import MODULES as STAGE_MODULES
from quiver.stages.generate.engine import ENGINES
from quiver.stages.optimize.algorithms import ALGORITHMS
from quiver.stages.reward.functions import FUNCTIONS
from tests.each import check_each

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
READMES = [path for path in DOCUMENTS if path.name == "README.md"]
COMMANDS = set(get_command(app).commands)


MODULES = sorted(
    path
    for room in ("schemas", "stages", "flows", "deployments")
    for path in (ROOT / room).rglob("*.py")
    if path.read_text().strip()
)


def test_every_module_has_a_caption():
    """The first line of its docstring says what the module is, in a sentence or a title."""

    def check(path: Path) -> None:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, "no docstring"
        caption = docstring.split("\n\n")[0]
        assert 10 <= len(caption) <= 240, caption

    check_each(MODULES, check, relative)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """What a link may name in a document: its headings, in the form that GitHub gives them."""
    headings = re.findall(r"(?m)^#+ (.+)$", path.read_text())
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@cache
def options() -> set[str]:
    """The options of all commands, without their dashes."""
    commands = (get_command(app), *get_command(app).commands.values())
    return {
        name.lstrip("-")
        for command in commands
        for parameter in command.params
        for name in parameter.opts
    }


def test_what_a_document_names_exists():
    def check(path: Path) -> None:
        text = path.read_text()
        for link, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
            target = path.parent / link if link else path
            assert target.exists(), f"{path.name} links to {link}"
            assert not heading or heading in anchors(target), (
                f"{path.name} links to {link}#{heading}"
            )
        for picture in re.findall(r'<img src="([^"]+)"', text):
            assert (path.parent / picture).exists(), f"{path.name} shows {picture}"
        for command in re.findall(r"(?<!from )\bquiver ([a-z][a-z-]*)", text):
            assert command in COMMANDS, f"{path.name} names quiver {command}"
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for target in re.findall(r"\bmake ([a-z]+)[`\s]", re.sub(r"(?s)```python.*?```", "", text)):
            assert target in {*targets, "it", "a", "the", "room", "sure"}, (
                f"{path.name} names make {target}"
            )
        for name in re.findall(
            r"`((?:schemas|stages|flows|deployments|tests)/[\w./-]+\.\w+)`", text
        ):
            assert (ROOT / name).exists(), f"{path.name} names {name}"
        others = r"(?m)(?<![\w/])(?:prefect|docker|pip|torchrun|python -m) [^`\n]*"  # command lines of other programs
        served = re.findall(r'"--([a-z-]+)"', (ROOT / "deployments/reward_server.py").read_text())
        for option in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", re.sub(others, "", text)):
            others_own = {"spec", "result"}
            assert option in options() | {*served} | others_own, f"{path.name} names --{option}"

    check_each(DOCUMENTS, check, relative)


def test_a_readme_is_read_in_minutes():
    """A folder's README is at most two screens; longer pages are in deployments/docs."""

    def check(path: Path) -> None:
        limit = 150 if path.parent == ROOT else 100
        assert len(path.read_text().splitlines()) <= limit

    check_each(READMES, check, relative)


def test_a_readme_says_where_to_read_on():
    """And the files in the first column of its table are there."""

    def check(path: Path) -> None:
        text = path.read_text()
        assert re.search(r"\]\((?!https?:)[^)]+\)", text), "no link to another document"
        table = re.search(r"(?ms)^\| file \|.*?\n\n", text)
        for row in table[0].strip().splitlines()[2:] if table else ():
            for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
                assert (path.parent / name).exists(), f"{path.name} lists {name}"

    check_each(READMES, check, relative)


def test_every_document_is_linked_from_the_readme_beside_it():
    folder = ROOT / "deployments"
    links = set(re.findall(r"\]\((docs/[^)#]+)\)", (folder / "README.md").read_text()))
    assert links == {
        f"docs/{path.name}"
        for end in ("md", "ipynb")
        for path in (folder / "docs").glob(f"*.{end}")
    }


def test_every_kind_stage_engine_algorithm_and_reward_is_documented():
    everything = "\n".join(path.read_text() for path in DOCUMENTS)
    for name in (*KINDS, *STAGE_MODULES, *ENGINES, *ALGORITHMS, *FUNCTIONS):
        assert re.search(rf"\b{name}\b", everything), f"no document names {name}"
    for folder in (ROOT / "stages").iterdir():
        if (folder / "stage.py").exists():
            assert (folder / "README.md").exists(), f"{folder.name} has no README"


def test_every_recipe_is_a_recipe():
    def check(path: Path) -> None:
        assert isinstance(load(path), Recipe)

    check_each(sorted((ROOT / "deployments/recipes").glob("*.toml")), check, relative)


def test_the_recipe_in_the_readme_is_a_recipe():
    (block,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    recipe = Recipe.model_validate(tomllib.loads(block))
    assert recipe.data.limit == 64 and recipe.data.for_evaluation().source == "test.jsonl"


def merged(base: dict, more: dict) -> dict:
    """`more` over `base`, table by table."""
    return base | {
        key: merged(base.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in more.items()
    }


def test_each_piece_of_a_recipe_in_a_document_has_keys_and_values_that_there_are():
    """Blocks of TOML, and whole recipes that are typed into a file."""

    def check(path: Path) -> None:
        text = path.read_text()
        whole = {
            "run": "a",
            "policy": {"model": "m"},
            "data": {"source": "q.jsonl", "held_out": {"source": "t.jsonl"}},
            "reward": {"functions": [{"use": "numeric"}]},
        }
        pieces = re.findall(r"(?ms)^```toml\n(.*?)^```", text)
        pieces += re.findall(r"(?ms)^cat > \S+\.toml <<'END'\n(.*?)^END", text)
        for piece in pieces:
            Recipe.model_validate(merged(whole, tomllib.loads(piece)))

    check_each(DOCUMENTS, check, relative)


def test_names_of_other_systems_stand_beside_keys_that_there_are():
    """The last column of the table in coming-from.md: what is written with a dot is a key."""
    text = (ROOT / "deployments/docs/coming-from.md").read_text()
    rows = [line.split("|")[3] for line in text.split("## Rewards")[0].splitlines() if "|" in line]
    named = {name for row in rows[2:] for name in re.findall(r"`([a-z_.]+\w)[ `]", row)}
    known = {entry.name for section in sections() for entry in section.keys}
    known |= {section.name for section in sections()}
    assert len(named) > 30 and not named - known


def test_the_reward_in_the_readme_scores():
    (code,) = re.findall(r"```python\n(def score.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["score"](["it is 12", "no"], [12, 12], prompts=None) == [1.0, 0.0]


@pytest.mark.parametrize(
    "module",
    ["quiver.schemas.errors", "quiver.schemas.refs", "quiver.stages.core.config", "quiver.stages.core.store.tags",
     "quiver.stages.reward.functions", "quiver.stages.reward.functions.answers", "quiver.stages.reward.tables",
     "quiver.stages.optimize.algorithms", "quiver.stages.evaluate.estimators", "quiver.stages.core.servers",
     "quiver.stages.reward.servers.dialects.rows", "quiver.stages.reward.servers.dialects.judge", "quiver.stages.reward.functions.programs",
     "quiver.deployments.recipes.larger", "quiver.deployments.recipes.t5_digits"],
)  # fmt: skip
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0 and result.failed == 0
